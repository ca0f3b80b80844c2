"""The endless stream of windows and chunks of one rank: epoch after epoch, in order.

A plan tells which positions each batch takes, the order's windows where they lie. The stream walks through
the batches and stages each window at its first use; it yields it with the *chunks* (groups of whole
batches) that can be built from it and the windows before it, and says which chunk is the last that needs a
window. Any number of windows may be in use side by side: lanes and mixtures advance in parallel. Padding at
the end of an epoch wraps to its first windows, which then come once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataflow.batch.chunk import BatchChunk, BuildContext
from dataflow.staging.block_windows import BlockWindows, Located
from dataflow.staging.stager import Stager
from dataflow.staging.window import StagedWindow
from dataflow.stream.plan import StreamPlan
from sharding.order.order import Order
from sharding.order.windows import windows_touched
from sharding.plan.plan import EpochPlan, RankPlan

_LOCATED_SAMPLES = 1 << 14
"""Samples located at a time, so that the cost of a call vanishes."""
_LOCATED_BATCHES = 1024


class Stream:
    """Windows and chunks of one rank, without end. One iterator, used by one thread at a time."""

    def __init__(
        self, plan: StreamPlan, stager: Stager, context: BuildContext, *, batches_per_chunk: int
    ) -> None:
        self._plan, self._stager, self._context = plan, stager, context
        self._batches_per_chunk = batches_per_chunk
        self._batches_per_lookup = max(
            batches_per_chunk, min(_LOCATED_SAMPLES // plan.samples_per_batch, _LOCATED_BATCHES)
        )
        self._next_chunk = 1

    def windows(self, epoch: int, start: int = 0) -> Iterator[StagedWindow]:
        """From a position of an epoch on, for ever. A whole epoch must hold a batch for this rank."""
        while True:
            yield from self._epoch(self._plan.epoch(epoch, start))
            epoch, start = epoch + 1, 0

    def _epoch(self, plan: RankPlan) -> Iterator[StagedWindow]:
        units = self._stager.units(plan.order)
        opened: dict[int, _DealtWindow] = {}
        staged: set[int] = set()
        newest: StagedWindow | None = None
        num_cut = 0
        ahead = _NO_BATCHES
        while num_cut < plan.num_batches:
            batches = self._inside(opened, num_cut)
            if batches is None:
                ahead = ahead or self._locate(plan, units, num_cut)
                batches, ahead = ahead.split(_servable(ahead, opened))
            else:
                ahead = _NO_BATCHES
            if batches:
                assert newest is not None
                self._cut(plan, batches, opened, newest.chunk_list)
                num_cut += len(batches)
                continue
            first, _ = ahead.split(1)
            for number in first.windows:
                if number in opened:
                    continue
                if newest is not None:
                    yield newest
                # Padding comes back to windows that were dropped: only its own rows are wanted then.
                indices = first.indices_of(number) if number in staged else None
                opened[number] = self._open(plan, units, number, indices)
                newest = opened[number].window
                newest.epoch = plan.order.epoch
                staged.add(number)
        if newest is not None:
            yield newest

    def _inside(self, opened: Mapping[int, _DealtWindow], first: int) -> _BatchRange | None:
        """The full batches from `first` on that lie in one open window: most do, and are not looked up."""
        for window in opened.values():
            if first in window.core:
                sizes = np.full(window.core.stop - first, self._plan.batch_size)
                return _BatchRange(first, sizes, [window.number], None)
        return None

    def _locate(self, plan: RankPlan, units: BlockWindows, first: int) -> _BatchRange:
        """The batches from `first` on, looked up."""
        last = min(first + self._batches_per_lookup, plan.num_batches)
        if plan.num_padded:  # a padded batch comes alone: it may need windows that the others are done with
            last = min(last, max(first + 1, plan.num_batches - 1))
        positions, sizes = plan.positions(first, last)
        return _BatchRange.of(first, sizes, units.locate(positions))

    def _cut(
        self, plan: RankPlan, batches: _BatchRange, opened: dict[int, _DealtWindow], chunks: list[BatchChunk]
    ) -> None:
        """Cut batches into chunks, and close what no later batch needs."""
        ends = np.cumsum(batches.sizes)
        batch = row = 0
        while batch < len(batches):
            stop = min(batch + self._next_chunk, len(batches))
            end = int(ends[stop - 1])
            taken, located = batches.rows(row, end)
            windows = {number: opened[number].window for number in taken}
            chunk = BatchChunk(
                self._context,
                plan,
                first_batch=batches.first + batch,
                sizes=batches.sizes[batch:stop],
                windows=windows,
                located=located,
            )
            for number, count in taken.items():
                opened[number].left -= count
                if opened[number].left <= 0 or batches.first + stop == plan.num_batches:
                    chunk.closes.append(opened.pop(number).window)
            chunks.append(chunk)
            # The stream's first batch waits for one batch's work only.
            self._next_chunk = min(2 * self._next_chunk, self._batches_per_chunk)
            batch, row = stop, end

    def _open(
        self, plan: RankPlan, units: BlockWindows, number: int, indices: NDArray[np.int64] | None
    ) -> _DealtWindow:
        """Stage a window for the indices given, or else for all that this rank's batches take of it."""
        self._stager.check_fits(units, number)
        if indices is None:
            indices = plan.own_indices(number, units)
        core = range(0)
        if isinstance(units, Order) and isinstance(plan, EpochPlan):
            core = plan.batch_plan.batches_within(*units.window_core(number))
        if indices is None:
            return _DealtWindow(
                number, self._stager.stage(units, number, None), units.window_length(number), core
            )
        left = len(indices)
        if plan.num_padded:  # the last batch may come while the window is still open
            numbers, padded = units.locate(plan.padding)
            indices = np.concatenate((indices, padded[numbers == number]))
        return _DealtWindow(number, self._stager.stage(units, number, np.unique(indices)), left, core)


@dataclass
class _DealtWindow:
    """A window that batches to come need."""

    number: int
    window: StagedWindow
    left: int
    """Samples that these take of it."""
    core: range
    """Full batches, over all ranks, that need nothing else."""


@dataclass(frozen=True)
class _BatchRange:
    """Consecutive batches."""

    first: int
    sizes: NDArray[np.int64]
    """[batches] samples of each."""
    windows: list[int]
    """Those they need, in order of first use."""
    located: Located | None
    """None: not looked up, as all lie in one window."""

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, first: int, sizes: NDArray[np.int64], located: Located) -> _BatchRange:
        """Batches that were looked up."""
        return cls(first, sizes, [number for number, _ in windows_touched(located[0])], located)

    def split(self, batches: int) -> tuple[_BatchRange, _BatchRange]:
        """The first batches, looked up, and the others."""
        assert self.located is not None
        (numbers, indices), rows = self.located, int(self.sizes[:batches].sum())
        return (
            _BatchRange.of(self.first, self.sizes[:batches], (numbers[:rows], indices[:rows])),
            _BatchRange.of(self.first + batches, self.sizes[batches:], (numbers[rows:], indices[rows:])),
        )

    def rows(self, begin: int, end: int) -> tuple[dict[int, int], Located | None]:
        """How many samples each window has of some rows, and where these lie."""
        if self.located is None:
            return {self.windows[0]: end - begin}, None
        numbers, indices = (column[begin:end] for column in self.located)
        if len(self.windows) == 1:
            return {self.windows[0]: end - begin}, (numbers, indices)
        counts = {number: int(np.count_nonzero(numbers == number)) for number in self.windows}
        return {number: count for number, count in counts.items() if count}, (numbers, indices)

    def indices_of(self, window: int) -> NDArray[np.int64]:
        """The indices of a window that they take, looked up, ascending."""
        assert self.located is not None
        numbers, indices = self.located
        return np.sort(indices[numbers == window])


_NO_BATCHES = _BatchRange(0, np.zeros(0, np.int64), [], None)


def _servable(ahead: _BatchRange, opened: Mapping[int, _DealtWindow]) -> int:
    """How many of the batches need open windows only, up to where one of these serves alone."""
    count = len(ahead)
    missing = [number for number in ahead.windows if number not in opened]
    if missing:
        assert ahead.located is not None
        at = int(np.flatnonzero(np.isin(ahead.located[0], missing))[0])
        count = int(np.searchsorted(np.cumsum(ahead.sizes), at, side="right"))
    cores = [window.core.start - ahead.first for window in opened.values() if window.core.start > ahead.first]
    return min(count, *cores) if cores else count
