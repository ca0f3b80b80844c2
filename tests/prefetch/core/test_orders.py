"""Orders by compiled code are those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from plain_order import plain_seeded_permutation

from prefetch.core.kernels import kernels
from sharding.order.permutations import SeededPermutations, seeded_permutations

U64 = st.integers(0, 2**64 - 1)


def orders(mix: SeededPermutations, sizes: list[int], keys: list[int]) -> list[int]:
    out = np.full(sum(sizes), -1)
    mix(np.array(sizes, np.int64), keys, out)
    return list(out.tolist())


@given(st.lists(st.tuples(st.integers(0, 70), U64), max_size=5))
def test_orders_side_by_side_are_those_of_the_definition(cells: list[tuple[int, int]]) -> None:
    sizes, keys = [size for size, _ in cells], [key for _, key in cells]
    expected: list[int] = []
    for size, key in cells:
        expected.extend(len(expected) + np.array(plain_seeded_permutation(size, key), np.int64))
    assert orders(seeded_permutations, sizes, keys) == expected
    assert orders(kernels().seeded_permutations, sizes, keys) == expected


@pytest.mark.parametrize("sizes", [[(1 << 14) + 1], [9000, 9000], [1 << 16, 0, 3], [100_003]])
def test_large_orders_are_the_same_by_both(sizes: list[int]) -> None:
    keys = [7 + i for i in range(len(sizes))]
    assert orders(kernels().seeded_permutations, sizes, keys) == orders(seeded_permutations, sizes, keys)
