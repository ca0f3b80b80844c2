"""Shares of the time of training steps, and what a cure would bring: pure functions of windows.

A window takes as long as its critical rank, the one that has its own gradients last: the others wait for it.
Its time is split into data (waiting for the loader), straggler (how much longer it computes than the median
rank), compute (the rest of that), network (communication that nothing hid) and optimizer. Shares are sums
over windows, so that rare long stalls count. The gain of curing a part is what remains without it:
total / (total - part). Cures that only halve a part gain total / (total - part / 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from dataflow.telemetry.timing.records import StepTimes

Part = Literal["compute", "data", "network", "straggler", "optimizer"]
PARTS: tuple[Part, ...] = ("compute", "data", "network", "straggler", "optimizer")
Seconds = Mapping[Part, float]

WORTH = 1.05
"""A cure that gains less is no cure: runs differ by as much."""
_MOSTLY = 0.6
"""A rank that is critical in so many windows (and twice as many as by chance) is slow; otherwise ranks take
turns."""


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """The shares of the time of windows, and what bounds them."""

    bound: Part
    """The part that holds the steps up."""
    seconds: Seconds
    """Seconds of each part, summed over the windows, on the critical ranks."""
    gains: Mapping[Part, float]
    """Times faster that training would become if this alone were gone (at least 1); not for compute."""
    critical: int
    """Index of the rank that was critical most often."""
    critical_share: float
    """In how many of the windows, in (0, 1]."""

    @property
    def total_s(self) -> float:
        """The seconds of all windows."""
        return sum(self.seconds.values())

    def share(self, part: Part) -> float:
        """Return the share of the time, in [0, 1]."""
        return self.seconds[part] / self.total_s if self.total_s else 0.0

    def halved(self, part: Part) -> float:
        """Times faster with half of this part."""
        return self.total_s / (self.total_s - self.seconds[part] / 2) if self.total_s else 1.0


def same_steps(ranks: Sequence[Sequence[StepTimes]]) -> list[tuple[StepTimes, ...]]:
    """Windows that all ranks have, each as a row of one entry a rank.

    Without the first, which makes what later ones reuse, and without those whose communication was not
    measured, unless nothing else is there.
    """
    by_number = [{step.window: step for step in windows} for windows in ranks]
    common = sorted(set.intersection(*(set(each) for each in by_number)))
    rows = [tuple(each[number] for each in by_number) for number in common]
    later = rows[1:] or rows
    return [row for row in later if _is_measured(row)] or later


def shares_of(rows: Sequence[Sequence[StepTimes]]) -> StepShares:
    """Return what holds the ranks' common windows up. `ValueError` without any."""
    if not rows:
        raise ValueError("no window has ended on all ranks yet: there is nothing to report")
    seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    turns: Counter[int] = Counter()
    for row in rows:
        critical = _critical(row)
        turns[critical] += 1
        for part, value in _critical_parts(row, critical).items():
            seconds[part] += value
    total = sum(seconds.values())
    # Computing is what remains: nobody gains by its vanishing, and it is the bound where no cure is worth it.
    gains: dict[Part, float] = {part: _gain(total, seconds[part]) for part in PARTS if part != "compute"}
    bound: Part = max(gains, key=lambda part: gains[part])
    rank, times = turns.most_common(1)[0]
    return StepShares(
        bound=bound if gains[bound] >= WORTH else "compute",
        seconds=seconds,
        gains=gains,
        critical=rank,
        critical_share=times / len(rows),
    )


def rank_parts(rows: Sequence[Sequence[StepTimes]], rank: int) -> dict[Part, float]:
    """Seconds of one rank; its straggler part is its waiting for the slowest rank."""
    seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        step = row[rank]
        communicating = (step.exposed_s or 0.0) + step.peers_s
        waiting = min(communicating, max(other.own_s for other in row) - step.own_s)
        seconds["compute"] += step.compute_s
        seconds["data"] += step.data_s
        seconds["network"] += communicating - waiting
        seconds["straggler"] += waiting
        seconds["optimizer"] += step.optimizer_s
    return seconds


def takes_turns(shares: StepShares, num_ranks: int) -> bool:
    """Return whether no single rank is the slow one."""
    return shares.critical_share < max(_MOSTLY, min(0.9, 2 / num_ranks))


def _critical(row: Sequence[StepTimes]) -> int:
    """Return who has its gradients last, or waited longest for data if waiting for others is in computing."""
    measured = _is_measured(row)
    return max(range(len(row)), key=lambda rank: row[rank].own_s if measured else row[rank].data_s)


def _is_measured(row: Sequence[StepTimes]) -> bool:
    """Return whether waiting for others is told apart from computing."""
    return all(step.exposed_s is not None for step in row)


def _critical_parts(row: Sequence[StepTimes], critical: int) -> dict[Part, float]:
    step = row[critical]
    slower = (
        max(0.0, step.compute_s - median_low([each.compute_s for each in row])) if _is_measured(row) else 0.0
    )
    return {
        "compute": step.compute_s - slower,
        "data": step.data_s,
        "network": (step.exposed_s or 0.0) + step.peers_s,
        "straggler": slower,
        "optimizer": step.optimizer_s,
    }


def _gain(total: float, part: float) -> float:
    return total / (total - part) if part < total else (float("inf") if part else 1.0)
