"""Process groups of the ranks that share a node, and of those that stand in the same place on each node."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dataflow.grad.strategies.strategy import StrategyContext
from sharding.topology.topology import Topology


def ranks_by_node(topology: Topology, why: str) -> list[list[int]]:
    """Ranks of each node, ascending. `why`: who asks; `ValueError` if the places are not known."""
    nodes = topology.nodes_of_ranks
    if nodes is None:
        raise ValueError(
            f"{why} needs to know the node of every rank, which is not known "
            f"({topology.why_unknown['nodes_of_ranks']}); pass topology=detect_topology(), made on all ranks"
        )
    return [[rank for rank, on in enumerate(nodes) if on == node] for node in range(topology.num_nodes)]


def own_group(context: StrategyContext, members: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """Make a group for each list of ranks, on all ranks alike; return the one of this rank.

    None if the rank is in no list, or alone in one. Ranks are numbered as in `context.group`.
    """
    if context.group is None:
        return None
    if (placed := sum(len(ranks) for ranks in members)) > context.world_size:
        raise ValueError(
            f"the topology is that of {placed} ranks, and the model is on {context.world_size} of them: "
            "reducing by node needs a model on all ranks"
        )
    everyone = dist.get_process_group_ranks(context.group)
    own: ProcessGroup | None = None
    timeout = None if context.timeout_s is None else timedelta(seconds=context.timeout_s)
    backend = dist.get_backend(context.group)
    for ranks in members:
        if len(ranks) > 1:
            made = dist.new_group([everyone[rank] for rank in ranks], timeout, backend)
            if context.rank in ranks:
                assert isinstance(made, ProcessGroup)
                own = made
    return own


def give_back(groups: Sequence[ProcessGroup | None]) -> None:
    """Destroy groups, unless all of them went already with the job's own."""
    for group in groups:
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
