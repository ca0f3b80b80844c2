"""Checks of Arrow arrays that come from files, which pyarrow follows without looking where they lead.

An offset, a code of a dictionary, a view or a run may point outside its buffer. These checks raise
`pa.ArrowInvalid`, level by level of nested types, before anything is read at such a place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.formats.arrow.schema import is_list_view


def check_chunks(column: pa.ChunkedArray) -> None:
    """Raise `pa.ArrowInvalid` where an offset, index, view or run leads outside its buffers.

    Of text only the ends of its offsets are seen here, since full validation would decode it: who
    takes lengths from them sees the rest. Chunks mostly share their dictionary, which is then checked once.
    """
    if pa.types.is_dictionary(column.type):
        column.validate()
        _check_dictionaries(column)
    elif not _is_offset_text(column.type):
        column.validate(full=True)
    else:
        column.validate()
        for chunk in column.chunks:
            valid_of(chunk)


def _check_dictionaries(column: pa.ChunkedArray) -> None:
    checked = set()
    for chunk in column.chunks:
        entries = chunk.dictionary
        valid_of(chunk)
        check_codes(chunk.indices, len(entries))
        key = (len(entries), entries.offset, *(b.address for b in entries.buffers() if b is not None))
        if key not in checked:
            entries.validate(full=True)
            checked.add(key)


def _is_offset_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_offset_text(kind.storage_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def check_nested(array: pa.Array) -> None:
    """Raise `pa.ArrowInvalid` where an offset, a dictionary code or a text is broken, at any level.

    Full validation says so, with one exception: beneath nulls, Arrow's own builders fill dictionary codes
    with 0, also where the dictionary is empty, and full validation refuses what they wrote. Such arrays are
    checked level by level.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        array.validate()  # lengths of buffers and children
        _check_levels(array)


def _check_levels(array: pa.Array) -> None:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _check_levels(array.storage)
    elif pa.types.is_dictionary(kind):
        array.dictionary.validate(full=True)
        # A 0 that nothing masks is an IndexError of `to_pylist`.
        check_codes(array.indices, max(len(array.dictionary), 1))
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            _check_levels(array.field(i))
    elif pa.types.is_fixed_size_list(kind):
        _check_levels(array.values)
    elif pa.types.is_nested(kind) and not pa.types.is_run_end_encoded(kind):
        _check_offsets(array)
        _check_levels(array.values)
    else:
        array.validate(full=True)


def _check_offsets(array: pa.Array) -> None:
    """Check the offsets of lists or a map, or of lists of nulls."""
    kind, nothing = array.type, pa.null()
    if is_list_view(kind):
        like = (pa.large_list_view if pa.types.is_large_list_view(kind) else pa.list_view)(nothing)
    else:
        like = (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(nothing)
    parts = array.buffers()[: like.num_buffers]
    nulls = pa.nulls(len(array.values))
    pa.Array.from_buffers(like, len(array), parts, offset=array.offset, children=[nulls]).validate(full=True)


def check_codes(indices: pa.Array, num_entries: int) -> None:
    """Raise `pa.ArrowInvalid` where a code, nulls aside, is none of so many entries of a dictionary."""
    import pyarrow.compute as pc

    codes = pc.min_max(indices).as_py()
    if codes["max"] is not None and not 0 <= codes["min"] <= codes["max"] < num_entries:
        raise pa.ArrowInvalid(
            f"codes {codes['min']} to {codes['max']} of a dictionary of {num_entries} entries"
        )


def valid_of(array: pa.Array) -> NDArray[np.bool_] | None:
    """[n] which values are there, None if all are."""
    if not array.null_count:
        return None
    bitmap = array.buffers()[0]
    valid = np.zeros(len(array), bool) if bitmap is None else bits_of(bitmap, array.offset, len(array))
    if np.count_nonzero(valid) + array.null_count != len(array):  # the count of IPC comes from a header
        raise pa.ArrowInvalid(f"{array.null_count} nulls are told, and its bitmap has others")
    return valid


def bits_of(bitmap: pa.Buffer, offset: int, n: int) -> NDArray[np.bool_]:
    """`n` bits from bit `offset` on, as bools."""
    first = offset // 8
    packed = elements_of(bitmap, np.uint8, (offset + n + 7) // 8 - first, first)
    return np.unpackbits(packed, bitorder="little")[offset - 8 * first :][:n].view(np.bool_)


def elements_of(buffer: pa.Buffer | None, dtype: Any, n: int = -1, first: int = 0) -> NDArray[Any]:
    """`n` elements of a buffer from element `first` on; -1 for all of it."""
    dtype = np.dtype(dtype)
    if buffer is None or buffer.size == 0:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, n, first * dtype.itemsize)
