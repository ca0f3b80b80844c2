"""Epochs with classes in other shares: how often each sample comes, and where."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, strategies as st

from sharding.order.balanced import Balance, BalancedOrder, drawn_of_classes
from sharding.order.selection import Selection
from sharding.order.shuffle import Shuffle

SHUFFLES = st.sampled_from(
    [Shuffle("window", 2), Shuffle("window", 4, 3), Shuffle("full"), Shuffle("blocks", 3), Shuffle("none")]
)
WEIGHTS = st.lists(st.fractions(0, 5, max_denominator=7), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 1000), WEIGHTS)
def test_an_epoch_is_shared_out_by_weights_to_a_sample(num_samples: int, weights: list[Fraction]) -> None:
    drawn = drawn_of_classes(num_samples, weights)
    assert drawn.sum() == num_samples
    for count, weight in zip(drawn.tolist(), weights, strict=True):
        assert abs(count - weight * num_samples / sum(weights)) < 1


@st.composite
def balances(draw: st.DrawFn) -> tuple[Selection, Balance, list[int], list[int]]:
    """Some samples of blocks, their balance, classes and how many of each an epoch has."""
    total = np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)))
    size = int(total.sum())
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    selection = Selection.whole(total).at(np.flatnonzero(mask))
    classes = [n % 3 for n in draw(st.permutations(range(len(selection))))]
    most = max(classes, default=0) + 1
    drawn = draw(st.lists(st.integers(0, 20), min_size=most, max_size=most))
    return selection, Balance(np.array(classes, np.int32), np.array(drawn)), classes, drawn


@given(balances(), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 40))
def test_each_sample_of_a_class_comes_as_often_as_any_in_an_epoch_and_over_epochs(
    made: tuple[Selection, Balance, list[int], list[int]], seed: int, epoch: int
) -> None:
    _, balance, classes, drawn = made
    for num_epochs in (1, 5):
        times = sum(balance.times(seed, epoch + e) for e in range(num_epochs))
        for own, count in enumerate(drawn if classes else ()):
            of_class = np.asarray(times)[np.array(classes) == own]
            assert of_class.sum() == num_epochs * count
            assert np.ptp(of_class) <= 1


@given(balances(), SHUFFLES, st.integers(0, 99), st.integers(0, 9))
def test_an_order_has_each_sample_as_often_and_each_block_once(
    made: tuple[Selection, Balance, list[int], list[int]], shuffle: Shuffle, seed: int, epoch: int
) -> None:
    selection, balance, _, _ = made
    times = balance.times(seed, epoch)
    order = BalancedOrder(selection, balance, shuffle, seed=seed, epoch=epoch)
    positions = np.arange(order.num_samples)
    samples = order.samples(positions)
    assert np.bincount(samples, minlength=len(times)).tolist() == times.tolist()
    blocks, rows = selection.locate(samples)
    assert [each.tolist() for each in order.rows_at(positions)] == [blocks.tolist(), rows.tolist()]
    in_order = [part for _, part in order.in_order()]
    assert sorted(np.concatenate([*in_order, samples[:0]]).tolist()) == sorted(samples.tolist())
    if shuffle.kind == "full":
        return
    windows, indices = order.locate(positions)
    for window in range(order.num_windows):
        at = windows == window
        ordinal, row = order.window_samples(window, indices[at])
        assert order.window_blocks(window)[ordinal].tolist() == blocks[at].tolist()
        assert row.tolist() == rows[at].tolist()
    if order.num_lanes == 1:  # else a block may be cut, as in any order
        assert len(np.unique(blocks)) == len(order.table.read_block)


def test_epochs_and_seeds_draw_other_samples_of_a_large_class() -> None:
    balance = Balance(np.zeros(100, np.int32), np.array([30]))
    times = [balance.times(seed, epoch).tolist() for seed in range(2) for epoch in range(3)]
    assert len({*map(tuple, times)}) == 6
    assert balance.times(0, 1).tolist() == times[1]
