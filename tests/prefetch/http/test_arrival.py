"""Bodies that stand still in a hold: nothing is lost, nothing counts as silence, and they go on at once."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec.asyn
import numpy as np
import pytest
from forked_kit import exit_code_in_child
from numpy.typing import NDArray
from test_connections import (
    CONTENT,
    QUICK,
    WAIT_S,
    RawServer,
    head,
    read,
    serving,
    serving_tls,
    trusted_in_children,
)

from prefetch.control.pause import ReadPause
from prefetch.counts import ReadStats
from prefetch.errors import ReaderClosedError
from prefetch.http.arrival import INTERRUPTIBLE_BYTES, Arrival
from prefetch.http.connections import Destination
from prefetch.retries import RetryPolicy
from prefetch.store.reader import StoreReader
from sharding.blocks import Shard

pytest.importorskip("aiohttp")

SIZE = 100_000
FIRST = 30_000
"""Bytes that come before the hold."""


class Clock:
    """Stands still until it is set. Tells when somebody looks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = threading.Semaphore(0)

    def __call__(self) -> float:
        self.looks.release()
        return self.now_s


def ready_hold(**options: Any) -> ReadPause:
    """With enough batches ready; its holds do not end by themselves."""
    hold = ReadPause(**{"most_s": 1e6, **options})
    hold.watch(lambda: 9)
    return hold


@pytest.fixture
def server() -> Iterator[RawServer]:
    with serving() as server:
        yield server


# ---- through a server --------------------------------------------------------------------------------------


def loop_went_round(rounds: int = 3) -> None:
    """Wait until the event loop has taken from its sockets all that lies there, where it may."""
    for _ in range(rounds):
        went = threading.Event()
        fsspec.asyn.get_loop().call_soon_threadsafe(went.set)
        assert went.wait(WAIT_S)


class Halves:
    """Answers with the first bytes, then, when it is told, with the rest, then, when it is told, ends."""

    def __init__(self, rest: slice = slice(FIRST, None), *, goes_on: bool = True) -> None:
        self._rest, self._goes_on = rest, goes_on
        self.begun, self.may_send, self.sent = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, peer: socket.socket, start: int, end: int) -> bool:
        body = CONTENT[start:end]
        peer.sendall(head(start, end) + body[:FIRST])
        self.begun.set()
        assert self.may_send.wait(WAIT_S)
        peer.sendall(body[self._rest])
        if not self._goes_on:
            peer.shutdown(socket.SHUT_RDWR)
        self.sent.set()
        return self._goes_on

    def send_rest(self) -> None:
        self.may_send.set()
        assert self.sent.wait(WAIT_S)


@contextmanager
def held_in_the_middle(
    server: RawServer, reader: StoreReader, hold: ReadPause, answer: Halves
) -> Iterator[tuple[Future[None], NDArray[np.uint8]]]:
    """A read whose rest was sent while it was held; at the end all of it must have come."""
    out = np.zeros(SIZE, np.uint8)
    server.script.append(answer)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read_into, Shard(server.url, len(CONTENT), ""), 0, out)
        try:
            assert answer.begun.wait(WAIT_S)
            loop_went_round()
            assert out[:FIRST].tobytes() == CONTENT[:FIRST]
            hold.begin()
            loop_went_round()
            answer.send_rest()
            loop_went_round()
            assert not out[FIRST:].any(), "bytes came in a hold"
            yield reading, out
            reading.result(WAIT_S)
        finally:
            hold.end()
            answer.may_send.set()
    assert out.tobytes() == CONTENT[:SIZE]


ENDS: dict[str, Callable[[ReadPause], None]] = {
    "release": ReadPause.end,
    "raised priority": ReadPause.raise_priority,
    "few batches": lambda hold: (hold.watch(lambda: 1), hold.batches_taken())[1],
}


@pytest.mark.parametrize("end", ENDS)
def test_a_held_body_stands_still_and_goes_on_at_once(server: RawServer, end: str) -> None:
    hold = ready_hold()
    reader = StoreReader(policy=QUICK, pause=hold)
    with held_in_the_middle(server, reader, hold, Halves()) as (reading, _):
        ENDS[end](hold)
        reading.result(WAIT_S)
    read(server, reader)  # its connection is as good as before
    assert server.connections == [0, 0]
    assert reader.stats() == ReadStats()


def test_below_tls_a_held_body_stands_still_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold_and_end() -> None:
        hold = ready_hold()
        with (
            serving_tls(tmp_path) as server,
            held_in_the_middle(server, StoreReader(policy=QUICK, pause=hold), hold, Halves()),
        ):
            hold.end()

    with trusted_in_children(tmp_path, monkeypatch):
        assert exit_code_in_child(hold_and_end) == 0


def test_a_body_stands_still_as_often_as_it_is_held(server: RawServer) -> None:
    hold = ready_hold()
    begun, turns = threading.Event(), threading.Semaphore(0)

    def in_pieces(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(head(start, end))
        begun.set()
        for at in range(start, end, 10_000):
            assert turns.acquire(timeout=WAIT_S)
            peer.sendall(CONTENT[at : min(at + 10_000, end)])
        return True

    server.script = [in_pieces]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, server, StoreReader(policy=QUICK, pause=hold))
        assert begun.wait(WAIT_S)
        for _ in range(11):
            hold.begin()
            turns.release()
            hold.end()
        reading.result(WAIT_S)


def test_what_is_asked_in_a_hold_stands_still_from_its_head_on(server: RawServer) -> None:
    hold = ready_hold()
    hold.begin()
    out, sent = np.zeros(SIZE, np.uint8), threading.Event()

    def answer(peer: socket.socket, start: int, end: int) -> bool:
        peer.sendall(head(start, end))
        loop_went_round()
        peer.sendall(CONTENT[start:end])
        sent.set()
        return True

    server.script = [answer]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(
            StoreReader(policy=QUICK, pause=hold).read_into, Shard(server.url, len(CONTENT), ""), 0, out
        )
        assert sent.wait(WAIT_S)
        loop_went_round()
        came = out.any()
        hold.end()
        reading.result(WAIT_S)
    assert not came
    assert out.tobytes() == CONTENT[:SIZE]


def test_a_reader_that_is_closed_in_a_hold_ends(server: RawServer) -> None:
    hold = ready_hold()
    reader = StoreReader(policy=QUICK, pause=hold)
    middle = held_in_the_middle(server, reader, hold, Halves())
    reading, _ = middle.__enter__()
    reader.close()
    with pytest.raises(ReaderClosedError):
        middle.__exit__(None, None, None)
    assert reading.done()


def test_a_server_that_closes_in_a_hold_is_asked_for_the_rest_after_it(server: RawServer) -> None:
    hold = ready_hold()
    reader = StoreReader(policy=QUICK, pause=hold)
    cut = Halves(slice(FIRST, FIRST + 1000), goes_on=False)
    with held_in_the_middle(server, reader, hold, cut) as (reading, _):
        assert not reading.done()
        assert len(server.heads) == 1
        hold.end()
    assert reader.stats() == ReadStats(retries=1, resumed=1)
    assert f"bytes={FIRST + 1000}-" in server.heads[1][1]


def test_a_held_read_is_neither_asked_twice_nor_given_up_though_training_waits(server: RawServer) -> None:
    clock = Clock()
    hold = ready_hold(now=clock)
    policy = RetryPolicy(stall_s=WAIT_S, least_stall_s=0.01, deadline_s=WAIT_S)
    reader = StoreReader(policy=policy, pause=hold, hedge_share=1.0)

    def in_ten_ms(peer: socket.socket, start: int, end: int) -> bool:
        clock.now_s += 0.01
        peer.sendall(head(start, end) + CONTENT[start:end])
        return True

    server.script = [in_ten_ms] * 20
    for _ in range(20):
        read(server, reader)
    silent, awaited = Halves(slice(FIRST, None)), Future[None]()
    awaited.set_result(None)
    server.script = [silent]
    out = np.zeros(SIZE, np.uint8)
    hold.begin()
    with ThreadPoolExecutor(1) as pool:
        shard = Shard(server.url, len(CONTENT), "")
        reading = pool.submit(reader.read_into, shard, 0, out, awaited=awaited)
        assert silent.begun.wait(WAIT_S)
        try:
            loop_went_round()  # its head came: it stands still
            clock.now_s += 1000.0
            while clock.looks.acquire(blocking=False):
                pass
            looked = [clock.looks.acquire(timeout=2.0) for _ in range(4)]
        finally:
            silent.may_send.set()
            hold.end()
        reading.result(WAIT_S)
    assert all(looked), "the read ended, or nobody looked after it"
    assert out.tobytes() == CONTENT[:SIZE]
    assert reader.stats() == ReadStats()


def receive_bytes_to(server: RawServer) -> list[int]:
    """What the kernel may keep for each connection of this process to a server."""
    nbytes = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(descriptor).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                    peer = connection.getpeername()
                    if len(peer) > 1 and peer[1] == urlsplit(server.url).port:
                        nbytes.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
    return nbytes


def test_limited_reads_have_connections_of_their_own_with_little_on_their_way(server: RawServer) -> None:
    hold = ready_hold()
    reader = StoreReader(policy=QUICK, pause=hold)
    for limit in (None, 2, None, 2):
        hold.limit(limit)
        read(server, reader)
    assert server.connections == [0, 1, 0, 1]

    sizes = receive_bytes_to(server)
    assert len(sizes) == 2
    assert sizes.count(2 * INTERRUPTIBLE_BYTES) == 1  # the kernel's way of counting


# ---- one body, on a clock of its own -----------------------------------------------------------------------


class Transport(asyncio.Transport):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.dest: Destination | None = None

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")


class FakeTime(asyncio.SelectorEventLoop):
    """A loop whose time the test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def passes(self, seconds: float) -> None:
        """Time passes, and what is due then is done."""
        self.now_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


@contextmanager
def waiting(
    stall_s: float, hold: ReadPause, *, breaks: Exception | None = None
) -> Iterator[Callable[[Any], None]]:
    """Run a test with a loop; it is called with loop, transport, and the task that waits for a body.

    `breaks`: what the body makes of being cancelled.
    """

    async def silent_body(dest: Destination, transport: Transport) -> None:
        dest.attach(transport)
        transport.dest = dest
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise breaks or asyncio.CancelledError from None

    async def started(test: Callable[[Any, Any, Any], Coroutine[Any, Any, None]]) -> None:
        loop, transport = asyncio.get_running_loop(), Transport()
        arrival = Arrival(memoryview(bytearray(10)), lambda _: None, stall_s, hold)
        task = loop.create_task(arrival.wait_for(silent_body(arrival.dest, transport)))
        await loop.passes(0)  # type: ignore[attr-defined]
        transport.told.clear()
        await test(loop, transport, task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with asyncio.Runner(loop_factory=FakeTime) as runner:
        yield lambda test: runner.run(started(test))


def test_every_byte_begins_the_stall_time_out_anew() -> None:
    async def test(loop: FakeTime, transport: Transport, task: asyncio.Task[bool]) -> None:
        assert transport.dest is not None
        await loop.passes(1.5)
        transport.dest.put(b"a")
        await loop.passes(1.0)
        transport.dest.put(b"b")
        await loop.passes(1.9)
        assert not task.done()
        await loop.passes(0.2)
        assert task.done()
        assert task.result() is False

    with waiting(2.0, ready_hold()) as run:
        run(test)


def test_a_time_out_at_the_same_time_does_not_hide_that_somebody_cancels() -> None:
    async def test(loop: FakeTime, transport: Transport, task: asyncio.Task[bool]) -> None:
        loop.call_at(2.0, task.cancel)
        await loop.passes(2.0)
        assert task.cancelled()

    with waiting(2.0, ready_hold()) as run:
        run(test)


def test_a_client_that_says_it_otherwise_was_silent_all_the_same() -> None:
    async def test(loop: FakeTime, transport: Transport, task: asyncio.Task[bool]) -> None:
        await loop.passes(2.0)
        assert task.done()
        assert task.result() is False
        assert not task.cancelling()

    with waiting(2.0, ready_hold(), breaks=ConnectionError("closed")) as run:
        run(test)


def test_a_hold_is_no_silence() -> None:
    hold = ready_hold()

    async def test(loop: FakeTime, transport: Transport, task: asyncio.Task[bool]) -> None:
        await loop.passes(1.5)
        hold.begin()
        await loop.passes(0)
        await loop.passes(9.0)
        assert transport.told == ["pause"]
        hold.end()
        await loop.passes(0)
        await loop.passes(1.9)  # the stall time-out anew: the sender must hear first
        assert transport.told == ["pause", "resume"]
        assert not task.done()
        await loop.passes(0.2)
        assert task.done()
        assert task.result() is False

    with waiting(2.0, hold) as run:
        run(test)


def test_a_body_goes_on_after_a_hold_that_nobody_releases() -> None:
    hold = ready_hold(most_s=10.0)

    async def test(loop: FakeTime, transport: Transport, task: asyncio.Task[bool]) -> None:
        hold.begin()
        await loop.passes(0)
        await loop.passes(9.9)
        assert transport.told == ["pause"]
        await loop.passes(0.1)
        assert transport.told == ["pause", "resume"]
        await loop.passes(2.0)
        assert task.done()
        assert task.result() is False

    with waiting(2.0, hold) as run:
        run(test)


def test_a_connection_is_left_alone_once_the_body_is_over_though_a_hold_began_at_the_same_time() -> None:
    hold = ready_hold()

    async def test(loop: FakeTime, transport: Transport, task: asyncio.Task[bool]) -> None:
        task.cancel()
        hold.begin()
        await loop.passes(0)
        assert task.cancelled()
        assert transport.told == []

    with waiting(2.0, hold) as run:
        run(test)


def test_a_place_hands_its_connection_back_awake() -> None:
    dest, transport = Destination(memoryview(bytearray(10)), lambda _: None), Transport()
    dest.stand(still=True)
    dest.attach(transport)
    dest.attach(None)
    dest.stand(still=False)
    assert transport.told == ["pause", "resume"]
