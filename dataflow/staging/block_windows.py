"""Windows as the stream takes them from an order: what lies in each, and where each position lies."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sharding.order.selection import SelectedOrder
from sharding.plan.plan import Windows


class BlockWindows(Windows, Protocol):
    """What the stream needs of an order: `Order`, `MixtureWindows`, or `FullWindows` of a full shuffle."""

    def window_length(self, window: int) -> int:
        """Samples in a window."""

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks of a window in read order."""

    def window_samples(
        self, window: int, indices: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row in the block of each index, or of those given."""


class FullWindows:
    """Consecutive positions of a full shuffle, cut into windows so that the engine has units to stage."""

    def __init__(self, order: SelectedOrder, size: int) -> None:
        self._order, self._size = order, size

        def find(first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            return order.selection.locate(order.samples(np.arange(first, end)))

        # A window is asked for its blocks, then for its samples.
        self._find = lru_cache(1)(find)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and index of each position."""
        return positions // self._size, positions % self._size

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of a window, and the one after its last."""
        first = window * self._size
        return first, min(first + self._size, self._order.num_samples)

    def window_length(self, window: int) -> int:
        """Samples in a window."""
        first, end = self.window_span(window)
        return end - first

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks that hold the window's samples, ascending."""
        return np.unique(self._find(*self.window_span(window))[0])

    def window_samples(
        self, window: int, indices: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row in the block of each index, or of those given."""
        blocks, row = self._find(*self.window_span(window))
        ordinal = np.searchsorted(np.unique(blocks), blocks).astype(np.int32)
        return (ordinal, row) if indices is None else (ordinal[indices], row[indices])
