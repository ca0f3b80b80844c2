"""Large records, of which only the parts are read that say what they hold: not their long byte strings.

An Example tells the size of each part before it, so what is long can be passed over. Each long byte string
costs a read, which also has the small parts behind it and the header of the next record.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sharding.formats.records.wire import SPAN, WireError, varint

SPARSE_MEAN_BYTES = 64 << 10
"""Above this mean size of a record, passing over byte strings beats reading them, as of members of a tar."""
AHEAD_BYTES = 4 << 10
_SHORT_BYTES = 512
"""A part up to this size is read as a whole."""
_LISTS, _VALUES = 3, 4
_CHILDREN = ((1,), (1,), (2,), (1, 2, 3), (1,))
"""By depth, the fields that are looked into, from the features of a record to the values of a list."""


class ReadableFile(Protocol):
    """A file that can be read from any position on."""

    def seek(self, offset: int, /) -> int:
        """Go to a position."""
        ...

    def read(self, size: int, /) -> bytes:
        """Read at most so many bytes; none at the end."""
        ...


class SparseCopy:
    """A part of a file, some bytes of which are read; others are zeros, which take no memory.

    Args:
        file: is read from and moved.
        offset: where in the file it begins.
        num_bytes: its length, within the file.
    """

    def __init__(self, file: ReadableFile, offset: int, num_bytes: int) -> None:
        self.data = np.zeros(num_bytes, np.uint8)
        self._view, self._file, self._offset = self.data.data, file, offset
        self._low = self._high = 0  # what was read last without a gap

    def need(self, start: int, end: int) -> None:
        """Read these bytes if they are not there, and some more."""
        if self._low <= start and end <= self._high:
            return
        if not self._low <= start <= self._high:
            self._low = self._high = start
        position, self._high = self._high, min(max(end, self._high + AHEAD_BYTES), len(self._view))
        self._file.seek(self._offset + position)
        while position < self._high and (piece := self._file.read(self._high - position)):
            self._view[position : position + len(piece)] = piece
            position += len(piece)

    def need_structure(self, start: int, end: int) -> None:
        """Read what says what a record holds; all of it, if that is no Example."""
        try:
            self._walk(start, end, 0, 0)
        except WireError:
            self.need(start, end)

    def _walk(self, position: int, end: int, depth: int, kind: int) -> None:
        while position < end:
            self.need(position, min(end, position + 12))
            tag, position = varint(self._view[:end], position)
            if tag & 7 != SPAN:
                self.need(position, end)
                return
            size, position = varint(self._view[:end], position)
            stop, number = position + size, tag >> 3
            if stop > end:
                raise WireError("a field ends behind its message")
            is_bytes = depth == _VALUES and kind == 1
            if size <= _SHORT_BYTES or (depth == _VALUES and not is_bytes) or number not in _CHILDREN[depth]:
                self.need(position, stop)
            elif not is_bytes:
                self._walk(position, stop, depth + 1, number if depth == _LISTS else 0)
            position = stop
