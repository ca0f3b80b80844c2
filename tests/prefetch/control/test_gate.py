"""The gate: reads run as the in-flight control says, in the order they came; closing frees who waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dataflow.stream.read_ahead import start_in_flight
from prefetch.control.depth import Decision
from prefetch.control.gate import ReadGate
from prefetch.control.inflight import Inflight
from prefetch.errors import ReaderClosedError

TIMEOUT_S = 10
MIB = 1 << 20


class Line(deque[object]):
    """The gate's line; a test can wait until so many stand in it."""

    def __init__(self) -> None:
        super().__init__()
        self._grew = threading.Condition()

    def append(self, ticket: object) -> None:
        with self._grew:
            super().append(ticket)
            self._grew.notify_all()

    def wait_for(self, count: int) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: len(self) >= count, TIMEOUT_S)


class Reads:
    """Threads that read through a gate and end when they are told to."""

    def __init__(self, gate: ReadGate) -> None:
        self.gate = gate
        self.line = Line()
        gate._line = self.line
        self.begun: list[str] = []
        self.errors: list[BaseException] = []
        self._changed = threading.Condition()
        self._ends: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, name: str, nbytes: int) -> None:
        """A read that there is room for."""
        before = [*self.begun]
        self._start(name, nbytes)
        self.wait_for(*before, name)

    def queue(self, name: str, nbytes: int) -> None:
        """A read that has to wait, behind those that do."""
        before = len(self.line)
        self._start(name, nbytes)
        self.line.wait_for(before + 1)

    def _start(self, name: str, nbytes: int) -> None:
        self._ends[name] = threading.Event()
        thread = threading.Thread(target=self._read, args=(name, nbytes))
        self._threads.append(thread)
        thread.start()

    def _read(self, name: str, nbytes: int) -> None:
        try:
            with self.gate.read(nbytes):
                with self._changed:
                    self.begun.append(name)
                    self._changed.notify_all()
                assert self._ends[name].wait(TIMEOUT_S)
                if name == "bad":
                    raise OSError("the store is gone")
        except Exception as error:
            self.errors.append(error)

    def wait_for(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(names), TIMEOUT_S), self.begun
            assert self.begun == list(names)

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def join(self) -> None:
        for event in self._ends.values():
            event.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@contextmanager
def reads_through(limit_bytes: int) -> Iterator[Reads]:
    reads = Reads(ReadGate(Inflight(start_bytes=limit_bytes, max_bytes=limit_bytes), now=lambda: 0.0))
    try:
        yield reads
    finally:
        reads.gate.close()
        reads.join()


def test_no_more_bytes_are_read_at_a_time_than_the_control_allows() -> None:
    with reads_through(10) as reads:
        reads.begin("a", 6)
        reads.begin("b", 4)
        reads.queue("c", 1)
        assert reads.begun == ["a", "b"]
        reads.end("a")
        reads.wait_for("a", "b", "c")


def test_a_small_read_does_not_overtake_a_large_one() -> None:
    with reads_through(10) as reads:
        reads.begin("a", 6)
        reads.queue("large", 8)
        reads.queue("small", 1)
        assert reads.begun == ["a"]
        reads.end("a")
        reads.wait_for("a", "large", "small")


def test_a_read_that_fails_makes_room() -> None:
    with reads_through(10) as reads:
        reads.begin("bad", 10)
        reads.queue("next", 10)
        reads.end("bad")
        reads.wait_for("bad", "next")
    assert [type(e) for e in reads.errors] == [OSError]


def test_closing_refuses_who_waits_and_who_comes() -> None:
    with reads_through(10) as reads:
        reads.begin("a", 10)
        reads.queue("b", 10)
        reads.gate.close()
        reads.end("a")
        reads.join()
        assert reads.begun == ["a"]
        assert [str(e) for e in reads.errors] == ["the loader was closed while a read waited to be admitted"]
        with pytest.raises(ReaderClosedError, match="closed"), reads.gate.read(1):
            pass


def test_many_refusals_on_the_way_of_reads_cut_the_limit() -> None:
    refused = [0]
    control = Inflight(start_bytes=1000, max_bytes=1000)
    gate = ReadGate(control, refusals=lambda: refused[0], now=lambda: 0.0)
    for _ in range(40):
        with gate.read(10):
            pass
    refused[0] = 8
    with gate.read(10):
        pass
    assert gate.decision.value == 1000
    refused[0] = 16
    with gate.read(10):
        pass
    assert gate.decision == Decision(700, "the store refused requests")


@pytest.mark.parametrize(("nodes", "mib"), [(1, 64), (2, 8), (4, 4), (8, 4), (1000, 4)])
def test_nodes_that_start_together_begin_with_less_than_one_alone(nodes: int, mib: int) -> None:
    assert start_in_flight(nodes) == mib * MIB
