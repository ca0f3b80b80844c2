"""What becomes of each column: `decode=` resolved into output columns.

A column arrives per block, as an array or as spans (`sharding.blocks`). It is *staged*: numbers are
parsed and copied into one array of the window, byte strings stay where they lie and only their
addresses are kept. Then each batch is *gathered* from the staged columns into its slot. An `Output`
says both halves for one output column; it is a value, shared by all windows and threads.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.image import Image
from sharding.blocks import Column, ColumnSpec, Format, Spans, spec_text
from sharding.cached_property import cached_property
from sharding.formats.tokens import plain_header

Array = NDArray[Any]

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
TEXT_SUFFIXES = ("txt", "text", "transcript")
INT_SUFFIXES = ("cls", "cls2", "class", "count", "index", "inx", "id")
JSON_SUFFIXES = ("json", "jsn")
FLOAT_SUFFIXES = ("float", "flt")
UNSAFE_SUFFIXES = ("pyd", "pkl", "pickle", "pth", "pt")


BadRows = Sequence[tuple[int, str]]
"""Rows whose value cannot be decoded, each with the reason."""


@dataclass(frozen=True)
class Pad:
    """Deliver a variable-length column as one tensor [batch, length] instead of a ragged pair."""

    value: float = 0
    """What fills the rest of a short row."""
    length: int | None = None
    """Elements a row; longer rows are cut. None: the longest row of the batch."""


@dataclass(frozen=True)
class Output:
    """One column of the batches."""

    name: str
    sources: tuple[str, ...]
    """Dataset columns it is made of: one, or several that are stacked on a last dimension."""
    kind: str
    """"array": staged as an array. "spans": fixed-size rows gathered from spans. "ragged", "pad",
    "image", "objects": gathered from spans."""
    dtype: str = "uint8"
    """numpy dtype of one element as delivered ("array", "spans", "ragged", "pad")."""
    source_dtype: str = "uint8"
    """numpy dtype of one element as stored."""
    shape: tuple[int, ...] = ()
    """Shape of one row ("array", "spans")."""
    parse: Callable[[Spans], tuple[Array, BadRows]] | None = None
    """For "array": how byte strings become numbers."""
    convert: Callable[[bytes], Any] | None = None
    """For "objects": the bytes of one value -> a Python object."""
    image: Image | None = None
    pad: Pad | None = None

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one delivered row of fixed size."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @cached_property
    def source_row_bytes(self) -> int:
        """Bytes of one stored row of fixed size."""
        return math.prod(self.shape) * np.dtype(self.source_dtype).itemsize

    def takes(self, column: Column) -> bool:
        """Whether a decoded column of a block is of the type that the schema promised."""
        if isinstance(column, Spans):
            return column.buffer.dtype == ("uint8" if self.parse else self.source_dtype)
        shape = self.shape[:-1] if len(self.sources) > 1 else self.shape
        return self.parse is None and column.dtype == self.source_dtype and column.shape[1:] == shape


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
    outputs = []
    for name, sources in chosen.items():
        rule = rules.get(name, "auto") if decode is not None else None
        if decode not in (None, "auto") and not isinstance(decode, Mapping):
            rule = decode
        outputs.append(_resolve(name, sources, [schema_of(schema, s) for s in sources], rule, codec))
    return tuple(outputs)


KEY_COLUMNS = ("__key__", "__url__")


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
            "the dataset has no column of a type that can be delivered (docs/formats.md lists them)"
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
        return Output(name, sources, "pad", spec.dtype, spec.dtype, pad=rule)
    if rule is None or rule in ("bytes", "raw", "list"):
        return _raw(name, source, spec)
    if callable(rule):
        return Output(name, sources, "objects", convert=rule)
    if rule in ("int", "float"):
        parse = parse_ints if rule == "int" else parse_floats
        dtype = "int64" if rule == "int" else "float64"
        return Output(name, sources, "array", dtype, dtype, parse=parse)
    if rule == "image":
        return _image(name, source, Image())
    converter = _CONVERTERS.get(str(rule))
    if converter is None:
        known = ", ".join(sorted((*_CONVERTERS, "auto", "bytes", "float", "image", "int")))
        raise ValueError(
            f"decode for column {name!r} must be None, Image(...), Pad(...), a function of bytes or one "
            f"of {known}; got {rule!r}"
        )
    return Output(name, sources, "objects", convert=converter)


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
        return Output(name, (source,), "spans", "int64", spec.dtype, spec.shape)
    _check_numbers(name, spec, rule)
    return Output(name, (source,), "array", spec.dtype, spec.dtype, spec.shape)


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
    return Output(name, sources, "array", specs[0].dtype, specs[0].dtype, shape)


def _raw(name: str, source: str, spec: ColumnSpec) -> Output:
    low, high = spec.size_range or (0, -1)
    if low == high and not spec.optional:
        return Output(name, (source,), "spans", spec.dtype, spec.dtype, (low,))
    return Output(name, (source,), "ragged", spec.dtype, spec.dtype)


def _image(name: str, source: str, image: Image) -> Output:
    if image.size is None:
        return Output(name, (source,), "images", image=image)
    return Output(name, (source,), "image", "uint8", "uint8", image.shape, image=image)


# ---- parsing, vectorised over the values of a block ------------------------------------------------


def parse_ints(column: Spans) -> tuple[NDArray[np.int64], BadRows]:
    """Decimal integers in ASCII, surrounding blanks allowed: values int64 [n], and the rows that are none.

    Values of at most 18 digits and nothing else are parsed together; otherwise one by one.
    """
    if not len(column):
        return np.zeros(0, np.int64), ()
    width = int(column.lengths.max())
    if 0 < width <= 18 and (column.lengths > 0).all():
        digits = _right_aligned(column, width)
        number = digits - np.uint8(48)
        inside = np.arange(width, 0, -1) <= column.lengths[:, None]
        if (number[inside] < 10).all():
            number[~inside] = 0
            return number.astype(np.int64) @ (10 ** np.arange(width - 1, -1, -1, dtype=np.int64)), ()
    return _parse_each(int, column, np.int64)


def parse_floats(column: Spans) -> tuple[NDArray[np.float64], BadRows]:
    """Decimal numbers in ASCII: values float64 [n], and the rows that are none."""
    return _parse_each(float, column, np.float64)


def _right_aligned(column: Spans, width: int) -> NDArray[np.uint8]:
    """The values as rows [n, width] of characters, filled with blanks on the left."""
    at = column.starts[:, None] + column.lengths[:, None] - np.arange(width, 0, -1)
    inside = at >= column.starts[:, None]
    return np.where(inside, column.buffer.view(np.uint8)[np.where(inside, at, 0)], np.uint8(32))


def _parse_each(parse: Callable[[bytes], Any], column: Spans, dtype: type) -> tuple[Array, BadRows]:
    values: Array = np.zeros(len(column), dtype)
    bad: list[tuple[int, str]] = []
    for row in range(len(column)):
        if column.lengths[row] < 0:
            bad.append((row, MISSING))
            continue
        text = column.value(row).tobytes()
        try:
            values[row] = parse(text.strip())
        except (ValueError, OverflowError):
            bad.append((row, f"not a number of type {np.dtype(dtype)}: {text[:40]!r}"))
    return values, bad


MISSING = "the sample lacks this column"


def _from_npy(data: bytes) -> Array:
    header = plain_header(data)
    if header is not None:
        dtype, fortran, shape, start = header
        values = np.frombuffer(data, dtype, math.prod(shape), start)
        return values.reshape(shape, order="F" if fortran else "C").copy(order="K")
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


def _unpickle(data: bytes) -> Any:
    import pickle

    return pickle.loads(data)


def _torch_load(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_CONVERTERS: dict[str, Callable[[bytes], Any]] = {
    "text": bytes.decode,
    "json": json.loads,
    "npy": _from_npy,
    "pickle": _unpickle,
    "torch": _torch_load,
}
