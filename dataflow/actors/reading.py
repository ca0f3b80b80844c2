"""Chunks whose values an actor reads by itself: what crosses of them, and how they are read there.

What crosses is which rows of which blocks a chunk has. Where values lie in the stored bytes (tar, tokens), an
actor reads those of the chunk's rows and no others, so that however chunks are dealt out, each value is read
once. Other blocks (Parquet, compressed shards, all that have checksums) are read and decoded whole; an actor
keeps the last ones, and the trainer gives it chunks of the windows that it has had, where it can.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataflow.actors.cluster import RayClusterError
from dataflow.batch.builder import ChunkPlan
from dataflow.outputs.columns import ChunkRows, WindowPart
from dataflow.staging.mapped import MappedWindow, can_map_windows
from dataflow.staging.planned import PlannedWindow
from dataflow.staging.reading import ReadWindow, SparseWindow
from dataflow.staging.source import Source, Traffic
from dataflow.staging.window import StagedWindow
from prefetch.engine.pool import PriorityPool
from prefetch.memory.arena import Arena
from prefetch.store.reader import NO_FAULTS, ReadStats
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
    """Of the source's own, in a mixture."""
    blocks: NDArray[np.int64]
    """[b] numbers of the blocks that hold them."""
    ordinals: NDArray[np.int64]
    """[n] which of `blocks` holds each row."""
    rows: NDArray[np.int64]
    """[n] rows in their blocks."""
    chunk_rows: NDArray[np.int64]
    """[n] the rows of the chunk that they fill, ascending."""
    whole: bool
    """Whether blocks that have checksums are to be held to them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """What an actor that reads by itself needs to build a chunk."""

    plan: ChunkPlan
    parts: Sequence[ReadPlanPart]


class ReadCounts(NamedTuple):
    """What an actor has read since it last said so."""

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


def read_plan(plan: ChunkPlan, rows: ChunkRows) -> ReadPlan:
    """A chunk whose windows are planned only."""
    every = np.arange(rows.num_rows)
    return ReadPlan(plan=plan, parts=[_read_plan_part(part, every[part.chunk_rows]) for part in rows.parts])


def _read_plan_part(part: WindowPart, chunk_rows: NDArray[np.int64]) -> ReadPlanPart:
    window = part.window
    assert isinstance(window, PlannedWindow)
    first_row = window.samples.first_row
    ordinals = np.searchsorted(first_row, part.rows, side="right") - 1
    used, own = np.unique(ordinals, return_inverse=True)
    return ReadPlanPart(
        source=window.source_number,
        epoch=window.source_epoch,
        blocks=window.numbers[used],
        ordinals=own,
        rows=part.rows - first_row[ordinals],
        chunk_rows=chunk_rows,
        whole=window.whole,
    )


class _CachedBlock:
    """A block that is decoded, or will be once its reads have ended."""

    def __init__(self, window: ReadWindow, reads: list[Future[None]]) -> None:
        self.window, self.reads = window, reads


class ChunkReads:
    """A chunk whose reads have begun."""

    def __init__(self, chunk: ReadPlan, num_rows: int) -> None:
        self._chunk, self._num_rows = chunk, num_rows
        self.parts: list[WindowPart] = []
        self.reads: list[Future[None]] = []
        self.own: list[StagedWindow] = []
        """Windows that serve no other chunk."""

    def rows(self) -> ChunkRows:
        """The rows, once all are read. Raises what reading them raised."""
        for read in self.reads:
            read.result()
        return ChunkRows(self._num_rows, lambda: self.parts, self._chunk.plan.cut)

    def close(self, *, is_built: bool) -> None:
        """Let go of the windows. Raises `ShardChangedError` if what was built may be of changed bytes."""
        for window in self.own:
            if is_built:
                window.verify()
            window.close()


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
        self._is_mapped = [can_map_windows(source) for source in self._sources]
        self._arena, self._keep_bytes = arena, keep_bytes
        self._threads = PriorityPool(_READERS, "dataflow-read")
        self._lock = threading.Lock()  # guards the blocks and the faults
        self._faults = NO_FAULTS
        """Those that were told."""
        self._kept: OrderedDict[tuple[int, int | None, int], _CachedBlock] = OrderedDict()
        self._kept_bytes = 0

    def take_counts(self) -> ReadCounts:
        """What was read since the last call, and what went wrong with it."""
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
            source = self._sources[part.source]
            blocks = [source.catalog.block(number) for number in part.blocks.tolist()]
            # A shard may be compressed among others that are not.
            if not all(map(source.locates, blocks)) or (part.whole and source.catalog.checksums is not None):
                self._read_blocks(reading, part)
            elif self._is_mapped[part.source]:
                self._read_values(reading, chunk.plan.epoch, part, self._mapped(source, part))
            else:
                rows_in_block = [
                    np.unique(part.rows[part.ordinals == ordinal]) for ordinal in range(len(blocks))
                ]
                window = SparseWindow(source, self._arena, blocks, part.rows, rows_in_block=rows_in_block)
                self._read_values(reading, chunk.plan.epoch, part, (window, _compact(part, rows_in_block)))
        return reading

    def _begun(self, read: Task) -> Future[None]:
        """A read that threads do, in the order in which they come."""
        future: Future[None] = Future()
        self._threads.submit(0, partial(_settle, future, read))
        return future

    def _mapped(self, source: Source, part: ReadPlanPart) -> tuple[StagedWindow, NDArray[np.int64]]:
        """A window of local files, of which only the pages wanted are touched, and its rows."""
        counts = source.catalog.blocks.num_samples[part.blocks]
        rows = (np.cumsum(counts) - counts)[part.ordinals] + part.rows
        return MappedWindow(source, self._arena, part.blocks, rows, needed=np.unique(rows), whole=False), rows

    def _read_values(
        self,
        reading: ChunkReads,
        epoch: int,
        part: ReadPlanPart,
        windowed: tuple[StagedWindow, NDArray[np.int64]],
    ) -> None:
        window, rows = windowed
        window.seed, window.epoch = self._seed, epoch
        window.source_epoch = part.epoch
        reading.own.append(window)
        reading.reads.extend(map(self._begun, window.reads()))
        reading.parts.append(WindowPart(window, rows, part.chunk_rows))

    def _read_blocks(self, reading: ChunkReads, part: ReadPlanPart) -> None:
        for ordinal, number in enumerate(part.blocks.tolist()):
            block = self._block(part.source, part.epoch, number)
            own = np.flatnonzero(part.ordinals == ordinal)
            reading.reads.extend(block.reads)
            reading.parts.append(WindowPart(block.window, part.rows[own], part.chunk_rows[own]))

    def _block(self, source: int, epoch: int | None, number: int) -> _CachedBlock:
        """A block, read at most once as long as it is kept."""
        key = (source, epoch, number)
        with self._lock:
            block = self._kept.pop(key, None)
            if block is None:
                block = self._opened(source, epoch, number)
                self._kept_bytes += block.window.nbytes
            self._kept[key] = block
            while self._kept_bytes > self._keep_bytes and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].window.nbytes
        return block

    def _opened(self, source: int, epoch: int | None, number: int) -> _CachedBlock:
        """A block whose reads have begun; its memory goes when nobody refers to it."""
        of = self._sources[source]
        rows = np.zeros(0, np.int64)
        window = ReadWindow(of, self._arena, [of.catalog.block(number)], rows, num_readers=1)
        window.source_epoch = epoch
        return _CachedBlock(window, [*map(self._begun, window.reads())])


def _settle(future: Future[None], read: Task) -> None:
    try:
        read()
        future.set_result(None)
    except BaseException as error:  # told to whoever waits for it
        future.set_exception(error)


def _compact(part: ReadPlanPart, rows_in_block: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The rows of a window that has those rows of its blocks alone."""
    counts = np.array([len(rows) for rows in rows_in_block], np.int64)
    starts = np.cumsum(counts) - counts
    rows = np.empty(len(part.rows), np.int64)
    for ordinal, own in enumerate(rows_in_block):
        mine = part.ordinals == ordinal
        rows[mine] = starts[ordinal] + np.searchsorted(own, part.rows[mine])
    return rows
