"""Worker threads: own queues, one mailbox, and an end that a hanging task cannot hold up."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from threads_kit import interrupted_at_every_instruction, threads_left

from prefetch.engine.pool import SWITCH_INTERVAL_S, PriorityPool
from prefetch.workers.threads import WorkerThreads

TIMEOUT_S = 20


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    made = WorkerThreads(2, "test-threads")
    yield made
    made.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("test-threads")]


def test_a_thread_runs_its_own_tasks_in_order(threads: WorkerThreads) -> None:
    gate, ran = threading.Event(), []
    threads.submit(0, gate.wait)
    for number in range(5):
        threads.submit(0, lambda number=number: ran.append(number))
    threads.submit(0, lambda: threads.put("end"))
    threads.submit(1, lambda: threads.put("other"))
    assert threads.wait(TIMEOUT_S) == ["other"]
    assert ran == []
    gate.set()
    assert threads.wait(TIMEOUT_S) == ["end"]
    assert ran == [0, 1, 2, 3, 4]


def test_what_is_finished_is_received_once_and_in_order(threads: WorkerThreads) -> None:
    assert threads.receive() == []
    threads.on_all(lambda number: threads.put(number))
    assert sorted(threads.receive()) == [0, 1]
    assert threads.receive() == []
    assert threads.wait(0.01) == []


def test_on_all_waits_for_every_thread(threads: WorkerThreads) -> None:
    together, names = threading.Barrier(2, timeout=TIMEOUT_S), []

    def meet(number: int) -> None:
        together.wait()
        names.append((number, threading.current_thread().name))

    threads.on_all(meet)
    assert sorted(names) == [(0, "test-threads-0-0"), (1, "test-threads-1-0")]


def test_stacks_tell_what_each_thread_is_doing(threads: WorkerThreads) -> None:
    begun, gate = threading.Event(), threading.Event()

    def standing_here() -> None:
        begun.set()
        gate.wait()

    threads.submit(1, standing_here)
    assert begun.wait(TIMEOUT_S)
    said = threads.stacks()
    gate.set()
    assert "standing_here" in said.partition("worker thread 1:")[2]
    assert "standing_here" not in said.partition("worker thread 1:")[0]


def test_tasks_that_have_not_begun_are_dropped() -> None:
    threads, ran = WorkerThreads(2, "test-threads"), []
    begun, gates = threading.Barrier(3, timeout=TIMEOUT_S), [threading.Event() for _ in range(2)]

    def hold(gate: threading.Event) -> None:
        begun.wait()
        gate.wait(TIMEOUT_S)

    for number, gate in enumerate(gates):
        threads.submit(number, partial(hold, gate))
        threads.submit(number, lambda: ran.append(1))
    begun.wait()
    [second] = [thread for thread in threading.enumerate() if thread.name == "test-threads-1-0"]
    closing = threading.Thread(target=threads.close)
    closing.start()
    assert threads.wait(TIMEOUT_S) == []  # both were stopped before any is waited for
    gates[1].set()
    second.join(TIMEOUT_S)
    assert not second.is_alive()
    gates[0].set()
    closing.join(TIMEOUT_S)
    threads.close()
    threads.submit(0, lambda: ran.append(2))
    assert ran == []


def test_a_hanging_task_does_not_hold_up_the_end_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    threads = WorkerThreads(1, "test-threads", stop_s=0.05)
    begun, gate = threading.Event(), threading.Event()

    def hanging() -> None:
        begun.set()
        gate.wait()

    threads.submit(0, hanging)
    assert begun.wait(TIMEOUT_S)
    with caplog.at_level(logging.WARNING, "dataflow"):
        threads.close()
    assert "in hanging" in caplog.text
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("test-threads"):
            thread.join(TIMEOUT_S)


def test_the_interpreter_is_handed_over_quickly_while_threads_live() -> None:
    before = sys.getswitchinterval()
    threads = WorkerThreads(1, "test-threads")
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    threads.close()
    threads.close()
    assert sys.getswitchinterval() == before


def test_threads_whose_owner_is_dropped_without_being_closed_end() -> None:
    dropped = WorkerThreads(2, "test-dropped")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("test-dropped")]
    assert len(threads) == 2
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    del dropped
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert threads_left("dataflow-close") == []  # the one that has told them to
    assert sys.getswitchinterval() > SWITCH_INTERVAL_S


@pytest.mark.parametrize("function", [WorkerThreads.__init__, PriorityPool.__init__])
def test_a_ctrl_c_at_any_instruction_while_threads_start_leaves_none(function: Callable[..., Any]) -> None:
    def action() -> None:
        WorkerThreads(2, "test-begun").close()

    assert interrupted_at_every_instruction(function, action) > 20
    assert threads_left("test-begun") == []
