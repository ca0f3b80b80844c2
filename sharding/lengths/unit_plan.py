"""The length-aware plans of a run: one for each epoch, rank and place in it, from the lengths of all samples.

The units of all megabatches (packed rows, or whole batches) follow one another in one sequence, which depends
on (seed, epoch, order, lengths, batching) and on nothing else: all ranks compute the same, in any world. In
file order, the units of a megabatch follow their first samples. A batch is one unit, or as many rows as the
loader's batch size. Units are dealt to ranks by the arithmetic that deals out samples, `BatchPlan`: the same
number of batches for every rank, its tail rules for what is left over, and one number, the units done,
resumes the epoch in any world.

To know how many units there are, all megabatches are planned once (a pass of a few million samples a second,
on first use); after that a batch costs planning its megabatch again, if it is not one of the last few.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.lengths.batching import Batching, Bucketed, Packed
from sharding.lengths.units import (
    DEFAULT_MEGABATCH_SAMPLES,
    NO_PIECES,
    LengthStats,
    Pieces,
    Units,
    joined,
    megabatch_bounds,
)
from sharding.order.epoch_order import EpochOrder, Windows
from sharding.order.keyed import mix_key
from sharding.order.windows import ranges, windows_touched
from sharding.plan.batch_plan import BatchPlan, Dealing
from sharding.plan.plan import RankPlan

_UNITS = 0x756E6974
"""Purpose of a key: the order of the units in a megabatch."""
_KEPT_EPOCHS = 2
"""The loader and its stream, which is an epoch ahead at times, ask for the same ones."""
_KEPT_MEGABATCHES = 4
_KEPT_COUNTS = 1024
"""16 KiB each, if no sample is cut into more than 255 pieces."""


def epoch_lengths(order: EpochOrder, lengths: NDArray[np.integer], begin: int = 0) -> NDArray[np.integer]:
    """The lengths at the positions of an epoch, [num_samples], from those of the samples in file order.

    Before `begin`, from which on the order is known, they are 0.
    """
    out = np.empty(order.num_samples, lengths.dtype)
    out[:begin] = 0
    for positions, samples in order.in_turn(begin):
        out[positions] = lengths[samples]
    return out


def units_key(seed: int, epoch: int, shuffled: bool) -> Callable[[int], int | None]:
    """Megabatch -> what decides the order of its units; None: their first samples do."""
    return partial(_unit_key, seed, epoch) if shuffled else _no_key


def _unit_key(seed: int, epoch: int, megabatch: int) -> int:
    return mix_key(seed, epoch, _UNITS, megabatch)


def _no_key(megabatch: int) -> None:
    return None


@dataclass(frozen=True)
class SequencePlace:
    """The begin of a megabatch that takes over nothing from the one before."""

    epoch: int
    position: int
    """Its first sample."""
    unit: int
    """Units before."""

    @classmethod
    def from_json(cls, mark: Mapping[str, object], epoch: int) -> SequencePlace:
        """The place in a state's mark; the begin of the epoch where it has none."""
        numbers = [mark.get(name) for name in ("first_sample", "units_before")]
        first, unit = (number if type(number) is int and number >= 0 else 0 for number in numbers)
        return cls(epoch, first, unit)

    def to_json(self) -> dict[str, object]:
        """What `from_json` takes."""
        return {"first_sample": self.position, "units_before": self.unit}


BEGIN = SequencePlace(0, 0, 0)
"""Of a run, or of any epoch."""


@dataclass(frozen=True, eq=False)
class UnitSequence:
    """All units of one epoch, megabatch by megabatch. Shared by the plans of any ranks; thread-safe."""

    lengths: NDArray[np.integer]
    """[num_samples], by position: what `epoch_lengths` gives."""
    batching: Batching
    """`resolved`."""
    _: KW_ONLY
    seed: int
    epoch: int
    shuffled: bool = True
    """False: the units of a megabatch come in the order of their first samples."""
    begin: SequencePlace = BEGIN
    """From where on the units are known."""
    closes_at: int | None = None
    """A megabatch that begins there takes over nothing from the one before."""

    def __post_init__(self) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise ValueError(f"a sample cannot have {int(self.lengths.min())} elements; lengths must be >= 0")

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First position of every megabatch, and the number of samples, int64 [megabatches + 1]."""
        size = self.batching.window or DEFAULT_MEGABATCH_SAMPLES
        return megabatch_bounds(len(self.lengths), size, self.batching.sizes_multiple)

    @cached_property
    def _counted(self) -> tuple[NDArray[np.int64], LengthStats, list[Pieces]]:
        """First units, sums, and what was left to each megabatch."""
        first = int(np.searchsorted(self.bounds, self.begin.position))
        counts, stats, carried = [self.begin.unit], list[LengthStats](), [NO_PIECES] * (first + 1)
        counts += [0] * first
        for megabatch in range(first, len(self.bounds) - 1):
            units = self._plan(megabatch, carried[megabatch])
            counts.append(len(units))
            stats.append(units.stats)
            carried.append(units.carried)
        return np.cumsum(counts).astype(np.int64), LengthStats.total(stats), carried

    @property
    def first_unit(self) -> NDArray[np.int64]:
        """Number of every megabatch's first unit, and the number of units, int64 [megabatches + 1]."""
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

    @cached_property
    def units(self) -> Callable[[int], Units]:
        """The units of a megabatch; the last few are kept."""
        carried = self._counted[2]
        return lru_cache(_KEPT_MEGABATCHES)(lambda megabatch: self._plan(megabatch, carried[megabatch]))

    def _plan(self, megabatch: int, carried: Pieces) -> Units:
        first, end = self.bounds[megabatch : megabatch + 2].tolist()
        key = units_key(self.seed, self.epoch, self.shuffled)(megabatch)
        is_last = end in (len(self.lengths), self.closes_at)
        return self.batching.cut(self.lengths[first:end], key, carried, is_last)

    def take(self, units: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """The pieces of the units, in the order given, and how many each has, int64 [n].

        Positions count from the epoch's first. Units that follow one another in a megabatch are cheapest. One
        before the first that is known stands for one as far behind it: a last batch is filled up with those.
        """
        if self.begin.unit and len(units) and int(units.min()) < self.begin.unit:
            behind = self.begin.unit + units % (self.num_units - self.begin.unit)
            units = np.where(units < self.begin.unit, behind, units)
        return pieces_of_units(units, self.first_unit, self.units, self.bounds)


def pieces_of_units(
    units: NDArray[np.int64],
    first_unit: NDArray[np.int64],
    units_of: Callable[[int], Units],
    bounds: NDArray[np.int64],
) -> tuple[Pieces, NDArray[np.int64]]:
    """See `UnitSequence.take`, of megabatches with these first units and positions."""
    parts, counts = [], np.empty(len(units), np.int64)
    megabatches = np.searchsorted(first_unit, units, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(megabatches)) + 1).tolist(), len(units)]
    for begin, end in pairwise(cuts) if len(units) else ():
        megabatch = int(megabatches[begin])
        plan, own = units_of(megabatch), units[begin:end] - first_unit[megabatch]
        counts[begin:end] = np.diff(plan.first)[own]
        rows = ranges(plan.first[own], counts[begin:end])
        parts.append(plan.pieces.take(rows).shifted(int(bounds[megabatch])))
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

    @classmethod
    def of(cls, pieces: Pieces, rows: NDArray[np.int64], pieces_of_row: NDArray[np.int64]) -> BatchPieces:
        """Batches of so many rows each, of so many pieces each."""
        ends = np.concatenate(([0], np.cumsum(pieces_of_row)))
        bounds = ends[np.concatenate(([0], np.cumsum(rows)))]
        return cls(pieces, np.diff(bounds), rows, pieces_of_row)

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
        dealing: see `BatchPlan`; `batch_size` is 1 unless units are rows, and `start` counts units, in
            [0, num_units].

    Raises `ValueError` where an argument is out of range.
    """

    def __init__(self, order: EpochOrder, sequence: UnitSequence, **dealing: Unpack[Dealing]) -> None:
        if dealing["batch_size"] != 1 and not sequence.batching.rows_are_units:
            raise ValueError("the batching makes whole batches: leave batch_size out")
        start = dealing.get("start", 0)
        if not 0 <= start <= sequence.num_units:
            raise ValueError(f"start must be in [0, {sequence.num_units}] units, got {start}")
        self.sequence = sequence
        num_units = sequence.num_whole_units if dealing["tail"] == "drop" else sequence.num_units
        dealing["start"] = min(start, num_units)
        super().__init__(order, BatchPlan(num_items=num_units, **dealing))

    @property
    def stats(self) -> LengthStats:
        """Padding, truncation and more, over the whole epoch and all ranks, before the tail rule."""
        return self.sequence.stats

    def batches(self, first_batch: int, last_batch: int) -> BatchPieces:
        """What this rank's batches [first_batch, last_batch) consist of. Raises `IndexError` beyond them."""
        units, rows = self.batch_plan.items(first_batch, last_batch)
        pieces, pieces_of_row = self.sequence.take(units)
        return BatchPieces.of(pieces, rows, pieces_of_row)

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `RankPlan.positions`; one entry a piece, and the number of pieces of each batch."""
        batches = self.batches(first_batch, last_batch)
        return batches.pieces.position, batches.sizes

    @property
    def padding(self) -> NDArray[np.int64]:
        """See `RankPlan.padding`; one entry a piece."""
        return self.sequence.take(self.batch_plan.padding)[0].position

    def own_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64]:
        """See `RankPlan.own_indices`. An index comes once for each of its pieces.

        So a window is done with when as many pieces were delivered.
        """
        positions = (windows or self.order).window_positions(window)
        indices = np.flatnonzero(positions >= 0)  # of a mixture's window, some may come in another epoch
        positions = positions[indices]
        bounds, counts = self.sequence.bounds, np.zeros(len(positions), np.int64)
        for megabatch, at in windows_touched(np.searchsorted(bounds, positions, side="right") - 1):
            counts[at] = self._own_counts(megabatch)[positions[at] - bounds[megabatch]]
        return np.repeat(indices, counts)

    @cached_property
    def _own_counts(self) -> Callable[[int], NDArray[np.unsignedinteger]]:
        """How many pieces of each position of a megabatch are this rank's; where all are, none is planned.

        Kept of many megabatches: windows lie side by side, and that of a small source spans a hundred.
        """
        return lru_cache(_KEPT_COUNTS)(self._count_own)

    def _count_own(self, megabatch: int) -> NDArray[np.unsignedinteger]:
        sequence = self.sequence
        first, end = sequence.bounds[megabatch : megabatch + 2].tolist()
        touched = [megabatch]
        if end < len(sequence.lengths):  # pieces may be carried to the megabatch that follows
            touched.append(megabatch + 1)
        own = [self._own_units(m) for m in touched]
        if all(units is None for units in own):  # wherever each piece goes: nothing is planned
            counts = sequence.batching.num_pieces(sequence.lengths[first:end])
        else:
            parts = [self._pieces(m, units).position for m, units in zip(touched, own, strict=True)]
            positions = np.concatenate(parts)
            positions = positions[(positions >= first) & (positions < end)]
            counts = np.bincount(positions - first, minlength=end - first)
        return counts.astype(np.min_scalar_type(counts.max(initial=0)))

    def _own_units(self, megabatch: int) -> NDArray[np.int64] | None:
        """Units of a megabatch that this rank's batches take, padding left out; None: all, and not none."""
        first, end = self.sequence.first_unit[megabatch : megabatch + 2].tolist()
        return self.batch_plan.own_items(first, end) if first < end else np.empty(0, np.int64)

    def _pieces(self, megabatch: int, units: NDArray[np.int64] | None) -> Pieces:
        first, end = self.sequence.first_unit[megabatch : megabatch + 2].tolist()
        return self.sequence.take(np.arange(first, end) if units is None else units)[0]


class UnitPlanner:
    """Finds the units of any epoch of one dataset. Thread-safe.

    Args:
        lengths: [num_samples] in file order, as `column_lengths.resolve_lengths` gives them; of a mixture,
            those of its sources one after the other.
        batching: as the user gives it.
        window: samples of a megabatch where that leaves it open.
        typical: lengths as they are delivered, where samples do not come equally often; None: `lengths`.
        begin, closes_at: of the units of the epoch that `begin` names, see `UnitSequence`.
        num_marked: samples, of which the mark tells; None: all.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer],
        batching: Batching,
        window: int = DEFAULT_MEGABATCH_SAMPLES,
        typical: NDArray[np.integer] | None = None,
        *,
        begin: SequencePlace = BEGIN,
        closes_at: int | None = None,
        num_marked: int | None = None,
    ) -> None:
        self.lengths, self._open_batching, self._num_marked = lengths, batching, num_marked
        self._begin, self._closes_at = begin, closes_at
        self._is_changed = False
        """Whether its orders are not those of other planners of the dataset."""
        self._typical = lengths if typical is None else typical
        self.batching = batching.resolved(self._typical, window)
        # Replaced, never changed: two threads may find the same units at the same time, no more.
        self._sequences: tuple[tuple[object, UnitSequence], ...] = ()

    def __getstate__(self) -> dict[str, object]:
        """A copy finds units by itself."""
        return {**self.__dict__, "_sequences": ()}

    def sequence(self, order: EpochOrder) -> UnitSequence:
        """The units of an order of the dataset's samples; those of the last epochs are kept."""
        key = order.seed, order.epoch, order.shuffle
        for other, sequence in self._sequences:
            if other == key:
                return sequence
        is_begun = order.epoch == self._begin.epoch
        begin = self._begin if is_begun else BEGIN
        sequence = UnitSequence(
            epoch_lengths(order, self.lengths, begin.position),
            self.batching,
            seed=order.seed,
            epoch=order.epoch,
            shuffled=order.shuffle.kind != "none",
            begin=begin,
            closes_at=self._closes_at if is_begun else None,
        )
        self._sequences = ((key, sequence), *self._sequences[: _KEPT_EPOCHS - 1])
        return sequence

    @property
    def samples_per_unit(self) -> int:
        """About how many samples a unit has, for sizing; nothing is planned for it."""
        mean = max(1.0, float(self._typical.mean())) if len(self._typical) else 1.0
        if isinstance(self.batching, Bucketed):
            return self.batching.batch_size
        if isinstance(self.batching, Packed):
            return max(1, int(self.batching.length / mean))
        most = self.batching.max_samples or len(self.lengths)
        return max(1, min(int(self.batching.max_tokens / mean), most))

    def plan(self, order: EpochOrder, **dealing: Unpack[Dealing]) -> UnitPlan:
        """One rank's batches of an epoch."""
        return UnitPlan(order, self.sequence(order), **dealing)

    def place(self, order: EpochOrder, position: int) -> SequencePlace:
        """From where on samples and units must be known for what comes from a unit on."""
        sequence = self.sequence(order)
        begin, close = sequence.begin, sequence.closes_at
        if close is not None:
            unit = int(sequence.first_unit[np.searchsorted(sequence.bounds, close)])
            if position >= unit:
                begin = SequencePlace(order.epoch, close, unit)
        return replace(begin, epoch=order.epoch)

    def change_after(self, order: EpochOrder, position: int) -> int:
        """The first sample, after a unit, from which on the order may change: no unit before has one of them.

        What a megabatch is begun with follows from the one before, which is closed: all of its units are
        still to come.
        """
        sequence = self.sequence(order)
        bounds, first = sequence.bounds, sequence.first_unit
        if position >= sequence.num_units:
            return int(bounds[-1])
        place, megabatch = self.place(order, position), int(np.searchsorted(first, position, "right")) - 1
        if position == place.unit:
            return place.position
        end = int(bounds[megabatch + 1])
        if position == int(first[megabatch]) or end == sequence.closes_at:
            return end
        return int(bounds[min(megabatch + 2, len(bounds) - 1)])

    def state(self, order: EpochOrder, position: int) -> dict[str, object]:
        """As `FoundPlanner.state`: the mark, and from where on units must be known, if not all."""
        place = self.place(order, position)
        return self.mark | place.to_json() if place.position else self.mark

    def changed(self, begin: SequencePlace, closes_at: int | None) -> UnitPlanner:
        """The planner of an order that changes: known from a place on, and closed at a position."""
        return self._with(self.batching.window, begin, closes_at)  # a new one: it has seen no order

    def resumed(self, mark: Mapping[str, object], epoch: int) -> UnitPlanner:
        """The planner of a state with this mark: its megabatch is taken where the user gave none."""
        window, begin = mark.get("window"), SequencePlace.from_json(mark, epoch)
        if self._open_batching.window is not None or type(window) is not int or window < 1:
            window = self.batching.window
        is_same = (window, begin.position) == (self.batching.window, 0) and not self._is_changed
        return self if is_same else self._with(window, begin, None)

    def _with(self, window: int | None, begin: SequencePlace, closes_at: int | None) -> UnitPlanner:
        planner = UnitPlanner(
            self.lengths,
            self._open_batching,
            window or DEFAULT_MEGABATCH_SAMPLES,
            self._typical,
            begin=begin,
            closes_at=closes_at,
            num_marked=self._num_marked,
        )
        planner._is_changed = True
        return planner

    @cached_property
    def mark(self) -> dict[str, object]:
        """What must agree for a number of units to mean the same ones, as JSON types: a state keeps it."""
        digest = hashlib.blake2b(self.lengths[: self._num_marked].astype("<i8").tobytes(), digest_size=8)
        return self.batching.to_json() | {"lengths": digest.hexdigest()}
