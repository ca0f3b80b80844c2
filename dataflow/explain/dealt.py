"""The positions that each rank got in a step: the arithmetic of plans, for all ranks of a world."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataflow.planning.plan import StreamPlan
from sharding.lengths.unit_plan import UnitPlan
from sharding.order.epoch_order import EpochOrder
from sharding.plan.history import StepPlace
from sharding.plan.plan import RankPlan
from sharding.spans import Ints

WHOLE = -1
"""Stands for begin and length of a sample that comes whole."""


class DealtRows(NamedTuple):
    """The samples of a step, or pieces of them, rank after rank; arrays are [n]."""

    position: Ints
    """The position of the sample in the epoch."""
    rank: Ints
    row: Ints
    """The row of the rank's batch."""
    begin: Ints
    """First element of the sample that a piece takes, ..."""
    length: Ints
    """... and how many elements; `WHOLE` both: the sample comes whole."""
    is_repeat: NDArray[np.bool_]
    """True if the tail rule delivers it a second time."""


def dealt_rows(plan: StreamPlan, order: EpochOrder, place: StepPlace, rank: int | None = None) -> DealtRows:
    """Return what all ranks took in a step, or one of them.

    Raises `IndexError` for a rank that is not in the world, `ValueError` for a step that this order has not.
    """
    world_size = place.world_size
    if rank is not None and not 0 <= rank < world_size:
        raise IndexError(f"rank must be in [0, {world_size}) in step {place.step:,}, got {rank}")
    ranks = range(world_size) if rank is None else [rank]
    if plan.planner is None:
        rows = _whole_batch(plan, order, place)
        if rows is not None:
            return rows if rank is None else _taken(rows, rows.rank == rank)
    parts = [part for r in ranks if (part := _of_rank(plan, order, place, r)) is not None]
    if not parts:
        if has_step(plan, order, place):  # a rank has none of it, or it was passed over
            return DealtRows._make(np.empty(0, np.int64) for _ in DealtRows._fields)
        raise ValueError(
            f"step {place.step:,} is not in epoch {place.epoch}, which ends before position "
            f"{place.position:,}: the state is of other data, or position= is none of the training's"
        )
    return DealtRows._make(np.concatenate(column) for column in zip(*parts, strict=True))


def has_step(plan: StreamPlan, order: EpochOrder, place: StepPlace) -> bool:
    """Return whether a step is one of its epoch, also where it was passed over."""
    return rank_plan(plan, order, place, 0).batch_plan.num_steps_global > 0


def is_passed_over(plan: StreamPlan, order: EpochOrder, place: StepPlace) -> bool:
    """Return whether nothing is left of a step."""
    dealt = rank_plan(plan, order, place, 0).batch_plan
    return dealt.num_steps_global > 0 and (not dealt.num_global_batches or dealt.steps_after(1) > 1)


def _whole_batch(plan: StreamPlan, order: EpochOrder, place: StepPlace) -> DealtRows | None:
    """A complete global batch, whose ranks have the parts of one list; None: it is the incomplete one."""
    each = place.global_batch // place.world_size
    whole = whole_plan(plan, order, place)
    first_is_left = whole.num_batches and whole.batch_plan.steps_after(1) == 1
    if not first_is_left or whole.batch_plan.items(0, 1)[1][0] < place.global_batch:
        return None
    positions, _ = whole.positions(0, 1)
    rank, row = np.divmod(np.arange(place.global_batch), each)
    return DealtRows(positions, rank, row, *_whole(len(row)), np.zeros(len(row), bool))


def _of_rank(plan: StreamPlan, order: EpochOrder, place: StepPlace, rank: int) -> DealtRows | None:
    """Return what one rank took; None: nothing."""
    share = rank_plan(plan, order, place, rank)
    _check_known(share, place)
    if not share.num_batches or share.batch_plan.steps_after(1) > 1:  # the first that is left is a later one
        return None
    repeats = share.repeats(0, 1)
    if not isinstance(share, UnitPlan):
        positions, _ = share.positions(0, 1)
        row = np.arange(len(positions))
        return DealtRows(positions, np.full(len(row), rank), row, *_whole(len(row)), repeats)
    batch = share.batches(0, 1)
    segments = batch.segments
    row = np.repeat(np.arange(len(batch.segments_of_row)), batch.segments_of_row)
    repeated = np.repeat(repeats, batch.segments_of_row)
    if plan.planner is not None and not plan.planner.batching.rows_are_units:
        row = np.arange(len(segments))  # the unit is the batch
    ranks = np.full(len(row), rank)
    return DealtRows(segments.position, ranks, row, segments.begin, segments.length, repeated)


def rank_plan(plan: StreamPlan, order: EpochOrder, place: StepPlace, rank: int) -> RankPlan:
    """The plan of a rank that begins with a step."""
    return plan.dealt(
        order, batch_size=place.global_batch // place.world_size, rank=rank, world_size=place.world_size,
        tail=place.tail, start=place.position,
    )  # fmt: skip


def whole_plan(plan: StreamPlan, order: EpochOrder, place: StepPlace) -> RankPlan:
    """The plan of the complete global batches from a step on, as one rank would have them."""
    whole = plan.dealt(
        order, batch_size=place.global_batch, rank=0, world_size=1, tail="drop", start=place.position
    )
    _check_known(whole, place)
    return whole


def _check_known(plan: RankPlan, place: StepPlace) -> None:
    if place.position < plan.known_from:
        raise ValueError(
            f"step {place.step:,} is not known any more: weights were set more often than a state keeps, and "
            f"of epoch {place.epoch} it tells what comes from position {plan.known_from:,} on"
        )


def _whole(num: int) -> tuple[Ints, Ints]:
    return np.full(num, WHOLE), np.full(num, WHOLE)


def _taken(rows: DealtRows, which: NDArray[np.bool_]) -> DealtRows:
    return DealtRows._make(column[which] for column in rows)
