"""Splitting a dataset by hash: which part a sample falls into depends on itself alone.

The hash is over a seed, the *file name* of the sample's shard (of loose files, the path below their folder)
and the row in that shard. So a sample stays in its part when shards are added or removed, when the dataset is
copied elsewhere, and whatever the catalog's block size; it moves when samples are written to other shards.
Parts are shares of a number that is uniform in [0, 1): their sizes are close to the fractions, not exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sharding.catalog.table import Catalog
from sharding.order.permutations import mix_key, splitmix64
from sharding.order.selection import MOST_DRAWN, Selection
from sharding.urls import file_name

By = Literal["hash", "shard"]


def split_selection(
    selection: Selection, catalog: Catalog, fractions: Mapping[str, float], *, by: By, seed: int
) -> dict[str, Selection]:
    """Parts of a selection, none of which shares a sample with another.

    Args:
        selection: what is split.
        catalog: of the dataset it selects from.
        fractions: part -> share of the samples; the sum is at most 1, and the rest is in no part.
        by: "hash" decides sample by sample, "shard" gives all samples of a shard to one part.
        seed: another seed is another split.

    Raises `ValueError` for fractions or `by` that break these rules, `MemoryError` for more samples than are
    drawn one by one (`MOST_DRAWN`).
    """
    if by not in get_args(By):
        raise ValueError(f"by must be one of {', '.join(get_args(By))}, got {by!r}")
    if not fractions or min(fractions.values()) < 0 or sum(fractions.values()) > 1 + 1e-9:
        raise ValueError(f"fractions must be >= 0 and at most 1 together, got {dict(fractions)}")
    bounds = [min(1.0, bound) for bound in accumulate(fractions.values(), initial=0.0)]
    if sum(fractions.values()) > 1 - 1e-9:
        bounds[-1] = 1.0  # 0.7 + 0.2 + 0.1 is less than 1 in floating point
    table = catalog.blocks
    if by == "shard":  # no sample is looked at
        keys = np.array([_shard_key(catalog, shard, seed) for shard in range(catalog.num_shards)], np.uint64)
        of_shard = _draws(np.full(len(keys), -1), keys)[table.shard]
        return {
            name: selection.of_blocks((bounds[i] <= of_shard) & (of_shard < bounds[i + 1]))
            for i, name in enumerate(fractions)
        }
    if len(selection) > MOST_DRAWN:
        raise MemoryError(f"at most {MOST_DRAWN:,} are drawn one by one")
    draws = lru_cache(1)(lambda shard: _shard_key(catalog, shard, seed))
    first_in_shard = table.first_sample - table.first_sample[catalog.first_block[table.shard]]

    def part(low: float, high: float) -> Selection:
        def keep(block: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
            key = np.uint64(draws(int(table.shard[block])))
            draw = _draws(rows + int(first_in_shard[block]), key)
            return np.asarray((low <= draw) & (draw < high))

        return selection.where(keep)

    return {name: part(bounds[i], bounds[i + 1]) for i, name in enumerate(fractions)}


def _draws(numbers: NDArray[np.int64], key: np.uint64 | NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each, float64 [n]."""
    bits = splitmix64(numbers.astype(np.uint64) ^ key) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _shard_key(catalog: Catalog, shard: int, seed: int) -> int:
    url, codec = catalog.shard(shard).url, catalog.known_codec
    name = file_name(url) if codec is None else codec.shard_name(url, catalog.footer(shard))
    return mix_key(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
