"""When blocks are needed next: as a walk through the batches of all epochs says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.next_use import NOT_READ, LaneRange, lanes_of_shard_indices, next_uses, windows_of_blocks
from sharding.plan.plan import EpochPlan


def order_of(counts: list[int], lanes: int) -> Order:
    return Order(counts, Shuffle("window", canonical_nodes=lanes, window_blocks=8), seed=3, epoch=0)


SAMPLES = 16


def read_by(order: Order, ranks: range, world: int, batch: int) -> dict[int, int]:
    """Block (of 16 samples) -> the first window in which any of these ranks takes a sample of it."""
    first: dict[int, int] = {}
    for rank in ranks:
        plan = EpochPlan(order, batch_size=batch, rank=rank, world_size=world, tail="drop")
        positions = plan.positions(0, plan.num_batches)[0]
        blocks = order.samples(positions) // SAMPLES
        for block, window in zip(blocks.tolist(), order.locate(positions)[0].tolist(), strict=True):
            first[block] = min(first.get(block, window), window)
    return first


@given(
    st.integers(20, 60),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(0, 1, 1), (0, 1, 2), (1, 2, 2), (2, 4, 4), (0, 3, 6), (4, 8, 8)]),
)
def test_a_block_is_needed_by_the_lanes_of_a_machine_when_its_ranks_take_it(
    num_blocks: int, lanes: int, ranks: tuple[int, int, int]
) -> None:
    first, end, world = ranks
    order = order_of([SAMPLES] * num_blocks, lanes)
    batch = 8
    mine = lanes_of_shard_indices(range(first, end), world, lanes, batch)
    windows = windows_of_blocks(order, num_blocks, mine)
    for block, window in read_by(order, range(first, end), world, batch).items():
        assert NOT_READ < windows[block] <= window
    if not mine.shared and lanes % world == 0:  # then these lanes are nobody else's
        others = read_by(order, range(first), world, batch) | read_by(order, range(end, world), world, batch)
        own = read_by(order, range(first, end), world, batch)
        cut = sum(windows[block] != NOT_READ for block in others if block not in own)
        assert cut <= lanes


@pytest.mark.parametrize(
    ("shard_indices", "world", "lanes", "batch", "expected"),
    [
        (range(1), 1, 8, 4, LaneRange(0, 8, shared=False)),
        (range(2), 2, 8, 4, LaneRange(0, 8, shared=False)),
        (range(2, 4), 4, 8, 4, LaneRange(4, 8, shared=False)),
        (range(2), 2, 1, 4, LaneRange(0, 1, shared=True)),
        (range(8), 16, 8, 4, LaneRange(0, 4, shared=True)),
        (range(2), 2, 8, 3, LaneRange(0, 8, shared=True)),  # the lanes do not divide the batch
        (range(1), 3, 8, 8, LaneRange(0, 3, shared=False)),
    ],
)
def test_ranks_share_lanes_where_the_boundary_between_them_is_inside_one(
    shard_indices: range, world: int, lanes: int, batch: int, expected: LaneRange
) -> None:
    assert lanes_of_shard_indices(shard_indices, world, lanes, batch) == expected


def test_a_block_is_needed_in_this_epoch_else_in_the_next_else_never() -> None:
    this = (np.array([0, 1, 2, 3, NOT_READ]), 4)
    following = (np.array([2, NOT_READ, 0, 1, 3]), 4)
    blocks = np.arange(5)
    assert next_uses(blocks, (5, 2), this, following).tolist() == [6.5, np.inf, 5.5, 5.75, 6.75]
    assert next_uses(blocks, (5, 2), this, following, done=True).tolist() == [6.5, np.inf, 6.0, 6.25, 6.75]


def test_a_full_shuffle_needs_every_block_all_the_time() -> None:
    order = Order([SAMPLES] * 10, Shuffle("full"), seed=3, epoch=0)
    windows = windows_of_blocks(order, 10, LaneRange(0, 1, shared=False))
    assert windows.tolist() == [0] * 10
