"""Epochs with classes in other shares: how often each sample comes is arithmetic of (seed, epoch, sample).

A class of n samples gives d of an epoch. Its sample of rank r, a place in a seeded permutation of the class,
comes `(a + d) // n - a // n` times with `a = epoch * d + r`. By Hermite's identity these are d together; each
comes `d / n` times, rounded down or up, and so it is over any run of epochs: none is left out for long. All
times of a sample lie in the one window of its block, so an epoch reads no block twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.order.permutations import CLASS_ORDER, mix_key, seeded_permutation
from sharding.order.selection import MOST_LISTED, SelectedOrder, Selection
from sharding.order.shuffle import Shuffle
from sharding.spans import Ints


def drawn_of_classes(num_samples: int, weights: Sequence[Fraction]) -> Ints:
    """Samples of each class in an epoch of so many, in proportion to weights by largest remainder, int64."""
    total = sum(weights)
    exact = [weight * num_samples / total for weight in weights]
    drawn = np.array([int(share) for share in exact], np.int64)
    owed = sorted(range(len(exact)), key=lambda index: (int(drawn[index]) - exact[index], index))
    drawn[owed[: num_samples - int(drawn.sum())]] += 1
    return drawn


class Balance:
    """The class of each sample of a selection, and how many samples of each an epoch has. Thread-safe.

    Args:
        classes: [samples] the number of each one's class.
        drawn: [classes] samples of each in an epoch; 0 leaves it out.
    """

    def __init__(self, classes: NDArray[np.int32], drawn: Ints) -> None:
        if len(classes) > MOST_LISTED:
            raise ValueError(f"there are {len(classes):,} samples, and at most {MOST_LISTED:,} are balanced")
        self._classes, self._drawn = classes, drawn
        self._ranks: tuple[int, NDArray[np.int32]] | None = None

    @cached_property
    def digest(self) -> str:
        """16 hex digits over classes and shares."""
        data = self._classes.astype("<i4").tobytes() + self._drawn.astype("<i8").tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def times(self, seed: int, epoch: int) -> Ints:
        """The times that each sample comes in an epoch, int64 [samples]."""
        size = np.bincount(self._classes, minlength=len(self._drawn))
        begun = [epoch * d % max(1, n) for d, n in zip(self._drawn.tolist(), size.tolist(), strict=True)]
        before = np.array(begun, np.int64)[self._classes] + self._ranks_of(seed)
        class_size = size[self._classes]
        return np.asarray((before + self._drawn[self._classes]) // class_size - before // class_size)

    def _ranks_of(self, seed: int) -> NDArray[np.int32]:
        """The place of each sample in the permutation of its class, int32 [samples]; the last seed's stay."""
        memo = self._ranks
        if memo is None or memo[0] != seed:
            order = seeded_permutation(len(self._classes), mix_key(seed, CLASS_ORDER))
            small = self._classes.astype(np.min_scalar_type(len(self._drawn)))  # two bytes sort by radix
            by_class = order[np.argsort(small[order], kind="stable")]
            size = np.bincount(self._classes, minlength=len(self._drawn))
            ranks = np.empty(len(order), np.int32)
            ranks[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size)
            memo = self._ranks = (seed, ranks)
        return memo[1]


class _Drawn(Selection):
    """The samples of another selection, each as often as it comes."""

    is_whole = False
    lists_rows = True

    def __init__(self, selection: Selection, times: Ints) -> None:
        self._selection, self._times = selection, times
        self.num_samples = np.diff(np.append(0, np.cumsum(times))[selection.start])

    def rows(self, block: int) -> Ints:
        """Rows of a block, each as often as it comes, int64 [n] ascending."""
        first, end = self._selection.start[block : block + 2].tolist()
        return np.repeat(self._selection.rows(block), self._times[first:end])


class BalancedOrder(SelectedOrder):
    """An order in which samples come as often as their classes say. Arguments as those of `SelectedOrder`."""

    def __init__(
        self, selection: Selection, balance: Balance, shuffle: Shuffle, *, seed: int, epoch: int
    ) -> None:
        times = balance.times(seed, epoch)
        super().__init__(_Drawn(selection, times), shuffle, seed=seed, epoch=epoch)
        self.ends: Ints = np.cumsum(times)

    def samples(self, positions: Ints) -> Ints:
        """Numbers of the selection's samples at the positions, int64 [n]."""
        return np.searchsorted(self.ends, super().samples(positions), side="right")

    def window_numbers(self, window: int) -> Ints:
        """The same of a window, index by index."""
        return np.searchsorted(self.ends, super().window_numbers(window), side="right")
