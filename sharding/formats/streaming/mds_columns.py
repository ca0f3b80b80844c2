"""The columns of MDS shards: what their encodings are, and where values lie in a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sharding.blocks import Block, Column, ColumnSpec, Spans, decimal_of
from sharding.errors import CorruptShardError
from sharding.formats.streaming.layout import SampleLayout, StoredColumn
from sharding.formats.streaming.stored_values import byte_lists, pixels_as_files
from sharding.spans import Ints, numbers_at, rows_at

_NUMBERS = {
    "int": "int64",
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
_IMAGES = ("jpeg", "png")
_LISTS = {"list[jpeg]": 4, "list[png]": 4, "list[pil]": 4, "jpeg_array": 0, "jpegarray": 0}
"""Encodings of lists, and the bytes before the number of items."""
_VALUE_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""dtype of an array, by the byte that it begins with where its column has none."""
_CODES = {name: code for code, name in _VALUE_DTYPES.items()}
_TEXT_NUMBERS = ("str_int", "str_float", "str_decimal")
_IMAGE_FEATURE = '{"_type": "Image"}'


def rule_of(encoding: str) -> str | Callable[[bytes], Any] | None:
    """Return the decoder of an encoding, as `Format.rule` does."""
    kind, _, config = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = config.partition(":")
        return partial(array_of, dtype=dtype, shape=_shape(shape))
    if kind == "str_decimal":
        return decimal_of
    return {"pkl": "pickle", "str_int": "int", "str_float": "float"}.get(kind)


def array_of(data: bytes, *, dtype: str = "", shape: tuple[int, ...] = ()) -> NDArray[Any]:
    """The array that a value of encoding `ndarray` is. `ValueError` where it is none."""
    offset = 0
    if not dtype:
        code = data[0] if data else -1
        if code not in _VALUE_DTYPES:
            raise ValueError(f"no array of Streaming: its dtype is {code}")
        dtype, offset = _VALUE_DTYPES[code], 1
    if not shape:
        if offset >= len(data):
            raise ValueError("no array of Streaming: it is truncated")
        ndim, width = data[offset] >> 2, 1 << (data[offset] & 3)
        end = offset + 1 + ndim * width
        if not ndim or end > len(data):
            raise ValueError(f"no array of Streaming: {ndim} dimensions in {len(data)} bytes")
        shape = tuple(np.frombuffer(data, f"<u{width}", ndim, offset + 1).tolist())
        offset = end
    return np.frombuffer(data, dtype, offset=offset).reshape(shape).copy()


def _is_array(column: StoredColumn) -> bool:
    return column.size is None and column.encoding.partition(":")[0] == "ndarray"


def _list_dtype(encoding: str, value: bytes) -> str:
    """Dtype of the elements of an array, if it has one dimension; "": it has others."""
    dtype, _, shape = encoding.partition(":")[2].partition(":")
    offset = 0 if dtype else 1
    if shape or len(value) <= offset or value[offset] >> 2 != 1:
        return ""
    return dtype or _VALUE_DTYPES.get(value[0], "")


def _lists(
    buffer: NDArray[np.uint8],
    starts: Ints,
    lengths: Ints,
    dtype: np.dtype[Any],
    code: int | None,
    corrupt: Callable[[str], CorruptShardError],
) -> Spans:
    """Arrays of one dimension and one dtype; `code`: the byte that each begins with."""
    head = 1 if code is None else 2
    if (lengths < head + 1).any():
        raise corrupt("an array is truncated")
    heads = rows_at(buffer, starts, head)
    width = np.int64(1) << (heads[:, -1] & 3).astype(np.int64)
    is_list = (heads[:, -1] >> 2 == 1) & (lengths >= head + width)
    if code is not None:
        is_list &= heads[:, 0] == code
    if not is_list.all():
        raise corrupt(
            f"an array is not of one dimension and {dtype}, as the first of the shard is: leave the column "
            "out by columns=, or write such arrays to a column of their own"
        )
    counts = np.zeros(len(starts), np.int64)
    for size in np.unique(width).tolist():
        mask = width == size
        counts[mask] = rows_at(buffer, starts[mask] + head, size).view(f"<u{size}")[:, 0].astype(np.int64)
    begins = starts + head + width
    if ((counts < 0) | (begins + counts * dtype.itemsize != starts + lengths)).any():
        raise corrupt("an array does not take the bytes that it has")
    return Spans(buffer, begins, counts, dtype.name)


class MdsColumn(StoredColumn, frozen=True):
    """A column of an MDS shard."""

    @property
    def is_rewritten(self) -> bool:
        """Return whether values are delivered in other bytes than they are stored in."""
        is_listed = self.encoding in _LISTS or self.items != ""
        return is_listed or self.encoding == "pil" or not _is_known(self.encoding)

    def spec(self) -> ColumnSpec:
        """Return the kind of the column."""
        encoding, _, config = self.encoding.partition(":")
        if not _is_known(self.encoding):
            return ColumnSpec("other", note=f"MDS's {self.encoding}")
        if encoding in _NUMBERS:
            return ColumnSpec("fixed", _NUMBERS[encoding])
        if self.items:
            return ColumnSpec("list", self.items)
        if self.size is not None:
            dtype, _, shape = config.partition(":")
            return ColumnSpec("fixed", dtype, _shape(shape))
        if encoding in _LISTS:
            return ColumnSpec("bytes_list", items=1, feature=_IMAGE_FEATURE)
        if encoding in (*_IMAGES, "pil"):
            return ColumnSpec("bytes", feature=_IMAGE_FEATURE)
        if encoding in ("str", "json"):
            return ColumnSpec("text" if encoding == "str" else "json")
        feature = "" if encoding == "bytes" else json.dumps({"_type": self.encoding})
        return ColumnSpec("bytes", feature=feature)

    def decode(self, buffer: NDArray[np.uint8], starts: Ints, lengths: Ints, block: Block) -> Column:
        """Return the values that lie in a block's bytes at these places, [n]."""
        spec = self.spec()
        if spec.kind == "other":
            raise self.corrupt(block)(f"{spec.note} is not read: leave the column out by columns=")
        if spec.kind == "fixed":
            return numbers_at(buffer, starts, spec.dtype, spec.shape)
        if not self.is_rewritten:
            return Spans(buffer, starts, lengths)
        if self.encoding == "pil":
            return pixels_as_files(buffer, starts, lengths, self.corrupt(block))
        if self.items:
            code = None if ":" in self.encoding else _CODES[self.items]
            return _lists(buffer, starts, lengths, np.dtype(self.items), code, self.corrupt(block))
        before, of_pixels = _LISTS[self.encoding], self.encoding == "list[pil]"
        return byte_lists(buffer, starts, lengths, self.corrupt(block), before=before, of_pixels=of_pixels)

    def num_items(self, nbytes: int) -> int:
        """Return how many elements an array of one dimension has that is stored in so many bytes."""
        head, width = 1 if ":" in self.encoding else 2, np.dtype(self.items).itemsize
        sizes = ((nbytes - head - (1 << k)) // width for k in range(4))
        return next(n for k, n in enumerate(sizes) if n < 1 << (8 << k))


def as_in_sample(layout: SampleLayout, size: int, read: Callable[[int, int], bytes]) -> SampleLayout:
    """The columns, of which those are lists whose arrays have one dimension in a sample.

    Args:
        layout: the columns.
        size: bytes of the sample.
        read: gives bytes of the sample from one on, fewer where it ends; it is asked in ascending order.
    """
    if size < layout.least_bytes or not any(map(_is_array, layout.columns)):
        return layout
    head = read(0, 4 * layout.num_heads)
    if len(head) < 4 * layout.num_heads:
        return layout
    lengths = np.frombuffer(head, "<u4").astype(np.int64)[None]
    spans, columns = layout.spans(np.zeros(1, np.int64), lengths), []
    for column in layout.columns:
        start, length = (int(array[0]) for array in spans[column.name])
        has_dtype = _is_array(column) and start + length <= size
        value = read(start, min(length, 2)) if has_dtype else b""  # dtype, and number of dimensions
        columns.append(structs.replace(column, items=_list_dtype(column.encoding, value) if value else ""))
    return SampleLayout(tuple(columns))


def layout_of(columns: Sequence[Sequence[Any]]) -> SampleLayout:
    """Check the columns of a shard. `ValueError` for what no shard has."""
    if len({name for name, *_ in columns}) < len(columns) or not columns:
        raise ValueError(f"its columns are {[name for name, *_ in columns]}")
    return SampleLayout(tuple(MdsColumn(*_known(*column)) for column in columns))


def _known(name: Any, encoding: Any, size: Any, items: Any = "") -> tuple[str, str, int | None, str]:
    """A column, if its encoding is known and its size is that of it."""
    if items not in ("", *_CODES):
        raise ValueError(f"column {name!r} has elements of {items!r}")
    if not isinstance(name, str) or not isinstance(encoding, str):
        raise ValueError(f"a column is {name!r} of encoding {encoding!r}")
    kind, _, config = encoding.partition(":")
    expected: int | None = None
    if not _is_known(encoding):  # it refuses who asks for it alone
        expected = size if type(size) is int and 0 < size < 1 << 32 else None
    elif kind == "ndarray":
        dtype, _, shape = config.partition(":")
        if shape:
            expected = int(np.prod(_shape(shape), dtype=np.int64)) * np.dtype(dtype).itemsize
            if min(_shape(shape)) < 1 or expected >= 1 << 32:
                raise ValueError(f"column {name!r} is of encoding {encoding!r}")
    elif encoding in _NUMBERS:
        expected = np.dtype(_NUMBERS[encoding]).itemsize
    if size != expected:
        raise ValueError(
            f"column {name!r} of encoding {encoding!r} has values of {size} bytes, not {expected}"
        )
    return name, encoding, expected, items


def _is_known(encoding: str) -> bool:
    kind, _, config = encoding.partition(":")
    if kind == "ndarray":
        return config.partition(":")[0] in ("", *_VALUE_DTYPES.values())
    return encoding in (*_NUMBERS, *_LISTS, *_IMAGES, "pil", "bytes", "str", "json", "pkl", *_TEXT_NUMBERS)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
