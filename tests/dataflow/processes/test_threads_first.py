"""Which chunks are built, and by whom, before processes are there, and from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from dataflow.processes.builder_main import run
from dataflow.processes.threads_first import ThreadsFirstBuilders
from dataflow.stream.resources import BUILDER_MAIN

TIMEOUT_S = 20


class FakeBuild:
    """A build that somebody may be at."""

    chunk: Any = None
    progress: Any = None

    def __init__(self, number: int, *, may_go_on: bool = True) -> None:
        self.number, self._may_go_on = number, may_go_on

    def may_go_on(self) -> bool:
        return self._may_go_on

    def add(self, part: object) -> None: ...

    def end(self, error: BaseException | None = None) -> None: ...


class FakeBuilders:
    """Builders that note what they are given."""

    num_builders = 16

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.is_stopped = False

    def build(self, build: Any) -> None:
        self.given.append(build)

    def has(self, build: Any) -> bool:
        return build.progress == "in a process"

    def stop(self) -> None:
        self.is_stopped = True

    close = stop

    @property
    def numbers(self) -> list[int]:
        return [build.number for build in self.given]


class FakeStart:
    """The start of processes, which ends when the test says so."""

    def __init__(self) -> None:
        self.processes, self._is_opened, self.is_done = FakeBuilders(), threading.Event(), threading.Event()
        self.tell: Callable[[BaseException | None], None] | None = None
        self.may_return = threading.Event()
        self.may_return.set()

    def open(self, on_start: Callable[[BaseException | None], None]) -> Any:
        self.tell = on_start
        self._is_opened.set()
        assert self.may_return.wait(TIMEOUT_S)
        return self.processes

    @property
    def has_begun(self) -> bool:
        return self._is_opened.is_set()

    def wait(self) -> None:
        assert self._is_opened.wait(TIMEOUT_S)

    def end(self, error: BaseException | None = None) -> None:
        self.wait()
        assert self.tell is not None
        self.tell(error)
        assert self.is_done.wait(TIMEOUT_S)


def builders_of(threads: FakeBuilders, start: FakeStart) -> ThreadsFirstBuilders:
    class Watched(ThreadsFirstBuilders):
        def _decide(self, workers: str, reason: str) -> None:
            super()._decide(workers, reason)
            start.is_done.set()

    return Watched(cast(Any, threads), start.open, num_processes=16, reason="they hold the lock")


def give(builders: ThreadsFirstBuilders, *numbers: int) -> None:
    for number in numbers:
        builders.build(cast(Any, FakeBuild(number)))


def test_until_processes_are_there_two_chunks_are_built_at_a_time_the_most_urgent_first() -> None:
    """More would share one interpreter lock, and the first batch would wait for all of them."""
    threads = FakeBuilders()
    builders = builders_of(threads, FakeStart())
    give(builders, 0, 1, 4, 3, 2)
    assert threads.numbers == [0, 1]
    threads.given[1].end()
    assert threads.numbers == [0, 1, 2]
    assert builders.choice == ("thread", "until 16 processes have started: they hold the lock")
    builders.close()


def test_processes_start_when_a_chunk_was_built_and_another_waits() -> None:
    threads, start = FakeBuilders(), FakeStart()
    builders = builders_of(threads, start)
    give(builders, 0, 1, 2)
    threads.given[0].end(ValueError("no chunk"))
    assert threads.numbers == [0, 1, 2]
    give(builders, 3)
    assert not builders._is_starting, "none was built"
    threads.given[1].end()
    assert threads.numbers == [0, 1, 2, 3]
    assert not builders._is_starting, "threads are at all there is: an epoch of two chunks needs no process"
    give(builders, 4)
    start.wait()
    builders.close()
    assert start.processes.is_stopped


def test_processes_that_open_while_all_stop_are_stopped_too() -> None:
    threads, start = FakeBuilders(), FakeStart()
    start.may_return.clear()
    builders = builders_of(threads, start)
    give(builders, 0, 1, 2, 3)
    threads.given[0].end()
    start.wait()
    builders.stop()
    assert not start.processes.is_stopped, "they are not there yet"
    start.may_return.set()
    builders._starter.close()
    assert start.processes.is_stopped
    builders.close()


@pytest.mark.parametrize("error", [None, OSError("no memory")])
def test_while_processes_start_most_chunks_wait_for_them(error: OSError | None) -> None:
    """What threads had begun would keep the interpreter lock from the training long after that."""
    threads, start = FakeBuilders(), FakeStart()
    builders = builders_of(threads, start)
    give(builders, *range(6))
    threads.given[0].end()
    assert threads.numbers == [0, 1, 2]
    start.end(error)
    others = start.processes if error is None else threads
    assert others.numbers[-3:] == [3, 4, 5]
    give(builders, 6)
    assert others.numbers[-1] == 6
    assert threads.numbers[:3] == [0, 1, 2]
    assert builders.num_builders == 16
    if error is None:
        assert builders.choice == ("process", "they hold the lock")
    else:
        assert builders.choice == ("thread", "processes could not be started: no memory (they hold the lock)")
        assert start.processes.is_stopped, "those that did start"
    builders.close()


def test_a_chunk_that_was_laid_aside_goes_on_where_it_was_begun() -> None:
    threads, start = FakeBuilders(), FakeStart()
    builders = builders_of(threads, start)
    aside: Any = FakeBuild(1, may_go_on=False)
    give(builders, 0)
    builders.build(aside)
    give(builders, 2, 3)
    threads.given[0].end()
    aside.progress = "in a thread"
    assert not threads.given[1].may_go_on()
    start.end()
    theirs: Any = FakeBuild(4)
    theirs.progress = "in a process"
    builders.build(aside)
    builders.build(theirs)
    assert threads.given[-1] is aside
    assert start.processes.given[-1] is theirs
    builders.close()


def test_the_server_of_builders_imports_what_they_run() -> None:
    assert run.__module__ == BUILDER_MAIN
