"""A chunk: consecutive batches built together from staged windows, and finished one by one.

A chunk is a few consecutive batches of one rank, so that the Python cost is paid per chunk. Its outputs
(`dataflow.batch.output`) say where the values of its columns lie. Batches that are copies alone are made a
few at a time, while the consumer takes them (`prefetch.memory.copies`). For all others the columns are built
first, a slot, a copy and a split each; then bad samples are left out or raised, and what the user gave is
called: transforms, `collate_fn`, `batch_transform`. A slot comes back when the last view of it dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from dataflow.batch.columns import ChunkColumns, ChunkRows, Cut, Randomness, WindowPart, raise_if_closing
from dataflow.batch.delivered import Delivered, LazyBatches, job_ends, largest_job
from dataflow.batch.held_bytes import held_bytes
from dataflow.batch.output import BuiltColumn, Output, make_copies
from dataflow.batch.packed import batch_bytes, batch_columns
from dataflow.batch.samples import Misfit, described, drop_rows, misfit_of, samples_of, transform_reason
from dataflow.staging.window import StagedWindow
from prefetch.core.plan import JobPlan
from prefetch.memory.arena import Arena, HeapKeeper, rounded_bytes
from prefetch.memory.copies import ChunkCopies, Copies
from prefetch.memory.guards import FileGuards
from prefetch.work import Piece
from sharding.cached_property import cached_property
from sharding.errors import SampleError, ShardReadError
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitPlan
from sharding.plan.batch_rows import BatchRows
from sharding.plan.plan import RankPlan

REPEAT = "__repeat__"
"""The column of `mark_repeats`: bool [samples], or [rows] of packed ones."""

BatchFn = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Postprocessing:
    """What happens to a batch after its columns are built."""

    transforms: Sequence[tuple[Callable[..., Any] | None, bool]]
    """Of each source: what is called with each sample, in worker threads, and whether it takes `rng=`."""
    collate: Callable[[list[Any]], Any] | None
    """Samples -> batch; None keeps the columns."""
    batch_transform: BatchFn | None
    on_bad: Callable[[SampleError], bool]
    """Decides about a bad sample: True skips it; may raise."""
    batching: Batching | None = None
    """How batches depend on lengths."""
    mark_repeats: bool = False
    """Whether batches get a column that tells what the tail rule delivers a second time."""

    @property
    def takes_samples(self) -> bool:
        """Whether batches are made of single samples."""
        return bool(self.collate) or any(transform for transform, _ in self.transforms)

    @property
    def does_something(self) -> bool:
        """Whether the built columns are not yet the batch."""
        return bool(self.takes_samples or self.batch_transform or self.batching or self.mark_repeats)

    def forms(self, column: str) -> bool:
        """Whether the column is packed or padded here; a user's `collate` does that by itself."""
        return self.batching is not None and self.collate is None and column in self.batching.columns


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What all chunks of a stream are built with."""

    outputs: Sequence[Output]
    seed: int
    postprocessing: Postprocessing
    arena: Arena
    guards: FileGuards
    on_return: Callable[[int], Callable[[], None]]
    """Bytes of a slot -> what is called when its last view dies."""
    closing: threading.Event
    """Set when nobody wants the batches any more: building ends with the sample that it is at."""
    heap: HeapKeeper
    copies: Copies | None
    """Where batches that are copies alone are made; None: by builders, as all others."""
    charge_bytes: int
    """Small batches are charged together once they take so much: to charge costs as much as to make one."""


class BatchChunk:
    """Batches [first, last) of a plan. Implements `prefetch.work.Chunk`."""

    def __init__(
        self, context: BuildContext, plan: RankPlan, batches: BatchRows, windows: Sequence[StagedWindow]
    ) -> None:
        """`windows`: those of `batches.parts`."""
        self._context, self._plan = context, plan
        self.first_batch, self._sizes = batches.first, batches.sizes
        self.num_batches = len(batches)
        self.needs = tuple(windows)
        self.closes: list[StagedWindow] = []
        self.leased_bytes = 0
        self.reads_windows = context.copies is not None
        """Whether batches that were handed out are still to be made of its windows."""
        self._copies: ChunkCopies | None = None
        self._randomness = Randomness(context.seed, plan.order.epoch)
        self._columns: ChunkColumns | None = None
        self._built: list[BuiltColumn] = []
        self._pieces = (
            plan.batches(batches.first, batches.first + len(batches)) if isinstance(plan, UnitPlan) else None
        )
        locate = partial(_window_parts, plan, batches, self.needs, context.arena)
        self._rows = ChunkRows(int(batches.sizes.sum()), locate, self._cut())

    @cached_property
    def nbytes(self) -> int:
        """Output credits; known once the windows are staged."""
        if self._context.copies is not None:
            sizes = [output.row_sizes(self._rows) for output in self._context.outputs]
            return self._context.copies.credits_for(len(self._job_ends), largest_job(self._job_ends, sizes))
        return sum(
            output.batch_bytes(self._rows) + self._laid_bytes(output) for output in self._context.outputs
        )

    @cached_property
    def _job_ends(self) -> NDArray[np.int64]:
        """[jobs] the row after the last of each, where batches are copied in jobs."""
        assert self._context.copies is not None
        return job_ends(self._sizes, self._context.copies.batches_per_job)

    def _laid_bytes(self, output: Output) -> int:
        """Credits of what pieces of a column are laid into, packed or padded."""
        steps = self._context.postprocessing
        if self._pieces is None or not steps.forms(output.name):
            return 0
        assert steps.batching is not None
        batches, dtype = map(self._pieces.one, range(self.num_batches)), np.dtype(output.dtype)
        laid = (batch_bytes(steps.batching, pieces, output.name, dtype) for pieces in batches)
        return sum(map(rounded_bytes, laid))

    def _cut(self) -> Cut | None:
        """Which part of its columns a length-aware batch takes."""
        steps, plan = self._context.postprocessing, self._plan
        if self._pieces is None or steps.batching is None or not steps.forms(steps.batching.column):
            return None
        assert isinstance(plan, UnitPlan)
        pieces = self._pieces.pieces
        whole = plan.sequence.lengths[pieces.position].astype(np.int64)
        return Cut(steps.batching.columns, pieces.begin, pieces.length, whole)

    def begin(self) -> Sequence[Callable[[], None]]:
        """Copy what is copied, unless jobs do that; give the parts that decode."""
        context, rows = self._context, self._rows
        planned_in = int(context.guards.generation[0])  # before any guard is looked at
        with context.guards.loading():
            self._columns = columns = ChunkColumns(
                rows,
                context.arena,
                self._randomness,
                may_load=all(part.window.may_load for part in rows.parts),
                closing=context.closing,
                on_return=context.on_return,
            )
            self._built = [output.build(columns) for output in context.outputs]
            if context.copies is None:
                make_copies(self._built, columns)
        if context.copies is not None:
            self._copies = self._submitted(context.copies, planned_in)
        return [decode for built in self._built for decode in built.decodes]

    def _submitted(self, copies: Copies, planned_in: int) -> ChunkCopies:
        """The chunk's copies, on their way, a few batches a job."""
        return copies.submit(
            JobPlan(
                number=(self._plan.order.epoch << 32) + self.first_batch,
                columns=[built.copies for built in self._built if built.copies is not None],
                ends=self._job_ends,
                generation=self._context.guards.generation,
                planned_in=planned_in,
                keep=self._columns,
            )
        )

    def _copied_batches(self, copies: ChunkCopies, built: Sequence[BuiltColumn]) -> Iterator[Delivered]:
        """Batches that are copies alone: each is there when the consumer asks for it."""
        names = [output.name for output in self._context.outputs]
        views = [column.views for column in built if column.views is not None]
        is_planned, epoch, sizes = self._is_planned, self._plan.order.epoch, self._sizes.tolist()
        first, number = 0, self.first_batch
        for job, end in enumerate(copies.plan.ends.tolist()):
            slot, num_bad = copies.take()
            if num_bad:
                raise self._lost(copies, first, end)
            if end == self._rows.num_rows:
                for window in self.closes:
                    window.verify()
                self.reads_windows = False
            own = sizes[job * copies.batches_per_job : (job + 1) * copies.batches_per_job]
            offsets = copies.offsets[job]
            values = [view(slot[at:], first, own) for view, at in zip(views, offsets, strict=False)]
            del slot  # the batches have it
            for size, *column_values in zip(own, *values, strict=True):
                batch = dict(zip(names, column_values, strict=True))
                del column_values
                if is_planned:
                    yield Delivered(epoch, number, batch, size)
                else:
                    yield self._delivered(number, batch, first, size)
                del batch
                first, number = first + size, number + 1
            del values

    def _lost(self, copies: ChunkCopies, first: int, end: int) -> ShardReadError:
        """The error of the first row of a job whose bytes are gone."""
        row = first + int(np.flatnonzero(copies.status[first:end])[0])
        window, window_row = self._rows.find(row)
        return window.truncated(window_row, copies.plan.columns[int(copies.status[row]) - 1].name)

    def finish(self) -> Iterator[Piece[Delivered]]:
        """Split into batches, apply what the user gave: one by one where that takes memory of its own."""
        assert self._columns is not None
        if self._copies is not None:
            copied = self._copied_batches(self._copies, self._built)
            self._copies, self._built = None, []  # whoever takes the batches has them
            yield Piece(LazyBatches(self.num_batches, copied))
            return
        context, sizes = self._context, list[int](self._sizes.tolist())
        columns = [built.values(sizes) for built in self._built]
        names = [output.name for output in context.outputs]
        batches = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        if self._is_planned:
            epoch = self._plan.order.epoch
            numbered = enumerate(zip(batches, sizes, strict=True), self.first_batch)
            yield Piece([Delivered(epoch, number, batch, size) for number, (batch, size) in numbered])
        else:
            delivered, heap_bytes, row = list[Delivered](), 0, 0
            for number, size in enumerate(sizes, self.first_batch):
                raise_if_closing(context.closing)
                ahead = sum(built.ahead(size) for built in self._built if built.ahead)
                if ahead:
                    yield Piece(slot_bytes=ahead)
                delivered.append(self._delivered(number, next(batches), row, size))
                heap_bytes += held_bytes(delivered[-1].batch, self._columns.slots)
                row += size
                if ahead or heap_bytes >= context.charge_bytes or row == self._rows.num_rows:
                    context.heap.made(heap_bytes)
                    piece = Piece(delivered, heap_bytes=heap_bytes)
                    delivered, heap_bytes = [], 0
                    yield piece
                    del piece
        self.leased_bytes = self._columns.leased_bytes
        self._columns, self._built, self._rows = None, [], _NO_ROWS
        for window in self.closes:
            window.verify()

    @property
    def _is_planned(self) -> bool:
        """Whether what it takes was known before: nothing of the user's runs, and no object is made."""
        assert self._columns is not None
        if self._columns.bad or self._context.postprocessing.does_something:
            return False
        return all(output.is_view for output in self._context.outputs)

    def _delivered(self, number: int, batch: dict[str, Any], row: int, size: int) -> Delivered:
        skipped: list[SampleError] = []
        result, num_samples = self._finish_batch(number, batch, row, size, skipped)
        return Delivered(self._plan.order.epoch, number, result, num_samples, tuple(skipped))

    def _finish_batch(
        self, number: int, batch: dict[str, Any], row: int, size: int, skipped: list[SampleError]
    ) -> tuple[Any, int]:
        steps, columns = self._context.postprocessing, self._columns
        assert columns is not None
        dropped = {r - row for r in columns.bad if row <= r < row + size}
        for r in sorted(dropped):
            if not steps.on_bad(columns.bad[row + r]):
                raise columns.bad[row + r]
            skipped.append(columns.bad[row + r])
        kept = np.arange(size)
        if dropped:
            kept = np.delete(kept, list(dropped))
            if not len(kept):
                return {}, 0
            batch = drop_rows(batch, kept)
        if self._pieces is not None and steps.collate is None:
            assert steps.batching is not None
            pieces = self._pieces.one(number - self.first_batch)
            pieces = pieces.keep(kept) if dropped else pieces
            batch = batch_columns(steps.batching, pieces, batch, columns.slot)
        result: Any = batch
        if steps.takes_samples:
            samples, kept = self._transform(batch, kept, row, skipped)
            if not samples:
                return {}, 0
            if steps.collate:
                place = partial(self._place, "collate_fn=", number, row, kept, samples)
                result = _called(steps.collate, samples, place)
            else:
                result, kept = self._collate(samples, kept, row, skipped)
                if not len(kept):
                    return {}, 0
        if steps.batch_transform:
            place = partial(self._place, "batch_transform=", number, row, kept, result)
            result = _called(steps.batch_transform, result, place)
        if steps.mark_repeats:
            _checked_dict(result, steps)[REPEAT] = torch.from_numpy(self._repeats(number, kept))
        return result, len(kept)

    def _repeats(self, number: int, kept: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of a batch's samples that are kept (of packed rows: of all), which come a second time."""
        flags = self._plan.repeats(number, number + 1)
        if self._pieces is None:
            return flags[kept]
        batching = self._context.postprocessing.batching
        assert batching is not None
        return flags if batching.rows_are_units else np.full(len(kept), flags[0])

    def _transform(
        self, batch: dict[str, Any], kept: NDArray[np.int64], first: int, skipped: list[SampleError]
    ) -> tuple[list[Any], NDArray[np.int64]]:
        """The samples that the transforms made, and which rows of the batch these are."""
        samples, transformed = [], []
        outputs = self._context.outputs
        origins = self._rows.find_all(first + kept)
        rows = zip(samples_of(batch, outputs, len(kept)), kept, origins, strict=True)
        for sample, index, (window, row) in rows:
            raise_if_closing(self._context.closing)
            try:
                samples.append(self._apply(sample, window, row))
                transformed.append(index)
            except Exception as error:
                reason = transform_reason(error, [output.name for output in outputs])
                bad = window.sample_error(row, reason, None, "transform")
                self._leave_out(bad, error, skipped)
        return samples, np.array(transformed, np.int64)

    def _collate(
        self, samples: list[Any], kept: NDArray[np.int64], first: int, skipped: list[SampleError]
    ) -> tuple[Any, NDArray[np.int64]]:
        """The batch of samples, and which rows are in it: all but those that no batch can hold."""
        while samples:
            try:
                return default_collate(samples), kept
            except Exception as error:
                misfit = misfit_of(samples, self._context.outputs)
                if misfit is None:
                    raise
                bad = self._misfit_error(misfit, first + kept)
                if misfit.beside is not None:  # which of the two is the bad one, nobody knows
                    raise bad from error
                self._leave_out(bad, error, skipped)
                del samples[misfit.at]
                kept = np.delete(kept, misfit.at)
        return {}, kept

    def _misfit_error(self, misfit: Misfit, rows: NDArray[np.int64]) -> SampleError:
        whole = not misfit.column
        text = f"transform= returned {misfit.what}" if whole else misfit.what
        if misfit.beside is not None:
            other = self._rows.sample_error(int(rows[misfit.beside]), "", None, "collate")
            sample = f"sample {other.key!r}"
            text += f", but for {sample} {misfit.other}" if whole else f", but {sample} has {misfit.other}"
        row, column = int(rows[misfit.at]), misfit.column or None
        return self._rows.sample_error(row, f"{text}; {misfit.cure}", column, "collate")

    def _leave_out(self, bad: SampleError, cause: Exception, skipped: list[SampleError]) -> None:
        """Leave a sample out, or raise its error, as the user decided."""
        bad.__cause__ = cause
        if not self._context.postprocessing.on_bad(bad):
            raise bad from cause
        skipped.append(bad)

    def _place(self, name: str, number: int, row: int, kept: NDArray[np.int64], argument: Any) -> str:
        """Where a function of batches was, and what it was given."""
        ends = (self._rows.sample_error(row + int(kept[at]), "", None, "collate") for at in (0, -1))
        samples = " to ".join(f"{end.key!r} of {end.shard}" for end in ends)
        batch = f"batch {number} of epoch {self._plan.order.epoch}"
        return f"in {name} of {batch}, samples {samples}; it was given {described(argument)}"

    def _apply(self, sample: dict[str, Any], window: StagedWindow, row: int) -> Any:
        steps = self._context.postprocessing
        transform, wants_rng = steps.transforms[window.source.number]
        if transform is None:
            return sample
        if not wants_rng:
            return transform(sample)
        return transform(sample, rng=self._randomness.generator(window, row))


_NO_ROWS = ChunkRows(0, list)
"""Those of a chunk that is finished: windows and slots are free to go."""


def _window_parts(
    plan: RankPlan, batches: BatchRows, windows: Sequence[StagedWindow], arena: Arena
) -> list[WindowPart]:
    """The rows of a chunk, window by window."""
    parts = []
    for part, window in zip(batches.parts, windows, strict=True):
        if part.indices is not None:
            rows = window.rows[part.indices]
        else:
            if window.in_batches is None:
                window.in_batches = _rows_in_batches(plan, part.window, window, arena)
            first, rows = window.in_batches
            rows = rows[(batches.first - first) * plan.batch_plan.batch_size :][: len(part)]
        parts.append(WindowPart(window, rows, part.rows))
    return parts


def _rows_in_batches(
    plan: RankPlan, number: int, window: StagedWindow, arena: Arena
) -> tuple[int, NDArray[np.int64]]:
    """The first full batch that lies in the window alone, and the rows of all such batches one after another.

    Most batches lie in one window. Locating their positions would cost more than all else that a chunk of
    tokens does: so it is done once a window, by a chunk of any of them, for all its batches, and the chunks
    take slices. Where a batch has the same share of whole lanes each time, not even positions are needed:
    a lane's samples lie one after another in the window's mixed rows, and each batch takes the next few.
    """
    core = plan.batch_plan.batches_within(*plan.order.window_core(number))
    num_rows = len(core) * plan.batch_plan.batch_size
    rows = arena.lease(8 * num_rows)[: 8 * num_rows].view(np.int64)
    whole = plan.batch_plan.whole_lanes(core.start)
    if whole is None:
        indices = plan.order.locate(plan.positions(core.start, core.stop)[0])[1]
        np.take(window.rows, indices, out=rows, mode="clip")
        return core.start, rows
    lanes, depths, each = whole
    by_lane = rows.reshape(len(core), len(lanes), each)
    for i, first in enumerate(plan.order.indices_at(number, lanes, depths).tolist()):
        by_lane[:, i] = window.rows[first : first + len(core) * each].reshape(-1, each)
    return core.start, rows


def _called(function: BatchFn, argument: Any, place: Callable[[], str]) -> Any:
    """What a user's function of batches returns; what it raises is told the place.

    A `StopIteration` of it would seem to be the loader's end.
    """
    try:
        return function(argument)
    except StopIteration as error:
        failure = RuntimeError(f"{getattr(function, '__name__', function)} raised StopIteration")
        failure.add_note(place())
        raise failure from error
    except Exception as error:
        error.add_note(place())
        raise


def _checked_dict(batch: Any, steps: Postprocessing) -> MutableMapping[str, Any]:
    if isinstance(batch, MutableMapping):
        return batch
    who = "the transformed samples were collated to"
    if steps.batch_transform or steps.collate:
        who = f"{'batch_transform' if steps.batch_transform else 'collate_fn'} returned"
    raise TypeError(
        f"mark_repeats=True adds a column {REPEAT!r} to batches that are dicts, but {who} a "
        f"{type(batch).__name__}"
    )
