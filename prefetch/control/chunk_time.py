"""Decide how many batches a builder is given at a time, from how long the last ones took.

To hand out a chunk costs some Python, so batches that are made quickly come many at a time. A chunk is one
builder's: of batches that take long, few must come at a time, or most builders have none while the consumer
waits for the first, and then gets all at once. No clock, thread or lock inside: the engine serialises the
calls.
"""

from __future__ import annotations

from collections import deque

from prefetch.control.depth import Decision

CHUNK_S = 0.03
"""Seconds of building a chunk, about. A choice: long beside handing one out, short beside a training step."""
_REMEMBERED = 8
"""Parts of chunks that the mean is of: the first ones, which import and connect, are soon forgotten."""


class ChunkTime:
    """The batches of a chunk, as many as are built in `chunk_s` seconds. For one engine; not thread-safe."""

    def __init__(self, chunk_s: float = CHUNK_S) -> None:
        self._chunk_s = chunk_s
        self._built: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.decision = Decision(1, "nothing is built yet")

    def observe(self, num_batches: int, build_s: float) -> None:
        """Note that one builder has built so many batches, in so many seconds."""
        self._built.append((num_batches, build_s))
        batches, seconds = map(sum, zip(*self._built, strict=True))
        most = max(1, round(batches * self._chunk_s / max(seconds, 1e-9)))
        self.decision = Decision(
            most, f"{self._chunk_s:g} s of building, at {seconds / batches:.2g} s a batch"
        )
