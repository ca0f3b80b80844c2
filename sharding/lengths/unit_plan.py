"""One rank's batches of an epoch whose batches depend on lengths.

The units of all planning windows (packed rows, or whole batches) follow one another in one sequence, which
depends on (seed, epoch, order, lengths, batching) and on nothing else: all ranks compute the same, in any
world. In file order, the units of a planning window follow their first samples. A batch is one unit, or as
many rows as the loader's batch size. Global batch b of W ranks holds units [start + b*G, start + (b+1)*G), G
being units a batch times W, and rank r the r-th part of them; so `EpochPlan`'s arithmetic holds with units
for samples: the same number of batches for every rank, its tail rules for what is left over, and one number,
the units done, resumes the epoch in any world.

To know how many units there are, all planning windows are planned once (a pass of a few million samples a
second, on first use); after that a batch costs planning its window again, if it is not one of the last few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.lengths.batching import Batching
from sharding.lengths.units import (
    DEFAULT_WINDOW_SAMPLES,
    NO_PIECES,
    LengthStats,
    Pieces,
    Units,
    joined,
    planning_bounds,
    ranges,
)
from sharding.order.order import Order, mix_key
from sharding.plan.batch_plan import BatchPlan, Tail
from sharding.plan.plan import RankPlan, Windows

_UNITS = 0x756E6974
"""Purpose of a key: the order of the units in a planning window."""
_KEPT_WINDOWS = 4
_KEPT_LOCATED = 64
_CHUNK = 1 << 20


def epoch_lengths(order: Order, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
    """The lengths at the positions of an epoch, [num_samples], from those of the samples in file order."""
    out = np.empty(order.num_samples, lengths.dtype)
    for start in range(0, order.num_samples, _CHUNK):  # bounds the temporaries
        positions = np.arange(start, min(start + _CHUNK, order.num_samples))
        out[positions] = lengths[order.samples(positions)]
    return out


@dataclass(frozen=True, eq=False)
class UnitSequence:
    """All units of one epoch, planned window by window. Shared by the plans of any ranks; thread-safe."""

    lengths: NDArray[np.integer]
    """[num_samples], by position: what `epoch_lengths` gives."""
    batching: Batching
    """`resolved`."""
    seed: int
    epoch: int
    shuffled: bool = True
    """False: the units of a planning window come in the order of their first samples."""

    def __post_init__(self) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise ValueError(f"a sample cannot have {int(self.lengths.min())} elements; lengths must be >= 0")

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First position of every planning window, and the number of samples, int64 [windows + 1]."""
        return planning_bounds(
            len(self.lengths), self.batching.window or DEFAULT_WINDOW_SAMPLES, self.batching.sizes_multiple
        )

    @cached_property
    def _counted(self) -> tuple[NDArray[np.int64], LengthStats, list[Pieces]]:
        """First units, sums, and what was left to each window."""
        counts, stats, carried = [0], [], [NO_PIECES]
        for window in range(len(self.bounds) - 1):
            units = self._plan(window, carried[window])
            counts.append(len(units))
            stats.append(units.stats)
            carried.append(units.carried)
        return np.cumsum(counts).astype(np.int64), LengthStats.total(stats), carried

    @property
    def first_unit(self) -> NDArray[np.int64]:
        """Number of every planning window's first unit, and the number of units, int64 [windows + 1]."""
        return self._counted[0]

    @property
    def stats(self) -> LengthStats:
        """Padding, truncation and more, over the epoch."""
        return self._counted[1]

    @property
    def num_units(self) -> int:
        """Packed rows, or batches, of the epoch."""
        return int(self.first_unit[-1])

    @property
    def num_whole_units(self) -> int:
        """Units but for a last batch that is short of samples, as `Bucketed` may have: what "drop" deals."""
        return self.num_units - (len(self.lengths) % self.batching.sizes_multiple > 0)

    def units(self, window: int) -> Units:
        """The units of a planning window; the last few are kept."""
        return self._planned(window)

    @cached_property
    def _planned(self) -> Callable[[int], Units]:
        return lru_cache(_KEPT_WINDOWS)(lambda window: self._plan(window, self._counted[2][window]))

    def _plan(self, window: int, carried: Pieces) -> Units:
        first, end = self.bounds[window : window + 2].tolist()
        key = mix_key(self.seed, self.epoch, _UNITS, window) if self.shuffled else None
        return self.batching.cut(self.lengths[first:end], key, carried, end == len(self.lengths))

    def window_of_units(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The planning window of each unit, int64 [n]."""
        return np.searchsorted(self.first_unit, units, side="right") - 1

    def take(self, units: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """The pieces of the units, in the order given, and how many each has, int64 [n].

        Positions count from the epoch's first. Units that follow one another in a window are cheapest.
        """
        parts, counts = [], np.empty(len(units), np.int64)
        windows = self.window_of_units(units)
        cuts = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(units)]
        for begin, end in pairwise(cuts) if len(units) else ():
            window = int(windows[begin])
            planned, own = self.units(window), units[begin:end] - self.first_unit[window]
            counts[begin:end] = many = np.diff(planned.first)[own]
            rows = ranges(planned.first[own], many)
            parts.append(planned.pieces.take(rows).moved(int(self.bounds[window])))
        return joined(parts), counts


@dataclass(frozen=True, eq=False)
class BatchPieces:
    """What consecutive batches consist of."""

    pieces: Pieces
    """Batch after batch, row after row."""
    sizes: NDArray[np.int64]
    """[batches]: pieces of each batch."""
    rows: NDArray[np.int64]
    """[batches]: units of each batch."""
    pieces_of_row: NDArray[np.int64]
    """[sum of rows]: pieces of each unit."""

    def one(self, batch: int) -> BatchPieces:
        """A batch alone, counted from 0."""
        first, row = int(self.sizes[:batch].sum()), int(self.rows[:batch].sum())
        own = slice(batch, batch + 1)
        pieces = self.pieces.take(slice(first, first + int(self.sizes[batch])))
        of_row = self.pieces_of_row[row : row + int(self.rows[batch])]
        return BatchPieces(pieces, self.sizes[own], self.rows[own], of_row)

    def keep(self, pieces: NDArray[np.int64]) -> BatchPieces:
        """Only some pieces of one batch, ascending; its rows stay, if need be empty."""
        num_rows = len(self.pieces_of_row)
        row = np.repeat(np.arange(num_rows), self.pieces_of_row)[pieces]
        of_row = np.bincount(row, minlength=num_rows).astype(np.int64)
        return BatchPieces(self.pieces.take(pieces), np.array([len(pieces)]), self.rows, of_row)


class UnitPlan(RankPlan):
    """One rank's batches of one epoch's units, from unit `start` on. Thread-safe.

    Numbers called position here are as in `EpochPlan`, but `start` and `position_after` count units, so
    that a state may lie inside a megabatch.

    Args:
        order: the epoch's.
        sequence: its units.
        units_per_batch: rows of a batch where units are rows; else 1.
        rank, world_size, tail: see `BatchPlan`.
        start: units done, in [0, num_units]: a state's position.

    Raises `ValueError` where an argument is out of range.
    """

    def __init__(
        self,
        order: Order,
        sequence: UnitSequence,
        *,
        units_per_batch: int,
        rank: int,
        world_size: int,
        tail: Tail,
        start: int = 0,
    ) -> None:
        if units_per_batch != 1 and not sequence.batching.rows_are_units:
            raise ValueError("the batching makes whole batches: leave batch_size out")
        if not 0 <= start <= sequence.num_units:
            raise ValueError(f"start must be in [0, {sequence.num_units}] units, got {start}")
        self.sequence = sequence
        num_units = sequence.num_whole_units if tail == "drop" else sequence.num_units
        batch_plan = BatchPlan(
            num_items=num_units,
            batch_size=units_per_batch,
            rank=rank,
            world_size=world_size,
            tail=tail,
            start=min(start, num_units),
        )
        super().__init__(order, batch_plan)

    @property
    def num_dropped_global(self) -> int:
        """Units that no rank gets in this epoch."""
        plan = self.batch_plan
        return self.sequence.num_units - plan.num_items + plan.num_dropped_global

    @property
    def stats(self) -> LengthStats:
        """Padding, truncation and more, over the whole epoch and all ranks, before the tail rule."""
        return self.sequence.stats

    def batches(self, first_batch: int, last_batch: int) -> BatchPieces:
        """What this rank's batches [first_batch, last_batch) consist of. Raises `IndexError` beyond them."""
        units, rows = self.batch_plan.items(first_batch, last_batch)
        pieces, pieces_of_row = self.sequence.take(units)
        ends = np.concatenate(([0], np.cumsum(pieces_of_row)))
        bounds = ends[np.concatenate(([0], np.cumsum(rows)))]
        return BatchPieces(pieces, np.diff(bounds), rows, pieces_of_row)

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `RankPlan.positions`; one entry a piece, and the number of pieces of each batch."""
        batches = self.batches(first_batch, last_batch)
        return batches.pieces.position, batches.sizes

    @property
    def padding(self) -> NDArray[np.int64]:
        """See `RankPlan.padding`; one entry a piece."""
        return self.sequence.take(self.batch_plan.padding)[0].position

    def own_slots(self, window: int, windows: Windows | None = None) -> NDArray[np.int64]:
        """See `RankPlan.own_slots`. A slot comes once for each of its pieces.

        So a window is done with when as many pieces were delivered.
        """
        windows = windows or self.order
        begin, end = windows.window_span(window)
        bounds = self.sequence.bounds
        first, last = (np.searchsorted(bounds, [begin, end - 1], side="right") - 1).tolist()
        last = min(last + 1, len(bounds) - 2)  # pieces may be carried to the megabatch that follows
        parts = [np.empty(0, np.int64)]
        for megabatch in range(first, last + 1):
            numbers, slots = self._located(megabatch, windows)
            parts.append(slots[numbers == window])
        return np.sort(np.concatenate(parts))

    @cached_property
    def _located(self) -> Callable[[int, Any], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Window and slot of this rank's pieces of a megabatch; kept, as windows lie side by side."""
        return lru_cache(_KEPT_LOCATED)(
            lambda megabatch, windows: windows.locate(self._own_pieces(megabatch).position)
        )

    def _own_pieces(self, megabatch: int) -> Pieces:
        """Pieces of a megabatch that this rank's batches take; padding left out."""
        first, end = self.sequence.first_unit[megabatch : megabatch + 2].tolist()
        units = self.batch_plan.own_items(first, end)
        return self.sequence.take(np.arange(first, end) if units is None else units)[0]
