"""Opening a dataset over HTTP while the server is silent, fails, or gives no ranges; and Ctrl-C meanwhile."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_kit import Asked, RangeServer, serving
from servers_kit import free_port

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from prefetch.retries import RetryPolicy
from sharding.catalog.storage import exists, open_url
from sharding.errors import ShardReadError

ClientTimeout = pytest.importorskip("aiohttp").ClientTimeout

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

    def __init__(self, folder: Path, handler: type[PlainHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.folder = str(folder)
        self.lock = threading.Lock()  # guards both
        self.script: list[int] = []
        self.got: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Clients that were refused hang up: nothing to say."""


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


class NoBucketHandler(PlainHandler):
    """As S3 of a bucket that is not there."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = (
            b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
        )
        self.send_response(404)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving_plainly(folder: Path, handler: type[PlainHandler] = PlainHandler) -> Iterator[PlainServer]:
    with PlainServer(folder, handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def plain(folder: Path) -> Iterator[PlainServer]:
    with serving_plainly(folder) as server:
        yield server


def test_what_the_error_of_a_server_without_ranges_says_is_a_cure(plain: PlainServer, tmp_path: Path) -> None:
    names = f"{plain.url}/x-{{00..03}}.tar"
    # The beginning of a file is a range that such a server gives; what lies beyond is not.
    with (
        pytest.raises(ShardReadError, match="gives no byte ranges; put 'simplecache::'"),
        DataLoader(ShardedDataset(names, block_bytes=16384), 50, shuffle=True) as loader,
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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of each kind of index, larger than what is read of it at a time."""
    folder, noise = tmp_path_factory.mktemp("large"), np.random.default_rng(2)
    with ShardWriter(str(folder / "x-{:02d}.tar"), max_bytes=10 << 20) as writer:
        for i in range(300):
            writer.write({"__key__": f"{i:06d}", "bin": noise.bytes(8000)})
    table = pa.table({"values": noise.random(300_000)})
    pq.write_table(table, folder / "x.parquet", row_group_size=50_000)
    with pa.ipc.new_file(str(folder / "x.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=50_000)
    return folder


SHARDS = ["x-00.tar", "x.parquet", "x.arrow"]


@pytest.mark.parametrize("name", SHARDS)
def test_indexing_says_what_helps_where_a_server_gives_no_ranges(large: Path, name: str) -> None:
    with (
        serving_plainly(large) as server,
        pytest.raises(ShardReadError, match="the server gives no byte ranges; put 'simplecache::' before"),
    ):
        ShardedDataset(f"{server.url}/{name}")


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("times", [3, 100])
def test_another_range_than_asked_is_asked_again_while_indexing(
    large: Path, tmp_path: Path, name: str, times: int
) -> None:
    wrong = iter(range(times))

    def said(asked: Asked, size: int) -> str:
        moved = 512 if next(wrong, None) is not None else 0
        return f"bytes {asked.start + moved}-{asked.end - 1 + moved}/{size}"

    catalog, quick = str(tmp_path / "x.catalog"), RetryPolicy(base_s=0.001)
    with serving(RangeServer(large)) as server:
        server.content_range = said
        url = f"{server.url}/{name}"
        if times == 3:
            assert len(ShardedDataset(url, catalog=catalog, retry=quick)) in (300, 300_000)
        else:
            with pytest.raises(ShardReadError, match=r"6 answers in a row .*Content-Range is 'bytes \d+-"):
                ShardedDataset(url, catalog=catalog, retry=quick)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its session to be collected
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("source", ["x-{0..3}.tar", "x-*.tar", "dir/", "x.catalog"])
def test_a_missing_bucket_is_called_so(source: str) -> None:
    pytest.importorskip("s3fs")
    with serving_plainly(Path("/nonexistent"), handler=NoBucketHandler) as server:
        options = {"key": "k", "secret": "s", "endpoint_url": server.url}
        with pytest.raises(ShardReadError, match="no such bucket"):
            ShardedDataset(f"s3://nosuch/{source}", storage_options=options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("host", ["127.0.0.1", "nosuch.invalid"])
def test_a_mistyped_address_is_an_error_within_5_s(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    resolve = socket.getaddrinfo

    def quick(name: str, *arguments: Any, **more: Any) -> Any:
        """A resolver may take its time to find no server of names."""
        if name == "nosuch.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(name, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", quick)
    began = time.monotonic()
    with pytest.raises(ShardReadError, match="Cannot connect to host") as caught:
        ShardedDataset(f"http://{host}:{free_port()}/x-{{0..99}}.tar")
    assert time.monotonic() - began < 5.0
    assert "this host never answered; is it the right one?" in caught.value.__notes__[0]


def test_small_requests_have_time_outs_of_their_own_unless_the_user_has() -> None:
    filesystem, _ = open_url("http://127.0.0.1/x.tar")
    timeout = filesystem.client_kwargs["timeout"]
    assert (timeout.sock_connect, timeout.sock_read, timeout.total) == (12.0, 12.0, 600.0)
    own = {"timeout": ClientTimeout(total=7)}
    filesystem, _ = open_url("http://127.0.0.1/x.tar", {"client_kwargs": own})
    assert filesystem.client_kwargs == own


@pytest.mark.one_in(2)
@pytest.mark.parametrize("limit", ["sock_read", "total"])
def test_a_silent_request_is_given_up_and_asked_again(folder: Path, tmp_path: Path, limit: str) -> None:
    patience = {"client_kwargs": {"timeout": ClientTimeout(**{limit: 0.2})}}
    over, silent = threading.Event(), threading.Event()

    def may_answer(asked: Asked) -> None:
        if asked.method == "GET" and not silent.is_set():
            silent.set()
            over.wait(WAIT_S)

    with serving(RangeServer(folder)) as server:
        server.may_answer = may_answer
        began = time.monotonic()
        dataset = ShardedDataset(
            f"{server.url}/x-{{00..03}}.tar", catalog=str(tmp_path / "x.catalog"), storage_options=patience
        )
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


class SilentHandler(PlainHandler):
    """Hangs up without an answer."""

    def _refused(self) -> bool:
        self.close_connection = True
        return True


def test_a_server_that_hangs_up_is_not_a_missing_file(folder: Path) -> None:
    with (
        serving_plainly(folder, handler=SilentHandler) as server,
        pytest.raises(ShardReadError, match="cannot be read: ServerDisconnectedError"),
    ):
        ShardedDataset(f"{server.url}/x-00.tar", retry=RetryPolicy(max_attempts=1))


def test_an_option_that_no_client_knows_is_not_a_missing_file(plain: PlainServer) -> None:
    with pytest.raises(
        ShardReadError, match=r"cannot be read: TypeError: .*unexpected keyword argument 'nosuch'"
    ):
        ShardedDataset(f"{plain.url}/x-00.tar", storage_options={"nosuch": 1})
