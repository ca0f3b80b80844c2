"""Costs beside elements: budgets of rows, and an order of units in which ranks have like ones to do."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.errors import DataflowError
from sharding.lengths.batching import Bucketed, Packed, TokenBudget
from sharding.lengths.costs import balanced, max_over_mean
from sharding.lengths.unit_plan import UnitPlanner
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

BATCHINGS = [
    Packed(16, balance="cost", balance_group=4, window=30),
    Packed(16, balance="cost", balance_group=8, budget={"cost": 12}, window=30),
    Packed(16, budget={"cost": 9}, window=30),
    Packed(16, balance=lambda lengths: lengths["tokens"] ** 2, balance_group=3, window=30),
    TokenBudget(40, balance="cost", balance_group=4, window=30),
    Bucketed(3, balance="cost", balance_group=4, boundaries=3, window=30),
]
samples = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 9)), min_size=1, max_size=120)


def planner_of(drawn, batching):
    sizes = np.array(drawn)
    return UnitPlanner(batching, lengths=sizes if batching.cost_columns else sizes[:, 0])


def units_of(planner, world_size=1, start=0, kind="full"):
    """The positions of each unit, in the order in which all ranks take them."""
    order = Order([len(planner.lengths)], Shuffle(kind), seed=1, epoch=0)
    dealing = {"batch_size": 1, "world_size": world_size, "tail": "uneven", "start": start}
    plans = [planner.plan(order, rank=rank, **dealing) for rank in range(world_size)]
    return [
        tuple(plan.batches(step, step + 1).segments.position.tolist())
        for step in range(plans[0].num_batches)
        for plan in plans
        if step < plan.num_batches
    ]


@given(samples, st.sampled_from(BATCHINGS), st.sampled_from(["full", "none"]))
def test_each_sample_comes_once_and_no_row_is_above_the_budget(drawn, batching, kind):
    planner = planner_of(drawn, batching)
    units = units_of(planner, kind=kind)
    assert Counter(p for unit in units for p in unit) == Counter(range(len(drawn)))
    order = Order([len(drawn)], Shuffle(kind), seed=1, epoch=0)
    length, cost = np.array(drawn)[order.samples(np.arange(len(drawn)))].T
    if isinstance(batching, Packed):
        assert all(length[[*unit]].sum() <= batching.length for unit in units)
        most = batching.budget.get("cost", 1 << 30)
        assert all(cost[[*unit]].sum() <= most for unit in units)


@given(samples, st.sampled_from(BATCHINGS), st.integers(1, 5), st.data())
def test_it_resumes_at_every_position_on_any_ranks(drawn, batching, world_size, data):
    planner = planner_of(drawn, batching)
    whole = units_of(planner)
    start = data.draw(st.integers(0, len(whole)))
    order = Order([len(drawn)], Shuffle("full"), seed=1, epoch=0)
    token = json.loads(json.dumps(planner.state(order, start)))
    rest = units_of(planner_of(drawn, batching).resumed(token, 0), world_size, start)
    assert Counter(rest) == Counter(whole[start:])
    full = len(rest) // world_size * world_size
    assert rest[:full] == whole[start:][:full]


@given(samples, st.sampled_from(BATCHINGS))
def test_what_is_measured_is_planned_as_what_is_known(drawn, batching):
    planner = planner_of(drawn, batching)
    order = Order([len(drawn)], Shuffle("full"), seed=1, epoch=0)
    known, grown = planner.sequence(order), planner.with_lengths(None).sequence(order)
    for m in range(known.num_packing_windows):
        own = slice(*known.bounds[m : m + 2])
        units = grown.add(m, known.sizes[own])
        assert np.array_equal(units.segments.position, known.units(m).segments.position)
    assert np.array_equal(grown.unit_costs, known.unit_costs)


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(0, 99), st.integers(1, 9))
def test_groups_are_alike_and_begin_where_steps_do(drawn, first, group):
    costs = np.array(drawn, np.int64)
    order = balanced(costs, first, group)
    assert sorted(order.tolist()) == [*range(len(costs))]
    own = costs[order][min(-first % group, len(costs)) :]
    groups = own[: len(own) // group * group].reshape(-1, group)
    spans = sorted((g.min(), g.max()) for g in groups if (g == 0).all() or (g > 0).all())
    whole = (costs == 0).sum() // group  # all of these groups, but those that the ends take
    assert sum(high == 0 for _, high in spans) >= whole - 1
    paid = [span for span in spans if span[1]]
    overlaps = sum(a[1] > b[0] for a, b in pairwise(paid))
    assert overlaps <= 1  # the ends' own


def test_ranks_have_like_costs_where_they_are_balanced():
    rng = np.random.default_rng(0)
    lengths, costs = rng.integers(1, 400, 6000), rng.integers(0, 2000, 6000) * (rng.random(6000) < 0.6)
    order = Order([6000], Shuffle("full"), seed=1, epoch=0)
    found = {}
    for balance in (None, "cost"):
        batching = Packed(1000, balance=balance, budget={"cost": 1 << 20})
        plan = UnitPlanner(batching, lengths=np.stack([lengths, costs], axis=1)).plan(
            order, batch_size=1, rank=0, world_size=8, tail="drop"
        )
        found[balance] = plan.stats
    assert found[None].cost_max_over_mean == 0.0
    assert found["cost"].cost_max_over_mean < 1.2  # 1.9 in any order
    assert found["cost"].efficiency == found[None].efficiency


def test_the_imbalance_counts_all_rows_of_a_rank_in_a_step():
    rng, ranks, rows = np.random.default_rng(1), 3, 2
    sizes = np.stack([rng.integers(1, 16, 200), rng.integers(0, 9, 200)], axis=1)
    order = Order([200], Shuffle("full"), seed=1, epoch=0)
    planner = UnitPlanner(Packed(16, balance="cost", balance_group=6, window=50), lengths=sizes)
    dealing = {"batch_size": rows, "world_size": ranks, "tail": "drop", "start": 7}
    plans = [planner.plan(order, rank=rank, **dealing) for rank in range(ranks)]
    cost = sizes[order.samples(np.arange(200)), 1]
    steps = [
        [cost[plan.batches(step, step + 1).segments.position].sum() for plan in plans]
        for step in range(plans[0].num_batches)
    ]
    figures = {plan.stats.cost_max_over_mean for plan in plans}
    assert [*figures] == [pytest.approx(np.mean([max(own) / np.mean(own) for own in steps]))]


def test_batchings_are_keys():
    assert len({Packed(8, budget={"cost": 3}), Packed(8), Packed(8)}) == 2


def test_the_imbalance_is_the_mean_of_steps_with_a_cost():
    assert max_over_mean(np.array([[1, 3], [0, 0], [2, 2]])) == pytest.approx((1.5 + 1) / 2)
    assert max_over_mean(np.zeros((0, 4), np.int64)) == 0.0


def test_a_sample_alone_above_the_budget_is_an_error():
    with pytest.raises(DataflowError, match=r"more than budget=\{'cost': 5\} alone"):
        units_of(planner_of([(3, 4), (3, 7)], Packed(16, budget={"cost": 5})))


def test_a_state_tells_of_balance_and_budget_and_only_where_they_are():
    assert not {"balance", "balance_group", "budget"} & Packed(8).to_json().keys()
    token = Packed(8, balance="cost", budget={"cost": 9}).to_json()
    assert token["balance"] == "cost"
    assert token["balance_group"] == 64
    assert token["budget"] == {"cost": 9}
    square, cube = (Packed(8, balance=lambda n, p=p: n["tokens"] ** p).to_json() for p in (2, 3))
    assert square == Packed(8, balance=lambda n: n["tokens"] * n["tokens"]).to_json()
    assert square["balance"] != cube["balance"]
    lengths = np.array([3, 4, 5])
    marks = {
        UnitPlanner(Packed(8, balance="c"), lengths=np.stack([lengths, own], axis=1)).token["costs"]
        for own in ([1, 2, 3], [1, 2, 4])
    }
    assert len(marks) == 2


def test_a_function_that_gives_no_whole_numbers_is_refused():
    planner = planner_of([(3, 0)], Packed(8, balance=lambda n: n["tokens"] / 2))
    with pytest.raises(ValueError, match="must return 1 integers >= 0"):
        units_of(planner)
