"""Optimizer steps of gradient accumulation: the steps of the loader that each is made of.

`GradSchedule` runs one epoch of its loader at a time, in windows of `accumulate` batches a rank; the last one
of an epoch has what is left. What was passed over is no batch of a window. A loader's state, as a schedule's
has it, stands between two windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dataflow.explain.run import NO_HISTORY, numbers_of
from sharding.plan.history import StepPlace, StepRun

if TYPE_CHECKING:
    from dataflow.explain.run import ExplainedRun, Steps
    from sharding.plan.batch_plan import BatchPlan

_SHORT = (
    "optimizer steps are counted as GradSchedule(partial='keep', uneven='pad') takes them: the last one of "
    "an epoch has the batches that are left"
)
_AHEAD = 2
"""Windows of which batches may have been taken when a loop was left early: that it was in, and the next."""


class NumberedPlace(NamedTuple):
    """The place of a step of the loader, and the number under which it is told."""

    number: int
    """The optimizer step, `StepInfo.window` of a schedule; without accumulation the loader's step."""
    microbatch: int | None
    """The number of the optimizer step's microbatch, from 0 on; None: without accumulation."""
    place: StepPlace

    @property
    def name(self) -> str:
        """Its name, as "step 7, microbatch 1"."""
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return "the step" if self.number < 0 else f"step {self.number:,}{microbatch}"


class _Windows(NamedTuple):
    """The windows of one loop over an epoch, or of a part of one between restarts."""

    first: int
    """The number of the first."""
    num: int
    part: StepRun
    batches: BatchPlan
    """The batches of the part, and of what would have come after it."""
    taken: int
    """The batches that windows consist of: those that came, and were not passed over."""


def numbered_places(
    run: ExplainedRun, steps: Steps, accumulate: int = 1, notes: dict[str, None] | None = None
) -> list[NumberedPlace]:
    """The places of steps, or of the microbatches of optimizer steps, in the order given.

    Args:
        run: what was trained.
        steps: numbers of the loader's steps; with `accumulate` above 1 of optimizer steps.
        accumulate: microbatches a rank of an optimizer step, as `GradSchedule` has it.
        notes: gets what has to be said of the numbers.

    Raises `IndexError` for steps that are not known, `ValueError` where they cannot be told apart.
    """
    if accumulate == 1:
        return [NumberedPlace(place.step, None, place) for place in run.places(steps)]
    numbers, loops = numbers_of(steps), list[_Windows]()
    for windows in _windows(run, accumulate):
        loops.append(windows)
        if windows.first + windows.num > max(numbers):
            break
    count = loops[-1].first + loops[-1].num if loops else 0
    if max(numbers) >= count:
        last = f"steps 0 to {count - 1:,} are" if count else "none is"
        raise IndexError(
            f"optimizer step {max(numbers):,} is not known: with accumulate={accumulate}, {last} complete"
        )
    if notes is not None:
        notes |= dict.fromkeys(_notes_on(loops, accumulate))
    return [place for number in numbers for place in _places(loops, number, accumulate)]


def num_optimizer_steps(run: ExplainedRun, accumulate: int) -> int:
    """The number of complete optimizer steps. Raises as `numbered_places`."""
    count = 0
    for windows in _windows(run, accumulate):
        count = windows.first + windows.num
    return count


def _windows(run: ExplainedRun, accumulate: int) -> Iterator[_Windows]:
    """Yield the windows of all loops, as far as they can be counted."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    if run.history is None:
        raise ValueError(NO_HISTORY)
    if run.history.known_from:
        raise ValueError(
            "optimizer steps are counted from the first one on, and this state knows the loader's steps from "
            f"{run.history.known_from:,} on: ask for these, without accumulate="
        )
    first, parts = 0, [*_parts(run.history.stretches)]
    for part, following in pairwise([*parts, None]):
        assert part is not None
        place = part.at(part.first_step)
        order = run.order_at(place._replace(global_batch=part.num_steps * part.global_batch))
        batches = run.plan.dealt(
            order, batch_size=part.global_batch // part.world_size, rank=0, world_size=part.world_size,
            tail=part.tail, start=part.position,
        ).batch_plan  # fmt: skip
        taken = bisect_right(range(1, part.num_steps + 1), part.num_steps, key=batches.steps_after)
        count, rest = divmod(taken, accumulate)
        end = part.position + part.num_steps * part.global_batch
        if part.num_steps >= batches.num_steps_global:  # the epoch was run to its end
            count += rest > 0
        elif following is not None and (following.epoch, following.position) == (part.epoch, end):
            if rest:
                raise ValueError(
                    f"the training went on in the middle of a window of accumulate={accumulate} at step "
                    f"{following.first_step:,}: it had another accumulate=, or none"
                )
        elif following is not None:
            yield _Windows(first, max(0, count - _AHEAD), part, batches, taken)
            raise ValueError(
                f"a loop was left early before step {following.first_step:,}, with batches taken for windows "
                "that may not have ended: optimizer steps cannot be counted from there on. Ask for the "
                "loader's steps, without accumulate="
            )
        yield _Windows(first, count, part, batches, taken)
        first += count


def _parts(stretches: Sequence[StepRun]) -> Iterator[StepRun]:
    """Yield the stretches epoch by epoch."""
    for stretch in stretches:
        for number in range(stretch.num_epochs):
            first = stretch.first_step + number * stretch.num_steps
            yield stretch._replace(first_step=first, epoch=stretch.epoch + number, num_epochs=1)


def _places(loops: Sequence[_Windows], number: int, accumulate: int) -> Iterator[NumberedPlace]:
    """Yield the places of the microbatches of one optimizer step."""
    windows = loops[bisect_right(loops, number, key=lambda loop: loop.first) - 1]
    begin = (number - windows.first) * accumulate
    for microbatch, batch in enumerate(range(begin, min(begin + accumulate, windows.taken))):
        step = windows.part.first_step + windows.batches.steps_after(batch + 1) - 1
        yield NumberedPlace(number, microbatch, windows.part.at(step))


def _notes_on(loops: Sequence[_Windows], accumulate: int) -> Iterator[str]:
    if any(windows.num * accumulate > windows.taken for windows in loops):
        yield _SHORT
    for earlier, later in pairwise(windows.part for windows in loops):
        if earlier[3:5] != later[3:5]:
            yield (
                f"from the loader's step {later.first_step:,} on a batch is {later.global_batch:,} on "
                f"{later.world_size:,} ranks, and {earlier.global_batch:,} on {earlier.world_size:,} before: "
                f"accumulate={accumulate} is taken to hold for both"
            )
