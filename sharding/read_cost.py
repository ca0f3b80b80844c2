"""What a plan costs to read: amplification, hot spots, bytes that are open at a time, and before a batch.

The unit of staging is a window: what a node takes of it is read when its first sample is due, and held until
its last one is delivered. A full shuffle has no windows: `together` consecutive positions are read as one,
either sample by sample (`located`, where the format tells where each lies) or by whole blocks. Ranks of a
node share what the node reads. All of it is computed from a `Stretch`, without a byte of data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharding.block_table import BlockTable
from sharding.order import Order
from sharding.quality import Stretch

TOGETHER = 4096
"""Positions of a full shuffle that are read as one."""


@dataclass(frozen=True, eq=False)
class Reads:
    """The requests of a stretch in order of need: a block once for each node and window that takes of it.

    All arrays are [requests]. For a full shuffle whose samples are located, a request is one sample.
    """

    node: NDArray[np.int64]
    window: NDArray[np.int64]
    """Ascends but where several windows are open."""
    block: NDArray[np.int64]
    length: NDArray[np.int64]
    """Bytes to read."""
    held: NDArray[np.int64]
    """Bytes it occupies in memory, at most."""
    first_row: NDArray[np.int64]
    """Row of the stretch that needs it first; ascends."""
    samples: NDArray[np.int64]
    """Rows that are served by it."""
    window_of_row: NDArray[np.int64]
    """[rows of the stretch], not [requests]: what each row is staged with."""


@dataclass(frozen=True)
class HotSpot:
    """The most that any target gets of `read_ahead` consecutive requests."""

    ratio: float
    """Requests to the target over its fair share, or over 1 where that is less. 1: nobody could do better;
    the number of targets: all requests go to one."""
    most: int
    """Requests to it."""
    fair: float
    """What it would get if requests were spread by the targets' sizes."""
    target: int
    read_ahead: int


def reads_of(stretch: Stretch, table: BlockTable, *, located: bool, together: int = TOGETHER) -> Reads:
    """The requests of a stretch, each (node, window, block) once.

    Args:
        stretch: what is delivered.
        table: the blocks.
        located: whether single samples can be read; matters under a full shuffle only.
        together: positions of a full shuffle that are staged as one.
    """
    window = windows_of(stretch.order, stretch.position, together)
    if located and stretch.order.shuffle.kind == "full":
        return _sample_reads(stretch, table, window)
    span = len(table.length)
    key = (window * stretch.num_nodes + stretch.node) * span + stretch.block
    _, first_row, samples = np.unique(key, return_index=True, return_counts=True)
    by_need = np.argsort(first_row, kind="stable")
    rows, block = first_row[by_need], stretch.block[first_row[by_need]]
    held = np.maximum(table.length, table.nbytes)[block]
    node = stretch.node[rows]
    served = samples[by_need]
    return Reads(node, window[rows], block, table.length[block], held, rows, served, window)


def _sample_reads(stretch: Stretch, table: BlockTable, window: NDArray[np.int64]) -> Reads:
    """Every sample by itself, of its block's mean size."""
    block = stretch.block
    length = -(-table.length // np.maximum(1, table.num_samples))[block]
    rows, ones = np.arange(len(block)), np.ones(len(block), np.int64)
    return Reads(stretch.node, window, block, length, length, rows, ones, window)


def windows_of(order: Order, positions: NDArray[np.int64], together: int = TOGETHER) -> NDArray[np.int64]:
    """What each position is staged with: its window, or its piece of a full shuffle; int64 [n]."""
    return positions // together if order.shuffle.kind == "full" else order.window_of(positions)


def amplification(stretch: Stretch, reads: Reads, table: BlockTable) -> NDArray[np.float64]:
    """Bytes each node reads over its share of the bytes there are, float64 [nodes]; 1: nothing twice.

    The share of a node is `1 / num_nodes`. Of a stretch that is not the whole epoch, only requests for blocks
    that it delivers in full count; NaN where there are none. Under a full shuffle, where blocks are never
    delivered in full, the share is that of the samples delivered.
    """
    num_nodes = stretch.num_nodes
    if stretch.order.shuffle.kind == "full":
        due = np.bincount(stretch.block, minlength=len(table.length)) * _sample_bytes(table)
        read = np.bincount(reads.node, weights=reads.length, minlength=num_nodes)
        return np.asarray(read * num_nodes / due.sum())
    delivered = np.bincount(reads.block, weights=reads.samples, minlength=len(table.length))
    full = ((delivered >= table.num_samples) | stretch.whole) & (table.num_samples > 0)
    total = float(table.length[full].sum())
    if not total:
        return np.full(num_nodes, np.nan)
    weights = np.where(full[reads.block], reads.length, 0)
    return np.bincount(reads.node, weights=weights, minlength=num_nodes) * num_nodes / total


def _sample_bytes(table: BlockTable) -> NDArray[np.float64]:
    """Mean bytes of a sample of each block, 0 where there are none; float64 [blocks]."""
    mean: NDArray[np.float64] = table.length / np.maximum(1, table.num_samples)
    return mean


def open_bytes(stretch: Stretch, reads: Reads, node: int) -> NDArray[np.int64]:
    """Bytes of the windows a node has open in each batch of the stretch, int64 [batches].

    A window is open from the batch that first takes of it to the one that takes last.
    """
    mine = stretch.node == node
    if not mine.any():
        return np.zeros(stretch.last_batch - stretch.first_batch, np.int64)
    window = reads.window_of_row[mine]
    batch = stretch.batch[mine] - stretch.first_batch
    numbers, of_row = np.unique(window, return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.zeros(len(numbers), np.int64)
    np.minimum.at(first, of_row, batch)
    np.maximum.at(last, of_row, batch)
    own = reads.node == node
    at = np.searchsorted(numbers, reads.window[own])
    held = np.zeros(len(numbers), np.int64)
    np.add.at(held, at, reads.held[own])
    change = np.zeros(stretch.last_batch - stretch.first_batch + 1, np.int64)
    np.add.at(change, first, held)
    np.subtract.at(change, last + 1, held)
    return np.cumsum(change)[:-1]


def hot_spot(
    target: NDArray[np.integer], size: NDArray[np.floating] | NDArray[np.integer], read_ahead: int
) -> HotSpot:
    """The worst of all runs of `read_ahead` consecutive requests.

    Args:
        target: [requests], which shard, prefix or host each request goes to, in order of need.
        size: [targets], what their fair shares are in proportion to (blocks, bytes); not all 0.
        read_ahead: requests that are under way at a time.

    Raises `ValueError` without requests, or for read_ahead < 1.
    """
    if not len(target) or read_ahead < 1:
        raise ValueError(f"there must be requests, and read_ahead >= 1, got {len(target)} and {read_ahead}")
    read_ahead = min(read_ahead, len(target))
    # Requests of one target, side by side in order: key = target, then place in the sequence.
    stride = len(target) + read_ahead
    key = np.sort(target.astype(np.int64) * stride + np.arange(len(target)))
    within = np.searchsorted(key, key + read_ahead) - np.arange(len(key))
    fair = size * (read_ahead / size.sum())
    ratio = within / np.maximum(1.0, fair[key // stride])
    worst = int(ratio.argmax())
    number = int(key[worst] // stride)
    return HotSpot(float(ratio[worst]), int(within[worst]), float(fair[number]), number, read_ahead)


def first_batch_bytes(
    order: Order, positions: NDArray[np.int64], table: BlockTable, *, located: bool, together: int = TOGETHER
) -> int:
    """Bytes to read before the samples at `positions` (a batch's) can be delivered: their windows, whole."""
    windows = np.unique(windows_of(order, positions, together)).tolist()
    if order.shuffle.kind != "full":
        return sum(int(table.length[order.window_blocks(window)].sum()) for window in windows)
    starts = np.asarray(windows)[:, None] * together + np.arange(together)
    samples = order.samples(starts[starts < order.num_samples])
    blocks = np.searchsorted(table.first_sample, samples, side="right") - 1
    return int(_sample_bytes(table)[blocks].sum() if located else table.length[np.unique(blocks)].sum())


__all__ = [
    "TOGETHER",
    "HotSpot",
    "Reads",
    "amplification",
    "first_batch_bytes",
    "hot_spot",
    "open_bytes",
    "reads_of",
    "windows_of",
]
