"""The columns that a dataset delivers: `columns=` and `decode=` are resolved into outputs.

Rules by name, and what `decode="auto"` does with the columns of a tar, are here; the named functions of bytes
are `dataflow.decode.values.CONVERTERS`.
"""

from __future__ import annotations

import fnmatch
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.decode.rules import is_decoder
from dataflow.decode.values import CONVERTERS, parse_floats, parse_ints
from dataflow.outputs.fixed import ArrayOutput, RowsOutput
from dataflow.outputs.optional import Optional, mask_of
from dataflow.outputs.output import Output
from sharding.blocks import ALTERNATIVE, ColumnSpec, Format, spec_text
from sharding.formats.extensions import IMAGE_EXTENSIONS, rule_of_extension
from sharding.printable import listed

if TYPE_CHECKING:
    from dataflow.decode.rules import CameraColumn, DecoderRule


IMAGE = "dataflow.decode.image:Image"
KEY_COLUMNS = ("__key__", "__url__")


def resolve_outputs(
    schema: Mapping[str, ColumnSpec],
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
    decode: object,
    *,
    codec: Format,
    cameras: Mapping[str, CameraColumn] = MappingProxyType({}),
    check: Callable[[Sequence[str]], None] | None = None,
) -> tuple[Output, ...]:
    """Decide each output column from the dataset's schema and the user's `columns=` and `decode=`.

    `cameras`: columns whose frames lie in files of their own, at the times that the schema's columns tell.
    `check`: raises for stored columns that cannot be delivered, when it is known which are needed.

    Raises `ValueError` for a column that does not exist, a decoder that does not fit, and content
    that is never decoded unless asked for (pickles).
    """
    stored = schema
    schema = {**schema, **dict.fromkeys(cameras, ColumnSpec("bytes"))}
    chosen = _chosen(schema, columns, codec, check)
    needed = [source for sources, _ in chosen.values() for source in sources]
    if check is not None:
        check([*needed, *(source for name in cameras if name in needed for source in cameras[name].sources)])
    rules = decode if isinstance(decode, Mapping) else {}
    unknown = sorted(set(rules) - set(chosen) - set(schema))
    if unknown and check is not None:
        check(unknown)
    if unknown:
        raise ValueError(f"decode names {unknown[0]!r}, which is no column; columns: {_listed(schema)}")
    for name in sorted(set(rules) - set(chosen)):
        if schema[name].is_part:
            whole = name.rpartition(".")[0]
            raise ValueError(
                f"decode names {name!r}, a part of column {whole!r}: name that, or both in columns="
            )
    outputs, names = list[Output](), [*chosen]
    for name, (sources, is_list) in chosen.items():
        rule = rules.get(name, "auto") if decode is not None else None
        if decode not in (None, "auto") and not isinstance(decode, Mapping):
            rule = decode
        if len(sources) == 1 and sources[0] in cameras:
            camera = cameras[sources[0]]
            output = resolve_name(camera.output_by)(name, camera, rule, stored)
            outputs += [output, *output.pads_beside(names)]
            continue
        specs = [schema_of(schema, source) for source in sources]
        resolve = partial(_several, name, sources) if is_list else partial(_single, name, sources[0])
        if not isinstance(rule, Optional):
            output = resolve(specs, rule, codec)
            outputs += [output, *output.pads_beside(names)]
            continue
        # What some lack no longer keeps the others from being of one length.
        output = resolve([replace(spec, optional=False) for spec in specs], rule.rule, codec)
        output = output.optional(rule.default, has_mask=rule.mask)
        outputs += [output, *output.pads_beside(names)]
        if rule.mask:
            outputs.append(mask_of(output, names))
    if not codec.columns_are_extensions:
        return tuple(outputs)
    return tuple(replace(entry, is_member=True, others=_others(entry.sources, stored)) for entry in outputs)


def schema_of(schema: Mapping[str, ColumnSpec], name: str) -> ColumnSpec:
    """The spec of a column, the sample's own key and alternatives included."""
    if name in schema and name != "__url__":
        return schema[name]
    if name in KEY_COLUMNS:
        return ColumnSpec("text")
    specs = [schema[source] for source in name.split(ALTERNATIVE)]  # as `Format.alternatives` has it
    sizes = [spec.size_range for spec in specs if spec.size_range is not None]
    both = (min(low for low, _ in sizes), max(high for _, high in sizes)) if sizes else None
    return replace(specs[0], size_range=both, optional=all(spec.optional for spec in specs))


def _listed(schema: Mapping[str, ColumnSpec]) -> str:
    return listed(f"{name} ({spec_text(spec)})" for name, spec in schema.items()) or "none"


def _chosen(
    schema: Mapping[str, ColumnSpec],
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
    codec: Format,
    check: Callable[[Sequence[str]], None] | None,
) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return by name the columns that each is made of, and whether it is made of several, even of one."""
    if isinstance(columns, str):
        raise ValueError(f"columns must be a list or a mapping, got the string {columns!r}")
    if columns is None:
        named: dict[str, tuple[str, ...]] = {
            name: (name,) for name, spec in schema.items() if not spec.is_part and not spec.is_index
        }
        if named.pop("__url__", None):  # as in the Hub's tables of tars
            text = "column '__url__' is left out: by this name the URL of a sample's shard is delivered"
            warnings.warn(f"{text}. Name the columns that are wanted: columns=[...]", stacklevel=2)
    elif isinstance(columns, Mapping):
        named = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in columns.items()}
    else:
        named = {name: (name,) for name in columns}
    chosen = {name: _matched(schema, sources, codec) for name, sources in named.items()}
    known = {*schema, *KEY_COLUMNS}
    for name, (sources, _) in chosen.items():
        missing = [s for s in sources if not known.issuperset(codec.alternatives(s))]
        if missing and check is not None:
            check(missing)
        if missing or not sources:
            absent = (missing or [name])[0]
            if parts := [column for column in schema if column.startswith(f"{absent}.")]:
                raise ValueError(f"column {absent!r} is a struct: name its parts, {listed(parts)}")
            raise ValueError(f"column {absent!r} does not exist; the dataset has: {_listed(schema)}")
    if not chosen:
        none = (
            "the dataset has no column of a type that can be delivered (docs/reference/formats.md lists them)"
        )
        raise ValueError(none if columns is None else "columns is empty; leave it out for all columns")
    return chosen


def _matched(
    schema: Mapping[str, ColumnSpec], sources: Sequence[str], codec: Format
) -> tuple[tuple[str, ...], bool]:
    """The columns that names and patterns ("*.jpg") stand for, and whether they may be several."""
    matched, is_list = list[str](), len(sources) > 1
    for source in sources:
        if "|" in source and source not in schema:
            matched.append(_alternatives(schema, source, codec))
            continue
        if "*" not in source or source in schema:
            matched.append(source)
            continue
        matches = sorted(fnmatch.filter(schema, source), key=_by_numbers)
        matched, is_list = [*matched, *(matches or [source])], True
    return tuple(matched), is_list


def _alternatives(schema: Mapping[str, ColumnSpec], source: str, codec: Format) -> str:
    """The name of the column that "jpg|png" stands for, without the members that no sample has."""
    if not codec.columns_are_extensions:
        raise ValueError(
            f"column {source!r} does not exist, and alternatives are for members of tar files: in "
            f"{codec.name} files, write one column when you make the shards, or choose in transform=; the "
            f"dataset has: {_listed(schema)}"
        )
    names = source.split("|")
    if any("*" in name or name in KEY_COLUMNS for name in names) or len({*names}) < len(names):
        raise ValueError(f"alternatives are different names of members, as in 'jpg|png'; got {source!r}")
    there = [name for name in names if name in schema]
    if not there:
        raise ValueError(f"no sample has a member of {source!r}; the dataset has: {_listed(schema)}")
    return ALTERNATIVE.join(there)


def _others(sources: Sequence[str], schema: Mapping[str, ColumnSpec]) -> tuple[str, ...]:
    """The members of the same kind as an image that some samples lack, by which others may have it."""
    if len(sources) != 1 or sources[0] not in schema or not schema[sources[0]].optional:
        return ()
    stem, _, ending = sources[0].rpartition(".")
    if ending.lower() not in IMAGE_EXTENSIONS:
        return ()
    alike = (name for name in schema if name.rpartition(".")[0] == stem and name != sources[0])
    return tuple(name for name in alike if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return what sorts "2.jpg" before "10.jpg"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]


def _several(
    name: str, sources: tuple[str, ...], specs: list[ColumnSpec], rule: object, codec: Format
) -> Output:
    """Return what becomes of several columns: numbers are stacked, byte strings listed."""
    if any(spec.kind != "bytes" for spec in specs):
        return _stacked(name, sources, specs, rule)
    if rule == "auto":
        rule = _auto_rule(sources[0], specs[0], codec)
    return _list_of(name, sources, rule)


def _single(name: str, source: str, specs: list[ColumnSpec], rule: object, codec: Format) -> Output:
    """Return what becomes of one column."""
    sources, spec = (source,), specs[0]
    if spec.kind == "fixed":
        return _fixed(name, source, spec, rule, codec)
    if rule == "auto":
        rule = _auto_rule(source, spec, codec)
        if callable(rule):
            return _format_objects(name, sources, spec, rule)
    if spec.kind == "bytes_list":
        return _list_of(name, sources, rule, items=max(1, spec.items))
    if rule is None or rule in ("bytes", "raw", "list"):
        return _raw(name, source, spec)
    if rule in ("int", "float"):
        parse = parse_ints if rule == "int" else parse_floats
        dtype = "int64" if rule == "int" else "float64"
        return ArrayOutput(name=name, sources=sources, dtype=dtype, source_dtype=dtype, parse=parse)
    return _decoded(name, source, spec, rule, codec)


def _format_objects(
    name: str, sources: tuple[str, ...], spec: ColumnSpec, rule: Callable[[bytes], Any]
) -> Output:
    """Return the output of what the format's own function makes of values."""
    from dataflow.outputs.objects import ObjectOutput

    is_stacked = spec.size_range is not None and len({*spec.size_range}) == 1
    return ObjectOutput(name=name, sources=sources, convert=rule, is_stacked=is_stacked, is_format_rule=True)


def _decoded(name: str, source: str, spec: ColumnSpec, rule: object, codec: Format) -> Output:
    """Return the output of a decoder of byte strings, or of a function of the user's."""
    from dataflow.outputs.objects import ObjectOutput
    from dataflow.outputs.ragged import Pad, PaddedOutput

    sources = (source,)
    if rule == "image":
        rule = _image()
    if is_decoder(rule):
        return _by_decoder(name, sources, rule)
    if isinstance(rule, Pad):
        kind = _auto_rule(source, spec, codec) if codec.columns_are_extensions else None
        if kind not in (None, "text"):  # it would fill up files in place of the values in them
            raise ValueError(
                f"Pad() pads values as they are stored, and column {name!r} holds {kind} files: leave it to "
                "decode='auto' and pad in collate_fn=, or write the values as lists in Parquet or Arrow"
            )
        return PaddedOutput(name=name, sources=sources, dtype=spec.dtype, source_dtype=spec.dtype, pad=rule)
    if callable(rule):
        return ObjectOutput(name=name, sources=sources, convert=rule)
    others = "None, Image(...), Video(...), Audio(...), Pad(...), Optional(...), a function of bytes"
    convert = _converter(name, rule, others, ("float", "int"))
    is_stacked = rule == "npy" and spec.size_range is not None and len({*spec.size_range}) == 1
    return ObjectOutput(name=name, sources=sources, convert=convert, is_stacked=is_stacked)


def _converter(name: str, rule: object, others: str, names: Sequence[str] = ()) -> Callable[[bytes], Any]:
    """The function that a rule names. `ValueError`, which lists what else there is, where it names none."""
    converter = CONVERTERS.get(str(rule))
    if converter is None:
        rules = ", ".join(sorted((*CONVERTERS, "auto", "bytes", "image", *names)))
        raise ValueError(f"decode for column {name!r} must be {others} or one of {rules}; got {rule!r}")
    return converter


def _list_of(name: str, sources: tuple[str, ...], rule: object, *, items: int = 0) -> Output:
    """Return what becomes of lists of byte strings: the rule is for each.

    `items`: of a stored list, about.
    """
    from dataflow.outputs.objects import ObjectOutput, bytes_tensor

    what: dict[str, Any] = {"is_list": True, "is_joined": not items, "mean_items": items or len(sources)}
    if rule == "image":
        rule = _image()
    if is_decoder(rule) and rule.takes_lists:
        return _by_decoder(name, sources, rule, **what)
    if rule is None or rule in ("bytes", "raw", "list"):
        rule = bytes_tensor
    if not callable(rule):
        rule = _converter(name, rule, "None, Image(...), a function of bytes")
    return ObjectOutput(name=name, sources=sources, **what, convert=rule)


def _auto_rule(source: str, spec: ColumnSpec, codec: Format) -> object:
    if spec.feature:
        rule = _feature_rule(json.loads(spec.feature))
        if rule is not None and spec.kind != "json":
            return rule
        rule = codec.rule(spec)
        if rule == "pickle":
            raise _unsafe(source)
        if rule is not None:
            return rule
    if spec.kind in ("text", "json"):
        return spec.kind
    if not codec.columns_are_extensions:
        return None
    names = codec.alternatives(source)
    if len(names) > 1:
        rules = [_auto_rule(name, spec, codec) for name in names]
        if any(rule != rules[0] for rule in rules):
            each = listed(f"{name} ({rule or 'bytes'})" for name, rule in zip(names, rules, strict=True))
            raise ValueError(f"alternatives are decoded alike, got {each}: name one decoder in decode=")
        return rules[0]
    extension_rule = rule_of_extension(source)
    if extension_rule == "pickle":
        raise _unsafe(source)
    return extension_rule


def _image(**settings: Any) -> DecoderRule:
    """Return what `decode="image"` names."""
    rule: DecoderRule = resolve_name(IMAGE)(**settings)
    return rule


def _by_decoder(name: str, sources: tuple[str, ...], rule: DecoderRule, **what: Any) -> Output:
    output: Output = resolve_name(rule.output_by)(name, sources, rule, **what)
    return output


def _unsafe(source: str) -> ValueError:
    return ValueError(
        f"column {source!r} holds pickled data, and unpickling runs code from the dataset; "
        f'ask for it with decode={{"{source}": "pickle"}} or "torch", or leave the column out'
    )


def _feature_rule(feature: Mapping[str, Any]) -> object:
    """Return the rule of `decode="auto"` for a feature of Hugging Face `datasets`; of lists, with each item.

    None: the column is delivered as stored. So are sound and video: their types must not depend on whether
    torchcodec is installed.
    """
    if not feature.get("decode", True):
        return None
    if feature["_type"] == "Image":
        return _image(**({"mode": "L"} if feature.get("mode") == "L" else {}))
    return "json" if feature["_type"] == "Json" else None


def _fixed(name: str, source: str, spec: ColumnSpec, rule: object, codec: Format) -> Output:
    if source == codec.token_column:
        return RowsOutput(
            name=name, sources=(source,), dtype="int64", source_dtype=spec.dtype, shape=spec.shape
        )
    _check_numbers(name, spec, rule)
    if codec.locates_numbers:
        return RowsOutput(
            name=name, sources=(source,), dtype=spec.dtype, source_dtype=spec.dtype, shape=spec.shape
        )
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
    form = "fixed", specs[0].shape, specs[0].dtype
    if any((spec.kind, spec.shape, spec.dtype) != form for spec in specs):
        each = (f"{source!r} is {spec_text(spec)}" for source, spec in zip(sources, specs, strict=True))
        raise ValueError(f"columns stacked into {name!r} must be of one fixed type: {listed(each)}")
    shape = (*specs[0].shape, len(sources))
    _check_numbers(name, specs[0], rule)
    return _numbers(name, sources, specs[0], shape)


def _raw(name: str, source: str, spec: ColumnSpec) -> Output:
    from dataflow.outputs.ragged import RaggedOutput

    low, high = spec.size_range or (0, -1)
    if low == high and not spec.optional:
        return RowsOutput(
            name=name, sources=(source,), dtype=spec.dtype, source_dtype=spec.dtype, shape=(low,)
        )
    return RaggedOutput(name=name, sources=(source,), dtype=spec.dtype, source_dtype=spec.dtype)
