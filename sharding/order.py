"""Order is arithmetic: `(seed, epoch, position) -> sample`, with no random-number state.

A *keyed order* sorts `high bits of splitmix64(i ^ key) | i` and keeps the low `ceil(log2 n)` bits: the
index is part of the sort key, so there are no ties, the result is a bijection, and it does not depend on the
sorting algorithm, the machine or the numpy version. Windows use it: O(n log n).
Where nothing may be materialised (`kind="full"`), a Feistel network over `ceil(log2 n)` bits with cycle
walking (Black & Rogaway 2002) gives each position its sample on its own, in O(1).

An epoch puts the non-empty blocks in *spread order* and cuts them into *windows* of consecutive blocks;
samples are mixed inside their window. Spread means that any run of blocks covers the dataset evenly, so that
a window of 32 blocks of data sorted by label has the labels in their shares, where 32 blocks drawn
independently are off by half for ten labels, and train measurably worse. It is the van der Corput sequence
with nested uniform (Owen 1995) scrambling, rotated. The first windows of an epoch are small (8, 16, 32 ...
blocks), so that the first batch waits for few reads; the price is that their samples mix among fewer others.
An `Order` holds O(blocks) memory and never changes: use it from any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import index as exact_int
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Kind = Literal["window", "full", "blocks", "none"]

DEFAULT_WINDOW_BLOCKS = 512
"""Blocks mixed together where nobody says: trains like a full shuffle in published comparisons."""
FIRST_WINDOW_BLOCKS = 8
"""Blocks in the first window of an epoch; each next window doubles up to the full size."""

_U64 = (1 << 64) - 1
_GAMMA, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 14  # elements hashed at a time, so that the temporaries stay in the L2 cache
_BLOCKS, _WINDOW, _FULL, _DRAW, _ROTATION = 1, 2, 3, 4, 64  # purposes of a key: no two share a stream


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
    key = len(parts)
    for part in map(exact_int, parts):  # numpy integers become exact ones
        if not -(1 << 63) <= part <= _U64:
            raise ValueError(f"seeds and other key parts must fit 64 bits, got {part}")
        z = ((key ^ (part & _U64)) + _GAMMA) & _U64
        z = ((z ^ (z >> 30)) * _MUL1) & _U64
        z = ((z ^ (z >> 27)) * _MUL2) & _U64
        key = z ^ (z >> 31)
    return key


def keyed_order(n: int, key: int) -> NDArray[np.int64]:
    """The permutation of `range(n)` that `key` (64 bits) stands for, int64 [n].

    The low `ceil(log2 n)` bits of a sort key hold the index, so `64 - ceil(log2 n)` bits of hash decide.
    Memory: 8 n bytes. Raises `ValueError` for n < 0.
    """
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    low = (1 << max(n - 1, 0).bit_length()) - 1
    out = np.arange(n, dtype=np.uint64)
    for start in range(0, n, _CHUNK):
        part = out[start : start + _CHUNK]
        part |= splitmix64(part ^ np.uint64(key)) & np.uint64(_U64 ^ low)
    out.sort()
    out &= np.uint64(low)
    return out.view(np.int64)


def spread_order(n: int, key: int) -> NDArray[np.int64]:
    """A keyed permutation of `range(n)` any run of which is spread evenly over the range, int64 [n].

    Where n is a power of two: cut [0, n) into 2**j equal pieces; of any 2**j consecutive places that start at
    a multiple of 2**j, each piece holds exactly one value (pieces being cyclic, as the whole is rotated).
    Other n are the next power of two with the values beyond n left out. Which value of a piece it is, and in
    which order pieces come, is random; every value is equally likely at every place. O(n), without a sort:
    35 to 55 ns a value. Raises `ValueError` for n < 0.
    """
    if n < 0:
        raise ValueError(f"n must be >= 0, got {n}")
    place = np.zeros(1, np.int64)  # of each value of `bit` bits
    for bit in range(max(n - 1, 0).bit_length()):
        # A value's next bit becomes the next higher bit of its place, flipped by a hash of its bits above.
        above = np.arange(len(place), dtype=np.uint64)
        flip = (splitmix64(above ^ np.uint64(mix_key(key, bit))) >> np.uint64(63)).view(np.int64)
        place = np.stack((place | flip << bit, place | (1 - flip) << bit), axis=1).reshape(-1)
    value = np.full(len(place), -1, np.int64)
    value[place[:n]] = np.arange(n)
    out = value[value >= 0]
    out += mix_key(key, _ROTATION) % max(n, 1)  # makes up for n that are not powers of two
    out[out >= n] -= n
    return out


def feistel(index: NDArray[np.uint64], n: int, key: int, rounds: int = 12) -> NDArray[np.uint64]:
    """A keyed bijection of [0, n) applied to each element of `index` (any shape), uint64 of that shape.

    n <= 2**62. The domain is rounded up to a power of two; values that fall outside [0, n) are mapped again
    (less than one extra pass on average). Twelve rounds, because eight are visibly biased below n = 16.
    Raises `ValueError` for a bad n, `IndexError` for an index >= n.
    """
    if not 0 <= n <= 1 << 62:
        raise ValueError(f"n must be in [0, 2**62], got {n}")
    if index.size and int(index.max()) >= n:  # such a value might walk for ever
        raise IndexError(f"index {int(index.max())} is not in [0, {n})")
    bits = max(n - 1, 0).bit_length()
    keys = [np.uint64(mix_key(key, r)) for r in range(rounds)]
    out = np.array(index, dtype=np.uint64).reshape(-1)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        part[:] = _feistel_pass(part, bits, keys)
        outside = np.flatnonzero(part >= n)
        while outside.size:
            walked = _feistel_pass(part[outside], bits, keys)
            part[outside] = walked
            outside = outside[walked >= n]
    return out.reshape(index.shape)


def _feistel_pass(x: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """An alternating Feistel network on [0, 2**bits): each round changes one half by a hash of the other."""
    width = bits - bits // 2
    masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << width) - 1)
    halves = [x >> np.uint64(width), x & masks[1]]
    for r, key in enumerate(keys):
        changed, kept = r % 2, halves[1 - r % 2]
        h = (kept ^ key) * np.uint64(_MUL1)
        h ^= h >> np.uint64(32)
        h *= np.uint64(_MUL2)
        h >>= np.uint64(32)
        h &= masks[changed]
        halves[changed] ^= h
    return (halves[0] << np.uint64(width)) | halves[1]


def uniform(seed: int, epoch: int, sample: NDArray[np.integer], draw: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1), a function of (seed, epoch, sample number, draw) alone; float64 [n].

    For augmentation: the same sample of the same epoch draws the same numbers in any batch, rank or restart.
    `sample` is an array of sample numbers; `draw` numbers the decisions made about one sample.
    """
    key = np.uint64(mix_key(seed, epoch, _DRAW, draw))
    h = splitmix64(sample.astype(np.uint64) ^ key)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is mixed."""

    kind: Kind = "window"
    """"window": blocks in spread order, samples mixed inside windows of `window_blocks` consecutive blocks.
    "full": any sample anywhere, at one read per sample. "blocks": blocks in spread order, the samples of a
    block in file order. "none": everything in file order."""
    window_blocks: int | None = None
    """Blocks in a window; None leaves it to the loader. More mixes better and holds more memory. Under
    "blocks" and "none" it only groups reads and never changes the order; "full" has no windows."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"shuffle kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.window_blocks is None:
            return
        if type(self.window_blocks) is not int or not 1 <= self.window_blocks < 1 << 31:
            raise ValueError(f"window_blocks must be an integer in [1, 2**31), got {self.window_blocks!r}")
        if self.kind == "full":
            raise ValueError("a full shuffle has no windows: leave window_blocks out")

    def to_json(self) -> dict[str, object]:
        """The value as JSON types."""
        return {"kind": self.kind, "window_blocks": self.window_blocks}

    @classmethod
    def from_json(cls, value: object) -> Shuffle:
        """The inverse of `to_json`. Raises `ValueError` saying what is wrong."""
        if not isinstance(value, Mapping) or set(value) != {"kind", "window_blocks"}:
            raise ValueError(f"a shuffle must be an object with kind and window_blocks, got {value!r}")
        return cls(cast(Kind, value["kind"]), value["window_blocks"])


class Order:
    """The order of the samples in one epoch. Positions count from 0 to `num_samples`.

    Window w holds positions [window_start(w), window_start(w + 1)). Blocks without samples are in no window.

    Args:
        num_samples_per_block: [blocks] integers >= 0, the block table's column.
        shuffle: how to mix.
        seed: any 64-bit integer.
        epoch: >= 0.
        window_blocks: used where `shuffle.window_blocks` is None.

    Raises `ValueError` for arguments that break these rules.
    """

    def __init__(
        self,
        num_samples_per_block: ArrayLike,
        shuffle: Shuffle,
        *,
        seed: int,
        epoch: int,
        window_blocks: int = DEFAULT_WINDOW_BLOCKS,
    ) -> None:
        counts = _checked_counts(num_samples_per_block)
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        self.seed, self.epoch = seed, epoch
        self.shuffle = _resolved(shuffle, window_blocks)
        """The shuffle with its `window_blocks` filled in: what a resume must use to get the same order."""
        self.num_samples = int(counts.sum())
        self._key = mix_key(seed, epoch, _FULL)
        self._first_sample = _frozen(np.cumsum(counts) - counts)
        self._block = _frozen(self._ordered(np.flatnonzero(counts)))
        self._block_start = _frozen(np.concatenate(([0], np.cumsum(counts[self._block]))).astype(np.int64))
        self._window_block = _frozen(_window_bounds(len(self._block), self.shuffle))
        self._window_start = _frozen(self._block_start[self._window_block])
        self.num_windows = len(self._window_block) - 1

    def _ordered(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.shuffle.kind == "none":
            return blocks
        if self.shuffle.kind == "full":  # block order has no meaning here
            return blocks[:0]
        return blocks[spread_order(len(blocks), mix_key(self.seed, self.epoch, _BLOCKS))]

    def window_start(self, window: int) -> int:
        """First position of the window; `num_samples` for window == `num_windows`."""
        if not 0 <= window <= self.num_windows:
            raise IndexError(f"window must be in [0, {self.num_windows}], got {window}")
        return int(self._window_start[window]) if self.shuffle.kind != "full" else self.num_samples

    def window_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each position, int64 [n]. Raises `ValueError` under "full", which has none."""
        if self.shuffle.kind == "full":
            raise ValueError("a full shuffle has no windows: use samples(positions)")
        self._check_positions(positions)
        return np.searchsorted(self._window_start, positions, side="right") - 1

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Numbers of the window's blocks (rows of the block table) in read order, int64 [b], read-only."""
        first, last = self._window(window)
        return self._block[first:last]

    def window_samples(self, window: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Where the window's samples lie, position by position.

        Returns:
            block_ordinal int32 [k]: index into `window_blocks(window)`; row int64 [k]: sample of that block.
        """
        starts, counts = self._window_table(window)
        ordinal = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        if self.shuffle.kind != "window":
            return ordinal, np.arange(len(ordinal)) - np.repeat(starts, counts)
        mixed = self._mixed(window, len(ordinal))
        ordinal = ordinal[mixed]
        mixed -= starts[ordinal]
        return ordinal, mixed

    def window_rows(self, window: int) -> NDArray[np.int64]:
        """Where the window's samples lie when its blocks stand side by side: row of each position, int64 [k].

        The same as `window_samples`, for whoever stages whole windows: row `r` of block `b` of the window
        is the number of samples in the blocks before `b`, plus `r`.
        """
        num_samples = self.window_start(window + 1) - self.window_start(window)
        if self.shuffle.kind != "window":
            return np.arange(num_samples)
        return self._mixed(window, num_samples)

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample numbers in the dataset at the positions, int64 [n]; positions may come in any order.

        Costs one window's arithmetic for each window touched under "window", O(n log blocks) under "blocks".
        Raises `IndexError` for a position that is not in [0, num_samples).
        """
        self._check_positions(positions)
        kind = self.shuffle.kind
        if kind == "none":
            return positions.astype(np.int64)
        if kind == "full":
            return feistel(positions.astype(np.uint64), self.num_samples, self._key).view(np.int64)
        if kind == "blocks":
            at = np.searchsorted(self._block_start, positions, side="right") - 1
            return self._first_sample[self._block[at]] + (positions - self._block_start[at])
        out = np.empty(len(positions), np.int64)
        for window, places in windows_touched(self.window_of(positions)):
            slots = positions[places] - self._window_start[window]
            out[places] = self._window_sample_numbers(window, slots)
        return out

    def _window_sample_numbers(self, window: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        starts, counts = self._window_table(window)
        mixed = self._mixed(window, int(counts.sum()))[slots]
        shift = np.repeat(self._first_sample[self.window_blocks(window)] - starts, counts)
        mixed += shift[mixed]
        return mixed

    def _mixed(self, window: int, k: int) -> NDArray[np.int64]:
        return keyed_order(k, mix_key(self.seed, self.epoch, _WINDOW, window))

    def _window(self, window: int) -> tuple[int, int]:
        if not 0 <= window < self.num_windows:
            raise IndexError(f"window must be in [0, {self.num_windows}), got {window}")
        return int(self._window_block[window]), int(self._window_block[window + 1])

    def _window_table(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First sample of each block counted from the window's start, and samples of each block."""
        first, last = self._window(window)
        bounds = self._block_start[first : last + 1]
        return bounds[:-1] - bounds[0], np.diff(bounds)

    def _check_positions(self, positions: NDArray[np.int64]) -> None:
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.num_samples:
            raise IndexError(
                f"positions must be in [0, {self.num_samples}), got {positions.min()} to {positions.max()}"
            )


def windows_touched(windows: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64] | slice]]:
    """Split places by window: (window, places with it, ascending), in order of first appearance.

    A slice stands for consecutive places: neither it nor what it selects is a copy.
    """
    if not len(windows):
        return []
    if int(windows.min()) == int(windows.max()):
        return [(int(windows[0]), slice(0, len(windows)))]
    change = np.flatnonzero(windows[1:] != windows[:-1]) + 1
    if np.all(windows[1:] >= windows[:-1]):
        bounds = [0, *change.tolist(), len(windows)]
        return [(int(windows[a]), slice(a, b)) for a, b in pairwise(bounds)]
    # Sixteen-bit keys sort by radix, in linear time.
    small = windows.astype(np.uint16) if int(windows.max()) < 1 << 16 else windows
    by_window = np.argsort(small, kind="stable")
    cuts = np.flatnonzero(np.diff(small[by_window])) + 1
    groups = sorted(np.split(by_window, cuts), key=lambda places: int(places[0]))
    return [(int(windows[places[0]]), places) for places in groups]


def _checked_counts(num_samples_per_block: ArrayLike) -> NDArray[np.int64]:
    counts = np.asarray(num_samples_per_block)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(f"num_samples_per_block must be 1-D integers, got {counts.ndim}-D {counts.dtype}")
    if counts.size and int(counts.min()) < 0:
        raise ValueError(f"a block cannot hold {int(counts.min())} samples")
    return counts.astype(np.int64)


def _resolved(shuffle: Shuffle, window_blocks: int) -> Shuffle:
    if shuffle.kind == "full" or shuffle.window_blocks is not None:
        return shuffle
    return Shuffle(shuffle.kind, window_blocks)


def _window_bounds(num_blocks: int, shuffle: Shuffle) -> NDArray[np.int64]:
    """First block ordinal of every window, and `num_blocks` at the end: 0, 8, 24, 56 ..., then even steps."""
    if not num_blocks or shuffle.window_blocks is None:
        return np.zeros(1, np.int64)
    full, size, start = shuffle.window_blocks, FIRST_WINDOW_BLOCKS, 0
    bounds: list[int] = []
    while size < full and start < num_blocks:
        bounds.append(start)
        start, size = start + size, size * 2
    steady = np.arange(start, max(num_blocks, start), full)
    return np.concatenate((bounds, steady, [num_blocks])).astype(np.int64)


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.setflags(write=False)
    return array
