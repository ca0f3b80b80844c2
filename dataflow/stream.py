"""The endless stream of windows and chunks of one rank: epoch after epoch, in order.

`StreamPlan` is everything that decides which samples come when; it is arithmetic over `sharding.plan`.
The stream yields each window that holds samples of this rank, with the chunks (groups of whole batches)
that are complete once the window is staged. A batch that straddles windows belongs to the last of
them, and the earlier ones are *carried* until it is built. Padding at the end of an epoch wraps to its
first windows, which then come once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dataflow.batches import ColumnBuilder, Randomness, Run, drop_rows, samples_of
from dataflow.decode import Output
from dataflow.mapped import MappedWindow, can_map_windows
from dataflow.staging import NotLocatableError, Source, StagedSpans, StagedWindow
from prefetch.arena import Arena, rounded_bytes
from sharding.blocks import Block
from sharding.errors import SampleError
from sharding.order import Order, Shuffle, windows_touched
from sharding.plan import EpochPlan, Tail

_FULL_WINDOW_SAMPLES = 4096
_ALIGN = 512
"""Most that alignment adds to a value in a window."""
_FIXED_KINDS = ("array", "spans", "image")


class Windows(Protocol):
    """What the stream needs of an order. `Order` is one; `FullWindows` makes one of a full shuffle."""

    num_windows: int

    def window_start(self, window: int) -> int:
        """First position of a window."""

    def window_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each position."""

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks of a window in read order."""

    def window_samples(self, window: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row in the block of each position."""


class FullWindows:
    """Consecutive positions of a full shuffle, cut into windows so that the engine has units to stage."""

    def __init__(self, order: Order, first_sample: NDArray[np.int64], size: int) -> None:
        self._order, self._first_sample, self._size = order, first_sample, size
        self.num_windows = -(-order.num_samples // size)

    def window_start(self, window: int) -> int:
        """First position of a window."""
        return min(window * self._size, self._order.num_samples)

    def window_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each position."""
        return positions // self._size

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks that hold the window's samples, ascending."""
        return np.unique(self._blocks(self._samples(window)))

    def window_samples(self, window: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row in the block of each position."""
        samples = self._samples(window)
        blocks = self._blocks(samples)
        ordinal = np.searchsorted(np.unique(blocks), blocks).astype(np.int32)
        return ordinal, samples - self._first_sample[blocks]

    def _samples(self, window: int) -> NDArray[np.int64]:
        return self._order.samples(np.arange(self.window_start(window), self.window_start(window + 1)))

    def _blocks(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first_sample, samples, side="right") - 1


@dataclass(frozen=True)
class StreamPlan:
    """Everything that decides which samples come when, for one rank."""

    shuffle: Shuffle
    """With `window_blocks` filled in."""
    seed: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail

    def epoch(self, num_samples: NDArray[np.int64], epoch: int, start: int = 0) -> EpochPlan:
        """The plan of one epoch over a block table's sample counts, from position `start` on."""
        order = Order(num_samples, self.shuffle, seed=self.seed, epoch=epoch)
        return EpochPlan(
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

    transform: Callable[..., Any] | None
    """Per sample, in worker threads."""
    wants_rng: bool
    """Whether `transform` takes `rng=`."""
    collate: Callable[[list[Any]], Any] | None
    """Samples -> batch; None keeps the gathered columns."""
    batch_transform: BatchFn | None
    on_bad: Callable[[SampleError], bool]
    """Decides about a bad sample: True skips it; may raise."""

    @property
    def does_something(self) -> bool:
        """Whether the gathered columns are not yet the batch."""
        return bool(self.transform or self.collate or self.batch_transform)


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
        plan: EpochPlan,
        units: Windows,
        batches: tuple[int, int],
        needs: Sequence[StagedWindow],
        numbers: dict[int, StagedWindow],
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        self._rows = rows
        self._stream, self._plan, self._batches = stream, plan, batches
        self.needs = tuple(needs)
        self.closes: Sequence[StagedWindow] = ()
        self._units = units
        self._numbers = numbers
        self.num_batches = batches[1] - batches[0]
        self._builder: ColumnBuilder | None = None
        self._built: list[Any] = []
        self._runs: list[Run] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Output credits; known once the windows are staged."""
        outputs = self._stream.source.outputs
        if all(output.kind in _FIXED_KINDS for output in outputs):
            rows = self._plan.batch_size * self.num_batches
            return sum(rounded_bytes(rows * output.row_bytes) for output in outputs)
        runs = self.runs()
        rows = sum(len(run.rows) for run in runs)
        return sum(_output_bytes(output, runs, rows) for output in outputs)

    def runs(self) -> list[Run]:
        """The rows of its batches, in order."""
        if self._runs is None and self._rows is not None:
            self._runs = [Run(self.needs[-1], self._rows, 0)]
        if self._runs is None:
            runs = []
            positions, _ = self._plan.positions(*self._batches)
            places = np.arange(len(positions))
            for number, found in windows_touched(self._units.window_of(positions)):
                window = self._numbers[number]
                rows = window.rows[positions[found] - self._units.window_start(number)]
                runs += _contiguous_runs(window, rows, places[found])
            self._runs = sorted(runs, key=lambda run: run.first)
        return self._runs

    def begin(self) -> Sequence[Callable[[], None]]:
        """Gather every column; give the image parts."""
        stream, runs = self._stream, self.runs()
        num_rows = sum(len(run.rows) for run in runs)
        randomness = Randomness(stream.plan.seed, self._plan.order.epoch)
        self._builder = ColumnBuilder(stream.arena, runs, num_rows, randomness, stream.on_return)
        self._built = [self._builder.build(output) for output in stream.source.outputs]
        return [part for built in self._built for part in built.parts]

    def finish(self) -> tuple[Sequence[Delivered], int]:
        """Split into batches, apply what the user gave."""
        first, last = self._batches
        sizes = [self._plan.batch_size] * (last - first)
        if last == self._plan.num_batches:
            sizes = self._plan.positions(first, last)[1].tolist()
        columns = [built.split(sizes) for built in self._built]
        names = [output.name for output in self._stream.source.outputs]
        batches = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        assert self._builder is not None
        epoch, finishing = self._plan.order.epoch, self._stream.finishing
        if self._builder.bad or finishing.does_something:
            delivered, row = [], 0
            for number, (batch, size) in enumerate(zip(batches, sizes, strict=True), first):
                skipped: list[SampleError] = []
                done, kept = self._finish_batch(batch, row, size, skipped)
                delivered.append(Delivered(epoch, number, done, kept, tuple(skipped)))
                row += size
        else:
            places = zip(range(first, last), batches, sizes, strict=True)
            delivered = [Delivered(epoch, number, batch, size) for number, batch, size in places]
        leased = self._builder.leased_bytes
        self._builder, self._built, self._runs = None, [], None
        for window in self.closes:
            window.verify()
        return delivered, leased

    def _finish_batch(
        self, batch: dict[str, Any], row: int, size: int, skipped: list[SampleError]
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
        done: Any = batch
        if finishing.transform or finishing.collate:
            kept = np.arange(size) if keep is None else keep
            done, size = self._transform(batch, size, row + kept, skipped)
        if finishing.batch_transform:
            done = finishing.batch_transform(done)
        return done, size

    def _transform(
        self, batch: dict[str, Any], size: int, rows: NDArray[np.int64], skipped: list[SampleError]
    ) -> tuple[Any, int]:
        finishing, samples = self._stream.finishing, []
        for sample, row in zip(samples_of(batch, self._stream.source.outputs, size), rows, strict=True):
            run = next(r for r in self.runs() if r.first <= row < r.first + len(r.rows))
            at = int(run.rows[int(row) - run.first])
            try:
                samples.append(self._apply(sample, run.window.sample_number(at)))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                bad = run.window.sample_error(at, reason, "*", stage="transform")
                bad.__cause__ = error
                if not finishing.on_bad(bad):
                    raise bad from error
                skipped.append(bad)
        collate = finishing.collate or _default_collate
        return (collate(samples) if samples else {}), len(samples)

    def _apply(self, sample: dict[str, Any], number: int) -> Any:
        finishing = self._stream.finishing
        if finishing.transform is None:
            return sample
        if not finishing.wants_rng:
            return finishing.transform(sample)
        return finishing.transform(
            sample, rng=sample_rng(self._stream.plan.seed, self._plan.order.epoch, number)
        )


def _contiguous_runs(window: StagedWindow, rows: NDArray[np.int64], places: NDArray[np.int64]) -> list[Run]:
    """Rows of a window and the ascending rows of the chunk they fill, cut where the latter jump."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    if not len(cuts):
        return [Run(window, rows, int(places[0]))]
    parts = zip(np.split(rows, cuts), np.split(places, cuts), strict=True)
    return [Run(window, part, int(place[0])) for part, place in parts]


def _takes_all(plan: EpochPlan) -> bool:
    """Whether this rank takes every position once, in order (but for a dropped tail)."""
    return plan.world_size == 1 and plan.start == 0 and not plan.num_padded


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
        source: Source,
        arena: Arena,
        plan: StreamPlan,
        finishing: Finishing,
        *,
        on_return: Callable[[int], Callable[[], None]],
        batches_per_chunk: int,
        num_readers: int,
        full_window_bytes: int,
    ) -> None:
        self.source, self.arena, self.plan, self.finishing = source, arena, plan, finishing
        self._full_window_bytes = full_window_bytes
        self.on_return = on_return
        self._batches_per_chunk = batches_per_chunk
        self._next_chunk = 1
        self._num_readers = num_readers
        self._mapped = can_map_windows(source)

    def windows(self, epoch: int, start: int = 0) -> Iterator[StagedWindow]:
        """From a position of an epoch on, for ever. A whole epoch must hold a batch for this rank."""
        while True:
            plan = self.plan.epoch(self.source.catalog.blocks.num_samples, epoch, start)
            yield from self._epoch(plan)
            epoch, start = epoch + 1, 0

    def _epoch(self, plan: EpochPlan) -> Iterator[StagedWindow]:
        order = self._units(plan.order)
        carried: dict[int, StagedWindow] = {}
        done = 0
        for number in self._window_numbers(plan, order):
            slots = self._own_slots(plan, order, number)
            if slots is not None and not len(slots):
                continue
            window = self._stage(plan, order, number, slots)
            complete = self._num_complete(plan, order, number)
            carried[number] = window
            window.carried = self._straddles(plan, order, number, complete)
            if complete > done:
                own = self._own_rows(plan, order, number, window, (done, complete))
                window.chunk_list = self._chunks(plan, order, done, complete, carried, own)
                _close(window.chunk_list, carried.values(), keep=window if window.carried else None)
                carried = {number: window} if window.carried else {}
                done = complete
            yield window
        yield from self._wrap(plan, order, done, carried)

    def _units(self, order: Order) -> Windows:
        if order.shuffle.kind != "full":
            return order
        size = max(1, min(_FULL_WINDOW_SAMPLES, self._full_window_bytes // self._full_sample_bytes()))
        return FullWindows(order, self.source.catalog.blocks.first_sample, size)

    def _full_sample_bytes(self) -> int:
        """What one sample of a full shuffle takes in a window, on average: its values, or its whole block."""
        table = self.source.catalog.blocks
        used = np.flatnonzero(table.num_samples)
        if self.source.locates(self.source.catalog.block(int(used[0]))):
            values = int(table.nbytes.sum()) // int(table.num_samples.sum())
            return values + _ALIGN * len(self.source.columns)
        return 1 + int((table.length + table.nbytes)[used].mean())

    def _window_numbers(self, plan: EpochPlan, order: Windows) -> range:
        if plan.start >= plan.order.num_samples:
            return range(0)
        return range(int(order.window_of(np.array([plan.start]))[0]), order.num_windows)

    def _own_slots(self, plan: EpochPlan, order: Windows, number: int) -> NDArray[np.int64] | None:
        """Slots of a window that this rank's batches take, each once; None for all (a dropped tail aside)."""
        begin, end = order.window_start(number), order.window_start(number + 1)
        if plan.num_batches == 0:
            return np.zeros(0, np.int64)
        if _takes_all(plan) and isinstance(order, Order):
            return None if begin < plan.num_batches * plan.batch_size else np.zeros(0, np.int64)
        group = plan.global_batch_size
        first = max(0, (begin - plan.start) // group)
        last = min(plan.num_batches, -(-(end - plan.start) // group))
        positions = plan.positions(min(first, last), last)[0]
        own = positions[(positions >= begin) & (positions < end)] - begin
        return np.unique(own) if plan.num_padded else own  # padding comes back to the same slots

    def _own_rows(
        self, plan: EpochPlan, order: Windows, number: int, window: StagedWindow, batches: tuple[int, int]
    ) -> NDArray[np.int64]:
        """Rows of a window that some batches of this rank take, in their order."""
        if _takes_all(plan):
            return window.rows
        begin, end = order.window_start(number), order.window_start(number + 1)
        positions = plan.positions(*batches)[0]
        return window.rows[positions[(positions >= begin) & (positions < end)] - begin]

    def _num_complete(self, plan: EpochPlan, order: Windows, number: int) -> int:
        """Batches of this rank that need nothing beyond this window."""
        end = order.window_start(number + 1)
        if number + 1 == order.num_windows:
            return plan.num_batches - (plan.num_padded > 0)
        whole = (end - plan.start - (plan.rank + 1) * plan.batch_size) // plan.global_batch_size + 1
        num_full = (plan.order.num_samples - plan.start) // plan.global_batch_size
        return int(np.clip(whole, 0, num_full))

    def _straddles(self, plan: EpochPlan, order: Windows, number: int, complete: int) -> bool:
        """Whether the next batch takes samples of this window; a padded one may begin behind it and wrap."""
        if complete >= plan.num_batches:
            return False
        positions = plan.positions(complete, complete + 1)[0]
        begin, end = order.window_start(number), order.window_start(number + 1)
        return bool(((positions >= begin) & (positions < end)).any())

    def _stage(
        self, plan: EpochPlan, order: Windows, number: int, slots: NDArray[np.int64] | None
    ) -> StagedWindow:
        blocks = order.window_blocks(number)
        if slots is None:
            assert isinstance(order, Order)
            return self._stage_blocks(blocks, order.window_rows(number), None)
        ordinal, row = order.window_samples(number)
        if isinstance(order, FullWindows) and not self._mapped:
            window = self._stage_sparse(blocks, ordinal, row, slots)
            if window is not None:
                return window
        used = np.zeros(len(blocks), bool)
        used[ordinal[slots]] = True
        counts = np.where(used, self.source.catalog.blocks.num_samples[blocks], 0)
        first_row = np.cumsum(counts) - counts
        rows = first_row[ordinal]
        rows += row
        whole = not isinstance(order, FullWindows)
        return self._stage_blocks(blocks[used], rows, rows[slots], whole)

    def _blocks(self, numbers: NDArray[np.int64]) -> list[Block]:
        return [self.source.catalog.block(number) for number in numbers.tolist()]

    def _stage_blocks(
        self,
        blocks: NDArray[np.int64],
        rows: NDArray[np.int64],
        wanted: NDArray[np.int64] | None,
        whole: bool = True,
    ) -> StagedWindow:
        """A window of whole blocks, of which only the rows `wanted` are used; None for all."""
        if self._mapped:
            with suppress(NotLocatableError):
                return MappedWindow(self.source, self.arena, blocks, rows, wanted=wanted, whole=whole)
        return StagedWindow(
            self.source, self.arena, self._blocks(blocks), rows, num_readers=self._num_readers
        )

    def _stage_sparse(
        self,
        blocks: NDArray[np.int64],
        ordinal: NDArray[np.int32],
        row: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> StagedWindow | None:
        """A window that reads only the rows wanted; None where the format cannot say where they lie."""
        by_place = np.lexsort((row[slots], ordinal[slots]))
        order = slots[by_place]
        rows = np.full(len(ordinal), -1, np.int64)
        rows[order] = np.arange(len(order))
        used, counts = np.unique(ordinal[order], return_counts=True)
        sparse = np.split(row[order], np.cumsum(counts)[:-1])
        try:
            return StagedWindow(self.source, self.arena, self._blocks(blocks[used]), rows, sparse=sparse)
        except NotLocatableError:
            return None

    def _chunks(
        self,
        plan: EpochPlan,
        units: Windows,
        first: int,
        last: int,
        windows: dict[int, StagedWindow],
        rows: NDArray[np.int64],
    ) -> list[BatchChunk]:
        """Batches [first, last), the first of which may need every window given; the others the last one.

        `rows` are the rows of the last window that this rank takes, in order.
        """
        own = next(reversed(windows.items()))
        # Of the first batch, the rows in earlier windows: they shift all that follow.
        before = max(0, units.window_start(own[0]) - int(plan.positions(first, first + 1)[0][0]))
        size = plan.batch_size
        start, chunks = first, []
        while start < last:
            needs = windows if start == first else dict([own])
            stop = min(start + self._next_chunk, last)
            chunk_rows = None
            if len(needs) == 1:
                at = (start - first) * size - before
                chunk_rows = rows[at : at + self._num_rows(plan, start, stop)]
            chunks.append(
                BatchChunk(self, plan, units, (start, stop), tuple(needs.values()), dict(needs), chunk_rows)
            )
            # The stream's first batch waits for one batch's work only.
            self._next_chunk = min(2 * self._next_chunk, self._batches_per_chunk)
            start = stop
        return chunks

    @staticmethod
    def _num_rows(plan: EpochPlan, start: int, stop: int) -> int:
        """Samples of batches [start, stop)."""
        if stop < plan.num_batches:
            return (stop - start) * plan.batch_size
        return int(plan.positions(start, stop)[1].sum())

    def _wrap(
        self, plan: EpochPlan, order: Windows, done: int, carried: dict[int, StagedWindow]
    ) -> Iterator[StagedWindow]:
        """The padded last batch: its windows come once more, the last of them brings the chunk."""
        if done == plan.num_batches:
            return
        positions = plan.positions(done, done + 1)[0]
        numbers = list(dict.fromkeys(order.window_of(positions).tolist()))
        missing = [n for n in numbers if n not in carried]
        if not missing:
            # Everything is staged already: a window that brings only the chunk.
            missing = [numbers[-1]]
        needs = dict(carried)
        for number in missing:
            begin, end = order.window_start(number), order.window_start(number + 1)
            inside = positions[(positions >= begin) & (positions < end)] - begin
            window = self._stage(plan, order, number, np.unique(inside))
            needs[number] = window
            if number == missing[-1]:
                order_of_needs = {n: w for n, w in carried.items() if w is not window} | needs
                chunk = BatchChunk(
                    self, plan, order, (done, done + 1), _needs(carried, needs), order_of_needs
                )
                chunk.closes = chunk.needs
                window.chunk_list = [chunk]
            yield window


def _close(chunks: Sequence[BatchChunk], windows: Iterable[StagedWindow], keep: StagedWindow | None) -> None:
    """Say which chunk needs a window last: the first those carried, the last its own."""
    *earlier, own = windows
    chunks[0].closes = earlier
    if keep is None:
        chunks[-1].closes = [*chunks[-1].closes, own]


def _needs(carried: dict[int, StagedWindow], needs: dict[int, StagedWindow]) -> tuple[StagedWindow, ...]:
    """Every window that must be staged, each once, carried ones included."""
    return tuple(dict.fromkeys((*carried.values(), *needs.values())))
