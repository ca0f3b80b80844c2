"""Describe this process: its rank, its machine, and what lies around it.

A `Topology` is a frozen value, the same for the same arguments and environment. Ranks come from the launcher
(`sharding.topology.launchers`), NUMA nodes from sysfs (`sharding.topology.hardware`), the other
nodes of all ranks from what the ranks told each other (`sharding.topology.rank_facts`; the exchange itself is
the dataflow package's).

Nothing is guessed: a fact that nobody told is None, and `why_unknown` says why. Facts about all ranks
(`hosts`, `nodes_of_ranks`, `racks`) are the same on every rank that has them, so that a plan made from them
agrees without a word; those about this process alone (`node`, `numa_node`, ...) differ.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from itertools import islice
from typing import Any

from sharding.topology.hardware import read_hardware
from sharding.topology.launchers import Env, RankInfo, detect_rank_info, given_variables, slurm_switch
from sharding.topology.replicas import DataParallel, Replicate, checked_replicate, data_rank_info, data_ranks

Racks = Mapping[str, str] | Callable[[str], str | None]
"""Rack of a host: a mapping (looked up by full name, then by the part before the first dot) or a function."""

_NO_NAMES = ("", "localhost", "localhost.localdomain")
_OF_ALL_RANKS = ("hosts", "racks", "nodes_of_ranks", "numa_nodes_of_ranks")
_NOT_GATHERED = (
    "the ranks did not exchange it; with torch.distributed initialised, "
    "dataflow.topology_exchange.detect_topology() does"
)


@dataclass(frozen=True)
class Topology:
    """One process among `world_size`: which part of the samples it gets.

    Args:
        rank: this process, in [0, world_size).
        world_size: processes of the job; they share the dataset.
        local_rank: this process on its node, in [0, local_world_size).
        local_world_size: processes on this node: those that share its memory, disk and network.
        node: this node, in [0, num_nodes).
        num_nodes: machines of the job.
        source: the origin of these facts, for logs and error messages.
        replicate: the ranks that get the same batches (see `sharding.topology.replicas`); 1: no two.
        host: host name of this node.
        rack: rack (or switch, or block of nodes) of this node.
        hosts: host name of each node.
        racks: the rack of each node.
        nodes_of_ranks: the node of each rank.
        numa_nodes_of_ranks: `numa_node` of each rank, None for a rank that is bound to none.
        numa_node: NUMA node of all CPUs that this process may use.
        num_numa_nodes: the NUMA nodes of the machine, as sysfs shows them: also those that a container may
            not use.
        reasons: (fact, why it is not known); read it as `why_unknown`.

    Raises:
        ValueError: a rank or node outside of its world, or facts that contradict each other.

    Examples:
        >>> dataset = ShardedDataset("images/*.tar")
        >>> with DataLoader(dataset, batch_size=2, topology=Topology(rank=1, world_size=2)) as loader:
        ...     len(loader)  # batches of the second of two ranks
        2
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    _: KW_ONLY
    node: int = 0
    num_nodes: int = 1
    source: str = "given"
    replicate: Replicate = 1
    host: str | None = None
    rack: str | None = None
    hosts: tuple[str, ...] | None = field(default=None, repr=False)
    racks: tuple[str, ...] | None = field(default=None, repr=False)
    nodes_of_ranks: tuple[int, ...] | None = field(default=None, repr=False)
    numa_nodes_of_ranks: tuple[int | None, ...] | None = field(default=None, repr=False)
    numa_node: int | None = None
    num_numa_nodes: int | None = None
    reasons: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, of in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node", "num_nodes")):
            value, size = getattr(self, name), getattr(self, of)
            if type(value) is not int or type(size) is not int:
                raise ValueError(f"{name} and {of} must be integers, got {value!r} and {size!r}")
            if size < 1:
                raise ValueError(f"{of} must be >= 1, got {size} (from {self.source})")
            if not 0 <= value < size:
                raise ValueError(f"{name} must be in [0, {of}={size}), got {value} (from {self.source})")
        # Every other node has at least one process.
        if self.local_world_size + self.num_nodes - 1 > self.world_size:
            raise ValueError(
                f"{self.local_world_size} processes on this node and {self.num_nodes} nodes do not fit "
                f"world_size={self.world_size} (from {self.source})"
            )
        if type(self.replicate) is not int or self.replicate != 1:
            checked = checked_replicate(self.replicate, self.world_size)
            object.__setattr__(self, "replicate", checked)
        self._check_nodes()

    def _check_nodes(self) -> None:
        for name, size in (
            ("hosts", self.num_nodes),
            ("racks", self.num_nodes),
            ("nodes_of_ranks", self.world_size),
            ("numa_nodes_of_ranks", self.world_size),
        ):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, tuple(values))
                if len(values) != size:
                    raise ValueError(f"{name} must have {size} values, got {len(values)}")
        nodes = self.nodes_of_ranks
        if nodes is None:
            return
        if set(nodes) != set(range(self.num_nodes)):
            raise ValueError(f"nodes_of_ranks must hold each of {self.num_nodes} nodes, got {set(nodes)}")
        if nodes[self.rank] != self.node or nodes.count(self.node) != self.local_world_size:
            raise ValueError(
                f"nodes_of_ranks puts rank {self.rank} on node {nodes[self.rank]} and "
                f"{nodes.count(self.node)} ranks on node {self.node}, which has {self.local_world_size}"
            )

    # ---- making one ---------------------------------------------------------------------------------

    @classmethod
    def detect(
        cls,
        env: Env | None = None,
        *,
        rank_info: RankInfo | None = None,
        racks: Racks | None = None,
        replicate: Replicate = 1,
        sysfs: str | None = "/sys",
        host: str | None = None,
        cpus: Iterable[int] | None = None,
    ) -> Topology:
        """Learn what this process can alone: from its launcher's variables, its host name and sysfs.

        Launchers: torchrun, DeepSpeed, Open MPI, MPICH and Intel MPI, Slurm; without any, a single process.

        Args:
            env: the environment to read; `os.environ` when None.
            rank_info: what is known of this process already; None: take what the launcher's variables say.
            racks: host -> rack; None: Slurm's switches, where it has them.
            replicate: which ranks get the same batches: R for each R consecutive ranks, the data rank of
                every rank, or a `DataParallel(rank, size)`.
            sysfs: where sysfs is mounted; None: do not look at the hardware.
            host: this host's name; None: ask the system.
            cpus: CPUs this process may use; None: ask the system.

        Raises `ValueError` for a partial or contradictory environment, naming the variable and the cure.
        """
        env = given_variables(env)
        rank_info = rank_info or detect_rank_info(env)
        host = platform.node() if host is None else host
        facts: dict[str, Any] = {"host": None if host in _NO_NAMES else host}
        why = dict.fromkeys(_OF_ALL_RANKS, _NOT_GATHERED)
        why["host"] = f"the host name is {host!r}, which does not tell machines apart"
        if racks is None:
            facts["rack"], why["rack"] = slurm_switch(env)
        else:
            facts["rack"], why["rack"] = rack_of(facts["host"], racks)
        if rank_info.why_no_node:
            why["node"] = rank_info.why_no_node
        elif rank_info.num_nodes == 1:
            facts["nodes_of_ranks"] = (0,) * rank_info.world_size
            for name, every in (("host", "hosts"), ("rack", "racks")):
                facts[every] = None if facts[name] is None else (facts[name],)
                why[every] = why[name]
        numbers = rank_info._asdict()
        del numbers["why_no_node"]
        topology = cls(**numbers, replicate=replicate, **facts, reasons=tuple(why.items()))
        return topology if sysfs is None else topology.with_hardware(sysfs, cpus)

    def with_hardware(self, sysfs: str = "/sys", cpus: Iterable[int] | None = None) -> Topology:
        """The topology with this machine's NUMA nodes; arguments as those of `detect`."""
        facts, why = dict[str, Any](), dict(self.reasons)
        for name, fact in read_hardware(sysfs, cpus).items():
            facts[name], why[name] = fact
        if self.world_size == 1:
            facts["numa_nodes_of_ranks"] = (facts["numa_node"],)
        return replace(self, **facts, reasons=tuple(why.items()))

    @classmethod
    def even(
        cls, world_size: int, num_nodes: int = 1, rank: int = 0, *, replicate: Replicate = 1
    ) -> Topology:
        """A made-up job of equal nodes, ranks placed node by node: for planning without a cluster."""
        if num_nodes < 1 or world_size % num_nodes:
            raise ValueError(f"num_nodes must be >= 1 and divide world_size={world_size}, got {num_nodes}")
        per_node = world_size // num_nodes
        node, local = divmod(rank, per_node)
        return cls(
            rank,
            world_size,
            local,
            per_node,
            node=node,
            num_nodes=num_nodes,
            source="made up: equal nodes",
            replicate=replicate,
            hosts=tuple(f"node{i}" for i in range(num_nodes)),
            nodes_of_ranks=tuple(i // per_node for i in range(world_size)),
        )

    # ---- who shares data ----------------------------------------------------------------------------

    @property
    def data_rank(self) -> int:
        """Number of this rank's replica group, in [0, data_world_size): what the plan uses for a rank."""
        return self.rank if self.replicate == 1 else self._data_rank_info.rank

    @property
    def data_world_size(self) -> int:
        """Number of replica groups: what the plan uses for a world size."""
        return self.world_size if self.replicate == 1 else self._data_rank_info.size

    @property
    def _data_rank_info(self) -> DataParallel:
        return data_rank_info(self.replicate, self.rank, self.world_size)

    @property
    def data_ranks(self) -> tuple[int, ...] | None:
        """Data rank of each rank; None if only this rank's is known."""
        return data_ranks(self.replicate, self.world_size)

    @property
    def replica_group(self) -> tuple[int, ...] | None:
        """The ranks that get the same batches as this one, itself among them, ascending."""
        every = self.data_ranks
        return None if every is None else tuple(r for r, d in enumerate(every) if d == self.data_rank)

    @property
    def nodes_of_data_ranks(self) -> tuple[tuple[int, ...], ...] | None:
        """The nodes, ascending, on which each data rank has ranks: those that need its bytes."""
        if self.data_ranks is None or self.nodes_of_ranks is None:
            return None
        nodes: list[set[int]] = [set() for _ in range(self.data_world_size)]
        for data_rank, node in zip(self.data_ranks, self.nodes_of_ranks, strict=True):
            nodes[data_rank].add(node)
        return tuple(tuple(sorted(group)) for group in nodes)

    # ---- telling ------------------------------------------------------------------------------------

    @property
    def why_unknown(self) -> dict[str, str]:
        """Why each fact that is None is not known. "node": local rank and node are placeholders."""
        reasons = dict(self.reasons)
        unknown = [f.name for f in fields(self) if getattr(self, f.name) is None]
        why = {name: reasons.get(name, "not given") for name in unknown}
        if self.data_ranks is None:
            why["data_ranks"] = "only this rank's data rank was given"
        return why | ({"node": reasons["node"]} if "node" in reasons else {})

    def to_json(self) -> dict[str, Any]:
        """Every field and derived fact as plain JSON values, `why_unknown` included."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reasons"}
        facts |= {"data_rank": self.data_rank, "data_world_size": self.data_world_size}
        facts |= {"replica_group": self.replica_group, "why_unknown": self.why_unknown}
        return {name: list(fact) if isinstance(fact, tuple) else fact for name, fact in facts.items()}

    def describe(self) -> str:
        """Some lines for people: this process, the nodes, its hardware, and what is not known."""
        return "\n".join([*_process(self), *_nodes(self), *_hardware(self), *_unknown(self)])


def rack_of(host: str | None, racks: Racks) -> tuple[str | None, str]:
    """Rack of a host, or None and why not."""
    if host is None:
        return None, "the host name is not known"
    rack = racks(host) if callable(racks) else racks.get(host, racks.get(host.partition(".")[0]))
    return rack, "" if rack is not None else f"the rack map has no host {host!r}"


# ---- in words ------------------------------------------------------------------------------------------

_LISTED_NODES = 16


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, shortened: 0, 1, 2, 5 is "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _process(topology: Topology) -> Iterable[str]:
    yield f"rank {topology.rank} of {topology.world_size}, from {topology.source}"
    yield (
        f"local rank {topology.local_rank} of {topology.local_world_size}"
        f" on node {topology.node} of {topology.num_nodes}{_named(topology.host, topology.rack)}"
    )
    if topology.data_world_size != topology.world_size:
        group = topology.replica_group
        shared = f": the same batches on ranks {ranges(group)}" if group else ""
        yield f"data rank {topology.data_rank} of {topology.data_world_size}{shared}"


def _nodes(topology: Topology) -> Iterable[str]:
    if topology.nodes_of_ranks is None or topology.num_nodes == 1:
        return
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(topology.nodes_of_ranks):
        ranks.setdefault(node, []).append(rank)
    for node in range(min(topology.num_nodes, _LISTED_NODES)):
        host = topology.hosts[node] if topology.hosts else None
        rack = topology.racks[node] if topology.racks else None
        yield f"  node {node}: ranks {ranges(ranks[node])}{_named(host, rack)}"
    if topology.num_nodes > _LISTED_NODES:
        yield f"  ... and {topology.num_nodes - _LISTED_NODES} more nodes"


def _named(host: str | None, rack: str | None) -> str:
    names = [f"host {host}"] * (host is not None) + [f"rack {rack}"] * (rack is not None)
    return f" ({', '.join(names)})" if names else ""


def _hardware(topology: Topology) -> Iterable[str]:
    if topology.num_numa_nodes is not None:
        yield f"machine: NUMA nodes: {topology.num_numa_nodes}"
    if topology.numa_node is not None:
        yield f"NUMA node of: CPUs {topology.numa_node}"


def _unknown(topology: Topology) -> Iterable[str]:
    """One line a reason, with the facts that share it."""
    facts: dict[str, list[str]] = {}
    for fact, why in topology.why_unknown.items():
        facts.setdefault(why, []).append(fact)
    yield from (f"not known: {', '.join(names)}: {why}" for why, names in islice(facts.items(), 32))
