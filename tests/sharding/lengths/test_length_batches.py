"""Buckets and token budgets: what every window must hold, sample by sample."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharding.errors import DataflowError
from sharding.lengths.batching import Bucketed
from sharding.lengths.cutting import bucket, budget, equal_share_boundaries

samples = st.lists(st.integers(0, 60), max_size=80) | st.lists(st.integers(0, 20), min_size=30, max_size=80)
multiples = st.integers(1, 9)


def batches_of(units):
    """Each batch as (positions, lengths)."""
    assert (units.segments.begin == 0).all()
    cuts = units.first[1:-1]
    return [
        (p.tolist(), n.tolist())
        for p, n in zip(
            np.split(units.segments.position, cuts), np.split(units.segments.length, cuts), strict=True
        )
        if len(p)
    ]


def padded(length, multiple):
    return -(-length // multiple) * multiple


@given(samples, st.integers(1, 9), st.lists(st.integers(0, 60), unique=True, max_size=5), multiples)
def test_buckets_deliver_every_sample_once_in_whole_batches(lengths, batch_size, bounds, multiple):
    bounds = np.array(sorted(bounds), np.int64)
    units = bucket(np.array(lengths, np.int64), batch_size, bounds, multiple, 3)
    batches = batches_of(units)
    assert sorted(p for positions, _ in batches for p in positions) == list(range(len(lengths)))
    assert len(batches) == len(units) == -(-len(lengths) // batch_size)
    assert all(len(positions) == batch_size for positions, _ in batches[:-1])
    assert all(sizes == [lengths[p] for p in positions] for positions, sizes in batches)


@given(samples, st.integers(1, 9), st.lists(st.integers(0, 60), unique=True, max_size=5))
def test_few_batches_mix_buckets(lengths, batch_size, bounds):
    bounds = np.array(sorted(bounds), np.int64)
    units = bucket(np.array(lengths, np.int64), batch_size, bounds, 1, 3)
    of = [set(np.searchsorted(bounds, sizes).tolist()) for _, sizes in batches_of(units)]
    counts = np.bincount(np.searchsorted(bounds, lengths), minlength=1) if lengths else np.zeros(1, int)
    assert sum(len(mixed) == 1 for mixed in of) >= int((counts // batch_size).sum())


@given(samples, st.integers(60, 300), st.none() | st.integers(1, 9), multiples)
def test_a_budget_bounds_every_padded_batch(lengths, max_tokens, max_samples, multiple):
    max_tokens = padded(max_tokens, multiple)
    units = budget(np.array(lengths, np.int64), max_tokens, max_samples, multiple, False, 3)
    batches = batches_of(units)
    assert sorted(p for positions, _ in batches for p in positions) == list(range(len(lengths)))
    areas = [len(sizes) * padded(max(sizes), multiple) for _, sizes in batches]
    assert all(area <= max_tokens for area in areas)
    assert all(len(sizes) <= (max_samples or len(lengths)) for _, sizes in batches)
    assert units.stats.capacity == sum(areas)
    assert units.stats.tokens == sum(lengths)


@given(samples, st.integers(60, 300))
def test_no_batch_of_a_budget_has_room_for_the_next_longest_sample(lengths, max_tokens):
    units = budget(np.array(lengths, np.int64), max_tokens, None, 1, False, 3)
    batches = [sizes for _, sizes in batches_of(units)]
    for sizes in sorted(batches, key=lambda sizes: (max(sizes), min(sizes), len(sizes)), reverse=True)[:-1]:
        assert (len(sizes) + 1) * max(sizes) > max_tokens


@given(samples, st.integers(5, 59))
def test_a_budget_truncates_only_where_told(lengths, max_tokens):
    lengths = np.array(lengths, np.int64)
    if (lengths > max_tokens).any():
        with pytest.raises(DataflowError, match="truncate"):
            budget(lengths, max_tokens, None, 1, False, 3)
    stats = budget(lengths, max_tokens, None, 1, True, 3).stats
    assert stats.truncated == (lengths > max_tokens).sum()
    assert stats.truncated_tokens == np.maximum(lengths - max_tokens, 0).sum()
    assert stats.tokens + stats.truncated_tokens == lengths.sum()


@given(samples.filter(bool), st.integers(1, 12))
def test_chosen_boundaries_share_out_the_elements(lengths, num_buckets):
    bounds = equal_share_boundaries(np.array(lengths), num_buckets)
    assert bounds.tolist() == sorted(set(bounds.tolist()))
    assert len(bounds) < max(2, num_buckets)
    held = np.bincount(np.searchsorted(bounds, lengths), np.array(lengths, float), minlength=len(bounds) + 1)
    # A bucket holds its share, and at most all samples of the length where it ends on top.
    longest = max((size * lengths.count(size) for size in set(lengths)), default=0)
    assert held.max() <= sum(lengths) / num_buckets + longest + 1


def test_a_number_of_buckets_follows_the_lengths_of_each_packing_window():
    for longest in (8, 80):
        lengths = np.arange(1, longest + 1)
        bounds = equal_share_boundaries(lengths, 2)
        by_number, by_hand = Bucketed(4, boundaries=2), Bucketed(4, boundaries=tuple(bounds.tolist()))
        assert batches_of(by_number.cut(lengths, 3)) == batches_of(by_hand.cut(lengths, 3))


def test_batches_of_a_window_are_shuffled_and_similar():
    lengths = np.random.default_rng(0).lognormal(4, 1, 4096).astype(np.int64)
    bounds = equal_share_boundaries(lengths, 16)
    for units in (bucket(lengths, 32, bounds, 1, 5), budget(lengths, 4096, None, 1, True, 5)):
        longest = [max(sizes) for _, sizes in batches_of(units)]
        assert longest != sorted(longest)
        assert longest != sorted(longest, reverse=True)
        assert units.stats.efficiency > 0.7
    plain = lengths.sum() / (np.maximum.reduceat(lengths, np.arange(0, 4096, 32)) * 32).sum()
    assert plain < 0.5
