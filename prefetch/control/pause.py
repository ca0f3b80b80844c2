"""Let fewer reads of remote stores run for a while, or all stand still, unless training would run dry.

While gradients are on the network, reads that nobody waits for make them slower: each of many connections
takes as much of a link as the one that gradients travel on. A *limit* lets few reads run at a time, so that
few are in the way when gradients come; a *pause* lets no new read begin, and those that run stand still where
we read the store directly (`prefetch.http.arrival`). Both are requests, not orders: they end by themselves
when the training code waits for a read, and a pause also when few batches are ready, or when whoever asked
for it is not heard of for too long. Time in which reads stand still says nothing about a store, so whoever
measures one does it by a clock that stands still, too (`ReadPause.running_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prefetch.memory.interrupts import Monitor

_MOST_S = 10.0

Listener = Callable[[float | None], None]
"""Told that bytes shall stand still, for so many seconds at most, or by None that they shall come."""


@dataclass(frozen=True)
class PauseStats:
    """The counts of pauses so far."""

    pauses: int = 0
    """The number of times that reads were asked to wait."""
    held_reads: int = 0
    """Reads that waited for a pause or a limit, or ran when a pause began. None of many pauses: reads came at
    other times anyway."""
    broken: int = 0
    """Pauses and limits that ended early, for want of batches. Most: the store is too slow for pauses."""


class ReadPause:
    """Lets reads begin, or asks them to wait. Thread-safe.

    Args:
        low_water: with so many batches ready or fewer, nothing is held.
        most_s: seconds that a pause lasts at most.
        now: seconds on a clock that only goes forward.
    """

    def __init__(
        self, *, low_water: int = 2, most_s: float = _MOST_S, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._low_water, self._most_s, self._now = low_water, most_s, now
        self._changed = Monitor()  # guards everything below
        self._ready: Callable[[], int] = lambda: low_water
        self._until: float | None = None
        self._still_since: float | None = None
        self._stood_s = 0.0  # in pauses that are over
        self._listeners: set[Listener] = set()
        self._limit: int | None = None
        self._running = 0
        self._pauses = self._held_reads = self._broken = 0

    def watch(self, ready: Callable[[], int]) -> None:
        """Ask `ready` for the number of batches ready from now on; it must not block."""
        with self._changed:
            self._ready = ready

    def limit(self, reads: int | None) -> None:
        """Let so many reads run at a time from now on; None: any number."""
        with self._changed:
            self._limit = reads
            self._changed.notify_all()

    @property
    def is_limited(self) -> bool:
        """Return whether few reads may run, because they may have to stand still soon."""
        with self._changed:
            return self._limit is not None

    def begin(self) -> None:
        """Ask new reads to wait, and those that run to stand still, until `end`."""
        with self._changed:
            self._pauses += 1
            if self._ready() <= self._low_water:
                self._broken += 1
                return
            self._lift()
            self._held_reads += self._running
            self._until = self._now() + self._most_s
            for listener in self._listeners:
                listener(self._most_s)

    def end(self) -> None:
        """End the pause. Idempotent."""
        with self._changed:
            self._lift()
            self._changed.notify_all()

    def raise_priority(self) -> None:
        """The training code waits for a read: the present pause and limit are over."""
        with self._changed:
            if self._until is not None or self._limit is not None:
                self._lift()
                self._limit = None
                self._broken += 1
                self._changed.notify_all()

    def batches_taken(self) -> None:
        """Batches were taken: if few are left, the present pause is over."""
        with self._changed:
            if self._ready() <= self._low_water:
                self._give_way()

    @contextmanager
    def read(self) -> Iterator[None]:
        """A read, when it may begin."""
        with self._changed:
            if not self._may_begin():
                self._held_reads += 1
                while not self._may_begin():
                    self._changed.wait(None if self._until is None else self._until - self._now())
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                if self._limit is not None:
                    self._changed.notify_all()

    @contextmanager
    def follow(self, listener: Listener) -> Iterator[None]:
        """Tell `listener` of each pause and its end, in whichever thread brings it; it must not block."""
        with self._changed:
            if self._until is not None and (left := self._until - self._now()) > 0:
                listener(left)
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.discard(listener)

    def stand_still(self) -> None:
        """Something stands still for the present pause: time does, too, until its end."""
        with self._changed:
            now = self._now()
            if self._until is not None and self._still_since is None and now < self._until:
                self._still_since = now

    def running_s(self) -> float:
        """Seconds on the clock, but for those in which something stood still.

        What comes, or does not come, is measured by it.
        """
        with self._changed:
            now = self._now()
            return now - self._stood_s - self._standing_s(now)

    def stats(self) -> PauseStats:
        """Return the counts so far."""
        with self._changed:
            return PauseStats(self._pauses, self._held_reads, self._broken)

    def _may_begin(self) -> bool:
        if self._until is not None and (self._now() >= self._until or self._ready() <= self._low_water):
            self._give_way()
        return self._until is None and (self._limit is None or self._running < self._limit)

    def _give_way(self) -> None:
        """End the pause, not the limit: many reads at once would cost gradients more than few do."""
        if self._until is not None:
            self._lift()
            self._broken += 1
            self._changed.notify_all()

    def _standing_s(self, now: float) -> float:
        if self._still_since is None or self._until is None:
            return 0.0
        return min(now, self._until) - self._still_since

    def _lift(self) -> None:
        if self._until is not None:
            self._stood_s += self._standing_s(self._now())
            self._until = self._still_since = None
            for listener in self._listeners:
                listener(None)
