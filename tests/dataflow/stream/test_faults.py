"""Remote reads over real HTTP while the server fails: what is asked again, and that every sample arrives."""

from __future__ import annotations

import gc
import http.server
import shutil
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from http_kit import slowstore

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from dataflow.tools.cli import main
from prefetch.counts import ReadStats
from prefetch.errors import ReaderClosedError
from prefetch.retries import RetryPolicy
from prefetch.store.ranges import Awaited
from prefetch.store.reader import StoreReader
from sharding.blocks import Shard
from sharding.errors import ShardChangedError, ShardReadError

pytest.importorskip("aiohttp")

CONTENT = np.random.default_rng(0).bytes(100_000)
WAIT_S = 20.0
QUICK = RetryPolicy(base_s=0.001, stall_s=WAIT_S, least_stall_s=WAIT_S, deadline_s=WAIT_S)
HASTY = RetryPolicy(base_s=0.001, stall_s=0.1, deadline_s=WAIT_S)
"""For stalls that are to be noticed; a busy machine may stall, too, so no counts are exact under it."""

Answer = Callable[["Handler", int, int], None]
"""Answers a request for the bytes [start, end)."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Gives each request to the next answer of the script; then answers rightly."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body in two writes would wait 40 ms for each other
    server: ScriptedServer

    def do_GET(self) -> None:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        start, end = int(first), int(last) + 1
        with self.server.lock:
            self.server.asked.append((start, end))
            answer = self.server.script.pop(0) if self.server.script else whole
        answer(self, start, end)

    def head(self, start: int, end: int, etag: str = "one") -> None:
        self.send_response(206)
        self.send_header("ETag", etag)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()

    def send(self, start: int, end: int) -> None:
        self.wfile.write(CONTENT[start:end])
        self.wfile.flush()

    def hang_up(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.wfile = self.rfile = open("/dev/null", "r+b", buffering=0)  # noqa: SIM115 - closed by the base class

    def log_message(self, *_: Any) -> None:
        pass


class ScriptedServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()  # guards both
        self.script: list[Answer] = []
        self.asked: list[tuple[int, int]] = []

    def shard(self, version: str = "etag:one") -> Shard:
        return Shard(f"http://127.0.0.1:{self.server_port}/x.bin", len(CONTENT), version)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def whole(handler: Handler, start: int, end: int) -> None:
    handler.head(start, end)
    handler.send(start, end)


def last(handler: Handler, start: int, end: int) -> None:
    """As `whole`; the connection is closed after it."""
    whole(handler, start, end)
    handler.close_connection = True


def status(code: int, **headers: str) -> Answer:
    def answer(handler: Handler, start: int, end: int) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    return answer


def cut_after(nbytes: int, etag: str = "one") -> Answer:
    """An orderly end of the connection, so that the client sees every byte that was sent."""

    def answer(handler: Handler, start: int, end: int) -> None:
        handler.head(start, end, etag)
        handler.send(start, start + nbytes)
        handler.close_connection = True

    return answer


def reset(handler: Handler, start: int, end: int) -> None:
    handler.hang_up()


def stall_after(nbytes: int, over: threading.Event, stalls: threading.Event | None = None) -> Answer:
    """Send some bytes, then nothing until `over`; `stalls` is set between."""

    def answer(handler: Handler, start: int, end: int) -> None:
        handler.head(start, end)
        handler.send(start, start + nbytes)
        if stalls:
            stalls.set()
        assert over.wait(WAIT_S)
        handler.close_connection = True

    return answer


def read(
    server: ScriptedServer, reader: StoreReader, offset: int = 10, nbytes: int = 50_000, **more: Any
) -> None:
    out = np.zeros(nbytes, np.uint8)
    reader.read_into(more.pop("shard", server.shard()), offset, out, **more)
    assert out.tobytes() == CONTENT[offset : offset + nbytes]


# ---- one read ----------------------------------------------------------------------------------------------


def test_a_read_without_faults_is_one_request(server: ScriptedServer) -> None:
    reader = StoreReader()
    read(server, reader)
    assert server.asked == [(10, 50_010)]
    assert reader.stats() == ReadStats()


def test_a_cut_body_is_continued_at_its_byte(server: ScriptedServer) -> None:
    server.script = [cut_after(30_000), cut_after(100)]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert server.asked == [(10, 50_010), (30_010, 50_010), (30_110, 50_010)]
    assert reader.stats() == ReadStats(retries=2, resumed=2)


@pytest.mark.parametrize("code", [429, 503])
def test_throttling_is_counted_and_waited_for_as_told(server: ScriptedServer, code: int) -> None:
    waits = list[float]()
    server.script = [status(code, Retry_After="7"), status(code)]
    reader = StoreReader(policy=QUICK, wait=lambda s: bool(waits.append(s)))
    read(server, reader)
    assert waits[0] == 7.0
    assert waits[1] < 1
    assert reader.stats() == ReadStats(retries=2, throttled=2)


def test_a_refused_connection_is_tried_again(server: ScriptedServer) -> None:
    server.script = [reset, reset, reset]
    reader = StoreReader(policy=QUICK)
    read(server, reader)
    assert reader.stats().retries >= 1  # aiohttp asks once again by itself


@pytest.mark.parametrize("nbytes", [0, 20_000])
def test_a_stalled_body_is_given_up_and_continued(server: ScriptedServer, nbytes: int) -> None:
    over = threading.Event()
    server.script = [stall_after(nbytes, over)]
    reader = StoreReader(policy=HASTY)
    read(server, reader)
    over.set()
    assert (10, 50_010) in server.asked
    assert (10 + nbytes, 50_010) in server.asked[1:]
    assert reader.stats().timeouts >= 1
    assert (reader.stats().resumed > 0) == (nbytes > 0)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(401, "permission denied"), (403, "permission denied"), (404, "no such file"), (416, "416")],
)
def test_what_cannot_get_better_is_asked_once(server: ScriptedServer, code: int, reason: str) -> None:
    server.script = [status(code)]
    with pytest.raises(ShardReadError, match=reason):
        read(server, StoreReader())
    assert len(server.asked) == 1


def test_a_body_is_never_continued_from_another_version(server: ScriptedServer) -> None:
    server.script = [cut_after(30_000), cut_after(0, etag="two")]
    with pytest.raises(ShardChangedError, match="its etag is two; it was one"):
        read(server, StoreReader(policy=QUICK))


def test_an_object_of_another_size_is_refused(server: ScriptedServer) -> None:
    shard = Shard(server.shard().url, len(CONTENT) + 1, "etag:one")
    with pytest.raises(ShardChangedError, match=f"its size is {len(CONTENT)}"):
        read(server, StoreReader(), shard=shard)


def test_a_server_that_ignores_ranges_is_named_with_the_cure(server: ScriptedServer) -> None:
    server.script = [status(200)]
    with pytest.raises(ShardReadError, match="the server gives no byte ranges; put 'simplecache::'"):
        read(server, StoreReader())


def test_a_large_range_is_asked_in_parts_and_each_is_continued(server: ScriptedServer) -> None:
    server.script = [cut_after(100)] * 3
    reader = StoreReader(policy=QUICK, part_bytes=20_000)
    read(server, reader)
    assert sorted(server.asked[:3]) == [(10, 20_010), (20_010, 40_010), (40_010, 50_010)]
    assert sorted(server.asked[3:]) == [(110, 20_010), (20_110, 40_010), (40_110, 50_010)]
    assert reader.stats() == ReadStats(retries=1, resumed=3)


def test_closing_ends_a_read_that_waits_for_bytes(server: ScriptedServer) -> None:
    over, stalls = threading.Event(), threading.Event()
    server.script = [stall_after(20_000, over, stalls)]
    reader = StoreReader(policy=QUICK)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, server, reader)
        assert stalls.wait(WAIT_S)
        reader.close()
        with pytest.raises(ReaderClosedError):
            reading.result(WAIT_S / 2)  # before its own time-out
        over.set()
    assert len(server.asked) == 1


# ---- second requests ---------------------------------------------------------------------------------------


def experienced(
    server: ScriptedServer,
    policy: RetryPolicy = QUICK,
    share: float = 1.0,
    now: Callable[[], float] = time.monotonic,
) -> StoreReader:
    """A reader that knows how long reads take."""
    reader = StoreReader(policy=policy, hedge_share=share, now=now)
    for _ in range(20):
        read(server, reader)
    server.asked.clear()
    return reader


def awaited() -> Awaited:
    signal: Awaited = Future()
    signal.set_result(None)
    return signal


class StandingClock:
    """The real time; once it is watched, it stands still until the first bytes are in `out`."""

    def __init__(self) -> None:
        self.out: Any = None
        self.time_s = 0.0

    def __call__(self) -> float:
        if self.out is None or self.out[:20_000].tobytes() == CONTENT[10:20_010]:
            self.time_s = time.monotonic()
        return self.time_s


def test_a_late_read_that_is_waited_for_is_asked_twice_and_the_first_answer_counts(
    server: ScriptedServer,
) -> None:
    clock, over, out = StandingClock(), threading.Event(), np.zeros(50_000, np.uint8)
    reader = experienced(server, now=clock)
    server.script = [stall_after(20_000, over)]
    clock.out = out
    reader.read_into(server.shard(), 10, out, awaited=awaited())
    over.set()
    assert out.tobytes() == CONTENT[10:50_010]
    assert server.asked == [(10, 50_010), (20_010, 50_010)]
    assert reader.stats() == ReadStats(hedges=1, hedges_won=1, hedge_bytes=30_000)


def test_a_read_becomes_waited_for_while_it_is_late(server: ScriptedServer) -> None:
    reader, over, stalls = experienced(server), threading.Event(), threading.Event()
    server.script = [stall_after(20_000, over, stalls)]
    signal: Awaited = Future()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, server, reader, awaited=signal)
        assert stalls.wait(WAIT_S)
        signal.set_result(None)
        reading.result(WAIT_S)
        over.set()
    assert reader.stats().hedges_won == 1


@pytest.mark.parametrize(("share", "signal"), [(0.0, awaited()), (1.0, Future()), (1.0, None)])
def test_without_budget_or_waiting_there_is_no_second_request(
    server: ScriptedServer, share: float, signal: Awaited | None
) -> None:
    reader, over = experienced(server, HASTY, share), threading.Event()
    server.script = [stall_after(20_000, over)]
    read(server, reader, awaited=signal)
    over.set()
    assert reader.stats().hedges == 0
    assert reader.stats().timeouts >= 1


class PatientPolicy(RetryPolicy):
    """A read that nobody waits for is given up after 20 s, however quick others are."""

    def stall_timeout_s(self, stalls: int, idle_s: float, long_s: float | None = None) -> float:
        return WAIT_S


@pytest.mark.parametrize("hedged", [False, True])
def test_a_silent_read_that_is_waited_for_is_soon_asked_anew_where_no_second_request_helps(
    server: ScriptedServer, hedged: bool
) -> None:
    policy = PatientPolicy(base_s=0.001, least_stall_s=0.1)
    reader, over = experienced(server, policy, share=float(hedged)), threading.Event()
    server.script = [stall_after(20_000, over), *[status(503)] * hedged]
    began = time.monotonic()
    read(server, reader, awaited=awaited())
    assert time.monotonic() - began < WAIT_S / 2
    over.set()
    assert server.asked[:2] == [(10, 50_010), (20_010, 50_010)]
    assert reader.stats().resumed >= 1
    assert (reader.stats().hedges > 0) == hedged


def test_a_read_that_crawls_while_training_waits_is_asked_anew(server: ScriptedServer) -> None:
    def crawl(handler: Handler, start: int, end: int) -> None:
        handler.head(start, end)
        handler.send(start, start + 20)
        for at in range(start + 20, end):
            if over.wait(0.01):  # far more often than a silence is noticed
                break
            handler.send(at, at + 1)
        handler.close_connection = True

    over, server.script = threading.Event(), [crawl]
    # Nothing is known of how long reads take, and no second request is in the budget.
    reader = StoreReader(policy=RetryPolicy(base_s=0.001, stall_s=0.1, least_stall_s=0.1), hedge_share=0.0)
    read(server, reader, awaited=awaited())
    over.set()
    assert len(server.asked) == 2
    assert server.asked[1][0] > 30
    assert reader.stats().resumed == 1


def test_a_second_request_that_fails_leaves_the_first_alone(server: ScriptedServer) -> None:
    reader, refused = experienced(server), threading.Event()

    def slow(handler: Handler, start: int, end: int) -> None:
        handler.head(start, end)
        handler.send(start, start + 1000)
        assert refused.wait(WAIT_S)
        handler.send(start + 1000, end)

    def refuse(handler: Handler, start: int, end: int) -> None:
        status(503)(handler, start, end)
        refused.set()

    server.script = [slow, refuse]
    read(server, reader, awaited=awaited())
    assert reader.stats() == ReadStats(hedges=1, hedge_bytes=49_000)


@pytest.mark.parametrize("fault", ["cut", "503", "reset", "stall", "late", "late, no budget"])
def test_a_read_that_met_a_fault_leaves_no_cycle_that_keeps_its_memory(
    server: ScriptedServer, fault: str
) -> None:
    # Windows of 64 MiB would stay until a garbage collection.
    quick_to_stall = RetryPolicy(base_s=0.001, stall_s=0.1, least_stall_s=0.1)
    reader = experienced(server, quick_to_stall, share=0.0 if "no budget" in fault else 1.0)
    over, signal = threading.Event(), awaited() if "late" in fault else None
    stalls = stall_after(20_000, over)
    answers: dict[str, Answer] = {"cut": cut_after(10_000), "503": status(503), "reset": reset}
    gc.disable()
    try:
        out = np.zeros(50_000, np.uint8)
        memory = weakref.ref(out)
        server.script = [answers.get(fault, stalls)] * (1 if fault in ("stall", "late") else 2)
        reader.read_into(server.shard(), 10, out, awaited=signal)
        over.set()
        del out
        assert memory() is None
    finally:
        gc.enable()


# ---- whole epochs ------------------------------------------------------------------------------------------

NUM_SAMPLES, SAMPLE_BYTES = 2000, 1000
RATES = {"error-rate": 0.05, "reset-rate": 0.02, "stall-rate": 0.01, "stall-s": 30, "corrupt-rate": 0.01}
FAULTS = [f"--{name}={value}" for name, value in RATES.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of numbered samples, beside them "x.catalog" with checksums: some 250 blocks."""
    folder = tmp_path_factory.mktemp("faulty")
    noise = np.random.default_rng(1)
    with ShardWriter(str(folder / "x-{:02d}.tar"), max_count=250) as writer:
        for i in range(NUM_SAMPLES):
            writer.write({"__key__": f"{i:06d}", "bin": i.to_bytes(4, "big") + noise.bytes(SAMPLE_BYTES)})
    command = ["index", str(folder), "--output", str(folder / "x.catalog"), "--block-bytes", "16KiB"]
    assert CliRunner().invoke(main, [*command, "--checksum"]).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[bytes]:
    dataset = ShardedDataset(str(folder / "x.catalog"))
    return [sample["bin"].numpy().tobytes() for sample in dataset.__getitems__(range(NUM_SAMPLES))]


IMPATIENT = RetryPolicy(base_s=0.01, stall_s=0.2, deadline_s=WAIT_S)
"""Waits milliseconds where a loader would wait seconds."""


def test_under_all_faults_every_sample_arrives_once_and_bit_exact(folder: Path, samples: list[bytes]) -> None:
    with slowstore(folder, *FAULTS) as url:
        dataset = ShardedDataset(f"{url}/x.catalog", retry=IMPATIENT)
        with DataLoader(dataset, 50, Shuffle("window", 64)) as loader:
            epochs = [
                [value.tobytes() for batch in loader for value in batch["bin"].numpy()] for _ in range(2)
            ]
            faults = loader.stats().faults
    assert [sorted(got) for got in epochs] == [sorted(samples)] * 2
    assert faults.throttled > 5
    assert faults.checksum_failures > 0
    assert faults.timeouts + faults.hedges > 0
    assert faults.retries >= faults.throttled
    assert faults.hedge_bytes <= 0.02 * loader.stats().read_bytes


def test_a_block_that_is_always_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    for path in [*folder.glob("*.tar"), folder / "x.catalog"]:
        shutil.copy(path, tmp_path)
    damaged = tmp_path / "x-03.tar"
    data = bytearray(damaged.read_bytes())
    data[700] ^= 1
    damaged.write_bytes(data)
    with (
        slowstore(tmp_path) as url,
        DataLoader(ShardedDataset(f"{url}/x.catalog", retry=IMPATIENT), 50, shuffle=True) as loader,
    ):
        with pytest.raises(ShardReadError, match=r"x-03\.tar, byte 0: bytes 0 to \d+ have checksum"):
            list(loader)
        assert loader.stats().faults.checksum_failures == 2  # a busy machine may stall, too


def test_local_blocks_are_held_to_their_checksums(folder: Path, samples: list[bytes]) -> None:
    with DataLoader(ShardedDataset(str(folder / "x.catalog")), 50) as loader:
        got = [value.tobytes() for batch in loader for value in batch["bin"].numpy()]
        assert loader.stats().read_bytes > NUM_SAMPLES * SAMPLE_BYTES  # read, not mapped
    assert sorted(got) == sorted(samples)


def test_opening_gets_through_a_store_that_fails_often(folder: Path, tmp_path: Path) -> None:
    with slowstore(folder, "--error-rate", "0.2") as url:
        shards = [f"{url}/{path.name}" for path in sorted(folder.glob("*.tar"))]
        dataset = ShardedDataset(shards, catalog=str(tmp_path / "new.catalog"), retry=IMPATIENT)
        assert len(dataset) == len(ShardedDataset(f"{url}/x.catalog", retry=IMPATIENT)) == NUM_SAMPLES


def over_http(server: ScriptedServer, folder: Path, retry: RetryPolicy) -> ShardedDataset:
    """99 samples of the scripted server, indexed without asking it."""
    path = folder / "x.bin"
    path.write_bytes(CONTENT)
    local = ShardedDataset(
        str(path), format="tokens", dtype="uint8", length=1000, catalog=str(folder / "l.catalog")
    )
    rows = local.catalog.rows.set_column(0, "url", pa.array([server.shard().url], pa.large_string()))
    rows = rows.set_column(2, "version", pa.array(["etag:one"], pa.large_string()))
    return ShardedDataset(server.shard().url, catalog=replace(local.catalog, rows=rows), retry=retry)


def delivered(loader: DataLoader) -> bytes:
    return b"".join(batch["tokens"].numpy()[:, :1000].astype(np.uint8).tobytes() for batch in loader)


HALF_A_SECOND = RetryPolicy(base_s=0.001, cap_s=0.01, deadline_s=0.5)


def test_a_store_that_is_down_is_one_error_and_the_loader_goes_on_when_it_is_back(
    server: ScriptedServer, tmp_path: Path
) -> None:
    with DataLoader(over_http(server, tmp_path, HALF_A_SECOND), 10, Shuffle("none")) as loader:
        server.script = [status(503)] * 100_000
        with pytest.raises(
            ShardReadError, match=r"were given up after \d+ attempts in .* HTTP 503"
        ) as caught:
            list(loader)
        assert caught.value.shard == server.shard().url
        server.script = []
        assert delivered(loader) == CONTENT[:99_000]


def test_a_store_that_is_back_within_the_deadline_was_never_missed(
    server: ScriptedServer, tmp_path: Path
) -> None:
    policy = RetryPolicy(base_s=0.001, cap_s=0.01, deadline_s=WAIT_S)
    server.script = [answer for _ in range(20) for answer in (reset, status(503), status(500))]
    with DataLoader(over_http(server, tmp_path, policy), 10, Shuffle("none")) as loader:
        assert delivered(loader) == CONTENT[:99_000]
        assert loader.stats().faults.retries > 0


def test_a_host_that_does_not_answer_any_more_is_one_error(server: ScriptedServer, tmp_path: Path) -> None:
    dataset = over_http(server, tmp_path, HALF_A_SECOND)
    server.script = [last]
    assert dataset[0]["tokens"].numel() == 1001
    server.socket.close()  # connections are refused from now on
    with (
        DataLoader(dataset, 10, True, timeout=WAIT_S) as loader,
        pytest.raises(
            ShardReadError, match=r"given up after \d+ attempts in .*no byte came within the deadline"
        ),
    ):
        list(loader)


def test_a_host_that_never_answered_is_given_up_sooner(server: ScriptedServer, tmp_path: Path) -> None:
    policy = RetryPolicy(base_s=0.001, connect_s=0.05, deadline_s=WAIT_S)
    dataset = over_http(server, tmp_path, policy)
    server.socket.close()
    began = time.monotonic()
    with (
        DataLoader(dataset, 10) as loader,
        pytest.raises(ShardReadError, match="this host never answered; is it the right one"),
    ):
        list(loader)
    assert time.monotonic() - began < WAIT_S / 2
