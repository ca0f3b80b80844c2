"""Arithmetic of accumulation windows: what each rank runs, what is summed, when it is over.

A window is up to `accumulate` microbatches a rank, followed by one optimizer step. Each rank reports how
many microbatches it has for the next window and the sum of each weight over them; from these reports, the
same on all ranks, `plan_window` decides the same on all ranks. Invariants: every rank ends the same windows;
each microbatch that is run counts once; over all of them, scale * weight sums to the number of ranks, which
the mean over ranks divides out again. So a window's gradient is that of one large batch, whatever its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dataflow.grad.adapt.merged import Join

Uneven = Literal["pad", "min", "error"]
Partial = Literal["keep", "drop"]

MICROBATCHES = "microbatches"
"""The weight that every window has: 1 a microbatch."""


class UnevenRanksError(ValueError):
    """Ranks have different numbers of microbatches, and uneven="error" (or the model) does not allow it.

    Attributes:
        counts: microbatches of each rank in the window.
        cure: what to do.
    """

    def __init__(self, counts: tuple[int, ...], cure: str) -> None:
        super().__init__(counts, cure)
        self.counts, self.cure = counts, cure

    def __str__(self) -> str:
        each = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(self.counts))
        return f"ranks have different numbers of microbatches in this window: {each}; {self.cure}"


@dataclass(frozen=True)
class WindowPlan:
    """One window, the same value on every rank."""

    counts: tuple[int, ...]
    """Microbatches that each rank runs and that count."""
    forwards: tuple[int, ...]
    """Forward passes of each rank: its microbatches, then replays with weight zero. All 0: no window."""
    left_out: tuple[int, ...]
    """Microbatches of each rank that are not run."""
    last: bool
    """No window of this epoch follows."""

    @property
    def num_microbatches(self) -> int:
        """Over all ranks."""
        return sum(self.counts)

    @property
    def empty(self) -> bool:
        """Nothing is run."""
        return not any(self.forwards)


def plan_window(
    counts: Sequence[int],
    *,
    accumulate: int,
    uneven: Uneven = "pad",
    partial: Partial = "keep",
    equal_forwards: bool = False,
) -> WindowPlan:
    """Decide on a window from the microbatches that each rank has for it.

    Args:
        counts: of each rank, in [0, accumulate]; less than `accumulate` only where a rank's data ends.
        accumulate: microbatches of a full window.
        uneven: what happens where counts differ. "pad": ranks that lack a part replay a batch with weight
            zero; "min": all run what the shortest has, and the epoch ends; "error": `UnevenRanksError`.
        partial: "drop" leaves out a window that is full on no rank.
        equal_forwards: the model's forward pass is collective, so replays fill up to the longest rank;
            otherwise a rank replays only to take part in the reduction, once if it has nothing.
    """
    last = min(counts) < accumulate if uneven == "min" else max(counts) < accumulate
    if uneven == "error" and len(set(counts)) > 1:
        raise UnevenRanksError(
            tuple(counts), 'use uneven="pad" or uneven="min", or give each rank as much data'
        )
    run = [min(counts)] * len(counts) if uneven == "min" else list(counts)
    if partial == "drop" and max(run) < accumulate:
        run = [0] * len(counts)
    longest = max(run)
    fill = longest if equal_forwards else min(1, longest)
    forwards = tuple(max(count, fill) for count in run)
    left_out = tuple(had - does for had, does in zip(counts, run, strict=True))
    return WindowPlan(tuple(run), forwards, left_out, last)


def scales(totals: Mapping[str, float], world_size: int) -> dict[str, float]:
    """What a sum of losses is multiplied with: world size / total, since ranks' gradients are averaged.

    A total of zero gives 0: then no sample of the window has weight, and a sum over none is zero anyway.
    Raises `ValueError` for a total so small that its reciprocal is not finite, on all ranks alike.
    """
    found = {name: world_size / total if total else 0.0 for name, total in totals.items()}
    for name, scale in found.items():
        if scale == math.inf:
            raise ValueError(
                f"the weights {name!r} of a window add up to {totals[name]}: too little to divide by"
            )
    return found


def summed(weights: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The weights of several microbatches, or ranks, added up; exactly rounded, so in any order the same."""
    names = weights[0] if weights else {}
    return {name: math.fsum(each[name] for each in weights) for name in names}


def checked_weight(name: str, value: object) -> float:
    """A weight as a finite number >= 0, or `ValueError`."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        number = float(value)  # type: ignore[arg-type]  # a 0-dimensional tensor is a number too
    except (TypeError, ValueError) as error:
        raise ValueError(f"weight {name!r} of a batch must be a number, got {value!r}") from error
    if not 0 <= number < math.inf:
        raise ValueError(f"weight {name!r} of a batch must be finite and >= 0, got {number}")
    return number


def checked_choices(uneven: str, partial: str) -> None:
    """`ValueError` unless these are among the known values."""
    for name, value, allowed in (("uneven", uneven, Uneven), ("partial", partial, Partial)):
        if value not in get_args(allowed):
            raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, got {value!r}")


def accumulate_for(global_batch: int, *, batch_size: int, world_size: int) -> int:
    """Microbatches a rank and window that make `global_batch` samples a step.

    Raises `ValueError` where they do not divide.
    """
    at_once = batch_size * world_size
    if global_batch < 1 or global_batch % at_once:
        near = max(1, global_batch // at_once) * at_once
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of batch_size * ranks = {batch_size} * "
            f"{world_size} = {at_once}; take {near}, or another batch_size"
        )
    return global_batch // at_once


# ---- windows of merged microbatches ---------------------------------------------------------------------


def merged_plan(plan: WindowPlan, at_once: int) -> WindowPlan:
    """The same window in passes of `at_once` microbatches; the last of a rank may have fewer."""
    counts, forwards = (tuple(-(-n // at_once) for n in each) for each in (plan.counts, plan.forwards))
    return replace(plan, counts=counts, forwards=forwards)


def merged(batches: Sequence[Any], count: int, at_once: int, join: Join) -> list[Any]:
    """The first `count` batches, `at_once` of them joined; a single one is left as it is."""
    groups = [list(batches[at : min(at + at_once, count)]) for at in range(0, count, at_once)]
    return [join(group) if len(group) > 1 else group[0] for group in groups]
