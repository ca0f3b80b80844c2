"""The I/O gate: when it holds reads back. What is tried and kept: test_controller.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_kit import RankSet
from torch.nn.parallel import DistributedDataParallel

from dataflow import GradSchedule
from dataflow.grad.gate import GateMode, IoGate
from dataflow.grad.strategies import PostLocalSGD
from dataflow.telemetry.timing.phases import Phase, PhaseLedger
from prefetch.control.pause import ReadPause

WAYS = list(GateMode)
two = RankSet(2)


# ---- the gate itself --------------------------------------------------------------------------------------


class Holds(ReadPause):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self._on = False

    def begin(self) -> None:
        self._on = True
        self.told.append("hold")

    def end(self) -> None:
        if self._on:
            self.told.append("release")
        self._on = False


def window(gate: IoGate, ledger: PhaseLedger, told: list[str]) -> list[str]:
    """One window; what happened, in order."""
    gate.step_begins(0)
    for phase in (Phase.SYNC, Phase.COMPUTE, Phase.STEP, Phase.COMPUTE):
        told.append(str(phase))
        ledger.enter(phase)
    gate.step_ended()
    return told


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (GateMode.OPEN, "sync compute step compute"),
        (GateMode.SYNC, "sync hold compute step release compute"),
    ],
)
def test_reads_are_held_from_where_the_way_says_until_the_step(way: GateMode, expected: str) -> None:
    hold, ledger = Holds(), PhaseLedger()
    assert window(IoGate(hold, ledger, lambda _: way), ledger, hold.told) == expected.split()


@pytest.mark.parametrize("way", WAYS)
def test_few_reads_run_at_a_time_but_for_the_open_way(way: GateMode) -> None:
    hold, ledger = ReadPause(), PhaseLedger()
    limits: list[int | None] = []
    hold.limit = limits.append  # type: ignore[method-assign]
    gate = IoGate(hold, ledger, lambda _: way)
    gate.step_begins(0)
    gate.open()
    assert limits == [None if way is GateMode.OPEN else 2, None]


def test_leaving_a_window_lets_reads_begin() -> None:
    hold, ledger = Holds(), PhaseLedger()
    gate = IoGate(hold, ledger, lambda _: GateMode.SYNC)
    gate.step_begins(0)
    ledger.enter(Phase.SYNC)
    gate.open()
    assert hold.told == ["hold", "release"]


def test_a_closed_gate_hears_no_more() -> None:
    hold, ledger = Holds(), PhaseLedger()
    gate = IoGate(hold, ledger, lambda _: GateMode.SYNC)
    gate.step_begins(0)
    gate.close()
    gate.close()
    ledger.enter(Phase.SYNC)
    assert hold.told == []


# ---- in a schedule ----------------------------------------------------------------------------------------


class LoaderWithHold(list[Any]):
    """Batches, and what was asked of the reads."""

    def __init__(self) -> None:
        super().__init__(torch.ones(2, 3) for _ in range(4))
        self.read_pause = Holds()


def holds_of_two_windows(io: str) -> tuple[list[str], str]:
    loader = LoaderWithHold()
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with GradSchedule(loader, model, optimizer, accumulate=2, io=io) as sched:  # type: ignore[arg-type]
        for batch in sched:
            loader.read_pause.told.append("forward")
            sched.backward(model(batch).sum() * sched.scale())
            loader.read_pause.told.append("backward done")
            sched.step()
        assert sched.io is not None
        return loader.read_pause.told, sched.io.way


@two.add
def holds_of_each_way() -> dict[str, tuple[list[str], str]]:
    return {way: holds_of_two_windows(way) for way in WAYS}


@two.add
def limits_of_each_window() -> list[bool]:
    """Gradients are reduced in the first two windows, parameters averaged from then on."""
    loader = LoaderWithHold()
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    limited = []
    strategy = PostLocalSGD(8, start_step=2)
    with GradSchedule(loader, model, optimizer, io="sync", strategy=strategy) as sched:
        for batch in sched:
            limited.append(loader.read_pause.is_limited)
            sched.backward(model(batch).sum())
            sched.step()
    return limited


def test_windows_without_a_reduction_let_any_number_of_reads_run() -> None:
    limited = two.results(limits_of_each_window)
    assert limited == [[True, True, False, False]] * 2


@pytest.mark.parametrize("io", WAYS)
def test_a_schedule_holds_reads_in_the_last_microbatch_of_each_window(io: GateMode) -> None:
    told, way = two.results(holds_of_each_way)[0][io]
    plain = ["forward", "backward done"]
    sync = ["forward", "hold", "backward done", "release"]
    assert way == io
    assert told == (plain + {GateMode.OPEN: plain, GateMode.SYNC: sync}[io]) * 2
