"""Tell when a machine needs each block: read off the order, which is known for all epochs.

Time counts in samples of a source's own epochs: block b of an epoch's window w of n is needed at
`(epoch + w / n) * samples`. That is fine enough to tell which of two blocks is needed later, which is all
that making room in a cache asks for. O(blocks) for each epoch looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharding.order.order import Order

NOT_READ = -1


@dataclass(frozen=True)
class LaneRange:
    """The lanes that the ranks of one machine take."""

    first: int
    end: int
    shared: bool
    """True if two of these ranks take from one lane, so that a block is read more than once."""


def lanes_of_shard_indices(
    shard_indices: range, world_size: int, num_lanes: int, batch_size: int
) -> LaneRange:
    """Return the lanes of consecutive ranks: rank r of w takes the r-th part of each batch, by lane."""
    first = shard_indices.start * num_lanes // world_size
    end = -(-shard_indices.stop * num_lanes // world_size)
    even = batch_size * world_size % num_lanes == 0
    inside = all(index * num_lanes % world_size == 0 for index in shard_indices[1:])
    return LaneRange(first, end, len(shard_indices) > 1 and not (even and inside))


def windows_of_blocks(order: Order, num_blocks: int, lanes: LaneRange) -> NDArray[np.int64]:
    """The first window in which some lanes read each block of the table, int64 [num_blocks]; or `NOT_READ`.

    Of a full shuffle, which has no windows: window 0 for all blocks.
    """
    windows = np.full(num_blocks, NOT_READ)
    if order.shuffle.kind == "full":
        windows[:] = 0
        return windows
    table, num = order.table, order.num_windows
    bounds = table.cell_piece[lanes.first * num : lanes.end * num + 1]
    window = np.repeat(np.arange(len(bounds) - 1) % num, np.diff(bounds))
    blocks = table.piece_block[int(bounds[0]) : int(bounds[-1])]
    latest_first = np.argsort(-window, kind="stable")
    windows[blocks[latest_first]] = window[latest_first]
    return windows


def next_uses(
    blocks: NDArray[np.int64],
    now: tuple[int, int],
    this: tuple[NDArray[np.int64], int],
    following: tuple[NDArray[np.int64], int],
    *,
    done: bool = False,
) -> NDArray[np.float64]:
    """Return when blocks are needed next, in epochs, float64 [n]; infinity: not before the next epoch's end.

    Args:
        blocks: [n] rows of the block table.
        now: epoch, and the window that is being read.
        this: windows of the blocks in this epoch (`windows_of_blocks`), and their number.
        following: the same of the next epoch.
        done: they were read just now, and are not needed again in this epoch.
    """
    epoch, window = now
    soon, later = this[0][blocks], following[0][blocks]
    in_next = np.where(later == NOT_READ, np.inf, epoch + 1 + later / max(1, following[1]))
    if done:
        return in_next
    return np.where(soon >= max(window, 0), epoch + soon / max(1, this[1]), in_next)
