"""The plan against the rule written out: a list of positions, cut up in plain Python."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.plan import EpochPlan, PlanState

TAILS = ["drop", "pad", "even", "uneven"]
tables = st.lists(st.integers(0, 6), max_size=25)
small = st.integers(1, 7)


def order_of(num_samples, kind="window", lanes=None):
    blocks = [3] * (num_samples // 3) + [num_samples % 3]
    shuffle = Shuffle("full") if kind == "full" else Shuffle(kind, 8, lanes)
    return Order(blocks, shuffle, seed=1, epoch=0)


def plans_of(order, batch_size, world_size, tail, start=0):
    made = {"batch_size": batch_size, "world_size": world_size, "tail": tail, "start": start}
    return [EpochPlan(order, rank=rank, **made) for rank in range(world_size)]


def batches_of(plan):
    """The rank's batches as lists of positions."""
    positions, sizes = plan.positions(0, plan.num_batches)
    assert positions.dtype == sizes.dtype == np.int64
    assert len(positions) == sizes.sum()
    return [part.tolist() for part in np.split(positions, np.cumsum(sizes)[:-1])] if len(sizes) else []


def global_batches(plans):
    """Positions of each global batch, ascending: the ranks' batches put together."""
    of_rank = [batches_of(plan) for plan in plans]
    num = plans[0].num_global_batches
    parts = [[p for batches in of_rank for p in (batches[b] if b < len(batches) else [])] for b in range(num)]
    return [sorted(part) for part in parts]


def filled(left, batch_size, world_size, tail):
    """Samples that the last global batch gets besides the `left` ones."""
    return {"pad": -left % (batch_size * world_size), "even": -left % world_size}.get(tail, 0)


def expected_batches(n, start, batch_size, world_size, tail):
    """The specification, one position at a time."""
    size = batch_size * world_size
    whole = [list(range(at, min(at + size, n))) for at in range(start, n, size)]
    if whole and len(whole[-1]) < size:
        if tail == "drop":
            whole.pop()
        else:
            whole[-1] += [i % n for i in range(filled(len(whole[-1]), batch_size, world_size, tail))]
    return [sorted(part) for part in whole]


@given(st.integers(0, 60), small, small, st.sampled_from(TAILS), st.integers(1, 8), st.data())
def test_global_batches_are_consecutive_positions(n, batch_size, world_size, tail, lanes, data):
    start = data.draw(st.integers(0, n))
    plans = plans_of(order_of(n, lanes=lanes), batch_size, world_size, tail, start)
    expected = expected_batches(n, start, batch_size, world_size, tail)
    assert global_batches(plans) == expected
    assert [plan.num_global_batches for plan in plans] == [len(expected)] * world_size
    assert max(plan.num_batches for plan in plans) == len(expected)


@given(st.integers(0, 60), small, small, st.sampled_from(TAILS))
def test_no_rank_gets_an_empty_batch_or_too_large_a_one(n, batch_size, world_size, tail):
    for plan in plans_of(order_of(n), batch_size, world_size, tail):
        positions, sizes = plan.positions(0, plan.num_batches)
        assert all(1 <= size <= batch_size for size in sizes.tolist())
        if tail in ("drop", "pad"):
            assert all(size == batch_size for size in sizes.tolist())
        assert all(size == batch_size for size in sizes[:-1].tolist())
        for batch in np.split(positions, np.cumsum(sizes))[: plan.num_batches - (plan.num_padded > 0)]:
            assert len(set(batch.tolist())) == len(batch)


@given(st.integers(0, 60), small, small, st.sampled_from(TAILS))
def test_each_tail_rule_delivers_exactly_what_it_says(n, batch_size, world_size, tail):
    plans = plans_of(order_of(n), batch_size, world_size, tail)
    seen = Counter(p for plan in plans for batch in batches_of(plan) for p in batch)
    left = n % (batch_size * world_size)
    wanted = Counter(range(n - left if tail == "drop" else n))
    if left:
        wanted.update(i % n for i in range(filled(left, batch_size, world_size, tail)))
    assert seen == wanted
    extra = sum(seen.values()) - len(seen)
    assert extra == plans[0].num_padded_global == sum(plan.num_padded for plan in plans)
    assert plans[0].position_after(plans[0].num_global_batches) == len(seen)


@given(st.integers(0, 60), small, small, st.integers(1, 8), st.data())
def test_even_parts_are_equal_and_as_short_as_can_be(n, batch_size, world_size, lanes, data):
    start = data.draw(st.integers(0, n))
    plans = plans_of(order_of(n, lanes=lanes), batch_size, world_size, "even", start)
    of_rank = [batches_of(plan) for plan in plans]
    assert len({tuple(map(len, batches)) for batches in of_rank}) == 1
    left = (n - start) % (batch_size * world_size)
    if left:
        assert len(of_rank[0][-1]) == -(-left // world_size)
    assert plans[0].num_padded_global == -left % world_size
    assert plans[0].position_after(len(of_rank[0])) == n


@given(st.integers(1, 60), small, small, st.integers(1, 8), st.sampled_from(TAILS), st.data())
def test_repeats_are_the_samples_that_fill_the_last_batch(n, batch_size, world_size, lanes, tail, data):
    start = data.draw(st.integers(0, n))
    plans = plans_of(order_of(n, lanes=lanes), batch_size, world_size, tail, start)
    seen = Counter()
    for plan in plans:
        positions, sizes = plan.positions(0, plan.num_batches)
        repeats = plan.repeats(0, plan.num_batches)
        assert (repeats.dtype, repeats.shape) == (bool, positions.shape)
        assert positions[repeats].tolist() == plan.padding.tolist()
        assert repeats.sum() == plan.num_padded
        before = int(sizes[:-1].sum())
        assert not repeats[:before].any()
        if plan.num_batches:
            last = plan.repeats(plan.num_batches - 1, plan.num_batches)
            assert last.tolist() == repeats[before:].tolist()
        seen.update(positions[~repeats].tolist())
    left = (n - start) % (batch_size * world_size)
    assert seen == Counter(range(start, n - left if tail == "drop" else n))


@given(st.integers(0, 60), small, small)
def test_uneven_shares_differ_by_one_sample_at_most(n, batch_size, world_size):
    plans = plans_of(order_of(n), batch_size, world_size, "uneven")
    totals = [sum(map(len, batches_of(plan))) for plan in plans]
    assert max(totals) - min(totals) <= 1
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("n", [0, 1, 11, 12, 13, 100])
@pytest.mark.parametrize("kind", ["window", "full", "blocks", "none"])
def test_the_world_size_changes_no_global_batch(tail, n, kind):
    order = order_of(n, kind)
    delivered = []
    for world_size in (1, 2, 3, 4, 6, 12):
        plans = plans_of(order, 12 // world_size, world_size, tail)
        batches = global_batches(plans)
        if tail == "even" and n % 12:  # how many samples come a second time follows the world
            last = len(batches) - 1
            own = [plan.positions(last, last + 1)[0][~plan.repeats(last, last + 1)] for plan in plans]
            batches[-1] = sorted(np.concatenate(own).tolist())
        delivered.append([order.samples(np.array(batch, np.int64)).tolist() for batch in batches])
    assert all(other == delivered[0] for other in delivered[1:])


# Lanes


def owned_lanes(plan, lanes=8):
    return {p % lanes for p in plan.positions(0, plan.num_batches)[0].tolist()}


@pytest.mark.parametrize("start", [0, 5, 96])
@pytest.mark.parametrize(("world_size", "each"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_ranks_that_divide_the_lanes_read_whole_lanes(world_size, each, start):
    plans = plans_of(order_of(960), 48 // world_size, world_size, "drop", start)
    lanes = [owned_lanes(plan) for plan in plans]
    assert lanes == [set(range(r * each, (r + 1) * each)) for r in range(world_size)]


def test_more_ranks_than_lanes_share_each_lane_with_neighbours_only():
    lanes = [owned_lanes(plan) for plan in plans_of(order_of(960), 2, 24, "drop")]
    assert lanes == [{rank // 3} for rank in range(24)]


def test_a_world_that_does_not_divide_the_lanes_shares_lanes_at_its_boundaries():
    lanes = [owned_lanes(plan) for plan in plans_of(order_of(960), 8, 3, "drop")]
    assert lanes == [{0, 1, 2}, {2, 3, 4, 5}, {5, 6, 7}]


@given(st.integers(1, 200), small, small, st.integers(1, 8))
def test_a_rank_takes_its_part_of_each_batch_sorted_by_lane(n, batch_size, world_size, lanes):
    group = batch_size * world_size
    plans = plans_of(order_of(n, lanes=lanes), batch_size, world_size, "drop", start=n % 7)
    for batch in range(plans[0].num_batches):
        positions = range(n % 7 + batch * group, n % 7 + (batch + 1) * group)
        by_lane = sorted(positions, key=lambda p: (p % lanes, p))
        for rank, plan in enumerate(plans):
            own = by_lane[rank * batch_size : (rank + 1) * batch_size]
            assert plan.positions(batch, batch + 1)[0].tolist() == own


@given(
    tables,
    small,
    small,
    st.sampled_from(TAILS),
    st.integers(1, 8),
    st.sampled_from(["window", "blocks"]),
    st.sampled_from([0, 1]),
    st.data(),
)
def test_rank_indices_are_those_that_the_batches_take(
    table, batch_size, world_size, tail, lanes, kind, share, data
):
    order = Order(table, Shuffle(kind, 8, lanes, share), seed=6, epoch=1)
    start = data.draw(st.integers(0, order.num_samples))
    for plan in plans_of(order, batch_size, world_size, tail, start):
        taken = Counter(plan.positions(0, plan.num_batches)[0].tolist()) - Counter(plan.padding.tolist())
        windows, slots = order.locate(np.array(sorted(taken.elements()), np.int64))
        for window in range(order.num_windows):
            expected = sorted(set(slots[windows == window].tolist()))
            own = plan.rank_indices(window)
            assert expected == (list(range(order.window_length(window))) if own is None else own.tolist())


def test_one_rank_takes_whole_windows_but_for_the_first_and_last():
    order = Order([10] * 64, Shuffle("window", 16), seed=0, epoch=0)
    (plan,) = plans_of(order, 7, 1, "drop", start=160)
    partial = [w for w in range(order.num_windows) if plan.rank_indices(w) is not None]
    assert partial == [0, order.num_windows - 1]
    assert len(plan.rank_indices(0)) == 0


@given(tables, small, small, st.sampled_from(TAILS))
def test_resuming_after_any_batch_gives_the_rest(table, batch_size, world_size, tail):
    order = Order(table, Shuffle("window", 3), seed=4, epoch=2)
    plans = plans_of(order, batch_size, world_size, tail)
    whole = global_batches(plans)
    for done in range(len(whole) + 1):
        position = plans[-1].position_after(done)
        resumed = plans_of(order, batch_size, world_size, tail, position)
        assert whole[:done] + global_batches(resumed) == whole, f"differs when resumed after {done}"


worlds = st.tuples(small, small, st.integers(0, 4))


@given(tables, st.integers(1, 8), st.sampled_from([0, 0.5, 1]), st.lists(worlds, max_size=8))
def test_runs_of_any_worlds_one_after_the_other_lose_and_repeat_nothing(table, lanes, share, runs):
    """Each resumes the last one's state, under another batch size, across the ends of epochs."""
    table = [*table, 1]

    def order_of_epoch(epoch):
        return Order(table, Shuffle("window", 8, lanes, share), seed=3, epoch=epoch)

    epoch, position, seen = 0, 0, []
    for batch_size, world_size, steps in [*runs, (5, 2, 10**6)]:
        while steps:
            order = order_of_epoch(epoch)
            plans = plans_of(order, batch_size, world_size, "uneven", position)
            batches = global_batches(plans)[:steps]
            seen += [s for batch in batches for s in order.samples(np.array(batch, np.int64)).tolist()]
            steps -= len(batches)
            position = plans[0].position_after(len(batches))
            if position < order.num_samples:
                break
            epoch, position = epoch + 1, 0
            if (batch_size, world_size) == (5, 2):
                break
    whole = [order_of_epoch(e).samples(np.arange(sum(table))).tolist() for e in range(epoch)]
    assert seen == [s for samples in whole for s in samples]


@given(st.integers(0, 40), small, st.integers(1, 9), st.sampled_from(TAILS), st.integers(1, 8))
def test_all_ranks_know_the_steps_of_all_ranks(n, batch_size, world_size, tail, lanes):
    """Fewer samples, blocks or lanes than ranks: what each rank computes alone is what all of them do."""
    plans = plans_of(order_of(n, lanes=lanes), batch_size, world_size, tail)
    steps = [len(batches_of(plan)) for plan in plans]
    assert [plan.num_batches for plan in plans] == steps
    for plan in plans:
        assert plan.num_global_batches == max(steps)
        assert plan.position_after(max(steps)) == n - (n % (batch_size * world_size) if tail == "drop" else 0)
    if tail != "uneven":
        assert min(steps) == max(steps)


@given(st.integers(0, 60), small, small, st.sampled_from(TAILS), st.data())
def test_a_range_of_batches_is_that_part_of_all_batches(n, batch_size, world_size, tail, data):
    rank = data.draw(st.integers(0, world_size - 1))
    plan = plans_of(order_of(n), batch_size, world_size, tail)[rank]
    last = data.draw(st.integers(0, plan.num_batches))
    first = data.draw(st.integers(0, last))
    positions, sizes = plan.positions(first, last)
    whole = batches_of(plan)[first:last]
    assert sizes.tolist() == [len(batch) for batch in whole]
    assert positions.tolist() == [p for batch in whole for p in batch]


def test_one_sample_fills_a_padded_batch_of_every_rank():
    plans = plans_of(order_of(1), 3, 2, "pad")
    assert [batches_of(plan) for plan in plans] == [[[0, 0, 0]], [[0, 0, 0]]]
    assert [plan.num_padded for plan in plans] == [2, 3]


def test_one_sample_among_ranks_under_the_other_rules():
    assert [batches_of(plan) for plan in plans_of(order_of(1), 3, 2, "uneven")] == [[[0]], []]
    assert [batches_of(plan) for plan in plans_of(order_of(1), 3, 2, "drop")] == [[], []]


def test_a_padded_resume_fills_up_with_the_epochs_first_positions():
    (plan,) = plans_of(order_of(10), 4, 1, "pad", start=5)
    assert [sorted(batch) for batch in batches_of(plan)] == [[5, 6, 7, 8], [0, 1, 2, 9]]


def test_a_billion_samples_plan_at_once():
    order = Order(np.full(100_000, 10_000), Shuffle(), seed=0, epoch=0)
    plan = EpochPlan(order, batch_size=256, rank=1023, world_size=1024, tail="drop", start=999_000_000 // 7)
    positions, sizes = plan.positions(plan.num_batches - 1, plan.num_batches)
    assert (len(positions), sizes.tolist()) == (256, [256])
    left = (10**9 - plan.start) % (256 * 1024)
    assert plan.position_after(plan.num_batches) == 10**9 - left


def test_a_full_order_has_positions():
    (plan,) = plans_of(order_of(10, "full"), 5, 1, "drop")
    assert batches_of(plan) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_batches_outside_the_epoch_are_refused():
    (plan,) = plans_of(order_of(10), 4, 1, "uneven")
    for first, last in ((-1, 1), (2, 1), (0, 4)):
        with pytest.raises(IndexError, match=r"are not within \[0, 3\)"):
            plan.positions(first, last)
    for done in (-1, 4):
        with pytest.raises(IndexError, match=r"num_batches must be in \[0, 3\]"):
            plan.position_after(done)


# State

STATE = PlanState(
    seed=7,
    epoch=3,
    position=40,
    num_samples=100,
    shuffle=Shuffle("window", 64, 8, ramp=True),
    fingerprint="ab",
)


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**64 - 1])
@pytest.mark.parametrize("fingerprint", ["", "f" * 128, '"' * 128])
def test_a_state_survives_json_and_stays_small(seed, fingerprint):
    most = 2**63 - 1
    state = PlanState(
        seed=seed,
        epoch=most,
        position=most,
        num_samples=most,
        shuffle=Shuffle("window", 2**31 - 1, 4096, 1 / 3),
        fingerprint=fingerprint,
    )
    text = json.dumps(state.to_json())
    assert PlanState.from_json(json.loads(text)) == state
    assert len(text) < 1024


def test_the_states_json_is_pinned():
    assert STATE.to_json() == {
        "version": 4,
        "seed": 7,
        "epoch": 3,
        "position": 40,
        "num_samples": 100,
        "shuffle": {
            "kind": "window",
            "window_blocks": 64,
            "canonical_nodes": 8,
            "exchange": 1.0,
            "ramp": True,
            "source_windows": [],
        },
        "fingerprint": "ab",
        "batching": None,
        "sources": None,
        "weights": None,
        "data": None,
        "passed": None,
    }


def test_a_states_keys_are_the_same_whatever_it_holds():
    """torch.distributed.checkpoint loads by the keys of the state that the loader has at first."""
    state = replace(
        STATE,
        batching={"kind": "packed"},
        sources=[1, 2],
        weights={"steps": [[0, 6, "1/2 1/2"]]},
        data={"data": "mixture", "num_sources": 2, "sources": "47:1a2b3c 20:4d5e6f"},
    )
    assert list(state.to_json()) == list(STATE.to_json())
    assert PlanState.from_json(state.to_json()) == state
    of_before = state.to_json() | {"batching": {"kind": "packed"}, "weights": {"steps": [[0, 6, "1/2 1/2"]]}}
    assert PlanState.from_json(of_before) == state


def test_a_state_rebuilds_the_order_it_was_made_with():
    table = [5] * 100
    order = Order(table, Shuffle().resolved(16), seed=7, epoch=3)
    saved = replace(STATE, position=40, num_samples=order.num_samples, shuffle=order.shuffle).to_json()
    state = PlanState.from_json(json.loads(json.dumps(saved)))
    again = Order(table, state.shuffle, seed=state.seed, epoch=state.epoch)
    everywhere = np.arange(500)
    assert np.array_equal(again.samples(everywhere), order.samples(everywhere))


def test_json_that_is_no_state_is_refused():
    for value, says in (([], "must be an object, got list"), ({}, "version None")):
        with pytest.raises(ValueError, match=says):
            PlanState.from_json(value)
    lacking = STATE.to_json()
    del lacking["epoch"], lacking["seed"]
    with pytest.raises(ValueError, match="the state lacks epoch, seed"):
        PlanState.from_json(lacking)


@given(st.integers(1, 400), st.integers(1, 12), small, st.integers(1, 8), st.data())
def test_whole_lanes_spell_out_what_a_rank_takes_of_full_batches(n, batch_size, world_size, lanes, data):
    order = order_of(n, lanes=lanes)
    start = data.draw(st.integers(0, n))
    for plan in plans_of(order, batch_size, world_size, "drop", start=start):
        for batch in range(plan.num_batches):
            found = plan.batch_plan.whole_lanes(batch)
            if found is None:
                assert (
                    plan.batch_plan.global_batch_size % lanes
                    or batch_size * lanes % plan.batch_plan.global_batch_size
                )
                continue
            own, depths, each = found
            spelled = (own[:, None] + (depths[:, None] + np.arange(each)) * lanes).reshape(-1)
            assert spelled.tolist() == plan.positions(batch, batch + 1)[0].tolist()
