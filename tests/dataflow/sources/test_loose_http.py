"""Loose files over HTTP, which has no listing: lists, manifests and pages name them, many are in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_kit import plain
from http_kit import Asked, RangeServer, serving

from dataflow import Cache, DataLoader, ShardedDataset, ShardReadError
from dataflow.staging.reading import ReadWindow
from prefetch.memory.arena import Arena

pytest.importorskip("aiohttp")

FILES = {f"{name}/{n} ü%.jpg": f"{name} {n}".encode() * (1 + n % 2) for name in ("a", "b") for n in range(8)}
AT_ONCE = 8
WATCHDOG_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with serving(RangeServer(tmp_path)) as server:
        yield server


def opened(source: Any, **more: Any) -> ShardedDataset[dict[str, Any]]:
    return ShardedDataset(source, **{"decode": {"jpg": None}, **more})


def samples(dataset: ShardedDataset[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [{name: plain(value) for name, value in dataset[i].items()} for i in range(len(dataset))]
    return [{**row, "jpg": bytes(row["jpg"])} for row in rows]


def table(server: RangeServer) -> str:
    text = "file_name,n\n" + "".join(f"{name},{n}\n" for n, name in enumerate(FILES))
    (server.folder / "labels.csv").write_text(text)
    return f"{server.url}/labels.csv"


def answers_when_many_wait(server: RangeServer, method: str) -> None:
    """Answer requests by a method only when `AT_ONCE` of them are waiting."""
    barrier = threading.Barrier(AT_ONCE, timeout=WATCHDOG_S)

    def wait(asked: Asked) -> None:
        if asked.method == method and asked.name.endswith(".jpg"):
            barrier.wait()

    server.may_answer = wait


@pytest.mark.timeout(60)
def test_a_manifest_names_them_and_sizes_and_reads_are_asked_for_together(server: RangeServer) -> None:
    manifest = table(server)
    answers_when_many_wait(server, "HEAD")
    dataset = opened(f"{server.url}/", manifest=manifest)
    answers_when_many_wait(server, "GET")
    with DataLoader(dataset, batch_size=4, num_workers=0) as loader:
        batches = list(loader)
    assert [n for batch in batches for n in batch["n"].tolist()] == list(range(16))
    values = [bytes(row.numpy()) for batch in batches for row in batch["jpg"].rows()]
    assert values == list(FILES.values())


def test_a_list_and_a_page_name_them_too(server: RangeServer) -> None:
    urls = [f"{server.url}/{name.replace('%', '%25')}" for name in FILES]
    expected = [{"jpg": content} for content in FILES.values()]
    assert samples(opened(urls)) == expected
    assert samples(opened(f"{server.url}/a/{{0,1}} ü%25.jpg")) == expected[:2]
    server.has_pages = True
    local = ShardedDataset(server.folder, decode={"jpg": None})
    assert samples(opened(f"{server.url}/")) == samples(local)
    assert [row["jpg"] for row in samples(opened(f"{server.url}/", manifest=table(server)))] == [
        *FILES.values()
    ]


def test_a_server_without_pages_cannot_be_listed(server: RangeServer) -> None:
    for source in (f"{server.url}/", f"{server.url}/a/*.jpg"):
        with pytest.raises(ValueError, match=r"HTTP servers cannot be listed"):
            opened(source)


def test_files_that_are_not_there_are_named_and_counted(server: RangeServer) -> None:
    manifest = table(server)
    for number in (3, 5):
        (server.folder / f"a/{number} ü%.jpg").unlink()
    with pytest.raises(ShardReadError, match=r"a/3%20%C3%BC%25\.jpg: no such file") as caught:
        opened(f"{server.url}/", manifest=manifest)
    assert caught.value.__notes__ == ["so it is with 1 more of 16 files"]


def test_names_of_lists_end_in_their_ending(server: RangeServer) -> None:
    with pytest.raises(ValueError, match=r"must end in their names, as https://host/a\.jpg does"):
        opened([f"{server.url}/a/1.jpg?size=3"])


@pytest.mark.reads_here
def test_a_cache_keeps_them_for_the_next_run(server: RangeServer, tmp_path: Path) -> None:
    manifest = table(server)
    for _ in range(2):
        server.asked.clear()
        dataset = opened(f"{server.url}/", manifest=manifest, cache=Cache(tmp_path / "cache"))
        with DataLoader(dataset, batch_size=4) as loader:
            values = [bytes(row.numpy()) for batch in loader for row in batch["jpg"].rows()]
        assert values == [*FILES.values()]
    assert [asked for asked in server.asked if asked.method == "GET" and asked.name.endswith(".jpg")] == []


def test_small_files_of_this_machine_are_read_several_at_a_time(server: RangeServer) -> None:
    """Over a store each is a request of its own, so that many are in flight."""
    remote = opened(f"{server.url}/", manifest=table(server))
    numbers = np.arange(16)
    for dataset, expected in ((remote, 16), (ShardedDataset(server.folder, decode={"jpg": None}), 4)):
        window = ReadWindow(dataset.source(), Arena(limit_bytes=1 << 20), numbers, numbers)
        assert len(window.reads()) == expected
        window.close()
