"""Order against a plain-Python oracle written from the specification, and against pinned vectors."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.order import (
    Order,
    Shuffle,
    feistel,
    keyed_order,
    mix_key,
    splitmix64,
    spread_order,
    uniform,
)

KINDS = ["window", "full", "blocks", "none"]
WINDOWED = ["window", "blocks", "none"]
keys = st.integers(0, 2**64 - 1)
tables = st.lists(st.integers(0, 7), max_size=60)
M = 2**64 - 1


def shuffle_of(kind, window_blocks=None):
    return Shuffle(kind, None if kind == "full" else window_blocks)


def every_sample(order):
    return order.samples(np.arange(order.num_samples))


# The oracle: Python integers, one sample at a time.


def plain_splitmix64(x):
    z = (x + 0x9E3779B97F4A7C15) & M
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return z ^ (z >> 31)


def plain_key(*parts):
    key = len(parts)
    for part in parts:
        key = plain_splitmix64(key ^ part)
    return key


def plain_keyed_order(n, key):
    bits = 0
    while 2**bits < n:
        bits += 1
    return sorted(range(n), key=lambda i: (plain_splitmix64(i ^ key) >> bits, i))


def plain_spread_order(n, key):
    """Owen's scrambling bit by bit, then the rotation."""
    bits = 0
    while 2**bits < n:
        bits += 1

    def place(value):
        found = 0
        for j in range(bits):
            above, bit = value >> (bits - j), value >> (bits - j - 1) & 1
            found |= (bit ^ plain_splitmix64(above ^ plain_key(key, j)) >> 63) << j
        return found

    return [(value + plain_key(key, 64)) % n for value in sorted(range(n), key=place)]


def plain_windows(table, kind, seed, epoch, window_blocks):
    """Each window as a list of (block, row), in order."""
    blocks = [b for b, count in enumerate(table) if count]
    if kind != "none":
        blocks = [blocks[i] for i in plain_spread_order(len(blocks), plain_key(seed, epoch, 1))]
    windows, size = [], 8
    while blocks:
        size = min(size, window_blocks)
        rows = [(b, row) for b in blocks[:size] for row in range(table[b])]
        if kind == "window":
            rows = [rows[i] for i in plain_keyed_order(len(rows), plain_key(seed, epoch, 2, len(windows)))]
        windows.append(rows)
        blocks, size = blocks[size:], size * 2
    return windows


# Spread orders


@given(st.integers(0, 300), keys)
def test_a_spread_order_is_a_permutation_as_specified(n, key):
    order = spread_order(n, key)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == plain_spread_order(n, key)


def test_a_spread_order_of_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        spread_order(-1, 0)


@given(st.integers(0, 8), st.data(), keys)
def test_each_aligned_run_of_a_power_of_two_has_one_value_in_each_piece(bits, data, key):
    order, run = spread_order(2**bits, key), 2 ** data.draw(st.integers(0, bits))
    unrotated = (order - plain_key(key, 64) % 2**bits) % 2**bits
    for start in range(0, 2**bits, run):
        pieces = unrotated[start : start + run] // (2**bits // run)
        assert sorted(pieces.tolist()) == list(range(run))


@pytest.mark.parametrize("n", [100, 405, 1000])
def test_any_run_of_32_has_sorted_labels_in_their_shares(n):
    """Ten labels, sorted: independent draws leave some label out of some run, and bring 8 of another."""
    labels = np.arange(n) * 10 // n
    for key in range(20):
        order = spread_order(n, mix_key(key))
        counts = [np.bincount(labels[order[at : at + 32]], minlength=10) for at in range(n - 32)]
        assert np.min(counts) >= 1
        assert np.max(counts) <= 6


@pytest.mark.parametrize("n", [2, 5, 6, 13, 16])
def test_every_value_is_equally_likely_at_every_place_of_a_spread_order(n):
    trials = 3000
    orders = np.array([spread_order(n, mix_key(key)) for key in range(trials)])
    for place in range(n):
        counts = np.bincount(orders[:, place], minlength=n)
        chi_square = float(((counts - trials / n) ** 2).sum()) / (trials / n)
        assert chi_square < (n - 1) + 5 * (2 * (n - 1)) ** 0.5


# Keyed arithmetic


def test_splitmix64_gives_the_published_sequence():
    # Outputs of the reference C generator for seed 1234567 (Vigna).
    states = np.array([(1234567 + i * 0x9E3779B97F4A7C15) & M for i in range(3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 300), keys)
def test_a_keyed_order_is_a_permutation_as_specified(n, key):
    order = keyed_order(n, key)
    assert order.dtype == np.int64
    assert order.tolist() == plain_keyed_order(n, key)


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537])
def test_a_keyed_order_is_a_permutation_across_chunks_and_powers_of_two(n):
    assert np.array_equal(np.sort(keyed_order(n, mix_key(n))), np.arange(n))


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


def test_bad_sizes_and_indices_are_refused():
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        keyed_order(-1, 0)
    with pytest.raises(ValueError, match="n must be in"):
        feistel(np.zeros(1, np.uint64), 2**63, 0)
    with pytest.raises(IndexError, match=r"index 5 is not in \[0, 5\)"):
        feistel(np.array([5], np.uint64), 5, 0)


def chi_square(table):
    """Statistic divided by its standard deviation around its mean, for a doubly stochastic count table."""
    expected = table.sum() / table.size
    freedom = (len(table) - 1) ** 2
    return (((table - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def every_feistel(n, key):
    return feistel(np.arange(n, dtype=np.uint64), n, key).view(np.int64)


@pytest.mark.parametrize("n", [3, 10, 16])
@pytest.mark.parametrize("permute", [keyed_order, every_feistel])
def test_every_index_lands_everywhere_equally_often(permute, n):
    landed = np.zeros((n, n))
    for trial in range(1000):
        landed[np.arange(n), permute(n, mix_key(99, trial))] += 1
    assert abs(chi_square(landed)) < 4


@pytest.mark.parametrize("permute", [keyed_order, every_feistel])
def test_every_permutation_of_five_is_equally_likely(permute):
    seen = Counter(tuple(permute(5, mix_key(99, trial)).tolist()) for trial in range(2400))
    assert len(seen) == 120
    statistic = sum((count - 20) ** 2 / 20 for count in seen.values())
    assert abs(statistic - 119) < 4 * (2 * 119) ** 0.5


@pytest.mark.parametrize("permute", [keyed_order, every_feistel])
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
    whole = uniform(1, 2, samples, 3)
    assert np.array_equal(uniform(1, 2, samples[::-7], 3), whole[::-7])
    assert whole.dtype == np.float64
    for other in (uniform(2, 2, samples, 3), uniform(1, 3, samples, 3), uniform(1, 2, samples, 4)):
        assert not np.any(other == whole)
        assert abs(np.corrcoef(other, whole)[0, 1]) < 0.15


def test_draws_are_uniform_on_the_half_open_unit_interval():
    draws = uniform(0, 0, np.arange(64_000), 0)
    assert 0 <= draws.min() < draws.max() < 1
    statistic = ((np.bincount((draws * 64).astype(int)) - 1000) ** 2 / 1000).sum()
    assert abs(statistic - 63) < 4 * (2 * 63) ** 0.5


# Shuffle


@pytest.mark.parametrize("shuffle", [Shuffle(), Shuffle("full"), Shuffle("none", 4), Shuffle("blocks")])
def test_a_shuffle_survives_json(shuffle):
    assert Shuffle.from_json(json.loads(json.dumps(shuffle.to_json()))) == shuffle


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("random",), "window, full, blocks, none, got 'random'"),
        (("window", 0), r"window_blocks must be an integer in \[1, 2\*\*31\), got 0"),
        (("window", 1.5), "got 1.5"),
        (("window", 2**31), "got 2147483648"),
        (("window", True), "got True"),
        (("full", 3), "no windows"),
        ((["window"],), "shuffle kind must be"),
    ],
)
def test_bad_shuffles_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Shuffle(*arguments)


@pytest.mark.parametrize("value", [None, [], {"kind": "none"}, {"kind": "none", "window_blocks": 1, "x": 1}])
def test_json_that_is_no_shuffle_is_refused(value):
    with pytest.raises(ValueError, match="a shuffle must be an object with kind and window_blocks"):
        Shuffle.from_json(value)


# Order


@given(tables, st.sampled_from(KINDS), keys, st.integers(0, 5), st.integers(1, 40))
def test_an_epoch_holds_every_sample_once(table, kind, seed, epoch, window_blocks):
    order = Order(table, shuffle_of(kind, window_blocks), seed=seed, epoch=epoch)
    assert order.num_samples == sum(table)
    assert sorted(every_sample(order).tolist()) == list(range(sum(table)))


@given(tables, st.sampled_from(WINDOWED), keys, st.integers(0, 5), st.integers(1, 40))
def test_windows_are_as_specified(table, kind, seed, epoch, window_blocks):
    order = Order(table, Shuffle(kind), seed=seed, epoch=epoch, window_blocks=window_blocks)
    expected = plain_windows(table, kind, seed, epoch, window_blocks)
    assert order.num_windows == len(expected)
    for w, rows in enumerate(expected):
        ordinal, row = order.window_samples(w)
        assert (ordinal.dtype, row.dtype) == (np.int32, np.int64)
        blocks = order.window_blocks(w)
        assert list(zip(blocks[ordinal].tolist(), row.tolist(), strict=True)) == rows
        assert order.window_start(w + 1) - order.window_start(w) == len(rows)


@given(tables, st.sampled_from(WINDOWED), keys, st.integers(1, 40), st.data())
def test_samples_agree_with_the_windows_for_any_positions(table, kind, seed, window_blocks, data):
    order = Order(table, Shuffle(kind, window_blocks), seed=seed, epoch=0)
    first = np.cumsum(table) - table
    expected = []
    for w in range(order.num_windows):
        ordinal, row = order.window_samples(w)
        expected += (first[order.window_blocks(w)][ordinal] + row).tolist()
    asked = data.draw(
        st.lists(st.sampled_from(range(len(expected))), max_size=30) if expected else st.just([])
    )
    got = order.samples(np.array(asked, np.int64))
    assert got.dtype == np.int64
    assert got.tolist() == [expected[p] for p in asked]
    assert every_sample(order).tolist() == expected


@given(tables, st.integers(1, 40))
def test_window_of_is_the_window_that_holds_the_position(table, window_blocks):
    order = Order(table, Shuffle("window", window_blocks), seed=3, epoch=0)
    windows = order.window_of(np.arange(order.num_samples)).tolist()
    for position, w in enumerate(windows):
        assert order.window_start(w) <= position < order.window_start(w + 1)
    assert order.window_start(order.num_windows) == order.num_samples


def test_the_first_windows_are_small_and_double():
    order = Order(np.ones(400, int), Shuffle("window", 100), seed=0, epoch=0)
    assert [len(order.window_blocks(w)) for w in range(order.num_windows)] == [8, 16, 32, 64, 100, 100, 80]
    few = Order(np.ones(10, int), Shuffle("window", 4), seed=0, epoch=0)
    assert [len(few.window_blocks(w)) for w in range(few.num_windows)] == [4, 4, 2]


def test_no_window_holds_an_empty_block_and_empty_blocks_do_not_change_the_order():
    with_empty = Order([0, 3, 0, 0, 2, 5, 0], Shuffle("window", 2), seed=1, epoch=0)
    without = Order([3, 2, 5], Shuffle("window", 2), seed=1, epoch=0)
    assert np.array_equal(every_sample(with_empty), every_sample(without))
    blocks = [with_empty.window_blocks(w).tolist() for w in range(with_empty.num_windows)]
    assert sorted(b for window in blocks for b in window) == [1, 4, 5]


def test_none_is_file_order():
    order = Order([3, 0, 4], Shuffle("none"), seed=5, epoch=9)
    assert every_sample(order).tolist() == list(range(7))


def test_blocks_keeps_the_samples_of_a_block_together_and_in_file_order():
    table = np.arange(1, 40)
    order = Order(table, Shuffle("blocks"), seed=5, epoch=9)
    samples = every_sample(order)
    breaks = np.flatnonzero(np.diff(samples) != 1) + 1
    starts = {run[0] for run in np.split(samples, breaks)}
    assert starts <= set((np.cumsum(table) - table).tolist())
    assert len(starts) > 30


@pytest.mark.parametrize("kind", ["blocks", "none"])
def test_the_window_size_changes_no_order_without_mixing(kind):
    orders = [Order([4] * 50, Shuffle(kind, w), seed=2, epoch=0) for w in (1, 7, 500)]
    assert all(np.array_equal(every_sample(orders[0]), every_sample(o)) for o in orders[1:])


@pytest.mark.parametrize("kind", ["window", "full", "blocks"])
def test_epochs_and_seeds_differ_and_repeated_construction_is_equal(kind):
    def samples(seed, epoch):
        return tuple(every_sample(Order([5] * 40, Shuffle(kind), seed=seed, epoch=epoch)).tolist())

    assert samples(1, 1) == samples(1, 1)
    assert len({samples(seed, epoch) for seed in (0, 1, -1, 2**64 - 2) for epoch in range(3)}) == 12


@pytest.mark.parametrize("kind", ["window", "full"])
def test_each_sample_lands_everywhere_equally_often_over_epochs(kind):
    landed = np.zeros((12, 12))
    for epoch in range(1000):
        samples = every_sample(Order([3, 4, 5], Shuffle(kind), seed=8, epoch=epoch))
        landed[np.arange(12), samples] += 1
    assert abs(chi_square(landed)) < 4


def test_the_order_of_version_1_never_changes():
    """A change here breaks every saved state: give the state a new version instead."""
    table = [3, 0, 2, 4, 1, 5]

    def samples(kind, window_blocks=None):
        return every_sample(Order(table, Shuffle(kind, window_blocks), seed=7, epoch=1)).tolist()

    assert samples("window", 3) == [10, 7, 6, 14, 3, 5, 8, 12, 4, 11, 13, 1, 9, 2, 0]
    assert samples("full") == [12, 7, 9, 13, 6, 3, 1, 11, 5, 4, 8, 10, 14, 2, 0]
    assert samples("blocks") == [10, 11, 12, 13, 14, 5, 6, 7, 8, 3, 4, 0, 1, 2, 9]
    large = Order(np.full(10**5, 10_000), Shuffle("window", 64), seed=2**40, epoch=3)
    assert large.samples(np.array([0, 10**8, 10**9 - 1])).tolist() == [877432893, 708308730, 956957059]
    full = Order(np.full(10**5, 10_000), Shuffle("full"), seed=2**40, epoch=3)
    assert full.samples(np.array([0, 10**8, 10**9 - 1])).tolist() == [758404552, 234745595, 181479141]
    assert feistel(np.array([0, 1, 999_999_999], np.uint64), 10**9, 42).tolist() == [
        480043341,
        471044813,
        505422472,
    ]
    assert (uniform(1, 2, np.arange(3), 0) * 2**53).astype(int).tolist() == [
        6325343817653606,
        7887292885140741,
        8725761329443413,
    ]


def test_an_epoch_without_samples_has_no_windows():
    for table in ([], [0, 0, 0], np.empty(0)):
        for kind in KINDS:
            order = Order(table, Shuffle(kind), seed=0, epoch=0)
            assert (order.num_samples, order.num_windows, order.window_start(0)) == (0, 0, 0)
            assert order.samples(np.empty(0, np.int64)).size == 0
            with pytest.raises(IndexError):
                order.samples(np.array([0]))


def test_an_order_tells_the_window_size_it_used():
    assert Order([1], Shuffle(), seed=0, epoch=0, window_blocks=77).shuffle == Shuffle("window", 77)
    assert Order([1], Shuffle("window", 5), seed=0, epoch=0, window_blocks=77).shuffle.window_blocks == 5
    assert Order([1], Shuffle("full"), seed=0, epoch=0, window_blocks=77).shuffle == Shuffle("full")


def test_an_order_does_not_follow_later_changes_of_its_table():
    table = np.full(30, 2)
    order = Order(table, Shuffle(), seed=0, epoch=0)
    before = every_sample(order)
    table[:] = 9
    assert np.array_equal(every_sample(order), before)
    with pytest.raises(ValueError, match="read-only"):
        order.window_blocks(0)[0] = 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [-1, 6])
def test_positions_outside_the_epoch_are_refused(kind, position):
    order = Order([2, 4], Shuffle(kind), seed=0, epoch=0)
    with pytest.raises(IndexError, match=r"positions must be in \[0, 6\)"):
        order.samples(np.array([0, position]))


def test_bad_arguments_are_refused():
    order = Order([2, 4], Shuffle(), seed=0, epoch=0)
    for call in (order.window_blocks, order.window_samples):
        for window in (-1, 1):
            with pytest.raises(IndexError, match=r"window must be in \[0, 1\)"):
                call(window)
    with pytest.raises(IndexError, match=r"window must be in \[0, 1\], got 2"):
        order.window_start(2)
    with pytest.raises(ValueError, match="a full shuffle has no windows"):
        Order([2], Shuffle("full"), seed=0, epoch=0).window_of(np.array([0]))
    for table in ([-1], [1.5], [[1]]):
        with pytest.raises(ValueError, match=r"cannot hold -1 samples|1-D integers"):
            Order(table, Shuffle(), seed=0, epoch=0)
    with pytest.raises(ValueError, match="epoch must be >= 0"):
        Order([1], Shuffle(), seed=0, epoch=-1)


def test_mixing_inside_a_window_reaches_across_its_blocks():
    order = Order([100] * 64, Shuffle("window", 32), seed=0, epoch=0)
    ordinal, _ = order.window_samples(2)
    assert len(ordinal) == 3200
    spread = Counter(ordinal[:320].tolist())
    assert len(spread) == 32
    assert max(spread.values()) < 30
