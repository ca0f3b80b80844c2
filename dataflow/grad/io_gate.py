"""The I/O gate: remote reads wait while gradients are on the same network, where that was seen to pay.

At first two ways take turns of some windows: any number of reads may run at any time ("open"); or few at a
time, which stand still while gradients travel, and no new ones begin ("sync"). Then the way with the shortest
windows is kept, if it saves enough. Which window tries what depends on its number alone, so all ranks try the
same at the same time. It changes when bytes are read, never which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Literal, Protocol

from dataflow.grad.phases import Phase, PhaseLedger
from prefetch.hold import ReadHold

Io = Literal["auto", "open", "sync"]
"""How reads and gradients share the network; "auto" finds out."""

_FEW = 2
"""Reads at a time: what the kernel holds of each comes although it stands still."""
_WARM_UP = 3
"""Windows at first that count for nothing: connections are made, DDP arranges its buckets."""
_TURNS = 2
"""Of each way in a trial."""
_TURN = 16
"""Windows of a turn. The first does not count: what it reads depends on the turn before. Reads come in
bursts, a shuffle window at once, and a turn must see them come and go."""
_SAVES = 0.01
"""Share of a window that a way must save."""
_PERIOD = 1024
"""Windows from trial to trial: the network may have changed."""


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

    decision: GateDecision

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


class TriedGate:
    """Tries all ways in turn and keeps the best; tries again later.

    Args:
        ways: what to try.
        turns: of each way.
        turn: windows of a turn, the first of which does not count.
        period: windows from the beginning of a trial to that of the next one.
    """

    def __init__(
        self,
        ways: Sequence[Way] = tuple(Way),
        *,
        turns: int = _TURNS,
        turn: int = _TURN,
        period: int = _PERIOD,
    ) -> None:
        if Way.OPEN not in ways:
            raise ValueError("a trial needs the way OPEN to compare with")
        if turn < 2 or turns < 1:
            raise ValueError(f"at least one turn of two windows is needed, got {turns} of {turn}")
        self._ways, self._turn, self._period = tuple(ways), turn, period
        self._length = turns * len(ways) * turn
        if _WARM_UP + self._length >= period:
            raise ValueError(f"a trial of {self._length} windows does not fit a period of {period}")
        self._seconds: dict[Way, list[float]] = {}
        self._held = 0
        self.decision = GateDecision(Way.OPEN, "not tried yet", {})

    def way(self, window: int) -> Way:
        """In a trial the one whose turn it is."""
        at = self._place(window)
        return self.decision.way if at is None else self._tried(at)

    def ended(self, window: int, seconds: float, held_reads: int) -> None:
        """Decides after the last window of a trial."""
        at = self._place(window)
        if at is None:
            return
        if at == 0:
            self._seconds, self._held = {way: [] for way in self._ways}, 0
        elif not self._seconds:
            return  # resumed within a trial: the next one will tell
        self._held += held_reads
        if at % self._turn:
            self._seconds[self._tried(at)].append(seconds)
        if at == self._length - 1:
            self.decision, self._seconds = self._decided(), {}

    def _tried(self, at: int) -> Way:
        return self._ways[at // self._turn % len(self._ways)]

    def _place(self, window: int) -> int | None:
        """Place in a trial, or None outside."""
        at = window % self._period - _WARM_UP
        return at if 0 <= at < self._length else None

    def _decided(self) -> GateDecision:
        means = {way: _mean(found) for way, found in self._seconds.items()}
        if not self._held:
            return GateDecision(Way.OPEN, "no read came while gradients travelled", means)
        best = min(means, key=means.__getitem__)
        saved = 1 - means[best] / means[Way.OPEN]
        if saved < _SAVES:
            return GateDecision(
                Way.OPEN, f"holding reads back saves {max(0.0, saved):.1%} of a window", means
            )
        return GateDecision(best, f"saves {saved:.1%} of a window", means)


TRIAL_WINDOWS = _WARM_UP + _TURNS * len(Way) * _TURN
"""From the beginning of a run to the first decision of "auto"."""


def _mean(seconds: Sequence[float]) -> float:
    """Without the slowest: a checkpoint is not the network's fault. Not more: bursts of reads may be rare."""
    return fmean(sorted(seconds)[: max(1, len(seconds) - 1)])


def gate_policy(io: Io | GatePolicy) -> GatePolicy:
    """The policy that `io=` means. Raises `ValueError` for another word."""
    if not isinstance(io, str):
        return io
    if io == "auto":
        return TriedGate()
    try:
        return FixedGate(Way(io))
    except ValueError:
        raise ValueError(f'io must be "auto", "open" or "sync", got {io!r}') from None


class IoGate:
    """Holds a loader's remote reads back as a policy says. Used by the training thread and its backward pass.

    Args:
        hold: the loader's (`DataLoader.read_hold`).
        policy: when to.
        ledger: tells when gradients travel.
    """

    def __init__(self, hold: ReadHold, policy: GatePolicy, ledger: PhaseLedger) -> None:
        self._hold, self.policy = hold, policy
        self._way, self._window = Way.OPEN, 0
        self._held_before = 0
        self._end = ledger.listen(self._entered)

    def window_begins(self, window: int) -> None:
        """A window of that number, which ends with a reduction."""
        self._window, self._way = window, self.policy.way(window)
        self._hold.limit(None if self._way is Way.OPEN else _FEW)
        self._held_before = self._hold.stats().held_reads

    def window_ended(self, seconds: float) -> None:
        """Its gradients are there and the step is taken; `seconds` since the window before ended."""
        self._hold.release()
        self.policy.ended(self._window, seconds, self._hold.stats().held_reads - self._held_before)
        self._way = Way.OPEN

    def left(self) -> None:
        """No window is under way: the loop has ended, by itself or not."""
        self._open()

    def close(self) -> None:
        """Let reads begin, and listen no more. Idempotent."""
        self._open()
        self._end()
        self._end = lambda: None

    def _open(self) -> None:
        self._hold.release()
        self._hold.limit(None)
        self._way = Way.OPEN

    def _entered(self, phase: Phase, now: float) -> None:
        if phase is Phase.SYNC:
            if self._way is Way.SYNC:
                self._hold.hold()
        elif phase is Phase.STEP:
            self._hold.release()
