"""Decide how many batches to hold ready, with the reason, from observations alone.

The engine asks before it starts each batch. `fixed_depth` answers with a constant. `AdaptiveDepth` holds as
many batches as training uses while one is made, `ceil(rate x high quantile of the lead time)` (the newsvendor
form of Little's law), plus a correction that each wait of the training code raises and time lowers. It goes
up at once, but only where more depth could have helped; it goes down by at most a quarter at a time, after a
window of steps in which batches were left over. So it needs a miss to rise and slack to fall, and does not
swing between them. No clock, thread or lock inside: the engine serialises the calls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct


class Observation(Struct, frozen=True, kw_only=True):
    """An observation of the engine, for a decision."""

    delivered_batches: int
    """Batches taken by the consumer so far."""
    starved_s: float
    """Seconds the consumer has waited so far. Near 0: depth suffices."""
    ready_batches: int
    """Batches that wait for the consumer now, or are being built for it."""
    batch_bytes: int
    """Output bytes of the next batch."""
    now_s: float = 0.0
    """The time, on any clock that only goes forward."""
    waits: int = 0
    """The number of times that the consumer has waited so far, the first batch left out."""
    limit: str = ""
    """The reason of the last wait when no depth would have saved it, such as "reading"; "" if depth would."""
    finished_batches: int = 0
    """The number of `ready_batches` that are finished. 0: the next call waits."""
    leads_s: Sequence[float] = ()
    """Seconds from start to finish of the batches that were finished since the last observation."""
    steps_s: Sequence[float] = ()
    """Seconds the consumer worked between batches, its waits left out, since the last observation."""


@dataclass(frozen=True)
class Decision:
    """A value, and the reason for it."""

    value: int
    reason: str


DepthPolicy = Callable[[Observation], Decision]


class FixedDepth(Struct, frozen=True):
    """A policy of one depth, whatever is seen."""

    decision: Decision

    def __call__(self, seen: Observation) -> Decision:
        """The depth, which was decided before."""
        return self.decision


def fixed_depth(batches: int) -> DepthPolicy:
    """Return a policy of one depth."""
    if batches < 1:
        raise ValueError(f"depth must be >= 1 batch, got {batches}")
    return FixedDepth(Decision(batches, f"fixed at {batches}"))


_QUANTILE = 0.99
_LEADS = 512
"""Long enough to remember the last bad spell of a store that swings."""
_STEPS = 64
_WINDOW_STEPS = 50
_SHRINK = 0.75
"""The most that one window with slack takes away."""
_SLACK = 2
"""Finished batches that must have been left over throughout a window."""
_CALM_STEPS = 200
"""Steps without a wait that take one batch off the correction."""


class AdaptiveDepth:
    """A `DepthPolicy` that follows lead time and waits. For one engine; not thread-safe.

    Args:
        start: the depth before anything is known; also the least.
        most: the largest.
        limit_bytes: bytes that ready batches may take; None: no such limit.
    """

    def __init__(self, *, start: int = 4, most: int = 64, limit_bytes: int | None = None) -> None:
        if not 1 <= start <= most:
            raise ValueError(f"1 <= start <= most must hold, got {start} and {most}")
        self._least, self._most, self._limit_bytes = start, most, limit_bytes
        self._decision = Decision(start, "starting")
        self._leads: deque[float] = deque(maxlen=_LEADS)
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._news = 0
        self._target = float(start)
        self._correction = 0
        self._calm_from = 0
        self._waits = 0
        self._limited_by = ""
        self._sizes: deque[int] = deque(maxlen=_LEADS)
        self._smallest = 0
        self._window_from, self._window_s, self._lowest = 0, 0.0, math.inf

    def __call__(self, seen: Observation) -> Decision:
        """The depth from now on."""
        self._take_in(seen)
        waited = seen.waits > self._waits
        self._waits = seen.waits
        if waited:
            self._after_wait(seen)
        elif seen.delivered_batches - self._calm_from >= _CALM_STEPS:
            self._calm_from, self._correction = seen.delivered_batches, max(0, self._correction - 1)
        self._lowest = min(self._lowest, seen.finished_batches)
        self._move(seen, waited)
        return self._decision

    def _take_in(self, seen: Observation) -> None:
        self._leads.extend(seen.leads_s)
        self._steps.extend(seen.steps_s)
        self._news += len(seen.leads_s)
        if seen.batch_bytes:
            self._sizes.append(seen.batch_bytes)
            self._smallest = min(self._smallest or seen.batch_bytes, seen.batch_bytes)
        if self._news >= min(8, len(self._leads)) and self._news and self._steps:
            self._news = 0
            leads, steps = sorted(self._leads), sorted(self._steps)
            lead = leads[math.ceil(_QUANTILE * (len(leads) - 1))]
            self._target = lead / max(steps[len(steps) // 2], 1e-9)
            self._smallest = min(self._sizes, default=0)

    def _after_wait(self, seen: Observation) -> None:
        self._calm_from = seen.delivered_batches
        self._limited_by = seen.limit
        if not seen.limit:
            now = self._decision.value
            more = now if seen.delivered_batches < _WINDOW_STEPS else max(1, now // 2)
            self._correction = min(self._most, self._correction + more)

    def _most_now(self) -> tuple[int, str]:
        if self._limit_bytes is not None and self._smallest:
            fit = max(1, self._limit_bytes // self._smallest)  # the ledger bounds what larger ones take
            if fit < self._most:
                return fit, "; all that the memory limit holds"
        return self._most, "; the largest"

    def _move(self, seen: Observation, waited: bool) -> None:
        now = self._decision.value
        most, bound = self._most_now()
        depth = max(self._least, math.ceil(min(self._target, self._most)) + self._correction)
        reason = f"{self._target:.1f} batches are used while one is made"
        reason += f", {self._correction} more after waits" if self._correction else ""
        depth, reason = (most, reason + bound) if depth >= most else (depth, reason)
        band = max(1, now // 10)
        if now > most:
            self._set(seen, most, reason)
        elif self._limited_by:
            if not waited and self._window_ends(seen):
                self._limited_by = ""
                self._open_window(seen)
            elif waited:
                self._open_window(seen)
                self._set(seen, now, f"{self._limited_by} is the limit: more batches ahead would not help")
        elif depth > now + band or (waited and depth > now):
            self._set(seen, depth, reason)
        elif waited:
            self._open_window(seen)
        elif self._window_ends(seen):
            if depth < now - band and self._lowest >= _SLACK:
                self._set(seen, max(depth, int(_SHRINK * now)), reason)
            self._open_window(seen)

    def _window_ends(self, seen: Observation) -> bool:
        lead = max(self._leads, default=0.0)
        return (
            seen.delivered_batches - self._window_from >= _WINDOW_STEPS
            and seen.now_s - self._window_s >= 2 * lead
        )

    def _open_window(self, seen: Observation) -> None:
        self._window_from, self._window_s, self._lowest = seen.delivered_batches, seen.now_s, math.inf

    def _set(self, seen: Observation, value: int, reason: str) -> None:
        if value != self._decision.value:
            self._open_window(seen)
        self._decision = Decision(value, reason)
