"""Batches that are passed over: against a plain loop that deals every global batch out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from sharding.lengths.batching import Bucketed, Packed
from sharding.lengths.unit_plan import UnitPlanner
from sharding.mixture.interleaving import MixtureSpec
from sharding.mixture.windows import MixturePlan, MixtureWindows, source_seed
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Tail
from sharding.plan.history import PassedRange, ranges_from_json
from sharding.plan.passing import passing
from sharding.plan.plan import EpochPlan, PlanState, RankPlan

TAILS: list[Tail] = ["drop", "pad", "even", "uneven"]
Make = Callable[..., RankPlan]


def of_an_order(num_samples: int, lanes: int, kind: Any = "window") -> Make:
    blocks = [3] * (num_samples // 3) + [num_samples % 3]
    shuffle = Shuffle("full") if kind == "full" else Shuffle(kind, max(8, lanes), lanes)
    order = Order(blocks, shuffle, seed=1, epoch=0)
    return lambda **dealing: EpochPlan(order, **dealing)


def of_a_mixture(num_samples: int, lanes: int) -> Make:
    blocks, shuffle = [[3, 4, 5, 2], [5, 6]], Shuffle("window", max(2, lanes), lanes)
    spec = MixtureSpec.repeated([14, 11], [num_samples / 25, num_samples / 25])

    def order(source: int, epoch: int) -> Order:
        return Order(blocks[source], shuffle, seed=source_seed(1, source), epoch=epoch)

    windows = MixtureWindows(
        spec.epoch(0), seed=1, epoch=0, shuffle=shuffle, sizes=[14, 11], num_blocks=[4, 2], orders=order
    )
    return lambda **dealing: MixturePlan(windows, **dealing)


def of_units(num_samples: int, lanes: int, batching: Any) -> Make:
    order = Order([3] * (num_samples // 3) + [num_samples % 3], Shuffle("window", 8, lanes), seed=1, epoch=0)
    lengths = np.arange(num_samples) % 7 + 1
    planner = UnitPlanner(batching, 16, lengths=lengths)
    return lambda **dealing: planner.plan(order, **dealing)


def dealt_by_hand(make: Make, world: int, size: int, tail: Tail, start: int, passed: Any) -> list[list[Any]]:
    """The batches of each rank, as lists of items: the rule, written out."""
    group = world * size
    own = [
        make(batch_size=size, rank=rank, world_size=world, tail=tail, start=start) for rank in range(world)
    ]
    listed = replace(own[0].batch_plan, rank=0, world_size=1, batch_size=group, tail="uneven")
    num_full, ranks = listed.num_full, list[list[Any]]([] for _ in range(world))
    gone = {item for a, b in passed for item in range(a, b)}
    for number in range(own[0].batch_plan.num_global_batches):
        whole = listed.items(number, number + 1)[0].tolist()
        left = [item for item in whole if item not in gone]
        plans = [plan.batch_plan for plan in own]
        usual = [p.items(number, number + 1)[0].tolist() if number < p.num_batches else [] for p in plans]
        if not left:
            continue
        if len(left) == len(whole) and not gone & {*chain(*usual)}:
            shares = usual
        else:
            count = len(left)
            if tail in ("even", "pad"):
                count = -(-count // world) * world
                if tail == "pad" and len(left) == len(whole) and number == num_full:
                    count = group
            elif number < num_full:
                count = max(count, world)
            filled = [left[i % len(left)] for i in range(count)]
            bounds = np.cumsum([0, *(count // world + (rank < count % world) for rank in range(world))])
            shares = [filled[bounds[rank] : bounds[rank + 1]] for rank in range(world)]
        for rank, share in enumerate(shares):
            ranks[rank] += [share] if share else []
    return ranks


def batches_of(plan: RankPlan) -> list[list[int]]:
    items, sizes = plan.batch_plan.items(0, plan.batch_plan.num_batches)
    return [part.tolist() for part in np.split(items, np.cumsum(sizes)[:-1])] if len(sizes) else []


def passing_over(plan: RankPlan, passed: Sequence[tuple[int, int]]) -> RankPlan:
    ranges = [PassedRange(0, a, b, 0, 1) for a, b in passed]
    return plan.passing_over(partial(passing, ranges=ranges))


SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 25)).map(lambda p: (p[0], sum(p))), min_size=1, max_size=4
)
MAKES: list[Callable[[int, int], Make]] = [
    of_an_order,
    lambda n, lanes: of_an_order(n, lanes, "full"),
    lambda n, lanes: of_an_order(n, lanes, "none"),
    of_a_mixture,
    lambda n, lanes: of_units(n, lanes, Packed(8, window=16)),
    lambda n, lanes: of_units(n, lanes, Bucketed(3, boundaries=(2, 5), window=16)),
]


@given(
    st.sampled_from(range(len(MAKES))), st.integers(1, 60), st.integers(1, 5), st.integers(1, 4),
    st.integers(1, 4), st.sampled_from(TAILS), st.integers(0, 20), SPANS,
)  # fmt: skip
@example(0, 20, 3, 2, 2, "pad", 0, [(0, 2)])  # what fills the last batch up is passed over
@example(0, 22, 1, 4, 2, "uneven", 0, [(9, 16)])  # fewer samples than ranks are left
@example(0, 17, 1, 4, 2, "uneven", 0, [(16, 20)])  # nothing is left of the last batch
@example(3, 40, 2, 2, 2, "even", 0, [(0, 60)])  # nothing is left
def test_batches_are_those_that_are_left(
    which: int, num_samples: int, lanes: int, world: int, size: int, tail: Tail, start: int, passed: Any
) -> None:
    make = MAKES[which](num_samples, lanes)
    size = 1 if which == 5 else size
    plain = make(batch_size=size, rank=0, world_size=world, tail=tail, start=0)
    start = min(start, plain.batch_plan.num_items)
    expected = dealt_by_hand(make, world, size, tail, start, passed)
    gone = {item for a, b in passed for item in range(a, b)}
    for rank in range(world):
        whole = make(batch_size=size, rank=rank, world_size=world, tail=tail, start=start)
        plan = passing_over(whole, passed)
        assert batches_of(plan) == expected[rank]
        assert plan.num_batches == len(expected[rank])
        assert not gone & {*chain(*expected[rank])}
        assert plan.num_global_batches == max(map(len, expected))
        assert (plan.batch_plan.num_steps, plan.batch_plan.num_steps_global) == (
            whole.num_batches,
            whole.num_global_batches,
        )
        check_ranges(plan, expected[rank])
        check_windows(plan)
    if tail == "uneven":
        delivered = Counter(chain(*chain(*expected)))
        assert {*delivered} == {*range(start, plain.batch_plan.num_items)} - gone


def check_ranges(plan: RankPlan, expected: list[list[int]]) -> None:
    """A part of the batches is that part of all; the position ascends; a batch is resumed behind each."""
    dealt, num = plan.batch_plan, plan.num_batches
    first, last = num // 3, num - num // 4
    assert dealt.items(first, last)[0].tolist() == [*chain(*expected[first:last])]
    repeats = dealt.repeats(0, num)
    assert len(repeats) == len([*chain(*expected)])
    assert [dealt.position_after(n) for n in range(num + 1)] == sorted(
        dealt.position_after(n) for n in range(num + 1)
    )
    assert [dealt.steps_after(n) * dealt.global_batch_size + dealt.start for n in range(num + 1)] == [
        dealt.end_of(n) for n in range(num + 1)
    ]
    with pytest.raises(IndexError):
        dealt.items(0, num + 1)


def check_windows(plan: RankPlan) -> None:
    """What a rank stages of each window is what its batches take, fills and all."""
    if plan.order.shuffle.kind == "full" or not plan.num_batches:
        return
    positions, _ = plan.positions(0, plan.num_batches)
    kept = positions
    if plan.num_padded and isinstance(plan, EpochPlan | MixturePlan):
        last = plan.repeats(plan.num_batches - 1, plan.num_batches)
        kept = np.concatenate((positions[: -len(last)], positions[-len(last) :][~last]))
    windows, indices = plan.order.locate(kept)
    for window in np.unique(windows).tolist():
        own = plan.rank_indices(window)
        taken = np.sort(indices[windows == window])
        if own is None:
            own = np.arange(plan.order.window_length(window))
        is_of_units = not isinstance(plan, EpochPlan | MixturePlan)
        if is_of_units and not plan.repeats(0, plan.num_batches).any():
            assert own.tolist() == taken.tolist()
        elif not is_of_units:
            assert np.unique(own).tolist() == np.unique(taken).tolist()
    if isinstance(plan, EpochPlan):
        for window in range(plan.order.num_windows):
            core = plan.batches_inside(window)
            for number in core:
                own_windows, _ = plan.order.locate(plan.positions(number, number + 1)[0])
                assert set(own_windows.tolist()) == {window}
                assert len(own_windows) == plan.batch_plan.batch_size


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_other_worlds_pass_over_the_same_samples(num: int, worlds: list[int], data: Any) -> None:
    make, passed = of_an_order(num * 3, 2), [(7, 19), (40, 41)]
    position, delivered = 0, Counter[int]()
    for world in [*worlds, 1]:
        size = data.draw(st.integers(1, 3))
        plans = [
            passing_over(
                make(batch_size=size, rank=r, world_size=world, tail="uneven", start=position), passed
            )
            for r in range(world)
        ]
        num_global = plans[0].num_global_batches
        steps = num_global if world == 1 else data.draw(st.integers(0, num_global))
        for plan in plans:
            flags = plan.repeats(0, min(steps, plan.num_batches))
            delivered.update(plan.positions(0, min(steps, plan.num_batches))[0][~flags].tolist())
        position = plans[0].position_after(steps)
        if steps == num_global:
            break
    if position == num * 3 or steps == num_global:
        left = {*range(num * 3)} - {*range(7, 19), 40}
        assert delivered == Counter(dict.fromkeys(left, 1))


def test_a_state_keeps_what_is_passed_over() -> None:
    ranges = (PassedRange(2, 5, 9, 100, 103), PassedRange(3, 0, 4, 103, 104))
    state = PlanState(seed=1, epoch=2, position=3, num_samples=20, shuffle=Shuffle("full"), passed=ranges)
    assert state.to_json()["passed"] == "[[2,5,9,100,103],[3,0,4,103,104]]"
    assert PlanState.from_json(state.to_json()) == state
    before = {name: value for name, value in state.to_json().items() if name != "passed"}
    assert PlanState.from_json(before).passed is None


@pytest.mark.parametrize(
    "rows", [3, "x", [[1]], [[0, 5, 5, 0, 1]], [[0, 1, 2, -1, 4]], [[0, 1, 2, 3, True]], [[0] * 5] * 65]
)
def test_damaged_ranges_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"passed over is five integers|passed must be at most"):
        ranges_from_json(rows)
