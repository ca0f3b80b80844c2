"""Windows on 1 to 4 ranks equal one large batch in one process, to 1e-12 in float64."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from grad_kit import Case, Result, as_large_batches, in_windows, run_cases
from parameters_kit import in_full, meeting_in_pairs, not_met

from dataflow.testing import run_ranks

COUNTS = {
    "even": (6, 6, 6, 6),
    "partial": (5, 5, 5, 5),
    "uneven": (7, 3, 4, 1),
    "empty": (4, 0, 2, 3),
}
"""Microbatches of each rank: two full windows; a short last one; ranks that end in other windows; none."""
OPTIONS = {
    "plain": {},
    "clip": {"max_norm": 0.05},
    "momentum": {"momentum": 0.9},
    "scaler": {"scaler": True},
    "normalisers": {"normalisers": ("tokens", "samples", "microbatches")},
    "all": {
        "max_norm": 0.05,
        "momentum": 0.9,
        "scaler": True,
        "normalisers": ("tokens", "samples", "microbatches"),
    },
    "infinite": {"bad": (0, 1), "momentum": 0.9, "max_norm": 0.05},
    "infinite-scaler": {"bad": (0, 1), "momentum": 0.9, "scaler": True},
}
WRAPS = ["ddp", "static", "unused", "view", "static-view", "fsdp"]
FEWER = {3: ["all", "infinite"], 4: ["all", "infinite-scaler"]}
"""Options of larger worlds; smaller ones run all."""


def axes_of(world: int) -> tuple[list[str], list[str], list[str]]:
    """Wraps, shapes and options of a world's cases."""
    shapes = [name for name in COUNTS if world > 1 or name != "empty"]
    return WRAPS if world > 1 else ["plain"], shapes, FEWER.get(world, list(OPTIONS))


def cases_of(world: int) -> dict[str, Case]:
    """Every wrap meets every shape and option, and every shape every option."""
    return {
        f"{wrap}-{shape}-{option}": Case(COUNTS[shape][:world], wrap, **OPTIONS[option])  # type: ignore[arg-type]
        for wrap, shape, option in meeting_in_pairs(*axes_of(world))
    }


@cache
def results_of(world: int) -> list[dict[str, Result]]:
    """Every case, on each rank; all in the same processes."""
    return run_ranks(run_cases, world, args=(cases_of(world),), start_method="forkserver", timeout_s=110)


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def assert_equal(found: Result, expected: Result) -> None:
    assert found.totals == expected.totals
    assert found.skipped == expected.skipped
    assert found.lrs == pytest.approx(expected.lrs, rel=1e-15)
    for ours, theirs in zip(found.norms, expected.norms, strict=True):
        assert ours is not None
        assert theirs is not None
        assert abs(ours - theirs) < 1e-12 or not math.isfinite(theirs)
    assert worst(found.parameters, expected.parameters) < 1e-12
    assert worst(found.averaged, expected.averaged) < 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world", [1, *in_full(2), 3, *in_full(4)])
def test_windows_equal_large_batches(world: int) -> None:
    results = results_of(world) if world > 1 else [run_cases(cases_of(1))]
    for name, case in cases_of(world).items():
        expected = as_large_batches(case)
        assert len(expected.norms) == math.ceil(max(case.counts) / case.accumulate)
        assert any(expected.skipped) == (case.bad is not None)
        for rank, result in enumerate(results):
            try:
                assert_equal(result[name], expected)
            except AssertionError as error:
                error.add_note(f"case {name}, rank {rank} of {world}")
                raise


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_two_values_meet_in_a_case(world: int) -> None:
    axes = axes_of(world)
    assert not_met(meeting_in_pairs(*axes), *axes) == []
    assert not_met(meeting_in_pairs(*axes)[1:], *axes) != []


def test_the_reference_is_not_blind() -> None:
    """Dropping one microbatch, or another normaliser, is far outside the tolerance."""
    whole = as_large_batches(Case((6,)))
    assert worst(whole.parameters, as_large_batches(Case((5,))).parameters) > 1e-4
    assert worst(whole.parameters, in_windows(Case((6,), normalisers=("samples",))).parameters) > 1e-4
