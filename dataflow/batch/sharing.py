"""The samples of a batch, made by one builder, or by several side by side.

Builders that each had a batch of their own would end together, if their samples take alike: the consumer
would wait as long as a batch takes, and then get one of each builder. So where a batch takes long, whoever
begins it makes a few samples, and leaves the others to whoever is free. The most urgent batch comes first, so
nearly all builders are at the same one, and batches are finished one after another. Samples come in their
order, whoever made them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from dataflow.batch.delivered import Delivered
from prefetch.work import PartialChunk, Task

T = TypeVar("T")
PART_S = 0.005
"""Seconds of transforming that are a task of their own; with 0.01, gaps were longer and rates the same."""
COMPUTED_S = 2e-4
"""Seconds that a part computes at least where builders do; with 5e-4, gaps were longer, rates the same."""
_BUSY = 0.7
"""The part of a core that builders take together where they compute, and do not wait."""
Outcome = tuple[Any, str, BaseException | None]
"""The result of a transform, why that is none, and what it raised."""
Finishing = Generator[PartialChunk[Delivered], None, T]
"""Makes something of a batch, and gives parts of that which other builders may run."""


def building_s(wall_s: float, thread_s: float, num_builders: int) -> float:
    """Return how long building took, by the time that passed and the processor time of the thread.

    Of threads that compute, most wait for the interpreter lock: that time is the others'. What the training
    thread takes does not count: it may spin while it waits for a device.
    """
    return thread_s if num_builders * thread_s >= _BUSY * wall_s else wall_s


def part_size(num_made: int, made_s: float, thread_s: float, num_left: int, num_builders: int) -> int:
    """Samples of a part, once so many were made in so many seconds; 0: what is left is not worth parts."""
    if not num_made or made_s < PART_S:
        return 0
    size = num_made * PART_S / made_s
    if building_s(made_s, thread_s, num_builders) < made_s:  # they compute
        size = max(size, num_made * COMPUTED_S / thread_s)
    return max(1, int(size)) if num_left >= 2 * size else 0


class SampleOutcomes:
    """The outcomes of a batch's samples. Parts run in any threads, all else in one.

    Args:
        make: the outcome of a sample; does not raise.
        num_samples: of the batch.
        is_shared: whether others may make some.
        closing: set when nobody wants them any more.
        now: a clock, in seconds.
        num_builders: threads that build.
    """

    def __init__(
        self,
        make: Callable[[int], Outcome],
        num_samples: int,
        *,
        is_shared: bool,
        closing: threading.Event,
        now: Callable[[], float],
        num_builders: int = 1,
    ) -> None:
        self._num_builders, self._began_thread_s = num_builders, time.thread_time() if is_shared else 0.0
        self._make, self._num_samples, self._closing, self._now = make, num_samples, closing, now
        self.may_share, self._began_s = is_shared, now()
        self._outcomes: dict[int, Outcome] = {}
        self._seconds: list[float] = []

    def parts_from(self, at: int) -> list[Task]:
        """Return tasks that make all from a sample on, once those before it took long; none until then."""
        rows = range(at, self._num_samples)
        if (made_s := self._now() - self._began_s) < PART_S:
            return []
        thread_s = time.thread_time() - self._began_thread_s
        if not (size := part_size(at, made_s, thread_s, len(rows), self._num_builders)):
            return []
        self.may_share = False
        return [partial(self._run, rows[first : first + size]) for first in range(0, len(rows), size)]

    def take(self, at: int) -> Outcome:
        """Return the outcome of a sample, which nobody keeps here."""
        return self._outcomes.pop(at) if at in self._outcomes else self._make(at)

    @property
    def shared_s(self) -> float:
        """Seconds that the parts took."""
        return sum(self._seconds)

    def _run(self, rows: range) -> None:
        began_s = self._now()
        for row in rows:
            if self._closing.is_set():
                break
            self._outcomes[row] = self._make(row)
        self._seconds.append(self._now() - began_s)


def finished(finishing: Finishing[T]) -> T:
    """Return what is made, where nothing is shared."""
    try:
        while True:
            next(finishing)
    except StopIteration as end:
        result: T = end.value
        return result
