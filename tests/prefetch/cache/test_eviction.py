"""What a cache drops: as few fetches as anybody who knows the future can do with."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st

from prefetch.cache.eviction import victims

SEQUENCES = st.lists(st.integers(0, 5), min_size=1, max_size=14)


def chosen(uses: list[float], sizes: list[int], newcomer: float, need: int, spare: int = 0) -> list[int]:
    return victims(
        np.array(uses, float), np.array(sizes, np.int64), newcomer=newcomer, need=need, spare=spare
    ).tolist()


def next_use(sequence: list[int], block: int, after: int) -> float:
    return next((i for i in range(after + 1, len(sequence)) if sequence[i] == block), np.inf)


def fewest_fetches(sequence: list[int], capacity: int) -> int:
    """By trying everything: after each fetch, any block or the new one itself may be left out."""

    @cache
    def best(at: int, kept: frozenset[int]) -> int:
        if at == len(sequence):
            return 0
        if sequence[at] in kept:
            return best(at + 1, kept)
        both = kept | {sequence[at]}
        choices = [both] if len(both) <= capacity else [both - {block} for block in both]
        return 1 + min(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(SEQUENCES, st.integers(1, 4))
def test_no_other_choice_fetches_less(sequence: list[int], capacity: int) -> None:
    kept: list[int] = []
    fetches = 0
    for at, block in enumerate(sequence):
        if block in kept:
            continue
        fetches += 1
        if len(kept) == capacity:
            uses = [next_use(sequence, other, at) for other in kept]
            drop = chosen(uses, [1] * len(kept), next_use(sequence, block, at), need=1)
            if not drop:
                continue
            assert len(drop) == 1
            del kept[drop[0]]
        kept.append(block)
    assert fetches == fewest_fetches(sequence, capacity)


@given(
    st.lists(st.tuples(st.integers(0, 9) | st.none(), st.integers(1, 5)), max_size=10),
    st.integers(0, 9),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_enough_is_dropped_or_nothing(
    blocks: list[tuple[int | None, int]], newcomer: int, need: int, spare: int
) -> None:
    uses = [np.nan if use is None else float(use) for use, _ in blocks]
    sizes = [size for _, size in blocks]
    drop = chosen(uses, sizes, float(newcomer), need, spare)
    assert all(uses[i] > newcomer for i in drop)  # so none that must stay
    assert not drop or sum(sizes[i] for i in drop) >= need
    if sum(size for use, size in zip(uses, sizes, strict=True) if use > newcomer) >= need:
        assert drop
        assert sum(sizes[i] for i in drop[:-1]) < max(need, spare)  # and no more than asked
        assert max((u for i, u in enumerate(uses) if i not in drop), default=0.0) <= uses[drop[-1]] or any(
            np.isnan(uses)
        )


@pytest.mark.parametrize(
    ("uses", "newcomer", "expected"),
    [
        ([3, 9, 5], 4, [1]),
        ([3, 9, 5], 9, []),
        ([3, np.inf, 9], 4, [1]),
        ([3, np.nan, 9], 4, [2]),
        ([np.inf, np.inf], np.inf, []),
        ([], 1, []),
    ],
)
def test_what_is_needed_latest_goes(uses: list[float], newcomer: float, expected: list[int]) -> None:
    assert chosen(uses, [1] * len(uses), newcomer, need=1) == expected


def test_nothing_goes_where_nothing_is_needed() -> None:
    assert chosen([5.0], [1], 1.0, need=0) == []
