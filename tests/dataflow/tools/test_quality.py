"""Quality figures against plain Python that goes through an epoch sample by sample."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataflow.tools.inspect.figures import figures_of
from dataflow.tools.inspect.quality import (
    distinct_per_batch,
    distinct_per_node,
    label_dispersion,
    lag1_correlation,
    neighbour_distances,
    stretch_of,
)
from dataflow.tools.inspect.read_cost import (
    amplification,
    first_batch_bytes,
    open_bytes,
    reads_of,
    windows_of,
)
from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.order.permutations import seeded_permutation
from sharding.order.shuffle import Shuffle
from sharding.plan.plan import EpochPlan

TOGETHER = 7


def table_of(counts, blocks_per_shard=3):
    counts = np.asarray(counts, np.int64)
    n = len(counts)
    length = 100 * counts + np.arange(n)
    shard = (np.arange(n) // blocks_per_shard).astype(np.int32)
    first = np.cumsum(counts) - counts
    return BlockTable(
        shard=shard,
        offset=np.zeros(n, np.int64),
        length=length,
        nbytes=2 * length,
        num_samples=counts,
        first_sample=first,
    )


def plans_of(table, kind, window_blocks, batch_size, ranks, tail, seed=0, lanes=None):
    shuffle = Shuffle("full") if kind == "full" else Shuffle(kind, max(window_blocks, lanes or 1), lanes)
    order = Order(table.num_samples, shuffle, seed=seed, epoch=1)
    return [
        EpochPlan(order, batch_size=batch_size, rank=r, world_size=ranks, tail=tail) for r in range(ranks)
    ]


@st.composite
def worlds(draw):
    table = table_of(draw(st.lists(st.integers(0, 6), min_size=1, max_size=40).filter(any)))
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    nodes = draw(st.sampled_from([n for n in (1, 2, 3, 4) if ranks % n == 0]))
    kind = draw(st.sampled_from(["window", "full", "blocks", "none"]))
    tail = draw(st.sampled_from(["pad", "even", "uneven"]))
    window_blocks, batch_size, seed = (draw(st.integers(1, 12)) for _ in range(3))
    lanes = draw(st.sampled_from([None, 1, 2, 3, 8]))
    plans = plans_of(table, kind, window_blocks, batch_size, ranks, tail, seed, lanes)
    return table, plans, [rank // (ranks // nodes) for rank in range(ranks)]


def plain_rows(plans, nodes, table, batches=None):
    """(batch, node, sample, block) of every delivery that is no padding, in order."""
    blocks = [b for b, count in enumerate(table.num_samples) for _ in range(count)]
    rows, seen = [], set()
    for batch in range(plans[0].num_global_batches):
        for plan, node in zip(plans, nodes, strict=True):
            if batch >= plan.num_batches:
                continue
            for position in plan.positions(batch, batch + 1)[0].tolist():
                if position in seen:
                    continue
                seen.add(position)
                sample = int(plan.order.samples(np.array([position]))[0])
                window = int(windows_of(plan.order, np.array([position]), TOGETHER)[0])
                if batches is None or batches[0] <= batch < batches[1]:
                    rows.append((batch, node, sample, blocks[sample], window))
    return rows


@given(worlds())
def test_a_stretch_is_what_the_ranks_deliver(world):
    table, plans, nodes = world
    stretch = stretch_of(plans, nodes, table)
    columns = (stretch.batch, stretch.node, stretch.sample, stretch.block)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == [
        row[:4] for row in plain_rows(plans, nodes, table)
    ]
    assert stretch.whole


@given(worlds(), st.integers(1, 20))
def test_a_long_epoch_is_sampled_from_its_middle(world, max_samples):
    table, plans, nodes = world
    stretch = stretch_of(plans, nodes, table, max_samples=max_samples)
    first, last, total = stretch.first_batch, stretch.last_batch, stretch.num_batches
    assert last - first == min(total, max(1, max_samples // plans[0].batch_plan.global_batch_size))
    assert abs(first - (total - last)) <= 1
    assert stretch.sample.tolist() == [row[2] for row in plain_rows(plans, nodes, table, (first, last))]


@given(worlds())
def test_distinct_blocks_and_shards_are_those_of_each_batch(world):
    table, plans, nodes = world
    stretch = stretch_of(plans, nodes, table)
    rows = plain_rows(plans, nodes, table)
    for of_row, of_plain in (
        (stretch.block, lambda row: row[3]),
        (table.shard[stretch.block], lambda row: int(table.shard[row[3]])),
    ):
        expected = [set() for _ in range(stretch.num_batches)]
        for row in rows:
            expected[row[0]].add(of_plain(row))
        assert distinct_per_batch(stretch, of_row).tolist() == [len(found) for found in expected]
        parts = {}
        for row in rows:
            parts.setdefault((row[0], row[1]), set()).add(of_plain(row))
        assert distinct_per_node(stretch, of_row).tolist() == [len(parts[part]) for part in sorted(parts)]


@given(worlds())
def test_neighbour_distances_are_shares_of_the_dataset(world):
    table, plans, nodes = world
    samples = [row[2] for row in plain_rows(plans, nodes, table)]
    expected = [abs(b - a) / len(samples) for a, b in itertools.pairwise(samples)]
    assert neighbour_distances(stretch_of(plans, nodes, table)).tolist() == pytest.approx(expected)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=50).filter(lambda v: len(set(v)) > 1))
def test_label_correlation_is_that_of_one_hot_labels(values):
    hot = np.eye(4)[values]
    centred = hot - hot.mean(0)
    share = hot.mean(0)
    equal = np.mean([a == b for a, b in itertools.pairwise(values)])
    assert lag1_correlation(np.array(values)) == pytest.approx(
        (equal - (share**2).sum()) / (centred**2).mean(0).sum()
    )


def test_label_correlation_at_its_extremes():
    assert lag1_correlation(np.repeat([0, 1], 5000)) == pytest.approx(1, abs=1e-3)
    assert lag1_correlation(np.tile([0, 1], 5000)) == pytest.approx(-1, abs=1e-3)
    draws = seeded_permutation(1 << 16, 1) % 7
    assert abs(lag1_correlation(draws)) < 0.02
    assert np.isnan(lag1_correlation(np.zeros(9, int)))
    assert np.isnan(lag1_correlation(np.zeros(1, int)))
    assert lag1_correlation(np.repeat([0.0, 1.0], 5000)) == pytest.approx(1, abs=1e-3)


@given(worlds(), st.integers(2, 4))
def test_dispersion_is_the_mean_chi_square_per_degree_of_freedom(world, num_labels):
    table, plans, nodes = world
    total = plans[0].order.num_samples
    labels = np.arange(total) * num_labels // total
    stretch = stretch_of(plans, nodes, table)
    share = Counter(labels.tolist())
    if len(share) < 2:
        assert np.isnan(label_dispersion(stretch, labels))
        return
    batches = {}
    for batch, _, sample, *_ in plain_rows(plans, nodes, table):
        batches.setdefault(batch, []).append(int(labels[sample]))
    found = []
    for held in batches.values():
        due = {label: len(held) * count / total for label, count in share.items()}
        found.append(sum((held.count(label) - d) ** 2 / d for label, d in due.items()))
    assert label_dispersion(stretch, labels) == pytest.approx(np.mean(found) / (len(share) - 1))


def test_dispersion_is_one_for_a_full_shuffle_and_the_batch_size_for_sorted_labels():
    table = table_of([10] * 2000)
    labels = np.arange(20_000) // 2000
    full = stretch_of(plans_of(table, "full", None, 50, 1, "drop"), [0], table)
    assert label_dispersion(full, labels) == pytest.approx(1, abs=0.1)
    in_order = stretch_of(plans_of(table, "none", 1, 50, 1, "drop"), [0], table)
    assert label_dispersion(in_order, labels) == pytest.approx(50)


# Cost of reading


@given(worlds(), st.booleans())
def test_each_node_reads_a_block_once_a_window(world, located):
    table, plans, nodes = world
    stretch = stretch_of(plans, nodes, table)
    reads = reads_of(stretch, table, located=located, together=TOGETHER)
    rows = plain_rows(plans, nodes, table)
    if located and plans[0].order.shuffle.kind == "full":
        assert len(reads.block) == len(rows)
        return
    needed = list(dict.fromkeys((row[1], row[4], row[3]) for row in rows))
    columns = (reads.node, reads.window, reads.block)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == needed
    served = Counter((row[1], row[4], row[3]) for row in rows)
    assert reads.samples.tolist() == [served[one] for one in needed]
    assert reads.length.tolist() == [int(table.length[block]) for _, _, block in needed]


def amplified(plans, nodes, table, **reading):
    stretch = stretch_of(plans, nodes, table)
    reads = reads_of(stretch, table, **{"located": False} | reading)
    return amplification(stretch, reads, table, plans[0].batch_plan.batch_size)


@pytest.mark.parametrize("kind", ["window", "blocks", "none"])
@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_amplification_is_what_a_node_reads_over_its_share(kind, lanes):
    table = table_of([8] * 60)
    plans, nodes = plans_of(table, kind, 12, 6, 4, "drop", lanes=lanes), [0, 0, 1, 1]
    touched = {(row[1], row[3]) for row in plain_rows(plans, nodes, table)}
    read = [sum(int(table.length[block]) for at, block in touched if at == node) for node in (0, 1)]
    found = amplified(plans, nodes, table)
    expected = [2 * nbytes / int(table.length.sum()) for nbytes in read]
    # Where samples are mixed, every block of a lane's window counts for those who share the lane.
    assert found.tolist() == pytest.approx(expected, rel=0.05 if kind == "window" else 1e-6)
    assert (lanes == 4) == (found.sum() == pytest.approx(2))


def test_a_full_shuffle_reads_no_byte_twice_where_samples_are_located_and_many_where_not():
    table = table_of([10] * 400)
    plans = plans_of(table, "full", None, 20, 1, "drop")
    assert amplified(plans, [0], table, located=True) == pytest.approx([1], rel=0.01)
    # 40 samples touch 38 of 400 blocks, for 4 blocks' bytes
    assert amplified(plans, [0], table, together=40) == pytest.approx([9.6], rel=0.05)


@given(worlds())
def test_open_bytes_are_those_of_windows_between_first_and_last_use(world):
    table, plans, nodes = world
    stretch = stretch_of(plans, nodes, table)
    reads = reads_of(stretch, table, located=False, together=TOGETHER)
    rows = plain_rows(plans, nodes, table)
    for node in set(nodes):
        expected = [0] * stretch.num_batches
        for window in {row[4] for row in rows if row[1] == node}:
            mine = [row for row in rows if row[1] == node and row[4] == window]
            held = sum(2 * int(table.length[block]) for block in {row[3] for row in mine})
            for batch in range(mine[0][0], mine[-1][0] + 1):
                expected[batch] += held
        assert open_bytes(stretch, reads, node).tolist() == expected


@given(worlds())
def test_the_first_batch_waits_for_what_a_node_takes_of_its_windows(world):
    table, plans, nodes = world
    rows = plain_rows(plans, nodes, table)
    for node in set(nodes):
        own = [plan for plan, at in zip(plans, nodes, strict=True) if at == node]
        first = np.concatenate([plan.positions(0, min(1, plan.num_batches))[0] for plan in own])
        if not len(first):
            continue
        windows = set(windows_of(plans[0].order, first, TOGETHER).tolist())
        needed = {row[3] for row in rows if row[1] == node and row[4] in windows}
        if max(plan.num_padded for plan in plans) == 0:
            found = first_batch_bytes(own, table, located=False, together=TOGETHER)
            assert found == sum(int(table.length[block]) for block in needed)


def test_the_first_batch_of_a_node_waits_for_its_lanes_only():
    table = table_of([10] * 400)
    plans = plans_of(table, "window", 32, 8, 4, "drop", lanes=8)
    order = plans[0].order
    whole = int(table.length[order.window_blocks(0)].sum())
    each = [first_batch_bytes([plan], table, located=False) for plan in plans]
    assert sum(each) == first_batch_bytes(plans, table, located=False)
    assert whole / 4 == pytest.approx(each[0], rel=0.25)


def test_the_first_batch_of_a_full_shuffle_waits_for_samples_or_for_their_blocks():
    table = table_of([10] * 400)
    full = plans_of(table, "full", None, 20, 1, "drop")
    exact = first_batch_bytes(full, table, located=True, together=30)
    samples = full[0].order.samples(np.arange(30))
    assert exact == pytest.approx(table.length[samples // 10].sum() / 10, abs=1)
    blocks = first_batch_bytes(full, table, located=False, together=30)
    assert blocks == int(table.length[np.unique(samples // 10)].sum())


# Together


def test_all_figures_are_json_types_and_windows_cost_less_than_a_full_shuffle():
    table = table_of([10] * 400)
    labels = np.arange(4000) // 400
    found = {}
    for kind in ("window", "full"):
        plans = plans_of(table, kind, 32, 16, 4, "pad")
        targets = {"shard": table.shard.astype(np.int64)}
        kwargs = {"labels": labels, "located": True}
        found[kind] = figures_of(plans, [0, 0, 1, 1], table, targets, **kwargs).figures
    window, full = found["window"], found["full"]
    assert window.cache_bytes < full.cache_bytes == int(table.length.sum())
    assert window.requests_per_1000_samples < full.requests_per_1000_samples
    assert window.blocks_per_batch < full.blocks_per_batch
    assert 0.5 < window.label_dispersion < 1.4
    assert full.label_correlation == pytest.approx(0, abs=0.03)
    assert window.hot_spots["shard"].ahead == 32
    assert window.amplification == window.rank_amplification == 1
    assert full.rank_amplification is None


@pytest.mark.parametrize(
    ("nodes", "tail", "says"),
    [([0], "drop", "one node a rank, got 1 nodes for 2 ranks"), ([0, 0], "drop", "the epoch has no batch")],
)
def test_what_cannot_be_measured_is_refused(nodes, tail, says):
    table = table_of([3])
    with pytest.raises(ValueError, match=says):
        stretch_of(plans_of(table, "none", 1, 5, 2, tail), nodes, table)


def test_a_huge_plan_is_sampled():
    table = table_of(np.full(10**5, 1000), blocks_per_shard=10)
    plans = plans_of(table, "window", 32, 256, 8, "drop")
    stretch = stretch_of(plans, [0] * 4 + [1] * 4, table, max_samples=200_000)
    assert stretch.num_batches == 10**8 // 2048
    assert len(stretch.sample) <= 200_000
