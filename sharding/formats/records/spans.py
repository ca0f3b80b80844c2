"""Bytes that lie anywhere in a buffer: copies of spans, and numbers that are not aligned."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.formats.records.wire import Bytes, Ints

_LONG_MEAN = 256
"""Above this mean size, copying spans one by one is faster than an index of their bytes."""


def windows(data: Bytes, size: int) -> Bytes:
    """All runs of so many bytes, [n, size], a view."""
    return np.lib.stride_tricks.sliding_window_view(data, size)


def gathered(data: Bytes, starts: Ints, sizes: Ints) -> Bytes:
    """Copy the bytes of spans one after the other."""
    if not sizes.any():
        return np.zeros(0, np.uint8)
    if (sizes == sizes[0]).all():
        return np.ascontiguousarray(windows(data, int(sizes[0]))[starts]).reshape(-1)
    total = int(sizes.sum())
    if total > _LONG_MEAN * len(sizes):
        pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        return np.concatenate([data[start:end] for start, end in pairs])
    return data[np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(total)]


def numbers_at(data: Bytes, at: Ints, dtype: str, count: int = 1) -> NDArray[Any]:
    """Return `count` numbers from each of some bytes on, [n, count]."""
    size = count * np.dtype(dtype).itemsize
    if not len(at):
        return np.zeros((0, count), dtype)
    return np.ascontiguousarray(windows(data, size)[at]).view(dtype)
