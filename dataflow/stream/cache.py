"""The caches of one loader: which blocks each keeps, by when its ranks are going to read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dataflow.dataset import ShardedDataset
from dataflow.limits import Cache
from dataflow.planning.plan import StreamPlan
from dataflow.staging.source import SourceCache
from dataflow.stream.next_use import NextUse, SourceUse
from prefetch.cache.block_cache import NO_CACHE, BlockCache, CacheStats
from sharding.mixture.windows import source_seed
from sharding.order.order import Order
from sharding.order.selection import SelectedOrder
from sharding.order.shuffle import Shuffle
from sharding.plan.next_use import LaneRange, lanes_of_shard_indices
from sharding.plan.placement import shard_index_of
from sharding.topology.topology import Topology
from sharding.urls import is_local


class OpenCaches:
    """The caches of one loader: one for each different `Cache` of its sources."""

    def __init__(self, datasets: Sequence[ShardedDataset], plan: StreamPlan, place: Topology) -> None:
        self._of_source: dict[tuple[int, int], SourceCache] = {}
        self._open: list[BlockCache] = []
        read = {
            (number, at): one
            for number, dataset in enumerate(datasets)
            for at, one in enumerate(dataset.datasets_read)
            if _cache_of(one) is not None
        }
        uses = {(number, at): _use_of(datasets[number], number, plan, place, at) for number, at in read}
        for cache in dict.fromkeys(one.cache for one in read.values()):
            assert cache is not None
            numbers = [number for number in uses if read[number].cache == cache]
            future = NextUse([uses[number] for number in numbers])
            blocks = BlockCache(cache.folder, cache.limit_bytes, future)
            self._open.append(blocks)
            self._of_source.update(
                (number, SourceCache(uses[number].begins, blocks.read_into)) for number in numbers
            )

    def of(self, source: int, place: int = 0) -> SourceCache | None:
        """The cache of one source, or of what is joined to it (from 1 on); None: it has none."""
        return self._of_source.get((source, place))

    def stats(self) -> CacheStats:
        """Of all of them together."""
        return sum((blocks.stats() for blocks in self._open), NO_CACHE)

    def end(self) -> None:
        """End reads that wait for other processes. Any thread."""
        for blocks in self._open:
            blocks.end()

    def close(self) -> None:
        """When no thread reads any more. Idempotent."""
        for blocks in self._open:
            blocks.close()


def _cache_of(dataset: ShardedDataset) -> Cache | None:
    """The dataset's cache, if its shards are remote: local ones lie on a disk already."""
    remote = any(not is_local(url) for url in dataset.catalog.urls[:1])
    return dataset.cache if remote else None


def _use_of(dataset: ShardedDataset, number: int, plan: StreamPlan, place: Topology, at: int) -> SourceUse:
    """When blocks of a dataset, or of the `at`-th that is joined to it, are needed."""
    mixed = plan.dataset.sources != (dataset,)
    seed = source_seed(plan.seed, number) if mixed else plan.seed
    share = float(plan.sample_shares[number if mixed else 0])
    shuffle = plan.shuffle.of_source(number if mixed else 0)
    return SourceUse(
        catalog=dataset.datasets_read[at].catalog,
        matches=dataset.joins_used[at - 1].matches if at else None,
        order_of=partial(_order, dataset, shuffle, seed),
        samples=len(dataset) / share if share else np.inf,
        lanes=_lanes(plan, shuffle.num_lanes, place),
        sparse=shuffle.kind == "full",
    )


def _order(dataset: ShardedDataset, shuffle: Shuffle, seed: int, epoch: int) -> Order:
    return SelectedOrder(dataset.selection, shuffle, seed=seed, epoch=epoch)


def _lanes(plan: StreamPlan, num_lanes: int, place: Topology) -> LaneRange:
    """The lanes of this machine's ranks; nodes are taken to have equally many."""
    world = place.data_world_size
    if plan.planner is not None or plan.measures_lengths:  # units or megabatches are dealt to ranks
        return LaneRange(0, num_lanes, shared=place.local_world_size > 1)
    each = max(1, world // place.num_nodes)
    first = shard_index_of(place) // each * each
    return lanes_of_shard_indices(range(first, min(world, first + each)), world, num_lanes, plan.batch_size)
