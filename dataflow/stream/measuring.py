"""Batches by length of samples whose lengths show when they are made.

The engine of such a session makes samples, by whoever builds: each rank its share of every packing window
(`MeasuringPlan`). The consumer takes them evenly while it delivers the packing window before. When a packing
window is whole, ranks tell each other the lengths, which decide its batches on all of them, and send the
samples of batches that are complete to the ranks that deliver these: a sample is made once in the whole job.
Where all lengths are known beforehand, samples are made when their batch is built, and none of this is
needed; but for those that are cut into pieces (`StreamPlan.makes_rows`): each rank makes what it delivers,
nothing is exchanged, and what it makes must be as long as was said. Where transforms tell lengths by
`measure`, or what they make does not fit, lengths alone are made and exchanged, and a session of its own
builds the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from dataflow.batch.delivered import Delivered, SampleWarning
from dataflow.batch.measured import NO_SAMPLES, Lists, MeasuredSamples, SampleForms, cut_reason
from dataflow.batch.samples import REPEAT, checked_dict, unlike_columns, unlike_planned
from dataflow.batch.transforms import called
from dataflow.planning.ahead import PartsKnown, PlanInParts
from dataflow.planning.exchange import LengthExchange, NotHeldError
from dataflow.planning.length_aware import error_of_sample, gather_of
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import StreamSettings
from dataflow.stream.decisions import mean_bytes
from dataflow.stream.deliveries import PendingErrors
from prefetch.engine.ledger import Ledger, State
from prefetch.errors import EngineClosedError
from prefetch.work import Batches
from sharding.errors import DataflowError, SampleError
from sharding.lengths.measuring import MeasuredUnits, SharePlan, producer_counts, producers
from sharding.lengths.unit_plan import LEFT_OUT, UnitPlan
from sharding.order.epoch_order import EpochOrder
from sharding.spans import Ints

_log = logging.getLogger("dataflow")

_GATHERED_SAMPLES, _GATHERED_BYTES = 128, 1 << 20
"""Made and gathered at a time, and what these take in their shards, about."""
_MOST_AHEAD = 8
"""Batches beyond the next two of which lengths are known before, where these are measured ahead: rows of the
next packing window are built before those of this one are all delivered."""

Record = Callable[[EpochOrder, int, Ints], None]
"""Notes the lengths of the samples from a position of an order on."""


@dataclass(frozen=True, kw_only=True)
class MeasuringPlan(StreamPlan):
    """The plan of samples that this rank makes. Its positions are those of the plan of batches, in units."""

    delivery_plan: StreamPlan
    """The plan of the batches."""
    producer: int
    num_producers: int
    """0: all lengths are known, and each rank makes what it delivers."""

    measures_lengths = True

    @classmethod
    def of(cls, plan: StreamPlan, exchange: LengthExchange | None) -> MeasuringPlan:
        """The plan that serves the batches of another."""
        assert plan.planner is not None
        planner, each = plan.planner, max(1, *map(mean_bytes, plan.dataset.sources))
        most = _GATHERED_SAMPLES if plan.measures_ahead else min(_GATHERED_SAMPLES, _GATHERED_BYTES // each)
        return plan.as_kind(
            cls,
            batch_size=max(1, min(most, planner.batching.window or 1)),
            planner=None,
            delivery_plan=plan,
            asked=planner.batching if plan.measures_ahead else None,
            producer=exchange.producer if exchange else 0,
            num_producers=0 if planner.lengths is not None else exchange.num_producers if exchange else 1,
        )

    def epoch(self, epoch: int, start: int = 0) -> SharePlan:
        """The plan of one epoch, from the packing window of unit `start` on."""
        plan = self.delivery_plan.epoch(epoch, start)
        assert isinstance(plan, UnitPlan)
        order, bounds = plan.order, plan.sequence.bounds
        positions_of: Callable[[int], Ints]
        if self.num_producers:
            counts = producer_counts(bounds, self.producer, self.num_producers)
            positions_of = partial(self._measured_here, plan)
        else:
            positions_of = self._delivered_here(plan)
            later = range(plan.packing_window, plan.sequence.num_packing_windows)
            counts = np.zeros(plan.sequence.num_packing_windows, np.int64)
            counts[plan.packing_window :] = [len(positions_of(packing_window)) for packing_window in later]
        counts[: plan.packing_window] = 0  # those before are done
        return SharePlan(order, bounds, counts, positions_of, batch_size=self.batch_size)

    def _measured_here(self, plan: UnitPlan, packing_window: int) -> Ints:
        """Positions of the samples of a packing window that this rank is to make."""
        first, end = plan.sequence.bounds[packing_window : packing_window + 2].tolist()
        of_producer = producers(first, end, plan.order.num_lanes, self.num_producers)
        positions: Ints = np.flatnonzero(of_producer == self.producer) + first
        return positions

    def _delivered_here(self, plan: UnitPlan) -> Callable[[int], Ints]:
        """Packing window -> positions of which this rank delivers segments, where all lengths are known."""
        sequence, dealt = plan.sequence, plan.batch_plan
        last = dealt.items(max(0, dealt.num_batches - 1), dealt.num_batches)[0]

        def positions_of(packing_window: int) -> Ints:
            units, begin = sequence.units(packing_window), int(sequence.first_unit[packing_window])
            items = dealt.rank_items(begin, begin + len(units))
            numbers = np.arange(len(units)) if items is None else items - begin
            filled_up = last[(last >= begin) & (last < begin + len(units))] - begin
            mine = np.zeros(len(units), bool)
            mine[np.concatenate((numbers, filled_up))] = True
            rows = np.repeat(mine, np.diff(units.first))
            positions: Ints = np.unique(units.segments.position[rows])
            positions += sequence.bounds[packing_window]
            return positions

        return positions_of


class MeasuringStage:
    """Forms batches of samples that a session makes: its stage. For one consumer thread.

    Args:
        plan: of the batches.
        settings: of the loader.
        errors: decides about bad samples.
        num_ranks: of the job.
        exchange: with the other ranks; None: there are none, or all lengths are known.
        record: a method that is told what was measured, as long as its object lives.

    Raises `DataflowError` where ranks must measure together, and cannot.
    """

    sums: Any
    """The `BatchSums` that get those of the batches; None: nobody keeps account of steps."""

    def __init__(
        self,
        *,
        plan: StreamPlan,
        settings: StreamSettings,
        errors: PendingErrors,
        num_ranks: int,
        exchange: LengthExchange | None,
        record: Record,
    ) -> None:
        assert plan.planner is not None
        if exchange is None and num_ranks > 1 and plan.planner.lengths is None:
            raise DataflowError(
                f"the {num_ranks} ranks measure the lengths of samples together, but torch.distributed is "
                "not initialised: do that before the first batch, or give lengths="
            )
        self._plan, self._settings, self._errors = plan, settings, errors
        self._batching = plan.planner.batching
        self._exchange = None if plan.planner.lengths is not None else exchange
        self._record = WeakMethod(record)  # else a loader that was dropped would live until a collection
        self._gather, self._forms = gather_of(self._batching), SampleForms()
        self.plan = MeasuringPlan.of(plan, exchange)
        self.settings = replace(
            settings,
            collate_fn=self._gather,
            batching=None,
            batch_size=self.plan.batch_size,
            mark_repeats=False,
            device=None,
            pin_memory=False,  # samples are copied into batches
        )
        self._pin: Callable[[Any], Any] | None = pin_memory if settings.is_pinned else None
        self._held_bytes = 0
        self._was_told = False

    @property
    def is_shared(self) -> bool:
        """Return whether other ranks wait for it at the same batches."""
        return self._exchange is not None

    def begin(
        self, next_chunk: Callable[[], Batches[Delivered]], ledger: Ledger, epoch: int, start: int
    ) -> None:
        """Form the batches from a position on, of samples that `next_chunk` gives; `ledger` counts them."""
        self._next_chunk, self._ledger = next_chunk, ledger
        plan = self._plan.epoch(epoch, start)
        assert isinstance(plan, UnitPlan)
        self._delivery, self._order = plan, plan.order
        self._share = self.plan.epoch(epoch, start)
        self._units, self._lengths = MeasuredUnits(plan.sequence, plan.packing_window), plan.sequence.sizes
        self._number = 0
        """Batch of the epoch's plan that comes next."""
        self._num_dealt = 0
        """Batches of all ranks whose samples were sent to where they are delivered."""
        self._num_made = 0
        """Samples of this rank's share that were made."""
        self._failure: Exception | None = None
        """Why this rank cannot make its share."""
        self._samples: list[MeasuredSamples] = []
        """Samples of packing windows that are not whole yet."""
        self._undealt = NO_SAMPLES
        """Made here, and of batches that are not complete yet."""
        self._dealt = NO_SAMPLES
        """Samples of batches to be delivered here."""
        self._left_out: list[tuple[int, SampleError]] = []
        """Packing window and error of samples that were left out, until they are counted."""
        self._remarks: list[SampleWarning] = []
        self._lacks: set[int] = set()
        """Positions of samples that batches lack, which were counted."""

    def next_batches(self) -> Batches[Delivered]:
        """The next batch; none at the end of the epoch."""
        number = self._number
        self._measure_until(self._delivery.dealt(self._units.num_units, is_all=False).end_of(number + 2))
        dealt = self._delivery.dealt(self._units.num_units, is_all=self._units.is_all)
        if number >= dealt.num_batches:
            return ()
        if number:  # the first one waits for nothing more
            self._measure_some(dealt.num_full - 1 - number)
        segments = self._units.batches(dealt, number, number + 1)
        self._number = number + 1
        pieces, epoch = segments.segments, self._order.epoch
        if self.sums is not None:
            numbers = self._numbers[np.searchsorted(self._numbered, pieces.position)]
            parts, sizes = [(numbers, slice(0, len(numbers)), None)], np.array([len(pieces)])
            self.sums.note_rows(epoch, self._delivery.start + number, sizes, parts, pieces)
        has = self._dealt.has(segments.segments.position)
        if not has.all():  # planned with lengths that were known, and left out since
            lacking, segments = segments.segments.position[~has], segments.keep(np.flatnonzero(has))
            errors = self._lacking(np.unique(lacking).tolist())
        else:
            errors = self._passed()
        if not len(segments.segments):
            return [Delivered(self._order.epoch, number, {}, 0, errors, remarks=self._take_remarks())]
        batch: Any = self._dealt.batch(self._batching, segments, self._forms)
        if (transform := self._plan.dataset.batch_transform) is not None:
            context = f"in batch_transform= of batch {number} of epoch {self._order.epoch}"
            batch = called(transform, batch, lambda: context)
        if self._settings.mark_repeats:
            repeats = dealt.repeats(number, number + 1)
            flags = repeats if self._batching.rows_are_units else np.full(len(segments.segments), repeats[0])
            checked_dict(batch, "batch_transform")[REPEAT] = torch.from_numpy(flags)
        if self._pin is not None:
            batch = self._pin(batch)
        num_segments, remarks = len(segments.segments), self._take_remarks()
        return [Delivered(self._order.epoch, number, batch, num_segments, errors, remarks=remarks)]

    def _take_remarks(self) -> tuple[SampleWarning, ...]:
        """Return what is odd about samples that were made since the last batch."""
        remarks, self._remarks = tuple(self._remarks), []
        return remarks

    def _lacking(self, positions: list[int]) -> tuple[SampleError, ...]:
        """The errors of samples that a batch lacks, each once, though it may lack several segments of it."""
        fresh = [position for position in positions if position not in self._lacks]
        self._lacks.update(fresh)
        errors = tuple(error for _, error in self._left_out[: len(fresh)])
        self._left_out = self._left_out[len(fresh) :]
        return errors

    def _passed(self) -> tuple[SampleError, ...]:
        """Return errors of the packing windows that are done: a state that lies in one measures it again."""
        if self._lengths is not None:
            return ()  # the batches that lack it tell
        done = self._delivery.sequence.at(self._delivery.position_after(self._number))[0]
        errors = tuple(error for packing_window, error in self._left_out if packing_window < done)
        self._left_out = [entry for entry in self._left_out if entry[0] >= done]
        return errors

    # ---- measuring ----------------------------------------------------------------------------------

    def _measure_until(self, num_units: int) -> None:
        """Find packing windows until there are so many units, or no more.

        Ranks must do that before batches of the same number: they meet in it. So it depends on what this
        session has measured alone, not on what else is known of the epoch.
        """
        while not self._units.is_all and self._units.num_units < num_units:
            self._measure_packing_window()

    def _measure_some(self, num_batches: int) -> None:
        """Take part of the next packing window's samples, evenly over the batches until it must be whole."""
        if self._units.is_all or self._failure is not None:
            return
        missing = int(self._share.first_item[self._units.next_packing_window + 1]) - self._num_made
        try:
            self._make(self._num_made + -(-missing // max(1, num_batches)))
        except EngineClosedError:
            raise
        except Exception as error:
            if self._exchange is None:
                raise
            self._failure = error  # told where the others wait for the lengths

    def _make(self, num_samples: int) -> None:
        """Have so many samples of this rank's share made."""
        while self._num_made < num_samples:
            for delivered in self._next_chunk():
                self._add(delivered)

    def _add(self, delivered: Delivered) -> None:
        assert delivered.epoch == self._order.epoch
        positions = self._share.positions(delivered.number, delivered.number + 1)[0]
        self._num_made += len(positions)
        samples = (
            MeasuredSamples.of_batch(delivered.batch, positions) if delivered.num_samples else NO_SAMPLES
        )
        lacking = np.setdiff1d(positions, samples.positions, assume_unique=True)
        self._remarks += delivered.remarks
        for position, error in zip(lacking.tolist(), delivered.skipped, strict=True):
            self._leave_out(position, error)
        if len(samples):
            samples = self._fitting(samples)
            is_too_much = self._held_bytes + (nbytes := samples.nbytes) > self._ledger.limit_bytes
            if is_too_much and self._lengths is None and not self._plan.measures_ahead:
                _log.warning(
                    "samples that wait for their packing window's plan take more than memory_limit: each "
                    "is made to be measured now, and again with its row; give the transform a measure, or "
                    "batching= lengths= or a smaller window="
                )
                raise NotHeldError
            self._samples.append(samples)
            self._hold(nbytes)

    def _leave_out(self, position: int, error: SampleError) -> None:
        packing_window = int(np.searchsorted(self._delivery.sequence.bounds, position, side="right")) - 1
        self._left_out.append((packing_window, error))

    def _fitting(self, samples: MeasuredSamples) -> MeasuredSamples:
        """Return the samples that fit the batching; the others are left out, if that is allowed."""
        reasons = self._misfits(samples)
        for row, reason in reasons.items():
            position = int(samples.positions[row])
            error = self._error(position, reason)
            if not self._errors.decide(error):
                raise error
            self._leave_out(position, error)
        return samples.without([*reasons]).with_lists(self._gather.lists)

    def _misfits(self, samples: MeasuredSamples) -> dict[int, str]:
        """{row: what is wrong with its lengths}, ascending."""
        (lead, *others), most = self._batching.columns, self._batching.refused_beyond
        reasons = self._forms.misfits(samples, self._gather, lambda position: self._error(position, ""))
        lengths = _lengths(samples, lead)
        for name in others:
            column_lengths = _lengths(samples, name)
            for row in np.flatnonzero(column_lengths != lengths).tolist():
                reasons.setdefault(row, unlike_columns((lead, name), (lengths[row], column_lengths[row])))
        if most is not None:
            for row in np.flatnonzero(lengths > most).tolist():
                reason = (
                    f"column {lead!r} has {lengths[row]:,} elements, more than the {most:,} that "
                    f"{type(self._batching).__name__} takes; cut such samples by overlong=, or leave "
                    'them out by on_error="skip"'
                )
                reasons.setdefault(row, reason)
        elif self._batching.longest is not None:
            for row in np.flatnonzero(lengths > self._batching.longest).tolist():
                if reason := cut_reason(self._batching, int(lengths[row]), samples.one(row)):
                    reasons.setdefault(row, reason)
        for row, reason in samples.wrong_costs(self._batching):
            reasons.setdefault(row, reason)
        return dict(sorted(reasons.items()))

    def _error(self, position: int, reason: str) -> SampleError:
        """An error that names the sample at a position."""
        sample, components = int(self._order.samples(np.array([position]))[0]), self._plan.dataset.sources
        ends = np.cumsum([len(component) for component in components])
        number = int(np.searchsorted(ends, sample, side="right"))
        dataset = components[number]
        rows = np.array([sample - int(ends[number]) + len(dataset)])
        return error_of_sample(dataset, rows, reason, stage="transform")

    def _measure_packing_window(self) -> None:
        """Have the next packing window whole, plan it, and deal out what is complete."""
        packing_window = self._units.next_packing_window
        first, end = self._delivery.sequence.bounds[packing_window : packing_window + 2].tolist()
        ready = NO_SAMPLES
        try:
            if self._failure is not None:
                raise self._failure
            self._make(int(self._share.first_item[packing_window + 1]))
            samples = MeasuredSamples.joined(self._samples)
            num_own = int(np.searchsorted(samples.positions, end))
            ready, rest = samples.take(np.arange(num_own)), samples.take(np.arange(num_own, len(samples)))
            self._samples = [rest] if len(rest) else []
            names, row_lengths = self._batching.cost_columns, _lengths(ready, self._batching.column)
            sizes = np.column_stack([row_lengths, ready.costs(names)]) if names else row_lengths
            lengths = np.full((end - first, *sizes.shape[1:]), LEFT_OUT)
            lengths[ready.positions - first] = sizes
        except EngineClosedError:
            raise
        except Exception as error:
            if self._exchange is None:
                raise
            self._failure = error
        if self._exchange is not None:
            lengths = self._exchanged(self._exchange, self._failure or lengths, first, end)
        if self._lengths is not None:
            lengths = self._checked(lengths, first, end)
        elif (record := self._record()) is not None:
            record(self._order, first, lengths)
        self._units.forget(self._delivery.batch_plan.end_of(self._number))
        self._units.add(lengths)
        self._deal(ready)

    def _exchanged(self, exchange: LengthExchange, outcome: Ints | Exception, first: int, end: int) -> Ints:
        """The lengths of a packing window, of which each rank has measured some; so it is with costs."""
        of_producer = producers(first, end, self._order.num_lanes, exchange.num_producers)
        mine = outcome if isinstance(outcome, Exception) else outcome[of_producer == exchange.producer]
        parts = exchange.lengths(mine)
        lengths = np.empty((end - first, *parts[0].shape[1:]), np.int64)
        for producer, measured in enumerate(parts):
            lengths[of_producer == producer] = measured
        return lengths

    def _checked(self, sizes: Ints, first: int, end: int) -> Ints:
        """The lengths, and costs, that were known, with which what was made must agree."""
        assert self._lengths is not None
        lengths = self._lengths[first:end].astype(np.int64)
        wrong = np.argwhere((sizes != LEFT_OUT) & (sizes != lengths))
        if len(wrong):
            key, names = tuple(wrong[0].tolist()), (self._batching.column, *self._batching.cost_columns)
            reason = unlike_planned(names[key[-1] if len(key) > 1 else 0], int(sizes[key]), int(lengths[key]))
            raise self._error(first + key[0], reason)
        return lengths

    def _deal(self, ready: MeasuredSamples) -> None:
        """Send the samples of batches that are complete to where they are delivered."""
        self._undealt = MeasuredSamples.joined([self._undealt, ready])
        units, delivery = self._units, self._delivery
        whole = delivery.dealt(units.num_units, is_all=units.is_all)
        num_dealt = whole.num_global_batches
        shard_indices = [delivery.batch_plan.rank] if self._exchange is None else self._exchange.shard_indices
        positions = {rank: self._positions(rank, self._num_dealt, num_dealt) for rank in {*shard_indices}}
        parts = [self._undealt.among(positions[rank]) for rank in shard_indices]
        if self._exchange is not None:
            parts = self._exchange.samples(parts)
        rest = self._dealt.among(self._positions(delivery.batch_plan.rank, self._number, self._num_dealt))
        self._dealt = MeasuredSamples.joined([rest, *parts])
        first = whole.end_of(num_dealt)
        pending = np.arange(min(first, units.num_units), 0 if units.is_all else units.num_units)
        self._undealt = self._undealt.among(np.unique(units.take(pending)[0].position))
        self._num_dealt = num_dealt
        # Of all batches that may come: each batch alone would have its windows shuffled again.
        self._numbered = self._positions(delivery.batch_plan.rank, self._number, num_dealt)
        self._numbers = self._plan.numbers(self._order, self._numbered)
        sample_bytes = sum(samples.nbytes for samples in self._samples)
        self._hold(self._dealt.nbytes + self._undealt.nbytes + sample_bytes - self._held_bytes)

    def _positions(self, shard_index: int, first: int, last: int) -> Ints:
        """Positions of the samples of a rank's batches [first, last), ascending."""
        units = self._units
        dealt = self._delivery.dealt(units.num_units, is_all=units.is_all, rank=shard_index)
        first, last = min(first, dealt.num_batches), min(last, dealt.num_batches)
        return np.unique(units.batches(dealt, first, last).segments.position)

    def _hold(self, nbytes: int) -> None:
        """Account for samples that are kept: builders make no more while that is too much."""
        self._held_bytes += nbytes
        if self._held_bytes > self._ledger.limit_bytes and not self._was_told:
            self._was_told = True
            _log.warning(
                "%d MB of samples wait for their rows, more than memory_limit has room for: give batching= a "
                "smaller window=, or an overlong= that cuts none",
                self._held_bytes >> 20,
            )
        if nbytes > 0:
            self._ledger.charge(State.IN_USE, nbytes)
        else:
            self._ledger.give_back(-nbytes)


class LengthsStage(MeasuringStage):
    """Plans packing windows by what transforms tell of their samples, and hands out the rows that follow.

    What its session makes are lengths alone. The rows are built by another one, which follows the plan as far
    as it is known (`PlanInParts`).
    """

    open_rows: Callable[[StreamPlan, StreamSettings, int, int], tuple[Callable[[], Batches[Delivered]], Any]]
    """Begins to build the batches of a plan, from a position of an epoch on; what gives the next ones, and
    their sums."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.settings.builders is not None:  # those of the cluster build rows
            self.settings = replace(self.settings, builders=None, workers="thread", num_workers=None)
        self.known = PartsKnown()
        self._next_rows: Callable[[], Batches[Delivered]] | None = None

    def begin(
        self, next_chunk: Callable[[], Batches[Delivered]], ledger: Ledger, epoch: int, start: int
    ) -> None:
        """See `MeasuringStage.begin`."""
        super().begin(next_chunk, ledger, epoch, start)
        self._delivery.sequence.keep_lengths()
        self._ready: Iterator[Delivered] = iter(())

    def next_batches(self) -> Batches[Delivered]:
        """See `MeasuringStage.next_batches`. Ranks meet before batches of the same number: one at a time."""
        number = self._number
        ahead = min(number, _MOST_AHEAD) + 2
        self._measure_until(self._delivery.dealt(self._units.num_units, is_all=False).end_of(number + ahead))
        dealt = self._delivery.dealt(self._units.num_units, is_all=self._units.is_all)
        if number >= dealt.num_batches:
            return ()
        if number:
            self._measure_some(dealt.num_full + 1 - ahead - number)
        self._number = number + 1
        if self._next_rows is None:
            stats = self._delivery.sequence.stats
            each = max(1, stats.segments // max(1, stats.units))
            plan = self._plan.as_kind(PlanInParts, samples_per_row=each, known=self.known)
            epoch, start = self._order.epoch, self._delivery.start
            self._next_rows, self._row_sums = self.open_rows(plan, self._settings, epoch, start)
        while (delivered := next(self._ready, None)) is None:
            self._ready = iter(self._next_rows())
        errors, remarks = delivered.skipped + self._passed(), delivered.remarks + self._take_remarks()
        if self.sums is not None:
            self.sums.note(self._order.epoch, self._delivery.start + number, self._row_sums.take_next())
        return [delivered._replace(number=number, skipped=errors, remarks=remarks)]

    def _deal(self, ready: MeasuredSamples) -> None:
        """Tell who builds rows."""
        self._hold(sum(samples.nbytes for samples in self._samples) - self._held_bytes)
        self.known.tell()


def _lengths(samples: MeasuredSamples, column: str) -> Ints:
    if not len(samples):
        return np.empty(0, np.int64)
    lists = samples.columns[column]
    return lists.lengths if isinstance(lists, Lists) else np.array([*map(len, lists)])
