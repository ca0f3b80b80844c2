"""A value that is computed once for each object, without a lock that other objects share."""

from __future__ import annotations

import gc
import threading

import pytest
from forked_kit import exit_code_in_child

from sharding import cached_property as module
from sharding.cached_property import cached_property

TIMEOUT_S = 30


class Square:
    """Computes when its gate is open."""

    def __init__(self, side: int, *, open_: bool = True) -> None:
        self.side, self.num_computed = side, 0
        self.begun, self.gate = threading.Event(), threading.Event()
        if open_:
            self.gate.set()

    @cached_property
    def area(self) -> int:
        """What it covers."""
        self.num_computed += 1
        self.begun.set()
        assert self.gate.wait(TIMEOUT_S)
        return self.side**2

    @cached_property
    def circumference(self) -> int:
        """What goes round it."""
        return 4 * self.side


def test_it_is_computed_once_for_each_object() -> None:
    one, other = Square(2), Square(3)
    assert [one.area, one.area, other.area] == [4, 4, 9]
    assert (one.num_computed, other.num_computed) == (1, 1)


def test_a_class_gives_the_descriptor_with_its_words() -> None:
    assert Square.area.__doc__ == "What it covers."


def test_one_object_does_not_wait_for_another_nor_does_a_child_forked_meanwhile() -> None:
    slow = Square(5, open_=False)
    thread = threading.Thread(target=lambda: slow.area)
    thread.start()
    assert slow.begun.wait(TIMEOUT_S)

    def work() -> None:
        assert Square(4).area == 16

    assert exit_code_in_child(work) == 0
    assert Square(6).area == 36
    slow.gate.set()
    thread.join(TIMEOUT_S)
    assert slow.area == 25


class CollectingLock:
    """Has whatever is made next begin a garbage collection."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()
        gc.enable()

    def __exit__(self, *_: object) -> None:
        gc.disable()
        self.lock.release()


def test_no_other_thread_stores_while_the_dictionary_of_an_object_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    square, was_blocked, drained = Square(3), list[bool](), list[dict[str, int]]()
    other = threading.Thread(target=lambda: square.circumference)

    def collecting(phase: str, _: object) -> None:
        if phase == "start" and not was_blocked:
            other.start()
            other.join(0.1)
            was_blocked.append(other.is_alive())

    monkeypatch.setattr(module, "_storing", CollectingLock())
    usual, was_on = gc.get_threshold(), gc.isenabled()
    gc.disable()
    gc.callbacks.append(collecting)
    try:
        drained.extend({} for _ in range(200))  # freed ones would be used again, without a collection
        gc.set_threshold(1)
        assert square.area == 9
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*usual)
        if was_on:
            gc.enable()
    if not was_blocked:
        pytest.skip("this Python collects at other moments")
    other.join(TIMEOUT_S)
    assert was_blocked == [True]
    assert vars(square)["area"] == 9
    assert vars(square)["circumference"] == 12
