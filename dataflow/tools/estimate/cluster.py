"""Nodes, racks and links, and how long one round of messages takes on them.

The alpha-beta model (Hockney 1994): a message costs a latency and its bytes over a bandwidth. Messages of one
round run together and share links: what a rank's port within its node, a node's network card and a rack's
uplink carry, each way, is added up, and the fullest link tells how long the round takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property

_LEAST_SHARE = 0.5
"""Share of a link that data flows would fill: TCP shares it between a gradient and a data flow."""


@dataclass(frozen=True)
class Link:
    """One direction of a link."""

    latency_s: float
    """Latency of a message, from the call that sends it to the call that has it."""
    bytes_per_s: float
    both_ways: float = 1.0
    """Times longer that large messages take where two ranks send to each other at once. gloo over TCP: about
    1.8, as both directions share one connection (benchmarks/lab/cost_model.py)."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bytes_per_s > 0 or self.both_ways < 1:
            raise ValueError(f"a link needs latency_s >= 0, bytes_per_s > 0 and both_ways >= 1, got {self}")


@dataclass(frozen=True)
class Round:
    """Messages that run together, `repeats` times one after the other.

    Attributes:
        source: [m] ranks that send.
        target: [m] ranks that receive.
        nbytes: bytes of each message.
        repeats: number of such rounds.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    nbytes: float
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of a round on the links of a cluster: its seconds follow, whatever data flows beside it.

    Attributes:
        latency_s: of a message.
        nbytes: of a message, times `both_ways` where ranks send to each other.
        fullest: seconds a byte on the fullest link that no data flows on.
        to_card, to_rack: messages into the node, and into the rack, that get most of them.
        repeats: number of such rounds.
    """

    latency_s: float
    nbytes: float
    fullest: float
    to_card: int
    to_rack: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes and racks that ranks run on, and the links between them.

    Attributes:
        nodes_of_ranks: node of each rank.
        racks_of_nodes: rack of each node.
        within: between ranks of one node: each rank's port, each way.
        network: a node's network card, each way; all its ranks share it.
        uplink: what joins a rack to the others, each way; None: it never limits.
    """

    nodes_of_ranks: tuple[int, ...]
    racks_of_nodes: tuple[int, ...]
    within: Link
    network: Link
    uplink: Link | None = None

    def __post_init__(self) -> None:
        if not self.nodes_of_ranks:
            raise ValueError("a cluster needs at least one rank")
        if not set(self.nodes_of_ranks) <= set(range(len(self.racks_of_nodes))):
            raise ValueError(f"nodes_of_ranks names a node outside [0, {len(self.racks_of_nodes)})")

    @classmethod
    def regular(
        cls,
        nodes: int,
        ranks_per_node: int,
        racks: int,
        *,
        within: Link,
        network: Link,
        oversubscription: float = 1.0,
    ) -> Cluster:
        """Equal nodes in equal racks, ranks numbered node by node, rack by rack.

        `oversubscription`: what a rack's network cards can send over what its uplink can; 1 never limits.
        """
        if min(nodes, ranks_per_node, racks) < 1 or nodes % racks:
            raise ValueError(f"nodes must be a multiple of racks, all >= 1, got {nodes} and {racks}")
        if oversubscription < 1:
            raise ValueError(f"oversubscription must be >= 1, got {oversubscription}")
        each = nodes // racks
        uplink = Link(network.latency_s, network.bytes_per_s * each / oversubscription)
        node_of = tuple(rank // ranks_per_node for rank in range(nodes * ranks_per_node))
        racks_of_nodes = tuple(node // each for node in range(nodes))
        return cls(
            nodes_of_ranks=node_of,
            racks_of_nodes=racks_of_nodes,
            within=within,
            network=network,
            uplink=uplink,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes together."""
        return len(self.nodes_of_ranks)

    @property
    def num_nodes(self) -> int:
        """Nodes, with or without ranks."""
        return len(self.racks_of_nodes)

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """[ranks] node of each rank."""
        return np.array(self.nodes_of_ranks, np.int64)

    @cached_property
    def racks(self) -> NDArray[np.int64]:
        """[ranks] rack of each rank."""
        return np.array(self.racks_of_nodes, np.int64)[self.nodes]

    @cached_property
    def largest_rack(self) -> int:
        """Nodes of the rack that has most."""
        return int(np.bincount(self.racks_of_nodes).max())

    def placed(self, order: Sequence[int]) -> Cluster:
        """The same cluster with rank i where rank `order[i]` was."""
        if sorted(order) != list(range(self.num_ranks)):
            raise ValueError("order must hold each rank once")
        return replace(self, nodes_of_ranks=tuple(self.nodes_of_ranks[rank] for rank in order))

    def seconds(self, rounds: Sequence[Round], *, data_bytes_per_s: float = 0.0) -> float:
        """Return how long rounds take, one after the other.

        Args:
            rounds: of a collective (`dataflow.tools.estimate.collectives`).
            data_bytes_per_s: what each node reads meanwhile from a store outside its rack; it leaves less of
                the network card's and the uplink's inward direction, but never less than half.
        """
        return self.loaded_seconds(self.loads(rounds), data_bytes_per_s=data_bytes_per_s)

    def loads(self, rounds: Sequence[Round]) -> Sequence[Load]:
        """Return what rounds put on the links, to be asked again and again: counting messages takes long."""
        return [self.load(each) for each in rounds if len(each.source)]

    def loaded_seconds(self, loads: Sequence[Load], *, data_bytes_per_s: float = 0.0) -> float:
        """Return the `seconds` of rounds of which `loads(rounds)` are given."""
        card = _left(self.network.bytes_per_s, data_bytes_per_s)
        rack = 1.0
        if self.uplink is not None:
            rack = _left(self.uplink.bytes_per_s, data_bytes_per_s * self.largest_rack)
        return sum(
            each.repeats
            * (each.latency_s + each.nbytes * max(each.fullest, each.to_card / card, each.to_rack / rack))
            for each in loads
        )

    def load(self, messages: Round) -> Load:
        """Return what one round puts on the links."""
        source, target = messages.source, messages.target
        sends, takes = self.nodes[source], self.nodes[target]
        far = sends != takes
        cross = self.racks[source] != self.racks[target]
        latency = self.network.latency_s if far.any() else self.within.latency_s
        fullest = 0.0
        for ranks in (source[~far], target[~far]):
            fullest = max(fullest, _most(ranks) / self.within.bytes_per_s)
        fullest = max(fullest, _most(sends[far]) / self.network.bytes_per_s)
        to_rack = 0
        if self.uplink is not None and cross.any():
            latency = max(latency, self.uplink.latency_s)
            fullest = max(fullest, _most(self.racks[source[cross]]) / self.uplink.bytes_per_s)
            to_rack = _most(self.racks[target[cross]])
        slower = self.network.both_ways if far.any() and _both_ways(source, target) else 1.0
        return Load(
            latency_s=latency,
            nbytes=messages.nbytes * slower,
            fullest=fullest,
            to_card=_most(takes[far]),
            to_rack=to_rack,
            repeats=messages.repeats,
        )


def _most(places: NDArray[np.int64]) -> int:
    """Messages at the place that has most of them."""
    return int(np.bincount(places).max()) if len(places) else 0


def _both_ways(source: NDArray[np.int64], target: NDArray[np.int64]) -> bool:
    """Return whether two ranks send to each other."""
    most = 1 + int(max(source.max(), target.max()))
    return bool(np.isin(source * most + target, target * most + source).any())


def _left(bytes_per_s: float, data: float) -> float:
    return max(bytes_per_s - data, _LEAST_SHARE * bytes_per_s)
