"""Share the making of samples among ranks, where a length is not known before its sample is made.

Megabatch after megabatch, samples are made, and their lengths are measured: `unit_plan` says what follows.
The samples of a megabatch are dealt to those who measure them lane by lane (`makers`), whoever gets the rows
that they end in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sharding.lengths.unit_plan import MegabatchPlan, UnitSequence
from sharding.lengths.units import BatchSegments, Segments, Units
from sharding.order.epoch_order import EpochOrder
from sharding.plan.batch_plan import BatchPlan

_KEPT_OWN = 4


def makers(first: int, end: int, num_lanes: int, num_makers: int) -> NDArray[np.int64]:
    """Return who makes the samples of the positions [first, end), int64 [n]: about as many each, by lane."""
    by_lane = np.argsort(np.arange(first, end) % num_lanes, kind="stable")
    out = np.empty(end - first, np.int64)
    out[by_lane] = np.arange(end - first) * num_makers // max(1, end - first)
    return out


def maker_counts(bounds: NDArray[np.int64], maker: int, num_makers: int) -> NDArray[np.int64]:
    """Count the samples of each megabatch that `makers` gives to one of them, int64 [megabatches]."""
    sizes: NDArray[np.int64] = np.diff(bounds)
    before, after = (-(-sizes * number // num_makers) for number in (maker, maker + 1))
    return np.subtract(after, before)


class MeasuredUnits:
    """The units of the last megabatches of an epoch that one loop has measured; for one thread.

    Args:
        sequence: of the epoch.
        megabatch: the first one to be measured.
    """

    def __init__(self, sequence: UnitSequence, megabatch: int) -> None:
        self.sequence, self.next_megabatch = sequence, megabatch
        self._units: dict[int, Units] = {}

    @property
    def num_units(self) -> int:
        """Units of the megabatches that were added, and before."""
        return int(self.sequence.first_unit[self.next_megabatch])

    @property
    def is_all(self) -> bool:
        """Return whether there is no further megabatch."""
        return self.next_megabatch == self.sequence.num_megabatches

    def add(self, lengths: NDArray[np.integer]) -> None:
        """The lengths of the next megabatch's samples."""
        self._units[self.next_megabatch] = self.sequence.add(self.next_megabatch, lengths)
        self.next_megabatch += 1

    def forget(self, unit: int) -> None:
        """Nothing before this unit is asked for any more."""
        for megabatch in [m for m in self._units if self.sequence.first_unit[m + 1] <= unit]:
            del self._units[megabatch]

    def take(self, units: NDArray[np.int64]) -> tuple[Segments, NDArray[np.int64]]:
        """Take units as `UnitSequence.take` does."""
        return self.sequence.take(units, self._units.__getitem__)

    def batches(self, dealt: BatchPlan, first_batch: int, last_batch: int) -> BatchSegments:
        """Return what a rank's batches [first_batch, last_batch) consist of."""
        units, rows = dealt.items(first_batch, last_batch)
        segments, segments_of_row = self.take(units)
        return BatchSegments.of(segments, rows, segments_of_row)


class SharePlan(MegabatchPlan):
    """The samples that one rank makes, in batches of no meaning: those of each megabatch by position.

    Args:
        order: the epoch's.
        bounds: of its megabatches.
        counts: int64 [megabatches], how many samples of each.
        own: megabatch -> their positions, ascending.
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
        self.bounds, self._own = bounds, lru_cache(_KEPT_OWN)(own)
        self.first_item = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        """Samples of this rank before each megabatch, and all, int64 [megabatches + 1]."""
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
        positions = np.concatenate([self._own(m) for m in range(int(m0), int(m1) + 1) if self._count(m)])
        return positions[first - int(self.first_item[m0]) :][: end - first], sizes

    def _count_own(self, megabatch: int) -> NDArray[np.bool_]:
        first, end = self.bounds[megabatch : megabatch + 2].tolist()
        mask = np.zeros(end - first, bool)
        if self._count(megabatch):
            mask[self._own(megabatch) - first] = True
        return mask

    def _count(self, megabatch: int) -> int:
        return int(self.first_item[megabatch + 1] - self.first_item[megabatch])
