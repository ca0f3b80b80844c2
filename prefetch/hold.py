"""Hold new reads of remote stores back for a moment, unless training would run dry.

While gradients are on the network, reads that nobody waits for make them slower. A hold lets no new read
begin; those that run go on. It is a request, not an order: it ends by itself when few batches are ready, when
the training code waits for a read, or when whoever holds is not heard of for too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_MOST_S = 10.0


@dataclass(frozen=True)
class HoldStats:
    """What holds did so far."""

    holds: int = 0
    """How often reads were asked to wait."""
    held_reads: int = 0
    """Reads that waited. None of many holds: reads came at other times anyway."""
    broken: int = 0
    """Holds that ended early, for want of batches. Most of them: the store is too slow to be held back."""


class ReadHold:
    """Lets reads begin, or asks them to wait. Thread-safe.

    Args:
        low_water: with so many batches ready or fewer, nothing is held back.
        most_s: seconds that a hold lasts at most.
        now: seconds on a clock that only goes forward.
    """

    def __init__(
        self, *, low_water: int = 2, most_s: float = _MOST_S, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._low_water, self._most_s, self._now = low_water, most_s, now
        self._changed = threading.Condition()  # guards everything below
        self._ready: Callable[[], int] = lambda: low_water
        self._until: float | None = None
        self._holds = self._held_reads = self._broken = 0

    def watch(self, ready: Callable[[], int]) -> None:
        """Ask `ready` for the number of batches ready from now on; it must not block."""
        with self._changed:
            self._ready = ready

    def hold(self) -> None:
        """Ask new reads to wait until `release`."""
        with self._changed:
            self._until = self._now() + self._most_s
            self._holds += 1

    def release(self) -> None:
        """Let all reads begin. Idempotent."""
        with self._changed:
            self._until = None
            self._changed.notify_all()

    def hurry(self) -> None:
        """The training code waits for a read: the present hold is over."""
        with self._changed:
            self._break()

    def took(self) -> None:
        """Batches were taken: if few are left, the present hold is over."""
        with self._changed:
            if self._until is not None and self._ready() <= self._low_water:
                self._break()

    def wait(self) -> None:
        """Return when a read may begin."""
        with self._changed:
            if not self._held():
                return
            self._held_reads += 1
            while self._held():
                assert self._until is not None
                self._changed.wait(self._until - self._now())

    def stats(self) -> HoldStats:
        """So far."""
        with self._changed:
            return HoldStats(self._holds, self._held_reads, self._broken)

    def _held(self) -> bool:
        if self._until is None:
            return False
        if self._ready() <= self._low_water or self._now() >= self._until:
            self._break()
            return False
        return True

    def _break(self) -> None:
        if self._until is not None:
            self._until = None
            self._broken += 1
            self._changed.notify_all()
