"""The endless stream of windows and chunks of one rank: epoch after epoch, in order.

A plan tells which positions each batch takes, the order's windows where they lie; both together are
`BatchIndex`. The stream walks through the batches and stages each window at its first use; it yields it with
the *chunks* (groups of whole batches) that can be built from it and the windows before it, and says which
chunk is the last that needs a window. Any number of windows may be in use side by side: lanes and mixtures
advance in parallel. Padding at the end of an epoch wraps to its first windows, which then come once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dataflow.batch.builder import BuildContext
from dataflow.batch.chunk import BatchChunk
from dataflow.planning.plan import StreamPlan
from dataflow.staging.stager import Stager
from dataflow.staging.window import StagedWindow
from prefetch.memory.copies import Copies
from sharding.order.epoch_order import Windows
from sharding.plan.batch_index import BatchIndex
from sharding.plan.plan import RankPlan
from sharding.spans import Ints

_LOCATED_SAMPLES = 1 << 14
"""Samples located at a time, so that the cost of a call vanishes."""
_LOCATED_BATCHES = 1024


class Stream:
    """Windows and chunks of one rank, without end. One iterator, used by one thread at a time."""

    def __init__(
        self,
        plan: StreamPlan,
        stager: Stager,
        context: BuildContext,
        *,
        copies: Copies | None = None,
        batches_per_chunk: int,
    ) -> None:
        self._plan, self._stager, self._context, self._copies = plan, stager, context, copies
        self._batches_per_chunk = batches_per_chunk
        self._batches_per_lookup = max(
            batches_per_chunk, min(_LOCATED_SAMPLES // plan.samples_per_batch, _LOCATED_BATCHES)
        )
        self._next_chunk = 1

    def windows(self, epoch: int, start: int = 0) -> Iterator[StagedWindow]:
        """Yield windows from a position of an epoch on, for ever. An epoch must hold a batch of this rank."""
        num_empty = 0
        while num_empty < 2:  # a rank may have nothing to make
            plan = self._plan.epoch(epoch, start)
            yield from self._epoch(plan)
            if plan.goes_on:
                start = plan.end
                continue
            epoch, start, num_empty = epoch + 1, 0, 0 if plan.num_batches else num_empty + 1

    def _epoch(self, plan: RankPlan) -> Iterator[StagedWindow]:
        units = self._stager.units(plan.order)
        opened: dict[int, _DealtWindow] = {}
        staged: set[int] = set()
        newest: StagedWindow | None = None
        num_cut, last_inside = 0, 0
        num_looked_up = 1  # later as many as there were between two windows before
        ahead = _NO_BATCHES
        while num_cut < plan.num_batches:
            batches = self._inside(opened, num_cut)
            if batches is None:
                if not ahead:
                    ahead = self._locate(plan, units, num_cut, _until(opened, num_cut, num_looked_up))
                    num_looked_up = min(2 * num_looked_up, self._batches_per_lookup)
                missing = [part.first for part in ahead.parts if part.window not in opened]
                count = ahead.batch_of(missing[0]) if missing else len(ahead)  # in open windows only
                batches, ahead = ahead.between(0, count), ahead.between(count, len(ahead))
            else:
                ahead, num_looked_up = _NO_BATCHES, max(1, num_cut - last_inside)
                last_inside = num_cut + len(batches)
            if batches:
                assert newest is not None
                self._cut(plan, batches, opened, newest.chunk_list)
                num_cut += len(batches)
                continue
            for part in ahead.windows_of_first():
                if part.window in opened:
                    continue
                if newest is not None:
                    yield newest
                # Padding comes back to windows that were dropped: only its own rows are wanted then.
                indices = part.indices if part.window in staged else None
                opened[part.window] = self._open(plan, units, part.window, indices)
                newest = opened[part.window].window
                newest.epoch = plan.order.epoch
                staged.add(part.window)
        if newest is not None:
            yield newest

    def _inside(self, opened: Mapping[int, _DealtWindow], first: int) -> BatchIndex | None:
        """The full batches from `first` on that lie in one open window: most do, and are not looked up."""
        for number, window in opened.items():
            if first in window.core:
                sizes = np.full(window.core.stop - first, self._plan.batch_size)
                return BatchIndex.inside(first, sizes, number)
        return None

    def _locate(self, plan: RankPlan, units: Windows, first: int, last: int) -> BatchIndex:
        """The batches from `first` on, looked up, up to `last` at most."""
        last = min(last, first + self._batches_per_lookup, plan.num_batches)
        if plan.num_padded:  # a padded batch comes alone: it may need windows that the others are done with
            last = min(last, max(first + 1, plan.num_batches - 1))
        positions, sizes = plan.positions(first, last)
        return BatchIndex.located(first, sizes, *units.locate(positions))

    def _cut(
        self, plan: RankPlan, batches: BatchIndex, opened: dict[int, _DealtWindow], chunks: list[BatchChunk]
    ) -> None:
        """Cut batches into chunks, and close what no later batch needs."""
        start = 0
        while start < len(batches):
            chunk_batches = batches.between(start, min(start + self._next_chunk, len(batches)))
            windows = [opened[part.window].window for part in chunk_batches.parts]
            chunk = BatchChunk(self._context, plan, chunk_batches, windows, copies=self._copies)
            start += len(chunk_batches)
            for part in chunk_batches.parts:
                opened[part.window].left -= len(part)
                if opened[part.window].left <= 0 or batches.first + start == plan.num_batches:
                    chunk.closes.append(opened.pop(part.window).window)
            chunks.append(chunk)
            # The stream's first batch waits for one batch's work only.
            self._next_chunk = min(2 * self._next_chunk, self._batches_per_chunk)

    def _open(self, plan: RankPlan, units: Windows, number: int, indices: Ints | None) -> _DealtWindow:
        """Stage a window for the indices given, or else for all that this rank's batches take of it."""
        self._stager.check_fits(units, number)
        if indices is None:
            indices = plan.rank_indices(number, units)
        core = plan.batches_inside(number)
        if indices is None:
            return _DealtWindow(self._stager.stage(units, number, None), units.window_length(number), core)
        left = len(indices)
        if plan.num_padded:  # the last batch may come while the window is still open
            numbers, padded = units.locate(plan.padding)
            indices = np.concatenate((indices, padded[numbers == number]))
            indices = np.unique(indices)
        return _DealtWindow(self._stager.stage(units, number, indices), left, core)


@dataclass
class _DealtWindow:
    """A window that batches to come need."""

    window: StagedWindow
    left: int
    """Samples that these take of it."""
    core: range
    """Full batches, over all ranks, that need nothing else."""


_NO_BATCHES = BatchIndex(0, np.zeros(0, np.int64), ())


def _until(opened: Mapping[int, _DealtWindow], first: int, count: int) -> int:
    """Return where the batches from `first` on that must be looked up end: before those of one open window.

    Where no such window is known, after `count`: the next one may be about to be opened.
    """
    cores = [window.core.start for window in opened.values() if window.core.start > first]
    return min(cores, default=first + count)
