"""The quality of a plan's mixing: what its batches hold, by running its arithmetic, without reading data.

A `GlobalBatches` is a run of consecutive global batches as all ranks deliver them: the whole epoch where it
is small enough, else a piece from its middle, where windows have their full size. Everything here is a
function of a stretch, vectorised, with memory proportional to its samples; `dataflow.tools.inspect.read_cost`
is the other half, what the same stretch costs to read.

Two figures tell how labels come. *Lag-1 correlation* is that of neighbours' one-hot labels,
`(P(equal) - sum p^2) / (1 - sum p^2)`: 0 for independent draws, 1 where labels come in runs; for numbers it
is Pearson's. *Dispersion* is Pearson's chi-square of a batch's label counts over its degrees of freedom: 1
for independent draws, `batch size` where every batch has one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.plan.plan import EpochPlan

MAX_SAMPLES = 1 << 21
"""Samples a stretch has at most where nobody says: some seconds of arithmetic and half a GB."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalBatches:
    """Consecutive global batches of one epoch, row by row in order of delivery: by batch, then by rank.

    Samples that padding delivers a second time are left out.
    """

    order: Order
    nodes: NDArray[np.int64]
    """[ranks]: the node of each rank."""
    first_batch: int
    last_batch: int
    """Batches [first_batch, last_batch) of the `num_batches` of the epoch."""
    num_batches: int
    batch: NDArray[np.int64]
    """[m], ascending: batch of each row. All arrays below are [m] too."""
    node: NDArray[np.int64]
    position: NDArray[np.int64]
    sample: NDArray[np.int64]
    block: NDArray[np.int64]
    """Row of the block table that holds the sample."""

    @property
    def whole(self) -> bool:
        """Return whether these are all batches of the epoch."""
        return (self.first_batch, self.last_batch) == (0, self.num_batches)

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks are on."""
        return int(self.nodes.max()) + 1


def stretch_of(
    plans: Sequence[EpochPlan], nodes: Sequence[int], table: BlockTable, *, max_samples: int = MAX_SAMPLES
) -> GlobalBatches:
    """The batches that the figures are taken from: the middle of the epoch, or all of it.

    Args:
        plans: one a shard index, of the same order.
        nodes: [ranks], the node of each shard index, from 0.
        table: the blocks that the order is over.
        max_samples: more than these are not looked at; at least one batch is.

    Raises `ValueError` where the epoch has no batch, or there is not one node a rank.
    """
    if len(nodes) != len(plans) or not len(plans):
        raise ValueError(f"there must be one node a rank, got {len(nodes)} nodes for {len(plans)} ranks")
    total, size = plans[0].num_global_batches, plans[0].batch_plan.global_batch_size
    if not total:
        raise ValueError(
            f"the epoch has no batch: {plans[0].order.num_samples} samples, {size} a global batch, and "
            f"tail={plans[0].batch_plan.tail!r}; lower batch_size or keep the tail"
        )
    length = min(total, max(1, max_samples // size))
    first = (total - length) // 2
    last = first + length
    parts = [_rows(plan, first, last) for plan in plans]
    batch = np.concatenate([part[0] for part in parts])
    position = np.concatenate([part[1] for part in parts])
    node = np.repeat(np.asarray(nodes, np.int64), [len(part[0]) for part in parts])
    if len(plans) > 1:
        by_batch = np.argsort(batch, kind="stable")
        batch, position, node = batch[by_batch], position[by_batch], node[by_batch]
    if plans[0].num_padded_global and last == total:
        first_time = _first_time(batch == total - 1, position, plans[0].position_after(total - 1))
        batch, position, node = batch[first_time], position[first_time], node[first_time]
    order = plans[0].order
    sample = order.samples(position)
    block = np.searchsorted(table.first_sample, sample, side="right") - 1
    return GlobalBatches(
        order=order,
        nodes=np.asarray(nodes, np.int64),
        first_batch=first,
        last_batch=last,
        num_batches=total,
        batch=batch,
        node=node,
        position=position,
        sample=sample,
        block=block,
    )


def _rows(plan: EpochPlan, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Batch and position of each of a rank's rows; an uneven rank may lack the last batch."""
    last = min(last, plan.num_batches)
    if last <= first:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    positions, sizes = plan.positions(first, last)
    return np.repeat(np.arange(first, last), sizes), positions


def _first_time(in_last: NDArray[np.bool_], position: NDArray[np.int64], begin: int) -> NDArray[np.bool_]:
    """Return which rows are no padding: the last batch's positions from where it begins on, each once."""
    rows = np.flatnonzero(in_last & (position >= begin))
    _, first = np.unique(position[rows], return_index=True)
    out = ~in_last
    out[rows[first]] = True
    return out


def distinct_per_batch(stretch: GlobalBatches, of_row: NDArray[np.integer]) -> NDArray[np.int64]:
    """Distinct values of `of_row` [m], integers >= 0, in each global batch; int64 [batches]."""
    return _distinct(stretch.batch - stretch.first_batch, of_row, stretch.last_batch - stretch.first_batch)


def distinct_per_node(stretch: GlobalBatches, of_row: NDArray[np.integer]) -> NDArray[np.int64]:
    """Distinct values of `of_row` [m], integers >= 0, in each node's part of each batch; int64 [parts]."""
    of_part = _distinct(stretch.batch * stretch.num_nodes + stretch.node, of_row)
    return of_part[of_part > 0]


def _distinct(
    group: NDArray[np.int64], of_row: NDArray[np.integer], num_groups: int = 0
) -> NDArray[np.int64]:
    spread = int(of_row.max()) + 1
    return np.bincount(np.unique(group * spread + of_row) // spread, minlength=num_groups)


def neighbour_distances(stretch: GlobalBatches) -> NDArray[np.float64]:
    """|difference| of the sample numbers of consecutive rows, as shares of the dataset, float64 [m - 1].

    For independent draws the mean is 1/3 and the median 1 - sqrt(1/2), about 0.29.
    """
    return np.abs(np.diff(stretch.sample)) / stretch.order.num_samples


def lag1_correlation(values: NDArray[Any]) -> float:
    """Correlation of consecutive values: one-hot for integers >= 0, Pearson's for floats; NaN if constant.

    The shares of the integers are those among `values` themselves.
    """
    if len(values) < 2:
        return float("nan")
    if values.dtype.kind == "f":
        centred = values - values.mean()
        spread = float((centred**2).mean())
        return float((centred[1:] * centred[:-1]).mean() / spread) if spread else float("nan")
    share = np.bincount(values) / len(values)
    chance = float((share**2).sum())
    equal = float((values[1:] == values[:-1]).mean())
    return (equal - chance) / (1 - chance) if chance < 1 else float("nan")


def label_dispersion(stretch: GlobalBatches, labels: NDArray[np.integer]) -> float:
    """Mean chi-square of the batches' label counts, per degree of freedom; 1 for independent draws.

    Args:
        stretch: what is delivered.
        labels: integers >= 0 of the whole dataset, [num_samples], by sample number.

    NaN with fewer than two labels. `sum_c (n_c - B p_c)^2 / (B p_c) = sum_c n_c^2 / (B p_c) - B`.
    """
    share = np.bincount(labels) / len(labels)
    num_labels = len(share)
    if np.count_nonzero(share) < 2:
        return float("nan")
    batch = stretch.batch - stretch.first_batch
    pairs, counts = np.unique(batch * num_labels + labels[stretch.sample], return_counts=True)
    size = np.bincount(batch)
    terms = counts**2 / (size[pairs // num_labels] * share[pairs % num_labels])
    chi_square = np.bincount(pairs // num_labels, weights=terms) - size
    return float(chi_square.mean()) / (np.count_nonzero(share) - 1)
