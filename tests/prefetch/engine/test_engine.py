"""What an engine delivers: order, windows closed in time, errors in their place, and everything at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest
from engine_kit import (
    TIMEOUT_S,
    Action,
    Batch,
    BoomError,
    FakeChunk,
    FakeWindow,
    Gate,
    assert_nothing_held,
    fail,
    ledger_of,
    names,
    next_names,
    nothing,
    one_chunk_windows,
    outcomes,
    running,
    when_the_consumer_waits,
)
from hypothesis import given, strategies as st

from prefetch.engine.engine import Engine

# ---- before the first batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(("alone", "planned"), [(True, "a"), (False, "abc")])
def test_what_is_planned_while_the_first_batch_is_built(alone: bool, planned: str) -> None:
    """Where reading takes cores, whoever builds that batch has them; later windows come behind it."""
    asked, seen, engines = [], [], Queue[Engine[Batch]]()

    def building() -> None:
        read = threading.Event()
        engine = engines.get(timeout=TIMEOUT_S)
        engine._windows.readers.submit(99, read.set)  # when the reader has nothing else to do
        assert read.wait(TIMEOUT_S)
        seen.append("".join(asked))

    def windows() -> Iterator[FakeWindow]:
        for name, parts in zip("abcd", ([building], [], [], []), strict=True):
            asked.append(name)
            yield FakeWindow(FakeChunk(f"{name}0", parts=parts), FakeChunk(f"{name}1"))

    options = {"num_readers": 1, "num_workers": 1, "depth": 1, "max_windows": 2}
    with running(windows(), first_batch_alone=alone, **options) as engine:
        engines.put(engine)
        assert outcomes(engine) == [f"{name}{chunk}.0" for name in "abcd" for chunk in (0, 1)]
    assert seen == [planned]


@pytest.mark.parametrize("alone", [True, False])
def test_the_first_batch_of_windows_that_read_nothing_waits_for_no_other(alone: bool) -> None:
    """So are those of builders that read by themselves."""
    with running(one_chunk_windows(3, reads=()), first_batch_alone=alone) as engine:
        assert outcomes(engine) == ["0.0", "1.0", "2.0"]


# ---- order -------------------------------------------------------------------------------------------------


def test_chunks_come_in_stream_order_when_they_finish_backwards() -> None:
    gates = [Gate() for _ in range(4)]
    windows = [FakeWindow(*(FakeChunk(str(i), parts=[gate]) for i, gate in enumerate(gates)))]
    with running(windows, num_workers=4) as engine:
        for gate in reversed(gates):
            gate.wait_until_begun()
            gate.open()
        assert outcomes(engine) == ["0.0", "1.0", "2.0", "3.0"]


def test_windows_come_in_stream_order_when_they_are_staged_backwards() -> None:
    gates = [Gate() for _ in range(3)]
    windows = [FakeWindow(FakeChunk(str(i)), reads=[gate]) for i, gate in enumerate(gates)]
    first = FakeWindow(FakeChunk("first"))
    with running([first, *windows], num_readers=4, max_windows=4) as engine:
        assert next_names(engine) == ["first.0"]
        for gate in reversed(gates):
            gate.wait_until_begun()
            gate.open()
        assert outcomes(engine) == ["0.0", "1.0", "2.0"]


def test_what_the_first_batch_needs_is_read_before_anything_else() -> None:
    """The reads of later windows would take their share of a network."""
    gate, begun = Gate(), list[str]()
    first = FakeWindow(FakeChunk("0"), reads=[gate, lambda: begun.append("first")])
    later = FakeWindow(FakeChunk("1"), reads=[lambda: begun.append("later")])
    with running([first, later], num_readers=4) as engine:
        gate.wait_until_begun()
        planned = threading.Event()
        engine._windows.readers.submit(99, planned.set)  # when the readers have nothing else to do
        assert planned.wait(TIMEOUT_S)
        with engine._queue.lock:
            assert begun == ["first"]
        gate.open()
        assert outcomes(engine) == ["0.0", "1.0"]


def test_all_batches_of_a_chunk_come_at_once() -> None:
    with running([FakeWindow(FakeChunk("a", num_batches=3), FakeChunk("b", num_batches=2))]) as engine:
        assert next_names(engine) == ["a.0", "a.1", "a.2"]
        assert next_names(engine) == ["b.0", "b.1"]


def test_a_finite_source_ends_with_an_empty_sequence_again_and_again() -> None:
    with running(one_chunk_windows(2)) as engine:
        assert outcomes(engine) == ["0.0", "1.0"]
        assert [engine.next_batches() for _ in range(3)] == [(), (), ()]


def test_an_empty_source_ends_at_once() -> None:
    with running([]) as engine:
        assert engine.next_batches() == ()


def test_windows_may_come_without_reads() -> None:
    windows = [
        FakeWindow(FakeChunk("a"), reads=(), nbytes=400),
        FakeWindow(FakeChunk("b"), nbytes=400),
    ]
    with running(windows, max_windows=1) as engine:
        assert outcomes(engine) == ["a.0", "b.0"]
        assert [window.closed for window in windows] == [1] * 2
        assert_nothing_held(engine)


def test_reads_run_in_deadline_order_though_planning_runs_ahead() -> None:
    order: list[str] = []

    def read(name: str) -> Action:
        return lambda: order.append(name)

    first = Gate()
    windows = [
        FakeWindow(*(FakeChunk(f"{w}{c}") for c in range(2)), reads=[read(f"{w}a"), read(f"{w}b")])
        for w in range(4)
    ]
    windows[0].actions.insert(0, first)
    with running(windows, num_readers=1, depth=1, max_windows=4) as engine:
        first.wait_until_begun()
        first.open()
        assert len(outcomes(engine)) == 8
    assert order == ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b"]


def test_parts_of_a_chunk_run_on_several_threads_and_finish_runs_once_after_them() -> None:
    together, log = threading.Barrier(3, timeout=TIMEOUT_S), []

    def part() -> None:
        together.wait()
        log.append("part")

    chunk = FakeChunk("a", parts=[part] * 3, on_finish=lambda: log.append("finish"))
    with running([FakeWindow(chunk)], num_workers=3) as engine:
        assert next_names(engine) == ["a.0"]
    assert log == ["part"] * 3 + ["finish"]
    assert (chunk.begun, chunk.finished) == (1, 1)


def test_workers_take_the_parts_of_the_earliest_chunk_first() -> None:
    log: list[str] = []
    gate = Gate()

    def part(name: str) -> Action:
        return lambda: log.append(name)

    chunks = [
        FakeChunk("a", parts=[gate, part("a1"), part("a2")]),
        FakeChunk("b", parts=[part("b0"), part("b1")]),
    ]
    with running([FakeWindow(*chunks)], num_workers=1) as engine:
        gate.wait_until_begun()  # "b" was submitted before the parts of "a"
        gate.open()
        assert outcomes(engine) == ["a.0", "b.0"]
    assert log == ["a1", "a2", "b0", "b1"]


# ---- windows are closed ------------------------------------------------------------------------------------


def test_a_window_is_closed_once_its_last_chunk_is_built() -> None:
    gate = Gate()
    window = FakeWindow(FakeChunk("a"), FakeChunk("b", parts=[gate]))
    with running([window]) as engine:
        assert next_names(engine) == ["a.0"]
        gate.wait_until_begun()
        assert window.closed == 0
        gate.open()
        assert next_names(engine) == ["b.0"]
        assert window.closed == 1
    assert window.closed == 1


def test_a_carried_window_is_closed_once_after_the_chunk_of_the_later_window() -> None:
    gate = Gate()
    early = FakeWindow(FakeChunk("a"), carried=True, nbytes=100)
    middle = FakeWindow(carried=True, nbytes=100)
    late = FakeWindow(FakeChunk("b", parts=[gate]), FakeChunk("c"), also=[early, middle], nbytes=100)
    with running([early, middle, late], num_workers=1) as engine:
        assert next_names(engine) == ["a.0"]
        gate.wait_until_begun()
        assert (early.closed, middle.closed, late.closed) == (0, 0, 0)
        assert ledger_of(engine).snapshot().window_bytes == 300
        gate.open()
        assert next_names(engine) == ["b.0"]
        assert (early.closed, middle.closed) == (1, 1)
        assert outcomes(engine) == ["c.0"]
        assert_nothing_held(engine)
    assert (early.closed, middle.closed, late.closed) == (1, 1, 1)


def test_a_window_that_failed_is_closed_only_when_its_last_read_has_ended() -> None:
    gate = Gate()

    def fails() -> None:
        gate.wait_until_begun()
        raise BoomError("read")

    window = FakeWindow(FakeChunk("a"), reads=[gate, fails], nbytes=100)
    with running([window, FakeWindow(FakeChunk("b"))], num_readers=2) as engine:
        with pytest.raises(BoomError, match="read"):
            engine.next_batches()
        assert window.closed == 0
        assert ledger_of(engine).snapshot().window_bytes == 100
        gate.open()
        assert outcomes(engine) == ["b.0"]
        assert (window.closed, window.reads_done) == (1, 1)
        assert_nothing_held(engine)


# ---- errors ------------------------------------------------------------------------------------------------

FAILING_CHUNKS = {
    "begin": lambda: FakeChunk("b", on_begin=fail("begin"), nbytes=10),
    "part": lambda: FakeChunk("b", parts=[nothing, fail("part"), nothing], nbytes=10),
    "only part": lambda: FakeChunk("b", parts=[fail("only part")], nbytes=10),
    "finish": lambda: FakeChunk("b", on_finish=fail("finish"), nbytes=10),
}


@pytest.mark.parametrize("stage", FAILING_CHUNKS)
def test_an_error_of_a_chunk_comes_in_its_place_and_the_stream_goes_on(stage: str) -> None:
    windows = [
        FakeWindow(FakeChunk("a", nbytes=10), FAILING_CHUNKS[stage](), FakeChunk("c", nbytes=10), nbytes=10),
        FakeWindow(FakeChunk("d", nbytes=10), nbytes=10),
    ]
    with running(windows) as engine:
        assert outcomes(engine) == ["a.0", f"error {stage}", "c.0", "d.0"]
        assert [window.closed for window in windows] == [1, 1]
        assert_nothing_held(engine)


@pytest.mark.parametrize("reads", [[fail("read")], [nothing, fail("read"), nothing]])
def test_an_error_of_a_read_comes_once_for_each_chunk_of_the_window(reads: list[Action]) -> None:
    windows = [
        FakeWindow(FakeChunk("a"), nbytes=10),
        FakeWindow(FakeChunk("b"), FakeChunk("c"), reads=reads, nbytes=10),
        FakeWindow(FakeChunk("d"), nbytes=10),
    ]
    with running(windows) as engine:
        assert outcomes(engine) == ["a.0", "error read", "error read", "d.0"]
        assert [window.closed for window in windows] == [1, 1, 1]
        assert_nothing_held(engine)


def test_an_error_of_a_carried_window_fails_the_later_chunk_too() -> None:
    early = FakeWindow(FakeChunk("a"), reads=[fail("read")], carried=True)
    late = FakeWindow(FakeChunk("b"), FakeChunk("c"), also=[early])
    with running([early, late]) as engine:
        assert outcomes(engine) == ["error read", "error read", "c.0"]
    assert (early.closed, late.closed) == (1, 1)


def test_after_a_failed_read_the_windows_other_reads_are_left_out() -> None:
    ran: list[int] = []
    window = FakeWindow(FakeChunk("a"), reads=[fail("read"), lambda: ran.append(1)])
    with running([window], num_readers=1) as engine:
        assert outcomes(engine) == ["error read"]
    assert ran == []


def test_after_a_failed_part_the_other_parts_are_left_out() -> None:
    ran: list[int] = []
    chunk = FakeChunk("a", parts=[fail("part"), lambda: ran.append(1)])
    with running([FakeWindow(chunk)], num_workers=1) as engine:
        assert outcomes(engine) == ["error part"]
    assert ran == []
    assert chunk.finished == 0


def test_the_error_itself_is_raised_not_a_copy() -> None:
    error = BoomError("the one")

    def raise_it() -> None:
        raise error

    with running([FakeWindow(FakeChunk("a", parts=[raise_it]))]) as engine:
        with pytest.raises(BoomError) as caught:
            engine.next_batches()
        assert caught.value is error


def test_an_exit_raised_in_a_task_reaches_the_consumer_and_kills_no_thread() -> None:
    def leave() -> None:
        raise SystemExit(3)

    windows = [FakeWindow(FakeChunk("a"), reads=[leave]), *one_chunk_windows(1)]
    with running(windows, num_readers=1) as engine:
        with pytest.raises(SystemExit):
            engine.next_batches()
        assert outcomes(engine) == ["0.0"]


def then_fail(windows: Iterable[FakeWindow], where: str = "plan") -> Iterator[FakeWindow]:
    yield from windows
    raise BoomError(where)


def assert_plan_error_comes_last(engine: Engine[Batch], expected: list[str]) -> None:
    assert [next_names(engine) for _ in expected] == [[name] for name in expected]
    for _ in range(2):  # it stays
        with pytest.raises(BoomError, match="plan"):
            engine.next_batches()


def test_an_error_of_planning_comes_after_the_batches_before_it() -> None:
    with running(then_fail(one_chunk_windows(3))) as engine:
        assert_plan_error_comes_last(engine, ["0.0", "1.0", "2.0"])


def test_an_error_of_planning_does_not_overtake_a_window_that_is_still_read() -> None:
    gate = Gate()
    first = FakeWindow(FakeChunk("a"), FakeChunk("b"), FakeChunk("c"))
    second = FakeWindow(FakeChunk("d"), reads=[gate])
    # One reader and depth 1: the source is asked again, and fails, before the second window is read.
    with running(then_fail([first, second]), num_readers=1, depth=1) as engine:
        assert next_names(engine) == ["a.0"]
        gate.wait_until_begun()
        assert [next_names(engine) for _ in range(2)] == [["b.0"], ["c.0"]]
        when_the_consumer_waits(engine, gate.open)
        assert_plan_error_comes_last(engine, ["d.0"])


def test_an_error_of_planning_alone_is_raised() -> None:
    with running(then_fail([])) as engine:
        assert_plan_error_comes_last(engine, [])


@pytest.mark.parametrize("where", ["on_admission", "on_reads"])
def test_a_window_that_cannot_be_admitted_ends_the_stream_with_its_error(where: str) -> None:
    """As when its buffers cannot be had: memory that the driver refuses to lock."""
    broken = FakeWindow(FakeChunk("x"), nbytes=10, **{where: fail("admission")})
    windows = [*one_chunk_windows(2), broken, *one_chunk_windows(1)]
    with running(windows) as engine:
        assert [next_names(engine) for _ in range(2)] == [["0.0"], ["1.0"]]
        for _ in range(2):
            with pytest.raises(BoomError, match="admission"):
                engine.next_batches()
        assert_nothing_held(engine)
        assert windows[3].admitted == 0
    assert broken.closed == 1


def test_a_chunk_whose_size_cannot_be_told_is_an_error_not_a_silent_end_of_a_thread() -> None:
    class Unmeasurable(FakeChunk):
        @property
        def nbytes(self) -> int:  # type: ignore[override]
            raise BoomError("size")

        @nbytes.setter
        def nbytes(self, value: int) -> None:
            pass

    with running([FakeWindow(FakeChunk("a"), Unmeasurable("b", leased=0))]) as engine:
        assert next_names(engine) == ["a.0"]
        with pytest.raises(BoomError, match="size"):
            engine.next_batches()


def test_any_number_of_chunks_may_fail_with_their_window() -> None:
    window = FakeWindow(*(FakeChunk(str(i)) for i in range(3000)), reads=[fail("read")])
    with running([window], depth=3000) as engine:
        assert outcomes(engine) == ["error read"] * 3000


# ---- everything at once ------------------------------------------------------------------------------------


@dataclass
class ChunkPlan:
    nbytes: int
    num_batches: int
    parts: int
    fails: str


@dataclass
class WindowPlan:
    nbytes: int
    reads: int
    fails: bool
    carried: bool
    chunks: list[ChunkPlan]


@dataclass
class Soak:
    windows: list[WindowPlan]
    spare: int
    depth: int
    max_windows: int
    num_readers: int
    num_workers: int
    keep: list[bool] = field(default_factory=list)


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 5).flatmap(lambda n: strategy if n == 5 else st.just(otherwise))


chunk_plans = st.builds(
    ChunkPlan,
    nbytes=st.integers(0, 40),
    num_batches=st.integers(1, 4),
    parts=st.integers(0, 3),
    fails=rarely(st.sampled_from(["begin", "part", "finish"]), ""),
)
window_plans = st.builds(
    WindowPlan,
    nbytes=st.integers(30, 80),
    reads=st.integers(0, 3),
    fails=rarely(st.booleans(), False),
    carried=st.booleans(),
    chunks=st.lists(chunk_plans, max_size=3),
)
soaks = st.builds(
    Soak,
    windows=st.lists(window_plans, max_size=8),
    spare=st.sampled_from([0, 0, 1, 50, 1000]),
    depth=st.integers(1, 6),
    max_windows=st.integers(1, 4),
    num_readers=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    keep=st.lists(st.booleans(), min_size=1, max_size=5),
)


def built(plan: Soak) -> tuple[list[FakeWindow], list[str], int, int]:
    """Windows, expected outcomes, the largest chunk, and the least limit that must suffice."""
    windows: list[FakeWindow] = []
    expected: list[str] = []
    carried: list[tuple[FakeWindow, bool]] = []
    need, last_with_chunks = 0, max((i for i, w in enumerate(plan.windows) if w.chunks), default=-1)
    largest = max((c.nbytes for w in plan.windows for c in w.chunks), default=0)
    for number, spec in enumerate(plan.windows[: last_with_chunks + 1]):
        failed = spec.fails and spec.reads > 0
        chunks = [soak_chunk(f"{number}{i}", chunk) for i, chunk in enumerate(spec.chunks)]
        window = FakeWindow(
            *chunks,
            nbytes=spec.nbytes,
            reads=[fail(f"read {number}") if failed and i == 0 else nothing for i in range(spec.reads)],
            carried=number < last_with_chunks and (spec.carried or not chunks),
            also=[w for w, _ in carried] if chunks else (),
        )
        windows.append(window)
        need = max(need, window.nbytes + sum(w.nbytes for w, _ in carried))
        for i, chunk in enumerate(spec.chunks):
            broken = failed or (i == 0 and any(bad for _, bad in carried))
            if broken or (chunk.fails and not (chunk.fails == "part" and not chunk.parts)):
                expected.append("error")
            else:
                expected += [f"{number}{i}.{b}" for b in range(chunk.num_batches)]
        if chunks:
            carried = []
        if window.carried:
            carried.append((window, bool(failed)))
    return windows, expected, largest, max(1, need + largest)


def soak_chunk(name: str, plan: ChunkPlan) -> FakeChunk:
    return FakeChunk(
        name,
        nbytes=plan.nbytes,
        num_batches=plan.num_batches,
        on_begin=fail("begin") if plan.fails == "begin" else nothing,
        parts=[fail("part") if plan.fails == "part" else nothing] * plan.parts,
        on_finish=fail("finish") if plan.fails == "finish" else nothing,
    )


@given(soaks)
def test_any_stream_runs_to_its_end_in_order_and_gives_everything_back(plan: Soak) -> None:
    windows, expected, largest, need = built(plan)
    limit, kept, seen = need + plan.spare, [], []
    with running(
        windows,
        limit=limit,
        depth=plan.depth,
        max_windows=plan.max_windows,
        num_readers=plan.num_readers,
        num_workers=plan.num_workers,
        keep_bytes=largest,
    ) as engine:
        for turn in range(10**6):
            try:
                batches = engine.next_batches()
            except BoomError:
                seen.append("error")
                continue
            if not batches:
                break
            seen += names(batches)
            kept += batches if plan.keep[turn % len(plan.keep)] else []
            held = ledger_of(engine).snapshot()
            assert held.window_bytes + held.building_bytes + held.ready_bytes <= limit
        assert seen == expected
        assert [window.closed for window in windows] == [1] * len(windows)
        held = ledger_of(engine).snapshot()
        assert (held.window_bytes, held.building_bytes, held.ready_bytes) == (0, 0, 0)
        batches = ()
        kept.clear()
        assert_nothing_held(engine)
    assert [window.closed for window in windows] == [1] * len(windows)


def test_windows_are_hurried_only_while_the_consumer_waits_for_their_reads() -> None:
    gates = [Gate(), Gate()]
    windows = [FakeWindow(FakeChunk(str(i)), reads=[gate]) for i, gate in enumerate(gates)]
    windows[0].when_hurried = gates[0].open  # what a second request would bring about
    with running(windows) as engine:
        assert [window.hurried for window in windows] == [0, 0]
        assert [batch.name for batch in engine.next_batches()] == ["0.0"]
        assert windows[0].hurried >= 1
        assert windows[1].hurried == 0
        gates[1].open()


def test_closing_interrupts_reads_before_it_waits_for_them() -> None:
    gate = Gate()
    window = FakeWindow(FakeChunk("a"), reads=[gate])
    with running([window], interrupt=gate.open) as engine:
        gate.wait_until_begun()
        engine.close()
    assert window.closed
