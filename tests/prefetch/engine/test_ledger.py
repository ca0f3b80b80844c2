"""The ledger against a plain dictionary of counts."""

from __future__ import annotations

import threading
import weakref

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefetch.engine.ledger import Ledger, State

LIMIT = 100
STATES = st.sampled_from(State)
SIZES = st.integers(0, 60)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of calls gives what the plain sums say."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMIT)
        self.held = dict.fromkeys(State, 0)
        self.peak = self.charged = 0

    def total(self) -> int:
        return sum(self.held.values())

    @rule(state=STATES, nbytes=SIZES, keep=SIZES)
    def reserve(self, state: State, nbytes: int, keep: int) -> None:
        fits = self.total() + nbytes + keep <= LIMIT
        self.taken(self.ledger.reserve(state, nbytes, keep_bytes=keep), fits, state, nbytes)

    @rule(state=STATES, nbytes=SIZES, keep=SIZES)
    def reserve_at_the_head(self, state: State, nbytes: int, keep: int) -> None:
        fits = self.total() - self.held[State.IN_USE] + nbytes <= LIMIT
        took = self.ledger.reserve(state, nbytes, keep_bytes=keep, head_of_order=True)
        self.taken(took, fits, state, nbytes)

    def taken(self, took: bool, fits: bool, state: State, nbytes: int) -> None:
        assert took is fits
        if fits:
            self.held[state] += nbytes
            self.peak = max(self.peak, self.total())

    @rule(state=STATES, nbytes=SIZES)
    def charge(self, state: State, nbytes: int) -> None:
        self.ledger.charge(state, nbytes)
        self.charged += nbytes
        self.taken(True, True, state, nbytes)
        assert self.ledger.reserve(state, 0) is (self.total() <= LIMIT)

    @rule(source=STATES, share=st.floats(0, 1))
    def deliver(self, source: State, share: float) -> None:
        nbytes = int(self.held[source] * share)
        self.ledger.move(source, State.IN_USE, nbytes)
        self.held[source] -= nbytes
        self.held[State.IN_USE] += nbytes

    @rule(share=st.floats(0, 1))
    def finish(self, share: float) -> None:
        nbytes = int(self.held[State.BUILDING] * share)
        self.ledger.move(State.BUILDING, State.READY, nbytes)
        self.held[State.BUILDING] -= nbytes
        self.held[State.READY] += nbytes

    @rule(state=st.sampled_from([State.WINDOW, State.BUILDING, State.READY]), share=st.floats(0, 1))
    def release(self, state: State, share: float) -> None:
        nbytes = int(self.held[state] * share)
        self.ledger.release(state, nbytes)
        self.held[state] -= nbytes

    @precondition(lambda self: self.held[State.IN_USE])
    @rule(share=st.floats(0, 1))
    def give_back(self, share: float) -> None:
        nbytes = int(self.held[State.IN_USE] * share)
        self.ledger.give_back(nbytes)
        self.held[State.IN_USE] -= nbytes

    @invariant()
    def only_charged_bytes_and_those_in_use_exceed_the_limit(self) -> None:
        assert self.total() - self.held[State.IN_USE] <= LIMIT + self.charged

    @rule()
    def snapshot(self) -> None:
        """A rule, not an invariant: returned credits are often still unsettled when the next call comes."""
        seen = self.ledger.snapshot()
        assert seen.limit_bytes == LIMIT
        assert seen.window_bytes == self.held[State.WINDOW]
        assert seen.building_bytes == self.held[State.BUILDING]
        assert seen.ready_bytes == self.held[State.READY]
        assert seen.in_use_bytes == self.held[State.IN_USE]
        assert seen.peak_bytes == self.peak

    def teardown(self) -> None:
        self.snapshot()


LedgerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(ValueError, match=f"memory_limit must be > 0 bytes, got {limit}"):
        Ledger(limit)


def test_the_last_byte_may_be_taken_and_no_more() -> None:
    ledger = Ledger(LIMIT)
    assert ledger.reserve(State.WINDOW, LIMIT)
    assert not ledger.reserve(State.BUILDING, 1)
    assert ledger.reserve(State.BUILDING, 0)


def test_a_refused_reservation_takes_nothing() -> None:
    ledger = Ledger(LIMIT)
    assert not ledger.reserve(State.WINDOW, LIMIT + 1)
    assert ledger.snapshot().peak_bytes == 0
    assert ledger.reserve(State.WINDOW, LIMIT)


def test_windows_leave_room_for_outputs() -> None:
    ledger = Ledger(LIMIT)
    assert not ledger.reserve(State.WINDOW, 61, keep_bytes=40)
    assert ledger.reserve(State.WINDOW, 60, keep_bytes=40)
    assert ledger.reserve(State.BUILDING, 40)


def test_bytes_in_use_slow_admission_but_not_the_head_of_the_order() -> None:
    ledger = Ledger(LIMIT)
    for _ in range(3):  # a consumer that keeps every batch
        assert ledger.reserve(State.BUILDING, 80, head_of_order=True)
        ledger.move(State.BUILDING, State.IN_USE, 80)
    assert not ledger.reserve(State.WINDOW, 1)
    assert ledger.snapshot().peak_bytes == 240


def test_the_head_of_the_order_keeps_the_limit_for_all_but_bytes_in_use() -> None:
    ledger = Ledger(LIMIT)
    assert ledger.reserve(State.WINDOW, 60)
    assert not ledger.reserve(State.BUILDING, 41, head_of_order=True)
    assert ledger.reserve(State.BUILDING, 40, keep_bytes=99, head_of_order=True)


def test_what_comes_back_before_it_is_delivered_is_ready_no_more() -> None:
    ledger = Ledger(100)
    ledger.charge(State.READY, 80)
    ledger.give_back(30)
    assert (ledger.snapshot().ready_bytes, ledger.snapshot().in_use_bytes) == (50, 0)
    assert not ledger.reserve(State.BUILDING, 51, head_of_order=True)
    assert ledger.reserve(State.BUILDING, 50, head_of_order=True)
    assert not ledger.resize(99)
    ledger.move(State.READY, State.IN_USE, 80)
    assert (ledger.snapshot().ready_bytes, ledger.snapshot().in_use_bytes) == (0, 50)


def test_releasing_more_than_is_held_is_a_bug_that_shows() -> None:
    ledger = Ledger(LIMIT)
    with pytest.raises(AssertionError):
        ledger.release(State.WINDOW, 1)


class Batch:
    """Something that a weak reference can watch."""


def test_bytes_in_use_come_back_from_a_weakref_callback_inside_a_critical_section() -> None:
    ledger = Ledger(LIMIT)
    ledger.reserve(State.IN_USE, 70)
    batches = [Batch()]
    watch = weakref.ref(batches[0], lambda _: ledger.give_back(70))
    ledger.reconcile_first(batches.clear)  # as when a garbage collection starts inside `reserve`
    thread = threading.Thread(target=ledger.reserve, args=(State.WINDOW, 1), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "deadlock"
    assert watch() is None
    assert ledger.snapshot().in_use_bytes == 0
    assert ledger.reserve(State.WINDOW, LIMIT - 1)


def test_threads_that_compete_never_hold_more_than_the_limit() -> None:
    ledger, together = Ledger(LIMIT), threading.Barrier(4, timeout=10)

    def work(nbytes: int) -> None:
        together.wait()
        for _ in range(200):
            if ledger.reserve(State.BUILDING, nbytes):
                ledger.move(State.BUILDING, State.READY, nbytes)
                ledger.move(State.READY, State.IN_USE, nbytes)
                ledger.give_back(nbytes)

    threads = [threading.Thread(target=work, args=(n,)) for n in (17, 29, 43, 71)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    seen = ledger.snapshot()
    assert 0 < seen.peak_bytes <= LIMIT
    assert (seen.building_bytes, seen.ready_bytes, seen.in_use_bytes) == (0, 0, 0)
