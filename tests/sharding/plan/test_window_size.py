"""The window's size and its reason, and that the loader decides the same."""

import re

import numpy as np
import pytest

from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.window_size import choose_window_blocks, resolve_windows

MIB = 1 << 20


def table_of(lengths, nbytes=None, samples=None):
    lengths = np.asarray(lengths, np.int64)
    samples = np.ones(len(lengths), np.int64) if samples is None else np.asarray(samples)
    zeros = np.zeros(len(lengths), np.int64)
    nbytes = lengths if nbytes is None else np.asarray(nbytes, np.int64)
    return BlockTable(
        shard=zeros.astype(np.int32),
        offset=zeros,
        length=lengths,
        nbytes=nbytes,
        num_samples=samples,
        first_sample=zeros,
    )


@pytest.mark.parametrize(
    ("block", "num_blocks", "limit", "blocks", "says"),
    [
        (2 * MIB, 1000, None, 63, "126.0 MiB of blocks of 2.0 MiB on average"),
        (2 * MIB, 1000, 128 * MIB, 16, r"a quarter of memory_limit \(128.0 MiB\)"),
        (2 * MIB, 1000, MIB, 1, "not even one fits"),
        (30 * MIB, 1000, None, 8, "the fewest that mix, though blocks of 30.0 MiB"),
        (100 * MIB, 1000, None, 2, r"a quarter of memory_limit \(1,024.0 MiB, the default\)"),
        (2 * MIB, 5, None, 5, "all 5 blocks .* the whole dataset fits into one window"),
        (2 * MIB, 128, None, 128, "all 128 blocks .* the whole dataset fits into one window"),
        (2 * MIB, 129, None, 65, "130.0 MiB of blocks"),
        (256 * MIB, 1, None, 1, "the whole dataset fits into one window"),
        (2 * MIB, 128, 1023 * MIB, 64, "128.0 MiB of blocks"),
        (2 * MIB, 50, 400 * MIB, 50, "the whole dataset fits into one window"),
        (2 * MIB, 128, 100 * 1024 * MIB, 128, "the whole dataset fits into one window"),
        (2 * MIB, 129, 100 * 1024 * MIB, 65, "130.0 MiB of blocks"),
        (3, 1000, None, 1000, "whole dataset"),
    ],
)
def test_the_window_is_as_large_as_its_reason_says(block, num_blocks, limit, blocks, says):
    size = choose_window_blocks(table_of([block] * num_blocks), limit)
    assert size.window_blocks == blocks
    assert re.search(says, size.reason)


def test_decoded_bytes_count_where_they_are_more():
    table = table_of([MIB] * 100, nbytes=[4 * MIB] * 100)
    assert choose_window_blocks(table).window_blocks == 17  # of six windows


@pytest.mark.parametrize(
    ("block_kib", "window_mib"), [(64, 128), (1024, 128), (2048, 128), (3072, 84), (4096, 64), (8192, 64)]
)
def test_windows_of_large_blocks_are_smaller(block_kib, window_mib):
    table = table_of([block_kib << 10] * 20_000)
    assert choose_window_blocks(table).window_blocks * block_kib / 1024 == pytest.approx(window_mib, abs=3)


def test_blocks_without_samples_do_not_count():
    table = table_of([4 * MIB, 0, 4 * MIB], samples=[1, 0, 1])
    assert choose_window_blocks(table).window_blocks == 2
    assert choose_window_blocks(table_of([MIB], samples=[0])).window_blocks == 1


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(limit):
    with pytest.raises(ValueError, match=f"memory_limit must be >= 1 byte, got {limit}"):
        choose_window_blocks(table_of([1]), limit)


def test_where_windows_mix_nothing_they_are_no_larger_than_what_is_read_together():
    table = table_of([2 * MIB] * 100)
    for kind in ("blocks", "none"):
        assert choose_window_blocks(table, kind=kind).window_blocks == 32
        assert resolve_windows(Shuffle(kind), [table])[0].window_blocks == 32
    assert choose_window_blocks(table).is_whole


RAMP = "; epoch 0 begins with 8, 16, 32"


@pytest.mark.parametrize(
    ("shuffle", "resolved", "says"),
    [
        (Shuffle("full"), Shuffle("full"), "a full shuffle has no windows"),
        (Shuffle("window", 3), Shuffle("window", 3, 2, ramp=False), "as given"),
        (
            Shuffle(),
            Shuffle("window", 63, 8, ramp=True),
            f"126.0 MiB of blocks of 2.0 MiB on average{RAMP}",
        ),
        (
            Shuffle(ramp=False),
            Shuffle("window", 63, 8, ramp=False),
            "126.0 MiB of blocks of 2.0 MiB on average",
        ),
        (
            Shuffle(canonical_nodes=16),
            Shuffle("window", 63, 16, ramp=True),
            "126.0 MiB of blocks of 2.0 MiB on average; epoch 0 begins with 16, 32",
        ),
        (
            Shuffle(canonical_nodes=96),
            Shuffle("window", 96, 96, ramp=True),
            "one of each lane; without lanes 63: 126.0 MiB of blocks of 2.0 MiB on average",
        ),
        (
            Shuffle("none"),
            Shuffle("none", 32, 1, ramp=True),
            "64.0 MiB of blocks of 2.0 MiB on average; each epoch begins with 8, 16",
        ),
    ],
)
def test_a_window_holds_a_block_of_every_lane_and_the_reason_says_what_comes_before(shuffle, resolved, says):
    assert resolve_windows(shuffle, [table_of([2 * MIB] * 1000)]) == (resolved, says)


def test_a_small_dataset_in_one_window_has_no_others_and_its_reason_names_none():
    shuffle, reason = resolve_windows(Shuffle(), [table_of([MIB // 4] * 100)])
    assert reason == "all 100 blocks of 256.0 KiB on average: the whole dataset fits into one window"
    for epoch in range(3):
        assert Order(np.ones(100, int), shuffle, seed=0, epoch=epoch).num_windows == 1


def test_a_larger_one_begins_with_small_ones_and_is_one_window_from_the_second_epoch_on():
    shuffle, reason = resolve_windows(Shuffle(), [table_of([2 * MIB] * 100)])
    whole = "all 100 blocks of 2.0 MiB on average: the whole dataset fits into one window"
    assert reason == f"{whole}; epoch 0 begins with 8, 16, 32"
    counts = [Order(np.ones(100, int), shuffle, seed=0, epoch=epoch).num_windows for epoch in range(3)]
    assert counts == [4, 1, 1]
    assert resolve_windows(Shuffle(ramp=False), [table_of([2 * MIB] * 100)])[1] == whole


def test_a_state_of_before_goes_on_in_one_window():
    """There, `ramp` was True wherever the loader had chosen the window."""
    before = Shuffle.from_json({**Shuffle("window", 100, 8, ramp=True).to_json()})
    assert Order(np.ones(100, int), before, seed=0, epoch=0).num_windows == 1


def test_sources_that_share_a_limit_have_windows_of_their_own_and_the_smallest_is_reported():
    small, medium, large = (table_of([size] * n) for size, n in ((MIB, 30), (2 * MIB, 900), (8 * MIB, 900)))
    shuffle, reason = resolve_windows(Shuffle(), [small, medium, large], 384 * MIB)
    assert shuffle == Shuffle("window", 4, 4, ramp=True, source_windows=(30, 16, 4))
    assert re.search("a quarter of memory_limit .* 1 of 3 sources in one window each", reason)
    assert [shuffle.of_source(at).window_blocks for at in range(4)] == [30, 16, 4, 4]
    both, reason = resolve_windows(Shuffle(), [table_of([MIB] * 3), table_of([MIB] * 9)], None)
    assert both == Shuffle("window", 9, 8, ramp=True, source_windows=(3, 9))
    assert "2 of 2 sources in one window each" in reason
    assert both.of_source(0).window_blocks == 8  # one of each lane
    alike = resolve_windows(Shuffle(), [medium, medium], None)[0]
    assert alike == Shuffle("window", 64, 8, ramp=True)


# What windows are for: sorted data mixes as if drawn at random


def dispersion(table, shuffle, epoch, batch_size, num_seeds=1):
    """Chi-square of the labels of batches by their degrees of freedom: ten labels, sorted; no data."""
    orders = [Order(table.num_samples, shuffle, seed=seed, epoch=epoch) for seed in range(num_seeds)]
    return np.mean([_of_batches(order, batch_size) for order in orders])


def _of_batches(order, batch_size):
    labels = order.samples(np.arange(order.num_samples)) * 10 // order.num_samples
    batches = labels[: len(labels) // batch_size * batch_size].reshape(-1, batch_size)
    counts = np.stack([(batches == label).sum(1) for label in range(10)])
    return float((np.square(counts - batch_size / 10) / (batch_size / 10)).sum(0).mean() / 9)


@pytest.mark.parametrize("batch_size", [50, 256])
@pytest.mark.parametrize(
    ("block", "num_blocks"),
    [
        (4 * MIB, 5),
        (2 * MIB, 10),
        (2 * MIB, 128),
        (MIB // 4, 300),
        (4096, 5000),
        (200 * MIB, 1),
        (25 * MIB, 10),
    ],
)
def test_up_to_256_mib_sorted_data_mixes_like_a_full_shuffle_but_for_small_first_windows(
    block, num_blocks, batch_size
):
    table = table_of([block] * num_blocks, samples=[max(1, block // 20_000)] * num_blocks)
    shuffle, _ = resolve_windows(Shuffle(), [table])
    first_epoch = 0 if shuffle.ramp is True else 1
    for epoch in range(first_epoch, 2):
        full = dispersion(table, Shuffle("full"), epoch, batch_size, 16)
        assert dispersion(table, shuffle, epoch, batch_size, 16) < 1.2 * full
    assert first_epoch == (block * num_blocks > 32 * MIB)


@pytest.mark.parametrize("num_blocks", [129, 150, 170, 225, 500, 1500])
def test_beyond_256_mib_ten_sorted_labels_are_spread_from_epoch_1_on(num_blocks):
    table = table_of([2 * MIB] * num_blocks, samples=[105] * num_blocks)
    shuffle, _ = resolve_windows(Shuffle(), [table])
    for batch_size in (50, 128):
        assert dispersion(table, shuffle, 1, batch_size) < 1.4
