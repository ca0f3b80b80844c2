"""Chunks whose values an actor reads by itself: what is sent of them, and how they are read there.

What crosses is which rows of which blocks a chunk has. Where values lie in the stored bytes (tar, tokens), an
actor reads those of the chunk's rows and no others, so that however chunks are dealt out, each value is read
once. Other blocks (Parquet, compressed shards, all that have checksums) are read and decoded whole; an actor
keeps the last ones, and the trainer gives it chunks of the windows that it has had, where it can.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataflow.actors.cluster import RayClusterError
from dataflow.batch.builder import ChunkPlan
from dataflow.outputs.columns import ChunkRows
from dataflow.staging.block_source import BlockSource, Traffic
from dataflow.staging.rows import OpenRows, RowReader
from dataflow.staging.window import RowFraction, StagedWindow, WindowSamples
from prefetch.counts import NO_FAULTS, ReadStats
from prefetch.engine.pool import PriorityPool
from prefetch.memory.arena import Arena
from prefetch.work import Task
from sharding.errors import ShardReadError
from sharding.urls import is_local

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset

_READERS = 16
"""Threads of an actor that read. Ranges are small, and a store answers many at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlanPart:
    """The rows of a chunk that come from one window, where another machine is to read them."""

    source: int
    epoch: int | None
    """The source's own epoch, in a mixture."""
    blocks: NDArray[np.int64]
    """[b] numbers of the blocks that hold them."""
    ordinals: NDArray[np.int64]
    """[n] which of `blocks` holds each row."""
    rows: NDArray[np.int64]
    """[n] rows in their blocks."""
    chunk_rows: NDArray[np.int64]
    """[n] the rows of the chunk that they fill, ascending."""
    whole: bool
    """True if blocks that have checksums are to be held to them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """All that an actor that reads by itself needs to build a chunk."""

    plan: ChunkPlan
    parts: Sequence[ReadPlanPart]


class ReadCounts(NamedTuple):
    """Counts of what an actor has read since it last reported them."""

    read_bytes: int = 0
    decoded_bytes: int = 0
    faults: ReadStats = NO_FAULTS


def only_read(dataset: ShardedDataset) -> ShardedDataset:
    """A dataset without functions: they cross by themselves, or are called by the training process."""
    read = copy.copy(dataset)
    read.transform = read.batch_transform = read.cache = None
    read.on_error = "raise"
    read.storage_options = dataset.options_elsewhere()
    return read


class PlannedWindow(StagedWindow):
    """A window that is not read here: which blocks it has, and which rows batches take.

    Made as by `open_rows`. Its rows are numbered as those of any window over whole blocks, so a window of the
    same blocks, which another machine has read, gives their values.
    """

    def __init__(
        self,
        source: BlockSource,
        arena: Arena,
        numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        share: RowFraction,
        num_readers: int,
    ) -> None:
        super().__init__(source, arena, WindowSamples(source.first_number, source.blocks(numbers)), rows)
        self.numbers = numbers
        """[b] of the blocks, in read order."""
        self.whole = share != "few"
        """True if its blocks are read whole, so that they can be held to their checksums."""
        self.nbytes = rows.nbytes

    def reads(self) -> Sequence[Task]:
        """Return no tasks: a planned window reads nothing."""
        return ()

    def _release(self) -> None:
        return

    def _stored(self, ordinal: int) -> memoryview | None:
        return None


def read_plan(plan: ChunkPlan, rows: ChunkRows) -> ReadPlan:
    """A chunk whose windows are planned only."""
    every, parts = np.arange(rows.num_rows), list[ReadPlanPart]()
    for part in rows.parts:
        window = part.window
        assert isinstance(window, PlannedWindow)
        first_row = window.samples.first_row
        ordinals = np.searchsorted(first_row, part.rows, side="right") - 1
        used, positions = np.unique(ordinals, return_inverse=True)
        read = ReadPlanPart(
            source=window.source_number,
            epoch=window.source_epoch,
            blocks=window.numbers[used],
            ordinals=positions,
            rows=part.rows - first_row[ordinals],
            chunk_rows=every[part.chunk_rows],
            whole=window.whole,
        )
        parts.append(read)
    return ReadPlan(plan=plan, parts=parts)


class ChunkReads:
    """A chunk whose reads have begun."""

    def __init__(self, chunk: ReadPlan, num_rows: int) -> None:
        self._chunk, self._num_rows = chunk, num_rows
        self.opened: list[OpenRows] = []
        self.reads: list[Future[None]] = []

    def rows(self) -> ChunkRows:
        """The rows, once all are read. Raises what reading them raised."""
        for read in self.reads:
            read.result()
        parts = [part for rows in self.opened for part in rows.parts]
        return ChunkRows(self._num_rows, lambda: parts, self._chunk.plan.cut)

    def close(self, *, is_built: bool) -> None:
        """Let go of the windows. Raises `ShardChangedError` if what was built may be of changed bytes."""
        for rows in self.opened:
            for window in rows.windows if is_built else ():
                window.verify()
            rows.close()


class BlockReader:
    """Reads the rows of chunks. Thread-safe.

    Args:
        datasets: the sources, in the order of a mixture.
        arena: where values lie.
        keep_bytes: of decoded blocks that are kept for chunks to come.
        seed: of the random numbers that say which parts of values are read.
    """

    def __init__(
        self, datasets: Sequence[ShardedDataset], arena: Arena, keep_bytes: int, *, seed: int = 0
    ) -> None:
        self._seed, self.traffic = seed, Traffic()
        self._sources = [
            replace(data.source(), number=number, traffic=self.traffic)
            for number, data in enumerate(datasets)
        ]
        if any(source.clips for source in self._sources):
            raise RayClusterError("builders on other machines do not read the videos of a LeRobot dataset")
        self._reader = RowReader(arena, keep_bytes=keep_bytes, keep_blocks=1)
        self._threads = PriorityPool(_READERS, "dataflow-read")
        self._lock = threading.Lock()  # guards the faults
        self._faults = NO_FAULTS
        """The faults that were reported."""

    def take_counts(self) -> ReadCounts:
        """Return what was read since the last call, and what went wrong with it."""
        with self._lock:
            before = self._faults
            self._faults = sum((source.reader.stats() for source in self._sources), NO_FAULTS)
            return ReadCounts(*self.traffic.take(), self._faults - before)

    def check(self, name: str) -> None:
        """Raise if the first shards are not those that were indexed, or cannot be reached; `name`: of us."""
        for source in self._sources:
            shard = source.catalog.shard(0)
            try:
                source.reader.read_into(shard, 0, np.empty(min(1, shard.size), np.uint8))
            except ShardReadError as error:
                if not is_local(shard.url):
                    raise
                raise RayClusterError(
                    f"{name} cannot read {shard.url} ({error}): put the shards where all nodes see them "
                    "under this path, or have the training process read them: ship_blocks=True"
                ) from error

    def begin(self, chunk: ReadPlan) -> ChunkReads:
        """Begin to read the rows of a chunk."""
        reading = ChunkReads(chunk, int(chunk.plan.sizes.sum()))
        for part in chunk.parts:
            rows = self._reader.open(
                self._sources[part.source],
                part.blocks,
                part.ordinals,
                part.rows,
                part.chunk_rows,
                share="few",
                is_checked=part.whole,
                seed=self._seed,
                epoch=chunk.plan.epoch,
                source_epoch=part.epoch,
            )
            reading.opened.append(rows)
            reading.reads.extend(map(self._begun, rows.reads()))
        return reading

    def _begun(self, read: Task) -> Future[None]:
        """A read that threads do, in the order in which they come."""
        future: Future[None] = Future()
        self._threads.submit(0, partial(_set_result, future, read))
        return future


def _set_result(future: Future[None], read: Task) -> None:
    try:
        read()
        future.set_result(None)
    except BaseException as error:  # told to whoever waits for it
        future.set_exception(error)
