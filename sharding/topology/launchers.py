"""Read the rank information that launchers leave in the environment.

A rank is never guessed: a partial or contradictory environment is an error, because a wrong rank trains
silently on the wrong samples. Where a launcher tells ranks but no nodes, `RankInfo.why_no_node` says so.

torchrun's variables come first, as torchrun is often started inside a Slurm step. Those of MPI launchers
come before Slurm's: under `mpirun` in a Slurm job, SLURM_PROCID is the rank of mpirun's daemon, one per node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Env = Mapping[str, str]

_RESERVED_STEP = 0xFFFFFFF0
"""Slurm's step ids from here on are batch scripts, interactive shells and the like, never `srun` tasks."""
_CURE = "unset it, complete it, or pass topology=Topology(rank=..., world_size=...)"
_ONE_A_NODE = "the launcher set no local ranks; each rank counts as a node of its own"
_PMI_LOCAL = (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))
"""Local rank and size by MPICH's and Intel MPI's Hydra, and by Cray's PALS."""


class RankInfo(NamedTuple):
    """The rank information that a launcher gives. Fields as in `Topology`, unchecked."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1
    source: str = "single process"
    why_no_node: str = ""
    """Why node and local rank are placeholders; "" if they are what the launcher says or implies."""

    @classmethod
    def alone_on_its_node(cls, rank: int, world_size: int, source: str, why: str = _ONE_A_NODE) -> RankInfo:
        """A rank of which no node is known: alone, it shares nothing by mistake."""
        return cls(rank, world_size, 0, 1, rank, world_size, source, why)


def given_variables(env: Env | None) -> Env:
    """The environment without empty variables, which launchers mean as unset; `os.environ` when None."""
    return {name: text for name, text in (os.environ if env is None else env).items() if text.strip()}


def detect_rank_info(env: Env) -> RankInfo:
    """Read the variables of torchrun or DeepSpeed, Open MPI, MPICH or Intel MPI, Slurm; else one process.

    Raises `ValueError` for a partial or contradictory environment, naming the variable and the cure.
    """
    for signs, launcher in _LAUNCHERS:
        if not env.keys().isdisjoint(signs) and (rank_info := launcher(env)) is not None:
            return rank_info
    if "SLURM_JOB_ID" in env:
        return RankInfo(source="single process (in a Slurm allocation, but not a task started by srun)")
    return RankInfo()


def slurm_switch(env: Env) -> tuple[str | None, str]:
    """Slurm's path of switches (or blocks) down to this node, such as "s0.s4", or None and why not.

    SLURM_TOPOLOGY_ADDR is "s0.s4.node17", and SLURM_TOPOLOGY_ADDR_PATTERN "switch.switch.node" tells the
    kinds of its parts; without a topology plugin they are "node17" and "node".
    """
    address, pattern = env.get("SLURM_TOPOLOGY_ADDR"), env.get("SLURM_TOPOLOGY_ADDR_PATTERN")
    if address is None or pattern is None:
        return None, "no rack map is given and Slurm's SLURM_TOPOLOGY_ADDR and its _PATTERN are not set"
    kinds = pattern.split(".")
    parts = address.split(".", len(kinds) - 1)  # dots in the name of the node, which is last, are its own
    if len(kinds) < 2 or kinds[-1] != "node" or len(parts) != len(kinds):
        return None, f"SLURM_TOPOLOGY_ADDR={address!r} of pattern {pattern!r} names no switch above a node"
    return ".".join(parts[:-1]), ""


def _torchrun(env: Env) -> RankInfo | None:
    """RANK, WORLD_SIZE and friends, as torchrun, DeepSpeed, Kubernetes operators and job scripts set them."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        local = _number(env, "LOCAL_RANK")
        if local is None or local < 0:  # -1 is how older launchers say "not distributed"
            return None
        raise ValueError(f"RANK and WORLD_SIZE are not set although LOCAL_RANK is: {_CURE}")
    rank, world = _together(env, "RANK", "WORLD_SIZE")
    deepspeed = "LOCAL_SIZE" in env and "LOCAL_WORLD_SIZE" not in env  # its own name for the same number
    local_name = "LOCAL_SIZE" if deepspeed else "LOCAL_WORLD_SIZE"
    if "LOCAL_RANK" not in env and local_name not in env:
        return RankInfo.alone_on_its_node(rank, world, "RANK and WORLD_SIZE (no LOCAL_RANK: one a node)")
    if local_name not in env and (step := _slurm(env)) and (step.rank, step.world_size) == (rank, world):
        return step  # a job script that copied Slurm's variables
    local, local_world = _together(env, "LOCAL_RANK", local_name)
    node_name, nodes_name = ("CROSS_RANK", "CROSS_SIZE") if deepspeed else ("GROUP_RANK", "GROUP_WORLD_SIZE")
    node, num_nodes = _number(env, node_name), _number(env, nodes_name)
    if node is None or num_nodes is None:
        node, num_nodes = _node_of(rank, world, local, local_world, "RANK")
    source = "DeepSpeed (RANK, LOCAL_SIZE)" if deepspeed else "torchrun (RANK, WORLD_SIZE)"
    return RankInfo(rank, world, local, local_world, node, num_nodes, source)


def _open_mpi(env: Env) -> RankInfo:
    prefix = "OMPI_COMM_WORLD_"
    local_names = f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"
    return _numbered(env, (f"{prefix}RANK", f"{prefix}SIZE"), local_names, "Open MPI (OMPI_COMM_WORLD_*)")


def _hydra(env: Env) -> RankInfo:
    """MPICH and Intel MPI (Hydra), Cray's PALS. `srun --mpi=pmi2` sets PMI_RANK too, but no local names."""
    names = next((names for names in _PMI_LOCAL if names[0] in env or names[1] in env), None)
    if names is None and (step := _slurm(env)):
        hydra = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE") or step.world_size
        if hydra == (step.rank, step.world_size):
            return step
    if names is None:
        rank, world = _together(env, "PMI_RANK", "PMI_SIZE")
        return RankInfo.alone_on_its_node(
            rank, world, "PMI_RANK and PMI_SIZE (no MPI_LOCALRANKID: one a node)"
        )
    return _numbered(env, ("PMI_RANK", "PMI_SIZE"), names, f"MPICH or Intel MPI (PMI_RANK, {names[0]})")


def _slurm(env: Env) -> RankInfo | None:
    """The task of an `srun` step.

    sbatch and salloc set SLURM_NTASKS and even SLURM_PROCID=0 in their single shell, which is no task of a
    step: only SLURM_STEP_ID tells. Taken for a rank, that shell would read one share and drop the others.
    A number above 0 is no such shell's.
    """
    step = _number(env, "SLURM_STEP_ID")
    if step is None or step >= _RESERVED_STEP:
        if rank := _number(env, "SLURM_PROCID"):
            raise ValueError(
                f"SLURM_PROCID={rank}, but SLURM_STEP_ID does not name an srun step; as a single process it "
                f"would read what every other task reads: {_CURE}"
            )
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, world = _together(env, "SLURM_PROCID", size_name)
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    if "SLURM_NODEID" not in env and nodes_name not in env and world == 1:
        return RankInfo(source="Slurm (srun step)")
    node, num_nodes = _together(env, "SLURM_NODEID", nodes_name)
    if (local := _number(env, "SLURM_LOCALID")) is None:
        raise ValueError(f"SLURM_LOCALID is not set in an srun step of {world} tasks: {_CURE}")
    local_world = _slurm_tasks_on(env, node, num_nodes, world)
    return RankInfo(rank, world, local, local_world, node, num_nodes, "Slurm (srun step)")


_LAUNCHERS: Sequence[tuple[Sequence[str], Callable[[Env], RankInfo | None]]] = (
    (("RANK", "WORLD_SIZE", "LOCAL_RANK"), _torchrun),
    (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _open_mpi),
    (("PMI_RANK",), _hydra),
    (("SLURM_STEP_ID", "SLURM_PROCID"), _slurm),
)
"""In this order, variables by which a launcher is known, and what reads all of its."""


def _slurm_tasks_on(env: Env, node: int, num_nodes: int, world: int) -> int:
    """Tasks on a node from the run-length form "4(x2),3", else from an even spread."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    if len(tasks) == num_nodes and sum(tasks) == world:
        return tasks[node] if node < num_nodes else 1
    if world % num_nodes:
        raise ValueError(
            f"{world} tasks on {num_nodes} nodes are uneven and SLURM_STEP_TASKS_PER_NODE={text!r} "
            f"does not say how: {_CURE}"
        )
    return world // num_nodes


def _numbered(env: Env, names: tuple[str, str], local_names: tuple[str, str], source: str) -> RankInfo:
    """Return the information of a rank whose launcher numbers ranks and local ranks, not nodes."""
    rank, world = _together(env, *names)
    local, local_world = _together(env, *local_names)
    node, num_nodes = _node_of(rank, world, local, local_world, names[0])
    return RankInfo(rank, world, local, local_world, node, num_nodes, source)


def _node_of(rank: int, world: int, local: int, local_world: int, name: str) -> tuple[int, int]:
    """Return node and number of nodes where the launcher says neither: ranks run node by node, or in turn."""
    if local_world >= 1 and world % local_world == 0:
        num_nodes = world // local_world
        if rank % local_world == local:
            return rank // local_world, num_nodes
        if rank // num_nodes == local:
            return rank % num_nodes, num_nodes
    raise ValueError(
        f"{name}={rank} of {world} with local rank {local} of {local_world} does not tell the node: {_CURE}"
    )


def _together(env: Env, rank_name: str, size_name: str) -> tuple[int, int]:
    """A rank and its world, which come together or not at all."""
    rank, size = _number(env, rank_name), _number(env, size_name)
    if rank is None or size is None:
        missing = [name for name in (rank_name, size_name) if name not in env]
        raise ValueError(f"{' and '.join(missing)} missing beside other variables of its launcher: {_CURE}")
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} is not in [0, {size_name}={size}): {_CURE}")
    return rank, size


def _number(env: Env, name: str) -> int | None:
    try:
        return int(env[name]) if name in env else None
    except ValueError as cause:
        raise ValueError(f"{name} must be an integer, got {env[name]!r}") from cause
