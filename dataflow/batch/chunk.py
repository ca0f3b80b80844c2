"""A chunk: consecutive batches built together from staged windows, and finished one by one.

A chunk is a few consecutive batches of one rank, so that the Python cost is paid per chunk. Its outputs
(`dataflow.outputs.output`) say where the values of its columns lie. Batches that are copies alone are made a
few at a time, while the consumer takes them (`prefetch.memory.copies`). All others are built by a
`BatchBuilder`, here or in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from dataflow.batch.builder import NO_ROWS, BatchBuilder, BuildContext, ChunkPlan
from dataflow.batch.delivered import Delivered, LazyBatches, job_ends, largest_job
from dataflow.batch.sharing import finished
from dataflow.outputs.columns import ChunkRows
from dataflow.outputs.output import Output, staged_outputs
from dataflow.staging.columns import StagedOutput
from dataflow.staging.rows import WindowPart
from dataflow.staging.window import StagedWindow
from prefetch.core.copy_table import JobPlan
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.copies import ChunkCopies, Copies
from prefetch.work import PartialChunk
from sharding.cached_property import cached_property
from sharding.lengths.units import BatchSegments
from sharding.plan.batch_index import BatchIndex
from sharding.plan.plan import EpochPlan, RankPlan
from sharding.spans import Ints


class BatchChunk:
    """Batches [first, last) of a plan. Implements `prefetch.work.Chunk`.

    `copies`: where batches that are copies alone are made; None: by builders, as all others.
    """

    def __init__(
        self,
        context: BuildContext,
        plan: RankPlan,
        batches: BatchIndex,
        windows: Sequence[StagedWindow],
        *,
        copies: Copies | None = None,
    ) -> None:
        """Build `batches` from `windows`, which are those of `batches.parts`."""
        self._context, self._copies = context, copies
        self._rank_plan, self._batches = plan, batches
        self.plan = ChunkPlan.of(plan, batches.first, batches.sizes, context.settings)
        self.num_batches = len(batches)
        self.needs = tuple(windows)
        self.closes: list[StagedWindow] = []
        self.leased_bytes = 0
        self.reads_windows = copies is not None
        """True if batches that were handed out are still to be made of its windows."""
        locate = partial(_window_parts, plan, batches, self.needs, context, self.plan.segments)
        self.rows = ChunkRows(int(batches.sizes.sum()), locate, self.plan.cut)
        self._builder = BatchBuilder(context, self.plan, self.rows)
        self._submitted: ChunkCopies | None = None

    def halves(self) -> tuple[BatchChunk, BatchChunk]:
        """See `prefetch.work.Chunk`. A window is closed by the half that needs it last."""
        batches, middle = self._batches, self.num_batches // 2
        windows = dict(zip((part.window for part in batches.parts), self.needs, strict=True))

        def half(half_batches: BatchIndex) -> BatchChunk:
            needs = [windows[part.window] for part in half_batches.parts]
            return BatchChunk(self._context, self._rank_plan, half_batches, needs, copies=self._copies)

        first, last = half(batches.between(0, middle)), half(batches.between(middle, self.num_batches))
        for window in self.closes:
            (last if window in last.needs else first).closes.append(window)
        return first, last

    @cached_property
    def nbytes(self) -> int:
        """Output credits; known once the windows are staged, about where they are only planned."""
        outputs = self._context.settings.outputs
        if self._context.row_bytes is not None:
            return rounded_bytes(self.rows.num_rows * self._context.row_bytes)
        if self._copies is not None:
            sizes = [output.row_sizes(self.rows) for output in outputs]
            return self._copies.credits_for(len(self._job_ends), largest_job(self._job_ends, sizes))
        built = sum([output.batch_bytes(self.rows) for output in outputs])
        if self.plan.segments is not None:
            built += sum(map(self._laid_bytes, outputs))
        if self._context.ships_values:
            built += sum(rounded_bytes(self._stored_bytes(staged)) for staged in staged_outputs(outputs))
        return built

    def _stored_bytes(self, output: StagedOutput) -> int:
        """Return the bytes of all values of a column, as they were staged."""
        if output.stays_in_place:
            return int(self.rows.bytes_of(output.name).sum())
        return sum(
            part.window.array(output.name).values[:1].nbytes * len(part.rows) for part in self.rows.parts
        )

    @cached_property
    def _job_ends(self) -> Ints:
        """[jobs] the row after the last of each, where batches are copied in jobs."""
        assert self._copies is not None
        return job_ends(self.plan.sizes, self._copies.batches_per_job)

    def _laid_bytes(self, output: Output) -> int:
        """Credits of what segments of a column are laid into, packed or padded."""
        settings, segments = self._context.settings, self.plan.segments
        if segments is None or not settings.forms(output.name):
            return 0
        from dataflow.batch.packed import batch_bytes

        assert settings.batching is not None
        batches, dtype = map(segments.one, range(self.num_batches)), np.dtype(output.dtype)
        laid = (batch_bytes(settings.batching, batch, output.name, dtype) for batch in batches)
        return sum(map(rounded_bytes, laid))

    def begin(self) -> Sequence[Callable[[], None]]:
        """Copy what is copied, unless jobs do that; give the parts that decode."""
        if self._copies is None:
            return self._builder.begin()
        guards = self._context.guards
        planned_in = int(guards.generation[0])  # before any guard is looked at
        with guards.loading():
            self._builder.open()
        self._submitted = self._submit(self._copies, planned_in)
        return ()

    def _submit(self, copies: Copies, planned_in: int) -> ChunkCopies:
        """The chunk's copies, on their way, a few batches a job."""
        return copies.submit(
            JobPlan(
                number=(self.plan.epoch << 32) + self.plan.first_batch,
                columns=[built.copies for built in self._builder.built if built.copies is not None],
                ends=self._job_ends,
                generation=self._context.guards.generation,
                planned_in=planned_in,
                keep=self._builder.columns,
            )
        )

    def _copied_batches(self, copies: ChunkCopies) -> Iterator[Delivered]:
        """Batches that are copies alone: each is there when the consumer asks for it."""
        builder, names = self._builder, [output.name for output in self._context.settings.outputs]
        views = [column.views for column in builder.built if column.views is not None]
        is_planned, epoch, sizes = builder.is_planned, self.plan.epoch, self.plan.sizes.tolist()
        builder.built, num_rows = [], self.rows.num_rows
        first, number = 0, self.plan.first_batch
        for job, end in enumerate(copies.plan.ends.tolist()):
            slot, num_bad = copies.take()
            if num_bad:
                row = first + int(np.flatnonzero(copies.status[first:end])[0])
                raise self.rows.truncated(row, copies.plan.columns[int(copies.status[row]) - 1].name)
            if end == num_rows:
                for window in self.closes:
                    window.verify()
                self.reads_windows = False
            counts = sizes[job * copies.batches_per_job : (job + 1) * copies.batches_per_job]
            offsets = copies.offsets[job]
            values = [view(slot[start:], first, counts) for view, start in zip(views, offsets, strict=False)]
            del slot  # the batches have it
            for size, *column_values in zip(counts, *values, strict=True):
                batch: dict[str, Any] = dict(zip(names, column_values, strict=True))
                del column_values
                if is_planned:
                    yield Delivered(epoch, number, batch, size)
                else:
                    yield finished(builder.delivered(number, batch, first, size))
                del batch
                first, number = first + size, number + 1
            del values

    def finish(self) -> Generator[PartialChunk[Delivered]]:
        """The batches, as `BatchBuilder.finish`; those of jobs are made when they are taken."""
        if self._submitted is not None:
            copied = self._copied_batches(self._submitted)
            self._submitted = None  # whoever takes the batches has them
            yield PartialChunk(LazyBatches(self.num_batches, copied))
            return
        num_left = self.num_batches
        try:
            for part in self._builder.finish():
                num_left -= len(part.batches)
                if not num_left:
                    self.end()
                yield part
                del part
        finally:
            self.leased_bytes = self._builder.leased_bytes

    def end(self) -> None:
        """All is built, and the last batch not yet handed over: windows are free to go.

        Raises `ShardChangedError` if the bytes of those that no later chunk needs may have changed.
        """
        self.rows = NO_ROWS
        for window in self.closes:
            window.verify()


def _window_parts(
    plan: RankPlan,
    batches: BatchIndex,
    windows: Sequence[StagedWindow],
    context: BuildContext,
    segments: BatchSegments | None,
) -> list[WindowPart]:
    """The rows of a chunk, window by window."""
    parts, epoch, size = list[WindowPart](), plan.order.epoch, plan.batch_plan.batch_size
    for part, window in zip(batches.parts, windows, strict=True):
        if part.indices is not None:
            rows = window.rows[part.indices]
        else:
            if window.in_batches is None:
                window.in_batches = first, rows = _rows_in_batches(plan, part.window, window, context.arena)
                if context.sums is not None:
                    sizes = np.full(len(rows) // size, size)
                    whole = [(rows, slice(0, len(rows)), window.samples)]
                    context.sums.note_rows(epoch, plan.start + first, sizes, whole, None)
            first, rows = window.in_batches
            rows = rows[(batches.first - first) * size :][: len(part)]
        parts.append(WindowPart(window, rows, part.rows))
    if context.sums is not None and any(part.indices is not None for part in batches.parts):
        pieces = None if segments is None else segments.segments
        row_parts = [(part.rows, part.chunk_rows, w.samples) for part, w in zip(parts, windows, strict=True)]
        context.sums.note_rows(epoch, plan.start + batches.first, batches.sizes, row_parts, pieces)
    return parts


def _rows_in_batches(plan: RankPlan, number: int, window: StagedWindow, arena: Arena) -> tuple[int, Ints]:
    """The first full batch that lies in the window alone, and the rows of all such batches one after another.

    Most batches lie in one window. Locating their positions would cost more than all else that a chunk of
    tokens does: so it is done once a window, by a chunk of any of them, for all its batches, and the chunks
    take slices. Where a batch has the same share of whole lanes each time, not even positions are needed:
    a lane's samples lie one after another in the window's mixed rows, and each batch takes the next few.
    """
    assert isinstance(plan, EpochPlan)  # of other plans, all batches are looked up
    core = plan.batches_inside(number)
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
