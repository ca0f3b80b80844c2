"""All quality figures of a plan in one frozen value: what `dataflow inspect` prints.

Mixing comes from `dataflow.tools.inspect.quality`, cost from `dataflow.tools.inspect.read_cost` and
`sharding.plan.placement`. `figures_of` is a pure function; a figure that cannot be told is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.tools.inspect.quality import (
    MAX_SAMPLES,
    GlobalBatches,
    distinct_per_batch,
    distinct_per_node,
    label_dispersion,
    lag1_correlation,
    neighbour_distances,
    stretch_of,
)
from dataflow.tools.inspect.read_cost import (
    TOGETHER,
    BlockRequests,
    PeakReads,
    amplification,
    first_batch_bytes,
    hot_spot,
    open_bytes,
    reads_of,
)
from sharding.catalog.table import BlockTable
from sharding.plan.placement import reads_by_node
from sharding.plan.plan import EpochPlan

Targets = Mapping[str, NDArray[np.int64]]
"""Kind of target ("shard", "prefix", "host") -> number of the target of each block, [blocks]."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one plan. Shares are of the dataset; bytes are those stored unless said otherwise."""

    blocks_per_batch: float
    """Distinct blocks in a global batch, on average. Near the batch size: as good as independent draws."""
    shards_per_batch: float
    fewest_shards: int
    """Fewest shards in any batch."""
    neighbour_distance_median: float | None
    """Between the sample numbers of consecutive samples, as a share; 0.29 for independent draws."""
    neighbour_distance_mean: float | None
    """The same; 0.33 for independent draws."""
    label_correlation: float | None
    """Correlation of consecutive labels: 0 for independent draws, 1 for runs of one label."""
    label_dispersion: float | None
    """Dispersion of label counts per batch: 1 for independent draws, the batch size where each batch has one
    label."""
    labels_per_batch: float | None
    labels_per_node: float | None
    """Distinct labels in a node's part of a batch: what batch normalisation on one node sees."""
    requests_per_1000_samples: float
    amplification: float | None
    """Bytes read by all nodes over the bytes there are, where the ranks of a node share what they read."""
    worst_amplification: float | None
    """Bytes of the node that reads most, over its share."""
    rank_amplification: float | None
    """The same as `amplification` where each rank reads for itself; None for a full shuffle."""
    hot_spots: dict[str, PeakReads]
    """Hot spots by kind of target."""
    open_bytes: int
    """In memory: the windows that a node has open at a time, at most."""
    cache_bytes: int
    """A node's cache must hold these so that nothing is read twice in an epoch."""
    first_batch_bytes: int
    """To read before the first batch of an epoch, at most by a node."""

    def to_row(self) -> dict[str, Any]:
        """Return the figures as one row of a CSV file; of hot spots, how many times their share they get."""
        values = asdict(self)
        del values["hot_spots"]
        return values | {f"hot_spot_{kind}": spot.ratio for kind, spot in self.hot_spots.items()}


@dataclass(frozen=True, eq=False)
class Inspected:
    """Figures, and the rows they were taken from."""

    figures: Figures
    stretch: GlobalBatches
    reads: BlockRequests


def figures_of(
    plans: Sequence[EpochPlan],
    nodes: Sequence[int],
    table: BlockTable,
    targets: Targets,
    *,
    labels: NDArray[Any] | None = None,
    located: bool = False,
    max_samples: int = MAX_SAMPLES,
) -> Inspected:
    """Measure a plan.

    Args:
        plans: one a shard index, of the same order.
        nodes: [ranks], the node of each shard index.
        table: the blocks.
        targets: what blocks are grouped by for hot spots.
        labels: [num_samples] by sample number, integers >= 0 or floats; None where unknown.
        located: whether the format can read single samples.
        max_samples: of the stretch.

    Raises as `stretch_of` does.
    """
    stretch = stretch_of(plans, nodes, table, max_samples=max_samples)
    reads = reads_of(stretch, table, located=located)
    distances = neighbour_distances(stretch)
    codes = None if labels is None or labels.dtype.kind == "f" else labels
    blocks, shards = (distinct_per_batch(stretch, of) for of in (stretch.block, table.shard[stretch.block]))
    read = amplification(stretch, reads, table, plans[0].batch_plan.batch_size)
    held = max(int(open_bytes(stretch, reads, node).max()) for node in range(stretch.num_nodes))
    full = stretch.order.shuffle.kind == "full"
    figures = Figures(
        blocks_per_batch=float(blocks.mean()),
        shards_per_batch=float(shards.mean()),
        fewest_shards=int(shards.min()),
        neighbour_distance_median=_known(np.median(distances)) if len(distances) else None,
        neighbour_distance_mean=_known(distances.mean()) if len(distances) else None,
        label_correlation=None if labels is None else _known(lag1_correlation(labels[stretch.sample])),
        label_dispersion=None if codes is None else _known(label_dispersion(stretch, codes)),
        labels_per_batch=None if codes is None else _mean(distinct_per_batch, stretch, codes),
        labels_per_node=None if codes is None else _mean(distinct_per_node, stretch, codes),
        requests_per_1000_samples=1000 * len(reads.block) / len(stretch.sample),
        amplification=_known(read.mean()),
        worst_amplification=_known(read.max()),
        rank_amplification=None if full else _rank_amplification(plans, table),
        hot_spots=hot_spots(stretch, reads, targets),
        open_bytes=held,
        cache_bytes=int(table.length[table.num_samples > 0].sum()) if full else held,
        first_batch_bytes=_first_batch_bytes(plans, nodes, table, located),
    )
    return Inspected(figures, stretch, reads)


def _mean(
    distinct: Callable[[GlobalBatches, NDArray[Any]], NDArray[np.int64]],
    stretch: GlobalBatches,
    codes: NDArray[Any],
) -> float:
    return float(distinct(stretch, codes[stretch.sample]).mean())


def _rank_amplification(plans: Sequence[EpochPlan], table: BlockTable) -> float:
    order, batch_size = plans[0].order, plans[0].batch_plan.batch_size
    read = reads_by_node(order, range(len(plans)), batch_size, cost=table.length)
    return float(read.sum() / table.length[table.num_samples > 0].sum())


def hot_spots(stretch: GlobalBatches, reads: BlockRequests, targets: Targets) -> dict[str, PeakReads]:
    """Hot spots of each kind: of all blocks in order, a window at a time; of the stretch's reads if full."""
    order = stretch.order
    blocks = reads.block if order.shuffle.kind == "full" else order.table.read_block
    ahead = order.shuffle.window_blocks or TOGETHER
    return {kind: hot_spot(of_block[blocks], ahead) for kind, of_block in targets.items()}


def _first_batch_bytes(
    plans: Sequence[EpochPlan], nodes: Sequence[int], table: BlockTable, located: bool
) -> int:
    """Return the bytes before the first batch of the node that reads most; its ranks share what they read."""
    of_node: dict[int, list[EpochPlan]] = {}
    for plan, node in zip(plans, nodes, strict=True):
        of_node.setdefault(node, []).append(plan)
    return max(first_batch_bytes(node_plans, table, located=located) for node_plans in of_node.values())


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
