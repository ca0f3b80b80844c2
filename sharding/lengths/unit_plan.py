"""Plans over units: which rank delivers which packed rows, or which batches by length.

The units of all packing windows (packed rows, or whole batches) follow one another in one sequence, which
depends on (seed, epoch, order, lengths, batching) and on nothing else: all ranks compute the same, in any
world. In file order, the units of a packing window follow their first samples. A batch is one unit, or as
many rows as the loader's batch size. Units are dealt to ranks by the arithmetic that deals out samples,
`BatchPlan`: the same number of batches for every rank, its tail rules for what is left over, and one number,
the units done, resumes the epoch in any world.

A packing window is planned from the lengths of its own samples. Where all lengths are known, each is planned
once to know how many units there are (a pass of a few million samples a second, on first use), and once more
when its batches are delivered. Where samples must be made to be measured (text is tokenised, say), each is
planned when its samples were; how many units there are shows at the end of the epoch.

A position in an epoch is a number of units, and the packing window it lies in with the units before that:
whoever goes on there plans this packing window again, and none before it. What fills up the last batch of an
epoch are that batch's own units, as the epoch's first ones may not be known.
"""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.lengths.batching import MAX_OVER_MEAN, Batching, Bucketed, Packed
from sharding.lengths.units import (
    BEGIN,
    DEFAULT_PACKING_WINDOW_SAMPLES,
    BatchSegments,
    LengthStats,
    PackingWindow,
    PackingWindowStart,
    Segments,
    joined,
    lengths_in,
    packing_window_bounds,
    units_key,
)
from sharding.order.epoch_order import EpochOrder, Windows
from sharding.order.windows import ranges, windows_touched
from sharding.plan.batch_plan import BatchPlan, Dealing, Tail
from sharding.plan.plan import RankPlan

LEFT_OUT = -1
"""The length of a sample that could not be made, and is in no unit."""
UNKNOWN = 1 << 62
"""Batches of an epoch of which nobody knows yet how many it has."""
_FEW = 4
"""An epoch of less than so many times `Batching.least_samples` has as many in its first packing window."""
_KEPT_EPOCHS = 3
"""The loader and its stream, which is an epoch ahead at times, ask for the same ones."""
_KEPT_PACKING_WINDOWS = 4
_KEPT_COUNTS = 1024
"""16 KiB each, if no sample is cut into more than 255 segments."""
Counts = NDArray[np.unsignedinteger[Any]] | NDArray[np.bool_]


def epoch_lengths(order: EpochOrder, lengths: NDArray[np.integer], begin: int = 0) -> NDArray[np.integer]:
    """The lengths at the positions of an epoch, [num_samples], from those of the samples in file order.

    Before `begin`, from which on the order is known, they are 0. With costs, [num_samples, 1 + costs].
    """
    out = np.empty((order.num_samples, *lengths.shape[1:]), lengths.dtype)
    out[:begin] = 0
    for positions, samples in order.in_order(begin):
        out[positions] = lengths[samples]
    return out


class UnitSequence:
    """The units of one epoch, as far as lengths are measured: it grows. Shared by the plans of any ranks.

    Thread-safe.

    Args:
        batching: with its `window`, or the default one.
        num_samples: positions of the epoch.
        key_of: packing window -> the key of its units' order, or None: see `units_key`.
        least: samples of the first packing window, at least.
        begin: the packing window from which on units are known; `ValueError` where none begins there.
        lengths: [num_samples] by position, where all are measured already: what `epoch_lengths` gives. With
            costs, [num_samples, 1 + costs], where the batching has `cost_columns`, here as everywhere.
            `ValueError` for negative ones.
    """

    def __init__(
        self,
        batching: Batching,
        num_samples: int,
        key_of: Callable[[int], int | None],
        *,
        least: int = 1,
        begin: PackingWindowStart = BEGIN,
        lengths: NDArray[np.integer] | None = None,
    ) -> None:
        size = batching.window or DEFAULT_PACKING_WINDOW_SAMPLES
        self.batching, self.sizes, self._key_of = batching, lengths, key_of
        self.bounds = packing_window_bounds(num_samples, size, batching.sizes_multiple, least)
        """First position of every packing window, and the number of samples, int64 [packing windows + 1]."""
        self.begin = begin.unit
        """The first unit that is known."""
        first = int(np.searchsorted(self.bounds, begin.position))
        if first > self.num_packing_windows or self.bounds[first] != begin.position:
            raise ValueError(f"no packing window of the epoch begins with sample {begin.position}")
        # Replaced, never changed: two threads may measure the same packing window at the same time, no more.
        self._known = np.full(first + 1, begin.unit, np.int64), LengthStats(), 0
        self._unit_costs: dict[int, NDArray[np.int64]] = {}
        self._added: NDArray[np.int64] | None = None
        """Lengths by position, as they were added, once `keep_lengths` was called."""
        if lengths is not None:
            if len(lengths) and int(lengths.min()) < 0:
                raise ValueError(f"a sample cannot have {int(lengths.min())} elements; lengths must be >= 0")
            for packing_window in range(first, self.num_packing_windows):
                self._extend(self._units(packing_window), num_samples)

    @property
    def lengths(self) -> NDArray[np.integer] | None:
        """Return the lengths alone, [num_samples] by position; None: they are measured on the way."""
        return None if self.sizes is None else lengths_in(self.sizes)

    @property
    def num_packing_windows(self) -> int:
        """Return the number of packing windows of the whole epoch."""
        return len(self.bounds) - 1

    @property
    def first_unit(self) -> NDArray[np.int64]:
        """Number of the first unit of each packing window that is known, and of the one to be measured next.

        At the end of the epoch, int64 [packing windows + 1]. Before the first that is known, `begin`.
        """
        return self._known[0]

    @property
    def num_units(self) -> int:
        """Packed rows, or batches, of the packing windows that are known, and before."""
        return int(self.first_unit[-1])

    @property
    def is_complete(self) -> bool:
        """Return whether all packing windows are known."""
        return len(self.first_unit) > self.num_packing_windows

    @property
    def num_short(self) -> int:
        """1 if the last unit is a batch short of samples, as `Bucketed` may have; known at the end."""
        return self._known[2]

    @property
    def stats(self) -> LengthStats:
        """Padding, truncation and more, of the packing windows that are known."""
        return self._known[1]

    def at(self, unit: int) -> tuple[int, int]:
        """The last known packing window that begins with the unit or before it, and its first unit."""
        firsts = self.first_unit
        packing_window = max(0, int(np.searchsorted(firsts, unit, side="right")) - 1)
        return packing_window, int(firsts[packing_window])

    @property
    def unit_costs(self) -> NDArray[np.int64]:
        """The cost of each unit from `begin` on, as far as they are known, where they are balanced."""
        return np.concatenate([np.empty(0, np.int64), *self._unit_costs.values()])

    def cut(self, packing_window: int, lengths: NDArray[np.integer]) -> PackingWindow:
        """Units of a packing window, from the lengths of its samples, [n]; `LEFT_OUT` for those in none."""
        positions = np.flatnonzero(lengths_in(lengths) != LEFT_OUT)
        key, before = self._key_of(packing_window), 0
        if self.batching.balance is not None:  # all before are known
            before = int(self.first_unit[packing_window])
        if len(positions) == len(lengths):
            return self.batching.planned(lengths, key, before)
        units = self.batching.planned(lengths[positions], key, before)  # what it chooses is by these alone
        return replace(units, segments=replace(units.segments, position=positions[units.segments.position]))

    def add(self, packing_window: int, lengths: NDArray[np.integer]) -> PackingWindow:
        """Note what was measured of a packing window; its units. `ValueError` if they were others before."""
        units, firsts = self.cut(packing_window, lengths), self.first_unit
        if self._added is not None:
            self._added[slice(*self.bounds[packing_window : packing_window + 2])] = lengths
        if packing_window + 1 == len(firsts):
            self._extend(units, int(np.count_nonzero(lengths_in(lengths) != LEFT_OUT)))
        elif firsts[packing_window + 1] - firsts[packing_window] != len(units):
            raise ValueError(
                f"the samples from position {int(self.bounds[packing_window])} on have other lengths than "
                "the same samples had before: what makes them must make the same each time"
            )
        return units

    def keep_lengths(self) -> None:
        """Keep what is added, for `known_part`: from before the first packing window on."""
        if self._added is None:
            shape = [int(self.bounds[-1]), 1 + len(self.batching.cost_columns)]
            self._added = np.zeros(shape if shape[1] > 1 else shape[0], np.int64)  # pages take nothing before

    def known_part(self, unit: int) -> UnitSequence:
        """The packing windows that are known, from that of a unit on, as an epoch that ends with them."""
        part, known = copy.copy(self), self._known
        firsts = known[0]
        vars(part).pop("units", None)
        part.begin, part.sizes = self.at(unit)[1], self._added
        part._unit_costs = {}  # they are for the figures of the whole; the dict here may grow meanwhile
        part.bounds = self.bounds[: len(firsts)]
        part._known = firsts, known[1], known[2] if len(firsts) == len(self.bounds) else 0
        return part

    def _extend(self, units: PackingWindow, num_made: int) -> None:
        """Note the next packing window; `num_made` samples tell whether its last unit is short."""
        firsts, stats, _ = self._known
        if units.costs is not None:
            self._unit_costs[len(firsts) - 1] = units.costs
        stats, num_short = LengthStats.total([stats, units.stats]), num_made % self.batching.sizes_multiple
        self._known = np.append(firsts, firsts[-1] + len(units)), stats, int(num_short > 0)

    @cached_property
    def units(self) -> Callable[[int], PackingWindow]:
        """The units of a packing window whose lengths are known; the last few are kept."""
        return lru_cache(_KEPT_PACKING_WINDOWS)(self._units)

    def _units(self, packing_window: int) -> PackingWindow:
        assert self.sizes is not None
        return self.cut(packing_window, self.sizes[slice(*self.bounds[packing_window : packing_window + 2])])

    def take(
        self, units: NDArray[np.int64], units_of: Callable[[int], PackingWindow] | None = None
    ) -> tuple[Segments, NDArray[np.int64]]:
        """The segments of the units, in the order given, and how many each has, int64 [n].

        Positions count from the epoch's first. Units that follow one another in a packing window are
        cheapest. `units_of` gives the units of a packing window, where lengths are measured.
        """
        parts, counts, firsts = [], np.empty(len(units), np.int64), self.first_unit
        packing_windows = np.searchsorted(firsts, units, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(packing_windows)) + 1).tolist(), len(units)]
        for begin, end in pairwise(cuts) if len(units) else ():
            packing_window = int(packing_windows[begin])
            plan, places = (units_of or self.units)(packing_window), units[begin:end] - firsts[packing_window]
            counts[begin:end] = np.diff(plan.first)[places]
            rows = ranges(plan.first[places], counts[begin:end])
            parts.append(plan.segments.take(rows).shifted(int(self.bounds[packing_window])))
        return joined(parts), counts


class PackingWindowPlan(RankPlan):
    """One rank's batches of an epoch whose packing windows are dealt out one by one."""

    bounds: NDArray[np.int64]
    """First position of every packing window, and the number of samples, int64 [packing windows + 1]."""

    def rank_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64]:
        """See `RankPlan.rank_indices`. An index comes once for each of its segments.

        So a window is done with when as many segments were delivered.
        """
        positions = (windows or self.order).window_positions(window)
        # Of a mixture's window, some may come in another epoch; and what is behind a part, in the next one.
        indices = np.flatnonzero((positions >= 0) & (positions < self.bounds[-1]))
        positions, counts = positions[indices], np.zeros(len(indices), np.int64)
        for packing_window, nth in windows_touched(np.searchsorted(self.bounds, positions, side="right") - 1):
            counts[nth] = self._own_counts(packing_window)[positions[nth] - self.bounds[packing_window]]
        return np.repeat(indices, counts)

    @cached_property
    def _own_counts(self) -> Callable[[int], Counts]:
        """`_count_own`, kept of many packing windows.

        Windows lie side by side, and that of a small source of a mixture spans a hundred.
        """
        return lru_cache(_KEPT_COUNTS)(self._count_own)

    @abstractmethod
    def _count_own(self, packing_window: int) -> Counts:
        """Count the segments of each position of a packing window that are this rank's."""


class UnitPlan(PackingWindowPlan):
    """One rank's batches of one epoch's units, from unit `start` on, as far as they are known. Thread-safe.

    Numbers called position here are as in `EpochPlan`, but `start` and `position_after` count units, so
    that a state may lie inside a packing window. What batches consist of, and what is read for them, is told
    where all lengths are known; where they are measured, `MeasuredUnits` and `SharePlan` do.

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
        self._dealing: Dealing = {**dealing}
        self.sequence, self.bounds = sequence, sequence.bounds
        if sequence.is_complete and self.start > sequence.num_units:
            raise ValueError(f"start must be in [0, {sequence.num_units}] units, got {self.start}")
        self.packing_window = sequence.at(self.start)[0]
        """The one that the first batch begins in."""
        self.order = order
        self._batch_plan = self.dealt(sequence.num_units, is_all=sequence.is_complete)
        self._is_whole = sequence.is_complete

    @property
    def batch_plan(self) -> BatchPlan:
        """Return the plan of the units that are known."""
        if self._is_whole:
            return self._batch_plan
        is_all = self.sequence.is_complete
        dealt = self.dealt(self.sequence.num_units, is_all=is_all)
        if is_all:
            self._batch_plan, self._is_whole = dealt, True
        return dealt

    def dealt(self, num_units: int, *, is_all: bool, rank: int | None = None) -> BatchPlan:
        """Deal so many units to a rank (None: this one); only whole batches unless it is all."""
        dealing, start = self._dealing.copy(), self.start
        if not is_all:
            dealing["tail"], num_units = "drop", max(num_units, start)
        elif dealing["tail"] == "drop":
            num_units -= self.sequence.num_short
        dealing["start"] = min(start, num_units)
        if rank is not None:
            dealing["rank"] = rank
        dealt = BatchPlan(num_items=num_units, wraps=False, **dealing)
        return self._passing(dealt) if self._passing else dealt

    @property
    def start(self) -> int:
        """Units done before the first batch."""
        return self._dealing.get("start", 0)

    @property
    def tail(self) -> Tail:
        """See `RankPlan.tail`; before all units are known, only whole batches are dealt."""
        return self._dealing["tail"]

    @property
    def known_from(self) -> int:
        """See `RankPlan.known_from`."""
        return self.sequence.begin

    @property
    def global_batch_size(self) -> int:
        """Units of all ranks in a full batch."""
        return self._dealing["batch_size"] * self._dealing["world_size"]

    @property
    def num_batches(self) -> int:
        """Batches of this rank; `UNKNOWN` before the whole epoch was measured."""
        return self.batch_plan.num_batches if self.sequence.is_complete else UNKNOWN

    @property
    def num_steps(self) -> int:
        """See `BatchPlan.num_steps`; `UNKNOWN` before the whole epoch was measured."""
        return self.batch_plan.num_steps if self.sequence.is_complete else UNKNOWN

    @property
    def num_global_batches(self) -> int:
        """Batches that at least one rank gets; `UNKNOWN` before the whole epoch was measured."""
        return self.batch_plan.num_global_batches if self.sequence.is_complete else UNKNOWN

    @property
    def stats(self) -> LengthStats:
        """Padding, truncation and more, over all ranks, before the tail rule, as far as units are known."""
        balance = self._max_over_mean(self.sequence.num_units) if self.sequence.batching.balance else 0.0
        return replace(self.sequence.stats, cost_max_over_mean=balance)

    @cached_property
    def _max_over_mean(self) -> Callable[[int], float]:
        """The imbalance of so many units; that of the last number is kept."""
        return lru_cache(1)(partial(resolve_name(MAX_OVER_MEAN), self))

    def position_after(self, num_batches: int) -> int:
        """See `RankPlan.position_after`."""
        if self.sequence.is_complete:
            return self.batch_plan.position_after(num_batches)
        return self.batch_plan.end_of(num_batches)

    def batches(self, first_batch: int, last_batch: int) -> BatchSegments:
        """Return what this rank's batches [first_batch, last_batch) consist of. `IndexError` beyond them."""
        units, rows = self.batch_plan.items(first_batch, last_batch)
        segments, segments_of_row = self.sequence.take(units)
        return BatchSegments.of(segments, rows, segments_of_row)

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `RankPlan.positions`; one entry a segment, and the number of segments of each batch."""
        batches = self.batches(first_batch, last_batch)
        return batches.segments.position, batches.sizes

    @property
    def padding(self) -> NDArray[np.int64]:
        """See `RankPlan.padding`; one entry a segment."""
        last = max(0, self.num_batches - 1), self.num_batches
        units = self.batch_plan.items(*last)[0][self.repeats(*last)]
        return self.sequence.take(units)[0].position

    def _count_own(self, packing_window: int) -> Counts:
        """See `PackingWindowPlan`; where all are this rank's, none is planned."""
        sequence = self.sequence
        first, end = sequence.bounds[packing_window : packing_window + 2].tolist()
        first_unit, end_unit = sequence.first_unit[packing_window : packing_window + 2].tolist()
        items: NDArray[np.int64] | None = np.empty(0, np.int64)
        if first_unit < end_unit:
            items = self.batch_plan.rank_items(first_unit, end_unit)
        if items is None:
            assert sequence.lengths is not None
            lengths = sequence.lengths[first:end]
            counts = np.where(lengths < 0, 0, sequence.batching.num_segments(lengths))
        else:
            counts = np.bincount(sequence.take(items)[0].position - first, minlength=end - first)
        return counts.astype(np.min_scalar_type(counts.max(initial=0)))


class UnitPlanner:
    """Finds the units of any epoch of one dataset. Thread-safe.

    Args:
        batching: as the user gives it.
        window: samples of a packing window where that leaves it open.
        lengths: [num_samples] in file order, as `column_lengths.resolve_lengths` gives them, of a mixture
            those of its sources one after the other; None: they are measured on the way. With costs,
            [num_samples, 1 + costs].
        measured_as: of samples whose lengths are measured as they are made, also where these are known from
            before: what identifies them in states, "" where nothing does. None: lengths are of stored values.
        mean_length: of samples, where these do not come equally often.
        num_in_token: samples whose lengths the token covers; None: all.
    """

    def __init__(
        self,
        batching: Batching,
        window: int = DEFAULT_PACKING_WINDOW_SAMPLES,
        *,
        lengths: NDArray[np.integer] | None = None,
        measured_as: str | None = None,
        mean_length: float | None = None,
        num_in_token: int | None = None,
    ) -> None:
        self._base_batching = self.batching = batching.with_window(window)
        self.sizes = lengths
        self._is_window_given, self._measured_as = batching.window is not None, measured_as
        self._mean_length, self._num_in_token = mean_length, num_in_token
        self._start = BEGIN
        """A packing window to go on with."""
        self._sequences: dict[tuple[object, int], UnitSequence] = {}
        """By order, and first known unit. Threads that ask for the same must get the same: it grows."""

    def __getstate__(self) -> dict[str, object]:
        """A copy knows what was measured so far, and finds units by itself."""
        sequences = {} if self.lengths is not None else dict(self._sequences)
        return {**self.__dict__, "_sequences": sequences}

    @property
    def lengths(self) -> NDArray[np.integer] | None:
        """Return the lengths alone, [num_samples]; None: they are not known."""
        return None if self.sizes is None else lengths_in(self.sizes)

    @property
    def is_measured(self) -> bool:
        """Return whether lengths are those of samples as a function makes them: they show when it did."""
        return self._measured_as is not None

    @property
    def are_lengths_given(self) -> bool:
        """Return whether the user says how long samples are."""
        return self.batching.lengths is not None

    def sequence(self, order: EpochOrder, unit: int = 0) -> UnitSequence:
        """The units of an order of the dataset's samples, from one on; those of the last epochs are kept.

        An epoch that was gone on with from a state, or with other weights, is known from there on only, until
        it begins anew. `ValueError` where its order is not known from a packing window on.
        """
        name = order.seed, order.epoch, order.shuffle
        items = [*self._sequences.items()]
        sequences = [sequence for (other, begin), sequence in items if other == name and begin <= unit]
        if sequences:
            return max(sequences, key=lambda sequence: sequence.at(unit)[1])
        begin, lengths = BEGIN, None
        if self._start.epoch == order.epoch and (unit >= self._start.unit or order.known_from):
            begin = self._start
        if begin.position < order.known_from:
            raise ValueError(f"what epoch {order.epoch} held before sample {order.known_from} is not known")
        if self.sizes is not None:
            lengths = epoch_lengths(order, self.sizes, begin.position)
        key_of = units_key(order.seed, order.epoch, order.shuffle.kind != "none")
        sequence = UnitSequence(
            self.batching, order.num_samples, key_of, least=self._least, begin=begin, lengths=lengths
        )
        for key, _ in items[: 1 - _KEPT_EPOCHS]:
            self._sequences.pop(key, None)
        return self._sequences.setdefault((name, sequence.begin), sequence)

    @property
    def samples_per_unit(self) -> int:
        """About how many samples a unit has, for sizing; 1 where nobody knows."""
        if isinstance(self.batching, Bucketed):
            return self.batching.batch_size
        if self.lengths is None or not len(self.lengths):
            return 1
        mean = max(1.0, self._mean_length or float(self.lengths.mean()))
        if isinstance(self.batching, Packed):
            return max(1, int(self.batching.length / mean))
        most = self.batching.max_samples or len(self.lengths)
        return max(1, min(int(self.batching.max_tokens / mean), most))

    def plan(self, order: EpochOrder, **dealing: Unpack[Dealing]) -> UnitPlan:
        """One rank's batches of an epoch."""
        return UnitPlan(order, self.sequence(order, dealing.get("start", 0)), **dealing)

    def packing_window_start(self, order: EpochOrder, position: int) -> PackingWindowStart:
        """The packing window that a unit is in: from there on samples and units must be known."""
        sequence = self.sequence(order, position)
        packing_window, unit = sequence.at(position)
        return PackingWindowStart(order.epoch, int(sequence.bounds[packing_window]), unit)

    def change_after(self, order: EpochOrder, position: int) -> int:
        """The first sample after a unit at which the order may change: that of the next packing window."""
        sequence = self.sequence(order, position)
        packing_window, unit = sequence.at(position)
        return int(sequence.bounds[min(packing_window + (position > unit), sequence.num_packing_windows)])

    def state(self, order: EpochOrder, position: int) -> dict[str, object]:
        """Return what a state keeps beside units that are done: the token, and their last packing window."""
        return self.token | self.packing_window_start(order, position).to_json()

    def with_lengths(self, lengths: NDArray[np.integer] | None) -> UnitPlanner:
        """The planner that knows all lengths, or none."""
        return self._with(sizes=lengths)

    def changed(self, start: PackingWindowStart) -> UnitPlanner:
        """The planner of an order that changes behind the start of a packing window."""
        return self._with(_start=start)

    def resumed(self, token: Mapping[str, object], epoch: int) -> UnitPlanner:
        """The planner that goes on where a state of an epoch with this token stands.

        Its packing window is taken where the user gave none; without a token, an epoch begins as it was made.
        """
        window, batching = token.get("window"), self._base_batching
        if not self._is_window_given and type(window) is int and window >= 1:
            batching = replace(batching, window=window)
        return self._with(batching=batching, _start=PackingWindowStart.from_json(token, epoch))

    def _with(self, **changes: object) -> Self:
        """A copy that has seen no order yet."""
        other = copy.copy(self)
        vars(other).update(changes, _sequences={})
        return other

    @property
    def token(self) -> dict[str, object]:
        """Return what must agree for units to have the same numbers, as JSON types: a state keeps it."""
        if self._measured_as is not None:
            return self.batching.to_json() | {"measured": self._measured_as}
        return self.batching.to_json() | self._digests

    @cached_property
    def _least(self) -> int:
        """Samples of the first packing window, at least; measured lengths do not decide about it."""
        if self.is_measured:
            return 1
        least = self.batching.least_samples(lengths_in(self._token_lengths))
        is_least = len(self._token_lengths) < _FEW * least or self.batching.balance is not None
        return least if is_least else 1

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Tell lengths, and costs, from others."""
        columns = zip(("lengths", "costs"), np.split(np.atleast_2d(self._token_lengths.T), [1]), strict=True)
        data = {name: column.astype("<i8").tobytes() for name, column in columns if len(column)}
        return {name: hashlib.blake2b(content, digest_size=8).hexdigest() for name, content in data.items()}

    @property
    def _token_lengths(self) -> NDArray[np.integer]:
        assert self.sizes is not None
        return self.sizes[: self._num_in_token]
