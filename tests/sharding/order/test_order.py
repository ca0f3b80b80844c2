"""Order against a plain-Python oracle written from the specification, and against pinned vectors."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from plain_order import PlainOrder, chi_square

from sharding.order.order import Order
from sharding.order.permutations import feistel, uniform
from sharding.order.shuffle import Shuffle
from sharding.order.windows import windows_touched

KINDS = ["window", "full", "blocks", "none"]
WINDOWED = ["window", "blocks", "none"]
keys = st.integers(0, 2**64 - 1)
tables = st.lists(st.integers(0, 7), max_size=60) | st.lists(st.integers(0, 300), max_size=9)
windowed = st.builds(
    lambda kind, window, lanes, ramp: Shuffle(kind, max(window, lanes), lanes, ramp=ramp),
    st.sampled_from(WINDOWED),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans() | st.integers(2, 9),
)
mixings = windowed | st.builds(
    lambda kind, window, lanes, share: Shuffle(kind, max(window, lanes), lanes, share),
    st.sampled_from(["window", "blocks"]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([0, 0.1, 0.5, 0.999]),
)


def every_sample(order):
    return order.samples(np.arange(order.num_samples))


def samples_of_slots(order, table):
    """Sample number of every slot, window by window."""
    first = np.cumsum(table) - table
    out = []
    for w in range(order.num_windows):
        ordinal, row = order.window_samples(w)
        assert (ordinal.dtype, row.dtype) == (np.int32, np.int64)
        assert len(ordinal) == order.window_length(w)
        out.append((first[order.window_blocks(w)][ordinal] + row).tolist())
    return out


@given(tables, mixings | st.just(Shuffle("full")), keys, st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(table, shuffle, seed, epoch):
    order = Order(table, shuffle, seed=seed, epoch=epoch)
    assert order.num_samples == sum(table)
    assert sorted(every_sample(order).tolist()) == list(range(sum(table)))


@given(tables, windowed, keys, st.integers(0, 5))
@example([2] + [1] * 15, Shuffle("none", 8, 2), 0, 0)  # the middle of a block is where a window begins
@example([100] + [1] * 100, Shuffle("none", 2, 2), 0, 0)  # one lane is in its first window, one in its 60th
def test_the_order_and_its_windows_are_as_specified(table, shuffle, seed, epoch):
    order = Order(table, shuffle, seed=seed, epoch=epoch)
    lanes, ramp = shuffle.canonical_nodes, (epoch == 0 or shuffle.kind != "window") and shuffle.ramp
    plain = PlainOrder(table, shuffle.kind, seed, epoch, shuffle.window_blocks, lanes, ramp)
    first = np.cumsum(table) - table
    expected = [[[int(first[b]) + row for b, row in cell] for cell in cells] for cells in plain.windows]
    assert samples_of_slots(order, table) == [[s for cell in cells for s in cell] for cells in expected]
    assert every_sample(order).tolist() == [int(first[b]) + row for b, row in plain.samples()]


@given(tables, mixings, keys, st.data())
def test_locate_and_samples_agree_for_any_positions(table, shuffle, seed, data):
    order = Order(table, shuffle, seed=seed, epoch=0)
    n = order.num_samples
    asked = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=30) if n else st.just([])), np.int64)
    slots = samples_of_slots(order, table)
    window, slot = order.locate(asked)
    got = order.samples(asked)
    assert window.dtype == slot.dtype == got.dtype == np.int64
    assert got.tolist() == [slots[w][s] for w, s in zip(window, slot, strict=True)]


@given(tables, mixings | st.just(Shuffle("full")), keys, st.integers(0, 3))
def test_all_positions_in_order_are_what_asking_for_them_gives(table, shuffle, seed, begin):
    order = Order(table, shuffle, seed=seed, epoch=0)
    parts = [*order.in_order(begin)]
    positions = np.concatenate([positions for positions, _ in parts] or [np.empty(0, np.int64)])
    assert sorted(positions.tolist()) == list(range(begin, order.num_samples))
    for positions, samples in parts:
        assert np.array_equal(samples, order.samples(positions))


@given(tables, mixings, keys)
def test_every_slot_of_every_window_has_one_position(table, shuffle, seed):
    order = Order(table, shuffle, seed=seed, epoch=1)
    window, slot = order.locate(np.arange(order.num_samples))
    for w in range(order.num_windows):
        positions = np.flatnonzero(window == w)
        assert sorted(slot[positions].tolist()) == list(range(order.window_length(w)))
        assert order.window_span(w) == (positions[0], positions[-1] + 1)


@given(tables, mixings, keys)
def test_a_block_is_in_one_window_but_for_one_less_than_the_lanes(table, shuffle, seed):
    order = Order(table, shuffle, seed=seed, epoch=1)
    reads = [b for w in range(order.num_windows) for b in order.window_blocks(w).tolist()]
    used = {b for b, count in enumerate(table) if count}
    assert set(reads) == used
    assert len(reads) - len(used) <= order.num_lanes - 1
    for w in range(order.num_windows):
        blocks = order.window_blocks(w).tolist()
        assert len(set(blocks)) == len(blocks)


@given(tables, mixings, keys, st.data())
def test_some_slots_of_a_window_are_those_of_all_slots(table, shuffle, seed, data):
    order = Order(table, shuffle, seed=seed, epoch=2)
    if not order.num_windows:
        return
    window = data.draw(st.integers(0, order.num_windows - 1))
    slots = data.draw(st.lists(st.integers(0, order.window_length(window) - 1), max_size=9))
    slots = np.array(slots, np.int64)
    for whole, part in zip(order.window_samples(window), order.window_samples(window, slots), strict=True):
        assert part.dtype == whole.dtype
        assert part.tolist() == whole[slots].tolist()


@given(st.lists(st.integers(1, 50), min_size=20, max_size=80), st.integers(1, 9), st.integers(9, 40))
def test_windows_begin_where_the_block_order_says_to_one_block(table, lanes, window_blocks):
    """Lanes drift apart by no more than the largest block, however long the epoch is."""
    order = Order(table, Shuffle("blocks", window_blocks, lanes), seed=5, epoch=0)
    window, _ = order.locate(np.arange(order.num_samples))
    for w in range(1, order.num_windows):
        late = np.flatnonzero(window < w)[-1]
        early = np.flatnonzero(window >= w)[0]
        assert late - early <= (max(table) + 1) * lanes


# One lane


@given(tables, st.integers(1, 40))
def test_with_one_lane_windows_follow_one_another(table, window_blocks):
    order = Order(table, Shuffle("window", window_blocks, 1), seed=3, epoch=0)
    windows = order.locate(np.arange(order.num_samples))[0]
    assert (
        windows.tolist()
        == np.repeat(
            np.arange(order.num_windows), [order.window_length(w) for w in range(order.num_windows)]
        ).tolist()
    )


@given(tables, st.integers(1, 40), st.sampled_from(WINDOWED), st.sampled_from([None, 1, 3]))
def test_a_whole_window_names_the_row_of_each_slot_in_its_blocks_side_by_side(
    table, window_blocks, kind, lanes
):
    order = Order(table, Shuffle(kind, max(window_blocks, lanes or 1), lanes), seed=3, epoch=0)
    for w in range(order.num_windows):
        rows = np.empty(order.window_length(w), np.int64)
        blocks = order.whole_window(w, np.array(table), rows)
        assert sorted(blocks.tolist()) == sorted(order.window_blocks(w).tolist())
        first = np.cumsum(table) - table
        side_by_side = np.concatenate([first[b] + np.arange(table[b]) for b in blocks.tolist()])
        ordinal, row = order.window_samples(w)
        assert side_by_side[rows].tolist() == (first[order.window_blocks(w)[ordinal]] + row).tolist()


@given(tables, st.integers(1, 40), st.sampled_from([1, 2, 5]))
def test_the_core_of_a_window_is_the_longest_range_of_positions_inside(table, window_blocks, lanes):
    order = Order(table, Shuffle("window", max(window_blocks, lanes), lanes), seed=3, epoch=0)
    windows = order.locate(np.arange(order.num_samples))[0].tolist()
    for w in range(order.num_windows):
        first, end = order.window_core(w)
        assert all(windows[p] == w for p in range(max(first, 0), end))
        if max(first, 0) < end:
            assert end == order.num_samples or windows[end] != w


# Facts


def test_each_run_of_positions_takes_one_sample_of_every_lane():
    order = Order([10] * 32, Shuffle("window", 32, 8), seed=0, epoch=0)
    lanes = [set((every_sample(order)[lane::8] // 10).tolist()) for lane in range(8)]
    assert [len(blocks) for blocks in lanes] == [4] * 8
    assert set.union(*lanes) == set(range(32))


def blocks_in_windows(num_blocks, shuffle, epoch=0):
    order = Order(np.ones(num_blocks, int), shuffle, seed=0, epoch=epoch)
    return [len(order.window_blocks(w)) for w in range(order.num_windows)]


def test_windows_are_of_one_size_and_the_last_one_is_not_short():
    assert blocks_in_windows(400, Shuffle("window", 96)) == [80, 80, 80, 80, 80]
    assert blocks_in_windows(10, Shuffle("window", 4)) == [4, 4, 2]  # a block of each of 4 lanes at least
    assert blocks_in_windows(97, Shuffle("window", 96, 1)) == [48, 49]


def test_the_first_windows_of_a_ramp_are_small_and_double():
    assert blocks_in_windows(400, Shuffle("window", 96, ramp=True)) == [8, 16, 32, 64, 88, 96, 96]
    assert blocks_in_windows(400, Shuffle("window", 100, 1, ramp=True)) == [8, 16, 32, 64, 93, 93, 94]
    assert blocks_in_windows(200, Shuffle("window", 64, 32, ramp=True)) == [32, 64, 64, 40]
    assert blocks_in_windows(100, Shuffle("window", 64, ramp=True)) == [8, 16, 32, 44]
    assert blocks_in_windows(60, Shuffle("window", 33, ramp=True)) == [8, 16, 32, 4]


def test_what_fits_into_one_window_ramps_where_a_number_says_so_as_long_as_as_much_is_left():
    found = [blocks_in_windows(n, Shuffle("window", n, 8, ramp=8)) for n in (15, 16, 24, 64, 128)]
    assert found == [[15], [8, 8], [8, 16], [8, 16, 40], [8, 16, 32, 72]]
    assert blocks_in_windows(64, Shuffle("window", 64, 8, ramp=4)) == [8, 16, 40], "a block of each lane"
    assert blocks_in_windows(100, Shuffle("window", 64, ramp=8)) == [8, 16, 32, 44], "as ever"
    assert blocks_in_windows(64, Shuffle("window", 64, 8, ramp=8), epoch=1) == [64]


@pytest.mark.parametrize("epoch", [0, 1])
def test_what_fits_into_one_window_is_one_window_in_every_epoch(epoch):
    assert blocks_in_windows(64, Shuffle("window", 64, ramp=True), epoch) == [64]
    assert blocks_in_windows(3, Shuffle(), epoch) == [3]


def test_epochs_after_the_first_have_no_ramp_where_windows_mix():
    assert blocks_in_windows(96, Shuffle("window", 32, ramp=True), epoch=1) == [32, 32, 32]
    for kind in ("blocks", "none"):  # what is read together makes no difference to the order there
        shuffles = [Shuffle(kind, 32, ramp=ramp) for ramp in (True, False)]
        assert [blocks_in_windows(96, one, epoch=1) for one in shuffles] == [[8, 16, 24, 24, 24], [32] * 3]
        one, other = (Order(np.full(96, 3), shuffle, seed=5, epoch=1) for shuffle in shuffles)
        assert np.array_equal(every_sample(one), every_sample(other))


def test_windows_given_by_hand_never_ramp():
    assert Shuffle("window", 32).resolved().ramp is False
    assert Shuffle().resolved().ramp is True


@pytest.mark.parametrize("lanes", [1, 8])
def test_windows_hold_about_the_blocks_they_should_when_sizes_differ(lanes):
    table = 1 + np.arange(3000) * 7919 % 100
    order = Order(table, Shuffle("window", 64, lanes), seed=0, epoch=0)
    blocks = [len(order.window_blocks(w)) for w in range(order.num_windows - 1)]
    assert 63 - lanes <= min(blocks) <= max(blocks) <= 64 + lanes


def test_no_window_holds_an_empty_block_and_empty_blocks_do_not_change_the_order():
    with_empty = Order([0, 3, 0, 0, 2, 5, 0], Shuffle("window", 2), seed=1, epoch=0)
    without = Order([3, 2, 5], Shuffle("window", 2), seed=1, epoch=0)
    assert np.array_equal(every_sample(with_empty), every_sample(without))
    blocks = {b for w in range(with_empty.num_windows) for b in with_empty.window_blocks(w).tolist()}
    assert blocks == {1, 4, 5}


def test_none_is_file_order():
    order = Order([3, 0, 4], Shuffle("none"), seed=5, epoch=9)
    assert every_sample(order).tolist() == list(range(7))


def test_none_with_lanes_is_file_order_in_each_lane():
    order = Order([3, 3, 3, 3], Shuffle("none", 8, 2), seed=5, epoch=9)
    assert every_sample(order).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


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


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("table", "shuffle"),
    [
        ([3, 4, 5], Shuffle("full")),
        ([3, 4, 5], Shuffle("window", 8, 1)),
        ([3, 4, 5], Shuffle("window", 8, 3)),  # lanes that divide the epoch
        ([3, 4, 5], Shuffle("window", 8, 4)),
        ([2] * 20, Shuffle("window", 8, 2)),  # three windows
        ([2] * 24, Shuffle("window", 8, 8)),
    ],
)
def test_each_sample_lands_everywhere_equally_often_over_epochs(table, shuffle):
    n = sum(table)
    landed = np.zeros((n, n))
    for epoch in range(1000):
        landed[np.arange(n), every_sample(Order(table, shuffle, seed=8, epoch=epoch))] += 1
    assert abs(chi_square(landed)) < 4


@pytest.mark.parametrize("share", [1, 0.25])
def test_blocks_of_unlike_sizes_come_at_any_time_of_an_epoch(share):
    table = 3 + np.arange(400) * 7 % 5
    block_of = np.repeat(np.arange(400), table)
    quarters = np.zeros((400, 4))
    for epoch in range(400):
        order = Order(table, Shuffle("blocks", 8, 8, share), seed=8, epoch=epoch)
        _, first = np.unique(block_of[every_sample(order)], return_index=True)
        quarters[np.arange(400), first * 4 // len(block_of)] += 1
    # With a small exchange, lanes stay from epoch to epoch, so that epochs are not independent draws.
    assert abs(chi_square(quarters)) < (4 if share == 1 else 6)


def test_the_order_of_version_3_never_changes():
    """A change here breaks every saved state: give the state a new version instead."""
    table = [3, 0, 2, 4, 1, 5]

    def samples(kind, *rest):
        return every_sample(Order(table, Shuffle(kind, *rest), seed=7, epoch=1)).tolist()

    assert samples("window", 3) == [5, 12, 8, 10, 7, 14, 6, 13, 1, 11, 0, 3, 9, 4, 2]
    assert samples("window", 8, 4) == [0, 12, 7, 4, 14, 10, 5, 3, 2, 13, 8, 9, 1, 11, 6]
    assert samples("window", 8, 4, 0.5) == [3, 7, 12, 1, 2, 5, 10, 0, 14, 8, 13, 9, 4, 6, 11]
    assert samples("full") == [12, 7, 9, 13, 6, 3, 1, 11, 5, 4, 8, 10, 14, 2, 0]
    assert samples("blocks") == [5, 6, 7, 8, 10, 11, 12, 13, 14, 0, 1, 2, 9, 3, 4]
    large = Order(np.full(10**5, 10_000), Shuffle("window", 64), seed=2**40, epoch=3)
    assert large.samples(np.array([0, 10**8, 10**9 - 1])).tolist() == [396331642, 428627507, 183754629]
    ramped = Order(np.full(10**5, 10_000), Shuffle("window", 64, ramp=True), seed=2**40, epoch=0)
    assert ramped.samples(np.array([0, 10**8, 10**9 - 1])).tolist() == [75008597, 824902027, 686715727]
    full = Order(np.full(10**5, 10_000), Shuffle("full"), seed=2**40, epoch=3)
    assert full.samples(np.array([0, 10**8, 10**9 - 1])).tolist() == [758404552, 234745595, 181479141]
    assert feistel(np.array([0, 1, 999_999_999], np.uint64), 10**9, 42).tolist() == [
        480043341,
        471044813,
        505422472,
    ]
    assert (uniform(1, 2, np.arange(3), 1)[:, 0] * 2**53).astype(int).tolist() == [
        6325343817653606,
        7887292885140741,
        8725761329443413,
    ]


def test_an_epoch_without_samples_has_no_windows():
    for table in ([], [0, 0, 0], np.empty(0)):
        for kind in KINDS:
            order = Order(table, Shuffle(kind), seed=0, epoch=0)
            assert (order.num_samples, order.num_windows) == (0, 0)
            assert order.samples(np.empty(0, np.int64)).size == 0
            with pytest.raises(IndexError):
                order.samples(np.array([0]))
            if kind != "full":
                assert [part.size for part in order.locate(np.empty(0, np.int64))] == [0, 0]


def test_an_order_tells_what_was_left_open():
    assert Order([1], Shuffle(), seed=0, epoch=0).shuffle == Shuffle("window", 512, 8, ramp=True)
    assert Order([1], Shuffle().resolved(77), seed=0, epoch=0).shuffle == Shuffle("window", 77, 8, ramp=True)
    assert Order([1], Shuffle("window", 5), seed=0, epoch=0).shuffle.window_blocks == 5
    assert Order([1], Shuffle("full"), seed=0, epoch=0).shuffle == Shuffle("full")


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
    order = Order([2, 4], Shuffle("window", 8, 1), seed=0, epoch=0)
    for call in (order.window_blocks, order.window_samples, order.window_length, order.window_span):
        for window in (-1, 1):
            with pytest.raises(IndexError, match=r"window must be in \[0, 1\)"):
                call(window)
    with pytest.raises(ValueError, match="a full shuffle has no windows"):
        Order([2], Shuffle("full"), seed=0, epoch=0).locate(np.array([0]))
    for table in ([-1], [1.5], [[1]]):
        with pytest.raises(ValueError, match=r"cannot hold -1 samples|1-D integers"):
            Order(table, Shuffle(), seed=0, epoch=0)
    with pytest.raises(ValueError, match="epoch must be >= 0"):
        Order([1], Shuffle(), seed=0, epoch=-1)


@pytest.mark.parametrize("lanes", [1, 8])
def test_mixing_inside_a_window_reaches_across_its_blocks(lanes):
    order = Order([100] * 64, Shuffle("window", 32, lanes), seed=0, epoch=0)
    spread = Counter((order.samples(np.arange(2400, 2400 + 320)) // 100).tolist())
    assert len(spread) == 32
    assert max(spread.values()) < 30


@given(st.lists(st.integers(0, 5), max_size=40))
def test_windows_touched_groups_places_by_window(windows):
    got = windows_touched(np.array(windows, np.int64))
    assert [w for w, _ in got] == list(dict.fromkeys(windows))
    for w, places in got:
        assert np.arange(len(windows))[places].tolist() == [i for i, x in enumerate(windows) if x == w]
