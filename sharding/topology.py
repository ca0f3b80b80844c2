"""Which of how many processes this is, and on which machine.

A `Topology` is a frozen value. `detect` reads it from what the launcher left in the environment, and never
guesses a rank: a partial or contradictory environment is an error, because a wrong rank trains silently on
the wrong samples. An initialised `torch.distributed` is looked at by the dataflow package, not here.

torchrun's variables come first, as torchrun is often started inside a Slurm step. Open MPI's come before
Slurm's: under `mpirun` in a Slurm job, SLURM_PROCID is the rank of mpirun's daemon, one per node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

Env = Mapping[str, str]

_RESERVED_STEP = 0xFFFFFFF0
"""Slurm's step ids from here on are batch scripts, interactive shells and the like, never `srun` tasks."""
_CURE = "unset it, complete it, or pass topology=Topology(rank=..., world_size=...)"


@dataclass(frozen=True)
class Topology:
    """One process among `world_size`. Raises `ValueError` for ranks outside their worlds."""

    rank: int = 0
    """This process, in [0, world_size)."""
    world_size: int = 1
    """Processes that share the dataset."""
    local_rank: int = 0
    """This process on its node, in [0, local_world_size)."""
    local_world_size: int = 1
    """Processes on this node: those that share its memory, disk and network."""
    node: int = 0
    """This node, in [0, num_nodes)."""
    num_nodes: int = 1
    source: str = "given"
    """Where it was learned, for logs and error messages."""

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

    @classmethod
    def detect(cls, env: Env | None = None) -> Topology:
        """Read the launcher's variables: torchrun's, Open MPI's, Slurm's, else a single process.

        Args:
            env: the environment to read; `os.environ` when None.

        Raises `ValueError` for a partial or contradictory environment, naming the variable and the cure.
        """
        present = os.environ if env is None else env
        env = {name: text for name, text in present.items() if text.strip()}
        for launcher in (_torchrun, _open_mpi, _slurm):
            if (found := launcher(env)) is not None:
                return found
        if "SLURM_JOB_ID" in env:
            return cls(source="single process (in a Slurm allocation, but not a task started by srun)")
        return cls(source="single process")


def _torchrun(env: Env) -> Topology | None:
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
        # One process a node is what launchers without local ranks start; it shares nothing by mistake.
        return Topology(rank, world, 0, 1, rank, world, "RANK and WORLD_SIZE (no LOCAL_RANK: one a node)")
    if local_name not in env and (step := _slurm(env)) and (step.rank, step.world_size) == (rank, world):
        return step  # a job script that copied Slurm's variables
    local, local_world = _together(env, "LOCAL_RANK", local_name)
    node, num_nodes = _number(env, "GROUP_RANK"), _number(env, "GROUP_WORLD_SIZE")
    if node is None or num_nodes is None:
        node, num_nodes = _placed(rank, world, local, local_world, "RANK")
    return Topology(rank, world, local, local_world, node, num_nodes, "torchrun (RANK, WORLD_SIZE)")


def _open_mpi(env: Env) -> Topology | None:
    prefix = "OMPI_COMM_WORLD_"
    if f"{prefix}RANK" not in env and f"{prefix}SIZE" not in env:
        return None
    rank, world = _together(env, f"{prefix}RANK", f"{prefix}SIZE")
    local, local_world = _together(env, f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE")
    node, num_nodes = _placed(rank, world, local, local_world, f"{prefix}RANK")
    return Topology(rank, world, local, local_world, node, num_nodes, "Open MPI (OMPI_COMM_WORLD_*)")


def _slurm(env: Env) -> Topology | None:
    """The task of an `srun` step.

    sbatch and salloc set SLURM_NTASKS and even SLURM_PROCID=0 in their single shell, which is no task of a
    step: only SLURM_STEP_ID tells. Taken for a rank, that shell would read one share and drop the others.
    """
    step = _number(env, "SLURM_STEP_ID")
    if step is None or step >= _RESERVED_STEP:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, world = _together(env, "SLURM_PROCID", size_name)
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    if "SLURM_NODEID" not in env and nodes_name not in env and world == 1:
        return Topology(source="Slurm (srun step)")
    node, num_nodes = _together(env, "SLURM_NODEID", nodes_name)
    if (local := _number(env, "SLURM_LOCALID")) is None:
        raise ValueError(f"SLURM_LOCALID is not set in an srun step of {world} tasks: {_CURE}")
    local_world = _slurm_tasks_on(env, node, num_nodes, world)
    return Topology(rank, world, local, local_world, node, num_nodes, "Slurm (srun step)")


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


def _placed(rank: int, world: int, local: int, local_world: int, name: str) -> tuple[int, int]:
    """Node and number of nodes where the launcher does not say: ranks placed node by node, or dealt round."""
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
