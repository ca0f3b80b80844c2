"""A mixture as windows and a plan: what the stream stages, and what each rank takes of it.

Each source keeps its own order for each of its epochs (seeded by the source's number), with its own windows
and lanes. A window of the mixture is one window of one source in one source epoch; they are numbered
`(source epoch * sources + source) * most windows of a source + window`. The positions of a window are
scattered over the epoch: several windows, one a source or two, are open at any time.

A batch lists its positions by their sample's lane in its own source, as the plan of a single source does; so
the ranks' parts, one after the other, are one list in every world, and ranks that divide the lanes read
different blocks of every source. Since draws of the sources do not divide evenly among lanes, a boundary
between ranks lies up to a few samples inside a lane, whose blocks then two ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.mixture.interleaving import Interleaving
from sharding.order.epoch_order import SourceWindow, Windows
from sharding.order.order import Order, most_windows
from sharding.order.permutations import mix_key
from sharding.order.shuffle import Shuffle
from sharding.order.windows import windows_touched
from sharding.plan.batch_plan import BatchPlan, Dealing
from sharding.plan.plan import RankPlan

_KEPT_ORDERS = 2
"""Orders kept a source: the source epoch that ends and the one that begins."""
_CHUNK = 1 << 15  # positions located at a time, so that the temporaries stay in the L2 cache
_AT_ONCE = 1 << 18
"""Positions that are numbered together."""
_KEPT_OFFSETS = 1 << 21
"""Samples of this rank whose positions in their batches are kept: 8 MiB."""
_MIXTURE = 0x6D6978  # "mix", apart from the purposes of `sharding.order.order`


def source_seed(seed: int, component: int) -> int:
    """The seed of a component's orders: its number counts, so adding one changes no other's order."""
    return mix_key(seed, _MIXTURE, component)


class MixtureWindows:
    """Windows and samples of one epoch of a mixture. Thread-safe.

    Args:
        interleaving: the epoch.
        seed: of the mixture; `source_seed` says what that makes of its sources.
        epoch: its number.
        shuffle: of all sources, with nothing left open.
        sizes: samples of each source.
        num_blocks: blocks with samples of each source.
        orders: makes the order of (source, source epoch); called when one is first needed.

    Raises `ValueError` for a full shuffle, which has no windows.
    """

    def __init__(
        self,
        interleaving: Interleaving,
        *,
        seed: int,
        epoch: int,
        shuffle: Shuffle,
        sizes: Sequence[int],
        num_blocks: Sequence[int],
        orders: Callable[[int, int], Order],
    ) -> None:
        if shuffle.kind == "full" or shuffle.window_blocks is None:
            raise ValueError('a mixture needs windows: use another shuffle than "full"')
        self.interleaving, self.num_samples = interleaving, interleaving.num_samples
        self.known_from = interleaving.begin
        self.seed, self.epoch = seed, epoch
        self.shuffle, self.num_lanes = shuffle, shuffle.num_lanes
        self.sizes = np.array(sizes, np.int64)
        self.first_sample = np.cumsum(self.sizes) - self.sizes
        """[sources] the number of each one's first sample, where those of all are counted through."""
        self._stride = max(most_windows(n, shuffle.of_source(i)) for i, n in enumerate(num_blocks))
        self.order_of = lru_cache(_KEPT_ORDERS * len(self.sizes))(orders)
        """(source, source epoch) -> its order."""
        last = interleaving.first + interleaving.counts(interleaving.num_samples)
        self.num_windows = (int((last // self.sizes).max()) + 1) * len(self.sizes) * self._stride
        """Window numbers lie below; not every one is a window."""

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and index of each position, two int64 [n]. `IndexError` outside [0, num_samples)."""
        window, index = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for start in range(0, len(positions), _CHUNK):
            part = slice(start, start + _CHUNK)
            window[part], index[part] = self._locate(positions[part])
        return window, index

    def _locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        component, epoch, position = self._find(positions)
        window, index = np.empty(len(component), np.int64), np.empty(len(component), np.int64)
        for key, part in windows_touched(epoch * len(self.sizes) + component):
            source_epoch, number = divmod(key, len(self.sizes))
            window[part], index[part] = self.order_of(number, source_epoch).locate(position[part])
            window[part] += key * self._stride
        return window, index

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each position's sample, int64 [n], with those of all sources counted through."""
        component, epoch, position = self._find(positions)
        out = self.first_sample[component]
        for key, part in windows_touched(epoch * len(self.sizes) + component):
            source_epoch, number = divmod(key, len(self.sizes))
            out[part] += self.order_of(number, source_epoch).samples(position[part])
        return out

    def in_order(self, begin: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield as `Order.in_order`: positions and sample numbers from `begin` on, each window mixed once.

        A source with a small share is in the same windows for most of the epoch: they stay until it is in
        others.
        """
        numbers: dict[int, NDArray[np.int64]] = {}
        for start in range(begin, self.num_samples, _AT_ONCE):
            positions = np.arange(start, min(start + _AT_ONCE, self.num_samples))
            window, index = self.locate(positions)
            touched = windows_touched(window)
            in_use, moved = {key for key, _ in touched}, {self.source_of(key)[0] for key, _ in touched}
            for key in [key for key in numbers if key not in in_use and self.source_of(key)[0] in moved]:
                del numbers[key]
            for key, part in touched:
                if key not in numbers:
                    component, epoch, number = self.source_of(key)
                    numbers[key] = self.order_of(component, epoch).window_numbers(number)
                    numbers[key] += self.first_sample[component]
                index[part] = numbers[key][index[part]]
            yield positions, index

    def _find(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Source, source epoch and position in it of each position."""
        component, index = self.interleaving.locate(positions)
        size = self.sizes[component]
        epoch = index // size
        return component, epoch, index - epoch * size

    def lanes(self, positions: NDArray[np.int64]) -> NDArray[np.uint16]:
        """The lane of each position's sample in its source, uint16 [n]."""
        lanes = np.empty(len(positions), np.uint16)
        for start in range(0, len(positions), _CHUNK):
            lanes[start : start + _CHUNK] = self._find(positions[start : start + _CHUNK])[2] % self.num_lanes
        return lanes

    def source_of(self, window: int) -> tuple[int, int, int]:
        """(source, source epoch, window of that source's order)."""
        key, number = divmod(window, self._stride)
        epoch, component = divmod(key, len(self.sizes))
        return component, epoch, number

    def source_window(self, window: int) -> SourceWindow:
        """See `Windows.source_window`."""
        component, epoch, number = self.source_of(window)
        return SourceWindow(component, epoch, self.order_of(component, epoch), number)

    def window_length(self, window: int) -> int:
        """Samples of a window, of which some may come in the epoch before or after this one."""
        component_window = self.source_window(window)
        return component_window.windows.window_length(component_window.number)

    def window_positions(self, window: int) -> NDArray[np.int64]:
        """The inverse of `locate`, int64 [indices]: where each index comes; -1: not in this epoch."""
        component, epoch, number = self.source_of(window)
        index = self.order_of(component, epoch).window_positions(number)
        index += epoch * self.sizes[component]
        return self.interleaving.positions(component, index)

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of a window in this epoch, and the one after its last; other windows lie between."""
        positions = self.window_positions(window)
        positions = positions[positions >= 0]
        return (int(positions.min()), int(positions.max()) + 1) if len(positions) else (0, 0)

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Blocks of a window in read order, int64 [b]: rows of its source's block table."""
        component_window = self.source_window(window)
        return component_window.windows.window_blocks(component_window.number)

    def window_samples(
        self, window: int, indices: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal int32 [k] and row in the block int64 [k] of each index, or of those given."""
        component_window = self.source_window(window)
        return component_window.windows.window_samples(component_window.number, indices)


@dataclass(frozen=True, eq=False, kw_only=True)
class MixtureBatchPlan(BatchPlan):
    """Batches of a mixture's positions: `BatchPlan`'s arithmetic, with the lanes of the sources.

    Costs O(global batch) a batch, some 25 ns a sample of all ranks for `items` and 80 for `takes`: which
    samples are this rank's depends on what the others get.
    """

    windows: MixtureWindows

    def takes(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the rank's batches take each position, padding left out, bool [n]; -1 never is."""
        batch, offset = np.divmod(positions - self.start, self.global_batch_size)
        mask = (positions >= self.start) & (batch < self.num_full)
        if self.world_size > 1:
            candidates = np.flatnonzero(mask)
            numbers, which = np.unique(batch[candidates], return_inverse=True)
            mask[candidates] = self._is_own(numbers, which, offset[candidates])
        if len(self.rank_tail):
            mask |= np.isin(positions, self.rank_tail)
        return mask

    def _is_own(
        self, batches: NDArray[np.int64], which: NDArray[np.int64], offset: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return whether the sample at each offset of `batches[which]` is this rank's, bool [n]."""
        flags = np.zeros(len(which), bool)
        parts = batches // self._part
        for part in np.unique(parts).tolist():
            shares = self._own_offsets(part)
            mask = np.zeros((len(shares), self.global_batch_size), bool)
            np.put_along_axis(mask, shares, True, axis=1)
            here = np.flatnonzero(parts[which] == part)
            flags[here] = mask[batches[which[here]] - part * self._part, offset[here]]
        return flags

    def _full_batches(self, first_batch: int, last_batch: int) -> NDArray[np.int64]:
        """Positions of this rank in complete global batches, one after the other."""
        if first_batch >= last_batch:
            return np.empty(0, np.int64)
        first, last = first_batch // self._part, (last_batch - 1) // self._part
        shares = np.concatenate([self._own_offsets(part) for part in range(first, last + 1)])
        shares = shares[first_batch - first * self._part :][: last_batch - first_batch]
        begin = self.start + np.arange(first_batch, last_batch) * self.global_batch_size
        return np.asarray(begin[:, None] + shares).reshape(-1)

    @property
    def _part(self) -> int:
        """Batches whose shares are worked out together."""
        return max(1, _CHUNK // self.global_batch_size)

    @cached_property
    def _own_offsets(self) -> Callable[[int], NDArray[np.int32]]:
        """`_offsets_of`, the last ones kept: the windows of all sources ask for the same batches."""
        return lru_cache(max(8, _KEPT_OFFSETS // (self._part * self.batch_size)))(self._offsets_of)

    def _offsets_of(self, part: int) -> NDArray[np.int32]:
        """Offsets of this rank's samples in each complete batch of a part, [batches, batch_size]."""
        numbers = np.arange(part * self._part, min((part + 1) * self._part, self.num_full))
        begin, first = self.start + numbers * self.global_batch_size, self.rank * self.batch_size
        return self._shares(begin, self.global_batch_size, first, self.batch_size).astype(np.int32)

    def _shares(self, begin: NDArray[np.int64], size: int, first: int, count: int) -> NDArray[np.int64]:
        """Offsets in batches of `size` that begin at these positions: `count` from the `first` by lane."""
        if self.num_lanes == 1:
            return np.broadcast_to(np.arange(first, first + count), (len(begin), count))
        positions = (begin[:, None] + np.arange(size)).reshape(-1) % self.num_items  # padding wraps
        lanes = self.windows.lanes(positions).reshape(len(begin), size)
        return np.argsort(lanes, axis=1, kind="stable")[:, first : first + count]


class MixturePlan(RankPlan):
    """One rank's batches of one epoch of a mixture. Arguments and errors as those of `EpochPlan`."""

    def __init__(self, order: MixtureWindows, **dealing: Unpack[Dealing]) -> None:
        batch_plan = MixtureBatchPlan(
            windows=order, num_items=order.num_samples, num_lanes=order.num_lanes, **dealing
        )
        self.order, self._batch_plan = order, batch_plan
        self._window_positions = order.window_positions

    def rank_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64] | None:
        """See `RankPlan.rank_indices`; `windows` is the mixture's."""
        dealt: Any = self.batch_plan
        mask = dealt.takes(self._window_positions(window))
        return None if mask.all() else np.flatnonzero(mask)
