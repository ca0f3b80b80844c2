"""Which columns a dataset delivers, and as what: `columns=` and `decode=` resolved into outputs.

Rules by name, and what `decode="auto"` does with the columns of a tar, are here; the named functions of bytes
are `dataflow.decode.values.CONVERTERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from dataflow.batch.fixed import ArrayOutput, RowsOutput
from dataflow.batch.images import FreeImageOutput, ImageOutput
from dataflow.batch.objects import ObjectOutput
from dataflow.batch.optional import Optional, mask_of
from dataflow.batch.output import Output
from dataflow.batch.ragged import Pad, PaddedOutput, RaggedOutput
from dataflow.decode.image import Image
from dataflow.decode.values import CONVERTERS, parse_floats, parse_ints
from sharding.blocks import ColumnSpec, Format, spec_text

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
TEXT_SUFFIXES = ("txt", "text", "transcript")
INT_SUFFIXES = ("cls", "cls2", "class", "count", "index", "inx", "id")
JSON_SUFFIXES = ("json", "jsn")
FLOAT_SUFFIXES = ("float", "flt")
UNSAFE_SUFFIXES = ("pyd", "pkl", "pickle", "pth", "pt")
KEY_COLUMNS = ("__key__", "__url__")


def resolve_outputs(
    schema: Mapping[str, ColumnSpec],
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
    decode: object,
    *,
    codec: Format,
) -> tuple[Output, ...]:
    """Decide each output column from the dataset's schema and the user's `columns=` and `decode=`.

    Raises `ValueError` for a column that does not exist, a decoder that does not fit, and content
    that is never decoded unless asked for (pickles).
    """
    chosen = _chosen(schema, columns)
    rules = decode if isinstance(decode, Mapping) else {}
    unknown = sorted(set(rules) - set(chosen) - set(schema))
    if unknown:
        raise ValueError(f"decode names {unknown[0]!r}, which is no column; columns: {_listed(schema)}")
    outputs: list[Output] = []
    for name, sources in chosen.items():
        rule = rules.get(name, "auto") if decode is not None else None
        if decode not in (None, "auto") and not isinstance(decode, Mapping):
            rule = decode
        specs = [schema_of(schema, source) for source in sources]
        if not isinstance(rule, Optional):
            outputs.append(_resolve(name, sources, specs, rule, codec))
            continue
        # What some lack no longer keeps the others from being of one length.
        specs = [replace(spec, optional=False) for spec in specs]
        output = _resolve(name, sources, specs, rule.rule, codec)
        outputs.append(output.optional(rule.default, has_mask=rule.mask))
        if rule.mask:
            outputs.append(mask_of(output, [*chosen]))
    return tuple(replace(output, is_member=codec.columns_are_extensions) for output in outputs)


def schema_of(schema: Mapping[str, ColumnSpec], name: str) -> ColumnSpec:
    """The spec of a column, the sample's own key included."""
    return ColumnSpec("text") if name in KEY_COLUMNS else schema[name]


def _listed(schema: Mapping[str, ColumnSpec]) -> str:
    return ", ".join(f"{name} ({spec_text(spec)})" for name, spec in schema.items()) or "none"


def _chosen(
    schema: Mapping[str, ColumnSpec], columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    if isinstance(columns, str):
        raise ValueError(f"columns must be a list or a mapping, got the string {columns!r}")
    if columns is None:
        chosen: dict[str, tuple[str, ...]] = {name: (name,) for name in schema}
    elif isinstance(columns, Mapping):
        chosen = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in columns.items()}
    else:
        chosen = {name: (name,) for name in columns}
    for name, sources in chosen.items():
        missing = [s for s in sources if s not in schema and s not in KEY_COLUMNS]
        if missing or not sources:
            raise ValueError(
                f"column {(missing or [name])[0]!r} does not exist; the dataset has: {_listed(schema)}"
            )
    if not chosen and columns is None:
        raise ValueError(
            "the dataset has no column of a type that can be delivered (docs/reference/formats.md lists them)"
        )
    if not chosen:
        raise ValueError("columns is empty; leave it out for all columns")
    return chosen


def _resolve(
    name: str, sources: tuple[str, ...], specs: list[ColumnSpec], rule: object, codec: Format
) -> Output:
    if len(sources) > 1:
        return _stacked(name, sources, specs, rule)
    spec, source = specs[0], sources[0]
    if spec.kind == "fixed":
        return _fixed(name, source, spec, rule, codec)
    if rule == "auto":
        rule = _auto_rule(source, spec, codec)
    if isinstance(rule, Image):
        return _image(name, source, rule)
    if isinstance(rule, Pad):
        return PaddedOutput(name=name, sources=sources, dtype=spec.dtype, source_dtype=spec.dtype, pad=rule)
    if rule is None or rule in ("bytes", "raw", "list"):
        return _raw(name, source, spec)
    if callable(rule):
        return ObjectOutput(name=name, sources=sources, convert=rule)
    if rule in ("int", "float"):
        parse = parse_ints if rule == "int" else parse_floats
        dtype = "int64" if rule == "int" else "float64"
        return ArrayOutput(name=name, sources=sources, dtype=dtype, source_dtype=dtype, parse=parse)
    if rule == "image":
        return _image(name, source, Image())
    converter = CONVERTERS.get(str(rule))
    if converter is None:
        rules = ", ".join(sorted((*CONVERTERS, "auto", "bytes", "float", "image", "int")))
        raise ValueError(
            f"decode for column {name!r} must be None, Image(...), Pad(...), Optional(...), a function of "
            f"bytes or one of {rules}; got {rule!r}"
        )
    is_stacked = rule == "npy" and spec.size_range is not None and len({*spec.size_range}) == 1
    return ObjectOutput(name=name, sources=sources, convert=converter, is_stacked=is_stacked)


def _auto_rule(source: str, spec: ColumnSpec, codec: Format) -> object:
    if spec.kind in ("text", "json"):
        return spec.kind
    if not codec.columns_are_extensions:
        return None
    suffix = PurePosixPath("x." + source).suffix[1:].lower() if source else ""
    for rule, suffixes in (
        ("image", IMAGE_SUFFIXES),
        ("text", TEXT_SUFFIXES),
        ("int", INT_SUFFIXES),
        ("float", FLOAT_SUFFIXES),
        ("json", JSON_SUFFIXES),
        ("npy", ("npy",)),
    ):
        if suffix in suffixes:
            return rule
    if suffix in UNSAFE_SUFFIXES:
        raise ValueError(
            f"column {source!r} holds pickled data, and unpickling runs code from the dataset; "
            f'ask for it with decode={{"{source}": "pickle"}} or "torch", or leave the column out'
        )
    return None


def _fixed(name: str, source: str, spec: ColumnSpec, rule: object, codec: Format) -> Output:
    if source == codec.token_column:
        return RowsOutput(
            name=name, sources=(source,), dtype="int64", source_dtype=spec.dtype, shape=spec.shape
        )
    _check_numbers(name, spec, rule)
    return _numbers(name, (source,), spec, spec.shape)


def _numbers(name: str, sources: tuple[str, ...], spec: ColumnSpec, shape: tuple[int, ...]) -> Output:
    return ArrayOutput(name=name, sources=sources, dtype=spec.dtype, source_dtype=spec.dtype, shape=shape)


def _check_numbers(name: str, spec: ColumnSpec, rule: object) -> None:
    """Raise where a column of numbers, which is delivered as stored, is to be decoded."""
    kind = np.dtype(spec.dtype).kind
    as_stored = rule is None or rule in ("auto", "bytes", "raw", "list")
    if not as_stored and not (rule == "int" and kind in "iu") and not (rule == "float" and kind == "f"):
        named = (
            repr(rule) if isinstance(rule, str) else "a function" if callable(rule) else type(rule).__name__
        )
        raise ValueError(
            f"column {name!r} is {spec_text(spec)}, and decode={named} needs byte strings; "
            "leave it out, and change values in transform="
        )


def _stacked(name: str, sources: tuple[str, ...], specs: list[ColumnSpec], rule: object) -> Output:
    for source, spec in zip(sources, specs, strict=True):
        if spec.kind != "fixed" or spec.shape != specs[0].shape or spec.dtype != specs[0].dtype:
            raise ValueError(
                f"columns stacked into {name!r} must be of one fixed type; {sources[0]!r} is "
                f"{spec_text(specs[0])}, {source!r} is {spec_text(spec)}"
            )
    shape = (*specs[0].shape, len(sources))
    _check_numbers(name, specs[0], rule)
    return _numbers(name, sources, specs[0], shape)


def _raw(name: str, source: str, spec: ColumnSpec) -> Output:
    low, high = spec.size_range or (0, -1)
    if low == high and not spec.optional:
        return RowsOutput(
            name=name, sources=(source,), dtype=spec.dtype, source_dtype=spec.dtype, shape=(low,)
        )
    return RaggedOutput(name=name, sources=(source,), dtype=spec.dtype, source_dtype=spec.dtype)


def _image(name: str, source: str, image: Image) -> Output:
    if image.size is None:
        return FreeImageOutput(name=name, sources=(source,), dtype=image.dtype, image=image)
    return ImageOutput(name=name, sources=(source,), dtype=image.dtype, shape=image.shape, image=image)
