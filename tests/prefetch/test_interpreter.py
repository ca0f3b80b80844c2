"""What holds without the interpreter lock, which is only said to be gone: the other way is taken then."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest

from prefetch.core.queue import CopyQueue
from prefetch.engine.pool import PriorityPool
from prefetch.interpreter import frames_of_threads, has_lock, taken_by_one
from prefetch.store.retrier import Hosts
from prefetch.workers.threads import WorkerThreads

TIMEOUT_S = 30


@pytest.fixture
def _no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)


def test_pythons_that_do_not_tell_have_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    assert has_lock()
    gate = threading.Event()
    other = threading.Thread(target=gate.wait, args=(TIMEOUT_S,))
    other.start()
    assert other.ident in frames_of_threads()
    gate.set()
    other.join()


def test_to_look_at_frames_keeps_nothing_that_they_hold() -> None:
    class Held:
        pass

    def look() -> weakref.ref[Held]:
        held, frames = Held(), frames_of_threads()
        assert frames is not None
        return weakref.ref(held)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_frames_are_taken(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """A collection there may wait for a lock that its own thread holds (Python 3.11)."""
    seen: list[bool] = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    if not enabled:
        gc.disable()
    try:
        frames_of_threads()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False]


@pytest.mark.usefixtures("_no_lock")
def test_without_the_lock_nobody_looks_at_frames_of_threads_that_run() -> None:
    assert not has_lock()
    assert frames_of_threads() == {}
    running, ended = threading.Event(), threading.Event()
    pool = PriorityPool(1, "test")
    pool.submit(0, lambda: (running.set(), ended.wait(TIMEOUT_S)))
    assert running.wait(TIMEOUT_S)
    assert pool.contexts() == []
    ended.set()
    assert pool.close(TIMEOUT_S)
    threads = WorkerThreads(1, "test")
    assert "does not tell" in threads.stacks()
    threads.close()


def test_each_of_a_list_is_taken_by_one_thread_and_the_last_one_first() -> None:
    assert [*taken_by_one([1, 2, 3])] == [3, 2, 1]
    stack, taken = [*range(10_000)], [list[int]() for _ in range(4)]
    begin = threading.Barrier(4)

    def take(own: list[int]) -> None:
        begin.wait(TIMEOUT_S)
        own.extend(taken_by_one(stack))

    threads = [threading.Thread(target=take, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(number for own in taken for number in own) == [*range(10_000)]


class SlowToClose:
    """A compiled core whose queues take until they are told to close."""

    core_take = core_give = None

    def __init__(self) -> None:
        self.closed = 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def core_queue_bytes(self) -> int:
        return 64

    def core_open(self, *_: Any) -> int:
        return 1

    def core_close(self, _: int) -> None:
        self.closed += 1
        self.begun.set()
        assert self.may_end.wait(TIMEOUT_S)


def test_of_several_that_close_a_queue_at_a_time_one_does() -> None:
    library = SlowToClose()
    queue = CopyQueue(library, library, 1, 1)
    first = threading.Thread(target=queue.close)
    first.start()
    assert library.begun.wait(TIMEOUT_S)
    queue.close()
    library.may_end.set()
    first.join(TIMEOUT_S)
    queue.close()
    assert library.closed == 1


def test_hosts_are_copied_before_they_are_pickled() -> None:
    hosts = Hosts()
    hosts.add("s3://bucket/key")
    assert hosts.__getstate__()["_hosts"] is not hosts._hosts
    assert "s3://bucket/other" in pickle.loads(pickle.dumps(hosts))
