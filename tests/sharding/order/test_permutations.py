"""Seeded arithmetic against plain Python, published values, and chance."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from plain_order import chi_square, plain_key, plain_seeded_permutation, plain_spread_order

from sharding.order.permutations import (
    feistel,
    mix_key,
    seeded_permutation,
    splitmix64,
    spread_order,
    uniform,
)

keys = st.integers(0, 2**64 - 1)
M = 2**64 - 1


def test_splitmix64_gives_the_published_sequence():
    # Outputs of the reference C generator for seed 1234567 (Vigna).
    states = np.array([(1234567 + i * 0x9E3779B97F4A7C15) & M for i in range(3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 300), keys)
def test_a_seeded_permutation_is_a_permutation_as_specified(n, key):
    order = seeded_permutation(n, key)
    assert order.dtype == np.int64
    assert order.tolist() == plain_seeded_permutation(n, key)


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537])
def test_a_seeded_permutation_is_a_permutation_across_chunks_and_powers_of_two(n):
    assert np.array_equal(np.sort(seeded_permutation(n, mix_key(n))), np.arange(n))


@given(st.integers(1, 700), keys, st.integers(0, 9))
def test_feistel_is_a_bijection(n, key, rounds):
    out = feistel(np.arange(n, dtype=np.uint64), n, key, rounds)
    assert out.dtype == np.uint64
    assert sorted(out.tolist()) == list(range(n))


@given(st.integers(1, 2**62), keys, st.data())
def test_feistel_stays_inside_huge_ranges_and_keeps_indices_apart(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20))
    out = feistel(np.array(index, np.uint64), n, key).tolist()
    assert len(set(out)) == len(index)
    assert all(0 <= value < n for value in out)


def test_feistel_keeps_shape_and_leaves_its_argument_alone():
    index = np.arange(6, dtype=np.uint64).reshape(2, 3)
    assert feistel(index, 6, 1).shape == (2, 3)
    assert index.ravel().tolist() == list(range(6))
    assert feistel(index[:0], 0, 1).size == 0


def every_feistel(n, key):
    return feistel(np.arange(n, dtype=np.uint64), n, key).view(np.int64)


@pytest.mark.parametrize("n", [3, 10, 16])
@pytest.mark.parametrize("permute", [seeded_permutation, every_feistel])
def test_every_index_lands_everywhere_equally_often(permute, n):
    landed = np.zeros((n, n))
    for trial in range(1000):
        landed[np.arange(n), permute(n, mix_key(99, trial))] += 1
    assert abs(chi_square(landed)) < 4


@pytest.mark.parametrize("permute", [seeded_permutation, every_feistel])
def test_every_permutation_of_five_is_equally_likely(permute):
    seen = Counter(tuple(permute(5, mix_key(99, trial)).tolist()) for trial in range(2400))
    assert len(seen) == 120
    statistic = sum((count - 20) ** 2 / 20 for count in seen.values())
    assert abs(statistic - 119) < 4 * (2 * 119) ** 0.5


@pytest.mark.parametrize("permute", [seeded_permutation, every_feistel])
def test_distances_between_neighbours_are_uniform(permute):
    n = 100_003
    order = permute(n, mix_key(5, 6))
    steps = (order[1:] - order[:-1]) % n
    seen = np.bincount(steps * 64 // n, minlength=64)
    statistic = ((seen - n / 64) ** 2 / (n / 64)).sum()
    assert abs(statistic - 63) < 4 * (2 * 63) ** 0.5


@given(st.lists(keys, max_size=5))
def test_keys_mix_as_specified(parts):
    assert mix_key(*parts) == plain_key(*parts)


def test_keys_depend_on_order_and_number_of_their_parts():
    assert len({mix_key(1, 2), mix_key(2, 1), mix_key(1), mix_key(1, 2, 0), mix_key()}) == 5
    assert mix_key(-1) == mix_key(2**64 - 1)
    assert mix_key(np.int64(7)) == mix_key(7)
    for part in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="must fit 64 bits"):
            mix_key(part)


def test_draws_depend_on_nothing_but_seed_epoch_sample_and_number():
    samples = np.arange(1000)
    whole = uniform(1, 2, samples, 5)
    assert whole.shape == (1000, 5)
    assert whole.dtype == np.float64
    assert np.array_equal(uniform(1, 2, samples[::-7], 3), whole[::-7, :3])
    one = whole[:, 3]
    for other in (uniform(2, 2, samples, 5)[:, 3], uniform(1, 3, samples, 5)[:, 3], whole[:, 4]):
        assert not np.any(other == one)
        assert abs(np.corrcoef(other, one)[0, 1]) < 0.15


def test_draws_are_uniform_on_the_half_open_unit_interval():
    draws = uniform(0, 0, np.arange(64_000), 1)[:, 0]
    assert 0 <= draws.min() < draws.max() < 1
    statistic = ((np.bincount((draws * 64).astype(int)) - 1000) ** 2 / 1000).sum()
    assert abs(statistic - 63) < 4 * (2 * 63) ** 0.5


@given(st.integers(0, 300), keys)
def test_a_spread_order_is_a_permutation_as_specified(n, key):
    order = spread_order(n, key)
    assert order.dtype == np.int64
    assert order.tolist() == plain_spread_order(n, key)
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [4096, 5000])
def test_every_run_of_a_spread_order_takes_its_share_of_every_part(n):
    """The share of a part in a run is exact to about one a level of halving, not to its square root."""
    order = spread_order(n, mix_key(3))
    for part in (n // 64, n // 10, n // 3):
        for run in (16, 100, 512):
            inside = np.concatenate(([0], np.cumsum((order >= part) & (order < 2 * part))))
            counts = inside[run:] - inside[:-run]
            assert abs(counts - run * part / n).max() <= 4


@pytest.mark.parametrize("n", [3, 10, 16, 23])
def test_every_index_of_a_spread_order_lands_everywhere_equally_often(n):
    landed = np.zeros((n, n))
    for trial in range(2000):
        landed[np.arange(n), spread_order(n, mix_key(99, trial))] += 1
    assert abs(chi_square(landed)) < 4
