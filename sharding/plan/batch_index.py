"""Locate the rows of batches: batch b takes these indices of window w.

The one answer to that question: the stream finds it, for many batches at a time, and opens and closes windows
by it; a chunk takes its part, and turns indices into rows of staged windows, which know their samples. All of
it is slices and arrays: to take the batches of a chunk out of those looked up costs two searches a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.order.windows import windows_touched


class WindowRows(Struct, frozen=True, eq=False):
    """The rows of some batches that one window fills."""

    window: int
    rows: slice | NDArray[np.int64]
    """[n] ascending, counted from the first batch's first; a slice where they follow one another."""
    indices: NDArray[np.int64] | None
    """[n] the index in the window of each; None: not looked up yet."""

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def first(self) -> int:
        """The first row; of no rows, there is none."""
        return int(self.rows.start if isinstance(self.rows, slice) else self.rows[0])

    def between(self, begin: int, end: int) -> WindowRows:
        """Return the part with the rows [begin, end), counted from `begin`."""
        if isinstance(self.rows, slice):
            first = self.rows.start
            start, stop = max(begin, first), max(begin, first, min(end, self.rows.stop))
            rows: slice | NDArray[np.int64] = slice(start - begin, stop - begin)
            start, stop = start - first, stop - first
        else:
            start, stop = np.searchsorted(self.rows, (begin, end)).tolist()
            rows = self.rows[start:stop] - begin
            if start < stop and rows[-1] - rows[0] == len(rows) - 1:
                rows = slice(int(rows[0]), int(rows[0]) + len(rows))
        return WindowRows(self.window, rows, None if self.indices is None else self.indices[start:stop])


class BatchIndex(Struct, frozen=True, eq=False, dict=True):
    """Consecutive batches of a plan, and where their rows lie."""

    first: int
    """Number of the first batch."""
    sizes: NDArray[np.int64]
    """The number of rows of each batch, [batches]."""
    parts: Sequence[WindowRows]
    """The rows, window by window, in order of first use."""

    @classmethod
    def located(
        cls, first: int, sizes: NDArray[np.int64], windows: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> BatchIndex:
        """Batches of which window and index of each row were looked up, both [rows]."""
        parts = [WindowRows(window, rows, indices[rows]) for window, rows in windows_touched(windows)]
        return cls(first, sizes, parts)

    @classmethod
    def inside(cls, first: int, sizes: NDArray[np.int64], window: int) -> BatchIndex:
        """Batches that lie in one window, and are not looked up."""
        return cls(first, sizes, [WindowRows(window, slice(0, int(sizes.sum())), None)])

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """[batches] the row after the last of each."""
        return np.cumsum(self.sizes)

    def batch_of(self, row: int) -> int:
        """The batch that holds a row, counted from 0."""
        return int(np.searchsorted(self._ends, row, side="right"))

    def windows_of_first(self) -> list[WindowRows]:
        """The parts that the first batch has rows of."""
        return [part for part in self.parts if part.first < self._ends[0]]

    def between(self, start: int, stop: int) -> BatchIndex:
        """The batches [start, stop), counted from 0."""
        if start == 0 and stop == len(self):
            return self
        begin, end = (int(self._ends[batch - 1]) if batch else 0 for batch in (start, stop))
        parts = [piece for part in self.parts if len(piece := part.between(begin, end))]
        parts.sort(key=lambda part: part.first)
        return BatchIndex(self.first + start, self.sizes[start:stop], parts)
