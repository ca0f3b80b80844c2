"""Decoded columns of a block as Python's values: what functions of users get, and writers take.

Values keep their types: numbers that Python has no type for stay numpy's, images stay the bytes they are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import ABSENT, MISSING, Column, ColumnSpec, Format, Masked, Spans
from sharding.byte_lists import list_items
from sharding.formats.extensions import rule_of_extension
from sharding.formats.streaming.stored_values import png_of
from sharding.write.values import PYTHON_TYPES

Decode = Callable[[Any], Any]


def npy_bytes(value: NDArray[Any]) -> bytes:
    """Return an array as the bytes of a `.npy` file."""
    out = io.BytesIO()
    np.save(out, value, allow_pickle=False)
    return out.getvalue()


def npy_value(data: bytes) -> NDArray[Any]:
    """Return the array of a `.npy` file. `ValueError` where it is none, or holds objects."""
    value = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(value, np.ndarray):
        raise ValueError("it is no .npy file")
    return value


_DECODERS: dict[str, Decode] = {
    "int": int,
    "float": float,
    "text": bytes.decode,
    "json": json.loads,
    "npy": npy_value,
}


def decode_of(name: str, spec: ColumnSpec, codec: Format) -> Decode | None:
    """Return what makes the value of a column's bytes; None: the bytes are the value.

    `ValueError` for values that would have to be unpickled.
    """
    rule = codec.rule(spec)
    if spec.kind not in ("bytes", "bytes_list") and not callable(rule):
        return None
    if codec.columns_are_extensions:
        extension_rule = rule_of_extension(name)
        rule = None if extension_rule == "pickle" else extension_rule  # such bytes are written as they are
    if callable(rule):
        return rule
    if rule == "pickle":
        raise ValueError(f"column {name!r} is pickled, which is not read; name the others: columns=[...]")
    if spec.feature_type == "Image":
        return png_of
    return _DECODERS.get(rule or "")


def values_of(column: Column, spec: ColumnSpec | None, decode: Decode | None) -> list[Any]:
    """Return the values of a column; None where a sample has none."""
    if isinstance(column, Masked):
        values: list[Any] = _numbers(column.values)
        return [value if here else None for value, here in zip(values, column.lacks == 0, strict=True)]
    if not isinstance(column, Spans):
        return _numbers(column)
    starts, lengths = column.starts, column.lengths
    kind = "bytes" if spec is None else spec.kind
    if kind == "list":
        return [
            column.value(i).copy() if length >= 0 else _missing(length)
            for i, length in enumerate(lengths.tolist())
        ]
    if kind == "bytes_list":
        lists = _byte_lists(column.buffer.view(np.uint8), starts, lengths)
        return lists if decode is None else [items and list(map(decode, items)) for items in lists]
    view = np.ascontiguousarray(column.buffer).data.cast("B")
    pairs = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    if kind == "text" and decode is None:
        return [str(view[a:b], "utf-8") if b >= a else _missing(b - a) for a, b in pairs]
    if kind == "json":
        decode = json.loads
    if decode is None:
        return [bytes(view[a:b]) if b >= a else _missing(b - a) for a, b in pairs]
    return [decode(bytes(view[a:b])) if b >= a else _missing(b - a) for a, b in pairs]


def _missing(length: int) -> Any:
    if length not in (MISSING, ABSENT):
        raise ValueError("a list with a null inside, or only the path of a file, is no value")
    return None


def _numbers(array: NDArray[Any]) -> list[Any]:
    if array.ndim == 1 and issubclass(array.dtype.type, PYTHON_TYPES):
        return array.tolist()  # type: ignore[no-any-return]
    return list(array if array.ndim == 1 else array.copy())


def _byte_lists(
    buffer: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[list[bytes] | None]:
    counts, begins, sizes = list_items(buffer, starts[lengths >= 0])
    pairs = zip(begins.tolist(), sizes.tolist(), strict=True)
    items, count = (buffer[begin : begin + size].tobytes() for begin, size in pairs), iter(counts.tolist())
    return [list(islice(items, next(count))) if n >= 0 else _missing(n) for n in lengths.tolist()]


def with_types(schema: pa.Schema, change: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    """The schema with other types, also in structs and lists."""

    def changed(field: pa.Field) -> pa.Field:
        kind = field.type
        if pa.types.is_struct(kind):
            kind = pa.struct(map(changed, kind))
        elif pa.types.is_list(kind):
            kind = pa.list_(changed(kind.value_field))
        return field.with_type(change(kind))

    return pa.schema(map(changed, schema), schema.metadata)
