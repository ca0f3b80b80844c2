"""The engine with builders that are not threads: they fail, delay and die when the test says so."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import pytest
from engine_kit import (
    TIMEOUT_S,
    Batch,
    BoomError,
    FakeChunk,
    FakeWindow,
    assert_nothing_held,
    ledger_of,
    next_names,
    outcomes,
    running,
    when_the_consumer_waits,
)

from prefetch.engine.builders import Build
from prefetch.engine.stats import StageStats
from prefetch.errors import StallError


class DiedError(Exception):
    """A builder is gone, as a process that was killed."""


class FakeBuilders:
    """Builders somewhere else: nothing is built before the test says so, in its thread."""

    def __init__(self, num_builders: int = 4) -> None:
        self.num_builders = num_builders
        self.runs_here = self.needs_consumer = False
        self.copies = None
        self.stopped = self.closed = 0
        self._submitted: deque[Build[Batch]] = deque()
        self._count = threading.Semaphore(0)

    def build(self, build: Build[Batch]) -> None:
        self._submitted.append(build)
        self._count.release()

    def work(self) -> None: ...

    def contexts(self) -> list[str]:
        return ["in another place"]

    def stats(self) -> StageStats:
        return StageStats(self.num_builders, 0.0, 0, len(self._submitted))

    def stop(self) -> None:
        self.stopped += 1

    def close(self) -> None:
        self.closed += 1

    def receive(self) -> Build[Batch]:
        """The next build that the engine hands out."""
        assert self._count.acquire(timeout=TIMEOUT_S), "nothing was handed out"
        return self._submitted.popleft()

    @property
    def has_work(self) -> bool:
        return bool(self._submitted)


def make(build: Build[Batch], most: int = 100) -> bool:
    """Make parts of a build as long as the engine lets it; whether its chunk is whole. Does not end it."""
    if build.progress is None:
        for part in build.chunk.begin():
            part()
        build.progress = build.chunk.finish()
    for _ in range(most):
        if not build.may_go_on():
            return False
        part = next(build.progress, None)
        if part is None:
            return True
        build.add(part)
    return False


def window_of(*names: str, **settings: object) -> list[FakeWindow]:
    return [FakeWindow(*(FakeChunk(name, **settings) for name in names))]  # type: ignore[arg-type]


def test_chunks_come_in_order_from_builders_that_end_backwards() -> None:
    builders = FakeBuilders()
    with running(window_of("a", "b", "c", nbytes=10), builders=builders) as engine:
        builds = [builders.receive() for _ in "abc"]
        assert [build.number for build in builds] == [0, 1, 2]
        for build in reversed(builds):
            assert make(build)
            build.end()
        assert outcomes(engine) == ["a.0", "b.0", "c.0"]
        assert_nothing_held(engine)


def test_an_error_of_a_builder_comes_in_its_place() -> None:
    builders = FakeBuilders()
    with running(window_of("a", "b", "c", nbytes=10), builders=builders) as engine:
        first, second, third = (builders.receive() for _ in "abc")
        second.end(BoomError("b"))
        for build in (first, third):
            make(build)
            build.end()
        assert outcomes(engine) == ["a.0", "error b", "c.0"]
        assert_nothing_held(engine)


def test_what_a_builder_has_finished_before_it_dies_comes_before_the_error_and_gives_its_credits_back() -> (
    None
):
    builders = FakeBuilders()
    windows = window_of("a", "b", num_batches=3, heap=[5, 5, 5])
    with running(windows, builders=builders) as engine:
        first, second = builders.receive(), builders.receive()
        assert not make(first, most=2)
        assert ledger_of(engine).snapshot().ready_bytes == 10
        first.end(DiedError("killed"))  # whoever watches the builders says so
        assert next_names(engine) == ["a.0", "a.1"]
        with pytest.raises(DiedError):
            engine.next_batches()
        assert ledger_of(engine).snapshot().ready_bytes == 0
        make(second)
        second.end()
        assert outcomes(engine) == ["b.0", "b.1", "b.2"]
        assert_nothing_held(engine)
    assert [window.closed for window in windows] == [1]


def test_the_consumer_waits_for_a_builder_that_delays_and_not_for_a_later_one() -> None:
    builders = FakeBuilders()
    with running(window_of("a", "b"), builders=builders) as engine:
        first, second = builders.receive(), builders.receive()
        make(second)
        second.end()

        def end_first() -> None:
            make(first)
            first.end()

        builder = threading.Thread(target=end_first)  # in the consumer's it would wake nobody
        when_the_consumer_waits(engine, builder.start)
        assert [next_names(engine) for _ in range(2)] == [["a.0"], ["b.0"]]
        builder.join()


def test_a_build_is_laid_aside_while_too_much_is_held_and_handed_out_again() -> None:
    builders = FakeBuilders()
    windows = [FakeWindow(FakeChunk("a"), FakeChunk("b", num_batches=3, heap=[60, 60, 60]))]
    with running(windows, limit=100, builders=builders) as engine:
        first, second = builders.receive(), builders.receive()
        assert not make(second)  # 60 bytes are held, as many would be made, and it is not at the head
        assert not builders.has_work
        make(first)
        first.end()
        assert [next_names(engine) for _ in range(2)] == [["a.0"], ["b.0"]]
        again = builders.receive()  # it is at the head, and the consumer has all that was made
        assert again is second
        assert not make(again)
        assert next_names(engine) == ["b.1"]
        assert make(builders.receive())
        second.end()
        assert next_names(engine) == ["b.2"]
        assert outcomes(engine) == []
        assert_nothing_held(engine)


def test_batches_that_took_long_come_before_their_chunk_is_whole() -> None:
    builders = FakeBuilders()
    with running(window_of("a", "b", num_batches=4, heap=[1] * 4, due=[1]), builders=builders) as engine:
        first, second = builders.receive(), builders.receive()
        builder = threading.Thread(target=make, args=(first, 2))
        when_the_consumer_waits(engine, builder.start)
        assert next_names(engine) == ["a.0", "a.1"]
        builder.join()
        make(second, 2)
        make(first)
        first.end()
        assert next_names(engine) == ["a.2", "a.3"]
        assert next_names(engine) == ["b.0", "b.1"]  # they waited for their turn only
        make(second)
        second.end()
        assert outcomes(engine) == ["b.2", "b.3"]
        assert_nothing_held(engine)


def test_the_last_batches_of_a_chunk_come_with_its_end() -> None:
    """Or the end would deliver nothing, which means that there is no more."""
    builders = FakeBuilders()
    with running(window_of("a", num_batches=2, heap=[1, 1], due=[0]), builders=builders) as engine:
        build = builders.receive()
        make(build)
        assert next_names(engine) == ["a.0"]
        build.end()
        assert outcomes(engine) == ["a.1"]
        assert_nothing_held(engine)


def test_what_fails_elsewhere_comes_behind_batches_that_are_due() -> None:
    def windows() -> Iterator[FakeWindow]:
        yield from window_of("a", num_batches=2, heap=[1, 1], due=[0])
        raise BoomError("plan")

    builders = FakeBuilders()
    with running(windows(), builders=builders) as engine:
        build = builders.receive()
        make(build)
        assert next_names(engine) == ["a.0"]
        build.end()
        assert next_names(engine) == ["a.1"]
        with pytest.raises(BoomError, match="plan"):
            engine.next_batches()


def test_as_many_chunks_are_handed_out_as_the_depth_asks_for() -> None:
    builders = FakeBuilders()
    with running(window_of("a", "b", "c"), builders=builders, depth=2) as engine:
        builds = [builders.receive(), builders.receive()]
        assert not builders.has_work
        for build in builds:
            make(build)
            build.end()
        assert next_names(engine) == ["a.0"]
        assert builders.receive().number == 2


def test_a_closed_engine_wants_no_build_and_bears_their_late_end() -> None:
    builders = FakeBuilders()
    with running(window_of("a", "b"), builders=builders) as engine:
        build = builders.receive()
        assert not build.is_cancelled
        engine.close(join=False)
        assert build.is_cancelled
        assert (builders.stopped, builders.closed) == (1, 0)
        build.end(BoomError("late"))
    assert builders.closed == 1


def test_a_wait_for_builders_elsewhere_is_told_in_their_words() -> None:
    builders = FakeBuilders()
    with running(window_of("a"), builders=builders, timeout_s=0.02) as engine:
        builders.receive()
        with pytest.raises(StallError, match="one is being built, in another place"):
            engine.next_batches()
