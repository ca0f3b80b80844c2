"""Find the items of steps that are to be passed over: what `skip_steps` names, as a plan and states have it.

A step is a global batch, counted since the training began. The steps to come are counted through whole
epochs, from where the run is; what they hold is kept as ranges of positions, and so is the same for any
number of ranks from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataflow.explain.run import stream_of
from dataflow.mixture import Mixture
from dataflow.planning.plan import StreamPlan
from dataflow.topology_exchange import check_ranks_agree
from sharding.lengths.unit_plan import UNKNOWN
from sharding.plan.batch_plan import BatchPlan
from sharding.plan.history import MOST_RANGES, PassedRange, StepHistory, StepRange
from sharding.plan.passing import PassingBatchPlan, checked_steps, passing

if TYPE_CHECKING:
    from dataflow.loader import DataLoader


def skip_steps(loader: DataLoader[Any, Any], steps: object) -> None:
    """See `DataLoader.skip_steps`, which says what is raised."""
    stream = stream_of(loader)
    _ = stream.topology  # this rank, and what others know: before anything that depends on them
    epoch, position, history = stream.epoch, stream.position, stream.taken[1]
    plan, failure = None, ValueError()
    try:
        pairs = checked_steps(steps)
        if history is not None and pairs and pairs[0][0] < history.num_steps:
            raise ValueError(
                f"step {pairs[0][0]:,} was taken already: the next one is {history.num_steps:,}. Load a "
                "state of before it, and call skip_steps then"
            )
        plan = with_steps(stream.plan_now(epoch, position), pairs, history, epoch, position)
    except ValueError as error:
        failure = error  # told once the others know: they wait for this rank
    said = str(failure) if plan is None else f"{steps} at epoch {epoch}, position {position}"
    check_ranks_agree("skip_steps", "steps", said, stream.settings.timeout_s)
    if plan is None:
        raise failure
    stream.go_on_with(plan)


def with_steps(
    plan: StreamPlan, steps: tuple[StepRange, ...], history: StepHistory | None, epoch: int, position: int
) -> StreamPlan:
    """The plan that also passes over some steps, as far as it does not yet.

    Args:
        plan: with the ranges that are kept.
        steps: which ones.
        history: the steps that were taken; None: not known.
        epoch: in which the next one is.
        position: at which it begins.

    Raises `ValueError` where it is not known which items they are, or nothing of an epoch would be left.
    """
    steps = checked_steps(steps)
    pairs = {(piece.first_step, piece.end_step) for piece in plan.passed}
    if not (fresh := [pair for pair in steps if pair not in pairs]):
        return plan
    if history is None:
        raise ValueError(
            "the state that was loaded is of an older release and does not tell how many steps were taken "
            "before it, so nobody knows which samples skip_steps means; leave it out"
        )
    now = history.num_steps
    for first, end in fresh:
        if first < now:
            warnings.warn(
                f"steps {first:,} to {min(end, now) - 1:,} of skip_steps lie before step {now:,}, at which "
                "the run goes on, and were not passed over by it",
                stacklevel=5,
            )
    pieces = [piece for pair in fresh if pair[1] > now for piece in _ranges(plan, pair, now, epoch, position)]
    for number in {piece.epoch for piece in pieces if (piece.epoch, position) > (epoch, 0)}:
        ranges = [piece for piece in (*plan.passed, *pieces) if piece.epoch == number]
        if not passing(_dealt(plan, number, 0), ranges).num_global_batches:
            raise ValueError(
                f"skip_steps leaves nothing of epoch {number}: call set_epoch({number + 1}) there"
            )
    passed = sorted((*plan.passed, *pieces))
    over = [piece for piece in passed if piece.epoch < epoch]
    passed = passed[min(len(over), max(0, len(passed) - MOST_RANGES)) :]  # the oldest go
    if len(passed) > MOST_RANGES:
        raise ValueError(
            f"skip_steps: a state keeps at most {MOST_RANGES} ranges of epochs, got {len(passed)}"
        )
    return replace(plan, passed=tuple(passed))


def _ranges(plan: StreamPlan, pair: StepRange, now: int, epoch: int, position: int) -> Iterator[PassedRange]:
    """Yield the items of some steps, epoch after epoch, from where step `now` begins."""
    first, end = max(pair[0], now), pair[1]
    are_alike = plan.planner is None and not isinstance(plan.dataset, Mixture)
    count = num_empty = 0
    while now < end:
        dealt = _dealt(plan, epoch, position)
        num, size = dealt.num_steps_global, dealt.global_batch_size
        if first < now + num:
            begin, stop = (position + (step - now) * size for step in (max(first, now), min(end, now + num)))
            yield PassedRange(epoch, begin, min(stop, dealt.num_items), *pair)
            count += 1
        num_empty = num_empty + 1 if num == 0 else 0
        if num_empty > 1 or count > MOST_RANGES:
            raise ValueError(f"steps {pair[0]:,} to {pair[1] - 1:,} of skip_steps are too many epochs")
        more = (first - now) // num - 1 if are_alike and num and not position and first > now + num else 0
        now, epoch, position = now + num * (1 + more), epoch + 1 + more, 0


def _dealt(plan: StreamPlan, epoch: int, position: int) -> BatchPlan:
    """The global batches of an epoch from a position on, with nothing left out."""
    if plan.planner is None:
        return _dealt_of(plan, plan.num_samples(epoch), position)
    epoch_plan = plan.epoch(epoch, position)
    if epoch_plan.num_global_batches == UNKNOWN:
        warnings.warn(
            f"lengths are measured as samples are made, so nobody knows yet how long epoch {epoch} is: "
            "skip_steps passes over what it names in this epoch alone",
            stacklevel=6,
        )
        return _dealt_of(plan, UNKNOWN, position)
    dealt = epoch_plan.batch_plan
    return dealt.inner if isinstance(dealt, PassingBatchPlan) else dealt


def _dealt_of(plan: StreamPlan, num_items: int, position: int) -> BatchPlan:
    return BatchPlan(
        num_items=num_items,
        batch_size=plan.batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        tail=plan.tail,
        start=position,
    )
