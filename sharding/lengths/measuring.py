"""Share the making of samples among ranks, where a length is not known before its sample is made.

Packing window after packing window, samples are made, and their lengths are measured: `unit_plan` says what
follows. The samples of a packing window are dealt to those who measure them lane by lane (`producers`),
whoever gets the rows that they end in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sharding.lengths.unit_plan import PackingWindowPlan, UnitSequence
from sharding.lengths.units import BatchSegments, PackingWindow, Segments
from sharding.order.epoch_order import EpochOrder
from sharding.plan.batch_plan import BatchPlan

_KEPT_OWN = 4


def producers(first: int, end: int, num_lanes: int, num_producers: int) -> NDArray[np.int64]:
    """Return who makes the samples of the positions [first, end), int64 [n]: about as many each, by lane."""
    by_lane = np.argsort(np.arange(first, end) % num_lanes, kind="stable")
    out = np.empty(end - first, np.int64)
    out[by_lane] = np.arange(end - first) * num_producers // max(1, end - first)
    return out


def producer_counts(bounds: NDArray[np.int64], producer: int, num_producers: int) -> NDArray[np.int64]:
    """Count samples of each packing window that `producers` gives to one of them, int64 [windows]."""
    sizes: NDArray[np.int64] = np.diff(bounds)
    before, after = (-(-sizes * number // num_producers) for number in (producer, producer + 1))
    return np.subtract(after, before)


class MeasuredUnits:
    """The units of the last packing windows of an epoch that one loop has measured; for one thread.

    Args:
        sequence: of the epoch.
        packing window: the first one to be measured.
    """

    def __init__(self, sequence: UnitSequence, packing_window: int) -> None:
        self.sequence, self.next_packing_window = sequence, packing_window
        self._units: dict[int, PackingWindow] = {}

    @property
    def num_units(self) -> int:
        """Units of the packing windows that were added, and before."""
        return int(self.sequence.first_unit[self.next_packing_window])

    @property
    def is_all(self) -> bool:
        """Return whether there is no further packing window."""
        return self.next_packing_window == self.sequence.num_packing_windows

    def add(self, lengths: NDArray[np.integer]) -> None:
        """The lengths of the next packing window's samples."""
        self._units[self.next_packing_window] = self.sequence.add(self.next_packing_window, lengths)
        self.next_packing_window += 1

    def forget(self, unit: int) -> None:
        """Nothing before this unit is asked for any more."""
        for packing_window in [m for m in self._units if self.sequence.first_unit[m + 1] <= unit]:
            del self._units[packing_window]

    def take(self, units: NDArray[np.int64]) -> tuple[Segments, NDArray[np.int64]]:
        """Take units as `UnitSequence.take` does."""
        return self.sequence.take(units, self._units.__getitem__)

    def batches(self, dealt: BatchPlan, first_batch: int, last_batch: int) -> BatchSegments:
        """Return what a rank's batches [first_batch, last_batch) consist of."""
        units, rows = dealt.items(first_batch, last_batch)
        segments, segments_of_row = self.take(units)
        return BatchSegments.of(segments, rows, segments_of_row)


class SharePlan(PackingWindowPlan):
    """The samples that one rank makes, in batches of no meaning: those of each packing window by position.

    Args:
        order: the epoch's.
        bounds: of its packing windows.
        counts: int64 [packing windows], how many samples of each.
        own: packing window -> their positions, ascending.
        batch_size: samples of a batch.
    """

    def __init__(
        self,
        order: EpochOrder,
        bounds: NDArray[np.int64],
        counts: NDArray[np.int64],
        own: Callable[[int], NDArray[np.int64]],
        *,
        batch_size: int,
    ) -> None:
        self.bounds, self._places = bounds, lru_cache(_KEPT_OWN)(own)
        self.first_item = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        """Samples of this rank before each packing window, and all, int64 [packing windows + 1]."""
        num_items = int(self.first_item[-1])
        dealt = BatchPlan(num_items=num_items, batch_size=batch_size, rank=0, world_size=1, tail="uneven")
        self.order, self._batch_plan = order, dealt

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `RankPlan.positions`."""
        items, sizes = self.batch_plan.items(first_batch, last_batch)
        if not len(items):
            return items, sizes
        first, end = int(items[0]), int(items[-1]) + 1  # they follow one another
        m0, m1 = np.searchsorted(self.first_item, [first, end - 1], side="right") - 1
        positions = np.concatenate([self._places(m) for m in range(int(m0), int(m1) + 1) if self._count(m)])
        return positions[first - int(self.first_item[m0]) :][: end - first], sizes

    def _count_own(self, packing_window: int) -> NDArray[np.bool_]:
        first, end = self.bounds[packing_window : packing_window + 2].tolist()
        mask = np.zeros(end - first, bool)
        if self._count(packing_window):
            mask[self._places(packing_window) - first] = True
        return mask

    def _count(self, packing_window: int) -> int:
        return int(self.first_item[packing_window + 1] - self.first_item[packing_window])
