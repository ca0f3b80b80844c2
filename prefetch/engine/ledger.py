"""Every byte between socket and training step holds a credit from one budget.

Invariant: the bytes *reserved* in states other than IN_USE never exceed `limit_bytes`. The bound is
structural: a reservation that would break it is refused, whatever any estimate says. What nobody knows
before it is made (what a user's function returns) is *charged* when it is there, limit or not; as much as
the last of its kind took is reserved before. Bytes IN_USE belong to batches that the user keeps; they slow
admission (they count for ordinary reservations) but cannot stop it: the head-of-order request is admitted
without counting them, so keeping every batch costs memory, never a deadlock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """The purpose of a byte that is held."""

    WINDOW = "window"
    """Block bytes requested, in flight, or staged until every batch that needs them is built."""
    BUILDING = "building"
    """Output slots of batches being decoded and gathered."""
    READY = "ready"
    """Finished batches that the consumer has not taken."""
    IN_USE = "in use"
    """Batches that the consumer holds references to."""

    __hash__ = object.__hash__  # each is itself alone; an Enum's own is a call of Python, four times a batch


@dataclass(frozen=True, kw_only=True)
class MemoryHeld:
    """Bytes held, by state, at one instant."""

    limit_bytes: int = 0
    """The `memory_limit`. `window + building + ready` exceeds it only where a function of yours makes the
    batches, or they hold Python objects: by what the first batch of each builder takes, later by what one
    takes more than those before it, or where a single batch is larger than the limit."""
    window_bytes: int = 0
    """Blocks in flight and staged, those of local shards that are only mapped included (`mapped_bytes`). Near
    the limit: shuffle windows are large for the budget."""
    building_bytes: int = 0
    """The bytes of batches under construction: their slots, and what functions of yours will make by what
    they made before. 0: builders are idle."""
    ready_bytes: int = 0
    """Finished batches waiting. 0 while training: the loader is the bottleneck."""
    in_use_bytes: int = 0
    """Batches the training code still references; of what functions of yours made, the last ones delivered.
    Grows without end: the code keeps batches."""
    peak_bytes: int = 0
    """Largest sum of all four states so far, those in use included."""


class Ledger:
    """The account of all credits. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"memory_limit must be > 0 bytes, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards these
        self._held = dict.fromkeys(State, 0)
        self._total = 0
        self._peak = 0
        # Credits of what is in use come back from weakref callbacks, which may run inside any critical
        # section of this very thread: they only append here (atomic), and the next reservation reconciles
        # them.
        self._returned: deque[int] = deque()
        self._sources: list[Callable[[], None]] = []

    def reconcile_first(self, source: Callable[[], None]) -> None:
        """Call `source` before the account is looked at: it gives back what has come back to it."""
        self._sources.append(source)

    def reserve(self, state: State, nbytes: int, *, keep_bytes: int = 0, head_of_order: bool = False) -> bool:
        """Take `nbytes` credits for `state`, leaving `keep_bytes` free; False when they are not there.

        `head_of_order` requests do not count bytes in use and keep nothing free.
        """
        with self._lock:
            self._reconcile()
            held = self._total
            if head_of_order:
                held, keep_bytes = held - max(0, self._held[State.IN_USE]), 0
            if held + nbytes + keep_bytes > self.limit_bytes:
                return False
            self._add(state, nbytes)
            return True

    def charge(self, state: State, nbytes: int) -> None:
        """Take credits for what is there already, whether or not they are."""
        with self._lock:
            self._reconcile()
            self._add(state, nbytes)

    def move(self, source: State, target: State, nbytes: int) -> None:
        """Credits change state; the total stays."""
        with self._lock:
            self._held[source] -= nbytes
            self._held[target] += nbytes

    def release(self, state: State, nbytes: int) -> None:
        """Give credits back."""
        with self._lock:
            self._held[state] -= nbytes
            self._total -= nbytes
            assert self._held[state] >= 0, (state, self._held)

    def resize(self, limit_bytes: int) -> bool:
        """Change the limit; False, and nothing is changed, if more is held beside what is in use."""
        with self._lock:
            self._reconcile()
            if limit_bytes <= 0 or self._total - max(0, self._held[State.IN_USE]) > limit_bytes:
                return False
            self.limit_bytes = limit_bytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Credits of what was in use come back. Reentrant: safe in weakref callbacks and `__del__`."""
        self._returned.append(nbytes)

    def snapshot(self) -> MemoryHeld:
        """Return the account now."""
        with self._lock:
            self._reconcile()
            held = self._held
            return MemoryHeld(
                limit_bytes=self.limit_bytes,
                window_bytes=held[State.WINDOW],
                building_bytes=held[State.BUILDING],
                ready_bytes=max(0, held[State.READY] + min(0, held[State.IN_USE])),
                in_use_bytes=max(0, held[State.IN_USE]),
                peak_bytes=self._peak,
            )

    def _add(self, state: State, nbytes: int) -> None:
        self._held[state] += nbytes
        self._total += nbytes
        if self._total > self._peak:
            self._peak = self._total

    def _reconcile(self) -> None:
        for source in self._sources:
            source()
        while self._returned:
            nbytes = self._returned.popleft()
            self._held[State.IN_USE] -= nbytes  # below 0 by what came back before it was delivered
            self._total -= nbytes
