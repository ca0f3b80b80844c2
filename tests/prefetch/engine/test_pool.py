"""The priority pool: which task runs next, and what `close` does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import prefetch.engine.pool
from prefetch.engine.pool import PriorityPool, context_in

TIMEOUT_S = 10


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("test-pool")]
    assert not left


class Gate:
    """A task that says when it has begun and runs until it is opened."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.finished = False

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(TIMEOUT_S)
        self.finished = True


def run_behind_a_gate(deadlines: list[int]) -> list[int]:
    """Submit tasks while the only thread is busy; the order they ran in, by number."""
    pool, gate, done = PriorityPool(1, "test-pool"), Gate(), threading.Event()
    ran: list[int] = []
    try:
        pool.submit(0, gate)
        assert gate.begun.wait(TIMEOUT_S)
        for number, deadline in enumerate(deadlines):
            pool.submit(deadline, lambda number=number: ran.append(number))
        assert pool.stats().queued == len(deadlines)
        pool.submit(max(deadlines, default=0) + 1, done.set)
        gate.opened.set()
        assert done.wait(TIMEOUT_S)
    finally:
        gate.opened.set()
        pool.close()
    return ran


@given(st.lists(st.integers(-3, 3), max_size=12))
def test_the_smallest_deadline_runs_first_and_ties_in_order_of_submission(deadlines: list[int]) -> None:
    expected = sorted(range(len(deadlines)), key=lambda i: (deadlines[i], i))
    assert run_behind_a_gate(deadlines) == expected


def test_tasks_run_on_as_many_threads_as_asked_for() -> None:
    pool, together = PriorityPool(3, "test-pool"), threading.Barrier(4, timeout=TIMEOUT_S)
    assert pool.stats().threads == 3
    for _ in range(3):
        pool.submit(0, lambda: together.wait() and None)
    together.wait()
    pool.close()


def test_a_task_that_runs_counts_as_work_before_it_ends() -> None:
    pool, gate = PriorityPool(1, "test-pool"), Gate()

    def work() -> None:
        pool.begin()
        gate()
        pool.account()

    pool.submit(0, work)
    assert gate.begun.wait(TIMEOUT_S)
    first = pool.stats()
    assert pool.stats().busy_s > first.busy_s > 0
    gate.opened.set()
    pool.close()
    last = pool.stats()
    assert (first.tasks, last.tasks) == (0, 1)
    assert last.cpu_s < last.busy_s, "it waited at the gate"


def test_close_drops_what_waits_and_joins_what_runs() -> None:
    class Dropped:
        def __call__(self) -> None:
            raise AssertionError("it was not dropped")

    pool, gate, waiting = PriorityPool(1, "test-pool"), Gate(), Dropped()
    pool.submit(0, gate)
    assert gate.begun.wait(TIMEOUT_S)
    watch = weakref.ref(waiting, lambda _: gate.opened.set())  # the running task goes on once it is dropped
    pool.submit(0, waiting)
    del waiting
    pool.close()
    assert gate.finished
    assert watch() is None
    assert pool.stats().queued == 0


def test_stop_drops_what_waits_and_does_not_wait_for_what_runs() -> None:
    pool, gate, ran = PriorityPool(1, "test-pool"), Gate(), []
    pool.submit(0, gate)
    assert gate.begun.wait(TIMEOUT_S)
    pool.submit(0, lambda: ran.append("dropped"))
    pool.stop()
    assert not gate.finished
    gate.opened.set()
    pool.close()
    assert gate.finished
    assert ran == []


def test_a_task_knows_that_it_runs_in_the_pool() -> None:
    pool, other, seen, done = (
        PriorityPool(1, "test-pool"),
        PriorityPool(1, "test-pool"),
        [],
        threading.Event(),
    )

    def look() -> None:
        seen.append((pool.runs_here, other.runs_here))
        done.set()

    pool.submit(0, look)
    assert done.wait(TIMEOUT_S)
    assert seen == [(True, False)]
    assert not pool.runs_here
    pool.close()
    other.close()


def test_close_drops_tasks_even_when_it_is_called_by_a_running_one() -> None:
    pool, closed, ran = PriorityPool(1, "test-pool"), threading.Event(), []
    together = threading.Event()

    def close_the_pool() -> None:
        assert together.wait(TIMEOUT_S)
        pool.close()  # as a finaliser may, in any thread; must not join itself
        closed.set()

    pool.submit(0, close_the_pool)
    pool.submit(1, lambda: ran.append("dropped"))
    together.set()
    assert closed.wait(TIMEOUT_S)
    pool.close()
    assert ran == []


def test_close_may_come_twice_and_from_two_threads() -> None:
    pool = PriorityPool(2, "test-pool")
    others = [threading.Thread(target=pool.close) for _ in range(2)]
    for other in others:
        other.start()
    pool.close()
    pool.close()
    for other in others:
        other.join(TIMEOUT_S)
        assert not other.is_alive()


def test_a_task_after_close_is_ignored() -> None:
    pool, ran = PriorityPool(1, "test-pool"), []
    pool.close()
    pool.submit(0, lambda: ran.append(1))
    assert ran == []
    assert pool.stats().queued == 0


def test_a_running_task_may_submit_another() -> None:
    pool, done = PriorityPool(1, "test-pool"), threading.Event()
    pool.submit(0, lambda: pool.submit(0, done.set))
    assert done.wait(TIMEOUT_S)
    pool.close()


def test_the_initializer_runs_first_in_every_thread() -> None:
    local, seen, together = threading.local(), [], threading.Barrier(3, timeout=TIMEOUT_S)

    def task() -> None:
        seen.append(local.ready)
        together.wait()

    def prepare() -> None:
        local.ready = True

    pool = PriorityPool(2, "test-pool", initializer=prepare)
    pool.submit(0, task)
    pool.submit(0, task)
    together.wait()
    pool.close()
    assert seen == [True, True]


def test_an_idle_thread_keeps_nothing_of_its_last_task_alive() -> None:
    class Task:
        def __call__(self) -> None:
            pass

    pool, died = PriorityPool(1, "test-pool"), threading.Event()
    task = Task()
    watch = weakref.ref(task, lambda _: died.set())
    pool.submit(0, task)
    del task
    assert died.wait(TIMEOUT_S)
    assert watch() is None
    pool.close()


def test_stacks_of_a_process_that_answers_nothing_tell_the_place() -> None:
    ours = Path(prefetch.engine.pool.__file__).parents[2] / "dataflow" / "x.py"
    frames = [
        'File "/usr/c.py", line 3 in wait',
        'File "/home/me.py", line 7 in slow',
        f'File "{ours}", line 9 in _apply',
    ]
    stacks = 'Thread 0x1 (most recent call first):\n  File "/usr/t.py", line 1 in run\n\n'
    stacks += "Current thread 0x2 (most recent call first):\n" + "\n".join(f"  {frame}" for frame in frames)
    assert context_in(stacks) == "in slow (/home/me.py, line 7)"
    assert context_in(stacks.rpartition("\n")[0]) == context_in("") == ""
