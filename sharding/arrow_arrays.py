"""Arrow arrays from numpy arrays, texts and bytes, by hand.

`pyarrow.array` looks for pandas, whose import takes 0.2 to 1 s where it is installed: longer than a loop has
to its first batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

MOST = (1 << 31) - 1
"""The values of an array whose type is not large have so many bytes or items, at most."""


def number_array(numbers: NDArray[Any]) -> pa.Array:
    """Return numbers as an array of their type, without a copy where they are contiguous."""
    content = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, content])


def bool_array(flags: NDArray[np.bool_]) -> pa.Array:
    """Return flags as an array of bools."""
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, bits(flags)])


def text_array(values: Sequence[str | None], kind: pa.DataType | None = None) -> pa.Array:
    """Return texts as an array; None is null.

    Args:
        values: the texts.
        kind: of them; None: `large_string`.

    Raises:
        TypeError: a value is no text.
        UnicodeEncodeError: it has letters that UTF-8 has not.
        OverflowError: `kind` cannot hold so many bytes.
    """
    valid = valid_of(values)
    texts: Sequence[Any] = values if valid is None else [value or "" for value in values]
    joined = "".join(texts)
    content = joined.encode()
    pieces = texts if len(content) == len(joined) else [text.encode() for text in texts]
    return _of_pieces(pieces, content, valid, kind or pa.large_string())


def bytes_array(values: Sequence[bytes | None], kind: pa.DataType | None = None) -> pa.Array:
    """Return bytes as an array, as `text_array` texts; `kind` None: `large_binary`."""
    valid = valid_of(values)
    pieces: Sequence[Any] = values if valid is None else [value or b"" for value in values]
    return _of_pieces(pieces, b"".join(pieces), valid, kind or pa.large_binary())


def bits(flags: NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Return bools as Arrow has them; None stays."""
    return None if flags is None else pa.py_buffer(np.packbits(flags, bitorder="little"))


def valid_of(values: Sequence[Any]) -> NDArray[np.bool_] | None:
    """Return which values are not None, [n]; None: all."""
    if None not in values:
        return None
    return np.fromiter((value is not None for value in values), np.bool_, len(values))


def _of_pieces(
    pieces: Sequence[Any], content: bytes, valid: NDArray[np.bool_] | None, kind: pa.DataType
) -> pa.Array:
    is_large = kind in (pa.large_string(), pa.large_binary())
    if not is_large and len(content) > MOST:
        raise OverflowError(f"{len(content):,} bytes in a column of type {kind}")
    ends = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=ends[1:])
    buffers = [bits(valid), pa.py_buffer(ends if is_large else ends.astype(np.int32)), pa.py_buffer(content)]
    return pa.Array.from_buffers(kind, len(pieces), buffers)
