"""Tasks that run when an object has died, and not where it dies; blocks that Ctrl-C waits for."""

from __future__ import annotations

import gc
import operator
import os
import signal
import subprocess
import sys
import threading
from _thread import interrupt_main
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from threads_kit import compute_until_interrupted, python_calls, threads_left

from prefetch.memory.interrupts import HiddenThread, Uninterrupted
from prefetch.memory.lifetimes import Finalizer, InlineFinalizer, WeakCallback

WAIT_S = 10


class Owner:
    """Something that dies."""


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads_left("dataflow-close") == []


def test_the_task_runs_once_the_owner_has_died_in_another_thread() -> None:
    ran: list[threading.Thread] = []
    done = threading.Event()
    owners = [Owner()]
    finalizer = Finalizer(owners[0], lambda: (ran.append(threading.current_thread()), done.set()))
    assert not done.is_set()
    owners.clear()
    assert done.wait(WAIT_S)
    assert ran[0] is not threading.main_thread()
    finalizer.detach()
    assert len(ran) == 1


def test_nothing_of_python_runs_where_the_owner_dies() -> None:
    done = threading.Event()
    owners = [Owner()]
    finalizer = Finalizer(owners[0], done.set)
    assert python_calls(owners.clear) == []
    assert done.wait(WAIT_S)
    del finalizer


def test_an_owner_in_a_cycle_is_heard_of_though_the_finalizer_is_in_it() -> None:
    done, owner = threading.Event(), Owner()
    owner.me, owner.finalizer = owner, Finalizer(owner, done.set)  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert done.wait(WAIT_S)


def test_a_task_that_was_detached_does_not_run() -> None:
    ran: list[int] = []
    owner = Owner()
    finalizer = Finalizer(owner, lambda: ran.append(1))
    finalizer.detach()
    finalizer.detach()
    del owner
    assert threads_left("dataflow-close") == []
    assert ran == []


def test_fire_runs_the_task_of_an_owner_that_lives() -> None:
    done, owner = threading.Event(), Owner()
    Finalizer(owner, done.set).fire()
    assert done.wait(WAIT_S)


AT_EXIT = """
import sys, threading
from prefetch.memory.lifetimes import Finalizer
class Owner: pass
owner = Owner()
kept = [Finalizer(owner, lambda: print(threading.current_thread().name)), owner]
kept.append(kept)
gone = Owner()
Finalizer(gone, lambda: print("never")).detach()
"""


def test_the_end_of_the_program_runs_the_task() -> None:
    command = [sys.executable, "-W", "error", "-c", AT_EXIT]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=root)
    assert (done.stdout, done.stderr, done.returncode) == ("MainThread\n", "", 0)


def test_a_watch_makes_its_call_once_and_none_before_it_is_set() -> None:
    calls: list[int] = []
    owner = Owner()
    watch = WeakCallback(owner)
    assert watch() is owner
    del owner
    assert watch() is None
    owner = Owner()
    watch = WeakCallback(owner)
    watch.call = [1, 2].pop
    watch.call = lambda: calls.append(1)
    del owner
    assert calls == [1]


def test_a_task_in_place_has_run_when_the_code_goes_on() -> None:
    ran: list[threading.Thread] = []
    owners = [Owner()]
    finalizer = InlineFinalizer(owners[0], lambda: ran.append(threading.current_thread()))
    owners.clear()
    assert ran == [threading.main_thread()]
    finalizer()
    assert len(ran) == 1


def test_a_task_in_place_runs_where_the_collector_finds_its_owner() -> None:
    ran: list[int] = []
    owner = Owner()
    owner.me, owner.finalizer = owner, InlineFinalizer(owner, lambda: ran.append(1))  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert ran == [1]


def test_a_task_in_place_that_was_called_leaves_nothing_to_run_where_the_owner_dies() -> None:
    ran: list[int] = []
    owners = [Owner()]
    finalizer = InlineFinalizer(owners[0], lambda: ran.append(1))
    finalizer()
    assert python_calls(owners.clear) == []
    assert ran == [1]


def test_ctrl_c_in_a_task_where_its_owner_dies_is_raised_behind_it() -> None:
    owners, reached = [Owner()], False
    finalizer = InlineFinalizer(owners[0], press)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  what is behind is what is tested
        owners.clear()
        reached = True
        compute_until_interrupted()
    assert reached
    del finalizer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is printed, too
def test_ctrl_c_that_came_just_before_a_task_where_its_owner_dies_is_raised_behind_it() -> None:
    """It is raised where Python code begins to run next: in what runs where the owner dies."""
    owners, ran = [Owner()], []
    finalizer = InlineFinalizer(owners[0], lambda: ran.append(1))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  what is behind is what is tested
        deque(map(operator.call, (interrupt_main, owners.clear)), maxlen=0)  # without Python code between
        compute_until_interrupted()
    assert ran == [1]
    del finalizer


def test_ctrl_c_in_a_task_that_is_called_is_raised_by_it_and_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("prefetch.memory.lifetimes.start_new_thread", lambda *call: sent.append(call))
    owner = Owner()
    finalizer = InlineFinalizer(owner, press)
    with pytest.raises(KeyboardInterrupt):
        finalizer()
    del owner
    assert sent == []


# ---- blocks ------------------------------------------------------------------------------------------------


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_raised_behind_the_block() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), Uninterrupted():  # noqa: PT012  the block is what is tested
        press()
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_raised_at_once() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), Uninterrupted():  # noqa: PT012
        press()
        press()
        reached = True
    assert not reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_block_is_the_interrupts_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Uninterrupted():  # noqa: PT012
        press()
        raise ValueError("in the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_programs_is_asked_behind_the_block() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with Uninterrupted():
            press()
            assert heard == []
        assert heard == [signal.SIGINT]
        with Uninterrupted():
            pass
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_and_ignored_interrupts_are_left_alone() -> None:
    inside: list[Any] = []

    def run() -> None:
        with Uninterrupted():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert inside == [before, signal.SIG_IGN]


def test_the_object_of_a_thread_dies_without_python_code() -> None:
    threads = [HiddenThread(target=list, name="test-unlisted")]
    threads[0].start()
    threads[0].join(WAIT_S)
    assert python_calls(threads.clear) == []
