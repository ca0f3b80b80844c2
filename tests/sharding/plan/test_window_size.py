"""The window's size and its reason, and that the loader decides the same."""

import re

import numpy as np
import pytest

from sharding.catalog.table import BlockTable
from sharding.order.shuffle import Shuffle
from sharding.plan.window_size import choose_window_blocks, deciding_table, resolve_windows

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
        (2 * MIB, 1000, None, 32, "64.0 MiB of blocks of 2.0 MiB on average"),
        (2 * MIB, 1000, 128 * MIB, 16, r"a quarter of memory_limit \(128.0 MiB\)"),
        (2 * MIB, 1000, MIB, 1, "not even one fits"),
        (20 * MIB, 1000, None, 8, "the fewest that mix, though blocks of 20.0 MiB"),
        (100 * MIB, 1000, None, 2, r"a quarter of memory_limit \(1,024.0 MiB, the default\)"),
        (2 * MIB, 5, None, 5, "all 5 blocks .* the whole dataset fits into one window"),
        (3, 1000, None, 1000, "whole dataset"),
    ],
)
def test_the_window_is_as_large_as_its_reason_says(block, num_blocks, limit, blocks, says):
    size = choose_window_blocks(table_of([block] * num_blocks), limit)
    assert size.window_blocks == blocks
    assert re.search(says, size.reason)


def test_decoded_bytes_count_where_they_are_more():
    table = table_of([MIB] * 100, nbytes=[4 * MIB] * 100)
    assert choose_window_blocks(table).window_blocks == 16


def test_blocks_without_samples_do_not_count():
    table = table_of([4 * MIB, 0, 4 * MIB], samples=[1, 0, 1])
    assert choose_window_blocks(table).window_blocks == 2
    assert choose_window_blocks(table_of([MIB], samples=[0])).window_blocks == 1


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(limit):
    with pytest.raises(ValueError, match=f"memory_limit must be >= 1 byte, got {limit}"):
        choose_window_blocks(table_of([1]), limit)


@pytest.mark.parametrize(
    ("shuffle", "resolved", "says"),
    [
        (Shuffle("full"), Shuffle("full"), "a full shuffle has no windows"),
        (Shuffle("window", 3), Shuffle("window", 3, 2), "as given"),
        (Shuffle(), Shuffle("window", 32, 8), "64.0 MiB of blocks of 2.0 MiB on average"),
        (Shuffle(canonical_nodes=16), Shuffle("window", 32, 16), "64.0 MiB of blocks"),
        (
            Shuffle(canonical_nodes=64),
            Shuffle("window", 64, 64),
            "one of each lane; without lanes 32: 64.0 MiB",
        ),
    ],
)
def test_a_window_holds_a_block_of_every_lane(shuffle, resolved, says):
    found, reason = resolve_windows(shuffle, table_of([2 * MIB] * 1000))
    assert found == resolved
    assert reason.startswith(says)


def test_of_sources_that_share_a_limit_the_one_with_the_smallest_window_decides():
    small, medium, large = (table_of([size] * n) for size, n in ((MIB, 3), (2 * MIB, 900), (8 * MIB, 900)))
    table, limit = deciding_table([small, medium, large], 384 * MIB)
    assert (table, limit) == (large, 128 * MIB)
    assert choose_window_blocks(table, limit).window_blocks == 4
    both_fit = deciding_table([table_of([MIB] * 3), table_of([MIB] * 5)], None)
    assert len(both_fit[0].length) == 5
    assert deciding_table([small], None) == (small, None)
