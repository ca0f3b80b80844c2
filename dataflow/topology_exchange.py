"""Find the rank information of all processes: from the launcher's environment, and from what ranks exchange.

With `torch.distributed` initialised, its rank and world size are the truth, and each rank's host name, node
and rack are gathered by one collective, once a process group. Every rank must take part: the first loader of
a job that finds its topology by itself has to be made on all ranks (a loader of one rank only is given
`topology=Topology()`). Without `torch.distributed`, nothing is exchanged and nothing is guessed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist

from sharding.errors import DataflowError
from sharding.topology.launchers import Env, RankInfo, detect_rank_info, given_variables, slurm_switch
from sharding.topology.replicas import DataParallel as DataParallel, Replicate
from sharding.topology.topology import Racks, Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from sharding.topology.rank_facts import RankFacts

_GATHERED: WeakKeyDictionary[dist.ProcessGroup, list[RankFacts]] = WeakKeyDictionary()
"""The messages of the ranks of a process group; they go with the group."""


def detect_topology(
    env: Env | None = None,
    *,
    racks: Racks | None = None,
    replicate: Replicate = 1,
    sysfs: str | None = "/sys",
    host: str | None = None,
) -> Topology:
    """`Topology.detect`, completed by the other ranks if `torch.distributed` is initialised.

    The first call in a process group is a collective: all ranks must make it. Arguments as those of
    `Topology.detect`; `racks` and `replicate` must be the same on all ranks.

    Raises:
        ValueError: contradictory launcher variables, and no `torch.distributed` to tell better.
        DataflowError: the exchange failed or timed out.
    """
    env = given_variables(env)
    rank_info = _rank_info_in_group(env) if dist.is_available() and dist.is_initialized() else None
    here = Topology.detect(env, rank_info=rank_info, racks=racks, replicate=replicate, sysfs=sysfs, host=host)
    if rank_info is None or rank_info.world_size == 1:
        return here
    from sharding.topology.rank_facts import facts_of, with_facts

    # What is gathered holds Slurm's racks, not this call's: a rack map is looked up here, by host.
    return with_facts(here, _gathered(facts_of(here)._replace(rack=slurm_switch(env)[0])), racks)


def rank_and_world_size() -> tuple[int, int]:
    """Return the number of this process in its job, and of all: (0, 1) where nothing tells."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        rank_info = detect_rank_info(given_variables(None))
    except ValueError:
        return 0, 1
    return rank_info.rank, rank_info.world_size


def data_ranks_of_mesh(mesh: DeviceMesh, *data_dims: str) -> list[int]:
    """The data rank of every rank, for `replicate=`: ranks that differ only in other dimensions share data.

    Args:
        mesh: the whole mesh, over all ranks of the job.
        data_dims: names of the dimensions along which data differs, such as "dp", the outermost first.
    """
    names = mesh.mesh_dim_names or ()
    if not data_dims or not set(data_dims) <= set(names):
        raise ValueError(f"data_dims must be among the mesh's dimensions {names}, got {data_dims}")
    ranks = mesh.mesh.numpy()
    if sorted(ranks.ravel()) != list(range(dist.get_world_size())):
        raise ValueError("the mesh must have every rank of the job: pass the whole mesh, not a part of it")
    axes = [names.index(dim) for dim in data_dims]
    coordinates = np.indices(ranks.shape)[axes]
    data_ranks = np.empty(ranks.size, np.int64)
    data_ranks[ranks] = np.ravel_multi_index(tuple(coordinates), tuple(ranks.shape[axis] for axis in axes))
    return [int(rank) for rank in data_ranks]


def check_ranks_agree(call: str, subject: str, text: str, timeout_s: float) -> None:
    """Raise `ValueError` on all ranks where they do not say the same. A collective of its own.

    Args:
        call: the method that all ranks call.
        subject: the word for its arguments.
        text: this rank's.
        timeout_s: seconds to wait for the others; beyond, a `DataflowError`.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    said = [""] * dist.get_world_size()
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        dist.all_gather_object(said, text, group=group)
        dist.destroy_process_group(group)
    except RuntimeError as error:
        raise DataflowError(
            f"other ranks did not call {call} within {timeout_s:g} s (timeout= of the loader): all of "
            f"them call it, with the same {subject} and after the same number of batches"
        ) from error
    if len({*said}) > 1:
        listed = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        raise ValueError(f"the ranks set unlike {subject}: {listed}")


def _rank_info_in_group(env: Env) -> RankInfo:
    """The launcher's word if it has this rank, else torch.distributed's, which knows no nodes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        rank_info = detect_rank_info(env)
        why = f"the launcher's variables tell of rank {rank_info.rank} of {rank_info.world_size}"
    except ValueError as error:
        rank_info, why = None, str(error)
    if rank_info is not None and (rank_info.rank, rank_info.world_size) == (rank, world):
        return rank_info
    return RankInfo.alone_on_its_node(rank, world, "torch.distributed", why)


def _gathered(local_facts: RankFacts) -> list[RankFacts]:
    """The facts of all ranks, in rank order."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _GATHERED:
        try:
            _GATHERED[group] = _all_gather(local_facts)
        except RuntimeError as error:
            raise DataflowError(
                "the ranks could not exchange their rank information: all of them must make their first "
                "DataLoader (or call detect_topology); give topology= to a loader that only some ranks make"
            ) from error
    return _GATHERED[group]


def _all_gather(local_facts: RankFacts) -> list[RankFacts]:
    """Gather by the job's group if it serves host memory; else (NCCL alone) by a gloo group made for it."""
    on_host = "cpu:" in dist.get_backend_config()
    group = None if on_host else dist.new_group(backend="gloo")
    facts: list[RankFacts] = [local_facts] * dist.get_world_size()
    dist.all_gather_object(facts, local_facts, group)
    if group is not None:
        dist.destroy_process_group(group)
    return facts
