"""The endless stream of windows and chunks of one rank: epoch after epoch, in order.

A plan tells which positions each batch takes, the order's windows where they lie. The stream walks through
the batches and stages each window at its first use; it yields it with the *chunks* (groups of whole
batches) that can be built from it and the windows before it, and says which chunk is the last that needs a
window. Any number of windows may be in use side by side: lanes and mixtures advance in parallel. Padding at
the end of an epoch wraps to its first windows, which then come once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dataflow.batches import ColumnBuilder, Cut, Randomness, Run, drop_rows, samples_of
from dataflow.decode import Output
from dataflow.mapped import MappedWindow, can_map_windows
from dataflow.packed import batch_bytes, batch_columns
from dataflow.source import Source
from dataflow.staged_columns import ALIGN, StagedSpans
from dataflow.staging import NotLocatableError, StagedWindow
from prefetch.arena import Arena, rounded_bytes
from prefetch.leases import FileLeases
from sharding.batching import Batching
from sharding.blocks import Block
from sharding.errors import SampleError
from sharding.mixture_windows import MixturePlan, MixtureWindows
from sharding.order import Order, Shuffle, windows_touched
from sharding.plan import EpochPlan, Tail, Windows
from sharding.selection import SelectedOrder
from sharding.unit_plan import UnitPlan
from sharding.unit_planner import UnitPlanner

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset
    from dataflow.mixture import Mixture

_FULL_WINDOW_SAMPLES = 4096
_SPAN_ROWS = 1 << 14
"""Samples located at a time, so that the cost of a call vanishes."""
_MAX_SPAN_BATCHES = 1024
_FIXED_KINDS = ("array", "spans", "image")

RankPlan = EpochPlan | UnitPlan
Located = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Window and slot of each of some samples, both [rows]."""


class BlockWindows(Windows, Protocol):
    """What the stream needs of an order: `Order`, `MixtureWindows`, or `FullWindows` of a full shuffle."""

    def num_slots(self, window: int) -> int:
        """Samples in a window."""

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks of a window in read order."""

    def window_samples(
        self, window: int, slots: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row in the block of each slot, or of those given."""


class FullWindows:
    """Consecutive positions of a full shuffle, cut into windows so that the engine has units to stage."""

    def __init__(self, order: SelectedOrder, size: int) -> None:
        self._order, self._size = order, size

    def locate(self, positions: NDArray[np.int64]) -> Located:
        """Window and slot of each position."""
        return positions // self._size, positions % self._size

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of a window, and the one after its last."""
        first = window * self._size
        return first, min(first + self._size, self._order.num_samples)

    def num_slots(self, window: int) -> int:
        """Samples in a window."""
        first, end = self.window_span(window)
        return end - first

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks that hold the window's samples, ascending."""
        return np.unique(self._find(window)[0])

    def window_samples(
        self, window: int, slots: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row in the block of each slot, or of those given."""
        blocks, row = self._find(window)
        ordinal = np.searchsorted(np.unique(blocks), blocks).astype(np.int32)
        return (ordinal, row) if slots is None else (ordinal[slots], row[slots])

    def _find(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Block and row in the block of each slot."""
        samples = self._order.samples(np.arange(*self.window_span(window)))
        return self._order.selection.locate(samples)


@dataclass(frozen=True)
class StreamPlan:
    """Everything that decides which samples come when, for one rank."""

    dataset: ShardedDataset | Mixture
    shuffle: Shuffle
    """With `window_blocks` filled in."""
    seed: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail
    planner: UnitPlanner | None = None
    """Of length-aware batches; `batch_size` then counts its units."""

    @property
    def samples_per_batch(self) -> int:
        """Samples of a batch; about how many, of length-aware ones."""
        return self.batch_size * (self.planner.samples_per_unit if self.planner else 1)

    def epoch(self, epoch: int, start: int = 0) -> RankPlan:
        """The plan of one epoch, from position `start` on."""
        order = self.dataset.windows(epoch, self.shuffle, seed=self.seed)
        if self.planner is not None:
            return self.planner.plan(
                cast(Order, order),
                units_per_batch=self.batch_size,
                rank=self.rank,
                world_size=self.world_size,
                tail=self.tail,
                start=start,
            )
        plan: Callable[..., EpochPlan] = MixturePlan if isinstance(order, MixtureWindows) else EpochPlan
        return plan(
            order,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            tail=self.tail,
            start=start,
        )


BatchFn = Callable[[Any], Any]


@dataclass(frozen=True)
class Finishing:
    """What happens to a batch after its columns are gathered."""

    transforms: Sequence[tuple[Callable[..., Any] | None, bool]]
    """Of each source: what is called with each sample, in worker threads, and whether it takes `rng=`."""
    collate: Callable[[list[Any]], Any] | None
    """Samples -> batch; None keeps the gathered columns."""
    batch_transform: BatchFn | None
    on_bad: Callable[[SampleError], bool]
    """Decides about a bad sample: True skips it; may raise."""
    batching: Batching | None = None
    """How batches depend on lengths."""

    @property
    def takes_samples(self) -> bool:
        """Whether batches are made of single samples."""
        return bool(self.collate) or any(transform for transform, _ in self.transforms)

    @property
    def does_something(self) -> bool:
        """Whether the gathered columns are not yet the batch."""
        return bool(self.takes_samples or self.batch_transform or self.batching)

    def forms(self, column: str) -> bool:
        """Whether the column is packed or padded here; a user's `collate` does that by itself."""
        return self.batching is not None and self.collate is None and column == self.batching.column


class Delivered(NamedTuple):
    """One batch with its place in the stream."""

    epoch: int
    number: int
    """Batch of the epoch's plan, from 0 at the plan's start."""
    batch: Any
    num_samples: int
    skipped: tuple[SampleError, ...] = ()
    """What was left out of it."""


class BatchChunk:
    """Batches [first, last) of a plan. Implements `prefetch.engine.Chunk`."""

    def __init__(
        self,
        stream: Stream,
        plan: RankPlan,
        first_batch: int,
        sizes: NDArray[np.int64],
        windows: Mapping[int, StagedWindow],
        located: Located | None = None,
    ) -> None:
        """`located`: window and slot of each row; None: to be asked when it is built, all in one window."""
        self._stream, self._plan = stream, plan
        self._first_batch, self._sizes = first_batch, sizes
        self._windows, self._located = dict(windows), located
        self.num_batches = len(sizes)
        self._num_rows = int(sizes.sum())
        self.needs = tuple(windows.values())
        self.closes: list[StagedWindow] = []
        self._randomness = Randomness(stream.plan.seed, plan.order.epoch)
        self._builder: ColumnBuilder | None = None
        self._built: list[Any] = []
        self._runs: list[Run] | None = None
        self._pieces = (
            plan.batches(first_batch, first_batch + len(sizes)) if isinstance(plan, UnitPlan) else None
        )

    @cached_property
    def nbytes(self) -> int:
        """Output credits; known once the windows are staged."""
        outputs, rows = self._stream.outputs, self._num_rows
        if self._pieces is not None:
            return sum(map(self._piece_bytes, outputs))
        if all(output.kind in _FIXED_KINDS for output in outputs):
            return sum(rounded_bytes(rows * output.row_bytes) for output in outputs)
        return sum(_output_bytes(output, self.runs(), rows) for output in outputs)

    def _piece_bytes(self, output: Output) -> int:
        """Credits of a column of length-aware batches: what is gathered, and what it is laid into."""
        found, finishing = self._pieces, self._stream.finishing
        assert found is not None
        if not finishing.forms(output.name):
            return _output_bytes(output, self.runs(), self._num_rows)
        batching = finishing.batching
        assert batching is not None
        item = np.dtype(output.dtype).itemsize
        laid = (batch_bytes(batching, found.one(b), item) for b in range(self.num_batches))
        if output.kind in _FIXED_KINDS:
            gathered = rounded_bytes(self._num_rows * output.row_bytes)
        else:
            gathered = rounded_bytes(max(1, int(found.pieces.length.sum()) * item))
        return gathered + sum(map(rounded_bytes, laid))

    def _cut(self) -> Cut | None:
        """Which part of its column a length-aware batch takes."""
        batching, found, plan = self._stream.finishing.batching, self._pieces, self._plan
        if batching is None or found is None or not self._stream.finishing.forms(batching.column):
            return None
        assert isinstance(plan, UnitPlan)
        pieces = found.pieces
        whole = plan.sequence.lengths[pieces.position].astype(np.int64)
        return Cut(batching.column, pieces.begin, pieces.length, whole)

    def runs(self) -> list[Run]:
        """Its rows, window by window."""
        if self._runs is None:
            self._runs = [self._run(number, window) for number, window in self._windows.items()]
        return self._runs

    def _run(self, number: int, window: StagedWindow) -> Run:
        if self._located is None:
            return Run(window, self._rows_of(number, window), slice(0, self._num_rows))
        numbers, slots = self._located
        if len(self._windows) == 1:
            return Run(window, window.rows[slots], slice(0, len(slots)))
        places = np.flatnonzero(numbers == number)
        rows = window.rows[slots[places]]
        first, last = int(places[0]), int(places[-1]) + 1
        return Run(window, rows, slice(first, last) if last - first == len(places) else places)

    def _rows_of(self, number: int, window: StagedWindow) -> NDArray[np.int64]:
        """Its rows, all in one window."""
        plan = cast(EpochPlan, self._plan)
        if window.in_batches is None:
            window.in_batches = _rows_in_batches(plan, number, window, self._stream.arena)
        first, rows = window.in_batches
        begin = (self._first_batch - first) * plan.batch_size
        return rows[begin : begin + self._num_rows]

    @property
    def _where(self) -> Located:
        """Window and slot of each row."""
        if self._located is None:
            last = self._first_batch + self.num_batches
            positions = self._plan.positions(self._first_batch, last)[0]
            self._located = self._plan.order.locate(positions)
        return self._located

    def begin(self) -> Sequence[Callable[[], None]]:
        """Gather every column; give the image parts."""
        stream, runs = self._stream, self.runs()
        rows, cut, draws = self._num_rows, self._cut(), self._randomness
        with stream.leases.loading():
            may_load = all(run.window.may_load for run in runs)
            self._builder = ColumnBuilder(
                stream.arena, runs, rows, draws, stream.on_return, cut, may_load=may_load
            )
            self._built = [self._builder.build(output) for output in stream.outputs]
        return [part for built in self._built for part in built.parts]

    def finish(self) -> tuple[Sequence[Delivered], int]:
        """Split into batches, apply what the user gave."""
        sizes: list[int] = self._sizes.tolist()
        columns = [built.split(sizes) for built in self._built]
        names = [output.name for output in self._stream.outputs]
        batches = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        assert self._builder is not None
        epoch, finishing = self._plan.order.epoch, self._stream.finishing
        if self._builder.bad or finishing.does_something:
            delivered, row = [], 0
            for number, (batch, size) in enumerate(zip(batches, sizes, strict=True), self._first_batch):
                skipped: list[SampleError] = []
                done, kept = self._finish_batch(number, batch, row, size, skipped)
                delivered.append(Delivered(epoch, number, done, kept, tuple(skipped)))
                row += size
        else:
            places = enumerate(zip(batches, sizes, strict=True), self._first_batch)
            delivered = [Delivered(epoch, number, batch, size) for number, (batch, size) in places]
        leased = self._builder.leased_bytes
        self._builder, self._built, self._runs, self._located = None, [], None, None
        for window in self.closes:
            window.verify()
        return delivered, leased

    def _finish_batch(
        self, number: int, batch: dict[str, Any], row: int, size: int, skipped: list[SampleError]
    ) -> tuple[Any, int]:
        finishing, builder = self._stream.finishing, self._builder
        assert builder is not None
        dropped = {r - row for r in builder.bad if row <= r < row + size}
        for r in sorted(dropped):
            if not finishing.on_bad(builder.bad[row + r]):
                raise builder.bad[row + r]
            skipped.append(builder.bad[row + r])
        keep = np.array([i for i in range(size) if i not in dropped], np.int64) if dropped else None
        if keep is not None:
            batch, size = drop_rows(batch, keep), len(keep)
        if self._pieces is not None and finishing.collate is None:
            assert finishing.batching is not None
            found = self._pieces.one(number - self._first_batch)
            found = found if keep is None else found.keep(keep)
            batch = batch_columns(finishing.batching, found, batch, builder.slot)
        done: Any = batch
        if finishing.takes_samples:
            kept = np.arange(size) if keep is None else keep
            done, size = self._transform(batch, size, row + kept, skipped)
        if finishing.batch_transform:
            done = finishing.batch_transform(done)
        return done, size

    def _transform(
        self, batch: dict[str, Any], size: int, rows: NDArray[np.int64], skipped: list[SampleError]
    ) -> tuple[Any, int]:
        finishing, samples = self._stream.finishing, []
        numbers, slots = self._where
        for sample, row in zip(samples_of(batch, self._stream.outputs, size), rows, strict=True):
            window = self._windows[int(numbers[row])]
            at = int(window.rows[slots[row]])
            try:
                samples.append(self._apply(sample, window, at))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                bad = window.sample_error(at, reason, "*", stage="transform")
                bad.__cause__ = error
                if not finishing.on_bad(bad):
                    raise bad from error
                skipped.append(bad)
        collate = finishing.collate or _default_collate
        return (collate(samples) if samples else {}), len(samples)

    def _apply(self, sample: dict[str, Any], window: StagedWindow, row: int) -> Any:
        transform, wants_rng = self._stream.finishing.transforms[window.source.number]
        if transform is None:
            return sample
        if not wants_rng:
            return transform(sample)
        seed, epoch = self._stream.plan.seed, self._randomness.epoch_of(window)
        return transform(sample, rng=sample_rng(seed, epoch, window.sample_number(row)))


def _rows_in_batches(
    plan: EpochPlan, number: int, window: StagedWindow, arena: Arena
) -> tuple[int, NDArray[np.int64]]:
    """The first full batch that lies in the window alone, and the rows of all such batches one after another.

    For all of them at once: a chunk would pay the same few calls for its own batches.
    """
    core = plan.batches_within(*plan.order.window_core(number))
    num_rows = len(core) * plan.batch_size
    rows = arena.lease(8 * num_rows)[: 8 * num_rows].view(np.int64)
    whole = plan.whole_lanes(core.start)
    if whole is None:
        slots = plan.order.locate(plan.positions(core.start, core.stop)[0])[1]
        np.take(window.rows, slots, out=rows, mode="clip")
        return core.start, rows
    lanes, depths, each = whole  # a lane's samples follow one another: a copy for each lane
    by_lane = rows.reshape(len(core), len(lanes), each)
    for i, slot in enumerate(plan.order.slots_at(number, lanes, depths).tolist()):
        by_lane[:, i] = window.rows[slot : slot + len(core) * each].reshape(-1, each)
    return core.start, rows


def sample_rng(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch: Philox keyed by (seed, epoch, sample)."""
    return np.random.Generator(np.random.Philox(key=[seed & (1 << 64) - 1, epoch], counter=[0, 0, 0, sample]))


def _default_collate(samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


def _output_bytes(output: Output, runs: Sequence[Run], rows: int) -> int:
    if output.kind in _FIXED_KINDS:
        return rounded_bytes(rows * output.row_bytes)
    if output.kind in ("ragged", "pad"):
        total = 0
        for run in runs:
            staged = run.window.staged[output.name]
            assert isinstance(staged, StagedSpans)
            total += int(np.maximum(staged.lengths[run.rows], 0).sum())
        return rounded_bytes(max(1, total))
    return 0  # Python objects live outside the arena


class Stream:
    """Windows and chunks of one rank, without end. One iterator, used by one thread at a time."""

    def __init__(
        self,
        sources: Sequence[Source],
        arena: Arena,
        leases: FileLeases,
        plan: StreamPlan,
        finishing: Finishing,
        *,
        on_return: Callable[[int], Callable[[], None]],
        batches_per_chunk: int,
        num_readers: int,
        full_window_bytes: int,
    ) -> None:
        self.sources, self.arena, self.leases = sources, arena, leases
        self.plan, self.finishing = plan, finishing
        self.outputs = plan.dataset.outputs
        self._full_window_bytes = full_window_bytes
        self.on_return = on_return
        self._batches_per_chunk = batches_per_chunk
        self._batches_per_span = max(
            batches_per_chunk, min(_SPAN_ROWS // plan.samples_per_batch, _MAX_SPAN_BATCHES)
        )
        self._next_chunk = 1
        self._num_readers = num_readers
        self._mapped = [can_map_windows(source) for source in sources]

    def windows(self, epoch: int, start: int = 0) -> Iterator[StagedWindow]:
        """From a position of an epoch on, for ever. A whole epoch must hold a batch for this rank."""
        while True:
            yield from self._epoch(self.plan.epoch(epoch, start))
            epoch, start = epoch + 1, 0

    def _epoch(self, plan: RankPlan) -> Iterator[StagedWindow]:
        units = self._units(plan.order)
        opened: dict[int, _Use] = {}
        known: set[int] = set()
        newest: StagedWindow | None = None
        done = 0
        ahead = _NO_BATCHES
        while done < plan.num_batches:
            span = self._inside(opened, done)
            if span is None:
                ahead = ahead or self._locate(plan, units, done)
                span, ahead = ahead.split(_servable(ahead, opened))
            else:
                ahead = _NO_BATCHES
            if span:
                assert newest is not None
                self._cut(plan, span, opened, newest.chunk_list)
                done += len(span)
                continue
            needs, _ = ahead.split(1)
            for number in needs.windows:
                if number in opened:
                    continue
                if newest is not None:
                    yield newest
                # Padding comes back to windows that are done with: only its own rows are wanted then.
                slots = needs.slots_of(number) if number in known else None
                opened[number] = self._open(plan, units, number, slots)
                newest = opened[number].window
                known.add(number)
        if newest is not None:
            yield newest

    def _inside(self, opened: Mapping[int, _Use], first: int) -> _Span | None:
        """The full batches from `first` on that lie in one open window: most do, and are not looked up."""
        for use in opened.values():
            if first in use.core:
                sizes = np.full(use.core.stop - first, self.plan.batch_size)
                return _Span(first, sizes, [use.number], None)
        return None

    def _locate(self, plan: RankPlan, units: BlockWindows, first: int) -> _Span:
        """The batches from `first` on, looked up."""
        last = min(first + self._batches_per_span, plan.num_batches)
        if plan.num_padded:  # a padded batch comes alone: it may need windows that the others are done with
            last = min(last, max(first + 1, plan.num_batches - 1))
        positions, sizes = plan.positions(first, last)
        return _Span.of(first, sizes, units.locate(positions))

    def _cut(self, plan: RankPlan, span: _Span, opened: dict[int, _Use], chunks: list[BatchChunk]) -> None:
        """Cut a span into chunks, and close what no later batch needs."""
        ends = np.cumsum(span.sizes)
        batch = row = 0
        while batch < len(span):
            stop = min(batch + self._next_chunk, len(span))
            end = int(ends[stop - 1])
            taken, located = span.rows(row, end)
            windows = {number: opened[number].window for number in taken}
            chunk = BatchChunk(self, plan, span.first + batch, span.sizes[batch:stop], windows, located)
            for number, count in taken.items():
                opened[number].left -= count
                if opened[number].left <= 0 or span.first + stop == plan.num_batches:
                    chunk.closes.append(opened.pop(number).window)
            chunks.append(chunk)
            # The stream's first batch waits for one batch's work only.
            self._next_chunk = min(2 * self._next_chunk, self._batches_per_chunk)
            batch, row = stop, end

    def _open(
        self, plan: RankPlan, units: BlockWindows, number: int, slots: NDArray[np.int64] | None
    ) -> _Use:
        """Stage a window for the slots given, or else for all that this rank's batches take of it."""
        if slots is None:
            slots = plan.own_slots(number, units)
        core = range(0)
        if isinstance(units, Order) and isinstance(plan, EpochPlan):
            core = plan.batches_within(*units.window_core(number))
        if slots is None:
            return _Use(number, self._stage(units, number, None), units.num_slots(number), core)
        left = len(slots)
        if plan.num_padded:  # the last batch may come while the window is still open
            numbers, padded = units.locate(plan.padding)
            slots = np.concatenate((slots, padded[numbers == number]))
        return _Use(number, self._stage(units, number, np.unique(slots)), left, core)

    def _units(self, order: Order) -> BlockWindows:
        if isinstance(order, SelectedOrder) and order.shuffle.kind == "full":
            size = max(1, min(_FULL_WINDOW_SAMPLES, self._full_window_bytes // self._full_sample_bytes()))
            return FullWindows(order, size)
        return order

    def _full_sample_bytes(self) -> int:
        """What one sample of a full shuffle takes in a window, on average: its values, or its whole block."""
        source = self.sources[0]
        table = source.catalog.blocks
        used = np.flatnonzero(table.num_samples)
        if source.locates(source.catalog.block(int(used[0]))):
            values = int(table.nbytes.sum()) // int(table.num_samples.sum())
            return values + ALIGN * len(source.columns)
        return 1 + int((table.length + table.nbytes)[used].mean())

    def _stage(self, units: BlockWindows, number: int, slots: NDArray[np.int64] | None) -> StagedWindow:
        """A window of which only some slots are wanted; None for all."""
        if isinstance(units, MixtureWindows):
            at, epoch, own = units.source_of(number)
            window = self._staged(self.sources[at], units.order_of(at, epoch), own, slots)
            window.source_epoch = epoch
            return window
        return self._staged(self.sources[0], units, number, slots)

    def _staged(
        self, source: Source, units: BlockWindows, number: int, slots: NDArray[np.int64] | None
    ) -> StagedWindow:
        if source.cache is not None and isinstance(units, Order):
            source.cache.begins(units.epoch, number)
        if slots is None and isinstance(units, SelectedOrder) and units.selection.is_whole:
            nbytes = 8 * units.num_slots(number)  # recycled memory: first touches cost more than the mixing
            rows = self.arena.lease(nbytes)[:nbytes].view(np.int64)
            blocks = units.whole_window(number, source.catalog.blocks.num_samples, rows)
            return self._stage_blocks(source, blocks, rows, None, True)
        blocks = units.window_blocks(number)
        ordinal, row = units.window_samples(number, slots)
        if slots is None:
            slots = np.arange(len(row))
        whole = not isinstance(units, FullWindows)
        if not whole and not self._mapped[source.number]:
            window = self._stage_sparse(source, blocks, ordinal, row, slots, units.num_slots(number))
            if window is not None:
                return window
        used = np.zeros(len(blocks), bool)
        used[ordinal] = True
        counts = np.where(used, source.catalog.blocks.num_samples[blocks], 0)
        wanted = (np.cumsum(counts) - counts)[ordinal]
        wanted += row
        rows = np.full(units.num_slots(number), -1)
        rows[slots] = wanted
        return self._stage_blocks(source, blocks[used], rows, wanted, whole)

    def _stage_blocks(
        self,
        source: Source,
        blocks: NDArray[np.int64],
        rows: NDArray[np.int64],
        wanted: NDArray[np.int64] | None,
        whole: bool,
    ) -> StagedWindow:
        """A window of whole blocks, of which only the rows `wanted` are used; None for all."""
        if self._mapped[source.number]:
            with suppress(NotLocatableError):
                return MappedWindow(
                    source,
                    self.arena,
                    blocks,
                    rows,
                    wanted=wanted,
                    whole=whole,
                    num_readers=self._num_readers,
                )
        return StagedWindow(source, self.arena, _blocks(source, blocks), rows, num_readers=self._num_readers)

    def _stage_sparse(
        self,
        source: Source,
        blocks: NDArray[np.int64],
        ordinal: NDArray[np.int32],
        row: NDArray[np.int64],
        slots: NDArray[np.int64],
        num_slots: int,
    ) -> StagedWindow | None:
        """A window that reads only the rows wanted; None where the format cannot say where they lie."""
        by_place = np.lexsort((row, ordinal))
        rows = np.full(num_slots, -1, np.int64)
        rows[slots[by_place]] = np.arange(len(slots))
        used, counts = np.unique(ordinal, return_counts=True)
        sparse = np.split(row[by_place], np.cumsum(counts)[:-1])
        try:
            return StagedWindow(source, self.arena, _blocks(source, blocks[used]), rows, sparse=sparse)
        except NotLocatableError:
            return None


def _blocks(source: Source, numbers: NDArray[np.int64]) -> list[Block]:
    return [source.catalog.block(number) for number in numbers.tolist()]


@dataclass
class _Use:
    """A window that batches to come need."""

    number: int
    window: StagedWindow
    left: int
    """Samples that these take of it."""
    core: range
    """Full batches, over all ranks, that need nothing else."""


@dataclass(frozen=True)
class _Span:
    """Consecutive batches."""

    first: int
    sizes: NDArray[np.int64]
    """[batches] samples of each."""
    windows: list[int]
    """Those they need, in order of first use."""
    located: Located | None
    """None: not looked up, as all lie in one window."""

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, first: int, sizes: NDArray[np.int64], located: Located) -> _Span:
        """Batches that were looked up."""
        return cls(first, sizes, [number for number, _ in windows_touched(located[0])], located)

    def split(self, batches: int) -> tuple[_Span, _Span]:
        """The first batches, looked up, and the others."""
        assert self.located is not None
        (numbers, slots), rows = self.located, int(self.sizes[:batches].sum())
        return (
            _Span.of(self.first, self.sizes[:batches], (numbers[:rows], slots[:rows])),
            _Span.of(self.first + batches, self.sizes[batches:], (numbers[rows:], slots[rows:])),
        )

    def rows(self, begin: int, end: int) -> tuple[dict[int, int], Located | None]:
        """How many samples each window has of some rows, and where these lie."""
        if self.located is None:
            return {self.windows[0]: end - begin}, None
        numbers, slots = (column[begin:end] for column in self.located)
        if len(self.windows) == 1:
            return {self.windows[0]: end - begin}, (numbers, slots)
        counts = {number: int(np.count_nonzero(numbers == number)) for number in self.windows}
        return {number: count for number, count in counts.items() if count}, (numbers, slots)

    def slots_of(self, window: int) -> NDArray[np.int64]:
        """The slots of a window that they take, looked up, ascending."""
        assert self.located is not None
        numbers, slots = self.located
        return np.sort(slots[numbers == window])


_NO_BATCHES = _Span(0, np.zeros(0, np.int64), [], None)


def _servable(ahead: _Span, opened: Mapping[int, _Use]) -> int:
    """How many of the batches need open windows only, up to where one of these serves alone."""
    count = len(ahead)
    missing = [number for number in ahead.windows if number not in opened]
    if missing:
        assert ahead.located is not None
        at = int(np.flatnonzero(np.isin(ahead.located[0], missing))[0])
        count = int(np.searchsorted(np.cumsum(ahead.sizes), at, side="right"))
    cores = [use.core.start - ahead.first for use in opened.values() if use.core.start > ahead.first]
    return min(count, *cores) if cores else count
