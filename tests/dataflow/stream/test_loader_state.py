"""Resuming: at every position, under any number of ranks, nothing is lost, repeated or reordered."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from datasets_kit import (
    NUM_SAMPLES,
    Made,
    Row,
    by_plan,
    delivered,
    edited,
    rank,
    rows_of,
    sort_key,
)
from hypothesis import HealthCheck, given, settings, strategies as st

from dataflow import DataLoader, Shuffle

SHUFFLES = [Shuffle("none"), Shuffle("blocks", 2), Shuffle("window", 2), Shuffle("full")]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)


# ---- one rank -----------------------------------------------------------------------------------------


def test_the_state_inside_a_loop_counts_delivered_batches_not_prefetched_ones(ints: Made) -> None:
    with DataLoader(ints.open(), 4, Shuffle("window", 2)) as loader:
        positions = [loader.state_dict()["position"] for _ in loader]
    assert positions == [min(4 * k, NUM_SAMPLES) for k in range(1, 13)]


def test_a_seed_and_a_shuffle_that_a_state_replaces_are_named(ints: Made) -> None:
    with DataLoader(ints.open(), 4, Shuffle("window", 2), seed=3) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    with DataLoader(ints.open(), 4) as of_defaults:
        of_defaults.load_state_dict(state)
    with (
        DataLoader(ints.open(), 4, Shuffle("full"), seed=5) as other,
        pytest.warns(
            UserWarning, match="given seed=5 and shuffle 'full', and goes on with seed=3 and sh"
        ) as told,
    ):
        other.load_state_dict(state)
    assert [warning.filename for warning in told] == [__file__]


# ---- other ranks, other sizes -------------------------------------------------------------------------


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    cuts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=3),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 2**64 - 1),
)
def test_no_chain_of_restarts_loses_or_repeats_a_sample(
    ints: Made, cuts: list[tuple[int, int, int]], shuffle: Shuffle, seed: int
) -> None:
    """Each run has its own ranks, batch size and number of steps; the last one finishes the epoch."""
    dataset = ints.open()
    seen: Counter[str] = Counter()
    state = None
    for at, (world_size, batch_size, steps) in enumerate([*cuts, (3, 5, 1000)]):
        states = []
        for r in range(world_size):
            options: dict[str, Any] = {"topology": rank(r, world_size), "tail": "uneven", "seed": seed}
            with DataLoader(dataset, batch_size, shuffle, **options) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for batch in islice(loader, steps):
                    seen.update(map(sort_key, rows_of(batch)))
                    states.append((loader.state_dict()["position"], loader.state_dict()))
                states.append((loader.state_dict()["position"], loader.state_dict()))
        state = max((s for s in states if s[1]["epoch"] == 0), key=lambda s: s[0], default=(0, None))[1]
        if state is None or state["position"] == NUM_SAMPLES:
            break
        assert at < len(cuts)
    assert seen == Counter(map(sort_key, ints.samples))


# ---- states that are refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": NUM_SAMPLES + 1},
        {"position": 1.5},
        {"epoch": -1},
        {"version": 1},
        {"num_samples": NUM_SAMPLES - 1},
        {"skipped_samples": -1},
        {"skipped_samples": None},
        {"shuffle": {"kind": "magic", "window_blocks": 2}},
        {"extra": 1},
        {"seed": None},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(ints: Made, change: dict[str, Any]) -> None:
    with DataLoader(ints.open(), 4, Shuffle("window", 2)) as loader:
        before = loader.state_dict()
        with pytest.raises(ValueError, match=r"[a-z]"):
            loader.load_state_dict(edited(before, **change))
        assert loader.state_dict() == before
        assert delivered(loader) == by_plan(loader, ints.samples, 0)


@pytest.mark.parametrize("state", [{}, [], None, {"version": 1}])
def test_what_is_no_state_is_refused(ints: Made, state: Any) -> None:
    with DataLoader(ints.open(), 4) as loader, pytest.raises(ValueError, match="not a state"):
        loader.load_state_dict(state)


# ---- augmentation ---------------------------------------------------------------------------------------


def augmented(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"cls": sample["cls"], "draw": rng.random()}


def draws(batches: list[list[Row]]) -> dict[int, float]:
    return {row["cls"]: row["draw"] for batch in batches for row in batch}


def test_random_transforms_depend_on_seed_epoch_and_sample_alone(ints: Made) -> None:
    dataset = ints.open(transform=augmented)
    whole: list[dict[int, float]] = []
    with DataLoader(dataset, 4, Shuffle("window", 2), seed=1) as loader:
        whole = [draws(delivered(loader)) for _ in range(2)]
    assert len(set(whole[0].values()) | set(whole[1].values())) == 2 * NUM_SAMPLES
    for world_size, batch_size in ((2, 7), (3, 2)):
        parts: dict[int, float] = {}
        for r in range(world_size):
            options: dict[str, Any] = {"topology": rank(r, world_size), "tail": "uneven", "seed": 1}
            with DataLoader(dataset, batch_size, Shuffle("full"), **options) as loader:
                assert list(islice(loader, 2))
                state = loader.state_dict()
                loader.load_state_dict(state)
                assert delivered(loader) is not None
                loader.load_state_dict(edited(state, position=0))
                parts |= draws(delivered(loader))
        assert parts == whole[0]
    with DataLoader(dataset, 4, shuffle=True, seed=2) as loader:
        assert not set(draws(delivered(loader)).values()) & set(whole[0].values())


def test_a_transform_without_rng_gets_the_sample_alone(ints: Made) -> None:
    with DataLoader(ints.open(transform=lambda s: {"double": 2 * s["cls"]}), 4, shuffle=False) as loader:
        got = [row["double"] for batch in delivered(loader) for row in batch]
    assert got == [2 * i for i in range(NUM_SAMPLES)]
