"""Seeded arithmetic: permutations and random numbers as functions of a key, with no generator behind them.

A generator's stream may change between versions of its library; these are fixed by their definition, the
same on every machine. Three permutations of `range(n)`, each for a purpose:

*seeded permutation* sorts `high bits of splitmix64(i ^ key) | i` and keeps the low `ceil(log2 n)` bits: the
index is part of the sort key, so there are no ties and the result is a bijection whatever sorts it. O(n log
n), 20 to 42 ns an index by numpy here, and 5 to 14 where the compiled core does it.

*spread order* is a van der Corput sequence with Owen's scrambling (1995): of every aligned run of 2**k
positions, each 2**k-th part of the range gets one. So neighbours in the order are far apart in the range, and
any part of the range (a shard, a folder, a host's shards) gets about its share of any run. O(n).

*feistel* maps each index on its own, in O(1), where nothing may be materialised: a Feistel network over
`ceil(log2 n)` bits with cycle walking (Black & Rogaway 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index as exact_int

import numpy as np
from numpy.typing import NDArray

_U64 = (1 << 64) - 1
_GAMMA, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 14  # elements hashed at a time, so that the temporaries stay in the L2 cache
BLOCK_ORDER, WINDOW_ORDER, FULL_ORDER, DRAW, EXCHANGE, LANE_ORDER, GLOBALS, CLASS_ORDER, SUMS = range(1, 10)
"""Purposes of a key: part of it, so that no two share a stream."""


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The bijective 64-bit hash of Steele, Lea & Flood (2014), element by element; `x` is any array."""
    z = x + np.uint64(_GAMMA)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MUL1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MUL2)
    z ^= z >> np.uint64(31)
    return z


def mix_key(*parts: int) -> int:
    """A 64-bit key from integers such as seed, epoch, purpose and window number; their order counts.

    Each part lies in [-2**63, 2**64) and is taken modulo 2**64. Raises `ValueError` beyond that range.
    """
    return mix_more(len(parts), *parts)


def mix_more(key: int, *parts: int) -> int:
    """The rest of a `mix_key`: `mix_more(mix_more(2, a), b)` is `mix_key(a, b)`."""
    for part in map(exact_int, parts):  # numpy integers become exact ones
        if not -(1 << 63) <= part <= _U64:
            raise ValueError(f"seeds and other key parts must fit 64 bits, got {part}")
        z = ((key ^ (part & _U64)) + _GAMMA) & _U64
        z = ((z ^ (z >> 30)) * _MUL1) & _U64
        z = ((z ^ (z >> 27)) * _MUL2) & _U64
        key = z ^ (z >> 31)
    return key


def seeded_permutation(n: int, key: int, out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """The permutation of `range(n)` that `key` (64 bits) stands for, int64 [n].

    The low `ceil(log2 n)` bits of a sort key hold the index, so `64 - ceil(log2 n)` bits of hash decide.
    Memory: 8 n bytes, or none beyond `out`, int64 [n] contiguous. Raises `ValueError` for n < 0.
    """
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    low = (1 << max(n - 1, 0).bit_length()) - 1
    bits = (np.empty(n, np.int64) if out is None else out).view(np.uint64)
    for start in range(0, n, _CHUNK):
        part = bits[start : start + _CHUNK]
        part[:] = np.arange(start, start + len(part), dtype=np.uint64)
        part |= splitmix64(part ^ np.uint64(key)) & np.uint64(_U64 ^ low)
    bits.sort()
    bits &= np.uint64(low)
    return bits.view(np.int64)


def seeded_permutations(sizes: NDArray[np.int64], keys: Sequence[int], out: NDArray[np.int64]) -> None:
    """Seeded permutations side by side: of each size, numbered from where it begins, by the key beside it.

    Args:
        sizes: int64 [k]
        keys: [k], 64 bits each.
        out: int64 [sum of sizes], contiguous.
    """
    starts = np.cumsum(sizes) - sizes
    bounds = [*zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
    if len(out) > _CHUNK:
        for (start, end), key in zip(bounds, keys, strict=True):
            seeded_permutation(end - start, key, out[start:end])
            out[start:end] += start
        return
    # Of a few hundred each: what takes time is the number of calls.
    lows = [(1 << max(end - start - 1, 0).bit_length()) - 1 for start, end in bounds]
    start, key, low = np.repeat(np.array([starts, keys, lows], np.uint64), sizes, axis=1)
    bits = out.view(np.uint64)
    np.subtract(np.arange(len(out), dtype=np.uint64), start, out=bits)
    bits |= splitmix64(bits ^ key) & ~low
    for first, end in bounds:
        bits[first:end].sort()
    bits &= low
    bits += start


SeededPermutations = Callable[[NDArray[np.int64], Sequence[int], NDArray[np.int64]], None]
"""`seeded_permutations`, or what gives the same faster."""


def spread_order(n: int, key: int) -> NDArray[np.int64]:
    """A permutation of `range(n)` in which any run of positions takes from all parts of the range, int64 [n].

    Built by doubling: the first 2**k positions name the 2**k-th parts of the range, and the next 2**k take
    the other half of each part; a hash of the part decides which half comes first (Owen 1995, "Randomly
    permuted (t, m, s)-nets"). What lies beyond n is left out, and a seeded rotation makes every index equally
    likely at every position. Memory: 24 n bytes on the way. Raises `ValueError` for n < 0.
    """
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    out = np.zeros(min(n, 1), np.uint64)
    for level in range(max(n - 1, 0).bit_length()):
        part = out | np.uint64(1 << level)  # numbered as the nodes of a binary tree
        second = splitmix64(part ^ np.uint64(key)) >> np.uint64(63)
        out <<= np.uint64(1)
        out = np.concatenate((out | second, out | (second ^ np.uint64(1))))
    out = out[out < n]
    return np.roll(out, mix_key(key, n) % n if n else 0).view(np.int64)


def mix_runs(order: NDArray[np.int64], run: int, key: int) -> NDArray[np.int64]:
    """`order` with every `run` positions from the first on permuted among themselves, int64 of its shape [n].

    What deals a spread order out in turn needs it: every 2**k-th position names one part of the range only.
    """
    n = len(order)
    whole, tail = np.split(splitmix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)), [n // run * run])
    places = np.argsort(whole.reshape(-1, run), axis=1, kind="stable")
    places += np.arange(0, len(whole), run)[:, None]
    last = np.argsort(tail, kind="stable") + len(whole)
    return order[np.concatenate((places.reshape(-1), last))]


def feistel(
    index: NDArray[np.uint64], n: int, key: int, rounds: int = 12, *, inverse: bool = False
) -> NDArray[np.uint64]:
    """A seeded bijection of [0, n) applied to each element of `index` (any shape), uint64 of that shape.

    n <= 2**62. The domain is rounded up to a power of two; values that fall outside [0, n) are mapped again
    (less than one extra pass on average). Twelve rounds, because eight are visibly biased below n = 16.
    With `inverse`, what it maps to `index`. Raises `ValueError` for a bad n, `IndexError` for an index >= n.
    """
    if not 0 <= n <= 1 << 62:
        raise ValueError(f"n must be in [0, 2**62], got {n}")
    if index.size and int(index.max()) >= n:  # such a value might walk for ever
        raise IndexError(f"index {int(index.max())} is not in [0, {n})")
    bits = max(n - 1, 0).bit_length()
    keys = [(r % 2, np.uint64(mix_key(key, r))) for r in range(rounds)]
    if inverse:
        keys.reverse()
    out = np.array(index, dtype=np.uint64).reshape(-1)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        part[:] = _feistel_pass(part, bits, keys)
        outside = np.flatnonzero(part >= n)
        while outside.size:
            part[outside] = _feistel_pass(part[outside], bits, keys)
            outside = outside[part[outside] >= n]
    return out.reshape(index.shape)


def _feistel_pass(x: NDArray[np.uint64], bits: int, keys: list[tuple[int, np.uint64]]) -> NDArray[np.uint64]:
    """An alternating Feistel network on [0, 2**bits): each round changes one half by a hash of the other."""
    width = bits - bits // 2
    masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << width) - 1)
    halves = [x >> np.uint64(width), x & masks[1]]
    for side, key in keys:
        h = (halves[1 - side] ^ key) * np.uint64(_MUL1)
        h ^= h >> np.uint64(32)
        h *= np.uint64(_MUL2)
        h >>= np.uint64(32)
        h &= masks[side]
        halves[side] ^= h
    return (halves[0] << np.uint64(width)) | halves[1]


def uniform(
    seed: int,
    epoch: int,
    sample: NDArray[np.integer],
    num_draws: int,
    item: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Random numbers in [0, 1), functions of (seed, epoch, sample number, draw); float64 [n, num_draws].

    For augmentation: the same sample of the same epoch draws the same numbers in any batch, rank or restart.
    `sample` is an array of n sample numbers; draws number the decisions made about one sample. Where samples
    have several items, `item` says which each is, int64 [n]: all draw other numbers, the first as if alone.
    """
    if item is None:
        keys = _draw_keys(seed, epoch, num_draws)
    else:
        most = 1 << int(item.max(initial=0)).bit_length()  # few different ones, which are remembered
        keys = _draw_keys(seed, epoch, num_draws * most).reshape(most, num_draws)[item]
    h = splitmix64(sample.astype(np.uint64)[:, None] ^ keys)
    h >>= np.uint64(11)
    return h.astype(np.float64) * 2.0**-53


@lru_cache(maxsize=64)
def _draw_keys(seed: int, epoch: int, num_draws: int) -> NDArray[np.uint64]:
    return np.array([mix_key(seed, epoch, DRAW, draw) for draw in range(num_draws)], np.uint64)


@lru_cache(maxsize=4)
def sum_key(epoch: int) -> int:
    """The key of the sums over samples that were delivered in an epoch, 64 bits."""
    return mix_key(epoch, SUMS)
