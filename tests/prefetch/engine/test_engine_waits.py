"""What an engine tells: of waits, by errors and by statistics."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from engine_kit import (
    TIMEOUT_S,
    FakeChunk,
    FakeWindow,
    Gate,
    WatchedBuilders,
    after,
    ledger_of,
    next_names,
    nothing,
    one_chunk_windows,
    options_of,
    outcomes,
    running,
    when_the_consumer_waits,
)

from prefetch.control.depth import AdaptiveDepth
from prefetch.engine.stats import ConsumerWait, EngineOptions
from prefetch.errors import StallError
from sharding.errors import DataflowError

# ---- stalls ------------------------------------------------------------------------------------------------


def test_a_stall_is_an_error_and_prints_the_stacks_of_all_threads(capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], timeout_s=0.05) as engine:
        gate.wait_until_begun()
        with pytest.raises(StallError, match=r"within 0 s; stacks .* on stderr: blocks being read: 1"):
            engine.next_batches()
        gate.open()
    printed = capfd.readouterr().err
    assert "dataflow: no batch for 0 s; EngineStats(" in printed
    assert "most recent call first" in printed
    assert "in _run_read" in printed, "the thread that hangs is shown"
    assert issubclass(StallError, DataflowError)


def test_after_a_stall_the_consumer_may_wait_again(capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], timeout_s=0.05) as engine:
        with pytest.raises(StallError):
            engine.next_batches()
        options_of(engine).timeout_s = TIMEOUT_S
        when_the_consumer_waits(engine, gate.open)
        assert next_names(engine) == ["a.0"]


def test_the_watchdog_prints_the_stacks_once_and_the_wait_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = Gate()
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], watchdog_s=0.02) as engine:
        printed: list[str] = []

        def open_once_printed() -> None:
            printed.append(capfd.readouterr().err)
            if "no batch" in printed[-1]:
                gate.open()
            else:
                when_the_consumer_waits(engine, open_once_printed)

        when_the_consumer_waits(engine, open_once_printed)
        assert next_names(engine) == ["a.0"]
        assert engine.stats().starved_s >= 0.02
    assert "".join([*printed, capfd.readouterr().err]).count("dataflow: no batch") == 1


@contextmanager
def lines_told(then: Callable[[int], None] = lambda _: None) -> Iterator[list[str]]:
    """What is logged meanwhile; `then` is called with the number of lines after each."""

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            then(len(lines))

    lines: list[str] = []
    handler, log = Listens(), logging.getLogger("dataflow")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def test_a_wait_that_is_explained_is_told_in_lines_and_without_stacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = Gate()

    def opens(lines: int) -> None:
        if lines == 3:
            gate.open()

    reason = "2 reads of http://h fail"
    options = {"notice_s": 0.01, "watchdog_s": 0.01, "explain": lambda: reason}
    with (
        lines_told(opens) as lines,
        running([FakeWindow(FakeChunk("a"), reads=[gate])], **options) as engine,
    ):
        assert next_names(engine) == ["a.0"]
    assert lines[:3] == ["no batch for 0 s: 2 reads of http://h fail"] * 3
    assert re.fullmatch(r"a batch came after 0\.\d s", lines[-1])
    assert "most recent call first" not in capfd.readouterr().err


def test_a_stall_that_is_explained_says_why_and_shows_stacks_to_those_who_want_details(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    options = {"timeout_s": 0.02, "explain": lambda: "2 reads fail"}
    with running([FakeWindow(FakeChunk("a"), reads=[gate])], **options) as engine:
        with pytest.raises(StallError, match=r"^no batch within 0 s: 2 reads fail$"):
            engine.next_batches()
        assert "most recent call first" not in capfd.readouterr().err
        caplog.set_level(logging.DEBUG, "dataflow")
        with pytest.raises(StallError, match="within 0 s; stacks of all threads are on stderr: 2 reads fail"):
            engine.next_batches()
        assert "most recent call first" in capfd.readouterr().err
        gate.open()


def test_a_wait_for_a_batch_that_is_being_built_names_the_code() -> None:
    gate = Gate()

    def transform() -> None:
        gate()

    def opens(lines: int) -> None:
        gate.wait_until_begun()
        if "transform" in told[-1] or lines > 1000:
            gate.open()

    with (
        lines_told(opens) as told,
        running([FakeWindow(FakeChunk("a", parts=[transform]))], notice_s=0.005) as engine,
    ):
        assert next_names(engine) == ["a.0"]
    assert any(
        re.fullmatch(
            r"no batch for 0 s: one is being built, in test_.*transform \(.*_waits.py, line \d+\)",
            line,
        )
        for line in told
    )


def test_a_slow_machine_has_rarer_lines_and_one_that_hangs_is_told() -> None:
    options = EngineOptions(num_readers=1, depth=AdaptiveDepth())

    def waits(seconds: float) -> list[str]:
        """The lines of a batch that comes after so long."""
        with lines_told() as lines:
            wait = ConsumerWait(0.0, options)
            while wait.due_s < seconds:
                wait.tell(wait.due_s, "the disk is slow", "", nothing)
            if wait.was_told:
                wait.end(seconds)
        return lines

    told = [waits(4.0) for _ in range(24)]
    line = "no batch for 3 s: the disk is slow"
    assert [number for number, lines in enumerate(told, 1) if lines] == [1, 2, 3, 6, 12, 24]
    assert told[0] == [line, "a batch came after 4.0 s"]
    assert told[5][0] == f"{line} (2 late batches before it had no line)"
    assert told[23][0] == f"{line} (11 late batches before it had no line)"
    assert waits(9.0) == ["no batch for 8 s: the disk is slow", "a batch came after 9.0 s"]


def test_builders_that_wait_for_a_task_are_at_no_place() -> None:
    gate, builders = Gate(), WatchedBuilders(4)
    with running([FakeWindow(FakeChunk("a", parts=[gate]))], builders=builders) as engine:
        gate.wait_until_begun()
        assert [context.split(" (")[0] for context in builders.contexts()] == ["in Gate.__call__"]
        gate.open()
        assert next_names(engine) == ["a.0"]


def test_no_stack_is_printed_when_batches_come(capfd: pytest.CaptureFixture[str]) -> None:
    with running(one_chunk_windows(5)) as engine:
        assert len(outcomes(engine)) == 5
    assert capfd.readouterr().err == ""


# ---- statistics --------------------------------------------------------------------------------------------


def test_statistics_before_anything_is_ready() -> None:
    gate = Gate()
    windows = [FakeWindow(FakeChunk("a", num_batches=2, nbytes=7), reads=[gate] + [nothing] * 3, nbytes=50)]
    with running(windows, num_readers=1, num_workers=3, depth=4) as engine:
        gate.wait_until_begun()
        stats = engine.stats()
        assert (stats.delivered_batches, stats.delivered_bytes, stats.ready_batches) == (0, 0, 0)
        assert (stats.depth, stats.depth_reason) == (4, "fixed at 4")
        assert (stats.open_windows, stats.memory.window_bytes, stats.memory.limit_bytes) == (1, 50, 1000)
        assert (stats.read.threads, stats.build.threads) == (1, 3)
        assert (stats.read.tasks, stats.build.tasks) == (0, 0)
        assert stats.read.queued >= 3
        assert stats.starved_s == 0
        gate.open()


def test_statistics_count_what_was_delivered() -> None:
    chunks = [
        FakeChunk("a", num_batches=2, nbytes=70, leased=60, parts=[nothing] * 3),
        FakeChunk("b", nbytes=30),
    ]
    with running([FakeWindow(*chunks, nbytes=50, reads=[nothing] * 4)]) as engine:
        kept = [engine.next_batches(), engine.next_batches()]
        assert engine.next_batches() == ()
        stats = engine.stats()
        assert len(kept[0]) == 2
    assert (stats.delivered_batches, stats.delivered_bytes) == (3, 90)
    assert (stats.ready_batches, stats.open_windows) == (0, 0)
    assert stats.memory.in_use_bytes == 90
    assert stats.read.tasks == 4
    assert stats.build.tasks == 5  # "a": begin and three parts, the last of which finishes; "b": one
    assert (stats.read.queued, stats.build.queued) == (0, 0)
    assert 0 <= stats.starved_s <= stats.elapsed_s
    assert 0 <= stats.build.busy_s <= 2 * stats.elapsed_s


def test_ready_batches_are_counted_until_they_are_taken() -> None:
    gate = Gate()
    chunks = [FakeChunk("a", num_batches=3), FakeChunk("b", num_batches=2), FakeChunk("c", parts=[gate])]
    with running([FakeWindow(*chunks)], num_workers=1) as engine:
        gate.wait_until_begun()
        assert engine.stats().ready_batches == 5
        engine.next_batches()
        assert engine.stats().ready_batches == 2
        gate.open()


def test_a_thread_that_has_built_a_chunk_does_not_keep_its_batches() -> None:
    begin, done, go_on = Gate(), threading.Event(), Gate()
    builders = WatchedBuilders(1, when_ended=after(done.set, go_on))
    with running([FakeWindow(FakeChunk("a", nbytes=9, parts=[begin]))], builders=builders) as engine:
        begin.wait_until_begun()
        begin.open()
        batches = engine.next_batches()
        assert done.wait(TIMEOUT_S)
        assert ledger_of(engine).snapshot().in_use_bytes == 9
        batches = ()
        assert ledger_of(engine).snapshot().in_use_bytes == 0
        assert not batches
        go_on.open()


@pytest.mark.parametrize(("num_workers", "is_short"), [(1, False), (2, True)])
def test_a_wait_in_which_a_builder_has_nothing_to_build_is_counted_apart(
    num_workers: int, is_short: bool
) -> None:
    gate = Gate()
    chunks = FakeChunk("a"), FakeChunk("b", parts=[gate])
    with running([FakeWindow(*chunks)], num_workers=num_workers) as engine:
        assert next_names(engine) == ["a.0"]
        before = engine.stats()
        when_the_consumer_waits(engine, gate.open)
        assert next_names(engine) == ["b.0"]
        after = engine.stats()
        waited_s = after.starved_s - before.starved_s
        assert after.few_chunks_s == pytest.approx(waited_s if is_short else 0.0)
