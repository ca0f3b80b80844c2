"""An all-reduce in two levels: inside each node, then between nodes.

"shards", where all nodes have equally many ranks L: each rank of a node adds up one of L parts (all-to-all),
the ranks in the same place on all nodes all-reduce their part, and the node gathers the parts. Between nodes
a rank sends 2 (m - 1) / m of n / L bytes for m nodes, where a flat ring crosses the slow link with up to
2 (p - 1) / p of n. "leaders", for nodes of any size: the node adds up at its first rank, the leaders
all-reduce, each leader broadcasts. The sums are those of an all-reduce, in another order.

The reduce-scatter is an all-to-all with a local sum, because gloo's moves as many bytes as an all-reduce.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import functional as F  # noqa: N812

from dataflow.grad.strategies.strategy import BucketStrategy, StrategyContext
from sharding.topology.topology import Topology


class Hierarchical(BucketStrategy):
    """Two-level all-reduce by `context.topology`.

    Args:
        layout: "shards", "leaders", or "auto": shards where all nodes have equally many ranks.
    """

    short_memory = True
    by_parameter = False

    def __init__(self, layout: Literal["auto", "shards", "leaders"] = "auto") -> None:
        if layout not in ("auto", "shards", "leaders"):
            raise ValueError(f"layout must be 'auto', 'shards' or 'leaders', got {layout!r}")
        super().__init__("hierarchical", layout=layout)
        self._layout = layout

    def setup(self, context: StrategyContext) -> None:
        """Make the groups; all ranks."""
        by_node = ranks_by_node(context.topology, "Hierarchical")
        even = len({len(ranks) for ranks in by_node}) == 1
        if self._layout == "shards" and not even:
            raise ValueError(
                f"layout='shards' needs equally many ranks on each node, got {[len(r) for r in by_node]}; "
                "use layout='leaders'"
            )
        self._shards = even and self._layout != "leaders"
        across = list(zip(*by_node, strict=True)) if self._shards else [tuple(r[0] for r in by_node)]
        super().setup(context)
        self._inside, self._between = self.wire_among(by_node), self.wire_among(across)

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean over all ranks; called on the thread."""
        flat = bucket.buffer().div_(self.context.world_size)
        if self._shards:
            return self._by_shards(flat)
        self._inside.add_at_first(flat)
        self._between.add(flat)
        self._inside.copy_from_first(flat)
        return flat

    def _by_shards(self, flat: Tensor) -> Tensor:
        parts = self._inside.size
        rows = F.pad(flat, (0, -flat.numel() % parts)).view(parts, -1)
        shard = self._inside.exchange(rows, [1] * parts).sum(0)
        self._between.add(shard)
        return flat.copy_(torch.cat(self._inside.gather(shard)).view(-1)[: flat.numel()])

    def bytes_between_nodes(self) -> int:
        """Return what of `bytes_sent` went to other nodes."""
        return self._between.sent


def ranks_by_node(topology: Topology, why: str) -> list[list[int]]:
    """Ranks of each node, ascending. `why`: who asks; `ValueError` if the places are not known."""
    nodes = topology.nodes_of_ranks
    if nodes is None:
        raise ValueError(
            f"{why} needs to know the node of every rank, which is not known "
            f"({topology.why_unknown['nodes_of_ranks']}); pass topology=detect_topology(), made on all ranks"
        )
    return [[rank for rank, on in enumerate(nodes) if on == node] for node in range(topology.num_nodes)]
