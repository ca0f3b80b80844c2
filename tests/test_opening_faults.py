"""Opening a dataset over HTTP while the server is silent, fails, or gives no ranges; and Ctrl-C meanwhile."""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from http_kit import Asked, RangeServer, serving

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from prefetch.again import asking_pool
from prefetch.retries import StatusError
from sharding import storage
from sharding.errors import ShardReadError
from sharding.storage import exists

pytest.importorskip("aiohttp")

WAIT_S = 20.0
NUM_SAMPLES = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    noise = np.random.default_rng(1)
    with ShardWriter(str(folder / "x-{:02d}.tar"), max_count=100) as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"__key__": f"{i:06d}", "bin": noise.bytes(2000), "cls": i})
    return folder


class PlainServer(http.server.ThreadingHTTPServer):
    """As `python -m http.server`: no ranges, whatever is asked. It may have answers to give before."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), PlainHandler)
        self.folder = str(folder)
        self.lock = threading.Lock()  # guards both
        self.script: list[int] = []
        self.got: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class PlainHandler(http.server.SimpleHTTPRequestHandler):
    server: PlainServer

    def __init__(self, request: object, address: object, server: PlainServer) -> None:
        super().__init__(request, address, server, directory=server.folder)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        if not self._refused():
            super().do_HEAD()

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.got[self.path] += 1
        if not self._refused():
            super().do_GET()

    def _refused(self) -> bool:
        with self.server.lock:
            code = self.server.script.pop(0) if self.server.script else 200
        if code != 200:
            self.send_error(code)
        return code != 200

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def plain(folder: Path) -> Iterator[PlainServer]:
    with PlainServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_the_error_of_a_server_without_ranges_says_is_a_cure(plain: PlainServer, tmp_path: Path) -> None:
    names = f"{plain.url}/x-{{00..03}}.tar"
    # The beginning of a file is a range that such a server gives; what lies beyond is not.
    with (
        pytest.raises(ShardReadError, match="gives no byte ranges; put 'simplecache::'"),
        DataLoader(ShardedDataset(names, block_bytes=16384), 50) as loader,
    ):
        list(loader)
    plain.got.clear()
    dataset = ShardedDataset(
        f"simplecache::{names}",
        block_bytes=16384,
        storage_options={"simplecache": {"cache_storage": str(tmp_path / "copies")}},
    )
    with DataLoader(dataset, 50, Shuffle("window", 64), seed=1) as loader:
        got = [label for batch in loader for label in batch["cls"].tolist()]
    assert sorted(got) == list(range(NUM_SAMPLES))
    assert max(plain.got.values()) <= 6  # a copy for all threads, and not one each


@pytest.mark.parametrize("limit", ["_SILENCE_S", "_LONGEST_S"])
def test_a_silent_request_is_given_up_and_asked_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(storage, limit, 0.2)
    over, silent = threading.Event(), threading.Event()

    def may_answer(asked: Asked) -> None:
        if asked.method == "GET" and not silent.is_set():
            silent.set()
            over.wait(WAIT_S)

    with serving(RangeServer(folder)) as server:
        server.may_answer = may_answer
        began = time.monotonic()
        dataset = ShardedDataset(f"{server.url}/x-{{00..03}}.tar", catalog=str(tmp_path / "x.catalog"))
        waited = time.monotonic() - began
        over.set()
    assert silent.is_set()
    assert len(dataset) == NUM_SAMPLES
    assert waited < WAIT_S / 2


@pytest.mark.parametrize(("codes", "there"), [([], True), ([404, 404], False), ([403, 403], False)])
def test_a_server_says_whether_a_file_is_there(plain: PlainServer, codes: list[int], there: bool) -> None:
    plain.script = codes
    assert exists(f"{plain.url}/x-00.tar") is there


def test_a_server_that_fails_does_not_say_whether_a_file_is_there(plain: PlainServer) -> None:
    plain.script = [503, 503]
    with pytest.raises(ShardReadError, match="503"):
        exists(f"{plain.url}/x-00.tar")


def test_a_catalog_whose_server_fails_for_a_moment_is_used(plain: PlainServer, folder: Path) -> None:
    ShardedDataset(str(folder), catalog=str(folder / "y.catalog"))
    plain.script = [503, 503]
    # Made anew, it would have to be written, which this server refuses.
    dataset = ShardedDataset(f"{plain.url}/x-{{00..03}}.tar", catalog=f"{plain.url}/y.catalog")
    assert len(dataset) == NUM_SAMPLES


@pytest.mark.parametrize("outer", ["filecache", "blockcache", "cached"])
def test_a_chain_that_cannot_read_http_names_those_that_can(plain: PlainServer, outer: str) -> None:
    with pytest.raises(ValueError, match=r"use simplecache:: or .*Cache\(folder\)"):
        ShardedDataset(f"{outer}::{plain.url}/x-{{00..03}}.tar")
    assert not plain.got


def test_a_port_that_cannot_be_is_not_a_missing_file() -> None:
    with pytest.raises(ShardReadError, match="Port out of range"):
        ShardedDataset("http://127.0.0.1:99999/x.tar")


@pytest.mark.filterwarnings("ignore:a store fails")
def test_ctrl_c_ends_the_waits_of_all_who_ask() -> None:
    asked = threading.Event()

    def refused() -> None:
        asked.set()
        raise StatusError(503, "Slow Down", WAIT_S)

    began = time.monotonic()
    with suppress(KeyboardInterrupt), asking_pool(2, "asking") as (pool, again):
        waiting = pool.submit(again, refused)
        assert asked.wait(WAIT_S)
        raise KeyboardInterrupt
    assert isinstance(waiting.exception(), StatusError)
    assert time.monotonic() - began < WAIT_S / 2
