"""Dealing blocks to lanes: balance, exact cuts, and how many blocks change lane between epochs."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.order.lanes import cut_lanes, deal_evenly, deal_with_exchange, lane_bounds
from sharding.order.order import Order
from sharding.order.permutations import mix_key
from sharding.order.shuffle import Shuffle

sizes = st.lists(st.integers(1, 30), max_size=60).map(lambda table: np.array(table, np.int64))
lanes = st.integers(1, 12)


def loads(table, lane, num_lanes):
    return np.bincount(lane, table, num_lanes)


@given(st.integers(0, 1000), lanes)
def test_a_lane_is_every_lth_position(n, num_lanes):
    expected = [len(range(lane, n, num_lanes)) for lane in range(num_lanes)]
    assert np.diff(lane_bounds(n, num_lanes)).tolist() == expected


@given(sizes, lanes)
def test_lanes_never_differ_by_more_than_the_largest_block(table, num_lanes):
    lane = deal_evenly(table, num_lanes)
    for done in range(len(table) + 1):
        load = loads(table[:done], lane[:done], num_lanes)
        assert load.max() - load.min() <= max(table[:done], default=0)


@given(sizes, lanes)
def test_each_block_goes_to_the_first_lane_with_fewest_samples(table, num_lanes):
    load, expected = [0] * num_lanes, []
    for size in table.tolist():
        expected.append(load.index(min(load)))
        load[expected[-1]] += size
    assert deal_evenly(table, num_lanes).tolist() == expected


def test_blocks_of_one_size_are_dealt_round():
    assert deal_evenly(np.full(7, 5), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_dealing_goes_on_over_chunks():
    table = 1 + np.arange(70_000) * 7 % 5  # more blocks than are dealt at a time
    lane = deal_evenly(table, 4)
    load = np.stack([np.cumsum(np.where(lane == number, table, 0)) for number in range(4)])
    assert (load.max(axis=0) - load.min(axis=0)).max() <= 5


@given(sizes, lanes, st.data())
def test_cut_lanes_are_equal_hold_each_sample_once_and_cut_few_blocks(table, num_lanes, data):
    lane = data.draw(st.lists(st.integers(0, num_lanes - 1), min_size=len(table), max_size=len(table)))
    rotation = data.draw(st.integers(0, num_lanes - 1))
    cut = cut_lanes(table, np.array(lane, np.uint16), num_lanes, rotation)
    size = np.diff(cut.start)
    assert size.min(initial=1) > 0
    assert cut.bounds.tolist() == lane_bounds(int(table.sum()), num_lanes).tolist()
    assert set(cut.bounds.tolist()) <= set(cut.start.tolist())
    samples = [(t, r + i) for t, r, k in zip(cut.position, cut.row, size, strict=True) for i in range(k)]
    assert sorted(samples) == [(t, r) for t, k in enumerate(table) for r in range(k)]
    assert len(size) - len(table) <= 2 * (num_lanes - 1)


@given(sizes, lanes)
def test_evenly_dealt_lanes_cut_at_most_one_block_less_than_lanes(table, num_lanes):
    cut = cut_lanes(table, deal_evenly(table, num_lanes), num_lanes)
    assert len(cut.position) - len(table) <= num_lanes - 1


@given(lanes, st.integers(0, 9), st.integers(1, 9))
def test_equal_blocks_that_the_lanes_divide_are_never_cut(num_lanes, rounds, size):
    table = np.full(rounds * num_lanes, size)
    cut = cut_lanes(table, deal_evenly(table, num_lanes), num_lanes, rotation=num_lanes - 1)
    assert np.diff(cut.start).tolist() == table.tolist()


# Exchange

KEYS = {"seed": 5}


@given(sizes, lanes, st.sampled_from([0, 0.1, 0.5, 1]), st.integers(0, 2**62))
def test_lanes_with_exchange_differ_by_less_than_two_blocks(table, num_lanes, share, epoch):
    load = loads(table, deal_with_exchange(table, num_lanes, share, seed=5, epoch=epoch), num_lanes)
    assert load.max() - load.min() < 2 * max(table, default=1)


def test_the_lanes_lengths_do_not_drift_apart_with_the_number_of_blocks():
    table = 1 + np.arange(20_000) * 31 % 97
    load = loads(table, deal_with_exchange(table, 8, 0.5, seed=5, epoch=3), 8)
    assert load.max() - load.min() <= 97


@pytest.mark.parametrize("share", [0, 0.1, 0.25, 0.5, 1])
@pytest.mark.parametrize("num_lanes", [2, 6, 8])
def test_at_most_the_share_changes_lane_from_one_epoch_to_the_next(share, num_lanes):
    table = 1 + np.arange(2400) * 31 % 50
    before, moved = deal_with_exchange(table, num_lanes, share, seed=5, epoch=0), []
    for epoch in range(1, 25):
        after = deal_with_exchange(table, num_lanes, share, seed=5, epoch=epoch)
        moved.append(float((after != before).mean()))
        before = after
    assert max(moved) <= share + num_lanes / len(table)
    assert np.mean(moved) >= share * 0.4


def test_no_exchange_keeps_every_block_in_its_lane_for_ever():
    table = np.full(100, 3)
    first = deal_with_exchange(table, 8, 0, seed=5, epoch=0)
    assert np.array_equal(first, deal_with_exchange(table, 8, 0.0, seed=5, epoch=2**62))
    assert not np.array_equal(first, deal_with_exchange(table, 8, 0, seed=6, epoch=0))


def test_a_share_that_is_no_binary_fraction_adds_up_over_epochs():
    """A tenth of the groups at a time: after ten epochs each has drawn once, in any run of ten."""
    table = np.full(8000, 1)
    before = deal_with_exchange(table, 8, 0.1, seed=5, epoch=90)
    seen = np.zeros(8000, bool)
    for epoch in range(91, 101):
        after = deal_with_exchange(table, 8, 0.1, seed=5, epoch=epoch)
        assert not (seen & (after != before)).any()
        seen |= after != before
        before = after
    assert seen.mean() > 0.4


def test_blocks_move_to_near_lanes_first():
    """In half of the draws only within pairs of lanes, in three quarters within fours."""
    table = np.full(64_000, 7)
    before = deal_with_exchange(table, 8, 0.25, seed=5, epoch=40).astype(int)
    after = deal_with_exchange(table, 8, 0.25, seed=5, epoch=41).astype(int)
    moved = before != after
    within_pair = (before // 2 == after // 2)[moved].mean()
    within_four = (before // 4 == after // 4)[moved].mean()
    assert within_pair >= 0.3
    assert within_four >= 0.65


@pytest.mark.parametrize("num_lanes", [5, 8])
def test_in_the_long_run_a_block_is_in_every_lane_equally_often(num_lanes):
    table = np.full(10 * num_lanes, 3)
    seen = np.zeros((len(table), num_lanes))
    for epoch in range(0, 64 * 100, 64):  # far enough apart to be independent
        lane = deal_with_exchange(table, num_lanes, 0.5, seed=mix_key(9), epoch=epoch)
        seen[np.arange(len(table)), lane] += 1
    mean = 100 / num_lanes
    statistic = ((seen - mean) ** 2 / mean).sum()
    freedom = len(table) * (num_lanes - 1)
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("num_blocks", [256, 512, 500])
def test_each_lane_takes_blocks_from_all_parts_of_the_dataset(num_blocks):
    order = Order([10] * num_blocks, Shuffle("window", 64, 8), seed=1, epoch=0)
    samples = order.samples(np.arange(order.num_samples))
    for lane in range(8):
        parts = np.bincount(samples[lane::8] * 8 // order.num_samples, minlength=8)
        assert np.count_nonzero(parts) >= 6
