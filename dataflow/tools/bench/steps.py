"""Steps of an emulated accelerator, and its utilisation as MLPerf Storage defines it.

Accelerator utilisation (AU) = total compute time / total running time. The compute time of a step is given,
not measured, so what a timer overshoots counts against it, as does waiting for other ranks after a step. The
first step is left out of both (its I/O is the pipeline's start), and reported beside them. Rules: MLPerf
Storage v2.0, section 4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Steps:
    """When what happened in one rank. Seconds on one clock."""

    began_s: float
    """Before the first batch was asked for."""
    first_s: float
    """When the first step had ended."""
    ended_s: float
    """When the last step had ended."""
    count: int
    """Steps, the first included."""
    compute_s: float
    """The given time of one step's computation."""
    first_batch_s: float
    """Seconds to the first batch."""
    waited_s: float
    """Seconds in `next` after the first step. Near 0: loading keeps up. Near `running_s`: it does not."""
    computed_s: float
    """Measured seconds of computing after the first step: above the given ones by what timers overshoot."""
    synced_s: float
    """Seconds spent waiting for the other ranks after the first step."""

    @property
    def counted(self) -> int:
        """Steps that count: all but the first."""
        return self.count - 1

    @property
    def running_s(self) -> float:
        """Time that counts."""
        return self.ended_s - self.first_s

    @property
    def utilisation(self) -> float | None:
        """AU in [0, 1]; None if no step counts or nothing is computed."""
        if self.counted < 1 or self.compute_s <= 0 or self.running_s <= 0:
            return None
        return self.counted * self.compute_s / self.running_s


def run_steps(
    batches: Iterator[Any],
    *,
    compute_s: float,
    seconds: float,
    compute: Callable[[float], object],
    sync: Callable[[bool], bool],
    on_first: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Steps:
    """Take a batch, compute, agree with the other ranks; until a rank has done so for long enough.

    Args:
        batches: endless, or ends in every rank after the same number.
        compute_s: seconds a step computes.
        seconds: how long to go on after the first step; at least one step follows it.
        compute: takes so many seconds; not called for 0.
        sync: told whether this rank has enough; whether any has. Waits for all ranks.
        on_first: called when the first step has ended.
        clock: seconds on a clock that only goes forward.

    Raises:
        ValueError: there was no batch.
    """
    began = now = clock()
    first = first_batch = waited = computed = synced = 0.0
    count = 0
    for _ in batches:
        got, asked = clock(), now
        if compute_s > 0:
            compute(compute_s)
        done = clock()
        # The batch is dropped here, before the next one is asked for, as a training step drops it.
        enough = sync(count > 0 and done - first >= seconds)
        now = clock()
        count += 1
        if count == 1:
            first, first_batch = now, got - began
            on_first()
            continue
        waited, computed, synced = waited + got - asked, computed + done - got, synced + now - done
        if enough:
            break
    if not count:
        raise ValueError("the dataset gives this rank no batch")
    return Steps(began, first, now, count, compute_s, first_batch, waited, computed, synced)
