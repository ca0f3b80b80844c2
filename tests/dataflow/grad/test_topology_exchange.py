"""Real gloo ranks that tell each other where they are, and replica groups that read together."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from datasets_kit import Made, make_ints_tar, rank, rows_of
from forked_kit import fast_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataflow import DataflowError, DataLoader, ShardedDataset, Shuffle, Topology
from dataflow.topology_exchange import data_ranks_of_mesh, detect_topology
from sharding.topology.replicas import DataParallel

FAST: Any = {"start_method": "forkserver"}
BARE = "/nothing/here"
"""A sysfs without files."""


@pytest.fixture
def ints(tmp_path: Path) -> Made:
    made = make_ints_tar(tmp_path)
    made.open()  # writes the catalog
    return made


# ---- where ranks are ------------------------------------------------------------------------------------


def everyones_place() -> dict[str, Any]:
    """Several facts at once: starting ranks takes longer than asking them."""
    r, world = dist.get_rank(), dist.get_world_size()
    bare = {"RANK": str(r), "WORLD_SIZE": str(world)}
    found = {
        "launched": detect_topology(sysfs=BARE),
        "racked": detect_topology(sysfs=BARE, racks=lambda host: f"rack of {host}", replicate=2),
    }
    for name, env in {"bare": bare, "none": {}, "partial": {"LOCAL_RANK": "0"}}.items():
        new_group()
        found[name] = detect_topology(env, host="ab"[r % 2], sysfs=BARE)
    new_group()
    switch = {"SLURM_TOPOLOGY_ADDR": f"s{r % 2}.n", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    found["map"] = detect_topology(bare | switch, host=f"n{r}", racks={"n0": "x"}, sysfs=BARE)
    found["switches"] = detect_topology(bare | switch, host=f"n{r}", sysfs=BARE)
    return found


def new_group() -> None:
    """The job's process group anew, as after an elastic restart inside the process."""
    store = dist.distributed_c10d._get_default_store()
    r, world = dist.get_rank(), dist.get_world_size()
    again = dist.PrefixStore("again", store)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=again, rank=r, world_size=world)


def test_ranks_learn_where_all_ranks_are() -> None:
    places = fast_ranks(everyones_place, 4, num_nodes=2, **FAST)
    host = platform.node()
    for r, found in enumerate(places):
        assert found["launched"].nodes_of_ranks == (0, 0, 1, 1)
        assert found["launched"].hosts == (host, host)
        assert "no rack" in found["launched"].why_unknown["racks"]
        assert found["racked"].racks == (f"rack of {host}",) * 2
        assert found["racked"].replica_group == (r // 2 * 2, r // 2 * 2 + 1)
        for name in ("bare", "none", "partial"):
            place = found[name]
            assert (place.rank, place.world_size) == (r, 4)
            assert (place.nodes_of_ranks, place.hosts) == ((0, 1, 0, 1), ("a", "b"))
            assert (place.node, place.local_rank, place.local_world_size) == (r % 2, r // 2, 2)
        assert found["none"].source.startswith("torch.distributed")
        assert found["switches"].racks == ("s0", "s1", "s0", "s1")
        assert found["map"].racks is None


def count_gathers(nccl_alone: bool) -> tuple[int, int, tuple[int, ...] | None]:
    gathers, groups = [], []
    gather, config, new, destroy = (
        dist.all_gather_object,
        dist.get_backend_config,
        dist.new_group,
        dist.destroy_process_group,
    )
    dist.all_gather_object = lambda *args: (gathers.append(args[2]), gather(*args))
    dist.get_backend_config = lambda *_: "cuda:nccl" if nccl_alone else config()
    dist.new_group = lambda *args, **options: (groups.append(1), new(*args, **options))[1]
    dist.destroy_process_group = lambda group=None: (group and groups.pop(), destroy(group))
    place = [detect_topology(), detect_topology(racks={}), detect_topology(replicate=2)][0]
    assert (gathers[0] is not None) == nccl_alone
    return len(gathers), len(groups), place.nodes_of_ranks


@pytest.mark.parametrize("nccl_alone", [False, True], ids=["gloo", "nccl"])
def test_hosts_are_gathered_once_a_process_group_and_no_group_is_left(nccl_alone: bool) -> None:
    assert fast_ranks(count_gathers, 2, args=(nccl_alone,), **FAST) == [(1, 0, (0, 0))] * 2


def failed_exchange() -> str:
    def broken(*_: object) -> None:
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

    dist.all_gather_object = broken
    with pytest.raises(DataflowError, match="all of them must make their first DataLoader") as caught:
        detect_topology()
    return str(caught.value.__cause__)


def test_an_exchange_that_fails_says_what_to_do() -> None:
    assert "Timed out" in fast_ranks(failed_exchange, 2, **FAST)[1]


def test_without_a_process_group_nothing_is_exchanged() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    assert detect_topology(env, host="a", sysfs=BARE) == Topology.detect(env, host="a", sysfs=BARE)
    with pytest.raises(ValueError, match="RANK and WORLD_SIZE are not set"):
        detect_topology({"LOCAL_RANK": "0"})


# ---- ranks that share data ------------------------------------------------------------------------------


def batches(dataset: ShardedDataset, place: Topology | None, tail: str, start: Any = None) -> list[list[int]]:
    with DataLoader(
        dataset,
        4,
        Shuffle("window", 2),
        topology=place,
        tail=tail,
        seed=3,  # type: ignore[arg-type]
    ) as loader:
        if start is not None:
            loader.load_state_dict(start)
        return [[row["cls"] for row in rows_of(batch)] for batch in loader]


def batches_of_all_kinds(source: str, catalog: str) -> dict[str, list[list[int]]]:
    dataset = ShardedDataset(source, catalog=catalog)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    groups: dict[str, Any] = {
        "consecutive": 2,
        "strided": data_ranks_of_mesh(mesh, "dp"),
        "pair": DataParallel(mesh["dp"].get_local_rank(), mesh["dp"].size()),
        "all": 4,
        "none": 1,
    }
    found = {
        name: batches(dataset, detect_topology(replicate=groups[name], sysfs=BARE), "uneven")
        for name in groups
    }
    return found | {"default": batches(dataset, None, "uneven")}


def test_ranks_of_a_group_get_identical_batches_and_groups_share_the_epoch_exactly(ints: Made) -> None:
    found = fast_ranks(batches_of_all_kinds, 4, args=(ints.kwargs["source"], ints.kwargs["catalog"]), **FAST)
    data_ranks = {
        "consecutive": [0, 0, 1, 1],
        "strided": [0, 1, 0, 1],
        "pair": [0, 1, 0, 1],
        "all": [0, 0, 0, 0],
        "none": [0, 1, 2, 3],
        "default": [0, 1, 2, 3],
    }
    for name, groups in data_ranks.items():
        leaders = [groups.index(group) for group in sorted(set(groups))]
        for r, group in enumerate(groups):
            assert found[r][name] == found[groups.index(group)][name], name
        shares = [found[leader][name] for leader in leaders]
        seen = [value for share in shares for batch in share for value in batch]
        assert sorted(seen) == sorted(row["cls"] for row in ints.samples), name
        for share, leader in zip(shares, leaders, strict=True):  # what as many ranks without groups would get
            place = rank(groups[leader], len(leaders))
            assert share == batches(ints.open(), place, "uneven"), name


def test_one_group_has_no_other_that_could_lack_a_step(ints: Made) -> None:
    with DataLoader(ints.open(), 4, topology=Topology(1, 4, replicate=4)) as loader:
        assert loader.tail == "uneven"
    with DataLoader(ints.open(), 4, topology=Topology(1, 4, replicate=2)) as loader:
        assert loader.tail == "even"


def test_a_state_taken_with_groups_resumes_without_them(ints: Made) -> None:
    with DataLoader(
        ints.open(), 4, Shuffle("window", 2), topology=Topology(3, 4, replicate=2), seed=3
    ) as loader:
        loop = iter(loader)
        for _ in range(2):
            next(loop)
        state = loader.state_dict()
    whole = batches(ints.open(), rank(1, 2), "even")
    assert batches(ints.open(), rank(1, 2), "even", start=state) == whole[2:]
    with_groups = Topology(2, 6, replicate=[1, 1, 1, 0, 0, 0])
    assert batches(ints.open(), with_groups, "even", start=state) == whole[2:]


# ---- device meshes --------------------------------------------------------------------------------------


def mesh_maps() -> dict[str, Any]:
    grid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
    swapped = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    errors = {}
    for name, mesh, dims in (
        ("part", grid["replicas"], ["replicas"]),
        ("unknown", grid, ["dp"]),
        ("none", grid, []),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            data_ranks_of_mesh(mesh, *dims)
        errors[name] = str(caught.value)
    return {
        "inner tp": data_ranks_of_mesh(grid, "replicas", "shards"),
        "all data": data_ranks_of_mesh(grid, "replicas", "tp"),
        "other way round": data_ranks_of_mesh(grid, "tp", "replicas"),
        "swapped": data_ranks_of_mesh(swapped, "dp"),
        "errors": errors,
    }


def test_a_device_mesh_tells_the_groups() -> None:
    for found in fast_ranks(mesh_maps, 4, **FAST):
        assert found["inner tp"] == [0, 0, 1, 1]
        assert found["all data"] == [0, 1, 2, 3]
        assert found["other way round"] == [0, 2, 1, 3]
        assert found["swapped"] == [1, 0, 1, 0]
        assert "pass the whole mesh" in found["errors"]["part"]
        assert "must be among the mesh's dimensions" in found["errors"]["unknown"]
        assert "got ()" in found["errors"]["none"]
