"""The samples that the plan of a run has for its steps: what accounts are held against."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataflow.explain.dealt import rank_plan, whole_plan
from dataflow.explain.run import ExplainedRun
from sharding.lengths.unit_plan import UnitPlan
from sharding.lengths.units import Segments
from sharding.order.permutations import splitmix64, sum_key
from sharding.plan.history import StepPlace
from sharding.plan.plan import RankPlan
from sharding.spans import Ints

_SLICE = 1 << 19
"""Samples at a time."""


class PlannedItems(NamedTuple):
    """Samples of some steps of an epoch, or pieces of them; arrays are [n]."""

    epoch: int
    step: Ints
    number: Ints
    """The number of the sample in the dataset; no two sources of a mixture share one."""
    position: Ints
    pieces: Segments | None
    """The part of its sample that each has; None: all."""

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Return what each adds to the two sums of an account, uint64 [n, 2]."""
        parts = [self.number] if self.pieces is None else [self.number, self.pieces.begin, self.pieces.length]
        low = np.full(len(self.number), sum_key(self.epoch), np.uint64)
        for part in parts:
            low = splitmix64(low ^ part.astype(np.uint64))
        turned = low << np.uint64(32) | low >> np.uint64(32)
        return np.stack((low, turned * (turned >> np.uint64(32) | np.uint64(1))), axis=1)


def planned_items(run: ExplainedRun, begin: int, end: int) -> Iterator[PlannedItems]:
    """Yield what all ranks together were to get in steps [begin, end), some samples at a time.

    Raises as `ExplainedRun.order_at`, and `IndexError` for steps that are not known.
    """
    assert run.history is not None
    while begin < end:
        place = run.history.find(begin)
        stretch = next(span for span in run.history.stretches if span.first_step <= begin < span.end)
        left = stretch.num_steps - (begin - stretch.first_step) % stretch.num_steps
        num_steps = min(left, end - begin)
        yield from _of_epoch(run, place, num_steps)
        begin += num_steps


def _of_epoch(run: ExplainedRun, place: StepPlace, num_steps: int) -> Iterator[PlannedItems]:
    """The items of steps that follow one another in an epoch, from a place on."""
    order, plan = run.order_at(place), run.plan
    taken = 0
    if not plan.passed and (plan.planner is None or plan.planner.batching.rows_are_units):
        whole = whole_plan(plan, order, place)
        taken = min(num_steps, whole.num_batches)
        yield from _of_plan(run, whole, place, taken, 0)
    if taken == num_steps:
        return
    for rank in range(place.world_size):
        share = rank_plan(plan, order, place, rank)
        dealt = share.batch_plan
        within = range(dealt.num_batches + 1)
        last = bisect_right(within, num_steps, key=dealt.steps_after) - 1 if plan.passed else num_steps
        yield from _of_plan(run, share, place, min(last, share.num_batches), taken)


def _of_plan(
    run: ExplainedRun, plan: RankPlan, place: StepPlace, num_batches: int, first: int
) -> Iterator[PlannedItems]:
    """The items of a plan's batches [first, num_batches)."""
    each = max(1, _SLICE // max(1, plan.batch_plan.batch_size))
    for begin in range(first, num_batches, each):
        end, pieces = min(begin + each, num_batches), None
        if isinstance(plan, UnitPlan):
            batches = plan.batches(begin, end)
            pieces, sizes = batches.segments, batches.sizes
            positions = pieces.position
        else:
            positions, sizes = plan.positions(begin, end)
        steps = [plan.batch_plan.steps_after(number + 1) - 1 for number in range(begin, end)]
        step = place.step + np.repeat(np.array(steps, np.int64), sizes)
        numbers = run.plan.numbers(plan.order, positions)
        yield PlannedItems(plan.order.epoch, step, numbers, positions, pieces)
