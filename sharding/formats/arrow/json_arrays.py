"""Columns of Python values and of JSON texts as Arrow arrays.

Lists of integers, which are what tokens are kept as, are read from their text at once: as Python integers
each takes 100 ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.arrow_arrays import MOST, bits, number_array, text_array, valid_of

Text = bytes | msgspec.Raw
"""The JSON text of one value."""
_OF_INTEGERS = b"[]0123456789-, \t\r"
_SPACED = bytes.maketrans(b"[],", b"   ")
_integers = msgspec.json.Decoder(list[list[int | None] | None])


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values of a type as an array; `None` is null.

    Raises:
        TypeError, ValueError, OverflowError, UnicodeEncodeError: a value is not of the type.
    """
    if pa.types.is_null(kind):
        return pa.nulls(len(values), kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return text_array(values).cast(kind)
    if pa.types.is_list(kind):
        valid = valid_of(values)
        lists: Sequence[Any] = values if valid is None else [value or () for value in values]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return list_array(lengths, valid, array_of(list(chain.from_iterable(lists)), kind.value_type))
    return _numbers(values, kind)


def list_array(lengths: NDArray[np.int64], valid: NDArray[np.bool_] | None, items: pa.Array) -> pa.Array:
    """Return lists of so many items each, which follow one another; `valid`: those that are no nulls."""
    if len(items) > MOST:
        raise OverflowError(f"{len(items):,} items in lists of one row group: give a smaller row_group_size")
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None if valid is None or valid.all() else bits(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.list_(items.type), len(lengths), buffers, children=[items])


def integer_lists(raws: Sequence[Text], kind: pa.DataType) -> pa.Array:
    """Lists of integers, given their texts; raises as `array_of`, and where a text is no such list."""
    texts = RawTexts(raws)
    pair = texts.integers(np.dtype(str(kind.value_type)))
    if pair is not None:
        numbers, lengths = pair
        return list_array(lengths, None, number_array(numbers))
    try:
        return array_of(texts.values(_integers), kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _numbers(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    dtype = np.dtype("float64" if pa.types.is_floating(kind) else str(kind))
    valid = valid_of(values) if dtype.kind == "b" else None  # numpy makes a bool of None
    try:
        numbers = np.array(values if valid is None else [bool(value) for value in values], dtype)
    except TypeError:
        valid = valid_of(values)
        numbers = np.array([value or 0 for value in values], dtype)
    if dtype.kind == "f":  # numpy makes NaN of None
        suspects = np.flatnonzero(np.isnan(numbers)).tolist()
        valid = valid_of(values) if any(values[i] is None for i in suspects) else None
    content = bits(numbers) if dtype.kind == "b" else pa.py_buffer(numbers)
    return pa.Array.from_buffers(kind, len(values), [bits(valid), content])


class RawTexts:
    """JSON texts of a column in one piece: of `n` values, of which those that are missing or null are null.

    `buffer` holds them one behind the other, `lengths` [n] in bytes, `missing` [n] says which are null.
    """

    def __init__(self, raws: Sequence[Text]) -> None:
        self.buffer = b"".join(raws)
        self.lengths = np.fromiter(map(len, [memoryview(raw) for raw in raws]), np.int64, len(raws))
        self.ends = np.cumsum(self.lengths)
        self.missing = self.lengths == 0
        suspects = np.flatnonzero(self.lengths == 4)
        self.missing[suspects] = self.first_bytes(suspects) == ord("n")  # no other value begins so

    def first_bytes(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The first byte of the texts of some rows, none of which is empty."""
        return np.frombuffer(self.buffer or b"\0", np.uint8).take((self.ends - self.lengths)[rows])

    def integers(self, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
        """The integers in lists, and how many each has; None: the texts hold something else, or one beyond.

        What lies beyond the type counts as its end: who does not know that none does must look for these.
        """
        if self.buffer.translate(None, _OF_INTEGERS) or self.buffer.count(b"[") != len(self.lengths):
            return None  # nulls, fractions, or lists in lists
        numbers = np.fromstring(self.buffer.translate(_SPACED), dtype, sep=" ")
        commas = np.flatnonzero(np.frombuffer(self.buffer or b"\0", np.uint8) == ord(","))
        lengths = np.diff(np.searchsorted(commas, self.ends), prepend=0) + (self.lengths > 2)
        # Brackets with nothing but spaces in them are seen by their sum.
        return (numbers, lengths) if lengths.sum() == len(numbers) else None

    def values(self, decoder: msgspec.json.Decoder[Any]) -> list[Any]:
        """The texts as Python values, by a decoder of lists of such."""
        pieces = [self.buffer[a:b] or b"null" for a, b in pairwise([0, *self.ends.tolist()])]
        values: list[Any] = decoder.decode(b"[%s]" % b",".join(pieces))
        return values

    def array(self) -> pa.Array:
        """The texts as Arrow strings. `pa.ArrowInvalid` where one is not UTF-8."""
        valid = ~self.missing if self.missing.any() else None
        content = [bits(valid), pa.py_buffer(np.append(0, self.ends)), pa.py_buffer(self.buffer)]
        texts = pa.Array.from_buffers(pa.large_string(), len(self.lengths), content)
        if not self.buffer.isascii():
            texts.validate(full=True)
        return texts
