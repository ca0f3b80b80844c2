"""Plans of batches by length where the length of a sample is not known before the sample is made.

Megabatch after megabatch, samples are made (text is tokenised, say), and their lengths are found. From these
alone the units of the megabatch follow: nothing is carried from one to the next. The units of all megabatches
are one sequence, as in `unit_plan`, and are dealt to ranks by the same arithmetic; only how many there are
shows at the end of the epoch. The samples of a megabatch are dealt to those who find them lane by lane
(`finders`), whoever gets the rows that they end in.

A place in an epoch is a number of units, and the megabatch it lies in with the units before that: to go on
there, this megabatch is found again, and none before it. What fills up the last batch of an epoch are its own
first units, as the epoch's first ones are long gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.lengths.batching import Batching, Bucketed
from sharding.lengths.unit_plan import (
    BEGIN,
    BatchPieces,
    SequencePlace,
    epoch_lengths,
    pieces_of_units,
    units_key,
)
from sharding.lengths.units import (
    DEFAULT_MEGABATCH_SAMPLES,
    LengthStats,
    Pieces,
    Units,
    megabatch_bounds,
)
from sharding.order.epoch_order import EpochOrder, Windows
from sharding.order.windows import windows_touched
from sharding.plan.batch_plan import BatchPlan, Dealing
from sharding.plan.plan import RankPlan

LEFT_OUT = -1
"""The length of a sample that could not be made, and is in no unit."""
UNKNOWN = 1 << 62
"""Batches of an epoch of which nobody knows yet how many it has."""
_KEPT_EPOCHS = 3
_KEPT_OWN = 4
_KEPT_SHARES = 1024
"""16 KiB each; the window of a small source of a mixture spans a hundred megabatches."""


def finders(first: int, end: int, num_lanes: int, num_finders: int) -> NDArray[np.int64]:
    """Who finds the lengths of the positions [first, end), int64 [n]: each about as many, lane by lane."""
    by_lane = np.argsort(np.arange(first, end) % num_lanes, kind="stable")
    out = np.empty(end - first, np.int64)
    out[by_lane] = np.arange(end - first) * num_finders // max(1, end - first)
    return out


def finder_counts(bounds: NDArray[np.int64], finder: int, num_finders: int) -> NDArray[np.int64]:
    """How many samples of each megabatch `finders` gives to one of them, int64 [megabatches]."""
    sizes: NDArray[np.int64] = np.diff(bounds)
    before, after = (-(-sizes * number // num_finders) for number in (finder, finder + 1))
    return np.subtract(after, before)


class FoundPlaces:
    """The units of one epoch as far as their number is known; it grows. Shared by loops; thread-safe.

    Args:
        batching: with its `window`.
        num_samples: positions of the epoch.
        key_of: megabatch -> the key of its units' order, or None.
        megabatch, unit: where the epoch is begun, or gone on with, and the units before.
    """

    def __init__(
        self,
        batching: Batching,
        num_samples: int,
        key_of: Callable[[int], int | None],
        *,
        megabatch: int = 0,
        unit: int = 0,
    ) -> None:
        size = batching.window or DEFAULT_MEGABATCH_SAMPLES
        self.batching, self._key_of = batching, key_of
        self.bounds = megabatch_bounds(num_samples, size, batching.sizes_multiple)
        """First position of every megabatch, and the number of samples, int64 [megabatches + 1]."""
        self._start = megabatch
        # Replaced, never changed: two threads may find the same megabatch at the same time, no more.
        self._known: tuple[tuple[int, ...], tuple[LengthStats, ...], int] = (unit,), (), 0
        """First unit of each megabatch from the start on, and of the one that is to be found next; sums; 1 if
        the last unit of all is a batch that is short of samples."""

    @property
    def num_megabatches(self) -> int:
        """Of the whole epoch."""
        return len(self.bounds) - 1

    @property
    def begin(self) -> int:
        """The first unit that is known."""
        return self._known[0][0]

    @property
    def num_known(self) -> int:
        """Units of the megabatches that were found, and before."""
        return self._known[0][-1]

    @property
    def is_complete(self) -> bool:
        """Whether all megabatches were found."""
        return self._start + len(self._known[0]) > self.num_megabatches

    @property
    def num_short(self) -> int:
        """1 if the last unit is a batch that is short of samples; known at the end."""
        return self._known[2]

    @property
    def stats(self) -> LengthStats:
        """Of the megabatches that were found."""
        return LengthStats.total(self._known[1])

    def first_unit(self, megabatch: int) -> int:
        """Units before a megabatch that is known."""
        return self._known[0][megabatch - self._start]

    def at(self, unit: int) -> tuple[int, int]:
        """The last known megabatch that begins with the unit or before it, and its first unit."""
        firsts = self._known[0]
        number = max(0, int(np.searchsorted(firsts, unit, side="right")) - 1)
        return self._start + number, firsts[number]

    def cut(self, megabatch: int, lengths: NDArray[np.integer]) -> Units:
        """The units of a megabatch, from the lengths of its samples, [n]; `LEFT_OUT` for those in none."""
        made = np.flatnonzero(lengths != LEFT_OUT)
        # What is chosen by the lengths is chosen by these alone.
        batching = self.batching.resolved(lengths[made])
        units = batching.cut(lengths[made], self._key_of(megabatch))
        position = made[units.pieces.position]
        return Units(Pieces(position, units.pieces.begin, units.pieces.length), units.first, units.stats)

    def add(self, megabatch: int, lengths: NDArray[np.integer]) -> Units:
        """Note what was found of a megabatch; its units. `ValueError` if it was other lengths before."""
        units = self.cut(megabatch, lengths)
        (firsts, stats, _), number = self._known, megabatch - self._start
        if number + 1 == len(firsts):
            short = int(np.count_nonzero(lengths != LEFT_OUT) % self.batching.sizes_multiple > 0)
            self._known = (*firsts, firsts[-1] + len(units)), (*stats, units.stats), short
        elif firsts[number + 1] - firsts[number] != len(units):
            raise ValueError(
                f"the samples from position {int(self.bounds[megabatch])} on have other lengths than "
                "the same samples had before: what makes them must make the same each time"
            )
        return units


class FoundPlan(RankPlan):
    """One rank's batches of one epoch's units, from unit `start` on, as far as they are known. Thread-safe.

    Args:
        order: the epoch's.
        places: its units.
        dealing: see `BatchPlan`; `batch_size` is 1 unless units are rows, and `start` counts units.

    Raises `ValueError` where an argument is out of range.
    """

    def __init__(self, order: EpochOrder, places: FoundPlaces, **dealing: Unpack[Dealing]) -> None:
        if dealing["batch_size"] != 1 and not places.batching.rows_are_units:
            raise ValueError("the batching makes whole batches: leave batch_size out")
        self._dealing: Dealing = dealing
        self.order, self.places = order, places
        self.megabatch, self.first_unit = places.at(dealing.get("start", 0))
        """The one that the first batch begins in, and the units before."""
        if places.is_complete and self.start > places.num_known:
            raise ValueError(f"start must be in [0, {places.num_known}] units, got {self.start}")
        _ = self.batch_plan  # raises where an argument is out of range

    @property
    def batch_plan(self) -> BatchPlan:  # type: ignore[override]  # it grows
        """Of the units that are known."""
        return self.dealt(self.places.num_known, is_all=self.places.is_complete)

    def dealt(self, num_units: int, *, is_all: bool, rank: int | None = None) -> BatchPlan:
        """How so many units are dealt to a rank (None: this one); only whole batches unless it is all."""
        dealing, start = self._dealing.copy(), self.start
        if not is_all:
            dealing["tail"], num_units = "drop", max(num_units, start)
        elif dealing["tail"] == "drop":
            num_units -= self.places.num_short
        dealing["start"] = min(start, num_units)
        if rank is not None:
            dealing["rank"] = rank
        return BatchPlan(num_items=num_units, **dealing)

    @property
    def start(self) -> int:
        """Units done before the first batch."""
        return self._dealing.get("start", 0)

    @property
    def world_size(self) -> int:
        """Ranks that get different batches."""
        return self._dealing["world_size"]

    @property
    def global_batch_size(self) -> int:
        """Units of all ranks in a full batch."""
        return self._dealing["batch_size"] * self.world_size

    @property
    def num_batches(self) -> int:
        """Batches of this rank; `UNKNOWN` before the whole epoch was found."""
        return self.batch_plan.num_batches if self.places.is_complete else UNKNOWN

    @property
    def num_global_batches(self) -> int:
        """Batches that at least one rank gets; `UNKNOWN` before the whole epoch was found."""
        return self.batch_plan.num_global_batches if self.places.is_complete else UNKNOWN

    @property
    def stats(self) -> LengthStats:
        """Padding, truncation and more, over all ranks, of the megabatches that were found."""
        return self.places.stats

    def position_after(self, num_batches: int) -> int:
        """See `RankPlan.position_after`."""
        if self.places.is_complete:
            return self.batch_plan.position_after(num_batches)
        return self.start + num_batches * self.global_batch_size

    def own_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64] | None:
        """Not asked: what is read for these batches has a plan of its own, `SharePlan`."""
        raise NotImplementedError


def items_of(
    dealt: BatchPlan, first_batch: int, last_batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As `BatchPlan.items`, but the last batch is filled up with its own first units."""
    items, sizes = dealt.items(first_batch, last_batch)
    repeats = dealt.repeats(first_batch, last_batch)
    if repeats.any():
        begin = dealt.start + dealt.num_full * dealt.global_batch_size
        items = np.where(repeats, begin + items % (dealt.num_items - begin), items)
    return items, sizes


class FoundUnits:
    """The units of the last megabatches of an epoch; for one thread.

    Args:
        places: of the epoch.
        megabatch: the first one to be found.
        unit: its first unit.
    """

    def __init__(self, places: FoundPlaces, megabatch: int, unit: int) -> None:
        self.places, self.next_megabatch = places, megabatch
        self._units: dict[int, Units] = {}
        self._firsts = {megabatch: unit}

    @property
    def num_units(self) -> int:
        """Units of the megabatches that were added, and before."""
        return self._firsts[self.next_megabatch]

    @property
    def is_all(self) -> bool:
        """Whether there is no further megabatch."""
        return self.next_megabatch == self.places.num_megabatches

    def add(self, lengths: NDArray[np.integer]) -> None:
        """The lengths of the next megabatch's samples."""
        units = self.places.add(self.next_megabatch, lengths)
        self._units[self.next_megabatch] = units
        self._firsts[self.next_megabatch + 1] = self.num_units + len(units)
        self.next_megabatch += 1

    def forget(self, unit: int) -> None:
        """Nothing before this unit is asked for any more."""
        for megabatch in [m for m in self._units if self._firsts[m + 1] <= unit]:
            del self._units[megabatch], self._firsts[megabatch]

    def take(self, units: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """As `UnitSequence.take`."""
        numbers = sorted(self._firsts)
        firsts = np.array([self._firsts[m] for m in numbers], np.int64)
        bounds = self.places.bounds[numbers]
        return pieces_of_units(units, firsts, lambda i: self._units[numbers[i]], bounds)

    def batches(self, dealt: BatchPlan, first_batch: int, last_batch: int) -> BatchPieces:
        """What a rank's batches [first_batch, last_batch) consist of."""
        units, rows = items_of(dealt, first_batch, last_batch)
        pieces, pieces_of_row = self.take(units)
        return BatchPieces.of(pieces, rows, pieces_of_row)


class SharePlan(RankPlan):
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
        self._bounds, self._own = bounds, lru_cache(_KEPT_OWN)(own)
        self.first_item = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        """Samples of this rank before each megabatch, and all, int64 [megabatches + 1]."""
        num_items = int(self.first_item[-1])
        dealt = BatchPlan(num_items=num_items, batch_size=batch_size, rank=0, world_size=1, tail="uneven")
        super().__init__(order, dealt)

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `RankPlan.positions`."""
        items, sizes = self.batch_plan.items(first_batch, last_batch)
        if not len(items):
            return items, sizes
        first, end = int(items[0]), int(items[-1]) + 1  # they follow one another
        m0, m1 = np.searchsorted(self.first_item, [first, end - 1], side="right") - 1
        positions = np.concatenate([self._own(m) for m in range(int(m0), int(m1) + 1) if self._count(m)])
        return positions[first - int(self.first_item[m0]) :][: end - first], sizes

    def own_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64] | None:
        """See `RankPlan.own_indices`."""
        positions = (windows or self.order).window_positions(window)
        indices = np.flatnonzero(positions >= 0)  # of a mixture's window, some may come in another epoch
        positions, bounds = positions[indices], self._bounds
        mask = np.zeros(len(positions), bool)
        for megabatch, at in windows_touched(np.searchsorted(bounds, positions, side="right") - 1):
            mask[at] = self._are_own(megabatch)[positions[at] - bounds[megabatch]]
        return indices[mask]

    @cached_property
    def _are_own(self) -> Callable[[int], NDArray[np.bool_]]:
        """Which positions of a megabatch are of this rank; kept, as windows lie side by side."""

        def are_own(megabatch: int) -> NDArray[np.bool_]:
            first, end = self._bounds[megabatch : megabatch + 2].tolist()
            mask = np.zeros(end - first, bool)
            if self._count(megabatch):
                mask[self._own(megabatch) - first] = True
            return mask

        return lru_cache(_KEPT_SHARES)(are_own)

    def _count(self, megabatch: int) -> int:
        return int(self.first_item[megabatch + 1] - self.first_item[megabatch])


class FoundPlanner:
    """Knows how far the epochs of one dataset were found. Thread-safe.

    Args:
        batching: as the user gives it.
        window: samples of a megabatch where that leaves it open.
        key: what identifies the lengths, in states; "" where nothing does.
        lengths: [num_samples] in file order, where all are known.
        place: a megabatch to go on with.
        is_known_since: whether the order of its epoch is known from there on only.
    """

    def __init__(
        self,
        batching: Batching,
        window: int = DEFAULT_MEGABATCH_SAMPLES,
        *,
        key: str = "",
        lengths: NDArray[np.integer] | None = None,
        place: SequencePlace = BEGIN,
        is_known_since: bool = False,
    ) -> None:
        self._open_batching, self.key, self.lengths = batching, key, lengths
        self._place, self._is_known_since = place, is_known_since
        self.batching = batching.with_window(window)
        self._places: dict[tuple[object, int], FoundPlaces] = {}
        """By order, and first known unit. Threads that ask for the same must get the same: it grows."""

    def __getstate__(self) -> dict[str, object]:
        """A copy knows what was found so far, and goes on by itself."""
        return {**self.__dict__, "_places": dict(self._places)}

    def places(self, order: EpochOrder, unit: int) -> FoundPlaces:
        """What is known of an order of the dataset's samples, from a unit on; kept for the last epochs.

        An epoch that was gone on with from a state is known from there on only.
        """
        name = order.seed, order.epoch, order.shuffle
        items = [*self._places.items()]
        kept = [places for (other, begin), places in items if other == name and begin <= unit]
        if kept:
            return max(kept, key=lambda places: places.at(unit)[1])
        places = self._new_places(order, unit)
        for key, _ in items[: 1 - _KEPT_EPOCHS]:
            self._places.pop(key, None)
        return self._places.setdefault((name, places.begin), places)

    def _new_places(self, order: EpochOrder, unit: int) -> FoundPlaces:
        key_of = units_key(order.seed, order.epoch, order.shuffle.kind != "none")
        place, begin = self._place, BEGIN
        if place.epoch == order.epoch and (
            self._is_known_since or (self.lengths is None and unit >= place.unit)
        ):
            begin = place
        places = FoundPlaces(self.batching, order.num_samples, key_of)
        megabatch = int(np.searchsorted(places.bounds, begin.position))
        if megabatch > places.num_megabatches or places.bounds[megabatch] != begin.position:
            raise ValueError(f"no megabatch of the epoch begins with sample {begin.position}")
        if begin.position:
            places = FoundPlaces(
                self.batching, order.num_samples, key_of, megabatch=megabatch, unit=begin.unit
            )
        if self.lengths is not None:
            lengths = epoch_lengths(order, self.lengths, begin.position)
            for later in range(megabatch, places.num_megabatches):
                places.add(later, lengths[slice(*places.bounds[later : later + 2])])
        return places

    def of_epoch(self, order: EpochOrder) -> NDArray[np.integer]:
        """The lengths at the positions of an epoch, where all are known; 0 where the order is not."""
        assert self.lengths is not None
        is_since = self._is_known_since and order.epoch == self._place.epoch
        return epoch_lengths(order, self.lengths, self._place.position if is_since else 0)

    def plan(self, order: EpochOrder, **dealing: Unpack[Dealing]) -> FoundPlan:
        """One rank's batches of an epoch."""
        return FoundPlan(order, self.places(order, dealing.get("start", 0)), **dealing)

    @property
    def is_told(self) -> bool:
        """Whether the user says how long samples are."""
        return self._open_batching.lengths is not None

    @property
    def samples_per_unit(self) -> int:
        """As `UnitPlanner.samples_per_unit`; of rows and budgets, nobody knows."""
        return self.batching.batch_size if isinstance(self.batching, Bucketed) else 1

    @cached_property
    def mark(self) -> dict[str, object]:
        """What must agree for a number of units to mean the same ones, as JSON types."""
        return self.batching.to_json() | {"found": self.key}

    def place(self, order: EpochOrder, position: int) -> SequencePlace:
        """The megabatch that a unit is in: from there on samples and units must be known."""
        places = self.places(order, position)
        megabatch, unit = places.at(position)
        return SequencePlace(order.epoch, int(places.bounds[megabatch]), unit)

    def change_after(self, order: EpochOrder, position: int) -> int:
        """As `UnitPlanner.change_after`: all megabatches are closed."""
        places = self.places(order, position)
        megabatch, unit = places.at(position)
        if megabatch == places.num_megabatches:
            return int(places.bounds[-1])
        return int(places.bounds[megabatch + (position > unit)])

    def state(self, order: EpochOrder, position: int) -> dict[str, object]:
        """What a state keeps beside the units that are done: the mark, and the megabatch to find again."""
        return self.mark | self.place(order, position).to_json()

    def knowing(self, lengths: NDArray[np.integer] | None) -> FoundPlanner:
        """The planner that knows all lengths, or none."""
        return self._with(self.batching.window, self._place, lengths, is_since=self._is_known_since)

    def changed(self, begin: SequencePlace, closes_at: int | None) -> FoundPlanner:
        """The planner of an order that changes, and is known from a place on: all megabatches are closed."""
        return self._with(self.batching.window, begin, self.lengths, is_since=True)

    def resumed(self, mark: Mapping[str, object], epoch: int) -> FoundPlanner:
        """The planner that goes on where a state of an epoch with this mark stands."""
        window = mark.get("window")
        if self._open_batching.window is not None or type(window) is not int or window < 1:
            window = self.batching.window
        return self._with(window, SequencePlace.from_json(mark, epoch), self.lengths)

    def _with(
        self,
        window: int | None,
        place: SequencePlace,
        lengths: NDArray[np.integer] | None,
        *,
        is_since: bool = False,
    ) -> FoundPlanner:
        assert window is not None
        return FoundPlanner(
            self._open_batching, window, key=self.key, lengths=lengths, place=place, is_known_since=is_since
        )
