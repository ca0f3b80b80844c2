"""The caches of one loader: which blocks each keeps, by when this machine's ranks need them next.

A cache file is found in the block tables by a 64-bit hash of shard and offset (16 bytes a block). When
its block is needed follows from the orders of the running epoch and the next (8 bytes a block each), which
are looked at when the cache is full for the first time, and kept while their epochs last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.planning.plan import StreamPlan
from dataflow.staging.block_source import SourceCache
from dataflow.stream.read_ahead import WINDOWS_OPEN
from prefetch.cache.block_cache import BlockCache
from prefetch.cache.entry import Entry, shard_hash, tag_of
from prefetch.cache.folder import Stored
from prefetch.counts import NO_CACHE, CacheStats
from sharding.cached_property import cached_property
from sharding.catalog.table import Catalog
from sharding.mixture.windows import source_seed
from sharding.order.order import Order
from sharding.order.permutations import splitmix64
from sharding.plan.next_use import LaneRange, lanes_of_shard_indices, next_uses, windows_of_blocks
from sharding.plan.placement import shard_index_of
from sharding.spans import Ints
from sharding.topology.topology import Topology
from sharding.urls import is_local


class OpenCaches:
    """The caches of one loader: one for each different `Cache` of its sources."""

    def __init__(self, plan: StreamPlan, topology: Topology) -> None:
        datasets = plan.dataset.sources
        self._of_source: dict[tuple[int, int], SourceCache] = {}
        self._open: list[BlockCache] = []
        read = {
            (number, nth): part
            for number, dataset in enumerate(datasets)
            for nth, part in enumerate(dataset.datasets_read)
            if part.cache is not None and not all(map(is_local, part.catalog.urls[:1]))  # a disk needs none
        }
        uses = {(number, nth): _use_of(datasets[number], number, plan, topology, nth) for number, nth in read}
        for cache in dict.fromkeys(part.cache for part in read.values()):
            assert cache is not None
            numbers = [number for number in uses if read[number].cache == cache]
            future = NextUse([uses[number] for number in numbers])
            blocks = BlockCache(cache.folder, cache.limit_bytes, future)
            self._open.append(blocks)
            self._of_source.update(
                (number, SourceCache(uses[number].begins, blocks.read_into)) for number in numbers
            )

    def of(self, source: int, join: int = 0) -> SourceCache | None:
        """The cache of one source, or of the `join`-th dataset that is joined to it; None: it has none."""
        return self._of_source.get((source, join))

    def stats(self) -> CacheStats:
        """The counts of all of them together."""
        return sum((blocks.stats() for blocks in self._open), NO_CACHE)

    def end(self) -> None:
        """End reads that wait for other processes. Any thread."""
        for blocks in self._open:
            blocks.end()

    def close(self) -> None:
        """Close the folders, when no thread reads any more. Idempotent."""
        for blocks in self._open:
            blocks.close()


def _use_of(dataset: ShardedDataset, number: int, plan: StreamPlan, topology: Topology, at: int) -> SourceUse:
    """Return when blocks of a dataset, or of the `at`-th that is joined to it, are needed."""
    mixed = plan.dataset.sources != (dataset,)
    seed = source_seed(plan.seed, number) if mixed else plan.seed
    share = float(plan.sample_shares[number if mixed else 0])
    shuffle = plan.shuffle.of_source(number if mixed else 0)
    return SourceUse(
        catalog=dataset.datasets_read[at].catalog,
        windows_of=dataset.joins_used[at - 1].matches.windows if at else windows_of_blocks,
        order_of=partial(dataset.windows, shuffle=shuffle, seed=seed),
        samples=len(dataset) / share if share else np.inf,
        lanes=_lanes(plan, shuffle.num_lanes, topology),
        sparse=shuffle.kind == "full",
    )


def _lanes(plan: StreamPlan, num_lanes: int, topology: Topology) -> LaneRange:
    """The lanes of this machine's ranks; nodes are taken to have equally many."""
    world = topology.data_world_size
    if plan.planner is not None or plan.measures_lengths:  # units or packing windows are dealt to ranks
        return LaneRange(0, num_lanes, shared=topology.local_world_size > 1)
    each = max(1, world // topology.num_nodes)
    first = shard_index_of(topology) // each * each
    return lanes_of_shard_indices(range(first, min(world, first + each)), world, num_lanes, plan.batch_size)


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """The times at which the blocks of one source are needed."""

    catalog: Catalog
    order_of: Callable[[int], Order]
    """The order of one of its epochs."""
    samples: float
    """Samples of all sources that are delivered during one epoch of this one."""
    lanes: LaneRange
    sparse: bool
    """True if single samples are read: they are in no table, and none is known to be needed sooner."""
    windows_of: Callable[[Order, int, LaneRange], Ints] = windows_of_blocks
    """The first window of an order that needs each of so many blocks of it."""
    # Blocks of the oldest window that is open may still be wanted.
    _open: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOWS_OPEN))
    _windows: OrderedDict[int, tuple[Ints, int]] = field(default_factory=OrderedDict)

    def begins(self, epoch: int, window: int) -> None:
        """Note that its next window is going to be read. Cheap; one thread."""
        self._open.append((epoch, window))

    def next_uses(self, blocks: Ints, *, just_read: bool) -> NDArray[np.float64]:
        """Return when some of its blocks are needed next. One thread at a time."""
        epoch, window = self._open[0] if self._open else (0, 0)
        this, following = self._at(epoch), self._at(epoch + 1)
        when = next_uses(blocks, (epoch, window), this, following, done=just_read and not self.lanes.shared)
        return when * self.samples

    def _at(self, epoch: int) -> tuple[Ints, int]:
        windows = self._windows.get(epoch)
        if windows is None:
            order = self.order_of(epoch)
            windows = self.windows_of(order, self.catalog.num_blocks, self.lanes), order.num_windows
            self._windows[epoch] = windows
            while len(self._windows) > 2:
                self._windows.popitem(last=False)
        return windows


class NextUse:
    """Implements `prefetch.cache.block_cache.Future` over several sources. Thread-safe."""

    def __init__(self, sources: Sequence[SourceUse]) -> None:
        self._sources = sources
        self._lock = threading.Lock()  # guards what sources keep, and making the tables

    def shard_hashes(self) -> NDArray[np.uint64]:
        """The hashes of all shards."""
        return np.unique(np.concatenate(self._hashes_of_shards))

    def of_stored(self, stored: Stored) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return when each block of a folder is needed, and whether it is one of ours."""
        return self._of(stored.shard_hashes, stored.offsets, just_read=False)

    def of_entry(self, entry: Entry) -> float:
        """Return when a block that was just read is needed again."""
        its, offset = np.array([shard_hash(entry.tag)], np.uint64), np.array([entry.offset])
        return float(self._of(its, offset, just_read=True)[0][0])

    def _of(
        self, shard_hashes: NDArray[np.uint64], offsets: Ints, *, just_read: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        with self._lock:
            keys = _keys(shard_hashes, offsets)
            sorted_keys, owner, block = self._table
            positions = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
            in_table = sorted_keys[positions] == keys
            ours = in_table.copy()
            when = np.full(len(keys), np.inf)
            for source, of_shards in zip(self._sources, self._hashes_of_shards, strict=True):
                if source.sparse:
                    its = ~in_table & np.isin(shard_hashes, of_shards)
                    when[its] = 0.0
                    ours |= its
            for number, source in enumerate(self._sources):
                its = in_table & (owner[positions] == number)
                if its.any():
                    when[its] = source.next_uses(block[positions[its]], just_read=just_read)
        return when, ours

    @cached_property
    def _hashes_of_shards(self) -> list[NDArray[np.uint64]]:
        return [
            np.array([shard_hash(tag_of(c.shard(i))) for i in range(c.num_shards)], np.uint64)
            for c in (source.catalog for source in self._sources)
        ]

    @cached_property
    def _table(self) -> tuple[NDArray[np.uint64], NDArray[np.int16], Ints]:
        """Keys of all blocks, ascending; the source and the row in its table of each."""
        keys, owners, blocks = [], [], []
        for number, (source, shard_hashes) in enumerate(
            zip(self._sources, self._hashes_of_shards, strict=True)
        ):
            table = source.catalog.blocks
            keys.append(_keys(shard_hashes[table.shard], table.offset))
            owners.append(np.full(len(table.shard), number, np.int16))
            blocks.append(np.arange(len(table.shard)))
        every = np.concatenate(keys)
        order = np.argsort(every)
        return every[order], np.concatenate(owners)[order], np.concatenate(blocks)[order]


def _keys(shard_hashes: NDArray[np.uint64], offsets: Ints) -> NDArray[np.uint64]:
    return splitmix64(shard_hashes ^ splitmix64(offsets.astype(np.uint64)))
