"""Cutting lanes into windows, and finding a position's window and index again.

The part of a window that one lane holds is a *cell*; cells are numbered lane after lane, and so are samples
("offsets"), which makes every look-up one binary search in an ascending array. A window's indices number
its cells' samples, lane after lane.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from sharding.order.lanes import Lanes

FIRST_WINDOW_BLOCKS = 8
"""Blocks in the first window of a ramp, or one a lane; each next window doubles up to the full size."""


class WindowTable(Struct, frozen=True, eq=False, kw_only=True):
    """A table of the windows of an epoch. All arrays are read-only; about 45 bytes a block."""

    num_windows: int
    """The number of windows; none is empty."""
    lane_bounds: NDArray[np.int64]
    """[lanes + 1]: samples in the lanes before."""
    cell_start: NDArray[np.int64]
    """[lanes * windows + 1]: samples in the cells before."""
    cell_piece: NDArray[np.int64]
    """[lanes * windows + 1]: pieces in the cells before."""
    cell_index: NDArray[np.int64]
    """[lanes * windows]: first index of the cell in its window."""
    index_shift: NDArray[np.int64]
    """[lanes * windows]: what to add to an offset in the cell to get its index."""
    grid: NDArray[np.int64]
    """[depths >> grid_shift]: a window at or before that of this depth of any lane."""
    grid_shift: int
    window_lengths: NDArray[np.int64]
    """[windows]: samples in the window."""
    piece_start: NDArray[np.int64]
    """[pieces + 1]: samples in the pieces before."""
    piece_block: NDArray[np.int64]
    """[pieces]: number of its block."""
    piece_row: NDArray[np.int64]
    """[pieces]: its first sample in the block."""
    piece_ordinal: NDArray[np.int32]
    """[pieces]: its block's index in the window's list of blocks."""
    read_block: NDArray[np.int64]
    """[reads]: the blocks of each window in block order, window after window; each once in a window."""
    read_start: NDArray[np.int64]
    """[windows + 1]: reads in the windows before."""

    def __post_init__(self) -> None:
        for value in structs.astuple(self):
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_lanes(self) -> int:
        """Return the number of lanes of the epoch."""
        return len(self.lane_bounds) - 1

    def cells(self, window: int) -> NDArray[np.int64]:
        """The window's cells, one a lane."""
        return np.arange(self.num_lanes) * self.num_windows + window

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions counted lane after lane, a new int64 [n]."""
        lane, depth = _lane_and_depth(positions, self.num_lanes)
        depth += self.lane_bounds[lane]
        return depth

    def find(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Cell and offset of each position, both a new int64 [n].

        A grid over the depth in a lane tells a window that is not too late; comparing with the ends of the
        cells corrects it, rarely by more than one. A quarter of the time of a binary search.
        """
        lane, offset = _lane_and_depth(positions, self.num_lanes)
        cell = self.grid[offset >> self.grid_shift]
        cell += lane * self.num_windows
        offset += self.lane_bounds[lane]
        end = self.cell_start[1:]
        later = end[cell] <= offset
        cell += later
        late = np.flatnonzero(later)
        while len(late):
            late = late[end[cell[late]] <= offset[late]]
            cell[late] += 1
        return cell, offset

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and index of each position, both int64 [n]."""
        cell, index = self.find(positions)
        index += self.index_shift[cell]
        cell -= _lane_and_depth(positions, self.num_lanes)[0] * self.num_windows
        return cell, index

    def samples_of(self, cells: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block ordinal and row of every sample of some cells, in the order of their blocks."""
        pieces, size = self._pieces(cells)
        return np.repeat(self.piece_ordinal[pieces], size), ranges(self.piece_row[pieces], size)

    def rows_of(
        self, cells: NDArray[np.int64], num_samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The blocks of some cells in the order of their pieces, and the rows of all samples in these.

        Rows count the samples of the blocks through; None where they are 0, 1, 2 ...: no block is cut.
        """
        pieces, size = self._pieces(cells)
        blocks, row = self.piece_block[pieces], self.piece_row[pieces]
        if (num_samples[blocks] == size).all():
            return blocks, None
        once, which = np.unique(blocks, return_inverse=True)
        counts = num_samples[once]
        return once, ranges((np.cumsum(counts) - counts)[which] + row, size)

    def _pieces(self, cells: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pieces of some cells, and their samples."""
        bounds = zip(self.cell_piece[cells].tolist(), self.cell_piece[cells + 1].tolist(), strict=True)
        pieces = np.concatenate([np.arange(first, last) for first, last in bounds])
        return pieces, self.piece_start[pieces + 1] - self.piece_start[pieces]


def ranges(first: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """`size[i]` consecutive numbers from `first[i]` on, for each i."""
    out = np.arange(int(size.sum()))
    out += np.repeat(first - (np.cumsum(size) - size), size)
    return out


def cut_windows(
    lanes: Lanes, blocks: NDArray[np.int64], sizes: NDArray[np.int64], window_blocks: int, *, ramp: int
) -> WindowTable:
    """Cut all lanes at the same positions, to the nearest block.

    Args:
        lanes: the lanes.
        blocks: [blocks], numbers in block order.
        sizes: [blocks], their samples.
        window_blocks: blocks in a window at most, over all lanes.
        ramp: of the shuffle, or False; see `small_windows`.
    """
    num_lanes = len(lanes.bounds) - 1
    lane = np.repeat(np.arange(num_lanes), np.diff(np.searchsorted(lanes.start, lanes.bounds)))
    first_block = first_blocks(len(sizes), window_blocks, num_lanes, ramp=ramp)
    window = _window_of_piece(lanes, lane, sizes, first_block)
    num_windows = int(window.max(initial=-1)) + 1
    cell_piece = np.searchsorted(lane * num_windows + window, np.arange(num_lanes * num_windows + 1))
    cell_start = lanes.start[cell_piece]
    in_cells = np.diff(cell_start).reshape(num_lanes, num_windows)
    cell_index = (np.cumsum(in_cells, axis=0) - in_cells).reshape(-1)
    grid, shift = _grid(cell_start, lanes.bounds, num_windows)
    ordinal, read_position, read_start = _reads(window, lanes.position, num_windows)
    return WindowTable(
        num_windows=num_windows,
        lane_bounds=lanes.bounds,
        cell_start=cell_start,
        cell_piece=cell_piece,
        cell_index=cell_index,
        index_shift=cell_index - cell_start[:-1],
        grid=grid,
        grid_shift=shift,
        window_lengths=in_cells.sum(axis=0),
        piece_start=lanes.start,
        piece_block=blocks[lanes.position],
        piece_row=lanes.row,
        piece_ordinal=ordinal,
        read_block=blocks[read_position],
        read_start=read_start,
    )


def windows_touched(windows: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64] | slice]]:
    """Split indices by window: (window, indices with it, ascending), in order of first appearance.

    A slice stands for consecutive indices: neither it nor what it selects is a copy.
    """
    if not len(windows):
        return []
    if int(windows.min()) == int(windows.max()):
        return [(int(windows[0]), slice(0, len(windows)))]
    if np.all(windows[1:] >= windows[:-1]):
        bounds = [0, *(np.flatnonzero(windows[1:] != windows[:-1]) + 1).tolist(), len(windows)]
        return [(int(windows[a]), slice(a, b)) for a, b in pairwise(bounds)]
    first = int(windows[0])
    others = np.flatnonzero(windows != first)
    second = int(windows[others[0]])
    if (windows[others] == second).all():  # lanes go from one to the next
        return [(first, _slice_of(np.flatnonzero(windows == first))), (second, _slice_of(others))]
    # Sixteen-bit keys sort by radix, in linear time.
    small = windows.astype(np.uint16) if int(windows.max()) < 1 << 16 else windows
    by_window = np.argsort(small, kind="stable")
    cuts = np.flatnonzero(np.diff(small[by_window])) + 1
    groups = sorted(np.split(by_window, cuts), key=lambda indices: int(indices[0]))
    return [(int(windows[indices[0]]), _slice_of(indices)) for indices in groups]


def _slice_of(indices: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return ascending indices, as a slice where they follow one another."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first == len(indices) - 1 else indices


def _window_of_piece(
    lanes: Lanes, lane: NDArray[np.int64], sizes: NDArray[np.int64], first_block: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The stretch of positions in which the middle of each piece lies; stretches without any are left out."""
    num_lanes = len(lanes.bounds) - 1
    begin = np.concatenate(([0], np.cumsum(sizes)))[first_block]
    # By the middle: cut by their first or last samples, lanes would be up to a whole block apart. Twice the
    # middle, and in positions of all lanes, so that every comparison is one of integers, alike everywhere.
    middle = lanes.start[:-1] + lanes.start[1:] - 2 * lanes.bounds[lane]
    window = np.searchsorted(2 * begin, middle * num_lanes, side="right") - 1
    in_use = np.bincount(window, minlength=1) > 0
    return (np.cumsum(in_use) - 1)[window]


def first_blocks(num_blocks: int, window_blocks: int, num_lanes: int, *, ramp: int) -> NDArray[np.int64]:
    """First block of every window in block order, int64 [windows].

    Windows are of one size, to a block a lane, and `window_blocks` on average at most: a short one at the end
    would hold few blocks, and so few labels of sorted data. Those of a ramp come before them.
    """
    *small, start = accumulate(small_windows(num_blocks, window_blocks, num_lanes, ramp), initial=0)
    # In rounds of a block a lane: cut inside a round, no lane or all of them would go to the next window.
    left = max(0, num_blocks - start)
    rounds, num_even = -(-left // num_lanes), -(-left // window_blocks)
    even = start + np.arange(num_even) * rounds // max(1, num_even) * num_lanes
    return np.array([*(first for first in small if first < num_blocks), *even], np.int64)


def small_windows(num_blocks: int, window_blocks: int, num_lanes: int, ramp: int) -> list[int]:
    """Blocks of the windows of a ramp: 8, 16, 32 ... or one a lane, and twice as many each time.

    Args:
        num_blocks: of the dataset.
        window_blocks: of the windows behind them.
        num_lanes: of the order.
        ramp: blocks of the first one, which a dataset that fits into one window has, too, as long as as many
            are left for the last. True: 8, but none there. False: none.
    """
    is_whole = num_blocks <= window_blocks
    if not ramp or (is_whole and ramp is True):
        return []
    sizes, size, left = list[int](), max(FIRST_WINDOW_BLOCKS if ramp is True else ramp, num_lanes), num_blocks
    while size < window_blocks and not (is_whole and left < 2 * size):
        sizes.append(size)
        left -= size
        size *= 2
    return sizes


def _grid(
    cell_start: NDArray[np.int64], lane_bounds: NDArray[np.int64], num_windows: int
) -> tuple[NDArray[np.int64], int]:
    """Return for depths in steps of a power of two the earliest window that any lane is in."""
    longest = int(np.diff(lane_bounds).max())
    shift = max(0, (longest // max(1, 4 * num_windows)).bit_length() - 1)
    depths = np.arange((longest >> shift) + 1) << shift
    # The earliest of all lanes: one grid serves them all, and `find` steps forward only.
    grid = np.full(len(depths), max(0, num_windows - 1))
    for lane, first in enumerate(lane_bounds[:-1].tolist()):
        ends = cell_start[lane * num_windows + 1 : (lane + 1) * num_windows + 1] - first
        np.minimum(grid, np.searchsorted(ends, depths, side="right"), out=grid)
    return grid, shift


def _reads(
    window: NDArray[np.int64], position: NDArray[np.int64], num_windows: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return each piece's block ordinal in its window, each read's block position, a window's first read."""
    pieces = np.lexsort((position, window))
    window, position = window[pieces], position[pieces]
    new = np.ones(len(pieces), bool)  # two parts of one block in one window are one read
    new[1:] = (window[1:] != window[:-1]) | (position[1:] != position[:-1])
    start = np.searchsorted(window[new], np.arange(num_windows + 1))
    ordinal = np.empty(len(pieces), np.int32)
    ordinal[pieces] = np.cumsum(new) - 1 - start[window]
    return ordinal, position[new], start


def _lane_and_depth(
    positions: NDArray[np.int64], num_lanes: int
) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
    """The lane of each position and its sample in it; the depths are a new array."""
    if num_lanes == 1:
        return 0, positions.astype(np.int64)
    shift = num_lanes.bit_length() - 1
    if num_lanes == 1 << shift:  # dividing takes ten times as long as shifting
        return positions & (num_lanes - 1), positions >> shift
    return positions % num_lanes, positions // num_lanes
