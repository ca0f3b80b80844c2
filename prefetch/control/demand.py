"""What the training code uses of a store, in bytes a second, once it does not wait for data.

While it waits, what it uses says only what it gets. After some batches in a row without a wait it is the pace
of the training, which `Inflight.demand` takes for a cap. No clock, thread or lock: times are arguments, and
the caller serialises the calls. O(64) a call.
"""

from __future__ import annotations

from collections import deque

CALM = 20
"""Batches, or groups of them, in a row without a wait that make the pace believable."""
_REMEMBERED = 64
_PAUSE_S = 1.0
"""A longer gap is a pause, such as a checkpoint, and counts as this long: too high a pace does no harm."""


class Demand:
    """The pace of one consumer. Not thread-safe."""

    def __init__(self) -> None:
        self._calm = 0
        self._taken: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # (bytes, seconds)

    def took(self, nbytes: int, gap_s: float) -> float | None:
        """The pace in bytes/s after something was taken without a wait; None: not known yet.

        Args:
            nbytes: what the store had to give for it.
            gap_s: how long the consumer worked on what it had taken before.
        """
        self._calm += 1
        self._taken.append((nbytes, min(gap_s, _PAUSE_S)))
        if self._calm < CALM:
            return None
        return sum(n for n, _ in self._taken) / max(sum(s for _, s in self._taken), 1e-6)

    def waited(self) -> None:
        """The consumer waits for the store."""
        self._calm = 0
