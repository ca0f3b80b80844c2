"""The columns of LitData chunks: names of leaves, what their encodings are, and values of the nested ones.

A sample is a tree of dicts, lists and tuples, whose leaves are columns: "a.b" is what lies under "a" and "b",
"0" is the first item of a list. A sample that is a single value is the column "value".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Block, Column, ColumnSpec, Spans
from sharding.formats.streaming.layout import Heads, SampleLayout, StoredColumn
from sharding.formats.streaming.stored_values import byte_lists, pixels_as_files
from sharding.spans import Bytes, Ints, numbers_at

_TORCH_DTYPES = dict(
    enumerate(
        [
            *("float32", "float32", "float64", "float64", "", "", "", "", "float16", "float16", "", "uint8"),
            *("int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16"),
        ]
    )
)
"""dtype by its number; "": complex ones and bfloat16, which are not read."""
_NUMPY_DTYPES = dict(
    enumerate(
        [
            *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "", "", "bool", "", "", "", ""),
        ]
    )
)
"""Likewise; "": complex, objects, bytes, text and records."""
_LISTS = {"no_header_tensor": _TORCH_DTYPES, "no_header_numpy": _NUMPY_DTYPES}
_FIXED = {"int": "int64", "float": "float64", "bool": "bool"}
_KINDS = {"str": "text", "text": "text"}
_IMAGES = ("jpeg", "image", "pil", "tifffile")
_IMAGE_FEATURE = '{"_type": "Image"}'
_MOST_NESTED = 64


class LitDataColumn(StoredColumn, frozen=True):
    """A leaf of a LitData chunk."""

    @property
    def kind(self) -> str:
        """The encoding without what stands behind ":"."""
        return self.encoding.partition(":")[0]

    @property
    def is_rewritten(self) -> bool:
        """Return whether values are delivered in other bytes than they are stored in."""
        return self.kind in ("pil", "jpeg_array") or self.spec().kind == "other"

    def spec(self) -> ColumnSpec:
        """Return the kind of the column."""
        if self.kind in _FIXED:
            return ColumnSpec("fixed", _FIXED[self.kind])
        if self.items:
            return ColumnSpec("list", self.items)
        if self.kind in _LISTS or self.kind == "graph":
            return ColumnSpec("other", note=f"LitData's {self.encoding}")
        if self.kind == "jpeg_array":
            return ColumnSpec("bytes_list", items=1, feature=_IMAGE_FEATURE)
        if self.kind in _IMAGES:
            return ColumnSpec("bytes", feature=_IMAGE_FEATURE)
        feature = json.dumps({"_type": self.kind}) if self.kind in RULES else ""
        return ColumnSpec(_KINDS.get(self.kind, "bytes"), feature=feature)

    def decode(self, buffer: Bytes, starts: Ints, lengths: Ints, block: Block) -> Column:
        """Return the values that lie in a block's bytes at these places, [n]."""
        if self.kind in _FIXED:
            return numbers_at(buffer, starts, _FIXED[self.kind])
        if self.items:
            dtype = np.dtype(self.items)
            counts = lengths // dtype.itemsize
            if (counts * dtype.itemsize != lengths).any():
                raise self.corrupt(block)(f"an array is no whole number of {dtype}")
            return Spans(buffer, starts, counts, self.items)
        if self.kind == "pil":
            return pixels_as_files(buffer, starts, lengths, self.corrupt(block))
        if self.kind == "jpeg_array":
            return byte_lists(buffer, starts, lengths, self.corrupt(block))
        if self.spec().kind == "other":
            raise self.corrupt(block)(f"{self.spec().note} is not read: leave the column out by columns=")
        return Spans(buffer, starts, lengths)


def column_of(name: str, encoding: str) -> LitDataColumn:
    """A column, of an encoding as LitData names it."""
    kind, _, number = encoding.partition(":")
    if kind in _FIXED:
        return LitDataColumn(name, encoding, np.dtype(_FIXED[kind]).itemsize)
    items = _LISTS[kind].get(int(number), "") if kind in _LISTS and number.isdecimal() else ""
    return LitDataColumn(name, encoding, None, items)


def layout_of(names: Sequence[str], encodings: Sequence[str], heads: Heads) -> SampleLayout:
    """Check the columns of a chunk. `ValueError` for what no chunk has."""
    if len({*names}) < len(names) or len(names) != len(encodings) or not names:
        raise ValueError(f"{len(encodings)} encodings of the columns {list(names)}")
    if not all(isinstance(text, str) for text in (*names, *encodings)):
        raise ValueError(f"its encodings are {list(encodings)}")
    return SampleLayout(tuple(map(column_of, names, encodings)), heads)


def leaf_names(spec: str) -> list[str]:
    """Names of the leaves of a tree that `index.json` describes, in order. `ValueError` for others."""
    version, root = json.loads(spec)
    if version != 1:
        raise ValueError(f"its tree is of version {version!r}; only version 1 is known")
    return [name or "value" for name in _leaves(root, "", 0)]


def _leaves(node: Any, prefix: str, depth: int) -> Iterator[str]:
    if depth > _MOST_NESTED:
        raise ValueError(f"its tree has more than {_MOST_NESTED} levels")
    children = node["children_spec"]
    if node["type"] is None:
        yield prefix
        return
    names: Sequence[Any]
    if node["type"] in ("builtins.list", "builtins.tuple", "collections.deque", "collections.namedtuple"):
        names = range(len(children))
    elif node["type"] in ("builtins.dict", "collections.OrderedDict", "collections.defaultdict"):
        context = json.loads(node["context"]) if isinstance(node["context"], str) else node["context"]
        names = context["dict_context"] if isinstance(context, dict) else context
    else:
        raise ValueError(f"its tree has {node['type']!r}, which is not read")
    if len(names) != len(children):
        raise ValueError(f"its tree has {len(children)} children of {len(names)} names")
    for name, child in zip(names, children, strict=True):
        yield from _leaves(child, f"{prefix}.{name}" if prefix else str(name), depth + 1)


# ---- values of their own layout -------------------------------------------------------------------------


def array_of(data: bytes, dtypes: dict[int, str]) -> NDArray[Any]:
    """The array of a value that begins with dtype and shape, u32 each. `ValueError` where it is none.

    LitData has written tensors little-endian and, later, big-endian; a number of a dtype is below 256.
    """
    if len(data) < 8:
        raise ValueError("no array of LitData: it is truncated")
    order = "<" if data[0] or (data[4] and not data[3]) else ">"
    number, ndim = struct.unpack_from(f"{order}II", data)
    dtype, end = dtypes.get(number, ""), 8 + 4 * ndim
    if not dtype or end > len(data):
        raise ValueError(f"no array of LitData that is read: dtype {number}, {ndim} dimensions")
    shape = struct.unpack_from(f"{order}{ndim}I", data, 8)
    return np.frombuffer(data, dtype, offset=end).reshape(shape).copy()


def nested_of(data: bytes) -> Any:
    """The nested value of an encoding `json`. `ValueError` where it is none."""
    if not data or data[0] > 0x20:
        return json.loads(data)
    try:
        value, end = _nested(data, 0, 0)
    except (struct.error, IndexError) as error:
        raise ValueError("no nested value of LitData: it is truncated") from error
    if end != len(data):
        raise ValueError(f"no nested value of LitData: it ends at byte {end} of {len(data)}")
    return value


_U32, _I64, _F64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")


def _nested(data: bytes, offset: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a byte, and where it ends."""
    if depth > _MOST_NESTED:
        raise ValueError(f"more than {_MOST_NESTED} levels")
    tag, offset = data[offset], offset + 1
    if tag in (7, 8, 9, 10, 11):
        return _scalar(tag - 7, data, offset)
    count, offset = _U32.unpack_from(data, offset)[0], offset + 4
    if tag == 0:
        return json.loads(_taken(data, offset, count)), offset + count
    if tag in (2, 3):
        return np.frombuffer(
            _taken(data, offset, 8 * count), "<i8" if tag == 2 else "<f8"
        ).tolist(), offset + 8 * count
    if tag == 4:
        return [byte != 0 for byte in _taken(data, offset, count)], offset + count
    if count > len(data):
        raise ValueError(f"no nested value of LitData: {count} values in {len(data)} bytes")
    if tag == 1:
        items = []
        for _ in range(count):
            item, offset = _text(data, offset)
            items.append(item)
        return items, offset
    if tag == 5:
        mapping = {}
        for _ in range(count):
            key, offset = _text(data, offset)
            mapping[key], offset = _nested(data, offset, depth + 1)
        return mapping, offset
    if tag == 6:
        return _records(data, offset, count)
    raise ValueError(f"no nested value of LitData: it begins with {tag}")


def _records(data: bytes, offset: int, count: int) -> tuple[list[dict[str, Any]], int]:
    num_keys, offset = _U32.unpack_from(data, offset)[0], offset + 4
    if num_keys > len(data):
        raise ValueError(f"no nested value of LitData: {num_keys} keys in {len(data)} bytes")
    keys, rows = [], []
    for _ in range(num_keys):
        key, offset = _text(data, offset)
        keys.append(key)
    for _ in range(count):
        row: dict[str, Any] = {}
        for key in keys:
            tag, offset = data[offset], offset + 1
            if not 0x10 <= tag <= 0x14:
                raise ValueError(f"no nested value of LitData: a field begins with {tag}")
            row[key], offset = (None, offset) if tag == 0x10 else _scalar(tag - 0x11, data, offset)
        rows.append(row)
    return rows, offset


def _scalar(kind: int, data: bytes, offset: int) -> tuple[Any, int]:
    """Text, an integer, a fraction, a truth value or nothing."""
    if kind == 0:
        return _text(data, offset)
    if kind in (1, 2):
        return (_I64 if kind == 1 else _F64).unpack_from(data, offset)[0], offset + 8
    return (data[offset] != 0, offset + 1) if kind == 3 else (None, offset)


def _text(data: bytes, offset: int) -> tuple[str, int]:
    (length,) = _U32.unpack_from(data, offset)
    return _taken(data, offset + 4, length).decode(), offset + 4 + length


def _taken(data: bytes, offset: int, count: int) -> bytes:
    if offset + count > len(data):
        raise ValueError("no nested value of LitData: it is truncated")
    return data[offset : offset + count]


RULES: dict[str, str | Callable[[bytes], Any]] = {
    "pickle": "pickle",
    "json": nested_of,
    "numpy": partial(array_of, dtypes=_NUMPY_DTYPES),
    "tensor": partial(array_of, dtypes=_TORCH_DTYPES),
}
