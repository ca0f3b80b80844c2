"""A mixture as windows and a plan: what the stream stages, and what each rank takes of it.

Each source keeps its own order for each of its epochs (seeded by the source's number) and its own windows.
A window of the mixture is one window of one source in one source epoch; windows are numbered
`(source epoch * sources' windows together) + windows of earlier sources + window`, and their blocks are
numbered as if the sources' block tables stood one after the other. The positions of a window are scattered
over the epoch: several windows, one a source or two, are open at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sharding.mixture import Interleaving
from sharding.order import Order, mix_key, windows_touched
from sharding.plan import EpochPlan

_KEPT_ORDERS = 2
"""Orders kept a source: the source epoch that ends and the one that begins."""
_CHUNK = 1 << 15  # positions located at a time, so that the temporaries stay in the L2 cache
_MIXTURE = 0x6D6978  # "mix", apart from the purposes of `sharding.order`


class SourceOrder(Protocol):
    """What a mixture needs of one source in one of its epochs."""

    num_windows: int

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and slot of each position."""
        ...

    def window_positions(self, window: int) -> NDArray[np.int64]:
        """The inverse: position of each slot of a window."""
        ...

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks of a window in read order."""
        ...

    def window_samples(self, window: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal, and row in the block, of each slot."""
        ...


class OrderWindows:
    """An `Order` as a `SourceOrder`. Raises `ValueError` for a full shuffle, which has no windows."""

    def __init__(self, order: Order) -> None:
        if order.shuffle.kind == "full":
            raise ValueError('a mixture needs windows: use another shuffle than "full"')
        self.num_windows = order.num_windows
        self.window_blocks, self.window_samples = order.window_blocks, order.window_samples
        self._order = order
        starts = [order.window_start(w) for w in range(order.num_windows + 1)]
        self._start = np.array(starts, np.int64)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and slot of each position."""
        window = self._order.window_of(positions)
        return window, positions - self._start[window]

    def window_positions(self, window: int) -> NDArray[np.int64]:
        """Position of each slot of a window."""
        return np.arange(self._start[window], self._start[window + 1])


def source_seed(seed: int, source: int) -> int:
    """The seed of one source's orders: its number counts, so adding a source changes no other's order."""
    return mix_key(seed, _MIXTURE, source)


class MixtureWindows:
    """Windows and samples of one epoch of a mixture. Thread-safe.

    Args:
        interleaving: the epoch.
        sizes: samples of each source.
        num_windows: windows of each source in any of its epochs.
        num_blocks: blocks of each source, for the numbers of the joint table.
        orders: makes the order of (source, source epoch); called when one is first needed.
    """

    def __init__(
        self,
        interleaving: Interleaving,
        sizes: Sequence[int],
        num_windows: Sequence[int],
        num_blocks: Sequence[int],
        orders: Callable[[int, int], SourceOrder],
    ) -> None:
        self.interleaving, self.num_samples = interleaving, interleaving.num_samples
        self._sizes = np.array(sizes, np.int64)
        self._first_window = list(accumulate(num_windows, initial=0))
        self._first_block = list(accumulate(num_blocks, initial=0))
        self._round = self._first_window[-1]
        """Windows of all sources in one source epoch each."""
        self._orders = lru_cache(_KEPT_ORDERS * len(self._sizes))(orders)
        last = interleaving.first + interleaving.counts(interleaving.num_samples)
        self.num_windows = (int((last // self._sizes).max()) + 1) * self._round

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and slot of each position, two int64 [n]. `IndexError` outside [0, num_samples)."""
        window, slot = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for at in range(0, len(positions), _CHUNK):
            part = slice(at, at + _CHUNK)
            window[part], slot[part] = self._locate(positions[part])
        return window, slot

    def _locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source, index = self.interleaving.locate(positions)
        window, slot = np.empty(len(source), np.int64), np.empty(len(source), np.int64)
        epoch = index // self._sizes[source]
        index -= epoch * self._sizes[source]
        for key, at in windows_touched(epoch * len(self._sizes) + source):
            turn, number = divmod(key, len(self._sizes))
            window[at], slot[at] = self._orders(number, turn).locate(index[at])
            window[at] += turn * self._round + self._first_window[number]
        return window, slot

    def source_of(self, window: int) -> tuple[int, int, int]:
        """(source, source epoch, window of that source's order)."""
        epoch, rest = divmod(window, self._round)
        source = int(np.searchsorted(self._first_window, rest, side="right")) - 1
        return source, epoch, rest - self._first_window[source]

    def num_slots(self, window: int) -> int:
        """Samples of a window."""
        return len(self._source_positions(window))

    def window_positions(self, window: int) -> NDArray[np.int64]:
        """The inverse of `locate`, int64 [slots]: where each slot comes; -1: not in this epoch."""
        source, epoch, _ = self.source_of(window)
        index = self._source_positions(window) + epoch * self._sizes[source]
        return self.interleaving.positions(source, index)

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks of a window in read order, int64 [b]: rows of the joint block table, all of one source."""
        source, epoch, own = self.source_of(window)
        return self._orders(source, epoch).window_blocks(own) + self._first_block[source]

    def window_samples(self, window: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal int32 [slots] and row in the block int64 [slots]."""
        source, epoch, own = self.source_of(window)
        return self._orders(source, epoch).window_samples(own)

    def source_block(self, block: int) -> tuple[int, int]:
        """(source, row of its own block table) of a row of the joint table."""
        source = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return source, block - self._first_block[source]

    def _source_positions(self, window: int) -> NDArray[np.int64]:
        source, epoch, own = self.source_of(window)
        return self._orders(source, epoch).window_positions(own)


@dataclass(frozen=True, eq=False)
class MixturePlan(EpochPlan):
    """One rank's batches of one epoch of a mixture: `EpochPlan`'s arithmetic over its positions."""

    order: MixtureWindows  # type: ignore[assignment]  # EpochPlan asks it for num_samples only

    def own_slots(self, window: int) -> NDArray[np.int64]:
        """Slots of a window that this rank's batches take, int64 [j] ascending."""
        return np.flatnonzero(taken_by_rank(self, self.order.window_positions(window)))


def taken_by_rank(plan: EpochPlan, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the batches of the plan's rank take each position; bool [n]. Negative ones never are."""
    num_samples, batch, group = plan.order.num_samples, plan.batch_size, plan.global_batch_size
    left = (num_samples - plan.start) % group
    tail = num_samples - left  # first position of the incomplete global batch
    taken = (positions >= plan.start) & (positions < tail)
    taken &= (positions - plan.start) % group // batch == plan.rank
    if plan.num_batches > (num_samples - plan.start) // group:
        own, sizes = plan.positions(plan.num_batches - 1, plan.num_batches)
        taken |= np.isin(positions, own) if sizes[0] else False
    return taken


__all__ = ["MixturePlan", "MixtureWindows", "OrderWindows", "SourceOrder", "source_seed", "taken_by_rank"]
