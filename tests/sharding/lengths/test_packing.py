"""Packing against best-fit decreasing written out, and against first fit."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.errors import DataflowError
from sharding.lengths.batching import Packed
from sharding.lengths.cutting import best_fit_rows, pack, segments_of
from sharding.lengths.unit_plan import UnitPlanner
from sharding.lengths.units import stable_order
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

capacities = st.integers(1, 40)
documents = st.lists(st.integers(0, 90), max_size=60) | st.lists(st.integers(0, 30), min_size=20, max_size=60)


def best_fit_decreasing(lengths, capacity):
    """The room left in each row, ascending: longest first, into the fullest row with room."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fits = [i for i, room in enumerate(rooms) if room >= size]
        best = min(fits, key=rooms.__getitem__, default=None)
        if best is None:
            rooms.append(capacity - size)
        else:
            rooms[best] -= size
    return sorted(rooms)


def first_fit_rows(lengths, capacity):
    rooms = []
    for size in lengths:
        row = next((i for i, room in enumerate(rooms) if room >= size), None)
        if row is None:
            rooms.append(capacity - size)
        else:
            rooms[row] -= size
    return len(rooms)


def rows_of(units):
    """Each row as a list of (position, begin, length)."""
    p = units.segments
    flat = list(zip(p.position.tolist(), p.begin.tolist(), p.length.tolist(), strict=True))
    bounds = units.first.tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]


@given(st.lists(st.integers(1, 40), max_size=80), capacities)
def test_packing_by_classes_is_best_fit_decreasing(lengths, capacity):
    lengths = np.array([n for n in lengths if n <= capacity], np.int64)
    row, num_rows = best_fit_rows(lengths, capacity)
    rooms = capacity - np.bincount(row, lengths, num_rows).astype(int)
    assert sorted(rooms.tolist()) == best_fit_decreasing(lengths.tolist(), capacity)


@given(documents, capacities, st.integers(0, 2**64 - 1))
def test_every_token_is_in_exactly_one_piece(lengths, capacity, key):
    units = pack(np.array(lengths, np.int64), capacity, "split", key)
    seen = Counter(
        (position, token)
        for row in rows_of(units)
        for position, begin, length in row
        for token in range(begin, begin + length)
    )
    assert seen == Counter((i, token) for i, size in enumerate(lengths) for token in range(size))
    assert units.stats.tokens == sum(lengths)
    assert units.stats.truncated_tokens == units.stats.truncated == 0
    assert units.stats.split == sum(size > capacity for size in lengths)
    assert units.stats.empty == lengths.count(0)


@given(documents, capacities, st.sampled_from(["split", "truncate"]))
def test_rows_are_neither_empty_nor_too_full(lengths, capacity, overlong):
    units = pack(np.array(lengths, np.int64), capacity, overlong, 1)
    for row in rows_of(units):
        assert 1 <= sum(length for _, _, length in row) <= capacity
        assert all(length >= 1 for _, _, length in row)
        assert row == sorted(row)
    assert units.stats.capacity == len(units) * capacity
    assert units.stats.units == len(units)
    assert units.stats.segments == len(units.segments)


@given(documents, capacities)
def test_what_truncation_loses_is_counted(lengths, capacity):
    stats = pack(np.array(lengths, np.int64), capacity, "truncate", 1).stats
    assert stats.truncated == sum(size > capacity for size in lengths)
    assert stats.truncated_tokens == sum(max(0, size - capacity) for size in lengths)
    assert stats.tokens + stats.truncated_tokens == sum(lengths)


def test_too_long_a_sample_is_an_error_that_names_the_cure():
    with pytest.raises(DataflowError, match=r"sample of 9 elements.*length=8.*split.*truncate"):
        pack(np.array([3, 9]), 8, "error", 1)
    assert len(pack(np.array([3, 8]), 8, "error", 1)) == 2


def test_segments_of_a_split_document_are_full_rows_and_a_rest():
    pieces, stats = segments_of(np.array([2, 21, 0, 8]), 8, "split")
    assert pieces.position.tolist() == [0, 1, 1, 1, 3]
    assert pieces.begin.tolist() == [0, 0, 8, 16, 0]
    assert pieces.length.tolist() == [2, 8, 8, 5, 8]
    assert (stats.split, stats.empty) == (1, 1)


@given(documents, capacities)
def test_no_more_rows_than_best_fit_decreasing_may_take(lengths, capacity):
    """11/9 of any packing's rows, and one (Johnson 1974): adversaries may beat it by that much."""
    pieces, _ = segments_of(np.array(lengths, np.int64), capacity, "split")
    _, num_rows = best_fit_rows(pieces.length, capacity)
    assert num_rows <= first_fit_rows(pieces.length.tolist(), capacity) * 11 / 9 + 1


@pytest.mark.parametrize("capacity", [64, 512, 2048])
@pytest.mark.parametrize("seed", range(3))
def test_it_packs_no_worse_than_first_fit(capacity, seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.5, 1, 500).astype(np.int64), 1, capacity)
    _, num_rows = best_fit_rows(lengths, capacity)
    assert num_rows <= first_fit_rows(lengths.tolist(), capacity)


def test_rows_of_a_packing_window_of_a_million_tokens_are_full():
    for seed in range(3):
        lengths = np.random.default_rng(seed).lognormal(3.6, 1, 16_384).astype(np.int64) + 1
        assert 0.95e6 < lengths.sum() < 1.05e6
        assert pack(lengths, 2048, "split", 1).stats.efficiency >= 0.998


@pytest.mark.parametrize("length", [512, 2048, 8192, 32_768])
@pytest.mark.parametrize("num_samples", [7_000, 60_000])
def test_rows_of_small_datasets_are_full(num_samples, length):
    lengths = np.random.default_rng(0).lognormal(4.6, 1, num_samples).astype(np.int64) + 1
    order = Order([num_samples], Shuffle("none"), seed=0, epoch=0)
    stats = UnitPlanner(Packed(length), lengths=lengths).sequence(order).stats
    assert stats.efficiency >= min(0.995, 1 - 1 / stats.units)


def test_very_many_distinct_lengths_are_packed_by_classes():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 40_001))[:12_000]
    units = pack(lengths, 40_001, "split", 1)
    assert all(sum(length for _, _, length in row) <= 40_001 for row in rows_of(units))
    assert sorted(units.segments.length.tolist()) == sorted(lengths.tolist())
    assert units.stats.efficiency > 0.995


@given(st.lists(st.integers(1, 4000), max_size=40), st.integers(1, 3), st.sampled_from([1000, 2048, 4001]))
def test_free_rows_are_found_in_any_word(lengths, times, capacity):
    lengths = np.array([n for n in lengths * times if n <= capacity], np.int64)
    row, num_rows = best_fit_rows(lengths, capacity)
    rooms = capacity - np.bincount(row, lengths, num_rows).astype(int)
    assert sorted(rooms.tolist()) == best_fit_decreasing(lengths.tolist(), capacity)


def test_the_tightest_row_wins_across_words():
    row, num_rows = best_fit_rows(np.array([3900, 2600, 900]), 5000)
    assert (row.tolist(), num_rows) == ([0, 1, 0], 2)
    row, num_rows = best_fit_rows(np.array([900, 2600, 3900, 5000]), 5000)
    assert (row[0] == row[2], num_rows) == (True, 3)


def test_the_key_orders_rows_and_changes_nothing_else():
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    one, other = (pack(lengths, 64, "split", key) for key in (1, 2))
    assert rows_of(one) != rows_of(other)
    assert sorted(rows_of(one)) == sorted(rows_of(other))
    assert rows_of(one) == rows_of(pack(lengths, 64, "split", 1))


@given(st.lists(st.sampled_from([0, 1, 2, 255, 256, 65_535, 65_536, 1 << 31]) | st.integers(0, 1 << 20)))
def test_equal_keys_stay_in_order_whether_they_have_sixteen_bits_or_more(keys):
    key = np.array(keys, np.int64)
    assert stable_order(key).tolist() == np.argsort(key, kind="stable").tolist()


def test_no_samples_make_no_rows():
    for lengths in ([], [0, 0]):
        units = pack(np.array(lengths, np.int64), 8, "split", 1)
        assert (len(units), len(units.segments), units.stats.efficiency) == (0, 0, 0.0)
