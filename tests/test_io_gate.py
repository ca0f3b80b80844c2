"""The I/O gate: what it tries, what it keeps, and when it holds reads back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dataflow import GradSchedule
from dataflow.grad.io_gate import FixedGate, IoGate, TriedGate, Way, gate_policy
from dataflow.grad.phases import Phase, PhaseLedger
from dataflow.testing import run_ranks
from prefetch.hold import ReadHold

WAYS = list(Way)


def run(policy: TriedGate, windows: range, seconds: Callable[[Way], float], held_reads: int = 1) -> list[Way]:
    """Let windows pass; which way each went."""
    went = []
    for window in windows:
        way = policy.way(window)
        policy.ended(window, seconds(way), 0 if way is Way.OPEN else held_reads)
        went.append(way)
    return went


def test_a_trial_gives_each_way_its_turns_after_the_warm_up() -> None:
    went = run(TriedGate(turns=2, turn=5, period=50), range(23), lambda way: 1.0)
    assert went == [Way.OPEN] * 3 + [way for way in WAYS for _ in range(5)] * 2


@pytest.mark.parametrize("best", WAYS)
def test_the_way_with_the_shortest_windows_is_kept(best: Way) -> None:
    policy = TriedGate(turns=1, turn=5, period=50)
    run(policy, range(13), lambda way: 0.9 if way is best else 1.0)
    assert policy.decision.way is best
    assert policy.decision.seconds[best] == 0.9
    assert set(run(policy, range(13, 50), lambda way: 1.0)) == {best}


def test_a_saving_below_one_percent_leaves_reads_alone_and_says_so() -> None:
    policy = TriedGate(turns=1, turn=5, period=50)
    run(policy, range(13), lambda way: 1.0 if way is Way.OPEN else 0.995)
    assert policy.decision.way is Way.OPEN
    assert "0.5%" in policy.decision.reason


def test_where_no_read_was_held_back_chance_decides_nothing() -> None:
    policy = TriedGate(turns=1, turn=5, period=50)
    run(policy, range(13), lambda way: 1.0 if way is Way.OPEN else 0.5, held_reads=0)
    assert policy.decision.way is Way.OPEN
    assert "no read" in policy.decision.reason


def test_the_first_window_of_a_turn_does_not_count() -> None:
    policy = TriedGate(turns=1, turn=5, period=50)
    times = iter([1.0] * 3 + [9.0, 1.0, 1.0, 1.0, 1.0] * 2)
    run(policy, range(13), lambda way: next(times))
    assert set(policy.decision.seconds.values()) == {1.0}


def test_one_long_window_does_not_decide() -> None:
    policy = TriedGate(turns=3, turn=5, period=80)
    times = iter([1.0] * 10 + [30.0] + [1.0] * 50)
    run(policy, range(33), lambda way: next(times) * (0.9 if way is Way.SYNC else 1.0))
    assert policy.decision.way is Way.SYNC


def test_bursts_decide_though_they_are_rare() -> None:
    policy = TriedGate(turns=2, turn=16, period=80)
    rare = {Way.OPEN: iter([*[1.0] * 7, 1.5] * 8), Way.SYNC: iter([1.02] * 64)}
    run(policy, range(67), lambda way: next(rare[way]))
    assert policy.decision.way is Way.SYNC


def test_a_later_trial_changes_the_decision() -> None:
    policy = TriedGate(turns=1, turn=5, period=25)
    run(policy, range(25), lambda way: 0.5 if way is Way.SYNC else 1.0)
    assert policy.decision.way is Way.SYNC
    run(policy, range(25, 50), lambda way: 2.0 if way is Way.SYNC else 1.0)
    assert policy.decision.way is not Way.SYNC


def test_a_run_resumed_within_a_trial_waits_for_the_next_one() -> None:
    policy = TriedGate(turns=1, turn=5, period=25)
    run(policy, range(5, 25), lambda way: 0.5 if way is Way.SYNC else 1.0)
    assert policy.decision.reason == "not tried yet"
    run(policy, range(25, 50), lambda way: 0.5 if way is Way.SYNC else 1.0)
    assert policy.decision.way is Way.SYNC


def test_ranks_try_the_same_way_in_the_same_window_whatever_they_measure() -> None:
    ranks = [TriedGate(), TriedGate()]
    for window in range(67):
        assert ranks[0].way(window) == ranks[1].way(window)
        for number, policy in enumerate(ranks):
            policy.ended(window, 1.0 + number, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gate_policy("closed"), "io must be"),  # type: ignore[arg-type]
        (lambda: TriedGate([Way.SYNC]), "OPEN"),
        (lambda: TriedGate(turns=2, period=20), "does not fit"),
        (lambda: TriedGate(turn=1), "two windows"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


# ---- the gate itself --------------------------------------------------------------------------------------


class Holds(ReadHold):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self._on = False

    def hold(self) -> None:
        self._on = True
        self.told.append("hold")

    def release(self) -> None:
        if self._on:
            self.told.append("release")
        self._on = False


def window(gate: IoGate, ledger: PhaseLedger, told: list[str]) -> list[str]:
    """One window; what happened, in order."""
    gate.window_begins(0)
    for phase in (Phase.SYNC, Phase.COMPUTE, Phase.STEP, Phase.COMPUTE):
        told.append(str(phase))
        ledger.enter(phase)
    gate.window_ended(1.0)
    return told


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (Way.OPEN, "sync compute step compute"),
        (Way.SYNC, "sync hold compute step release compute"),
    ],
)
def test_reads_are_held_from_where_the_way_says_until_the_step(way: Way, expected: str) -> None:
    hold, ledger = Holds(), PhaseLedger()
    assert window(IoGate(hold, FixedGate(way), ledger), ledger, hold.told) == expected.split()


@pytest.mark.parametrize("way", WAYS)
def test_few_reads_run_at_a_time_but_for_the_open_way(way: Way) -> None:
    hold, ledger = ReadHold(), PhaseLedger()
    limits: list[int | None] = []
    hold.limit = limits.append  # type: ignore[method-assign]
    gate = IoGate(hold, FixedGate(way), ledger)
    gate.window_begins(0)
    gate.left()
    assert limits == [None if way is Way.OPEN else 2, None]


def test_leaving_a_window_lets_reads_begin() -> None:
    hold, ledger = Holds(), PhaseLedger()
    gate = IoGate(hold, FixedGate(Way.SYNC), ledger)
    gate.window_begins(0)
    ledger.enter(Phase.SYNC)
    gate.left()
    assert hold.told == ["hold", "release"]


def test_a_closed_gate_hears_no_more() -> None:
    hold, ledger = Holds(), PhaseLedger()
    gate = IoGate(hold, FixedGate(Way.SYNC), ledger)
    gate.window_begins(0)
    gate.close()
    gate.close()
    ledger.enter(Phase.SYNC)
    assert hold.told == []


# ---- in a schedule ----------------------------------------------------------------------------------------


class LoaderWithHold(list[Any]):
    """Batches, and what was asked of the reads."""

    def __init__(self) -> None:
        super().__init__(torch.ones(2, 3) for _ in range(4))
        self.read_hold = Holds()


def holds_of_two_windows(io: str) -> tuple[list[str], str]:
    loader = LoaderWithHold()
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with GradSchedule(loader, model, optimizer, accumulate=2, io=io) as sched:  # type: ignore[arg-type]
        for batch in sched:
            loader.read_hold.told.append("forward")
            sched.backward(model(batch).sum())
            loader.read_hold.told.append("backward done")
            sched.step()
        assert sched.io is not None
        return loader.read_hold.told, sched.io.way


@pytest.mark.parametrize("io", WAYS)
def test_a_schedule_holds_reads_in_the_last_microbatch_of_each_window(io: Way) -> None:
    told, way = run_ranks(holds_of_two_windows, 2, args=(str(io),), start_method="forkserver")[0]
    plain = ["forward", "backward done"]
    sync = ["forward", "hold", "backward done", "release"]
    assert way == io
    assert told == (plain + {Way.OPEN: plain, Way.SYNC: sync}[io]) * 2
