"""Batches of rows: columns are built together, then every batch is finished by itself.

Whoever builds needs values alone: which batches there are (`ChunkPlan`), where their rows lie (`ChunkRows`)
and what all chunks of a stream are built with (`BuildContext`). First come the columns, a slot, a copy and a
split each; then bad samples are left out or raised, and what the user gave is called: transforms,
`collate_fn`, `batch_transform`. A slot comes back when the last view of it dies.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from numpy.typing import NDArray

from dataflow.batch.delivered import UNTRAINED, Delivered, SampleWarning
from dataflow.batch.measured import SampleForms, batch_of_made, length_reason, made_for
from dataflow.batch.packed import batch_columns
from dataflow.batch.samples import (
    KEPT,
    REPEAT,
    BatchSamples,
    GatherSamples,
    Misfit,
    OnDemand,
    checked_dict,
    collated,
    drop_rows,
    late_bytes,
    misfit_of,
    samples_of,
    transform_reason,
    without_rest,
)
from dataflow.batch.sharing import Finishing, Outcome, SampleOutcomes, building_s
from dataflow.batch.transforms import (
    BatchFn,
    called,
    lists_of,
    own_form,
    trains_nothing,
    transformed_together,
)
from dataflow.outputs.columns import ChunkColumns, ChunkRows, Cut, Randomness, closed_error
from dataflow.outputs.held_bytes import Ranges, held_bytes
from dataflow.outputs.objects import described
from dataflow.outputs.output import BuiltColumn, Output, make_copies
from dataflow.staging.window import StagedRows
from prefetch.errors import EngineClosedError, forget_frames
from prefetch.memory.arena import Arena, HeapKeeper
from prefetch.memory.guards import FileGuards
from prefetch.memory.interrupts import PROGRAM_ENDS, as_exception, must_go_on
from prefetch.work import PartialChunk
from sharding.errors import SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitPlan
from sharding.lengths.units import BatchSegments
from sharding.plan.plan import RankPlan


class BuildSettings(Struct, frozen=True, kw_only=True):
    """Settings that all chunks of a stream are built with: all that builders of other processes are sent."""

    outputs: Sequence[Output]
    seed: int
    transforms: Sequence[tuple[Callable[..., Any] | None, bool]]
    """For each source, the function that builders call with each sample, and whether it takes `rng=`."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples -> batch; None keeps the columns."""
    batch_transform: BatchFn | None = None
    batching: Batching | None = None
    """The rule by which batches depend on lengths."""
    mark_repeats: bool = False
    """True if batches get a column that tells what the tail rule delivers a second time."""
    marks_kept: bool = False
    """True if they get one that tells which of their samples were not left out."""
    charge_bytes: int
    """Small batches are charged together once they take so much: to charge costs as much as to make one."""
    limit_bytes: int = sys.maxsize
    """The memory limit: of the decoded value of a sample, and of what all builders make together."""
    num_builders: int = 1
    hand_over_s: float = math.inf
    """Once building took so long, what is finished is handed over before the chunk is whole."""
    is_pinned: bool = False
    """True if the training process page-locks whole slabs of other processes, so that these copy there."""

    @property
    def calls_functions(self) -> bool:
        """Return whether builders call functions of the user's."""
        transforms = (transform for transform, _ in self.transforms)
        functions = (*transforms, self.collate, self.batch_transform, *(o.function for o in self.outputs))
        return any(function is not None for function in functions)

    @property
    def lists(self) -> frozenset[str]:
        """Columns of transformed samples whose length differs from sample to sample."""
        return frozenset(name for transform, _ in self.transforms for name in lists_of(transform))

    @property
    def takes_samples(self) -> bool:
        """Return whether batches are made of single samples."""
        return bool(self.collate) or any(transform for transform, _ in self.transforms)

    @property
    def last_function(self) -> str:
        """Return the name of the function that makes a batch at last; "": none does."""
        return "batch_transform" if self.batch_transform else "collate_fn" if self.collate else ""

    @property
    def does_something(self) -> bool:
        """Return whether the built columns are not yet the batch."""
        return bool(self.takes_samples or self.batch_transform or self.batching or self.mark_repeats)

    @property
    def gathers(self) -> GatherSamples | None:
        """The function that gathers samples made for a planned batch; None: they are not made for one."""
        return self.collate if self.batching and isinstance(self.collate, GatherSamples) else None

    def forms(self, column: str) -> bool:
        """Return whether the column is packed or padded here; a user's `collate` does that by itself."""
        return self.batching is not None and self.collate is None and column in self.batching.columns


class BuildContext(Struct, frozen=True, kw_only=True):
    """The settings and resources that builders of one process build chunks with."""

    settings: BuildSettings
    on_bad: Callable[[SampleError], bool]
    """Decides about a bad sample: True skips it; may raise."""
    arena: Arena
    guards: FileGuards
    on_return: Callable[[int], Callable[[], None]]
    """Bytes of a slot -> what is called when its last view dies."""
    closing: threading.Event
    """Set when nobody wants the batches any more: building ends with the sample that it is at."""
    heap: HeapKeeper
    shares_batches: bool = False
    """True if several builders may make the samples of one batch: they are threads."""
    ships_values: bool = False
    """True if chunks are built elsewhere, and stored values are copied for it."""
    row_bytes: int | None = None
    """Bytes of a row of a batch, about, where its builder reads it, too; None: windows are staged here."""
    seed_globals: Callable[[int], None] | None = None
    """Seeds the global generators with a key; None: they are the training code's."""
    thread_s: Callable[[], float] = time.thread_time
    """The processor time of the thread, in seconds."""
    now: Callable[[], float] = time.perf_counter
    """The clock for `hand_over_s`, in seconds."""
    pin: BatchFn | None = None
    """Moves a batch to page-locked memory, but for what lies in slots; None: it may be anywhere."""
    forms: SampleForms = field(default_factory=SampleForms)
    """The types of arrays that samples which were made had."""
    warned_of: set[str] = field(default_factory=set)
    """Kinds of remarks of which was said where the first one is."""
    on_samples: Callable[[Any, float], None] | None = None
    """Hears of the first sample of a batch, and of the seconds that each took; None: nobody asks."""
    sums: Any = None
    """The `BatchSums` that get those of batches; None: nobody keeps account of steps, or no batch is made,
    but samples for some."""


class ChunkPlan(Struct, frozen=True, kw_only=True, eq=False):
    """The batches that a chunk has. Says nothing of where their rows lie."""

    epoch: int
    first_batch: int
    """Number in the epoch's plan."""
    sizes: NDArray[np.int64]
    """[batches] rows of each."""
    segments: BatchSegments | None
    """The segments that length-aware batches consist of."""
    cut: Cut | None
    """The part of its columns that a length-aware batch takes."""
    lengths: NDArray[np.int64] | None
    """[rows, 1 + costs] the length, and costs, that each row's sample must be made with; None: none is."""
    repeats: Sequence[NDArray[np.bool_]]
    """For each batch, which of its samples, rows or units come a second time; empty: nobody asks."""

    @classmethod
    def of(
        cls, plan: RankPlan, first_batch: int, sizes: NDArray[np.int64], settings: BuildSettings
    ) -> ChunkPlan:
        """The batches from `first_batch` on, of so many rows each."""
        last = first_batch + len(sizes)
        segments = plan.batches(first_batch, last) if isinstance(plan, UnitPlan) else None
        batching, cut, lengths = settings.batching, None, None
        if (
            segments is not None
            and batching is not None
            and (settings.gathers or settings.forms(batching.column))
        ):
            assert isinstance(plan, UnitPlan)
            assert plan.sequence.sizes is not None
            taken = segments.segments
            lengths = np.atleast_2d(plan.sequence.sizes[taken.position].astype(np.int64).T).T
            if not settings.gathers:
                cut, lengths = Cut(batching.columns, taken.begin, taken.length, lengths[:, 0]), None
        marked = range(first_batch, last) if settings.mark_repeats else ()
        return cls(
            epoch=plan.order.epoch,
            first_batch=first_batch,
            sizes=sizes,
            segments=segments,
            cut=cut,
            lengths=lengths,
            repeats=[plan.repeats(number, number + 1) for number in marked],
        )


class BatchBuilder:
    """Builds the batches of one chunk."""

    columns: ChunkColumns
    """Its columns, from `open` on until `finish` has ended."""

    def __init__(self, context: BuildContext, plan: ChunkPlan, rows: ChunkRows) -> None:
        self.context, self.settings = context, context.settings
        self.plan, self.rows = plan, rows
        self.built: list[BuiltColumn] = []
        self.leased_bytes = 0
        """Bytes of slots within the chunk's credits; known when `finish` has ended."""
        self._randomness = Randomness(context.settings.seed, plan.epoch)
        self.made: dict[int, Any] = {}
        """Samples that others have made, by row of the chunk."""
        self._shared_s, self._late_bytes = 0.0, 0
        """Seconds that others took for the batch, beyond those that passed meanwhile; see `late_bytes`."""

    def open(self) -> None:
        """Say what has to be copied and decoded. Inside `FileGuards.loading`."""
        context, rows = self.context, self.rows
        self.columns = ChunkColumns(
            rows,
            context.arena,
            self._randomness,
            may_load=all(part.window.may_load for part in rows.parts),
            closing=context.closing,
            sample_bytes=context.settings.limit_bytes,
            on_return=context.on_return,
        )
        self.built = [output.build(self.columns) for output in context.settings.outputs]

    def begin(self) -> Sequence[Callable[[], None]]:
        """Copy what is copied; give the parts that decode."""
        with self.context.guards.loading():
            self.open()
            make_copies(self.built, self.columns)
        return [decode for built in self.built for decode in built.decodes]

    def finish(self) -> Generator[PartialChunk[Delivered]]:
        """Split into batches, apply what the user gave: in parts where that takes memory of its own, or time.

        What fails is raised in its place, behind the batches before it.
        """
        try:
            yield from self._parts(self.columns)
        finally:
            self.leased_bytes = self.columns.leased_bytes
            del self.columns
            self.built, self.rows = [], NO_ROWS

    def _parts(self, columns: ChunkColumns) -> Generator[PartialChunk[Delivered]]:
        context, sizes, settings = self.context, list[int](self.plan.sizes.tolist()), self.settings
        values, aheads = list[Iterable[Any]](), list[Callable[[int], int]]()
        takes_each = settings.takes_samples and self._takes_each
        for built in self.built:
            if built.each is not None and takes_each:
                ends = zip(itertools.accumulate(sizes), sizes, strict=True)
                values.append([OnDemand(built.each, range(end - size, end)) for end, size in ends])
                continue
            assert built.split is not None
            values.append(built.split(sizes))
            if built.ahead is not None:
                aheads.append(built.ahead)
        names = [output.name for output in settings.outputs]
        batches = (dict(zip(names, batch, strict=True)) for batch in zip(*values, strict=True))
        if self.is_planned:
            numbered = enumerate(zip(batches, sizes, strict=True), self.plan.first_batch)
            yield PartialChunk([Delivered(self.plan.epoch, n, batch, size) for n, (batch, size) in numbered])
            return
        delivered, heap_bytes, most_bytes, row = list[Delivered](), 0, 0, 0
        resumed_s, thread_s = (began_s := context.now()), context.thread_s()
        for number, size in enumerate(sizes, self.plan.first_batch):
            if context.closing.is_set():
                raise closed_error()
            if ahead := sum([ahead_of(size) for ahead_of in aheads]):
                yield PartialChunk(slot_bytes=ahead)
                resumed_s, thread_s = context.now(), context.thread_s()
            if context.seed_globals is not None:
                context.seed_globals(self._randomness.key(*self.rows.find(row), of_batch=True))
            try:
                delivered.append((yield from self.delivered(number, next(batches), row, size)))
            except EngineClosedError:
                raise
            except Exception:
                part, delivered = PartialChunk(delivered, heap_bytes=heap_bytes), []
                yield part
                del part
                raise
            own_bytes = held_bytes(delivered[-1].batch, columns.slots)
            heap_bytes, most_bytes = heap_bytes + own_bytes, max(most_bytes, own_bytes - self._late_bytes)
            row += size
            is_last = row == self.rows.num_rows
            flush_now = not is_last and context.now() - began_s >= settings.hand_over_s
            if is_last or flush_now or ahead or heap_bytes >= settings.charge_bytes:
                context.heap.made(heap_bytes)
                # While samples are put together, they are there as well as their batch.
                made_bytes = heap_bytes + (most_bytes if settings.takes_samples else 0)
                build_s = context.now() - resumed_s + self._shared_s
                if not self._shared_s:  # else it may be another thread by now
                    own_s = context.thread_s() - thread_s
                    build_s = building_s(build_s, own_s, settings.num_builders)
                part = PartialChunk(
                    delivered,
                    heap_bytes=heap_bytes,
                    made_bytes=made_bytes,
                    flush_now=flush_now,
                    build_s=build_s,
                )
                delivered, heap_bytes, most_bytes, self._shared_s = [], 0, 0, 0.0
                yield part
                del part
                resumed_s, thread_s = context.now(), context.thread_s()
                began_s = resumed_s if flush_now else began_s

    @property
    def _takes_each(self) -> bool:
        """Return whether columns are decoded sample by sample, between two calls of the transform.

        Decoded samples of any size are then there one by one. Rows of packed batches are whole.
        """
        transforms = [(transform, rng) for transform, rng in self.settings.transforms if transform]
        together = any(own_form(transform, "batch") and not wants_rng for transform, wants_rng in transforms)
        is_whole = self.plan.segments is not None and self.settings.collate is None
        return bool(transforms) and not together and not is_whole

    @property
    def is_planned(self) -> bool:
        """Return whether its bytes were known before: no function of the user's runs, no object is made."""
        columns, settings = self.columns, self.settings
        is_odd = columns.bad or columns.remarks or settings.does_something
        return not is_odd and all(output.is_view for output in settings.outputs)

    def delivered(self, number: int, batch: dict[str, Any], row: int, size: int) -> Finishing[Delivered]:
        """A batch, whose columns are built and whose rows begin at `row`, with all done to it."""
        skipped, num_samples = list[SampleError](), size
        result: Any = batch
        if self.columns.bad or self.settings.does_something:
            result, num_samples = yield from self._finish_batch(number, batch, row, size, skipped)
        if self.context.pin is not None:
            result = self.context.pin(result)
        remarks = self._remarks(row, row + size) if self.columns.remarks else ()
        return Delivered(self.plan.epoch, number, result, num_samples, tuple(skipped), remarks=remarks)

    def _remarks(self, first: int, end: int) -> tuple[SampleWarning, ...]:
        """Return what is odd about rows of the chunk. Where, is said once: to find a key may take a read."""
        warnings: dict[str, SampleWarning] = {}
        for row, column, kind in self.columns.remarks:
            if not first <= row < end:
                continue
            if kind not in warnings:
                is_known = kind in self.context.warned_of
                self.context.warned_of.add(kind)
                text = "" if is_known else str(self.rows.sample_error(row, kind, column))
                warnings[kind] = SampleWarning(kind, 0, text)
            warnings[kind] = warnings[kind]._replace(num_values=warnings[kind].num_values + 1)
        return tuple(warnings.values())

    def _finish_batch(
        self, number: int, batch: dict[str, Any], row: int, size: int, skipped: list[SampleError]
    ) -> Finishing[tuple[Any, int]]:
        settings, columns = self.settings, self.columns
        segments = self.plan.segments and self.plan.segments.one(number - self.plan.first_batch)
        rows = np.arange(size)
        if segments is not None and settings.gathers:  # a sample once, however often it is in the batch
            rows = np.sort(np.unique(segments.segments.position, return_index=True)[1])
        if dropped := {r - row for r in columns.bad if row <= r < row + size}:
            dropped &= {*rows.tolist()}
        for r in sorted(dropped):
            self._leave_out(columns.bad[row + r], columns.bad[row + r].__cause__, skipped)
        if dropped or len(rows) < size:
            rows = np.setdiff1d(rows, [*dropped], assume_unique=True)
            if not len(rows):
                return {}, 0
            batch = drop_rows(batch, rows)
        if segments is not None and settings.collate is None:
            assert settings.batching is not None
            segments = segments.keep(rows) if dropped else segments
            batch = batch_columns(settings.batching, segments, batch, columns.slot)
        result: Any = batch
        if settings.takes_samples:
            samples, rows = yield from self._transform(batch, rows, row, skipped)
            if not samples:
                return {}, 0
            if segments is not None and (gather := settings.gathers) is not None:
                assert settings.batching is not None
                # Not in the chunk's credits: it counts as what is on the heap does.
                room = partial(self.context.arena.lease, on_return=self.context.on_return(0))
                self._late_bytes = late_bytes(samples)
                measured = made_for(segments, gather(samples, room), samples, rows)
                error = partial(self.rows.sample_error, column=None, stage="transform")
                row_of = dict(zip(measured.positions.tolist(), (row + rows).tolist(), strict=True))
                wrong = self.context.forms.misfits(
                    measured, gather, lambda p: error(row_of[p], "") if p in row_of else None
                )
                for index, reason in wrong.items():
                    self._leave_out(error(row + int(rows[index]), reason), None, skipped)
                measured = measured.without([*wrong]).with_lists(gather.lists)
                if not len(measured):
                    return {}, 0
                result, rows = batch_of_made(settings.batching, measured, segments, self.context.forms)
            elif settings.collate:
                context = partial(self._context_of, "collate_fn=", number, row, rows, samples)
                result = called(settings.collate, samples, context)
            else:
                result, rows = self._collate(samples, rows, row, skipped)
                if not len(rows):
                    return {}, 0
        if settings.batch_transform:
            context = partial(self._context_of, "batch_transform=", number, row, rows, result)
            result = called(settings.batch_transform, result, context)
        if settings.mark_repeats:
            repeats = torch.from_numpy(self._repeats(number, rows))
            checked_dict(result, settings.last_function)[REPEAT] = repeats
        if settings.marks_kept:
            checked_dict(result, settings.last_function)[KEPT] = torch.from_numpy(rows)
        return result, len(rows)

    def _repeats(self, number: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which kept samples of a batch (of packed rows: which of all) come a second time."""
        flags = self.plan.repeats[number - self.plan.first_batch]
        if self.plan.segments is None:
            return flags[rows]
        batching = self.settings.batching
        assert batching is not None
        return flags if batching.rows_are_units else np.full(len(rows), flags[0])

    def _transform(
        self, batch: dict[str, Any], rows: NDArray[np.int64], first: int, skipped: list[SampleError]
    ) -> Finishing[tuple[list[Any], NDArray[np.int64]]]:
        """The samples that the transforms made, and which rows of the batch these are."""
        samples, transformed, num_skipped = [], [], len(skipped)
        settings, outputs, transforms = self.settings, self.settings.outputs, self.settings.transforms
        origins = self.rows.find_all(first + rows)
        columns = self.columns
        assert columns is not None
        batch_samples = samples_of(batch, outputs, len(rows))
        of_samples = [transforms[window.source_number] for window, _ in origins]
        together, failure = transformed_together(batch_samples, of_samples)

        def outcome(position: int) -> Outcome:
            if (row := first + int(rows[position])) in self.made:
                return self.made.pop(row), "", None
            if position in together:
                return self._outcome(partial(together.__getitem__, position))
            return self._one(batch_samples, position, *origins[position], row)

        outcomes = SampleOutcomes(
            outcome,
            len(rows),
            is_shared=self.context.shares_batches and not together,
            closing=self.context.closing,
            now=self.context.now,
            num_builders=self.settings.num_builders,
        )
        began_s, note = self.context.now(), None if self.made or settings.gathers else self.context.on_samples
        for position, (index, (window, row)) in enumerate(zip(rows, origins, strict=True)):
            if self.context.closing.is_set():
                raise closed_error()
            chunk_row = first + int(index)
            if outcomes.may_share and (parts := outcomes.parts_from(position)):
                handed_out_s = self.context.now()
                yield PartialChunk(parts=parts)
                self._shared_s += outcomes.shared_s - (self.context.now() - handed_out_s)
            sample, reason, cause = outcomes.take(position)
            if sample is _BAD:
                self._leave_out(columns.bad[chunk_row], columns.bad[chunk_row].__cause__, skipped)
                continue
            if not reason and self.plan.lengths is not None:
                assert settings.batching is not None
                reason, is_wrong = length_reason(settings.batching, sample, self.plan.lengths[chunk_row])
                if is_wrong:  # so may be all that follow: it is not left out
                    raise window.sample_error(row, reason, None, "transform")
            if not reason:
                if mask := trains_nothing(transforms[window.source_number][0], sample):
                    columns.remark(chunk_row, mask, UNTRAINED)
                samples.append(sample)
                transformed.append(index)
                continue
            bad = window.sample_error(row, reason, None, "transform")
            if cause is not None and must_go_on(cause):
                cause.add_note(f"in transform=, which had sample {bad.key!r} of {bad.shard}")
                raise cause
            self._leave_out(bad, cause, skipped)
            del cause  # its frames had the sample
        if failure is not None and len(skipped) == num_skipped:
            failure = as_exception(failure)
            failure.add_note("in the batch form of transform=, though it takes each of the samples alone")
            raise failure
        decodes_all = note is not None and any(built.decodes for built in self.built)  # so would all others
        if note is not None and samples and self._takes_each and not decodes_all:
            note(samples[0], (self.context.now() - began_s) / len(rows))
        return samples, np.array(transformed, np.int64)

    def _one(self, batch: BatchSamples, index: int, window: StagedRows, row: int, chunk_row: int) -> Outcome:
        """The outcome of the transform of one sample, which is decoded here; `_BAD` if it cannot be.

        When this ends nothing is left of the sample but what the result needs.
        """
        assert self.columns is not None
        sample = batch[index]
        if chunk_row in self.columns.bad:
            return _BAD, "", None
        decoded = Ranges.of(batch.decoded(sample))
        self.context.heap.made(decoded.nbytes)
        result, reason, cause = self._outcome(partial(self._apply, sample, window, row, chunk_row))
        return without_rest(result, decoded, self.columns.slots), reason, cause

    def _outcome(self, make: Callable[[], Any]) -> Outcome:
        """Return what a transform returned, why that is none, and what it raised."""
        collate = self.settings.collate
        try:
            result = make()
            result, reason = collate.checked(result) if isinstance(collate, GatherSamples) else (result, "")
        except BaseException as error:
            return None, transform_reason(error, [output.name for output in self.settings.outputs]), error
        return result, reason, None

    def _collate(
        self, samples: list[Any], rows: NDArray[np.int64], first: int, skipped: list[SampleError]
    ) -> tuple[Any, NDArray[np.int64]]:
        """The batch of samples, and which rows are in it: all but those that no batch can hold."""
        while samples:
            try:
                return collated(samples, self.settings.lists), rows
            except Exception as error:
                misfit = misfit_of(samples, self.settings.outputs, self.settings.lists)
                if misfit is None:
                    raise
                bad = self._misfit_error(misfit, first + rows)
                if not misfit.is_bad:
                    raise bad from error
                self._leave_out(bad, error, skipped)
                del samples[misfit.at]
                rows = np.delete(rows, misfit.at)
        return {}, rows

    def _misfit_error(self, misfit: Misfit, rows: NDArray[np.int64]) -> SampleError:
        whole = not misfit.column
        text = f"transform= returned {misfit.what}" if whole else misfit.what
        if misfit.beside is not None:
            other = self.rows.sample_error(int(rows[misfit.beside]), "", None, "collate")
            sample = f"sample {other.key!r}"
            text += f", but for {sample} {misfit.other}" if whole else f", but {sample} has {misfit.other}"
        row, column = int(rows[misfit.at]), misfit.column or None
        return self.rows.sample_error(row, f"{text}; {misfit.cure}", column, "collate")

    def _leave_out(self, bad: SampleError, cause: BaseException | None, skipped: list[SampleError]) -> None:
        """Leave a sample out, or raise its error, as the user decided; not where the program was to end."""
        bad.__cause__ = cause
        raised = cause.__cause__ if isinstance(cause, SampleError) else cause  # of one item of the sample
        if isinstance(raised, PROGRAM_ENDS) or not self.context.on_bad(bad):
            raise bad from cause
        forget_frames(bad)
        skipped.append(bad)

    def _context_of(self, name: str, number: int, row: int, rows: NDArray[np.int64], argument: Any) -> str:
        """Return where a function of batches was, and what it was given."""
        ends = (self.rows.sample_error(row + int(rows[index]), "", None, "collate") for index in (0, -1))
        samples = " to ".join(f"{end.key!r} of {end.shard}" for end in ends)
        batch = f"batch {number} of epoch {self.plan.epoch}"
        return f"in {name} of {batch}, samples {samples}; it was given {described(argument)}"

    def _apply(self, sample: dict[str, Any], window: StagedRows, row: int, chunk_row: int) -> Any:
        settings = self.settings
        transform, wants_rng = settings.transforms[window.source_number]
        if transform is None:
            return sample
        transform = (settings.gathers and own_form(transform, "deferred")) or transform
        if self.context.seed_globals is not None:
            self.context.seed_globals(self._randomness.key(window, row, of_batch=False))
        draws = {"rng": self._randomness.generator(window, row)} if wants_rng else {}
        return transform(sample, **draws)


_BAD = object()
"""Stands for the result of a sample that could not be decoded."""
NO_ROWS = ChunkRows(0, list)
"""The rows of a chunk that is finished: windows and slots are free to go."""
