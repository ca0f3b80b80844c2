"""The I/O gate: remote reads wait while gradients are on the same network, where that was seen to pay.

There are two ways: any number of reads may run at any time ("open"); or few at a time, which stand still
while gradients travel, and no new ones begin ("sync"). The controller (`dataflow.grad.adapt.controller`)
tries them and keeps what pays. It changes when bytes are read, never which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from dataflow.timing.phases import Phase, PhaseLedger
from prefetch.control.pause import ReadPause

Io = Literal["auto", "open", "sync"]
"""How reads and gradients share the network; "auto" finds out."""

_FEW = 2
"""Reads at a time: what the kernel holds of each comes although it stands still."""


class Way(StrEnum):
    """When remote reads wait."""

    OPEN = "open"
    SYNC = "sync"


@dataclass(frozen=True)
class GateDecision:
    """How windows go on."""

    way: Way
    reason: str
    seconds: Mapping[Way, float]
    """Mean window of each way in the last trial, without the slowest one; empty before its end."""


class GatePolicy(Protocol):
    """Says how the gate goes about each window. Pure: no clock, no thread."""

    @property
    def decision(self) -> GateDecision:
        """How windows go on."""

    def way(self, window: int) -> Way:
        """For the window of that number, counted over the whole run."""

    def ended(self, window: int, seconds: float, held_reads: int) -> None:
        """The window took that long, and so many reads waited in it."""


class FixedGate:
    """Always the same way."""

    def __init__(self, way: Way) -> None:
        self.decision = GateDecision(way, "as told", {})

    def way(self, window: int) -> Way:
        """The one."""
        return self.decision.way

    def ended(self, window: int, seconds: float, held_reads: int) -> None:
        """Makes no difference."""


def gate_policy(io: Io | GatePolicy) -> GatePolicy | None:
    """The policy that `io=` means; None: the controller's. Raises `ValueError` for another word."""
    if not isinstance(io, str):
        return io
    if io == "auto":
        return None
    try:
        return FixedGate(Way(io))
    except ValueError:
        raise ValueError(f'io must be "auto", "open" or "sync", got {io!r}') from None


class IoGate:
    """Holds a loader's remote reads back as a policy says. Used by the training thread and its backward pass.

    Args:
        pause: the loader's (`DataLoader.read_pause`).
        policy: when to.
        ledger: tells when gradients travel.
    """

    def __init__(self, pause: ReadPause, policy: GatePolicy, ledger: PhaseLedger) -> None:
        self._pause, self.policy = pause, policy
        self._way, self._window = Way.OPEN, 0
        self._held_before = 0
        self._end = ledger.listen(self._entered)

    def step_begins(self, window: int) -> None:
        """A window of that number, which ends with a reduction."""
        self._window, self._way = window, self.policy.way(window)
        self._pause.limit(None if self._way is Way.OPEN else _FEW)
        self._held_before = self._pause.stats().held_reads

    def step_ended(self, seconds: float) -> None:
        """Its gradients are there and the step is taken; `seconds` since the window before ended."""
        self._pause.end()
        self.policy.ended(self._window, seconds, self._pause.stats().held_reads - self._held_before)
        self._way = Way.OPEN

    def open(self) -> None:
        """Let any number of reads begin: no step is under way that reduces."""
        self._pause.end()
        self._pause.limit(None)
        self._way = Way.OPEN

    def close(self) -> None:
        """Let reads begin, and listen no more. Idempotent."""
        self.open()
        self._end()
        self._end = lambda: None

    def _entered(self, phase: Phase, now: float) -> None:
        if phase is Phase.SYNC:
            if self._way is Way.SYNC:
                self._pause.begin()
        elif phase is Phase.STEP:
            self._pause.end()
