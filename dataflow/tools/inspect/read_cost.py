"""The costs of reading a plan: requests, amplification, bytes that are open at a time, and before a batch.

The unit of staging is a window: what a node takes of it is read when its first sample is due, and held until
its last one is delivered. A full shuffle has no windows: `together` consecutive positions are read as one,
either sample by sample (`located`, where the format tells where each lies) or by whole blocks. Ranks of a
node share what the node reads. All of it is computed from a `GlobalBatches`, without a byte of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataflow.tools.inspect.quality import GlobalBatches
from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.plan.placement import reads_by_node
from sharding.plan.plan import EpochPlan

TOGETHER = 4096
"""Positions of a full shuffle that are read as one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockRequests:
    """The requests of a stretch in order of need: a block once for each node and window that takes of it.

    All arrays are [requests]. For a full shuffle whose samples are located, a request is one sample.
    """

    node: NDArray[np.int64]
    window: NDArray[np.int64]
    """Ascends but where several windows are open."""
    block: NDArray[np.int64]
    length: NDArray[np.int64]
    """Number of bytes to read."""
    held: NDArray[np.int64]
    """Bytes it occupies in memory, at most."""
    first_row: NDArray[np.int64]
    """Row of the stretch that needs it first; ascends."""
    samples: NDArray[np.int64]
    """Rows that are served by it."""
    window_of_row: NDArray[np.int64]
    """[rows of the stretch], not [requests]: what each row is staged with."""


def reads_of(
    stretch: GlobalBatches, table: BlockTable, *, located: bool, together: int = TOGETHER
) -> BlockRequests:
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
    return BlockRequests(
        node=stretch.node[rows],
        window=window[rows],
        block=block,
        length=table.length[block],
        held=np.maximum(table.length, table.nbytes)[block],
        first_row=rows,
        samples=samples[by_need],
        window_of_row=window,
    )


def _sample_reads(stretch: GlobalBatches, table: BlockTable, window: NDArray[np.int64]) -> BlockRequests:
    """Every sample by itself, of its block's mean size."""
    block = stretch.block
    length = -(-table.length // np.maximum(1, table.num_samples))[block]
    return BlockRequests(
        node=stretch.node,
        window=window,
        block=block,
        length=length,
        held=length,
        first_row=np.arange(len(block)),
        samples=np.ones(len(block), np.int64),
        window_of_row=window,
    )


def windows_of(order: Order, positions: NDArray[np.int64], together: int = TOGETHER) -> NDArray[np.int64]:
    """Return what each position is staged with: its window, or its piece of a full shuffle; int64 [n]."""
    return positions // together if order.shuffle.kind == "full" else order.locate(positions)[0]


def amplification(
    stretch: GlobalBatches, reads: BlockRequests, table: BlockTable, batch_size: int
) -> NDArray[np.float64]:
    """Bytes each node reads in the epoch over its share of those there are, float64 [nodes]; 1: none twice.

    The share of a node is `1 / num_nodes`. Whole epochs are counted (`placement.reads_by_node`), but under a
    full shuffle the stretch, and the share is that of the samples delivered.
    """
    num_nodes, order = stretch.num_nodes, stretch.order
    if order.shuffle.kind == "full":
        due = float(_sample_bytes(table)[stretch.block].sum())
        read = np.bincount(reads.node, weights=reads.length, minlength=num_nodes)
    else:
        due = float(table.length[table.num_samples > 0].sum())
        read = reads_by_node(order, stretch.nodes.tolist(), batch_size, cost=table.length)
    return np.asarray(read * (num_nodes / due))


def _sample_bytes(table: BlockTable) -> NDArray[np.float64]:
    """Mean bytes of a sample of each block, 0 where there are none; float64 [blocks]."""
    mean: NDArray[np.float64] = table.length / np.maximum(1, table.num_samples)
    return mean


def open_bytes(stretch: GlobalBatches, reads: BlockRequests, node: int) -> NDArray[np.int64]:
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
    mask = reads.node == node
    index = np.searchsorted(numbers, reads.window[mask])
    held = np.zeros(len(numbers), np.int64)
    np.add.at(held, index, reads.held[mask])
    change = np.zeros(stretch.last_batch - stretch.first_batch + 1, np.int64)
    np.add.at(change, first, held)
    np.subtract.at(change, last + 1, held)
    return np.cumsum(change)[:-1]


def first_batch_bytes(
    plans: Sequence[EpochPlan], table: BlockTable, *, located: bool, together: int = TOGETHER
) -> int:
    """Bytes a node reads before the first batch: what `plans`, those of its ranks, take of its windows."""
    order = plans[0].order
    first = np.unique(windows_of(order, _delivered(plans, 1), together))
    end = (
        (int(first[-1]) + 1) * together
        if order.shuffle.kind == "full"
        else max(order.window_span(window)[1] for window in first.tolist())
    )
    positions = _delivered(plans, -(-(end - plans[0].start) // plans[0].batch_plan.global_batch_size))
    positions = positions[np.isin(windows_of(order, positions, together), first)]
    blocks = np.searchsorted(table.first_sample, order.samples(positions), side="right") - 1
    if located and order.shuffle.kind == "full":
        return int(_sample_bytes(table)[blocks].sum())
    return int(table.length[np.unique(blocks)].sum())


def _delivered(plans: Sequence[EpochPlan], num_batches: int) -> NDArray[np.int64]:
    """Positions in the first batches, each once though padding may repeat some."""
    taken = [plan.positions(0, min(num_batches, plan.num_batches))[0] for plan in plans]
    return np.unique(np.concatenate(taken))


# ---- hot spots: what is read most at one time --------------------------------------------------------------


@dataclass(frozen=True)
class PeakReads:
    """The reads that one shard (folder, host) has at the worst moment."""

    label: int
    """The label of the shard, folder or host."""
    most: int
    """Reads of it in the worst run."""
    share: float
    """Reads of it in a run on average. `most` far above it: one server works, others wait."""
    ahead: int
    """The number of reads in a run."""

    @property
    def ratio(self) -> float:
        """`most` over the share, or over 1 where that is less. 1: nobody could do better."""
        return self.most / max(1.0, self.share)


def hot_spot(labels: ArrayLike, ahead: int) -> PeakReads:
    """The label that is most above its share in any `ahead` consecutive reads.

    Args:
        labels: [reads] integers >= 0: the shard, folder or host of each read, in order of need, such as
            `shard[order.table.read_block]` for the reads of all nodes together.
        ahead: reads in flight or read ahead, such as a window's blocks; all of them if there are fewer.

    O(reads log reads). Raises `ValueError` without reads, or for ahead < 1.
    """
    label = np.asarray(labels).astype(np.int64)
    if not len(label) or ahead < 1:
        raise ValueError(f"there must be reads, and ahead >= 1, got {len(label)} and {ahead}")
    num_reads, run = len(label), min(len(label), ahead)
    by_label = np.argsort(label, kind="stable")
    label = label[by_label]
    # Reads of all labels on one axis, label after label, too far apart for runs of two labels to touch: how
    # many reads a run has that begins at a read is then one binary search, for all reads at once.
    position = label * (num_reads + run) + by_label
    most = np.searchsorted(position, position + run) - np.arange(num_reads)
    share = np.bincount(label)[label] * (run / num_reads)
    worst = int(np.argmax(most - share))
    return PeakReads(int(label[worst]), int(most[worst]), float(share[worst]), run)
