"""Credits of an engine, and how many batches it has ready."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from engine_kit import (
    TIMEOUT_S,
    Batch,
    BoomError,
    FakeChunk,
    FakeWindow,
    Gate,
    WatchedBuilders,
    assert_nothing_held,
    ledger_of,
    names,
    next_names,
    outcomes,
    running,
    when_the_consumer_waits,
)

from prefetch.control.depth import Decision, Observation
from prefetch.engine.engine import Engine
from prefetch.errors import MemoryLimitError
from prefetch.work import PartialChunk
from sharding.errors import DataflowError

# ---- credits -----------------------------------------------------------------------------------------------


def test_a_window_is_not_admitted_while_the_ledger_is_full() -> None:
    gates = [Gate() for _ in range(3)]
    windows = [
        FakeWindow(FakeChunk(str(i), parts=[gate]), nbytes=40, reads=()) for i, gate in enumerate(gates)
    ]
    with running(windows, limit=100, max_windows=9, num_workers=3) as engine:
        gates[0].wait_until_begun()
        gates[1].wait_until_begun()
        assert ledger_of(engine).snapshot().window_bytes == 80
        assert windows[2].admitted == 0
        gates[0].open()
        assert next_names(engine) == ["0.0"]
        gates[2].wait_until_begun()
        gates[1].open()
        gates[2].open()
        assert outcomes(engine) == ["1.0", "2.0"]
        assert ledger_of(engine).snapshot().peak_bytes == 80


def test_a_window_leaves_room_for_the_outputs_of_those_before_it() -> None:
    gate = Gate()
    windows = [
        FakeWindow(FakeChunk("a", nbytes=30, on_begin=gate), nbytes=40),
        FakeWindow(FakeChunk("b", nbytes=30), nbytes=40),
    ]
    with running(windows, limit=100, keep_bytes=30) as engine:
        gate.wait_until_begun()
        assert windows[1].admitted == 0
        gate.open()
        assert outcomes(engine) == ["a.0", "b.0"]


@pytest.mark.parametrize("max_windows", [1, 2, 4])
def test_while_chunks_wait_no_more_windows_are_open_than_asked_for(max_windows: int) -> None:
    gates = [Gate() for _ in range(6)]
    windows = [
        FakeWindow(FakeChunk(f"{i}a", parts=[gate]), FakeChunk(f"{i}b")) for i, gate in enumerate(gates)
    ]
    with running(windows, max_windows=max_windows, depth=1) as engine:
        for i, gate in enumerate(gates):
            gate.wait_until_begun()
            assert sum(window.admitted for window in windows) - i <= max_windows
            assert engine.stats().open_windows <= max_windows
            gate.open()
            assert [next_names(engine) for _ in range(2)] == [[f"{i}a.0"], [f"{i}b.0"]]


@pytest.mark.parametrize("max_windows", [1, 3])
def test_a_consumer_that_keeps_every_batch_pays_in_memory_not_in_progress(max_windows: int) -> None:
    windows = [FakeWindow(*(FakeChunk(f"{w}{c}", nbytes=30) for c in range(3)), nbytes=50) for w in range(5)]
    kept: list[Batch] = []
    with running(windows, limit=100, max_windows=max_windows, keep_bytes=30) as engine:
        for _ in range(15):
            kept += engine.next_batches()
            held = ledger_of(engine).snapshot()
            assert held.window_bytes + held.building_bytes + held.ready_bytes <= 100
        assert engine.next_batches() == ()
        held = ledger_of(engine).snapshot()
        assert (held.window_bytes, held.building_bytes, held.ready_bytes) == (0, 0, 0)
        assert held.in_use_bytes == 15 * 30
        kept.clear()
        assert_nothing_held(engine)


def test_credit_that_the_consumer_gives_back_late_is_used() -> None:
    windows = [FakeWindow(FakeChunk(str(i), nbytes=60)) for i in range(4)]
    with running(windows, limit=100) as engine:
        kept = [engine.next_batches() for _ in range(2)]
        assert ledger_of(engine).snapshot().in_use_bytes == 120
        kept.clear()
        assert outcomes(engine) == ["2.0", "3.0"]
        assert_nothing_held(engine)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_what_shows_when_it_is_made_is_bounded_by_the_limit_and_a_batch_a_builder(num_workers: int) -> None:
    chunks = [FakeChunk(str(i), num_batches=10, heap=[40] * 10) for i in range(3)]
    peaks = []
    with running([FakeWindow(*chunks)], limit=100, num_workers=num_workers) as engine:
        for i in range(30):
            assert next_names(engine) == [f"{i // 10}.{i % 10}"]
            held = ledger_of(engine).snapshot()
            assert held.in_use_bytes <= 40
            peaks.append(held.peak_bytes)
        assert engine.next_batches() == ()
        assert_nothing_held(engine)
    assert max(peaks) <= 100 + 40 * num_workers + 40  # the one that the consumer has


def test_windows_leave_room_for_what_builders_make() -> None:
    made, planned, gate, in_use = threading.Event(), threading.Event(), Gate(), list[int]()
    engines: list[Engine[Batch]] = []

    def windows() -> Iterator[FakeWindow]:
        yield FakeWindow(FakeChunk("a", heap=[60]))
        assert made.wait(TIMEOUT_S)
        yield FakeWindow(FakeChunk("b", on_begin=gate), nbytes=50)
        planned.set()
        yield FakeWindow(FakeChunk("c"), nbytes=50, on_admission=note)

    def note() -> None:
        in_use.append(ledger_of(engines[0]).snapshot().in_use_bytes)

    with running(windows(), limit=200, num_workers=1, max_windows=9) as engine:
        engines.append(engine)
        assert next_names(engine) == ["a.0"]
        made.set()
        assert planned.wait(TIMEOUT_S)
        engine.stats()  # whoever has planned the window has looked for room
        when_the_consumer_waits(engine, gate.open)
        assert outcomes(engine) == ["b.0", "c.0"]
    assert in_use == [0]  # before, 60 bytes were in use, 50 were read, and 60 more may be made


def test_no_builder_begins_another_batch_while_more_is_held_than_the_limit() -> None:
    gate, aside = Gate(), threading.Event()
    last = FakeChunk("b", num_batches=3, heap=[60, 60, 60])
    builders = WatchedBuilders(2, when_aside=aside.set)
    windows = [FakeWindow(FakeChunk("a", on_begin=gate), last)]
    with running(windows, limit=100, builders=builders) as engine:
        gate.wait_until_begun()
        assert aside.wait(TIMEOUT_S)
        assert last.made == 1
        gate.open()
        assert outcomes(engine) == ["a.0", "b.0", "b.1", "b.2"]


def test_batches_larger_than_the_limit_come_one_by_one() -> None:
    chunks = [FakeChunk(str(i), num_batches=3, heap=[1000, 1, 5000]) for i in range(4)]
    with running([FakeWindow(*chunks)], limit=100, num_workers=2) as engine:
        assert outcomes(engine) == [f"{i}.{j}" for i in range(4) for j in range(3)]
        assert_nothing_held(engine)


def test_small_batches_of_a_chunk_are_handed_out_together() -> None:
    chunk = FakeChunk("a", num_batches=8, heap=[1] * 8)
    with running([FakeWindow(chunk)], limit=32 * 4) as engine:
        assert [len(engine.next_batches()) for _ in range(2)] == [4, 4]


def test_an_error_comes_in_its_place_behind_the_batches_before_it_and_frees_their_credits() -> None:
    class Failing(FakeChunk):
        def finish(self) -> Iterator[PartialChunk[Batch]]:
            parts = super().finish()
            yield next(parts)
            raise BoomError("a.1")

    with running([FakeWindow(Failing("a", num_batches=2, heap=[10, 10]), FakeChunk("b"))]) as engine:
        assert outcomes(engine) == ["a.0", "error a.1", "b.0"]
        assert_nothing_held(engine)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
@pytest.mark.parametrize("where", ["plan", "admission"])
def test_a_lack_of_memory_is_told_in_words_after_the_batches_before(error: Exception, where: str) -> None:
    def refuse() -> None:
        raise error

    def windows() -> Iterator[FakeWindow]:
        yield FakeWindow(FakeChunk("a"))
        if where == "plan":
            refuse()
        yield FakeWindow(FakeChunk("b"), on_reads=refuse)

    with running(windows()) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(
            MemoryLimitError, match=r"no memory for the next shuffle window .*memory_limit=1,000"
        ) as got:
            engine.next_batches()
        assert got.value.__cause__ is error


def test_no_window_is_admitted_before_the_consumer_is_in_the_epoch_before() -> None:
    taken: list[int] = []
    seen: list[tuple[int, int]] = []  # epoch of each window, and batches that were taken at its admission
    windows = [
        FakeWindow(
            FakeChunk(str(i)), epoch=i // 2, on_admission=lambda i=i: seen.append((i // 2, len(taken)))
        )
        for i in range(8)
    ]
    with running(windows, max_windows=99) as engine:
        for i in range(8):
            assert next_names(engine) == [f"{i}.0"]
            taken.append(i)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    # An epoch's first batch lets the next one's windows in before it is handed out.
    assert all(count >= 2 * (epoch - 1) for epoch, count in seen)


def test_until_a_second_epoch_has_begun_only_what_its_first_batch_needs_is_read() -> None:
    seen: list[str] = []
    planned = [threading.Event() for _ in range(7)]

    def windows() -> Iterator[FakeWindow]:
        for i, event in enumerate(planned):
            event.set()
            carried = i == 3  # the epoch's first batch needs two windows
            chunks = [] if carried else [FakeChunk(str(i))]
            admitted = partial(seen.append, f"window {i}")
            window = FakeWindow(*chunks, epoch=i // 3, carried=carried, on_admission=admitted, also=held)
            held[:] = [window] if carried else []
            yield window

    held: list[FakeWindow] = []
    with running(windows(), max_windows=99) as engine:
        assert [next_names(engine) for _ in range(3)] == [["0.0"], ["1.0"], ["2.0"]]
        assert planned[5].wait(TIMEOUT_S)
        seen.append("second epoch")
        engine.read_on()
        assert planned[6].wait(TIMEOUT_S)
        assert [next_names(engine) for _ in range(2)] == [["4.0"], ["5.0"]]
    assert seen[:7] == [*(f"window {i}" for i in range(5)), "second epoch", "window 5"]


@pytest.mark.parametrize(("nbytes", "read"), [(20, True), (21, False)])
def test_of_an_epoch_that_may_never_begin_at_most_an_eighth_of_an_epoch_is_read(
    nbytes: int, read: bool
) -> None:
    windows = [FakeWindow(FakeChunk(str(i)), nbytes=80) for i in range(2)]
    windows.append(FakeWindow(FakeChunk("2"), nbytes=nbytes, epoch=1))
    planned = threading.Event()

    def source() -> Iterator[FakeWindow]:
        yield from windows
        planned.set()
        yield FakeWindow(FakeChunk("3"), epoch=1)

    gate = Gate()
    windows[1].actions = [gate]
    with running(source(), max_windows=99) as engine:
        assert next_names(engine) == ["0.0"]
        gate.wait_until_begun()
        if read:
            assert planned.wait(TIMEOUT_S)
        gate.open()
        assert next_names(engine) == ["1.0"]
        assert windows[2].admitted == read
        assert next_names(engine) == ["2.0"]  # asked for, it is read in any case


def test_a_window_larger_than_the_limit_is_an_error_that_says_what_would_fit() -> None:
    windows = [FakeWindow(FakeChunk("a", nbytes=10), nbytes=50), FakeWindow(FakeChunk("b"), nbytes=101)]
    with running(windows, limit=100) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(MemoryLimitError, match=r"shuffle window needs 101 bytes.*at least 101") as caught:
            engine.next_batches()
        assert isinstance(caught.value, DataflowError)
        with pytest.raises(MemoryLimitError):
            engine.next_batches()


def test_a_chunk_larger_than_the_limit_is_an_error_that_says_what_would_fit() -> None:
    window = FakeWindow(FakeChunk("a", nbytes=60), FakeChunk("b", nbytes=61), nbytes=40)
    with running([window], limit=100) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(MemoryLimitError, match=r"batches need 61 bytes beside 40 held.*at least 101"):
            engine.next_batches()


def test_the_limit_that_the_error_asks_for_is_enough() -> None:
    def windows() -> list[FakeWindow]:
        early = FakeWindow(FakeChunk("a", nbytes=70), nbytes=120, carried=True)
        late = FakeWindow(FakeChunk("b", nbytes=90), FakeChunk("c", nbytes=150), also=[early], nbytes=130)
        return [early, late]

    limit, tried = 1, []
    while True:
        tried.append(limit)
        with running(windows(), limit=limit) as engine:
            try:
                assert outcomes(engine) == ["a.0", "b.0", "c.0"]
                break
            except MemoryLimitError as error:
                found = re.search(r"at least (\d+)", str(error))
                assert found
                assert int(found[1]) > limit
                limit = int(found[1])
    assert tried == [1, 120, 190, 250, 340]
    assert limit == 120 + 130 + 90


def test_kept_batches_do_not_count_towards_the_memory_limit_error() -> None:
    windows = [FakeWindow(FakeChunk(str(i), nbytes=50), nbytes=50) for i in range(3)]
    with running(windows, limit=100) as engine:
        kept = [engine.next_batches() for _ in range(3)]
        assert engine.next_batches() == ()
        assert [names(batches) for batches in kept] == [["0.0"], ["1.0"], ["2.0"]]


# ---- depth -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "num_batches"), [(1, 1), (2, 1), (5, 1), (6, 3), (8, 3)])
def test_as_many_batches_are_ready_or_built_as_the_depth_asks_for(depth: int, num_batches: int) -> None:
    finished = threading.Semaphore(0)
    chunks = [FakeChunk(str(i), num_batches=num_batches, on_finish=finished.release) for i in range(12)]
    with running([FakeWindow(*chunks)], depth=depth) as engine:
        for taken in range(12):
            expected = min(12, taken + depth // num_batches)
            while sum(chunk.finished for chunk in chunks) < expected:
                assert finished.acquire(timeout=TIMEOUT_S)
            assert [chunk.begun for chunk in chunks] == [1] * expected + [0] * (12 - expected)
            assert len(next_names(engine)) == num_batches


def test_a_chunk_of_more_batches_than_the_depth_runs_alone() -> None:
    gates = [Gate() for _ in range(3)]
    chunks = [FakeChunk(str(i), num_batches=4, parts=[gate]) for i, gate in enumerate(gates)]
    with running([FakeWindow(*chunks)], depth=3, num_workers=3) as engine:
        for i, gate in enumerate(gates):
            gate.wait_until_begun()
            assert [chunk.begun for chunk in chunks] == [1] * (i + 1) + [0] * (2 - i)
            gate.open()
            assert len(next_names(engine)) == 4


def test_the_depth_policy_sees_what_was_delivered_and_what_comes() -> None:
    seen: list[Observation] = []

    def policy(observation: Observation) -> Decision:
        seen.append(observation)
        return Decision(1 + observation.delivered_batches, "grows")

    chunks = [FakeChunk(str(i), nbytes=10 * i) for i in range(6)]
    with running([FakeWindow(*chunks)], depth=policy) as engine:
        assert len(outcomes(engine)) == 6
        stats = engine.stats()
    assert (stats.depth, stats.depth_reason) == (7, "grows")
    assert {o.batch_bytes for o in seen} <= {0, 10, 20, 30, 40, 50}
    assert max(o.batch_bytes for o in seen) == 50
    delivered = [o.delivered_batches for o in seen]
    assert delivered == sorted(delivered)
    assert all(o.starved_s >= 0 and o.ready_batches >= 0 for o in seen)


def observing(seen: list[Observation], depth: int = 1) -> Callable[[Observation], Decision]:
    def policy(observation: Observation) -> Decision:
        seen.append(observation)
        return Decision(depth, "as told")

    return policy


def wait_for_batch(engine: Engine[Batch], gate: Gate) -> None:
    """Ask for a batch whose gate opens only when the consumer begins to wait."""
    gate.wait_until_begun()
    when_the_consumer_waits(engine, gate.open)
    next_names(engine)


def test_the_depth_policy_sees_lead_times_steps_and_what_is_finished() -> None:
    seen: list[Observation] = []
    chunks = [FakeChunk(str(i)) for i in range(5)]
    with running([FakeWindow(*chunks)], depth=observing(seen, 2)) as engine:
        assert len(outcomes(engine)) == 5
        engine.stats()
    assert sum(len(o.leads_s) for o in seen) == 5
    assert sum(len(o.steps_s) for o in seen) == 5  # before the 2nd to the 5th batch, and before the end
    assert all(value >= 0 for o in seen for value in (*o.leads_s, *o.steps_s))
    assert all(0 <= o.finished_batches <= o.ready_batches for o in seen)
    times = [o.now_s for o in seen]
    assert times == sorted(times)
    assert seen[-1].finished_batches == 0


@pytest.mark.parametrize(("depth", "num_workers", "limit"), [(1, 2, ""), (9, 1, "building")])
def test_a_wait_says_whether_more_depth_would_have_helped(depth: int, num_workers: int, limit: str) -> None:
    seen: list[Observation] = []
    gate = Gate()
    chunks = [FakeChunk("0"), FakeChunk("1", parts=[gate]), FakeChunk("2")]
    with running([FakeWindow(*chunks)], depth=observing(seen, depth), num_workers=num_workers) as engine:
        next_names(engine)
        wait_for_batch(engine, gate)
        engine.stats()  # observes, before the next batch may be waited for
        next_names(engine)
        engine.stats()
    assert (seen[-1].waits >= 1, next(o.limit for o in seen if o.waits == 1)) == (True, limit)


def test_a_wait_for_storage_is_told_as_such() -> None:
    seen: list[Observation] = []
    gate = Gate()
    windows = [FakeWindow(FakeChunk("0")), FakeWindow(FakeChunk("1"), reads=[gate])]
    with running(windows, depth=observing(seen, 9)) as engine:
        next_names(engine)
        wait_for_batch(engine, gate)
        engine.stats()
    assert (seen[-1].waits, seen[-1].limit) == (1, "reading")
