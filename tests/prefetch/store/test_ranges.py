"""Joining ranges into requests: all wanted bytes, few requests, a bounded share of others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from prefetch.store.ranges import coalesce

RANGES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), max_size=12)


def joined(ranges: list[tuple[int, int]], **options: float) -> list[tuple[int, int]]:
    starts, lengths, _ = coalesce(*_arrays(ranges), **options)  # type: ignore[arg-type]
    return list(zip(starts.tolist(), lengths.tolist(), strict=True))


def _arrays(ranges: list[tuple[int, int]]) -> list[np.ndarray]:
    return [np.array([r[i] for r in ranges], np.int64) for i in (0, 1)]


def test_neighbours_become_one_request() -> None:
    assert joined([(0, 10), (10, 10), (20, 10)]) == [(0, 30)]


def test_a_small_gap_is_read_and_a_large_one_is_not() -> None:
    assert joined([(0, 100), (120, 100), (400, 100)]) == [(0, 220), (400, 100)]


def test_no_request_is_joined_beyond_the_most_bytes() -> None:
    assert joined([(0, 60), (60, 60), (120, 60)], most_bytes=120) == [(0, 120), (120, 60)]


def test_the_order_of_the_ranges_does_not_matter() -> None:
    assert joined([(20, 10), (0, 10), (10, 10)]) == [(0, 30)]


@given(RANGES, st.floats(0, 1))
def test_every_range_lies_in_the_request_that_is_named_and_gaps_are_bounded(
    ranges: list[tuple[int, int]], share: float
) -> None:
    starts, lengths = _arrays(ranges)
    first, size, of = coalesce(starts, lengths, most_bytes=1000, gap_share=share)
    for at, (start, length) in enumerate(ranges):
        if length:
            assert first[of[at]] <= start
            assert start + length <= first[of[at]] + size[of[at]]
    wanted = np.zeros(6000, bool)
    for start, length in ranges:
        wanted[start : start + length] = True
    for begin, nbytes in zip(first.tolist(), size.tolist(), strict=True):
        assert nbytes <= (1 + share) * wanted[begin : begin + nbytes].sum() + 1e-6
