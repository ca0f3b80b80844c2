"""Chunks shortened to what builders make in good time, and batches whose parts several builders make."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from engine_kit import (
    TIMEOUT_S,
    Action,
    Batch,
    FakeChunk,
    FakeWindow,
    Gate,
    assert_nothing_held,
    outcomes,
    running,
)

from prefetch.control.chunk_time import ChunkTime
from prefetch.control.depth import Decision
from prefetch.engine.builds import chunks_ahead
from prefetch.work import PartialChunk


class _Told(ChunkTime):
    """Gives decisions that the test says, one after another, the last one for ever; notes what was built."""

    def __init__(self, *sizes: int) -> None:
        self._sizes, self.built = [*sizes], list[int]()
        super().__init__()

    @property
    def decision(self) -> Decision:
        return Decision(self._sizes.pop(0) if len(self._sizes) > 1 else self._sizes[0], "the test says so")

    @decision.setter
    def decision(self, _: Decision) -> None: ...

    def observe(self, num_batches: int, build_s: float) -> None:
        self.built.append(num_batches)


def test_a_long_chunk_is_shared_by_all_builders() -> None:
    """As one chunk it would be one builder's."""
    together = threading.Barrier(4, timeout=TIMEOUT_S)
    chunk = FakeChunk("a", num_batches=4, on_begin=together.wait)
    with running([FakeWindow(chunk)], num_workers=4, chunk_time=_Told(1)) as engine:
        assert len(outcomes(engine)) == 4
        assert_nothing_held(engine)


def test_the_rest_of_a_chunk_is_shortened_by_what_was_learned_since() -> None:
    told = _Told(2, 8)
    window = FakeWindow(FakeChunk("a", num_batches=8))
    with running([window], chunk_time=told) as engine:
        assert len(outcomes(engine)) == 8
        assert window.closed == 1
    assert sorted(told.built) == [2, 2, 4]


def test_few_chunks_wait_for_a_builder_as_none_of_them_is_shortened_any_more() -> None:
    gate = Gate()
    window = FakeWindow(*(FakeChunk(str(i), on_begin=gate) for i in range(20)))
    with running([window], num_workers=2, chunk_time=_Told(8)) as engine:
        gate.wait_until_begun()
        with engine._queue.lock:  # held by whoever hands chunks out, until no more may go
            assert engine._queue.num_running == chunks_ahead(2) == 5
        gate.open()
        assert outcomes(engine) == [f"{i}.0" for i in range(20)]


class _PartsChunk(FakeChunk):
    """Its batches wait for parts."""

    def finish(self) -> Iterator[PartialChunk[Batch]]:
        for made in super().finish():
            yield PartialChunk(parts=self._parts)
            yield made

    def begin(self) -> list[Action]:
        super().begin()
        return []


def test_parts_of_one_batch_are_made_by_several_builders_before_it_goes_on() -> None:
    together, done = threading.Barrier(3, timeout=TIMEOUT_S), list[int]()

    def part() -> None:
        done.append(together.wait())

    chunk = _PartsChunk("a", parts=[part] * 3, heap=[5], num_batches=1)
    with running([FakeWindow(chunk)], num_workers=3) as engine:
        assert outcomes(engine) == ["a.0"]
        assert sorted(done) == [0, 1, 2]


def test_builders_make_the_parts_of_an_earlier_batch_before_they_begin_a_later_one() -> None:
    """Else each would have a batch of its own, and all would end together."""
    begun, order = Gate(), list[str]()
    first = _PartsChunk("a", parts=[lambda: order.append("part")] * 3, on_finish=begun)
    later = FakeChunk("b", on_begin=lambda: order.append("later"))
    with running([FakeWindow(first, later)], num_workers=1) as engine:
        begun.wait_until_begun()
        begun.open()
        assert outcomes(engine) == ["a.0", "b.0"]
    assert order == ["part", "part", "part", "later"]


def test_chunks_begin_before_the_parts_of_those_before_them_run_out() -> None:
    """Else all builders would begin at the same time, with nothing to share until the first are that far."""
    order = list[str]()

    def noted(what: str) -> Action:
        return lambda: order.append(what)

    chunks = [
        _PartsChunk(str(i), parts=[noted(f"part {i}")] * 4, num_batches=1, on_begin=noted(f"begin {i}"))
        for i in range(12)
    ]
    with running([FakeWindow(*chunks)], num_workers=1, chunk_time=_Told(1)) as engine:
        assert outcomes(engine) == [f"{i}.0" for i in range(12)]
    ahead = [order.index(f"begin {i}") < order.index(f"part {i - 1}") for i in range(1, 12)]
    assert ahead[:2] == [False, False]  # they were handed out before it was known that there are parts
    assert all(ahead[2:])


def test_what_is_closed_in_the_middle_of_parts_ends_and_gives_its_credits_back() -> None:
    gate = Gate()
    chunk = _PartsChunk("a", parts=[gate, gate], nbytes=10)
    with running([FakeWindow(chunk)], num_workers=1) as engine:
        gate.wait_until_begun()
        closing = threading.Thread(target=engine.close)
        closing.start()
        gate.open()
        closing.join(TIMEOUT_S)
        assert not closing.is_alive()
