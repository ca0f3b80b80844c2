"""Find the node of every rank from what each rank says of itself.

Each rank contributes one `RankFacts`; of the same list, `with_facts` makes the same map of ranks, nodes,
hosts and racks on every rank. The launcher's node numbers are taken if all ranks have them and they agree
with each other; else ranks of one host name are a node, numbered by their lowest ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sharding.topology.topology import Racks, Topology, rack_of


class RankFacts(NamedTuple):
    """The facts that a rank knows of itself. Some hundred bytes, pickled."""

    host: str | None
    rack: str | None
    node: int | None
    """By its launcher; None if that did not say."""
    num_nodes: int
    local_rank: int
    local_world_size: int
    numa_node: int | None


def facts_of(topology: Topology) -> RankFacts:
    """Return what this rank tells the others."""
    return RankFacts(
        topology.host,
        topology.rack,
        None if "node" in topology.why_unknown else topology.node,
        topology.num_nodes,
        topology.local_rank,
        topology.local_world_size,
        topology.numa_node,
    )


def with_facts(topology: Topology, facts: Sequence[RankFacts], racks: Racks | None = None) -> Topology:
    """The topology with what all ranks said.

    Args:
        topology: this rank's own view.
        facts: of each rank, in rank order.
        racks: host -> rack; None: the racks in `facts`.
    """
    if len(facts) != topology.world_size:
        raise ValueError(f"facts must be of {topology.world_size} ranks, got {len(facts)}")
    numa_nodes = tuple(fact.numa_node for fact in facts)
    launchers = _launchers_nodes(facts)
    nodes = launchers or _nodes_by_host(facts)
    if nodes is None:
        nameless = next(rank for rank, fact in enumerate(facts) if fact.host is None)
        why = f"the launcher's nodes are missing or contradictory and rank {nameless} has no host name"
        unknown = {"hosts": None, "racks": None, "nodes_of_ranks": None}
        return _with(
            topology, {**dict.fromkeys(unknown, why), "node": why}, **unknown, numa_nodes_of_ranks=numa_nodes
        )
    local = [rank for rank, node in enumerate(nodes) if node == nodes[topology.rank]]
    lowest = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    first = [lowest[node] for node in range(len(lowest))]
    hosts, why_hosts = _hosts(facts, first)
    of_nodes, why_racks = _racks(facts, first, racks)
    return _with(
        topology,
        {"hosts": why_hosts, "racks": why_racks, "node": ""},
        local_rank=facts[topology.rank].local_rank if launchers else local.index(topology.rank),
        local_world_size=len(local),
        node=nodes[topology.rank],
        num_nodes=len(first),
        source=topology.source if launchers else f"{topology.source}, nodes by host name",
        rack=of_nodes[nodes[topology.rank]] if of_nodes else topology.rack,
        hosts=hosts,
        racks=of_nodes,
        nodes_of_ranks=nodes,
        numa_nodes_of_ranks=numa_nodes,
    )


def _with(topology: Topology, why: dict[str, str], **known: object) -> Topology:
    reasons = {fact: text for fact, text in (dict(topology.reasons) | why).items() if text}
    return replace(topology, reasons=tuple(reasons.items()), **known)  # type: ignore[arg-type]


def _launchers_nodes(facts: Sequence[RankFacts]) -> tuple[int, ...] | None:
    """The launcher's node of every rank, if all have one and what they say fits together."""
    nodes = tuple(fact.node for fact in facts if fact.node is not None)
    if len(nodes) != len(facts):
        return None
    members: dict[int, list[RankFacts]] = {}
    for node, fact in zip(nodes, facts, strict=True):
        members.setdefault(node, []).append(fact)
    agree = all(
        sorted(fact.local_rank for fact in group) == list(range(len(group)))
        and {(fact.num_nodes, fact.local_world_size) for fact in group} == {(len(members), len(group))}
        and len({fact.host for fact in group}) == 1
        for group in members.values()
    )
    return nodes if agree and members.keys() == set(range(len(members))) else None


def _nodes_by_host(facts: Sequence[RankFacts]) -> tuple[int, ...] | None:
    if any(fact.host is None for fact in facts):
        return None
    number: dict[str | None, int] = {}
    return tuple(number.setdefault(fact.host, len(number)) for fact in facts)


def _hosts(facts: Sequence[RankFacts], first: Sequence[int]) -> tuple[tuple[str, ...] | None, str]:
    hosts = tuple(host for rank in first if (host := facts[rank].host) is not None)
    if len(hosts) == len(first):
        return hosts, ""
    nameless = next(node for node, rank in enumerate(first) if facts[rank].host is None)
    return None, f"node {nameless} has no host name of its own"


def _racks(
    facts: Sequence[RankFacts], first: Sequence[int], racks: Racks | None
) -> tuple[tuple[str, ...] | None, str]:
    """All racks or none: a plan by racks needs every node's."""
    of_nodes = [facts[rank].rack if racks is None else rack_of(facts[rank].host, racks)[0] for rank in first]
    names = tuple(rack for rack in of_nodes if rack is not None)
    if len(names) == len(first):
        return names, ""
    num_lacking, lowest = len(first) - len(names), of_nodes.index(None)
    lacking = f"{num_lacking} of {len(first)} nodes, node {lowest} the first of them"
    return None, f"no rack is known of {lacking}; give racks= for all hosts"
