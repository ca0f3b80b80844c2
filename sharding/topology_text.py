"""A `Topology` in words, for `dataflow inspect` and error messages: one line a subject, long lists cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.topology import Topology

_LISTED_NODES = 16


def description(place: Topology) -> str:
    """The lines of `Topology.describe`."""
    return "\n".join([*_process(place), *_nodes(place), *_hardware(place), *_unknown(place)])


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, shortened: 0, 1, 2, 5 is "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _process(place: Topology) -> Iterable[str]:
    yield f"rank {place.rank} of {place.world_size}, from {place.source}"
    yield (
        f"local rank {place.local_rank} of {place.local_world_size}"
        f" on node {place.node} of {place.num_nodes}{_named(place.host, place.rack)}"
    )
    if place.data_world_size != place.world_size:
        group = place.replica_group
        shared = f": the same batches on ranks {ranges(group)}" if group else ""
        yield f"data rank {place.data_rank} of {place.data_world_size}{shared}"


def _nodes(place: Topology) -> Iterable[str]:
    if place.nodes_of_ranks is None or place.num_nodes == 1:
        return
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(place.nodes_of_ranks):
        ranks.setdefault(node, []).append(rank)
    for node in range(min(place.num_nodes, _LISTED_NODES)):
        host = place.hosts[node] if place.hosts else None
        rack = place.racks[node] if place.racks else None
        yield f"  node {node}: ranks {ranges(ranks[node])}{_named(host, rack)}"
    if place.num_nodes > _LISTED_NODES:
        yield f"  ... and {place.num_nodes - _LISTED_NODES} more nodes"


def _named(host: str | None, rack: str | None) -> str:
    names = [f"host {host}"] * (host is not None) + [f"rack {rack}"] * (rack is not None)
    return f" ({', '.join(names)})" if names else ""


def _hardware(place: Topology) -> Iterable[str]:
    counts = ("NUMA nodes", place.num_numa_nodes), ("GPUs", place.num_gpus), ("NICs", place.num_nics)
    known = [f"{name}: {count}" for name, count in counts if count is not None]
    if known:
        yield f"machine: {', '.join(known)}"
    nodes = ("CPUs", place.numa_node), ("GPU", place.gpu_numa_node), ("NICs", place.nic_numa_node)
    known = [f"{name} {node}" for name, node in nodes if node is not None]
    if known:
        yield f"NUMA node of: {', '.join(known)}"


def _unknown(place: Topology) -> Iterable[str]:
    """One line a reason, with the facts that share it."""
    facts: dict[str, list[str]] = {}
    for fact, why in place.why_unknown.items():
        facts.setdefault(why, []).append(fact)
    yield from (f"not known: {', '.join(names)}: {why}" for why, names in islice(facts.items(), 32))
