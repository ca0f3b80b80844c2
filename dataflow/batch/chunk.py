"""A chunk: consecutive batches built together from staged windows, and finished one by one.

Its columns are gathered for all its batches at once (`dataflow.batch.build`), then split; bad samples are
left out or raised, and what the user gave is called: transforms, `collate_fn`, `batch_transform`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from dataflow.batch.build import ColumnBuilder, Cut, Randomness, Run, raise_if_closing
from dataflow.batch.held_bytes import held_bytes
from dataflow.batch.packed import batch_bytes, batch_columns
from dataflow.batch.samples import Misfit, described, drop_rows, misfit_of, samples_of, transform_reason
from dataflow.decode.outputs import Output
from dataflow.staging.block_windows import Located
from dataflow.staging.columns import StagedSpans
from dataflow.staging.window import StagedWindow
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.heap import HeapKeeper
from prefetch.memory.leases import FileLeases
from prefetch.work import Piece
from sharding.cached_property import cached_property
from sharding.errors import SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitPlan
from sharding.plan.plan import EpochPlan, RankPlan

_FIXED_KINDS = ("array", "spans", "image")
_SLOT_KINDS = (*_FIXED_KINDS, "ragged")
REPEAT = "__repeat__"
"""The column of `mark_repeats`: bool [samples], or [rows] of packed ones."""

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
    mark_repeats: bool = False
    """Whether batches get a column that tells what the tail rule delivers a second time."""

    @property
    def takes_samples(self) -> bool:
        """Whether batches are made of single samples."""
        return bool(self.collate) or any(transform for transform, _ in self.transforms)

    @property
    def does_something(self) -> bool:
        """Whether the gathered columns are not yet the batch."""
        return bool(self.takes_samples or self.batch_transform or self.batching or self.mark_repeats)

    def forms(self, column: str) -> bool:
        """Whether the column is packed or padded here; a user's `collate` does that by itself."""
        return self.batching is not None and self.collate is None and column in self.batching.columns


class Delivered(NamedTuple):
    """One batch with its place in the stream."""

    epoch: int
    number: int
    """Batch of the epoch's plan, from 0 at the plan's start."""
    batch: Any
    num_samples: int
    skipped: tuple[SampleError, ...] = ()
    """What was left out of it; where that is all, `num_samples` is 0 and nobody has seen the batch."""
    in_place: bool = False
    """An earlier batch, in place of one of which nothing was left."""


@dataclass(frozen=True)
class Workshop:
    """What all chunks of a stream are built with."""

    outputs: Sequence[Output]
    seed: int
    finishing: Finishing
    arena: Arena
    leases: FileLeases
    on_return: Callable[[int], Callable[[], None]]
    """Bytes of a slot -> what is called when its last view dies."""
    closing: threading.Event
    """Set when nobody wants the batches any more: building ends with the sample that it is at."""
    heap: HeapKeeper
    untold_bytes: int
    """Small batches are told of together once they take so much: to tell costs as much as to make one."""


class BatchChunk:
    """Batches [first, last) of a plan. Implements `prefetch.work.Chunk`."""

    def __init__(
        self,
        shop: Workshop,
        plan: RankPlan,
        first_batch: int,
        sizes: NDArray[np.int64],
        windows: Mapping[int, StagedWindow],
        located: Located | None = None,
    ) -> None:
        """`located`: window and slot of each row; None: to be asked when it is built, all in one window."""
        self._shop, self._plan = shop, plan
        self._first_batch, self._sizes = first_batch, sizes
        self._windows, self._located = dict(windows), located
        self.num_batches = len(sizes)
        self._num_rows = int(sizes.sum())
        self.needs = tuple(windows.values())
        self.closes: list[StagedWindow] = []
        self.leased_bytes = 0
        self._randomness = Randomness(shop.seed, plan.order.epoch)
        self._builder: ColumnBuilder | None = None
        self._built: list[Any] = []
        self._runs: list[Run] | None = None
        self._pieces = (
            plan.batches(first_batch, first_batch + len(sizes)) if isinstance(plan, UnitPlan) else None
        )

    @cached_property
    def nbytes(self) -> int:
        """Output credits; known once the windows are staged."""
        outputs, rows = self._shop.outputs, self._num_rows
        if self._pieces is not None:
            return sum(map(self._piece_bytes, outputs))
        if all(output.kind in _FIXED_KINDS for output in outputs):
            return sum(rounded_bytes(rows * output.row_bytes) for output in outputs)
        return sum(_output_bytes(output, self.runs(), rows) for output in outputs)

    def _piece_bytes(self, output: Output) -> int:
        """Credits of a column of length-aware batches: what is gathered, and what it is laid into."""
        found, finishing = self._pieces, self._shop.finishing
        assert found is not None
        if not finishing.forms(output.name):
            return _output_bytes(output, self.runs(), self._num_rows)
        batching = finishing.batching
        assert batching is not None
        dtype = np.dtype(output.dtype)
        batches = map(found.one, range(self.num_batches))
        laid = (batch_bytes(batching, batch, output.name, dtype) for batch in batches)
        if output.kind in _FIXED_KINDS:
            gathered = rounded_bytes(self._num_rows * output.row_bytes)
        else:
            gathered = rounded_bytes(max(1, int(found.pieces.length.sum()) * dtype.itemsize))
        return gathered + sum(map(rounded_bytes, laid))

    def _cut(self) -> Cut | None:
        """Which part of its columns a length-aware batch takes."""
        batching, found, plan = self._shop.finishing.batching, self._pieces, self._plan
        if batching is None or found is None or not self._shop.finishing.forms(batching.column):
            return None
        assert isinstance(plan, UnitPlan)
        pieces = found.pieces
        whole = plan.sequence.lengths[pieces.position].astype(np.int64)
        return Cut(batching.columns, pieces.begin, pieces.length, whole)

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
            window.in_batches = _rows_in_batches(plan, number, window, self._shop.arena)
        first, rows = window.in_batches
        begin = (self._first_batch - first) * plan.batch_plan.batch_size
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
        shop, runs = self._shop, self.runs()
        rows, cut, draws = self._num_rows, self._cut(), self._randomness
        with shop.leases.loading():
            may_load = all(run.window.may_load for run in runs)
            self._builder = ColumnBuilder(
                shop.arena, runs, rows, draws, shop.on_return, cut, may_load=may_load, closing=shop.closing
            )
            self._built = [self._builder.build(output) for output in shop.outputs]
        return [part for built in self._built for part in built.parts]

    def finish(self) -> Iterator[Piece[Delivered]]:
        """Split into batches, apply what the user gave: one by one where that takes memory of its own."""
        assert self._builder is not None
        sizes: list[int] = self._sizes.tolist()
        columns = [built.split(sizes) for built in self._built]
        names = [output.name for output in self._shop.outputs]
        batches = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        if self._is_planned:
            epoch = self._plan.order.epoch
            places = enumerate(zip(batches, sizes, strict=True), self._first_batch)
            yield Piece([Delivered(epoch, number, batch, size) for number, (batch, size) in places])
        else:
            delivered, heap_bytes, row = list[Delivered](), 0, 0
            for number, size in enumerate(sizes, self._first_batch):
                raise_if_closing(self._shop.closing)
                ahead = sum(built.ahead(size) for built in self._built if built.ahead)
                if ahead:
                    yield Piece(slot_bytes=ahead)
                delivered.append(self._delivered(number, next(batches), row, size))
                heap_bytes += held_bytes(delivered[-1].batch, self._builder.slots)
                row += size
                if ahead or heap_bytes >= self._shop.untold_bytes or row == self._num_rows:
                    self._shop.heap.made(heap_bytes)
                    piece = Piece(delivered, heap_bytes=heap_bytes)
                    delivered, heap_bytes = [], 0
                    yield piece
                    del piece
        self.leased_bytes = self._builder.leased_bytes
        self._builder, self._built, self._runs, self._located = None, [], None, None
        for window in self.closes:
            window.verify()

    @property
    def _is_planned(self) -> bool:
        """Whether what it takes was known before: nothing of the user's runs, and no object is made."""
        assert self._builder is not None
        if self._builder.bad or self._shop.finishing.does_something:
            return False
        return all(output.kind in _SLOT_KINDS for output in self._shop.outputs)

    def _delivered(self, number: int, batch: dict[str, Any], row: int, size: int) -> Delivered:
        skipped: list[SampleError] = []
        done, kept = self._finish_batch(number, batch, row, size, skipped)
        return Delivered(self._plan.order.epoch, number, done, kept, tuple(skipped))

    def _finish_batch(
        self, number: int, batch: dict[str, Any], row: int, size: int, skipped: list[SampleError]
    ) -> tuple[Any, int]:
        finishing, builder = self._shop.finishing, self._builder
        assert builder is not None
        dropped = {r - row for r in builder.bad if row <= r < row + size}
        for r in sorted(dropped):
            if not finishing.on_bad(builder.bad[row + r]):
                raise builder.bad[row + r]
            skipped.append(builder.bad[row + r])
        keep = np.array([i for i in range(size) if i not in dropped], np.int64) if dropped else None
        if keep is not None:
            if not len(keep):
                return {}, 0
            batch, size = drop_rows(batch, keep), len(keep)
        if self._pieces is not None and finishing.collate is None:
            assert finishing.batching is not None
            found = self._pieces.one(number - self._first_batch)
            found = found if keep is None else found.keep(keep)
            batch = batch_columns(finishing.batching, found, batch, builder.slot)
        done: Any = batch
        kept = np.arange(size) if keep is None else keep
        if finishing.takes_samples:
            samples, kept = self._transform(batch, kept, row, skipped)
            if not samples:
                return {}, 0
            if finishing.collate:
                place = partial(self._place, "collate_fn=", number, row, kept, samples)
                done = _called(finishing.collate, samples, place)
            else:
                done, kept = self._collate(samples, kept, row, skipped)
                if not len(kept):
                    return {}, 0
        if finishing.batch_transform:
            place = partial(self._place, "batch_transform=", number, row, kept, done)
            done = _called(finishing.batch_transform, done, place)
        if finishing.mark_repeats:
            _checked_dict(done, finishing)[REPEAT] = torch.from_numpy(self._repeats(number, kept))
        return done, len(kept)

    def _repeats(self, number: int, kept: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of a batch's samples that are kept (of packed rows: of all), which come a second time."""
        flags = self._plan.repeats(number, number + 1)
        if self._pieces is None:
            return flags[kept]
        batching = self._shop.finishing.batching
        assert batching is not None
        return flags if batching.rows_are_units else np.full(len(kept), flags[0])

    def _transform(
        self, batch: dict[str, Any], kept: NDArray[np.int64], first: int, skipped: list[SampleError]
    ) -> tuple[list[Any], NDArray[np.int64]]:
        """The samples that the transforms made, and which rows of the batch these are."""
        samples, done = [], []
        numbers, slots = self._where
        for sample, place in zip(samples_of(batch, self._shop.outputs, len(kept)), kept, strict=True):
            raise_if_closing(self._shop.closing)
            row = first + place
            window = self._windows[int(numbers[row])]
            try:
                samples.append(self._apply(sample, window, int(window.rows[slots[row]])))
                done.append(place)
            except Exception as error:
                reason = transform_reason(error, [output.name for output in self._shop.outputs])
                self._leave_out(self._sample_error(row, reason, None, "transform"), error, skipped)
        return samples, np.array(done, np.int64)

    def _collate(
        self, samples: list[Any], kept: NDArray[np.int64], first: int, skipped: list[SampleError]
    ) -> tuple[Any, NDArray[np.int64]]:
        """The batch of samples, and which rows are in it: all but those that no batch can hold."""
        while samples:
            try:
                return default_collate(samples), kept
            except Exception as error:
                misfit = misfit_of(samples, self._shop.outputs)
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
            other = self._sample_error(int(rows[misfit.beside]), "", None, "collate")
            sample = f"sample {other.key!r}"
            text += f", but for {sample} {misfit.other}" if whole else f", but {sample} has {misfit.other}"
        row, column = int(rows[misfit.at]), misfit.column or None
        return self._sample_error(row, f"{text}; {misfit.cure}", column, "collate")

    def _leave_out(self, bad: SampleError, cause: Exception, skipped: list[SampleError]) -> None:
        """Leave a sample out, or raise its error, as the user decided."""
        bad.__cause__ = cause
        if not self._shop.finishing.on_bad(bad):
            raise bad from cause
        skipped.append(bad)

    def _sample_error(self, row: int, reason: str, column: str | None, stage: str) -> SampleError:
        """An error that names the sample in a row of the chunk."""
        numbers, slots = self._where
        window = self._windows[int(numbers[row])]
        return window.sample_error(int(window.rows[slots[row]]), reason, column, stage)

    def _place(self, name: str, number: int, row: int, kept: NDArray[np.int64], argument: Any) -> str:
        """Where a function of batches was, and what it was given."""
        ends = (self._sample_error(row + int(kept[at]), "", None, "collate") for at in (0, -1))
        samples = " to ".join(f"{end.key!r} of {end.shard}" for end in ends)
        batch = f"batch {number} of epoch {self._plan.order.epoch}"
        return f"in {name} of {batch}, samples {samples}; it was given {described(argument)}"

    def _apply(self, sample: dict[str, Any], window: StagedWindow, row: int) -> Any:
        transform, wants_rng = self._shop.finishing.transforms[window.source.number]
        if transform is None:
            return sample
        if not wants_rng:
            return transform(sample)
        seed, epoch = self._shop.seed, self._randomness.epoch_of(window)
        return transform(sample, rng=sample_rng(seed, epoch, window.sample_number(row)))


def _rows_in_batches(
    plan: EpochPlan, number: int, window: StagedWindow, arena: Arena
) -> tuple[int, NDArray[np.int64]]:
    """The first full batch that lies in the window alone, and the rows of all such batches one after another.

    For all of them at once: a chunk would pay the same few calls for its own batches.
    """
    core = plan.batch_plan.batches_within(*plan.order.window_core(number))
    num_rows = len(core) * plan.batch_plan.batch_size
    rows = arena.lease(8 * num_rows)[: 8 * num_rows].view(np.int64)
    whole = plan.batch_plan.whole_lanes(core.start)
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


def _checked_dict(batch: Any, finishing: Finishing) -> MutableMapping[str, Any]:
    if isinstance(batch, MutableMapping):
        return batch
    who = "the transformed samples were collated to"
    if finishing.batch_transform or finishing.collate:
        who = f"{'batch_transform' if finishing.batch_transform else 'collate_fn'} returned"
    raise TypeError(
        f"mark_repeats=True adds a column {REPEAT!r} to batches that are dicts, but {who} a "
        f"{type(batch).__name__}"
    )


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
