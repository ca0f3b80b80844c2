"""Stage a window of an order: which blocks it needs, and which of their rows.

Of a full shuffle's windows, few samples of many blocks are wanted; of all others, most of each. What is made
of that, `open_rows` says, or where builders read by themselves, what only plans windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dataflow.staging.block_source import BlockSource
from dataflow.staging.columns import ALIGN
from dataflow.staging.rows import counted_through, open_rows
from dataflow.staging.window import RowFraction, StagedWindow
from prefetch.core.kernels import kernels
from prefetch.errors import MemoryLimitError
from prefetch.memory.arena import Arena
from sharding.order.epoch_order import EpochOrder, SourceWindow, Windows
from sharding.order.order import Order
from sharding.order.selection import SelectedOrder
from sharding.spans import Ints

_FULL_WINDOW_SAMPLES = 4096
_PLAN_BYTES = 16
"""Bytes that planning a window takes for each of its samples."""


class FullWindows:
    """Consecutive positions of a full shuffle, cut into windows so that the engine has units to stage."""

    def __init__(self, order: SelectedOrder, size: int) -> None:
        self._order, self._size = order, size

        def find(first: int, end: int) -> tuple[Ints, Ints]:
            return order.rows_at(np.arange(first, end))

        # A window is asked for its blocks, then for its samples.
        self._find = lru_cache(1)(find)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Window and index of each position."""
        return positions // self._size, positions % self._size

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of a window, and the one after its last."""
        first = window * self._size
        return first, min(first + self._size, self._order.num_samples)

    def window_positions(self, window: int) -> Ints:
        """The position of each index of a window."""
        return np.arange(*self.window_span(window))

    def window_length(self, window: int) -> int:
        """The number of samples in a window."""
        first, end = self.window_span(window)
        return end - first

    def window_blocks(self, window: int) -> Ints:
        """Blocks that hold the window's samples, ascending."""
        return np.unique(self._find(*self.window_span(window))[0])

    def window_samples(self, window: int, indices: Ints | None = None) -> tuple[NDArray[np.int32], Ints]:
        """Block ordinal and row in the block of each index, or of those given."""
        blocks, row = self._find(*self.window_span(window))
        ordinal = np.searchsorted(np.unique(blocks), blocks).astype(np.int32)
        return (ordinal, row) if indices is None else (ordinal[indices], row[indices])

    def source_window(self, window: int) -> SourceWindow:
        """The window itself: mixtures have no full shuffle."""
        return SourceWindow(0, None, self, window)


class Stager:
    """Makes the windows of a stream. Used by one thread at a time.

    Args:
        sources: what is read, in the order of a mixture.
        arena: where windows lie.
        num_readers: threads that will read a window's blocks.
        limit_bytes: the memory limit; a window of a full shuffle may take an eighth of it.
        open_window: opens windows, as `open_rows`, which reads; builders elsewhere read by themselves.
        seed: of the random numbers that say which parts of values are read.
    """

    def __init__(
        self,
        sources: Sequence[BlockSource],
        arena: Arena,
        *,
        num_readers: int,
        limit_bytes: int,
        open_window: Callable[..., StagedWindow] = open_rows,
        seed: int = 0,
    ) -> None:
        self._sources, self._arena, self._limit_bytes = sources, arena, limit_bytes
        self._open_window, self._seed = open_window, seed
        self._num_readers, self._full_window_bytes = num_readers, limit_bytes // 8
        self._matches = [
            [match.stager(arena, num_readers=num_readers) for match in source.matches] for source in sources
        ]

    def units(self, order: EpochOrder) -> Windows:
        """The windows to stage of an epoch's order."""
        if isinstance(order, SelectedOrder) and order.shuffle.kind == "full":
            size = max(1, min(_FULL_WINDOW_SAMPLES, self._full_window_bytes // self._full_sample_bytes()))
            return FullWindows(order, size)
        return order

    def check_fits(self, units: Windows, number: int) -> None:
        """Raise `MemoryLimitError` where the samples of a window are too many to list them within the limit.

        A few kilobytes of a compressed shard may hold any number of samples.
        """
        num_samples = units.window_length(number)
        if num_samples * _PLAN_BYTES <= self._limit_bytes:
            return
        unit = units.source_window(number)
        source, blocks = self._sources[unit.source], unit.windows.window_blocks(unit.number)
        largest = source.catalog.block(int(blocks[source.catalog.blocks.num_samples[blocks].argmax()]))
        raise MemoryLimitError(
            f"the next shuffle window has {num_samples:,} samples, {largest.num_samples:,} of them in one "
            f"block of {largest.shard.url} at offset {largest.offset}: to list them takes "
            f"{num_samples * _PLAN_BYTES:,} bytes, more than memory_limit={self._limit_bytes:,}; raise "
            "memory_limit, lower Shuffle(window_blocks=...), or write shards with smaller blocks (row groups)"
        )

    def _full_sample_bytes(self) -> int:
        """Return the mean bytes of a sample of a full shuffle in a window: of its values, or its block."""
        source = self._sources[0]
        table = source.catalog.blocks
        used = np.flatnonzero(table.num_samples)
        if source.locates(used[:1]):
            values = int(table.nbytes.sum()) // int(table.num_samples.sum())
            return values + ALIGN * len(source.columns)
        return 1 + int((table.length + table.nbytes)[used].mean())

    def stage(self, units: Windows, number: int, indices: Ints | None) -> StagedWindow:
        """A window of which only the rows at some indices are needed; None for all."""
        unit = units.source_window(number)
        source = self._sources[unit.source]
        window, joins = self._staged(source, unit.windows, unit.number, indices), self._matches[source.number]
        if joins:
            window = joins[0].joined(window, window.rows, joins)
        window.seed, window.source_epoch = self._seed, unit.epoch
        return window

    def _staged(self, source: BlockSource, units: Windows, number: int, indices: Ints | None) -> StagedWindow:
        """A window of a source, without what is joined to it."""
        if source.cache is not None and isinstance(units, Order):
            source.cache.begins(units.epoch, number)
        if indices is None and isinstance(units, SelectedOrder) and units.selection.is_whole:
            nbytes = 8 * units.window_length(number)
            # Recycled memory: first touches cost more than the mixing.
            rows = self._arena.lease(nbytes)[:nbytes].view(np.int64)
            num_samples = source.catalog.blocks.num_samples
            blocks = units.whole_window(number, num_samples, rows, kernels().seeded_permutations)
            return self._opened(source, blocks, rows, "all")
        ordinal, row = units.window_samples(number, indices)
        blocks, needed_rows = counted_through(source, units.window_blocks(number), ordinal, row)
        rows = needed_rows
        if indices is not None:
            rows = np.full(units.window_length(number), -1)
            rows[indices] = needed_rows
        return self._opened(source, blocks, rows, "few" if isinstance(units, FullWindows) else "many")

    def _opened(self, source: BlockSource, blocks: Ints, rows: Ints, share: RowFraction) -> StagedWindow:
        return self._open_window(
            source, self._arena, blocks, rows, share=share, num_readers=self._num_readers
        )
