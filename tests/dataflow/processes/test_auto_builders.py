"""Which chunks are built, and by whom, before it is known who builds, and while processes start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dataflow.processes.auto import AutoBuilders
from dataflow.processes.builder_main import run
from dataflow.processes.choice import ChoiceMemory, WorkerChoice
from dataflow.processes.server import BUILDER_MAIN

TIMEOUT_S = 20


class FakeBuild:
    """A build that somebody may be at."""

    chunk = progress = None

    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, piece: object) -> None: ...

    def end(self, error: BaseException | None = None) -> None: ...


class FakeBuilders:
    """Builders that note what they are given."""

    num_builders, busy_s = 16, 0.0

    def __init__(self) -> None:
        self.given: list[Any] = []

    def build(self, build: Any) -> None:
        self.given.append(build)

    def has(self, build: Any) -> bool:
        return False

    def stats(self) -> Any:
        return SimpleNamespace(busy_s=self.busy_s)

    def stop(self) -> None: ...

    close = stop

    @property
    def numbers(self) -> list[int]:
        return [build.number for build in self.given]


class FakeStart:
    """The start of processes, which ends when the test says so."""

    def __init__(self) -> None:
        self.processes, self._is_opened = FakeBuilders(), threading.Event()
        self.tell: Callable[[BaseException | None], None] | None = None

    def open(self, on_start: Callable[[BaseException | None], None]) -> Any:
        self.tell = on_start
        return self.processes

    def end(self, builders: AutoBuilders, error: BaseException | None = None) -> None:
        builders._pool.submit(1, self._is_opened.set)
        assert self._is_opened.wait(TIMEOUT_S)
        assert self.tell is not None
        self.tell(error)


def builders_of(threads: FakeBuilders, start: FakeStart, choice: WorkerChoice | None = None) -> AutoBuilders:
    memory = ChoiceMemory(choice)
    numbers = {"num_processes": 16, "num_cores": 16, "memory": memory}
    return AutoBuilders(cast(Any, threads), start.open, None, **numbers)  # type: ignore[arg-type]


def test_before_a_trial_two_chunks_are_built_at_a_time_the_most_urgent_first() -> None:
    """More would share one interpreter lock, and the first batch would wait for all of them."""
    threads = FakeBuilders()
    builders = builders_of(threads, FakeStart())
    for number in (0, 1, 4, 3, 2):
        builders.build(cast(Any, FakeBuild(number)))
    assert threads.numbers == [0, 1]
    threads.given[1].end()
    assert threads.numbers == [0, 1, 2]
    builders.close()


def test_a_trial_begins_with_the_next_chunk_when_those_that_were_begun_have_ended() -> None:
    threads = FakeBuilders()
    builders = builders_of(threads, FakeStart())
    for number in range(4):
        builders.build(cast(Any, FakeBuild(number)))
    threads.busy_s = 1000
    threads.given[0].end()
    assert threads.numbers == [0, 1]
    threads.given[1].end()
    assert threads.numbers == [0, 1, 2]
    assert type(threads.given[2].chunk).__name__ == "_TriedChunk"
    builders.close()


@pytest.mark.parametrize("error", [None, OSError("no memory")])
def test_while_processes_start_most_chunks_wait_for_them(error: OSError | None) -> None:
    """What threads had begun would keep the interpreter lock from the training long after that."""
    threads, start = FakeBuilders(), FakeStart()
    builders = builders_of(threads, start, WorkerChoice("process", "faster"))
    for number in range(6):
        builders.build(cast(Any, FakeBuild(number)))
    assert threads.numbers == [0, 1]
    threads.given[0].end()
    assert threads.numbers == [0, 1, 2]
    start.end(builders, error)
    others = start.processes if error is None else threads
    assert others.numbers[-3:] == [3, 4, 5]
    builders.build(cast(Any, FakeBuild(6)))
    assert others.numbers[-1] == 6
    assert threads.numbers[:3] == [0, 1, 2]
    builders.close()


def test_the_server_of_builders_imports_what_they_run() -> None:
    assert run.__module__ == BUILDER_MAIN
