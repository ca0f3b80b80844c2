"""The history of a run against a list of its steps, one by one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from sharding.plan.history import MOST_BYTES, MOST_STRETCHES, StepHistory, StepPlace, StepRun

TAILS = ["drop", "pad", "even", "uneven"]


class Run(NamedTuple):
    """Some steps of one epoch: a loop, or a part of it between two restarts."""

    num_steps: int
    goes_on: bool
    """Whether it goes on with the epoch before, where that ended."""
    world_size: int
    batch_size: int
    tail: str


runs = st.lists(
    st.builds(
        Run,
        st.integers(0, 4),
        st.booleans(),
        st.integers(1, 2),
        st.integers(1, 2),
        st.sampled_from(TAILS[:2]),
    ),
    max_size=80,
)


def history_of(made: list[Run]) -> tuple[StepHistory, list[StepPlace]]:
    """The history of some runs, and each step of theirs."""
    history, steps, epoch, position = StepHistory(), list[StepPlace](), 0, 0
    for run in made:
        if not run.goes_on:
            epoch, position = epoch + 1, 0
        group = run.world_size * run.batch_size
        history = history.after(run.num_steps, epoch, position, group, run.world_size, run.tail)
        for _ in range(run.num_steps):
            steps.append(StepPlace(len(steps), epoch, position, group, run.world_size, run.tail))
            position += group
    return history, steps


@given(runs)
def test_every_step_that_is_known_is_where_it_was_taken(made: list[Run]) -> None:
    history, steps = history_of(made)
    assert history.num_steps == len(steps)
    known = range(history.known_from, history.num_steps)
    assert [history.find(step) for step in known] == steps[history.known_from :]
    assert len(history.stretches) <= MOST_STRETCHES
    if len(history.stretches) < MOST_STRETCHES:
        assert history.known_from == 0


@given(runs, st.booleans())
def test_text_gives_the_history_back(made: list[Run], forgets: bool) -> None:
    history, _ = history_of(made)
    history = history.forgotten() if forgets else history
    assert StepHistory.from_json(history.to_json()) == history
    assert StepHistory.from_json(None) is None


@given(runs)
def test_neighbours_are_merged(made: list[Run]) -> None:
    stretches = history_of(made)[0].stretches
    assert all(len(a.joined(b)) == 2 for a, b in pairwise(stretches))


def test_whole_epochs_and_restarts_on_the_same_ranks_are_one_stretch() -> None:
    history = StepHistory()
    for epoch in range(1000):
        history = history.after(7, epoch, 0, 8, 2, "even")
        history = history.after(3, epoch, 56, 8, 2, "even")
    assert history.stretches == (StepRun(0, 0, 0, 8, 2, "even", 1000, 10),)


def test_an_epoch_that_goes_on_behind_equal_ones_is_told_apart_from_them() -> None:
    history = StepHistory()
    for epoch in range(3):
        history = history.after(5, epoch, 0, 8, 2, "drop")
    history = history.after(2, 2, 40, 8, 2, "drop")
    assert [s[:3] + s[6:] for s in history.stretches] == [(0, 0, 0, 2, 5), (10, 2, 0, 1, 7)]


def test_the_oldest_stretches_go_and_a_step_of_theirs_is_not_known() -> None:
    history = StepHistory()
    for epoch in range(200):
        history = history.after(1 + epoch, 2 * epoch + 10**9, 10**12, 10**6, 10**3, "uneven")
    text = history.to_json()
    assert len(history.stretches) == MOST_STRETCHES
    assert len(text) <= MOST_BYTES
    kept = StepHistory.from_json(text)
    assert kept is not None
    assert kept.known_from == history.known_from > 0
    assert kept.num_steps == history.num_steps == sum(range(201))
    with pytest.raises(IndexError, match=f"step 5 is not known: of 20,100 steps, steps {kept.known_from:,}"):
        kept.find(5)
    with pytest.raises(IndexError, match="step 20,100 is not known"):
        kept.find(20_100)
    with pytest.raises(IndexError, match="of 20,100 steps, none is"):
        history.forgotten().find(3)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "[-1]", "[true]", 3, '["a"]',
        "[[0,0,0,4,1,\"drop\",1],0]", "[[0,0,0,4,3,\"drop\",1],5]", "[[0,0,0,4,1,\"all\",1],5]",
        "[[0,0,0,4,1,\"drop\",2],5]", "[[0,0,0,4,1,\"drop\",0],5]", "[[0,0,0,4,1,\"drop\"],5]",
        "[[0,-1,0,4,1,\"drop\",1],5]", "[[0,0,1.5,4,1,\"drop\",1],5]", "[[0,0,0,0,1,\"drop\",1],5]",
        json.dumps([[n, n, 0, 4, 1, "drop", 1] for n in range(65)] + [65]),
    ],
)  # fmt: skip
def test_other_text_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="history must be the text that a state has"):
        StepHistory.from_json(text)
