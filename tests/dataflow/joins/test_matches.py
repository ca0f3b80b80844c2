"""Matches by key, and the reads they take, against dicts and sets."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dataflow.joins.matches import (
    NO_MATCH,
    MatchTable,
    allowance,
    comparable,
    duplicates,
    find_matches,
    reads_in_windows,
)
from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.next_use import LaneRange

KEYS = st.lists(st.one_of(st.none(), st.integers(-3, 12)), max_size=20)


def table(sizes: list[int], nbytes: int = 10) -> BlockTable:
    counts = np.array(sizes, np.int64)
    zeros = np.zeros(len(sizes), np.int64)
    return BlockTable(
        shard=zeros.astype(np.int32),
        offset=zeros,
        length=np.full(len(sizes), nbytes),
        nbytes=zeros,
        num_samples=counts,
        first_sample=np.cumsum(counts) - counts,
    )


def block_of(sizes: list[int], sample: int) -> int:
    return next(b for b, end in enumerate(accumulate(sizes)) if sample < end)


@given(keys=KEYS, others=st.lists(st.integers(-3, 12), unique=True, max_size=20))
def test_matches_are_those_of_a_dict(keys: list[int | None], others: list[int]) -> None:
    where = {key: at for at, key in enumerate(others)}
    found = find_matches(pa.array(keys, pa.int64()), pa.array(others, pa.int64()))
    assert found.tolist() == [NO_MATCH if key is None else where.get(key, NO_MATCH) for key in keys]


@given(keys=KEYS)
def test_duplicates_are_counted_and_the_first_is_found(keys: list[int | None]) -> None:
    repeated = list(dict.fromkeys(k for k in keys if k is not None and keys.count(k) > 1))
    count, where = duplicates(pa.array(keys, pa.int64()))
    assert count == len(repeated)
    assert where.tolist() == ([at for at, k in enumerate(keys) if k == repeated[0]] if repeated else [])


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_text_is_compared_as_bytes(kind: pa.DataType) -> None:
    text = pa.array(["é", None, ""], pa.string())
    array = text.cast(pa.binary()) if kind == pa.binary() else text.cast(kind)
    assert comparable(pa.chunked_array([array])).equals(text.cast(pa.large_binary()))


@given(
    own=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    other=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    data=st.data(),
)
def test_reads_are_those_of_sets_of_blocks(own: list[int], other: list[int], data: st.DataObject) -> None:
    most = min(sum(own), sum(other))
    samples = sorted(data.draw(st.sets(st.integers(0, max(0, sum(own) - 1)), max_size=most)) if most else [])
    matches = data.draw(st.permutations(range(sum(other))))[: len(samples)]
    found = MatchTable.between(
        np.array(samples, np.int64), np.array(matches, np.int64), table(own), table(other)
    )
    pairs = [(block_of(own, s), block_of(other, p)) for s, p in zip(samples, matches, strict=True)]
    assert [*zip(found.own_blocks.tolist(), found.other_blocks.tolist(), strict=True)] == sorted({*pairs})
    carried = sum(a[0] != b[0] and a[1] == b[1] for a, b in pairwise(pairs))
    once = len({b for _, b in pairs})
    assert found.amplification == pytest.approx((len({*pairs}) - carried) / max(1, once) if once else 0)

    order = Order(own, Shuffle("window", window_blocks=2, canonical_nodes=1), seed=1, epoch=0)
    window_of = {b: w for w in range(order.num_windows) for b in order.window_blocks(w).tolist()}
    needs = {(window_of[a], b) for a, b in pairs}
    assert reads_in_windows(order, found, table(other).length) * max(1, once) == pytest.approx(len(needs))
    first = found.windows(order, len(other), LaneRange(0, 1, shared=False))
    assert first.tolist() == [min((w for w, b in needs if b == n), default=-1) for n in range(len(other))]


def test_an_order_that_is_alike_reads_nothing_twice_and_another_one_much() -> None:
    every = np.arange(100)
    alike = MatchTable.between(every, every, table([7] * 14 + [2]), table([30, 30, 40]))
    assert alike.amplification == 1
    mixed = np.random.default_rng(0).permutation(100)
    unlike = MatchTable.between(every, mixed, table([10] * 10), table([10] * 10))
    assert unlike.amplification > 5


def test_the_number_that_an_error_states_is_enough() -> None:
    assert [allowance(times) for times in (2.0, 2.04, 37.91)] == ["2", "2.1", "38"]
