"""Order is arithmetic: `(seed, epoch, position) -> sample`, with no random-number state.

An epoch puts the non-empty blocks in a seeded *spread order*, in which any run of blocks takes from all parts
of the dataset, and deals them to lanes (`sharding.order.lanes`): position p is sample `p // L` of lane `p %
L`. Each lane is cut into *windows* of consecutive blocks, and samples are mixed inside their lane's window.

Window w of all lanes is one unit of staging. Lanes advance together, so each takes into window w the blocks
whose middle lies in the same stretch of positions; where block sizes differ, windows of different lanes
begin up to half a block apart, and around there two windows are in use at the same time. Windows are of one
size. Only where the loader chose it does epoch 0 begin with small ones (8, 16, 32 ... blocks), so that the
first batch of a training waits for few reads; the price is that the samples of these few blocks mix among
fewer others.
An `Order` holds O(blocks) memory and never changes: use it from any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.order.epoch_order import SourceWindow
from sharding.order.lanes import Lanes, cut_lanes, deal_evenly, deal_with_exchange
from sharding.order.permutations import (
    BLOCK_ORDER,
    FULL_ORDER,
    LANE_ORDER,
    WINDOW_ORDER,
    SeededPermutations,
    feistel,
    mix_key,
    mix_more,
    mix_runs,
    seeded_permutations,
    spread_order,
)
from sharding.order.shuffle import DEFAULT_WINDOW_BLOCKS, Shuffle
from sharding.order.windows import cut_windows, first_blocks

_SAMPLES_AT_ONCE = 1 << 21
"""Samples tabulated together: 16 MiB."""


class Order:
    """The order of the samples in one epoch. Positions count from 0 to `num_samples`.

    Every sample has one index in one window. A block is in one window and one lane, but for at most
    `num_lanes` - 1 blocks that were cut to make the lanes equal: parts of these may be in several windows.
    Blocks without samples are in no window.

    Args:
        num_samples_per_block: [blocks] integers >= 0, the block table's column.
        shuffle: how to mix.
        seed: any 64-bit integer.
        epoch: >= 0.

    Raises `ValueError` for arguments that break these rules.
    """

    ends: NDArray[np.int64] | None = None
    """[samples] times that a sample and those before it come; None: each comes once."""

    def __init__(self, num_samples_per_block: ArrayLike, shuffle: Shuffle, *, seed: int, epoch: int) -> None:
        counts = _checked_counts(num_samples_per_block)
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        self.seed, self.epoch = seed, epoch
        self.shuffle = shuffle.resolved()
        """The shuffle with nothing left open: what a resume must use to get the same order."""
        self.num_lanes = self.shuffle.num_lanes
        self.num_samples, self.known_from = int(counts.sum()), 0
        self._key = mix_key(seed, epoch, FULL_ORDER)
        self._window_key = mix_more(5, seed, epoch, WINDOW_ORDER)
        """The first three of five parts: lane and window are still to come."""
        self.first_sample = np.cumsum(counts) - counts
        """[blocks] the number of each block's first sample."""
        blocks = self._block_order(np.flatnonzero(counts))
        sizes = counts[blocks]
        self.table = cut_windows(
            self._lanes(blocks, sizes),
            blocks,
            sizes,
            self.shuffle.window_blocks or DEFAULT_WINDOW_BLOCKS,
            ramp=self.shuffle.ramp_in(epoch),
        )
        """The table of its windows; of a "full" order, none."""
        self.num_windows = self.table.num_windows

    def _block_order(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.shuffle.kind == "none":
            return blocks
        if self.shuffle.kind == "full":  # block order has no meaning here
            return blocks[:0]
        order = spread_order(len(blocks), mix_key(self.seed, self.epoch, BLOCK_ORDER))
        if self.num_lanes > 1:  # else each lane would get one contiguous part of equal blocks
            order = mix_runs(order, self.num_lanes, mix_key(self.seed, self.epoch, LANE_ORDER))
        return blocks[order]

    def _lanes(self, blocks: NDArray[np.int64], sizes: NDArray[np.int64]) -> Lanes:
        num_lanes, share = self.num_lanes, self.shuffle.exchange
        if share == 1:
            lane = deal_evenly(sizes, num_lanes)
            # Their numbers mean nothing, and rotating them makes all lanes equally likely for a sample.
            rotation = mix_key(self.seed, self.epoch, BLOCK_ORDER, num_lanes) % num_lanes
            return cut_lanes(sizes, lane, num_lanes, 0 if self.shuffle.kind == "none" else rotation)
        in_file_order = np.argsort(blocks)
        lane = np.empty(len(blocks), np.uint16)
        lane[in_file_order] = deal_with_exchange(
            sizes[in_file_order], num_lanes, share, seed=self.seed, epoch=self.epoch
        )
        return cut_lanes(sizes, lane, num_lanes)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The window of each position and the index in it that holds its sample, both int64 [n].

        Windows need not ascend with positions. Raises `IndexError` for a position that is not in
        [0, num_samples), `ValueError` under "full", which has no windows.
        """
        if self.shuffle.kind == "full":
            raise ValueError("a full shuffle has no windows: use samples(positions)")
        self._check_positions(positions)
        return self.table.locate(positions)

    def window_length(self, window: int) -> int:
        """Return the number of samples in the window."""
        return int(self.table.window_lengths[self._checked(window)])

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of the window, and the one after its last; some in between may be other windows'."""
        table, cells = self.table, self.table.cells(self._checked(window))
        begin, end = table.cell_start[cells], table.cell_start[cells + 1]
        lane = np.flatnonzero(end > begin)
        first, last = (offsets[lane] - table.lane_bounds[lane] for offsets in (begin, end - 1))
        num = self.num_lanes
        return int((first * num + lane).min()), int((last * num + lane).max()) + 1

    def window_positions(self, window: int) -> NDArray[np.int64]:
        """The inverse of `locate`: the position of each index, int64 [window_length]."""
        table, cells = self.table, self.table.cells(self._checked(window))
        begin, lane = table.cell_start[cells], np.arange(self.num_lanes)
        size = table.cell_start[cells + 1] - begin
        first = (begin - table.lane_bounds[lane] - table.cell_index[cells]) * self.num_lanes + lane
        positions = np.arange(int(size.sum())) * self.num_lanes
        positions += np.repeat(first, size)
        return positions

    def window_blocks(self, window: int) -> NDArray[np.int64]:
        """Numbers of the window's blocks (rows of the block table) in read order, int64 [b], read-only."""
        self._checked(window)
        start = self.table.read_start
        return self.table.read_block[start[window] : start[window + 1]]

    def window_samples(
        self, window: int, indices: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Locate the window's samples, index by index.

        Args:
            window: in [0, num_windows).
            indices: int64 [k], the indices asked for; None for all. Lanes before the first and after the last
                of them cost nothing.

        Returns:
            block_ordinal int32 [k]: index into `window_blocks(window)`; row int64 [k]: sample of that block.
        """
        table, cells = self.table, self.table.cells(self._checked(window))
        if indices is None:
            return self._mixed(window, cells)
        if not len(indices):
            return np.empty(0, np.int32), np.empty(0, np.int64)
        ends = np.searchsorted(table.cell_index[cells], [indices.min(), indices.max()], side="right")
        cells = cells[ends[0] - 1 : ends[1]]
        ordinal, row = self._mixed(window, cells)
        indices = indices - table.cell_index[cells[0]]
        return ordinal[indices], row[indices]

    def source_window(self, window: int) -> SourceWindow:
        """The window itself: there is one source."""
        return SourceWindow(0, None, self, window)

    def whole_window(
        self,
        window: int,
        num_samples: NDArray[np.int64],
        out: NDArray[np.int64],
        mix: SeededPermutations = seeded_permutations,
    ) -> NDArray[np.int64]:
        """A window for whoever stages all of its blocks, side by side in an order that makes this cheap.

        Args:
            window: in [0, num_windows).
            num_samples: int64 [blocks], the block table's column.
            out: int64 [window_length(window)]; gets the row of the sample at each index,
                counting the samples of all blocks through.
            mix: makes the orders of the lanes' samples.

        Returns the blocks, int64 [b], as `window_blocks` in another order.
        """
        cells = self.table.cells(self._checked(window))
        blocks, rows = self.table.rows_of(cells, num_samples)
        if self.shuffle.kind != "window":
            out[:] = np.arange(len(out)) if rows is None else rows
            return blocks
        self._mixing(window, cells, out, mix)
        if rows is not None:
            np.take(rows, out.copy(), out=out)
        return blocks

    def indices_at(self, window: int, lane: NDArray[np.int64], depth: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of samples of a window, given by lane and depth in it, int64 [n]."""
        table, cell = self.table, lane * self.num_windows + window
        return depth + table.lane_bounds[lane] + table.index_shift[cell]

    def window_core(self, window: int) -> tuple[int, int]:
        """The longest range of positions [first, end) that all lie in the window; none where end <= first."""
        table, cells = self.table, self.table.cells(self._checked(window))
        lane, num = np.arange(self.num_lanes), self.num_lanes
        first, end = (table.cell_start[edges] - table.lane_bounds[:-1] for edges in (cells, cells + 1))
        return int(((first - 1) * num + lane).max()) + 1, int((end * num + lane).min())

    def _mixed(self, window: int, cells: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row of all samples of some cells of a window, in their order."""
        ordinal, row = self.table.samples_of(cells)
        if self.shuffle.kind != "window":
            return ordinal, row
        order = np.empty(len(row), np.int64)
        self._mixing(window, cells, order, seeded_permutations)
        return ordinal[order], row[order]

    def _mixing(
        self,
        window: int,
        cells: NDArray[np.int64],
        out: NDArray[np.int64],
        mix: SeededPermutations,
    ) -> None:
        """Seeded permutations of the cells' samples, side by side."""
        sizes = self.table.cell_start[cells + 1] - self.table.cell_start[cells]
        lanes = (cells // self.num_windows).tolist()
        mix(sizes, [mix_more(self._window_key, lane, window) for lane in lanes], out)

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample numbers in the dataset at the positions, int64 [n]; positions may come in any order.

        Costs the arithmetic of each lane's window touched under "window", O(n log blocks) under "blocks".
        Raises `IndexError` for a position that is not in [0, num_samples).
        """
        self._check_positions(positions)
        table, kind = self.table, self.shuffle.kind
        if kind == "full":
            return feistel(positions.astype(np.uint64), self.num_samples, self._key).view(np.int64)
        if kind != "window":
            offset = table.offsets(positions)
            piece = np.searchsorted(table.piece_start, offset, side="right") - 1
            offset += table.piece_row[piece] - table.piece_start[piece]
            return offset + self.first_sample[table.piece_block[piece]]
        cells, offsets = table.find(positions)
        out = np.empty(len(positions), np.int64)
        for first, last in self._in_groups(cells):
            inside = (cells >= first) & (cells < last)
            part = slice(None) if inside.all() else np.flatnonzero(inside)
            out[part] = self._sample_numbers(cells[part], offsets[part], first, last)
        return out

    def in_order(self, begin: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Positions and their sample numbers, two int64 [n]: all from `begin` on, each once.

        What `samples` says, at the cost of mixing each window once, however large windows are.
        """
        if self.shuffle.kind != "window":
            for first in range(begin, self.num_samples, _SAMPLES_AT_ONCE):
                positions = np.arange(first, min(first + _SAMPLES_AT_ONCE, self.num_samples))
                yield positions, self.samples(positions)
            return
        for window in range(self.num_windows):
            if self.window_span(window)[1] > begin:
                positions, numbers = self.window_positions(window), self.window_numbers(window)
                later = slice(None) if begin == 0 else positions >= begin
                yield positions[later], numbers[later]

    def window_numbers(self, window: int) -> NDArray[np.int64]:
        """Sample numbers of a window in the dataset, index by index, int64 [window_length]."""
        ordinal, row = self._mixed(window, self.table.cells(self._checked(window)))
        row += self.first_sample[self.window_blocks(window)][ordinal]
        return row

    def _in_groups(self, cells: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Ranges of cells [first, last) that cover those touched, each small enough to tabulate."""
        touched = _which(cells, 0, len(self.table.cell_index))
        size = self.table.cell_start[touched + 1] - self.table.cell_start[touched]
        ends = np.flatnonzero(np.diff(np.cumsum(size) // _SAMPLES_AT_ONCE)) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(touched, ends) if len(part)]

    def _sample_numbers(
        self, cells: NDArray[np.int64], offsets: NDArray[np.int64], first: int, last: int
    ) -> NDArray[np.int64]:
        """Return the sample numbers at offsets in cells of [first, last); each cell touched is tabulated."""
        # A seeded permutation is a sort, which tells nothing of one sample alone: a cell is mixed whole, and
        # once for all of its positions. `shift` leads from an offset in the lanes to one in the tables side
        # by side.
        shift, size, tables = np.zeros(last - first, np.int64), 0, []
        for cell in _which(cells, first, last):
            window = int(cell) % self.num_windows
            ordinal, row = self._mixed(window, cell[None])
            row += self.first_sample[self.window_blocks(window)][ordinal]
            shift[cell - first] = size - self.table.cell_start[cell]
            size += len(row)
            tables.append(row)
        return cast(NDArray[np.int64], np.concatenate(tables)[shift[cells - first] + offsets])

    def _checked(self, window: int) -> int:
        if not 0 <= window < self.num_windows:
            raise IndexError(f"window must be in [0, {self.num_windows}), got {window}")
        return window

    def _check_positions(self, positions: NDArray[np.int64]) -> None:
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.num_samples:
            raise IndexError(
                f"positions must be in [0, {self.num_samples}), got {positions.min()} to {positions.max()}"
            )


def most_windows(num_blocks: int, shuffle: Shuffle) -> int:
    """Windows that so many blocks with samples are cut into, at most, in any epoch and whatever their sizes.

    `shuffle`: with nothing left open.
    """
    window_blocks = shuffle.window_blocks or DEFAULT_WINDOW_BLOCKS
    return len(first_blocks(num_blocks, window_blocks, shuffle.num_lanes, ramp=shuffle.ramp or False))


def _which(numbers: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """The different numbers in [first, last) among some of them, ascending."""
    # Not by `unique`: it sorts, and there are as many numbers as positions that were asked for.
    mask = np.zeros(last - first, bool)
    mask[numbers - first] = True
    return np.flatnonzero(mask) + first


def _checked_counts(num_samples_per_block: ArrayLike) -> NDArray[np.int64]:
    counts = np.asarray(num_samples_per_block)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(f"num_samples_per_block must be 1-D integers, got {counts.ndim}-D {counts.dtype}")
    if counts.size and int(counts.min()) < 0:
        raise ValueError(f"a block cannot hold {int(counts.min())} samples")
    return counts.astype(np.int64)
