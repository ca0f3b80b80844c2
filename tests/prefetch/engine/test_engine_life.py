"""How an engine ends, and what its consumer's thread does: closing, forks, builds in that thread."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
from engine_kit import (
    TIMEOUT_S,
    Batch,
    FakeChunk,
    FakeWindow,
    Gate,
    after,
    names,
    next_names,
    nothing,
    one_chunk_windows,
    options_of,
    outcomes,
    running,
    when_the_consumer_waits,
)
from forked_kit import fork

from prefetch.engine.engine import Engine
from prefetch.work import PartialChunk

# ---- life --------------------------------------------------------------------------------------------------


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
    with running(windows, num_readers=1, interrupt=gate.open) as engine:
        gate.wait_until_begun()
        engine.close()
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
        closer, builders = threading.Thread(target=engine.close), engine._builders
        when_the_consumer_waits(engine, closer.start)
        builders.stop = after(builders.stop, gate.open)  # type: ignore[method-assign]  # it is closed by then
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
        with options_of(engine).monitor:  # a garbage collection may start inside the critical section
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
        def finish(self) -> Iterator[PartialChunk[Batch]]:
            for part in super().finish():
                watched.append(weakref.ref(part.batches[0]))
                yield part
                del part

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
