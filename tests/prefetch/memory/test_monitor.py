"""The monitor: a lock and a wait that a Ctrl-C at any moment leaves in order."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from threads_kit import Interrupting, interrupted_at_every_instruction

from prefetch.memory.interrupts import Monitor

WAIT_S = 10


def waiting(
    monitor: Monitor, count: int, timeout_s: float = WAIT_S
) -> tuple[list[threading.Thread], list[bool]]:
    """Threads that wait."""
    ready, notified = threading.Semaphore(0), []

    def wait() -> None:
        with monitor:
            ready.release()
            notified.append(monitor.wait(timeout_s))

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ready.acquire(timeout=WAIT_S)
    with monitor:  # whoever was ready holds it until it waits
        return threads, notified


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def assert_owned(monitor: Monitor) -> None:
    monitor.release()  # an error, if it is not
    monitor.acquire()


def assert_in_order(monitor: Monitor) -> None:
    """Nobody has it, and a notice goes to the one who waits now: not to one whose wait has ended."""
    with pytest.raises(RuntimeError):
        monitor.release()
    threads, notified = waiting(monitor, 1)
    with monitor:
        monitor.notify()
    joined(threads)
    assert notified == [True]


def test_notify_wakes_the_one_that_waits_longest_and_no_other() -> None:
    monitor = Monitor()
    first, notified = waiting(monitor, 1)
    others, notified_too = waiting(monitor, 2, timeout_s=0.2)
    with monitor:
        monitor.notify()
    joined(first + others)
    assert (notified, notified_too) == ([True], [False, False])


def test_notify_all_wakes_all() -> None:
    monitor = Monitor()
    threads, notified = waiting(monitor, 3)
    with monitor:
        monitor.notify_all()
    joined(threads)
    assert notified == [True] * 3
    with monitor:
        monitor.notify()
        monitor.notify_all()
    assert_in_order(monitor)


def test_a_wait_that_nobody_ends_takes_the_lock_again_as_often_as_it_was_held() -> None:
    monitor = Monitor()
    with monitor, monitor:
        assert not monitor.wait(0.001)
        assert_owned(monitor)
    assert_in_order(monitor)


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_waiter_that_was_told_and_not_taken_out_costs_nobody_its_notice(is_woken: bool) -> None:
    monitor = Monitor()
    threads, notified = waiting(monitor, 2)
    with monitor:
        lock, told = monitor._waiters[0]
        told.append(True)  # as when a Ctrl-C comes between the steps of `notify`
        if is_woken:
            lock.release()
            while not lock.locked():  # the thread has it, and waits for the monitor
                os.sched_yield()
        monitor.notify()
    joined(threads)
    assert notified == [True] * 2
    assert_in_order(monitor)


@pytest.mark.parametrize("notified", [False, True])
def test_a_ctrl_c_at_any_instruction_of_a_wait_leaves_the_lock_in_order(notified: bool) -> None:
    monitor = Monitor()

    def action() -> None:
        with monitor:
            waker = threading.Thread(target=wake)
            waker.start()
            try:
                monitor.wait(WAIT_S if notified else 0.0)
            finally:
                assert_owned(monitor)

    def wake() -> None:
        with monitor:
            monitor.notify_all()

    count = interrupted_at_every_instruction(Monitor.wait, action)
    assert count > 20
    joined([thread for thread in threading.enumerate() if thread.name.endswith("(wake)")])
    assert_in_order(monitor)  # the last of those that wake has taken out what was left


@pytest.mark.parametrize("function", [Monitor.notify, Monitor.notify_all])
def test_a_ctrl_c_at_any_instruction_of_a_notice_loses_no_waiter(function: Callable[..., Any]) -> None:
    monitor = Monitor()
    at = 0
    while True:
        strike = Interrupting(function.__code__, at)  # type: ignore[attr-defined]
        threads, _ = waiting(monitor, 2)
        sys.settrace(strike)
        try:
            with monitor:
                function(monitor)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        with monitor:
            monitor.notify_all()
        joined(threads)
        if not strike.struck:
            break
        at += 1
    assert at > 10
