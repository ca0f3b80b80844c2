"""What an epoch asks of a store, counted at the server: the plan's requests and bytes, few connections."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_kit import slowstore

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from prefetch.store.reader import StoreReader
from sharding.catalog.storage import open_url, shard_info, shard_of

pytest.importorskip("aiohttp")

NUM = 1000
NARROW, LIMIT = Shuffle("window", window_blocks=8), 4_000_000
"""So that what is read ahead is not a whole epoch of 5.6 MB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    with ShardWriter(str(folder / "x-{:02d}.tar"), max_bytes=1 << 20) as writer:
        for i in range(NUM):
            writer.write({"__key__": f"{i:05d}", "bin": rng.bytes(4096), "cls": i})
    return folder


def counted(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/__stats?reset=1") as answer:
        return dict(json.load(answer))


Read = tuple[str, int, int]
"""The shard's URL, the first byte, the byte behind the last."""


def epoch_of(
    url: str,
    catalog: Path,
    shuffle: Shuffle,
    monkeypatch: pytest.MonkeyPatch,
    *,
    epochs: int = 1,
    memory_limit: int = LIMIT,
) -> tuple[dict[str, Any], list[Read], ShardedDataset]:
    """The server's counts after some epochs, and the reads planned: the loader runs ahead into later ones."""
    names = sorted(path.name for path in catalog.parent.glob("*.tar"))
    ShardedDataset([f"{url}/{name}" for name in names], catalog=str(catalog), block_bytes=100_000)
    planned: list[Read] = []
    read_into = StoreReader.read_into

    def counting(self: StoreReader, shard: Any, offset: int, out: Any, **more: Any) -> None:
        planned.append((shard.url, offset, offset + out.nbytes))
        read_into(self, shard, offset, out, **more)

    monkeypatch.setattr(StoreReader, "read_into", counting)
    counted(url)
    dataset = ShardedDataset(str(catalog), decode={"bin": None, "cls": "int"})
    assert counted(url)["requests"] <= 1 + len(names)  # whether each shard is still the one indexed
    with DataLoader(dataset, 50, shuffle=shuffle, memory_limit=memory_limit) as loader:
        for _ in range(epochs):
            labels = np.concatenate([batch["cls"].numpy() for batch in loader])
            assert sorted(labels.tolist()) == list(range(NUM))
    return counted(url), planned, dataset


def nbytes(reads: list[Read]) -> int:
    return sum(end - begin for _, begin, end in reads)


def test_an_epoch_asks_for_each_block_once_and_for_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slowstore(folder) as url:
        seen, planned, dataset = epoch_of(url, folder / "window.catalog", NARROW, monkeypatch)
    blocks, urls = dataset.catalog.blocks, dataset.catalog.urls
    times = [
        sum(urls[shard] == url and begin <= offset < end for url, begin, end in planned)
        for shard, offset in zip(blocks.shard, blocks.offset, strict=True)
    ]
    assert min(times) >= 1
    assert nbytes(planned) == sum(times * blocks.length)
    assert nbytes(planned) <= blocks.length.sum() + LIMIT  # an epoch, and what was read ahead
    assert len(planned) <= sum(times)
    assert seen["requests"] <= 1.05 * len(planned)
    assert seen["bytes"] <= 1.05 * nbytes(planned)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_only_epoch_reads_at_most_an_eighth_more_for_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    with slowstore(folder) as url:
        seen, _, dataset = epoch_of(
            url, folder / "only.catalog", NARROW, monkeypatch, epochs=epochs, memory_limit=100_000_000
        )
    orders = [dataset.windows(epoch, NARROW.resolved(), seed=0) for epoch in range(epochs + 1)]
    windows = [
        int(dataset.catalog.blocks.length[order.window_blocks(number)].sum())  # some share a block
        for order in orders
        for number in range(order.num_windows)
    ]
    ahead = (
        sum(windows[: orders[0].num_windows]) // 8 if epochs == 1 else sum(windows[-orders[-1].num_windows :])
    )
    assert seen["bytes"] <= 1.02 * sum(windows[: -orders[-1].num_windows]) + ahead  # heads count, too


def test_in_file_order_neighbouring_blocks_share_a_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slowstore(folder) as url:
        seen, planned, dataset = epoch_of(url, folder / "order.catalog", Shuffle("none"), monkeypatch)
    assert seen["requests"] < 0.6 * len(dataset.catalog.blocks.length)
    assert seen["bytes"] <= 1.05 * nbytes(planned)


def test_a_full_shuffle_joins_the_values_of_a_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slowstore(folder) as url:
        seen, planned, _ = epoch_of(url, folder / "full.catalog", Shuffle("full"), monkeypatch)
    assert seen["requests"] <= 1.05 * len(planned)
    assert nbytes(planned) / len(planned) > 4096 + 512  # the label lies 512 bytes behind the value


def test_connections_are_reused_by_all_threads_of_a_process(folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with slowstore(folder) as url:
        name = f"{url}/{sorted(path.name for path in folder.glob('*.tar'))[0]}"
        shard, reader = shard_of(name, shard_info(name, *open_url(name))), StoreReader()
        counted(url)

        def read(at: int) -> None:
            reader.read_into(shard, at, np.zeros(5000, np.uint8))

        for at in range(4):  # each in a thread of its own
            with ThreadPoolExecutor(1) as thread:
                thread.submit(read, at).result(30)
        seen = counted(url)
    assert seen["requests"] == 4
    assert seen["connections"] <= 2  # one of them asks for the counts


def test_a_large_range_is_read_in_parts_at_the_same_time(folder: Path) -> None:
    content = np.random.default_rng(2).bytes(16 << 20)
    (folder / "large.bin").write_bytes(content)
    with slowstore(folder, "--latency-ms", "50") as url:
        name = f"{url}/large.bin"
        shard, out = shard_of(name, shard_info(name, *open_url(name))), np.zeros(len(content), np.uint8)
        counted(url)
        StoreReader().read_into(shard, 0, out)
        seen = counted(url)
    assert out.tobytes() == content
    assert seen["requests"] == 4
    assert seen["bytes"] == len(content)
    assert seen["concurrent_max"] == 4
