"""Shard indices, and reads by more than one node, against blocks counted sample by sample."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.placement import read_amplification, reads_by_node, shard_indices
from sharding.plan.plan import EpochPlan

tables = st.lists(st.integers(1, 8), min_size=1, max_size=50)


def blocks_read(order, table, nodes, batch_size):
    """Blocks of which each node's ranks get samples."""
    first, read = np.cumsum(table) - table, [set() for _ in range(max(nodes) + 1)]
    for shard_index, node in enumerate(nodes):
        made = {"batch_size": batch_size, "world_size": len(nodes), "tail": "drop"}
        plan = EpochPlan(order, rank=shard_index, **made)
        samples = order.samples(plan.positions(0, plan.num_batches)[0])
        read[node] |= set((np.searchsorted(first, samples, side="right") - 1).tolist())
    return [len(blocks) for blocks in read]


def nodes_of(*ranks_per_node):
    return np.repeat(np.arange(len(ranks_per_node)), ranks_per_node).tolist()


@given(
    tables,
    st.integers(1, 9),
    st.sampled_from([0, 0.5, 1]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(["window", "blocks"]),
)
def test_reads_are_never_counted_too_low(table, lanes, share, ranks, batch_size, kind):
    order = Order(table, Shuffle(kind, max(8, lanes), lanes, share), seed=1, epoch=3)
    nodes = nodes_of(*ranks)
    counted = reads_by_node(order, nodes, batch_size, cost=np.ones(len(table), int)).tolist()
    read = blocks_read(order, table, nodes, batch_size)
    assert all(c >= r for c, r in zip(counted, read, strict=True))
    if kind == "blocks" and order.num_samples % (batch_size * len(nodes)) == 0:
        assert counted == read


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_block_is_read_by_one_node_where_nodes_divide_the_lanes(num_nodes, ranks):
    table = [40] * 160
    order = Order(table, Shuffle("window", 32), seed=2, epoch=1)
    nodes = nodes_of(*[ranks] * num_nodes)
    assert reads_by_node(order, nodes, 8, cost=np.ones(160, int)).sum() == 160
    assert sum(blocks_read(order, table, nodes, 8)) == 160


@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_blocks_of_unlike_sizes_cost_less_than_one_read_a_lane_more(share):
    table = 20 + np.arange(3000) * 17 % 40
    order = Order(table, Shuffle("window", 64, 8, share), seed=2, epoch=1)
    for num_nodes in (2, 4, 8):
        assert reads_by_node(order, nodes_of(*[2] * num_nodes), 8, cost=np.ones(3000, int)).sum() <= 3000 + 7


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 12))
def test_what_uneven_worlds_cost_is_bounded(ranks, lanes, batch_size):
    table = 1 + np.arange(300) * 7 % 9
    order = Order(table, Shuffle("window", 16, lanes), seed=2, epoch=1)
    reads = reads_by_node(order, nodes_of(*ranks), batch_size, cost=np.ones(300, int)).sum()
    group = batch_size * sum(ranks)
    if group % lanes and group < lanes**2:
        return  # a boundary wanders over more than two lanes
    in_a_lane = max(np.diff(np.searchsorted(order.table.piece_start, order.table.lane_bounds)))
    assert reads <= 300 + (lanes - 1) + (len(ranks) - 1) * in_a_lane * (2 if group % lanes else 1)


def test_reads_are_weighed_by_their_cost():
    order = Order([4] * 16, Shuffle("window", 8), seed=0, epoch=0)
    nbytes = np.arange(16) * 100
    assert reads_by_node(order, nodes_of(1, 1), 8, cost=nbytes).sum() == nbytes.sum()


@given(
    tables,
    st.sampled_from([1, 1, 2, 8]),
    st.integers(1, 7),
    st.integers(1, 6),
    st.sampled_from(["none", "blocks", "window"]),
)
def test_amplification_is_what_all_ranks_read_over_what_there_is(table, lanes, ranks, batch_size, kind):
    order = Order(table, Shuffle(kind, 8, lanes), seed=1, epoch=0)
    cost = 1 + np.arange(len(table)) % 5
    found = read_amplification(order, batch_size, ranks, cost=cost)
    counted = reads_by_node(order, range(ranks), batch_size, cost=cost).sum() / cost.sum()
    if lanes == 1:
        assert found == pytest.approx(counted)
    else:  # a block that is cut between two lanes counts in both
        assert found >= counted - 1e-9
        if batch_size * ranks % lanes == 0:
            assert found <= counted + (lanes - 1) * ranks * cost.max() / cost.sum() + 1e-9


def test_in_file_order_every_rank_reads_every_large_block_and_a_shuffle_reads_it_once():
    table, cost = [1000] * 64, np.ones(64, int)
    for ranks in (1, 2, 4, 8):
        in_order = Order(table, Shuffle("none"), seed=0, epoch=0)
        assert read_amplification(in_order, 16, ranks, cost=cost) == ranks
        assert read_amplification(in_order, 1000, ranks, cost=cost) == 1
        assert read_amplification(Order(table, Shuffle("window"), seed=0, epoch=0), 16, ranks, cost=cost) == 1
    with pytest.raises(ValueError, match="reads samples, not blocks"):
        read_amplification(Order(table, Shuffle("full"), seed=0, epoch=0), 16, 2, cost=cost)


# Shard indices


def test_ranks_are_seated_rack_by_rack_and_node_by_node():
    # Ranks dealt round over nodes b, a, c; a and b stand in one rack.
    places = [("x", "b"), ("x", "a"), ("y", "c"), ("x", "b"), ("x", "a"), ("y", "c")]
    assert shard_indices(places) == [0, 2, 4, 1, 3, 5]


def test_ranks_in_node_order_keep_their_numbers_however_many_a_node_has():
    assert shard_indices([(node,) for node in "aabbbbc"]) == list(range(7))
    assert shard_indices([("rack", "node", numa) for numa in (0, 1, 0, 1)]) == [0, 2, 1, 3]
    assert shard_indices([]) == []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=20))
def test_shard_indices_are_a_permutation_in_which_nodes_and_racks_are_runs(places):
    got = shard_indices(places)
    assert sorted(got) == list(range(len(places)))
    by_index = [places[got.index(number)] for number in range(len(places))]
    for depth in (1, 2):
        runs = [p[:depth] for i, p in enumerate(by_index) if i == 0 or by_index[i - 1][:depth] != p[:depth]]
        assert len(runs) == len(set(runs))
