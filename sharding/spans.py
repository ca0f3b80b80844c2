"""Bytes that lie anywhere in a buffer: rows of a width, values of any length, unaligned numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def rows_at(buffer: Bytes, starts: Ints, width: int) -> Bytes:
    """Copy `width` bytes from each start on, [n, width]. The caller knows that they lie in the buffer."""
    if not len(starts) or not width:
        return np.zeros((len(starts), width), np.uint8)
    steps = np.diff(starts)
    if (steps == steps[:1]).all() and (not len(steps) or steps[0] >= 0):  # a view, as of rows of one length
        step = int(steps[0]) if len(steps) else width
        view = np.lib.stride_tricks.as_strided(buffer[int(starts[0]) :], (len(starts), width), (step, 1))
        return np.ascontiguousarray(view)
    windows = np.lib.stride_tricks.as_strided(
        buffer, (len(buffer) - width + 1, width), (1, 1), writeable=False
    )
    rows: Bytes = windows[starts]
    return rows


def numbers_at(
    buffer: Bytes, starts: Ints, dtype: np.dtype[Any] | str, shape: tuple[int, ...] = ()
) -> NDArray[Any]:
    """Numbers of one type and shape from each start on, [n, *shape]."""
    dtype = np.dtype(dtype)
    width = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return rows_at(buffer, starts, width).view(dtype).reshape(len(starts), *shape)


def cuts_reaching(bounds: Ints, nbytes: int) -> Ints:
    """Cut pieces between ascending bounds into runs that reach `nbytes`: where each begins, and their end."""
    cuts, last = [0], len(bounds) - 1
    while cuts[-1] < last:
        reached = int(np.searchsorted(bounds, bounds[cuts[-1]] + nbytes))
        cuts.append(min(last, max(cuts[-1] + 1, reached)))
    return np.array(cuts, np.int64)


def gathered(buffer: Bytes, starts: Ints, lengths: Ints) -> Bytes:
    """Copy values of any length one after the other; the fastest way is for those that ascend."""
    import pyarrow as pa

    from sharding.arrow_arrays import number_array

    if not len(starts):
        return np.zeros(0, np.uint8)
    if (lengths == lengths[0]).all():
        return rows_at(buffer, starts, int(lengths[0])).reshape(-1)
    bounds = np.empty(2 * len(starts), np.int64)
    bounds[::2], bounds[1::2] = starts, starts + lengths
    total = int(lengths.sum())
    if (bounds[1:] < bounds[:-1]).any():
        return buffer[np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(total)]
    # Every other piece between these bounds is a value: the others are what lies between values.
    pieces = pa.Array.from_buffers(
        pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(buffer)]
    )
    taken = pieces.take(number_array(np.arange(0, len(bounds), 2)))
    return np.frombuffer(taken.buffers()[2], np.uint8)[:total]
