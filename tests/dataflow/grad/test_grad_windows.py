"""Arithmetic of windows, over any numbers of microbatches on any number of ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dataflow.grad.step import (
    MICROBATCHES,
    UnevenRanksError,
    accumulate_for,
    plan_step,
    scales,
    summed,
)

lengths = st.lists(st.integers(0, 20), min_size=1, max_size=5)
"""Batches that each rank has in an epoch."""
accumulates = st.integers(1, 6)


def epoch(held: list[int], accumulate: int, **settings: object) -> list[object]:
    """The windows of an epoch, as ranks find them: each tells what it has for the next one."""
    left, plans = list(held), []
    for _ in range(max(held) + 2):
        counts = [min(accumulate, has) for has in left]
        plan = plan_step(counts, accumulate=accumulate, **settings)  # type: ignore[arg-type]
        plans.append(plan)
        left = [has - count for has, count in zip(left, counts, strict=True)]
        if plan.empty or plan.last:
            return plans
    raise AssertionError("the epoch does not end")


@given(lengths, accumulates, st.booleans())
def test_each_microbatch_is_run_once_and_all_ranks_end_the_same_windows(
    held: list[int], accumulate: int, equal_forwards: bool
) -> None:
    plans = epoch(held, accumulate, equal_forwards=equal_forwards)
    run = [sum(plan.counts[rank] for plan in plans) for rank in range(len(held))]  # type: ignore[attr-defined]
    assert run == held
    for plan in plans:
        assert plan.left_out == (0,) * len(held)  # type: ignore[attr-defined]
        if not plan.empty:  # type: ignore[attr-defined]
            assert min(plan.forwards) >= 1  # type: ignore[attr-defined]  # each takes part in the reduction
            assert not equal_forwards or len(set(plan.forwards)) == 1  # type: ignore[attr-defined]
    ended = [plan for plan in plans if not plan.empty]  # type: ignore[attr-defined]
    assert len(ended) == math.ceil(max(held) / accumulate)


@given(lengths, accumulates)
def test_no_rank_replays_more_than_it_must(held: list[int], accumulate: int) -> None:
    for plan in epoch(held, accumulate):
        for count, forward in zip(plan.counts, plan.forwards, strict=True):  # type: ignore[attr-defined]
            assert forward == (count or (not plan.empty))  # type: ignore[attr-defined]


@given(lengths, accumulates)
def test_min_ends_with_the_shortest_rank_and_counts_what_it_leaves_out(
    held: list[int], accumulate: int
) -> None:
    plans = epoch(held, accumulate, uneven="min")
    for rank, has in enumerate(held):
        run = sum(plan.counts[rank] for plan in plans)  # type: ignore[attr-defined]
        left = sum(plan.left_out[rank] for plan in plans)  # type: ignore[attr-defined]
        assert run == min(held)
        assert run + left == min(has, accumulate * len(plans))


@given(lengths, accumulates, st.sampled_from(["pad", "min"]))
def test_drop_runs_full_windows_only(held: list[int], accumulate: int, uneven: str) -> None:
    for plan in epoch(held, accumulate, partial="drop", uneven=uneven):
        assert plan.empty or max(plan.counts) == accumulate  # type: ignore[attr-defined]


@given(lengths, accumulates)
def test_error_is_raised_where_ranks_first_differ(held: list[int], accumulate: int) -> None:
    if len({min(has, 21) for has in held}) == 1:
        epoch(held, accumulate, uneven="error")
    else:
        with pytest.raises(UnevenRanksError, match=r"rank 0 has \d+, rank 1 has \d+"):
            epoch(held, accumulate, uneven="error")


@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_scale_times_weight_sums_to_the_ranks_which_the_mean_divides_out(weights: list[list[float]]) -> None:
    ranks = [summed([{"w": w, MICROBATCHES: 1.0} for w in rank]) for rank in weights]
    total = summed(ranks)["w"]
    if total > 0 and math.isinf(len(weights) / total):
        with pytest.raises(ValueError, match="too little to divide by"):
            scales(summed(ranks), len(weights))
        return
    found = scales(summed(ranks), len(weights))
    for name, values in (("w", weights), (MICROBATCHES, [[1.0] * len(rank) for rank in weights])):
        mean = math.fsum(found[name] * value for rank in values for value in rank) / len(weights)
        assert mean == pytest.approx(1) or (mean == 0 and not any(map(any, weights)))


def test_a_weight_that_nobody_has_scales_to_zero_not_to_infinity() -> None:
    assert scales({"tokens": 0.0}, 4) == {"tokens": 0.0}


@pytest.mark.parametrize(("world", "expected"), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_a_global_batch_is_kept_by_accumulating_more_on_fewer_ranks(world: int, expected: int) -> None:
    assert accumulate_for(512, batch_size=32, world_size=world) == expected
