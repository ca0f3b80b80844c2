"""A loader over a store with a cache, or with other ranks: what the server is asked for, counted there."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_kit import fast_ranks
from http_kit import slowstore

from dataflow import Cache, DataLoader, Mixture, ShardedDataset, Shuffle, Topology
from prefetch.retries import RetryPolicy

pytestmark = pytest.mark.reads_here

pytest.importorskip("aiohttp")

NUM_SHARDS, PER_SHARD, LENGTH = 4, 512, 256
BLOCK = 1 << 16
WAIT_S = 60.0
SHUFFLE = Shuffle("window", window_blocks=4, canonical_nodes=1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for i in range(NUM_SHARDS):
        numbers = np.arange(i * PER_SHARD * LENGTH, (i + 1) * PER_SHARD * LENGTH, dtype=np.uint32)
        numbers.tofile(folder / f"x-{i}.bin")
    return folder


class Server:
    """The store, as the tests ask it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def served(self) -> dict[str, Any]:
        """What was asked since the last call."""
        with urllib.request.urlopen(f"{self.url}/__stats?reset=1", timeout=WAIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@pytest.fixture(scope="module")
def server(shards: Path) -> Iterator[Server]:
    with slowstore(shards) as url:
        yield Server(url)


def open_dataset(url: str, folder: Path, cache: Cache | None, shards: slice = slice(None)) -> ShardedDataset:
    return ShardedDataset(
        [f"{url}/x-{i}.bin" for i in range(NUM_SHARDS)[shards]],
        format="tokens",
        dtype="uint32",
        length=LENGTH,
        block_bytes=BLOCK,
        catalog=str(folder / f"{shards.start}-{shards.stop}.catalog"),
        cache=cache,
        retry=RetryPolicy(stall_s=WAIT_S, least_stall_s=WAIT_S),  # a busy machine is no silent store
    )


def table_bytes(dataset: ShardedDataset) -> int:
    return int(dataset.catalog.blocks.length.sum())


def firsts(loader: DataLoader) -> list[int]:
    """The first token of each sample of an epoch, in the order they come."""
    return [int(first) for batch in loader for first in batch["tokens"][:, 0]]


def test_the_second_epoch_asks_the_store_for_nothing(server: Server, tmp_path: Path) -> None:
    plain = open_dataset(server.url, tmp_path, None)
    cached = open_dataset(server.url, tmp_path, Cache(tmp_path / "cache", limit="1GB"))
    with DataLoader(plain, 32, SHUFFLE) as loader:
        expected = [firsts(loader), firsts(loader)]
    server.served()
    with DataLoader(cached, 32, SHUFFLE) as loader:
        assert firsts(loader) == expected[0]
        assert server.served()["bytes"] == table_bytes(cached)
        assert firsts(loader) == expected[1]
        stats = loader.stats().cache
    with DataLoader(cached, 32, SHUFFLE) as loader:  # another run
        assert firsts(loader) == expected[0]
    assert server.served()["requests"] == 0
    assert stats.misses == cached.catalog.num_blocks
    assert stats.miss_bytes == stats.stored_bytes == table_bytes(cached)
    assert stats.hits >= stats.misses
    assert stats.errors == stats.evicted == stats.passed == 0


def test_ranks_that_share_lanes_fetch_each_byte_once(server: Server, tmp_path: Path) -> None:
    dataset = open_dataset(server.url, tmp_path, Cache(tmp_path / "cache"))
    server.served()

    def rank(number: int) -> list[int]:
        place = Topology(number, 4, number, 4)
        with DataLoader(dataset, 8, SHUFFLE, topology=place, tail="drop") as loader:
            return firsts(loader)

    with ThreadPoolExecutor(4) as threads:
        ranks = list(threads.map(rank, range(4), timeout=WAIT_S))
    assert server.served()["bytes"] == table_bytes(dataset)
    everything = [first for each in ranks for first in each]
    assert len(set(everything)) == len(everything)


def epoch_of_rank(url: str, folder: str, cache: str) -> tuple[list[int], int]:
    dataset = open_dataset(url, Path(folder), Cache(cache))
    with DataLoader(dataset, 8, SHUFFLE, tail="drop") as loader:
        got = firsts(loader)
        return got, loader.stats().cache.misses


def test_processes_of_a_machine_fetch_each_byte_once(server: Server, tmp_path: Path) -> None:
    dataset = open_dataset(server.url, tmp_path, None)
    server.served()
    ranks = fast_ranks(
        epoch_of_rank,
        2,
        args=(server.url, str(tmp_path), str(tmp_path / "cache")),
        backend=None,
        start_method="forkserver",
    )
    assert server.served()["bytes"] == table_bytes(dataset)
    assert sum(misses for _, misses in ranks) == dataset.catalog.num_blocks
    everything = ranks[0][0] + ranks[1][0]
    assert len(set(everything)) == len(everything)


def test_half_a_cache_saves_half_of_the_requests(server: Server, tmp_path: Path) -> None:
    limit = NUM_SHARDS * PER_SHARD * LENGTH * 4 // 2
    dataset = open_dataset(server.url, tmp_path, Cache(tmp_path / "cache", limit=limit))
    with DataLoader(dataset, 32, SHUFFLE) as loader:
        for _ in range(3):  # a look ahead of three windows belongs to the next epoch
            firsts(loader)
        before = loader.stats().cache
        server.served()
        for _ in range(6):  # what is read ahead at either end is a small part of it
            firsts(loader)
        after = loader.stats().cache
        fetched = server.served()["bytes"]
    # One that dropped what was used longest ago would fetch some 0.85 of it.
    assert fetched <= 0.57 * 6 * table_bytes(dataset)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    assert hits >= 0.43 * (hits + misses)
    held = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*-*") if path.is_file())
    assert held <= limit


def test_sources_of_a_mixture_share_their_cache(server: Server, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    one = open_dataset(server.url, tmp_path, cache, slice(0, 2))
    two = open_dataset(server.url, tmp_path, cache, slice(2, 4))
    server.served()
    with DataLoader(Mixture([one, two]), 32, SHUFFLE) as loader:
        first = firsts(loader)
        assert server.served()["bytes"] == table_bytes(one) + table_bytes(two)
        assert sorted(firsts(loader)) == sorted(first)
        assert loader.stats().cache.hits > 0
    assert server.served()["bytes"] == 0


@pytest.mark.parametrize("kind", ["full", "blocks", "none"])
def test_other_orders_are_cached_too(server: Server, tmp_path: Path, kind: Any) -> None:
    dataset = open_dataset(server.url, tmp_path, Cache(tmp_path / "cache"), slice(0, 1))
    with DataLoader(dataset, 32, Shuffle(kind)) as loader:
        first = sorted(firsts(loader))
        server.served()
        assert sorted(firsts(loader)) == first
        asked = server.served()["bytes"]
    assert asked == 0 or kind == "full"  # samples of 1 kB are too small for files of their own


def test_local_shards_are_not_cached(shards: Path, tmp_path: Path) -> None:
    dataset = ShardedDataset(
        str(shards / "*.bin"),
        format="tokens",
        dtype="uint32",
        length=LENGTH,
        catalog=str(tmp_path / "x.catalog"),
        cache=Cache(tmp_path / "cache"),
    )
    with DataLoader(dataset, 32, shuffle=True) as loader:
        assert len(firsts(loader)) == len(dataset)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_used_stops_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    dataset = open_dataset(server.url, tmp_path, Cache(tmp_path / "file" / "cache"))
    with (
        DataLoader(dataset, 32, SHUFFLE) as loader,
        pytest.warns(RuntimeWarning, match="Not a directory"),
    ):
        assert len(firsts(loader)) == len(dataset)


def test_ranks_of_a_machine_read_through_one_broker_and_go_on_when_it_ends(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(tmp_path))
    dataset = open_dataset(server.url, tmp_path, None)

    def rank(number: int) -> DataLoader:
        place = Topology(number, 2, number, 2)
        return DataLoader(dataset, 8, SHUFFLE, topology=place, tail="drop")

    def brokers() -> int:
        return sum(thread.name == "prefetch-broker" for thread in threading.enumerate())

    with rank(0) as first, rank(1) as second:
        one, two = iter(first), iter(second)
        got = [int(next(one)["tokens"][0, 0])]
        assert brokers() == 1
        other = [int(t) for t in next(two)["tokens"][:, 0]]
        assert brokers() == 1
        first.close()
        other += [int(t) for batch in two for t in batch["tokens"][:, 0]]
    assert len(other) == len(set(other)) == NUM_SHARDS * (PER_SHARD - 1) // 16 * 8
    assert got[0] not in other
    assert brokers() == 0


def test_the_folder_of_a_cache_may_be_a_url_of_this_machine(tmp_path: Path) -> None:
    assert Cache(f"file://{tmp_path}/x").folder == Cache(tmp_path / "x").folder == str(tmp_path / "x")
