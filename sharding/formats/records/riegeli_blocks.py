"""Riegeli's blocks: a header of 24 bytes at every 64 KiB, which only repairs need, interrupts what is there.

A *plain* position counts the bytes that are left without these headers.
"""

from __future__ import annotations

import numpy as np

from sharding.formats.records.sparse_copy import ReadableFile
from sharding.spans import Bytes, Ints

BLOCK = 1 << 16
_HEADER = 24
_PLAIN_BLOCK = BLOCK - _HEADER


def plain_positions(positions: Ints) -> Ints:
    """Return the plain positions of bytes of the file at which something may begin."""
    return positions - _HEADER * -(-positions // BLOCK)


def without_headers(data: memoryview, offset: int) -> Bytes:
    """Return the bytes of a file from `offset` on without its headers: a copy, unless there are none."""
    whole = np.frombuffer(data, np.uint8)
    first = -offset % BLOCK
    if first >= len(whole):
        return whole
    last = first + (len(whole) - first) // BLOCK * BLOCK
    blocks = whole[first:last].reshape(-1, BLOCK)[:, _HEADER:]
    return np.concatenate([whole[:first], *blocks, whole[last + _HEADER :]])


class PlainFile:
    """A file as it is without its headers: positions are plain ones. Reading moves the file."""

    def __init__(self, file: ReadableFile) -> None:
        self._file, self._cursor = file, 0

    def seek(self, offset: int, /) -> int:
        """Go to a plain position."""
        self._cursor = offset
        return offset

    def read(self, size: int, /) -> bytes:
        """Read at most so many bytes, fewer at the end of the file only."""
        start, end = (i + _HEADER * (i // _PLAIN_BLOCK + 1) for i in (self._cursor, self._cursor + size - 1))
        self._file.seek(start)
        plain = without_headers(memoryview(self._file.read(end + 1 - start)), start).tobytes()
        self._cursor += len(plain)
        return plain
