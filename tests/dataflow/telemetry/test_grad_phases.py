"""Seconds per phase, on a clock that the test moves."""

from __future__ import annotations

from contextlib import suppress

from dataflow.telemetry.timing.phases import Phase, PhaseLedger, PhaseSeconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def test_each_second_belongs_to_one_phase_or_to_waiting_for_data() -> None:
    clock = Clock()
    ledger = PhaseLedger(clock)
    clock.now += 1
    ledger.waited(lambda: clock.move(10))
    clock.now += 2
    ledger.enter(Phase.SYNC)
    clock.now += 4
    ledger.enter(Phase.SYNC)
    clock.now += 8
    ledger.enter(Phase.STEP)
    clock.now += 0.5
    assert ledger.take() == PhaseSeconds(compute=3, sync=12, step=0.5, data_wait=10)
    assert ledger.take() == PhaseSeconds()


def test_waiting_that_fails_is_counted_too() -> None:
    clock = Clock()
    ledger = PhaseLedger(clock)

    def fail() -> None:
        clock.now += 3
        raise OSError

    with suppress(OSError):
        ledger.waited(fail)
    assert ledger.take() == PhaseSeconds(data_wait=3)


def test_listeners_hear_of_changes_only_and_until_they_stop() -> None:
    clock, heard = Clock(), list[tuple[Phase, float]]()
    ledger = PhaseLedger(clock)
    stop = ledger.listen(lambda phase, now: heard.append((phase, now)))
    ledger.enter(Phase.COMPUTE)
    ledger.enter(Phase.SYNC)
    clock.now += 1
    ledger.enter(Phase.COMPUTE)
    stop()
    ledger.enter(Phase.STEP)
    assert heard == [(Phase.SYNC, 100.0), (Phase.COMPUTE, 101.0)]
