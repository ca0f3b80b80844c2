"""A chunk: consecutive batches built together from staged windows, and finished one by one.

Its columns are gathered for all its batches at once (`dataflow.batches`), then split; bad samples are left
out or raised, and what the user gave is called: transforms, `collate_fn`, `batch_transform`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dataflow.batches import ColumnBuilder, Cut, Randomness, Run
from dataflow.block_windows import Located
from dataflow.decode import Output
from dataflow.packed import batch_bytes, batch_columns
from dataflow.samples import drop_rows, samples_of
from dataflow.staged_columns import StagedSpans
from dataflow.staging import StagedWindow
from dataflow.stream_plan import RankPlan
from prefetch.arena import Arena, rounded_bytes
from prefetch.leases import FileLeases
from sharding.batching import Batching
from sharding.errors import SampleError
from sharding.plan import EpochPlan
from sharding.unit_plan import UnitPlan

_FIXED_KINDS = ("array", "spans", "image")


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
        item = np.dtype(output.dtype).itemsize
        laid = (batch_bytes(batching, found.one(b), item) for b in range(self.num_batches))
        if output.kind in _FIXED_KINDS:
            gathered = rounded_bytes(self._num_rows * output.row_bytes)
        else:
            gathered = rounded_bytes(max(1, int(found.pieces.length.sum()) * item))
        return gathered + sum(map(rounded_bytes, laid))

    def _cut(self) -> Cut | None:
        """Which part of its column a length-aware batch takes."""
        batching, found, plan = self._shop.finishing.batching, self._pieces, self._plan
        if batching is None or found is None or not self._shop.finishing.forms(batching.column):
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
            window.in_batches = _rows_in_batches(plan, number, window, self._shop.arena)
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
        shop, runs = self._shop, self.runs()
        rows, cut, draws = self._num_rows, self._cut(), self._randomness
        with shop.leases.loading():
            may_load = all(run.window.may_load for run in runs)
            self._builder = ColumnBuilder(
                shop.arena, runs, rows, draws, shop.on_return, cut, may_load=may_load
            )
            self._built = [self._builder.build(output) for output in shop.outputs]
        return [part for built in self._built for part in built.parts]

    def finish(self) -> tuple[Sequence[Delivered], int]:
        """Split into batches, apply what the user gave."""
        sizes: list[int] = self._sizes.tolist()
        columns = [built.split(sizes) for built in self._built]
        names = [output.name for output in self._shop.outputs]
        batches = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        assert self._builder is not None
        epoch, finishing = self._plan.order.epoch, self._shop.finishing
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
        finishing, builder = self._shop.finishing, self._builder
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
            done = _called(finishing.batch_transform, done)
        return done, size

    def _transform(
        self, batch: dict[str, Any], size: int, rows: NDArray[np.int64], skipped: list[SampleError]
    ) -> tuple[Any, int]:
        finishing, samples = self._shop.finishing, []
        numbers, slots = self._where
        for sample, row in zip(samples_of(batch, self._shop.outputs, size), rows, strict=True):
            window = self._windows[int(numbers[row])]
            at = int(window.rows[slots[row]])
            try:
                samples.append(self._apply(sample, window, at))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                bad = window.sample_error(at, reason, None, stage="transform")
                bad.__cause__ = error
                if not finishing.on_bad(bad):
                    raise bad from error
                skipped.append(bad)
        collate = finishing.collate or _default_collate
        return (_called(collate, samples) if samples else {}), len(samples)

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


def _called(function: BatchFn, argument: Any) -> Any:
    """What a user's function returns; a `StopIteration` of it would seem to be the loader's end."""
    try:
        return function(argument)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(function, '__name__', function)} raised StopIteration") from error


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
