"""The engine over fake windows and chunks: order, credits, errors, life. Gates force every order."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from prefetch.control.depth import Decision, Observation, fixed_depth
from prefetch.engine.engine import Engine, EngineOptions
from prefetch.engine.ledger import Ledger
from prefetch.errors import MemoryLimitError, StallError
from prefetch.work import Piece
from sharding.errors import DataflowError

TIMEOUT_S = 10
Action = Callable[[], None]


def nothing() -> None:
    pass


class Gate:
    """An action that says when it has begun and goes on when it is opened."""

    def __init__(self) -> None:
        self._begun, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        assert self._opened.wait(TIMEOUT_S), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()

    def wait_until_begun(self) -> None:
        assert self._begun.wait(TIMEOUT_S), "nothing came to the gate"


class BoomError(Exception):
    """What a fake stage raises."""


def fail(where: str) -> Action:
    def action() -> None:
        raise BoomError(where)

    return action


class Batch:
    """A batch; a weak reference can watch it."""

    def __init__(self, name: str) -> None:
        self.name = name


class FakeChunk:
    """Batches "a.0", "a.1", ...; `needs` and the ledger's return path are filled in later."""

    def __init__(
        self,
        name: str,
        *,
        nbytes: int = 0,
        num_batches: int = 1,
        leased: int | None = None,
        parts: Sequence[Action] = (),
        on_begin: Action = nothing,
        on_finish: Action = nothing,
        heap: Sequence[int] = (),
    ) -> None:
        """`heap`: bytes of each batch that show when it is made; batches are then made one by one."""
        self.heap, self.made = heap, 0
        self.name, self.nbytes, self.num_batches = name, nbytes, num_batches
        self.leased = nbytes if leased is None else leased
        self.needs: Sequence[FakeWindow] = ()
        self.closes: Sequence[FakeWindow] = ()
        self.give_back: Callable[[int], None] = lambda _: None
        self._parts, self._on_begin, self._on_finish = parts, on_begin, on_finish
        self.begun = self.finished = self.leased_bytes = 0

    def begin(self) -> Sequence[Action]:
        self.begun += 1
        assert all(window.is_staged for window in self.needs), "a window is not staged"
        self._on_begin()
        return [*self._parts]

    def finish(self) -> Iterator[Piece[Batch]]:
        self._on_finish()
        self.finished += 1
        assert all(window.closed == 0 for window in self.needs), "a window was closed too early"
        batches = [Batch(f"{self.name}.{i}") for i in range(self.num_batches)]
        slot = Batch("the slot that all batches view")
        for batch in batches:
            batch.slot = slot  # type: ignore[attr-defined]
        weakref.finalize(slot, self.give_back, self.leased).atexit = False
        self.leased_bytes = self.leased
        if not self.heap:
            yield Piece(batches)
        for nbytes in self.heap:
            self.made += 1
            yield Piece([batches.pop(0)], heap_bytes=nbytes)


READS_AFTER_CLOSE: list[FakeWindow] = []
"""Of the running test. The engine would take an assertion in a read for an error of the dataset."""


class FakeWindow:
    """A window whose reads are the given actions."""

    def __init__(
        self,
        *chunks: FakeChunk,
        nbytes: int = 0,
        reads: Sequence[Action] = (nothing,),
        carried: bool = False,
        also: Sequence[FakeWindow] = (),
        on_admission: Action = nothing,
        on_reads: Action = nothing,
        epoch: int = 0,
    ) -> None:
        """`also`: carried windows that the first chunk needs too."""
        self.nbytes, self.carried, self.epoch = nbytes, carried, epoch
        assert chunks or carried, "nobody would close it"
        self._chunks, self._reads = chunks, list(reads)
        self._on_admission, self._on_reads = on_admission, on_reads
        self._lock = threading.Lock()
        self.when_hurried: Action = nothing
        self.admitted = self.closed = self.reads_done = self.hurried = 0
        for i, chunk in enumerate(chunks):
            chunk.needs = (*also, self) if i == 0 else (self,)
            chunk.closes = (
                *(also if i == 0 else ()),
                *((self,) if chunk is chunks[-1] and not carried else ()),
            )

    @property
    def is_staged(self) -> bool:
        return self.closed == 0 and self.reads_done == len(self._reads)

    def chunks(self) -> Sequence[FakeChunk]:
        self.admitted += 1
        self._on_admission()
        return self._chunks

    def reads(self) -> Sequence[Action]:
        self._on_reads()
        return [lambda read=read: self._run(read) for read in self._reads]  # type: ignore[misc]

    def _run(self, read: Action) -> None:
        if self.closed:
            READS_AFTER_CLOSE.append(self)
        read()
        if self.closed:
            READS_AFTER_CLOSE.append(self)
        with self._lock:
            self.reads_done += 1

    def hurry(self) -> None:
        self.hurried += 1
        self.when_hurried()

    def close(self) -> None:
        self.closed += 1


def one_chunk_windows(count: int, **settings: Any) -> list[FakeWindow]:
    return [FakeWindow(FakeChunk(str(i)), **settings) for i in range(count)]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    READS_AFTER_CLOSE.clear()
    yield
    assert not READS_AFTER_CLOSE
    left = [t.name for t in threading.enumerate() if t.name.startswith("dataflow-")]
    assert not left


@contextmanager
def running(
    windows: Iterable[FakeWindow],
    *,
    limit: int = 1000,
    depth: Any = 100,
    num_readers: int = 2,
    num_workers: int = 2,
    **options: Any,
) -> Iterator[Engine[Batch]]:
    """An engine over windows; `engine.ledger` is its ledger."""
    ledger = Ledger(limit)

    def connected() -> Iterator[FakeWindow]:
        for window in windows:
            for chunk in window._chunks:
                chunk.give_back = ledger.give_back_lent
            yield window

    policy = fixed_depth(depth) if isinstance(depth, int) else depth
    settings = {"timeout_s": TIMEOUT_S, **options}
    engine: Engine[Batch] = Engine(
        connected(),
        ledger,
        EngineOptions(num_readers=num_readers, num_workers=num_workers, depth=policy, **settings),
    )
    engine.ledger = ledger  # type: ignore[attr-defined]
    try:
        yield engine
    finally:
        engine.close()


def ledger_of(engine: Engine[Batch]) -> Ledger:
    ledger = engine.ledger  # type: ignore[attr-defined]
    assert isinstance(ledger, Ledger)
    return ledger


def names(batches: Sequence[Batch]) -> list[str]:
    return [batch.name for batch in batches]


def next_names(engine: Engine[Batch]) -> list[str]:
    return names(engine.next_batches())


def outcomes(engine: Engine[Batch]) -> list[str]:
    """Names of all batches and texts of all errors, in the order the consumer sees them."""
    seen: list[str] = []
    while True:
        try:
            batches = engine.next_batches()
        except BoomError as error:
            seen.append(f"error {error}")
            continue
        if not batches:
            return seen
        seen += names(batches)


def when_the_consumer_waits(engine: Engine[Batch], action: Action) -> None:
    """Run `action` once the consumer found nothing to take; until it really waits it holds the lock."""
    wait = engine._wait

    def then_wait() -> None:
        action()
        wait()

    engine._wait = then_wait  # type: ignore[method-assign]


def assert_nothing_held(engine: Engine[Batch]) -> None:
    held = ledger_of(engine).snapshot()
    assert (held.window_bytes, held.building_bytes, held.ready_bytes, held.lent_bytes) == (0, 0, 0, 0)


# ---- order ------------------------------------------------------------------------------------------------


def test_chunks_come_in_stream_order_when_they_finish_backwards() -> None:
    gates = [Gate() for _ in range(4)]
    windows = [FakeWindow(*(FakeChunk(str(i), parts=[gate]) for i, gate in enumerate(gates)))]
    with running(windows, num_workers=4) as engine:
        for gate in reversed(gates):
            gate.wait_until_begun()
            gate.open()
        assert outcomes(engine) == ["0.0", "1.0", "2.0", "3.0"]


def test_windows_come_in_stream_order_when_they_are_staged_backwards() -> None:
    gates = [Gate() for _ in range(3)]
    windows = [FakeWindow(FakeChunk(str(i)), reads=[gate]) for i, gate in enumerate(gates)]
    with running(windows, num_readers=4) as engine:
        for gate in reversed(gates):
            gate.wait_until_begun()
            gate.open()
        assert outcomes(engine) == ["0.0", "1.0", "2.0"]


def test_all_batches_of_a_chunk_come_at_once() -> None:
    with running([FakeWindow(FakeChunk("a", num_batches=3), FakeChunk("b", num_batches=2))]) as engine:
        assert next_names(engine) == ["a.0", "a.1", "a.2"]
        assert next_names(engine) == ["b.0", "b.1"]


def test_a_finite_source_ends_with_an_empty_sequence_again_and_again() -> None:
    with running(one_chunk_windows(2)) as engine:
        assert outcomes(engine) == ["0.0", "1.0"]
        assert [engine.next_batches() for _ in range(3)] == [(), (), ()]


def test_an_empty_source_ends_at_once() -> None:
    with running([]) as engine:
        assert engine.next_batches() == ()


def test_windows_may_come_without_reads() -> None:
    windows = [
        FakeWindow(FakeChunk("a"), reads=(), nbytes=400),
        FakeWindow(FakeChunk("b"), nbytes=400),
    ]
    with running(windows, max_windows=1) as engine:
        assert outcomes(engine) == ["a.0", "b.0"]
        assert [window.closed for window in windows] == [1] * 2
        assert_nothing_held(engine)


def test_reads_run_in_deadline_order_though_planning_runs_ahead() -> None:
    order: list[str] = []

    def read(name: str) -> Action:
        return lambda: order.append(name)

    first = Gate()
    windows = [
        FakeWindow(*(FakeChunk(f"{w}{c}") for c in range(2)), reads=[read(f"{w}a"), read(f"{w}b")])
        for w in range(4)
    ]
    windows[0]._reads.insert(0, first)
    with running(windows, num_readers=1, depth=1, max_windows=4) as engine:
        first.wait_until_begun()
        first.open()
        assert len(outcomes(engine)) == 8
    assert order == ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b"]


def test_parts_of_a_chunk_run_on_several_threads_and_finish_runs_once_after_them() -> None:
    together, log = threading.Barrier(3, timeout=TIMEOUT_S), []

    def part() -> None:
        together.wait()
        log.append("part")

    chunk = FakeChunk("a", parts=[part] * 3, on_finish=lambda: log.append("finish"))
    with running([FakeWindow(chunk)], num_workers=3) as engine:
        assert next_names(engine) == ["a.0"]
    assert log == ["part"] * 3 + ["finish"]
    assert (chunk.begun, chunk.finished) == (1, 1)


def test_workers_take_the_parts_of_the_earliest_chunk_first() -> None:
    log: list[str] = []
    gate = Gate()

    def part(name: str) -> Action:
        return lambda: log.append(name)

    chunks = [
        FakeChunk("a", parts=[gate, part("a1"), part("a2")]),
        FakeChunk("b", parts=[part("b0"), part("b1")]),
    ]
    with running([FakeWindow(*chunks)], num_workers=1) as engine:
        gate.wait_until_begun()  # "b" was submitted before the parts of "a"
        gate.open()
        assert outcomes(engine) == ["a.0", "b.0"]
    assert log == ["a1", "a2", "b0", "b1"]


# ---- windows are closed -----------------------------------------------------------------------------------


def test_a_window_is_closed_once_its_last_chunk_is_built() -> None:
    gate = Gate()
    window = FakeWindow(FakeChunk("a"), FakeChunk("b", parts=[gate]))
    with running([window]) as engine:
        assert next_names(engine) == ["a.0"]
        gate.wait_until_begun()
        assert window.closed == 0
        gate.open()
        assert next_names(engine) == ["b.0"]
        assert window.closed == 1
    assert window.closed == 1


def test_a_carried_window_is_closed_once_after_the_chunk_of_the_later_window() -> None:
    gate = Gate()
    early = FakeWindow(FakeChunk("a"), carried=True, nbytes=100)
    middle = FakeWindow(carried=True, nbytes=100)
    late = FakeWindow(FakeChunk("b", parts=[gate]), FakeChunk("c"), also=[early, middle], nbytes=100)
    with running([early, middle, late], num_workers=1) as engine:
        assert next_names(engine) == ["a.0"]
        gate.wait_until_begun()
        assert (early.closed, middle.closed, late.closed) == (0, 0, 0)
        assert ledger_of(engine).snapshot().window_bytes == 300
        gate.open()
        assert next_names(engine) == ["b.0"]
        assert (early.closed, middle.closed) == (1, 1)
        assert outcomes(engine) == ["c.0"]
        assert_nothing_held(engine)
    assert (early.closed, middle.closed, late.closed) == (1, 1, 1)


def test_a_window_that_failed_is_closed_only_when_its_last_read_has_ended() -> None:
    gate = Gate()

    def fails() -> None:
        gate.wait_until_begun()
        raise BoomError("read")

    window = FakeWindow(FakeChunk("a"), reads=[gate, fails], nbytes=100)
    with running([window, FakeWindow(FakeChunk("b"))], num_readers=2) as engine:
        with pytest.raises(BoomError, match="read"):
            engine.next_batches()
        assert window.closed == 0
        assert ledger_of(engine).snapshot().window_bytes == 100
        gate.open()
        assert outcomes(engine) == ["b.0"]
        assert (window.closed, window.reads_done) == (1, 1)
        assert_nothing_held(engine)


# ---- errors -----------------------------------------------------------------------------------------------

FAILING_CHUNKS = {
    "begin": lambda: FakeChunk("b", on_begin=fail("begin"), nbytes=10),
    "part": lambda: FakeChunk("b", parts=[nothing, fail("part"), nothing], nbytes=10),
    "only part": lambda: FakeChunk("b", parts=[fail("only part")], nbytes=10),
    "finish": lambda: FakeChunk("b", on_finish=fail("finish"), nbytes=10),
}


@pytest.mark.parametrize("stage", FAILING_CHUNKS)
def test_an_error_of_a_chunk_comes_in_its_place_and_the_stream_goes_on(stage: str) -> None:
    windows = [
        FakeWindow(FakeChunk("a", nbytes=10), FAILING_CHUNKS[stage](), FakeChunk("c", nbytes=10), nbytes=10),
        FakeWindow(FakeChunk("d", nbytes=10), nbytes=10),
    ]
    with running(windows) as engine:
        assert outcomes(engine) == ["a.0", f"error {stage}", "c.0", "d.0"]
        assert [window.closed for window in windows] == [1, 1]
        assert_nothing_held(engine)


@pytest.mark.parametrize("reads", [[fail("read")], [nothing, fail("read"), nothing]])
def test_an_error_of_a_read_comes_once_for_each_chunk_of_the_window(reads: list[Action]) -> None:
    windows = [
        FakeWindow(FakeChunk("a"), nbytes=10),
        FakeWindow(FakeChunk("b"), FakeChunk("c"), reads=reads, nbytes=10),
        FakeWindow(FakeChunk("d"), nbytes=10),
    ]
    with running(windows) as engine:
        assert outcomes(engine) == ["a.0", "error read", "error read", "d.0"]
        assert [window.closed for window in windows] == [1, 1, 1]
        assert_nothing_held(engine)


def test_an_error_of_a_carried_window_fails_the_later_chunk_too() -> None:
    early = FakeWindow(FakeChunk("a"), reads=[fail("read")], carried=True)
    late = FakeWindow(FakeChunk("b"), FakeChunk("c"), also=[early])
    with running([early, late]) as engine:
        assert outcomes(engine) == ["error read", "error read", "c.0"]
    assert (early.closed, late.closed) == (1, 1)


def test_after_a_failed_read_the_windows_other_reads_are_left_out() -> None:
    ran: list[int] = []
    window = FakeWindow(FakeChunk("a"), reads=[fail("read"), lambda: ran.append(1)])
    with running([window], num_readers=1) as engine:
        assert outcomes(engine) == ["error read"]
    assert ran == []


def test_after_a_failed_part_the_other_parts_are_left_out() -> None:
    ran: list[int] = []
    chunk = FakeChunk("a", parts=[fail("part"), lambda: ran.append(1)])
    with running([FakeWindow(chunk)], num_workers=1) as engine:
        assert outcomes(engine) == ["error part"]
    assert ran == []
    assert chunk.finished == 0


def test_the_error_itself_is_raised_not_a_copy() -> None:
    error = BoomError("the one")

    def raise_it() -> None:
        raise error

    with running([FakeWindow(FakeChunk("a", parts=[raise_it]))]) as engine:
        with pytest.raises(BoomError) as caught:
            engine.next_batches()
        assert caught.value is error


def test_an_exit_raised_in_a_task_reaches_the_consumer_and_kills_no_thread() -> None:
    def leave() -> None:
        raise SystemExit(3)

    windows = [FakeWindow(FakeChunk("a"), reads=[leave]), *one_chunk_windows(1)]
    with running(windows, num_readers=1) as engine:
        with pytest.raises(SystemExit):
            engine.next_batches()
        assert outcomes(engine) == ["0.0"]


def then_fail(windows: Iterable[FakeWindow], where: str = "plan") -> Iterator[FakeWindow]:
    yield from windows
    raise BoomError(where)


def assert_plan_error_comes_last(engine: Engine[Batch], expected: list[str]) -> None:
    assert [next_names(engine) for _ in expected] == [[name] for name in expected]
    for _ in range(2):  # it stays
        with pytest.raises(BoomError, match="plan"):
            engine.next_batches()


def test_an_error_of_planning_comes_after_the_batches_before_it() -> None:
    with running(then_fail(one_chunk_windows(3))) as engine:
        assert_plan_error_comes_last(engine, ["0.0", "1.0", "2.0"])


def test_an_error_of_planning_does_not_overtake_a_window_that_is_still_read() -> None:
    gate = Gate()
    first = FakeWindow(FakeChunk("a"), FakeChunk("b"), FakeChunk("c"))
    second = FakeWindow(FakeChunk("d"), reads=[gate])
    # One reader and depth 1: the source is asked again, and fails, before the second window is read.
    with running(then_fail([first, second]), num_readers=1, depth=1) as engine:
        assert next_names(engine) == ["a.0"]
        gate.wait_until_begun()
        assert [next_names(engine) for _ in range(2)] == [["b.0"], ["c.0"]]
        when_the_consumer_waits(engine, gate.open)
        assert_plan_error_comes_last(engine, ["d.0"])


def test_an_error_of_planning_alone_is_raised() -> None:
    with running(then_fail([])) as engine:
        assert_plan_error_comes_last(engine, [])


@pytest.mark.parametrize("where", ["on_admission", "on_reads"])
def test_a_window_that_cannot_be_admitted_ends_the_stream_with_its_error(where: str) -> None:
    """As when its buffers cannot be had: memory that the driver refuses to lock."""
    broken = FakeWindow(FakeChunk("x"), nbytes=10, **{where: fail("admission")})
    windows = [*one_chunk_windows(2), broken, *one_chunk_windows(1)]
    with running(windows) as engine:
        assert [next_names(engine) for _ in range(2)] == [["0.0"], ["1.0"]]
        for _ in range(2):
            with pytest.raises(BoomError, match="admission"):
                engine.next_batches()
        assert_nothing_held(engine)
        assert windows[3].admitted == 0
    assert broken.closed == 1


def test_a_chunk_whose_size_cannot_be_told_is_an_error_not_a_silent_end_of_a_thread() -> None:
    class Unmeasurable(FakeChunk):
        @property
        def nbytes(self) -> int:  # type: ignore[override]
            raise BoomError("size")

        @nbytes.setter
        def nbytes(self, value: int) -> None:
            pass

    with running([FakeWindow(FakeChunk("a"), Unmeasurable("b", leased=0))]) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(BoomError, match="size"):
            engine.next_batches()


def test_any_number_of_chunks_may_fail_with_their_window() -> None:
    window = FakeWindow(*(FakeChunk(str(i)) for i in range(3000)), reads=[fail("read")])
    with running([window], depth=3000) as engine:
        assert outcomes(engine) == ["error read"] * 3000


# ---- credits ----------------------------------------------------------------------------------------------


def test_a_window_is_not_admitted_while_the_ledger_is_full() -> None:
    gates = [Gate() for _ in range(3)]
    windows = [
        FakeWindow(FakeChunk(str(i), parts=[gate]), nbytes=40, reads=()) for i, gate in enumerate(gates)
    ]
    with running(windows, limit=100, max_windows=9, num_workers=3) as engine:
        gates[0].wait_until_begun()
        gates[1].wait_until_begun()
        assert ledger_of(engine).snapshot().window_bytes == 80
        assert windows[2].admitted == 0
        gates[0].open()
        assert next_names(engine) == ["0.0"]
        gates[2].wait_until_begun()
        gates[1].open()
        gates[2].open()
        assert outcomes(engine) == ["1.0", "2.0"]
        assert ledger_of(engine).snapshot().peak_bytes == 80


def test_a_window_leaves_room_for_the_outputs_of_those_before_it() -> None:
    gate = Gate()
    windows = [
        FakeWindow(FakeChunk("a", nbytes=30, on_begin=gate), nbytes=40),
        FakeWindow(FakeChunk("b", nbytes=30), nbytes=40),
    ]
    with running(windows, limit=100, keep_bytes=30) as engine:
        gate.wait_until_begun()
        assert windows[1].admitted == 0
        gate.open()
        assert outcomes(engine) == ["a.0", "b.0"]


@pytest.mark.parametrize("max_windows", [1, 2, 4])
def test_while_chunks_wait_no_more_windows_are_open_than_asked_for(max_windows: int) -> None:
    gates = [Gate() for _ in range(6)]
    windows = [
        FakeWindow(FakeChunk(f"{i}a", parts=[gate]), FakeChunk(f"{i}b")) for i, gate in enumerate(gates)
    ]
    with running(windows, max_windows=max_windows, depth=1) as engine:
        for i, gate in enumerate(gates):
            gate.wait_until_begun()
            assert sum(window.admitted for window in windows) - i <= max_windows
            assert engine.stats().open_windows <= max_windows
            gate.open()
            assert [next_names(engine) for _ in range(2)] == [[f"{i}a.0"], [f"{i}b.0"]]


@pytest.mark.parametrize("max_windows", [1, 3])
def test_a_consumer_that_keeps_every_batch_pays_in_memory_not_in_progress(max_windows: int) -> None:
    windows = [FakeWindow(*(FakeChunk(f"{w}{c}", nbytes=30) for c in range(3)), nbytes=50) for w in range(5)]
    kept: list[Batch] = []
    with running(windows, limit=100, max_windows=max_windows) as engine:
        for _ in range(15):
            kept += engine.next_batches()
            held = ledger_of(engine).snapshot()
            assert held.window_bytes + held.building_bytes + held.ready_bytes <= 100
        assert engine.next_batches() == ()
        held = ledger_of(engine).snapshot()
        assert (held.window_bytes, held.building_bytes, held.ready_bytes) == (0, 0, 0)
        assert held.lent_bytes == 15 * 30
        kept.clear()
        assert_nothing_held(engine)


def test_credit_that_the_consumer_gives_back_late_is_used() -> None:
    windows = [FakeWindow(FakeChunk(str(i), nbytes=60)) for i in range(4)]
    with running(windows, limit=100) as engine:
        kept = [engine.next_batches() for _ in range(2)]
        assert ledger_of(engine).snapshot().lent_bytes == 120
        kept.clear()
        assert outcomes(engine) == ["2.0", "3.0"]
        assert_nothing_held(engine)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_what_shows_when_it_is_made_is_bounded_by_the_limit_and_a_batch_a_builder(num_workers: int) -> None:
    chunks = [FakeChunk(str(i), num_batches=10, heap=[40] * 10) for i in range(3)]
    peaks = []
    with running([FakeWindow(*chunks)], limit=100, num_workers=num_workers) as engine:
        for i in range(30):
            assert next_names(engine) == [f"{i // 10}.{i % 10}"]
            held = ledger_of(engine).snapshot()
            assert held.lent_bytes <= 40
            peaks.append(held.peak_bytes)
        assert engine.next_batches() == ()
        assert_nothing_held(engine)
    assert max(peaks) <= 100 + 40 * num_workers + 40  # the one that the consumer has


def test_no_builder_begins_another_batch_while_more_is_held_than_the_limit() -> None:
    gate = Gate()
    last = FakeChunk("b", num_batches=3, heap=[60, 60, 60])
    with running([FakeWindow(FakeChunk("a", on_begin=gate), last)], limit=100, num_workers=2) as engine:
        gate.wait_until_begun()
        aside, lay_aside = threading.Event(), engine._lay_aside
        with engine._changed:
            engine._lay_aside = lambda started: (lay_aside(started), aside.set())  # type: ignore
            if engine._aside:
                aside.set()
        assert aside.wait(TIMEOUT_S)
        assert last.made == 2
        gate.open()
        assert outcomes(engine) == ["a.0", "b.0", "b.1", "b.2"]


def test_batches_larger_than_the_limit_come_one_by_one() -> None:
    chunks = [FakeChunk(str(i), num_batches=3, heap=[1000, 1, 5000]) for i in range(4)]
    with running([FakeWindow(*chunks)], limit=100, num_workers=2) as engine:
        assert outcomes(engine) == [f"{i}.{j}" for i in range(4) for j in range(3)]
        assert_nothing_held(engine)


def test_small_batches_of_a_chunk_are_handed_out_together() -> None:
    chunk = FakeChunk("a", num_batches=8, heap=[1] * 8)
    with running([FakeWindow(chunk)], limit=32 * 4) as engine:
        assert [len(engine.next_batches()) for _ in range(2)] == [4, 4]


def test_an_error_between_batches_that_were_charged_comes_in_their_place_and_frees_them() -> None:
    class Failing(FakeChunk):
        def finish(self) -> Iterator[Piece[Batch]]:
            pieces = super().finish()
            yield next(pieces)
            raise BoomError("a.1")

    with running([FakeWindow(Failing("a", num_batches=2, heap=[10, 10]), FakeChunk("b"))]) as engine:
        assert outcomes(engine) == ["error a.1", "b.0"]
        assert_nothing_held(engine)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
@pytest.mark.parametrize("where", ["plan", "admission"])
def test_a_lack_of_memory_is_told_in_words_after_the_batches_before(error: Exception, where: str) -> None:
    def refuse() -> None:
        raise error

    def windows() -> Iterator[FakeWindow]:
        yield FakeWindow(FakeChunk("a"))
        if where == "plan":
            refuse()
        yield FakeWindow(FakeChunk("b"), on_reads=refuse)

    with running(windows()) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(
            MemoryLimitError, match=r"no memory for the next shuffle window .*memory_limit=1,000"
        ) as got:
            engine.next_batches()
        assert got.value.__cause__ is error


def test_no_window_is_admitted_before_the_consumer_is_in_the_epoch_before() -> None:
    taken: list[int] = []
    seen: list[tuple[int, int]] = []  # epoch of each window, and batches that were taken at its admission
    windows = [
        FakeWindow(
            FakeChunk(str(i)), epoch=i // 2, on_admission=lambda i=i: seen.append((i // 2, len(taken)))
        )
        for i in range(8)
    ]
    with running(windows, max_windows=99) as engine:
        for i in range(8):
            assert next_names(engine) == [f"{i}.0"]
            taken.append(i)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    # An epoch's first batch lets the next one's windows in before it is handed out.
    assert all(count >= 2 * (epoch - 1) for epoch, count in seen)


def test_until_a_second_epoch_has_begun_only_what_its_first_batch_needs_is_read() -> None:
    seen: list[str] = []
    planned = [threading.Event() for _ in range(7)]

    def windows() -> Iterator[FakeWindow]:
        for i, event in enumerate(planned):
            event.set()
            carried = i == 3  # the epoch's first batch needs two windows
            chunks = [] if carried else [FakeChunk(str(i))]
            admitted = partial(seen.append, f"window {i}")
            window = FakeWindow(*chunks, epoch=i // 3, carried=carried, on_admission=admitted, also=held)
            held[:] = [window] if carried else []
            yield window

    held: list[FakeWindow] = []
    with running(windows(), max_windows=99) as engine:
        assert [next_names(engine) for _ in range(3)] == [["0.0"], ["1.0"], ["2.0"]]
        assert planned[5].wait(TIMEOUT_S)
        seen.append("second epoch")
        engine.read_on()
        assert planned[6].wait(TIMEOUT_S)
        assert [next_names(engine) for _ in range(2)] == [["4.0"], ["5.0"]]
    assert seen[:7] == [*(f"window {i}" for i in range(5)), "second epoch", "window 5"]


@pytest.mark.parametrize(("nbytes", "read"), [(20, True), (21, False)])
def test_of_an_epoch_that_may_never_begin_at_most_an_eighth_of_an_epoch_is_read(
    nbytes: int, read: bool
) -> None:
    windows = [FakeWindow(FakeChunk(str(i)), nbytes=80) for i in range(2)]
    windows.append(FakeWindow(FakeChunk("2"), nbytes=nbytes, epoch=1))
    planned = threading.Event()

    def source() -> Iterator[FakeWindow]:
        yield from windows
        planned.set()
        yield FakeWindow(FakeChunk("3"), epoch=1)

    gate = Gate()
    windows[1]._reads = [gate]
    with running(source(), max_windows=99) as engine:
        assert next_names(engine) == ["0.0"]
        gate.wait_until_begun()
        if read:
            assert planned.wait(TIMEOUT_S)
        gate.open()
        assert next_names(engine) == ["1.0"]
        assert windows[2].admitted == read
        assert next_names(engine) == ["2.0"]  # asked for, it is read in any case


def test_a_window_larger_than_the_limit_is_an_error_that_says_what_would_fit() -> None:
    windows = [FakeWindow(FakeChunk("a", nbytes=10), nbytes=50), FakeWindow(FakeChunk("b"), nbytes=101)]
    with running(windows, limit=100) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(MemoryLimitError, match=r"shuffle window needs 101 bytes.*at least 101") as caught:
            engine.next_batches()
        assert isinstance(caught.value, DataflowError)
        with pytest.raises(MemoryLimitError):
            engine.next_batches()


def test_a_chunk_larger_than_the_limit_is_an_error_that_says_what_would_fit() -> None:
    window = FakeWindow(FakeChunk("a", nbytes=60), FakeChunk("b", nbytes=61), nbytes=40)
    with running([window], limit=100) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(MemoryLimitError, match=r"batches need 61 bytes beside 40 held.*at least 101"):
            engine.next_batches()


def test_the_limit_that_the_error_asks_for_is_enough() -> None:
    def windows() -> list[FakeWindow]:
        early = FakeWindow(FakeChunk("a", nbytes=70), nbytes=120, carried=True)
        late = FakeWindow(FakeChunk("b", nbytes=90), FakeChunk("c", nbytes=150), also=[early], nbytes=130)
        return [early, late]

    limit, tried = 1, []
    while True:
        tried.append(limit)
        with running(windows(), limit=limit) as engine:
            try:
                assert outcomes(engine) == ["a.0", "b.0", "c.0"]
                break
            except MemoryLimitError as error:
                found = re.search(r"at least (\d+)", str(error))
                assert found
                assert int(found[1]) > limit
                limit = int(found[1])
    assert tried == [1, 120, 190, 250, 340]
    assert limit == 120 + 130 + 90


def test_kept_batches_do_not_count_towards_the_memory_limit_error() -> None:
    windows = [FakeWindow(FakeChunk(str(i), nbytes=50), nbytes=50) for i in range(3)]
    with running(windows, limit=100) as engine:
        kept = [engine.next_batches() for _ in range(3)]
        assert engine.next_batches() == ()
        assert [names(batches) for batches in kept] == [["0.0"], ["1.0"], ["2.0"]]


# ---- depth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "num_batches"), [(1, 1), (2, 1), (5, 1), (6, 3), (8, 3)])
def test_as_many_batches_are_ready_or_built_as_the_depth_asks_for(depth: int, num_batches: int) -> None:
    finished = threading.Semaphore(0)
    chunks = [FakeChunk(str(i), num_batches=num_batches, on_finish=finished.release) for i in range(12)]
    with running([FakeWindow(*chunks)], depth=depth) as engine:
        for taken in range(12):
            expected = min(12, taken + depth // num_batches)
            while sum(chunk.finished for chunk in chunks) < expected:
                assert finished.acquire(timeout=TIMEOUT_S)
            assert [chunk.begun for chunk in chunks] == [1] * expected + [0] * (12 - expected)
            assert len(next_names(engine)) == num_batches


def test_a_chunk_of_more_batches_than_the_depth_runs_alone() -> None:
    gates = [Gate() for _ in range(3)]
    chunks = [FakeChunk(str(i), num_batches=4, parts=[gate]) for i, gate in enumerate(gates)]
    with running([FakeWindow(*chunks)], depth=3, num_workers=3) as engine:
        for i, gate in enumerate(gates):
            gate.wait_until_begun()
            assert [chunk.begun for chunk in chunks] == [1] * (i + 1) + [0] * (2 - i)
            gate.open()
            assert len(next_names(engine)) == 4


def test_the_depth_policy_sees_what_was_delivered_and_what_comes() -> None:
    seen: list[Observation] = []

    def policy(observation: Observation) -> Decision:
        seen.append(observation)
        return Decision(1 + observation.delivered_batches, "grows")

    chunks = [FakeChunk(str(i), nbytes=10 * i) for i in range(6)]
    with running([FakeWindow(*chunks)], depth=policy) as engine:
        assert len(outcomes(engine)) == 6
        stats = engine.stats()
    assert (stats.depth, stats.depth_reason) == (7, "grows")
    assert {o.batch_bytes for o in seen} <= {0, 10, 20, 30, 40, 50}
    assert max(o.batch_bytes for o in seen) == 50
    delivered = [o.delivered_batches for o in seen]
    assert delivered == sorted(delivered)
    assert all(o.starved_s >= 0 and o.ready_batches >= 0 for o in seen)


def observing(seen: list[Observation], depth: int = 1) -> Callable[[Observation], Decision]:
    def policy(observation: Observation) -> Decision:
        seen.append(observation)
        return Decision(depth, "as told")

    return policy


def wait_for_batch(engine: Engine[Batch], gate: Gate) -> None:
    """Ask for a batch whose gate opens only when the consumer begins to wait."""
    gate.wait_until_begun()
    wait = engine._changed.wait

    def opening(timeout: float | None = None) -> bool:
        gate.open()
        return wait(timeout)

    engine._changed.wait = opening  # type: ignore[method-assign]
    next_names(engine)
    engine._changed.wait = wait  # type: ignore[method-assign]


def test_the_depth_policy_sees_lead_times_steps_and_what_is_finished() -> None:
    seen: list[Observation] = []
    chunks = [FakeChunk(str(i)) for i in range(5)]
    with running([FakeWindow(*chunks)], depth=observing(seen, 2)) as engine:
        assert len(outcomes(engine)) == 5
        engine.stats()
    assert sum(len(o.leads_s) for o in seen) == 5
    assert sum(len(o.steps_s) for o in seen) == 5  # before the 2nd to the 5th batch, and before the end
    assert all(value >= 0 for o in seen for value in (*o.leads_s, *o.steps_s))
    assert all(0 <= o.finished_batches <= o.ready_batches for o in seen)
    times = [o.now_s for o in seen]
    assert times == sorted(times)
    assert seen[-1].finished_batches == 0


@pytest.mark.parametrize(("depth", "num_workers", "limit"), [(1, 2, ""), (9, 1, "building")])
def test_a_wait_says_whether_more_depth_would_have_helped(depth: int, num_workers: int, limit: str) -> None:
    seen: list[Observation] = []
    gate = Gate()
    chunks = [FakeChunk("0"), FakeChunk("1", parts=[gate]), FakeChunk("2")]
    with running([FakeWindow(*chunks)], depth=observing(seen, depth), num_workers=num_workers) as engine:
        next_names(engine)
        wait_for_batch(engine, gate)
        engine.stats()  # observes, before the next batch may be waited for
        next_names(engine)
        engine.stats()
    assert (seen[-1].waits >= 1, next(o.limit for o in seen if o.waits == 1)) == (True, limit)


def test_a_wait_for_storage_is_told_as_such() -> None:
    seen: list[Observation] = []
    gate = Gate()
    windows = [FakeWindow(FakeChunk("0")), FakeWindow(FakeChunk("1"), reads=[gate])]
    with running(windows, depth=observing(seen, 9)) as engine:
        next_names(engine)
        wait_for_batch(engine, gate)
        engine.stats()
    assert (seen[-1].waits, seen[-1].limit) == (1, "reading")


# ---- life -------------------------------------------------------------------------------------------------


def closed_by_another_thread(engine: Engine[Batch]) -> threading.Thread:
    thread = threading.Thread(target=engine.close)
    thread.start()
    return thread


@pytest.mark.parametrize("stage", ["read", "part"])
def test_close_waits_for_the_running_task_and_then_closes_the_windows(stage: str) -> None:
    gate, log = Gate(), []

    def task() -> None:
        gate()
        log.append("task ended")

    chunk = FakeChunk("a", parts=[task] if stage == "part" else [])
    window = FakeWindow(chunk, reads=[task] if stage == "read" else [nothing])
    closed_window = window.close
    window.close = lambda: (closed_window(), log.append("window closed"))[0]  # type: ignore[method-assign]
    with running([window]) as engine:
        gate.wait_until_begun()
        closer = closed_by_another_thread(engine)
        gate.open()
        closer.join(TIMEOUT_S)
        assert not closer.is_alive()
        assert log == ["task ended", "window closed"]
    assert window.closed == 1


def test_close_drops_what_has_not_begun() -> None:
    gate, ran = Gate(), []
    windows = [FakeWindow(FakeChunk("a"), reads=[gate, *[lambda: ran.append(1)] * 5])]
    with running(windows, num_readers=1) as engine:
        gate.wait_until_begun()
        readers = engine._readers
        closer = closed_by_another_thread(engine)
        with readers._ready:  # the pool is closed, and its queue empty, before the gate opens
            while not readers._closed:
                assert readers._ready.wait(TIMEOUT_S)
        gate.open()
        closer.join(TIMEOUT_S)
        assert not closer.is_alive()
    assert ran == []
    assert windows[0].closed == 1


def test_close_while_the_consumer_waits_wakes_it_with_an_error() -> None:
    gate, closers = Gate(), []
    with running([FakeWindow(FakeChunk("a"), reads=[gate])]) as engine:
        gate.wait_until_begun()
        # `close` gets the lock when the consumer waits; it is woken while the read still runs.
        when_the_consumer_waits(engine, lambda: closers.append(closed_by_another_thread(engine)))
        with pytest.raises(RuntimeError, match="closed while a batch was awaited"):
            engine.next_batches()
        gate.open()
        closers[0].join(TIMEOUT_S)
        assert not closers[0].is_alive()


def test_a_consumer_that_wakes_after_close_is_done_is_not_told_that_the_data_ended() -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), FakeChunk("b", on_begin=gate))], num_workers=1) as engine:
        gate.wait_until_begun()  # all windows are read, the source has ended
        assert next_names(engine) == ["a.0"]
        closer = closed_by_another_thread(engine)
        when_the_consumer_waits(engine, gate.open)
        with pytest.raises(RuntimeError, match="the loader was closed"):
            while_it_gives_batches(engine)
        closer.join(TIMEOUT_S)
        assert not closer.is_alive()


def while_it_gives_batches(engine: Engine[Batch]) -> None:
    """The running chunk may still be delivered; then the next call must say that the loader was closed."""
    while engine.next_batches():
        pass


def test_a_closed_engine_gives_no_batch_and_does_not_look_like_the_end() -> None:
    with running(one_chunk_windows(3)) as engine:
        assert next_names(engine) == ["0.0"]
        engine.close()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the loader was closed"):
                engine.next_batches()


def test_close_may_come_twice_and_from_several_threads() -> None:
    windows = one_chunk_windows(3)
    with running(windows) as engine:
        closers = [closed_by_another_thread(engine) for _ in range(3)]
        engine.close()
        for closer in closers:
            closer.join(TIMEOUT_S)
            assert not closer.is_alive()
    assert all(window.closed <= 1 for window in windows)


def test_close_without_joining_returns_while_a_task_hangs_and_its_thread_ends_later() -> None:
    gate, ran = Gate(), []
    window = FakeWindow(FakeChunk("a"), reads=[gate, lambda: ran.append(1)])
    with running([window], num_readers=1) as engine:
        gate.wait_until_begun()
        engine.close(join=False)
        assert window.closed == 0, "the hanging read still writes to its memory"
        with pytest.raises(RuntimeError, match="the loader was closed"):
            engine.next_batches()
        gate.open()
    assert ran == []
    assert window.closed == 1


@pytest.mark.parametrize("stage", ["read", "part"])
def test_a_finaliser_may_close_the_engine_in_one_of_its_own_threads(stage: str) -> None:
    closed = threading.Event()

    def close_it() -> None:
        with engine._changed:  # a garbage collection may start inside the critical section
            engine.close()
        closed.set()

    ready = Gate()
    reads = [ready, close_it] if stage == "read" else [ready]
    window = FakeWindow(FakeChunk("a", parts=[close_it] if stage == "part" else []), reads=reads)
    with running([window], num_readers=1) as engine:
        ready.open()
        assert closed.wait(TIMEOUT_S), "deadlock"


def test_close_lets_every_prefetched_batch_go() -> None:
    ready = threading.Event()
    watched: list[weakref.ref[Batch]] = []

    class WatchedChunk(FakeChunk):
        def finish(self) -> Iterator[Piece[Batch]]:
            for piece in super().finish():
                watched.append(weakref.ref(piece.batches[0]))
                yield piece
                del piece

    chunks = [WatchedChunk("a"), WatchedChunk("b", on_finish=ready.set)]
    with running([FakeWindow(*chunks)], num_workers=1) as engine:
        assert ready.wait(TIMEOUT_S)
        kept = engine.next_batches()
        engine.close()
    assert [ref() for ref in watched] == [kept[0], None]


def test_batches_handed_out_outlive_the_engine() -> None:
    with running(one_chunk_windows(1)) as engine:
        batches = engine.next_batches()
    assert names(batches) == ["0.0"]


def test_the_source_is_asked_by_one_thread_at_a_time_and_not_after_its_end() -> None:
    asked: list[int] = []
    inside = threading.Lock()

    def source() -> Iterator[FakeWindow]:
        for window in one_chunk_windows(20):
            assert inside.acquire(blocking=False)
            inside.release()
            asked.append(1)
            yield window

    with running(source(), num_readers=4) as engine:
        assert len(outcomes(engine)) == 20
        assert engine.next_batches() == ()
    assert len(asked) == 20


def test_an_endless_source_runs_only_as_far_ahead_as_it_may() -> None:
    made: list[FakeWindow] = []

    def source() -> Iterator[FakeWindow]:
        while True:
            made.append(FakeWindow(FakeChunk(str(len(made)))))
            yield made[-1]

    with running(source(), depth=2, max_windows=3) as engine:
        for i in range(30):
            assert next_names(engine) == [f"{i}.0"]
            assert len(made) <= i + 1 + 2 + 3 + 1  # taken, ready, open, waiting for admission


def test_the_initializer_runs_in_every_thread_before_its_first_task() -> None:
    local = threading.local()

    def prepare() -> None:
        local.ready = True

    def check() -> None:
        assert local.ready

    windows = [FakeWindow(FakeChunk("a", parts=[check] * 4), reads=[check] * 4)]
    with running(windows, initializer=prepare) as engine:
        assert outcomes(engine) == ["a.0"]


def test_after_a_fork_the_child_is_told_to_make_its_own_loader_and_can_close_this_one() -> None:
    gate = Gate()
    # The gate is in a call made under the engine's lock: the child inherits the lock as held for ever.
    window = FakeWindow(FakeChunk("a"), on_admission=gate)
    with running([window]) as engine:
        gate.wait_until_begun()
        child = fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TIMEOUT_S)  # a deadlock kills the child, and fails the test
            status = 1
            with suppress(BaseException):
                try:
                    engine.next_batches()
                except RuntimeError as error:
                    engine.close()
                    status = 0 if "do not survive a fork" in str(error) else 2
            os._exit(status)
        gate.open()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert outcomes(engine) == ["a.0"]


def fork() -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        return os.fork()


# ---- stalls -----------------------------------------------------------------------------------------------


def test_a_stall_is_an_error_and_prints_the_stacks_of_all_threads(capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], timeout_s=0.05) as engine:
        gate.wait_until_begun()
        with pytest.raises(StallError, match=r"within 0 s; stacks .* on stderr: blocks being read: 1"):
            engine.next_batches()
        gate.open()
    printed = capfd.readouterr().err
    assert "dataflow: no batch for 0 s; EngineStats(" in printed
    assert "most recent call first" in printed
    assert "in _run_read" in printed, "the thread that hangs is shown"
    assert issubclass(StallError, DataflowError)


def test_after_a_stall_the_consumer_may_wait_again(capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], timeout_s=0.05) as engine:
        with pytest.raises(StallError):
            engine.next_batches()
        engine._options.timeout_s = TIMEOUT_S
        when_the_consumer_waits(engine, gate.open)
        assert next_names(engine) == ["a.0"]


def test_the_watchdog_prints_the_stacks_once_and_the_wait_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], watchdog_s=0.02) as engine:
        print_stacks = engine._print_stacks

        def then_open(waited_s: float) -> None:
            print_stacks(waited_s)
            gate.open()

        engine._print_stacks = then_open  # type: ignore[method-assign]
        assert next_names(engine) == ["a.0"]
        assert engine.stats().starved_s >= 0.02
    assert capfd.readouterr().err.count("dataflow: no batch") == 1


@contextmanager
def lines_told(then: Callable[[int], None] = lambda _: None) -> Iterator[list[str]]:
    """What is logged meanwhile; `then` is called with the number of lines after each."""

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            then(len(lines))

    lines: list[str] = []
    handler, log = Listens(), logging.getLogger("dataflow")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def test_a_wait_that_is_explained_is_told_in_lines_and_without_stacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = Gate()

    def opens(lines: int) -> None:
        if lines == 3:
            gate.open()

    reason = "2 reads of http://h fail"
    options = {"notice_s": 0.01, "watchdog_s": 0.01, "explain": lambda: reason}
    with (
        lines_told(opens) as lines,
        running([FakeWindow(FakeChunk("a"), reads=[gate])], **options) as engine,
    ):
        assert next_names(engine) == ["a.0"]
    assert lines[:3] == ["no batch for 0 s: 2 reads of http://h fail"] * 3
    assert re.fullmatch(r"a batch came after 0\.\d s", lines[-1])
    assert "most recent call first" not in capfd.readouterr().err


def test_a_stall_that_is_explained_says_why_and_shows_stacks_to_those_who_want_details(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    options = {"timeout_s": 0.02, "explain": lambda: "2 reads fail"}
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], **options) as engine:
        with pytest.raises(StallError, match=r"^no batch within 0 s: 2 reads fail$"):
            engine.next_batches()
        assert "most recent call first" not in capfd.readouterr().err
        caplog.set_level(logging.DEBUG, "dataflow")
        with pytest.raises(StallError, match="within 0 s; stacks of all threads are on stderr: 2 reads fail"):
            engine.next_batches()
        assert "most recent call first" in capfd.readouterr().err
        gate.open()


def test_a_wait_for_a_batch_that_is_being_built_names_the_code() -> None:
    gate = Gate()

    def transform() -> None:
        gate()

    def opens(lines: int) -> None:
        gate.wait_until_begun()
        if "transform" in told[-1] or lines > 1000:
            gate.open()

    with (
        lines_told(opens) as told,
        running([FakeWindow(FakeChunk("a", parts=[transform]))], notice_s=0.005) as engine,
    ):
        assert next_names(engine) == ["a.0"]
    assert any(
        re.fullmatch(
            r"no batch for 0 s: one is being built, in test_.*transform \(.*test_engine.py, line \d+\)", line
        )
        for line in told
    )


def test_no_stack_is_printed_when_batches_come(capfd: pytest.CaptureFixture[str]) -> None:
    with running(one_chunk_windows(5)) as engine:
        assert len(outcomes(engine)) == 5
    assert capfd.readouterr().err == ""


# ---- statistics -------------------------------------------------------------------------------------------


def test_statistics_before_anything_is_ready() -> None:
    gate = Gate()
    windows = [FakeWindow(FakeChunk("a", num_batches=2, nbytes=7), reads=[gate] + [nothing] * 3, nbytes=50)]
    with running(windows, num_readers=1, num_workers=3, depth=4) as engine:
        gate.wait_until_begun()
        stats = engine.stats()
        assert (stats.delivered_batches, stats.delivered_bytes, stats.ready_batches) == (0, 0, 0)
        assert (stats.depth, stats.depth_reason) == (4, "fixed at 4")
        assert (stats.open_windows, stats.memory.window_bytes, stats.memory.limit_bytes) == (1, 50, 1000)
        assert (stats.read.threads, stats.build.threads) == (1, 3)
        assert (stats.read.tasks, stats.build.tasks) == (0, 0)
        assert stats.read.queued >= 3
        assert stats.starved_s == 0
        gate.open()


def test_statistics_count_what_was_delivered() -> None:
    chunks = [
        FakeChunk("a", num_batches=2, nbytes=70, leased=60, parts=[nothing] * 3),
        FakeChunk("b", nbytes=30),
    ]
    with running([FakeWindow(*chunks, nbytes=50, reads=[nothing] * 4)]) as engine:
        kept = [engine.next_batches(), engine.next_batches()]
        assert engine.next_batches() == ()
        stats = engine.stats()
        assert len(kept[0]) == 2
    assert (stats.delivered_batches, stats.delivered_bytes) == (3, 90)
    assert (stats.ready_batches, stats.open_windows) == (0, 0)
    assert stats.memory.lent_bytes == 90
    assert stats.read.tasks == 4
    assert stats.build.tasks == 5  # "a": begin and three parts, the last of which finishes; "b": one
    assert (stats.read.queued, stats.build.queued) == (0, 0)
    assert 0 <= stats.starved_s <= stats.elapsed_s
    assert 0 <= stats.build.busy_s <= 2 * stats.elapsed_s


def test_ready_batches_are_counted_until_they_are_taken() -> None:
    gate = Gate()
    chunks = [FakeChunk("a", num_batches=3), FakeChunk("b", num_batches=2), FakeChunk("c", parts=[gate])]
    with running([FakeWindow(*chunks)], num_workers=1) as engine:
        gate.wait_until_begun()
        assert engine.stats().ready_batches == 5
        engine.next_batches()
        assert engine.stats().ready_batches == 2
        gate.open()


def test_a_thread_that_has_built_a_chunk_does_not_keep_its_batches() -> None:
    begin, done, go_on = Gate(), threading.Event(), Gate()
    with running([FakeWindow(FakeChunk("a", nbytes=9, parts=[begin]))], num_workers=1) as engine:
        begin.wait_until_begun()
        finish = engine._finish

        def then_stand_still(*arguments: Any) -> None:
            finish(*arguments)
            done.set()
            go_on()

        engine._finish = then_stand_still  # type: ignore[method-assign]
        begin.open()
        batches = engine.next_batches()
        assert done.wait(TIMEOUT_S)
        assert ledger_of(engine).snapshot().lent_bytes == 9
        batches = ()
        assert ledger_of(engine).snapshot().lent_bytes == 0
        assert not batches
        go_on.open()


# ---- everything at once -----------------------------------------------------------------------------------


@dataclass
class ChunkPlan:
    nbytes: int
    num_batches: int
    parts: int
    fails: str


@dataclass
class WindowPlan:
    nbytes: int
    reads: int
    fails: bool
    carried: bool
    chunks: list[ChunkPlan]


@dataclass
class Soak:
    windows: list[WindowPlan]
    spare: int
    depth: int
    max_windows: int
    num_readers: int
    num_workers: int
    keep: list[bool] = field(default_factory=list)


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 5).flatmap(lambda n: strategy if n == 5 else st.just(otherwise))


chunk_plans = st.builds(
    ChunkPlan,
    nbytes=st.integers(0, 40),
    num_batches=st.integers(1, 4),
    parts=st.integers(0, 3),
    fails=rarely(st.sampled_from(["begin", "part", "finish"]), ""),
)
window_plans = st.builds(
    WindowPlan,
    nbytes=st.integers(30, 80),
    reads=st.integers(0, 3),
    fails=rarely(st.booleans(), False),
    carried=st.booleans(),
    chunks=st.lists(chunk_plans, max_size=3),
)
soaks = st.builds(
    Soak,
    windows=st.lists(window_plans, max_size=8),
    spare=st.sampled_from([0, 0, 1, 50, 1000]),
    depth=st.integers(1, 6),
    max_windows=st.integers(1, 4),
    num_readers=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    keep=st.lists(st.booleans(), min_size=1, max_size=5),
)


def built(plan: Soak) -> tuple[list[FakeWindow], list[str], int, int]:
    """Windows, expected outcomes, the largest chunk, and the least limit that must suffice."""
    windows: list[FakeWindow] = []
    expected: list[str] = []
    carried: list[tuple[FakeWindow, bool]] = []
    need, last_with_chunks = 0, max((i for i, w in enumerate(plan.windows) if w.chunks), default=-1)
    largest = max((c.nbytes for w in plan.windows for c in w.chunks), default=0)
    for number, spec in enumerate(plan.windows[: last_with_chunks + 1]):
        failed = spec.fails and spec.reads > 0
        chunks = [soak_chunk(f"{number}{i}", chunk) for i, chunk in enumerate(spec.chunks)]
        window = FakeWindow(
            *chunks,
            nbytes=spec.nbytes,
            reads=[fail(f"read {number}") if failed and i == 0 else nothing for i in range(spec.reads)],
            carried=number < last_with_chunks and (spec.carried or not chunks),
            also=[w for w, _ in carried] if chunks else (),
        )
        windows.append(window)
        need = max(need, window.nbytes + sum(w.nbytes for w, _ in carried))
        for i, chunk in enumerate(spec.chunks):
            broken = failed or (i == 0 and any(bad for _, bad in carried))
            if broken or (chunk.fails and not (chunk.fails == "part" and not chunk.parts)):
                expected.append("error")
            else:
                expected += [f"{number}{i}.{b}" for b in range(chunk.num_batches)]
        if chunks:
            carried = []
        if window.carried:
            carried.append((window, bool(failed)))
    return windows, expected, largest, max(1, need + largest)


def soak_chunk(name: str, plan: ChunkPlan) -> FakeChunk:
    return FakeChunk(
        name,
        nbytes=plan.nbytes,
        num_batches=plan.num_batches,
        on_begin=fail("begin") if plan.fails == "begin" else nothing,
        parts=[fail("part") if plan.fails == "part" else nothing] * plan.parts,
        on_finish=fail("finish") if plan.fails == "finish" else nothing,
    )


@settings(max_examples=80, deadline=None)
@given(soaks)
def test_any_stream_runs_to_its_end_in_order_and_gives_everything_back(plan: Soak) -> None:
    windows, expected, largest, need = built(plan)
    limit, kept, seen = need + plan.spare, [], []
    with running(
        windows,
        limit=limit,
        depth=plan.depth,
        max_windows=plan.max_windows,
        num_readers=plan.num_readers,
        num_workers=plan.num_workers,
        keep_bytes=largest,
    ) as engine:
        for turn in range(10**6):
            try:
                batches = engine.next_batches()
            except BoomError:
                seen.append("error")
                continue
            if not batches:
                break
            seen += names(batches)
            kept += batches if plan.keep[turn % len(plan.keep)] else []
            held = ledger_of(engine).snapshot()
            assert held.window_bytes + held.building_bytes + held.ready_bytes <= limit
        assert seen == expected
        assert [window.closed for window in windows] == [1] * len(windows)
        held = ledger_of(engine).snapshot()
        assert (held.window_bytes, held.building_bytes, held.ready_bytes) == (0, 0, 0)
        batches = ()
        kept.clear()
        assert_nothing_held(engine)
    assert [window.closed for window in windows] == [1] * len(windows)


def test_windows_are_hurried_only_while_the_consumer_waits_for_their_reads() -> None:
    gates = [Gate(), Gate()]
    windows = [FakeWindow(FakeChunk(str(i)), reads=[gate]) for i, gate in enumerate(gates)]
    windows[0].when_hurried = gates[0].open  # what a second request would bring about
    with running(windows) as engine:
        assert [window.hurried for window in windows] == [0, 0]
        assert [batch.name for batch in engine.next_batches()] == ["0.0"]
        assert windows[0].hurried >= 1
        assert windows[1].hurried == 0
        gates[1].open()


def test_closing_interrupts_reads_before_it_waits_for_them() -> None:
    gate = Gate()
    window = FakeWindow(FakeChunk("a"), reads=[gate])
    with running([window], interrupt=gate.open) as engine:
        gate.wait_until_begun()
        engine.close()
    assert window.closed


# ---- building in the consumer's thread ------------------------------------------------------------------


def run_here(task: Action) -> None:
    task()


def test_the_consumer_builds_a_chunk_that_no_thread_has_begun():
    gate = Gate()  # whoever begins the first chunk waits for another thread to begin the second
    first, second = FakeChunk("0", on_begin=gate), FakeChunk("1", on_begin=gate.open)
    with running([FakeWindow(first, second)], num_workers=1, in_consumer=run_here) as engine:
        assert next_names(engine) == ["0.0"]
        assert next_names(engine) == ["1.0"]
        assert first.begun == second.begun == 1


def test_ctrl_c_while_the_consumer_builds_is_raised_at_once():
    def interrupt() -> None:
        raise KeyboardInterrupt

    gate = Gate()
    window = FakeWindow(FakeChunk("0", on_begin=gate), FakeChunk("1", on_begin=interrupt))
    with running([window], num_workers=1, in_consumer=run_here) as engine:
        gate.wait_until_begun()
        with pytest.raises(KeyboardInterrupt):
            engine.next_batches()
        gate.open()


def test_close_waits_for_the_chunk_that_the_consumer_builds():
    in_worker, in_consumer = Gate(), Gate()
    chunks = FakeChunk("0", on_begin=in_worker), FakeChunk("1", on_begin=in_consumer)
    with running([FakeWindow(*chunks)], num_workers=1, in_consumer=run_here) as engine:
        in_worker.wait_until_begun()
        consumer = threading.Thread(target=lambda: suppressed(engine.next_batches))
        consumer.start()
        in_consumer.wait_until_begun()
        engine._readers.close = in_worker.open  # type: ignore[method-assign]
        engine._workers.close = after(engine._workers.close, in_consumer.open)  # type: ignore[method-assign]
        readers = engine._readers
        engine.close()
        type(readers).close(readers)
        consumer.join(TIMEOUT_S)
        assert chunks[1].finished == 1  # which asserts that its window was open


def suppressed(action: Callable[[], object]) -> None:
    with suppress(RuntimeError):
        action()


def after(first: Action, then: Action) -> Action:
    def both() -> None:
        first()
        then()

    return both
