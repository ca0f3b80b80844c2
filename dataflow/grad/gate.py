"""The I/O gate: remote reads wait while gradients are on the same network, where that was seen to pay.

There are two ways: any number of reads may run at any time ("open"); or few at a time, which stand still
while gradients travel, and no new ones begin ("sync"). The controller (`dataflow.grad.adapt.controller`)
tries them and keeps what pays. It changes when bytes are read, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from dataflow.telemetry.timing.phases import Phase, PhaseLedger
from prefetch.control.pause import ReadPause

Io = Literal["auto", "open", "sync"]
"""The way reads and gradients share the network; "auto" finds out."""

_FEW = 2
"""Reads at a time: what the kernel holds of each comes although it stands still."""


class GateMode(StrEnum):
    """The times at which remote reads wait."""

    OPEN = "open"
    SYNC = "sync"


GateModeOf = Callable[[int], GateMode]
"""The way of the window with that number, counted over the whole run."""


@dataclass(frozen=True)
class GateDecision:
    """The way that the next windows take, and why."""

    way: GateMode
    reason: str
    seconds: Mapping[GateMode, float]
    """Mean window of each way in the last trial, without the slowest one; empty before its end."""


def checked_io(io: Io | GateModeOf) -> GateModeOf | None:
    """The way of each window that `io=` means; None: the controller's. `ValueError` for another word."""
    if callable(io):
        return io
    if io == "auto":
        return None
    if io not in list(GateMode):
        raise ValueError(f'io must be "auto", "open" or "sync", got {io!r}')
    return lambda window: GateMode(io)


class IoGate:
    """Holds a loader's remote reads back as it is told. Used by the training thread and its backward pass.

    Args:
        pause: the loader's (`DataLoader.read_pause`).
        ledger: tells when gradients travel.
        way_of: when to.
    """

    def __init__(self, pause: ReadPause, ledger: PhaseLedger, way_of: GateModeOf) -> None:
        self._pause, self._way_of = pause, way_of
        self._holds, self._held_before = False, 0
        self._end = ledger.listen(self._entered)

    def step_begins(self, window: int) -> None:
        """A window of that number, which ends with a reduction."""
        self._holds = self._way_of(window) is GateMode.SYNC
        self._pause.limit(_FEW if self._holds else None)
        self._held_before = self._pause.stats().held_reads

    def step_ended(self) -> int:
        """Its gradients are there and the step is taken; returns how many reads waited in it."""
        self._pause.end()
        self._holds = False
        return self._pause.stats().held_reads - self._held_before

    def open(self) -> None:
        """Let any number of reads begin: no step is under way that reduces."""
        self._pause.end()
        self._pause.limit(None)
        self._holds = False

    def close(self) -> None:
        """Let reads begin, and listen no more. Idempotent."""
        self.open()
        self._end()
        self._end = lambda: None

    def _entered(self, phase: Phase, now: float) -> None:
        if phase is Phase.SYNC and self._holds:
            self._pause.begin()
        elif phase is Phase.STEP:
            self._pause.end()
