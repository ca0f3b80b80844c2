"""Loaders in the dict that `torch.distributed.checkpoint` saves and loads, as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets_kit import rank
from parameters_kit import in_full
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from dataflow import DataLoader, Mixture, Packed, ShardedDataset, ShardWriter
from dataflow.topology_exchange import data_ranks_of_mesh, detect_topology

pytestmark = [pytest.mark.timeout(100), pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")]

GLOBAL_BATCH, SAMPLES = 8, 72


class Stream(IterableDataset[int]):
    """Some numbers, and its own word about where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 40:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": {"of": {str(self.at): [self.at, {"deep": torch.tensor(self.at)}]}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of samples with the numbers from 0 on, and of documents with some tokens each."""
    for name, count in (("a", SAMPLES), ("b", 20)):
        with ShardWriter(f"{tmp_path}/{name}-%d.jsonl", max_count=10) as shards:
            for i in range(count):
                shards.write({"n": i, "tokens": [i] * (1 + i % 7)})
    return tmp_path


def dataset_of(folder: Path, name: str = "a") -> ShardedDataset:
    return ShardedDataset(f"{folder}/{name}-*.jsonl", catalog=f"{folder}/{name}.catalog")


def mixed(folder: Path) -> Mixture:
    return Mixture({dataset_of(folder): 2, dataset_of(folder, "b"): 1}, stop="never")


KINDS: dict[str, Callable[[Path], DataLoader]] = {
    "shards": lambda folder: DataLoader(dataset_of(folder), 4, shuffle=True, seed=1),
    "packed": lambda folder: DataLoader(dataset_of(folder), 2, True, batching=Packed(16, "tokens")),
    "a mixture by tokens": lambda folder: DataLoader(
        Mixture({dataset_of(folder): 2, dataset_of(folder, "b"): 1}, stop="all", shares="tokens"),
        2,
        True,
        batching=Packed(16, "tokens"),
    ),
    "weights that were set": lambda folder: DataLoader(mixed(folder), 4, True),
    "a map-style dataset": lambda _: DataLoader(range(40), 4, True),
    "a generator": lambda _: DataLoader(range(40), 4, True, generator=torch.Generator().manual_seed(3)),
    "an iterable dataset with a state": lambda _: DataLoader(Stream(), 4),
    "its workers": lambda _: DataLoader(Stream(), 4, num_workers=1, workers="thread"),
}


def shown(batch: Any) -> str:
    return repr(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_begins_takes_what_one_inside_an_epoch_has_saved(folder: Path, kind: str) -> None:
    """The keys of a state are those that a new loader's state has, whatever is in it."""
    checkpoint = str(folder / "checkpoint")
    with KINDS[kind](folder) as loader:
        assert isinstance(loader, Stateful)
        loop = iter(loader)
        next(loop)
        if kind == "weights that were set":
            assert isinstance(loader.dataset, Mixture)
            loader.dataset.set_weights([1, 4])
        for _ in range(2):
            next(loop)
        save({"loader": loader}, checkpoint_id=checkpoint, no_dist=True)
        whole = [shown(batch) for batch in islice(loop, 9)]
    with KINDS[kind](folder) as loader:
        load({"loader": loader}, checkpoint_id=checkpoint, no_dist=True)
        assert loader.resumed
        assert [shown(batch) for batch in islice(loader, 9)] == whole
    assert len(whole) >= 6


# ---- ranks ------------------------------------------------------------------------------------------------


def numbers_of_step(batch: Any, group: Any) -> list[int]:
    """The samples that all ranks of a group have in a step."""
    own = batch["n"].tolist()
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    return sorted(chain(*every))


def steps_of_one_rank(folder: Path) -> list[list[int]]:
    """The plain loop."""
    with DataLoader(dataset_of(folder), GLOBAL_BATCH, True, seed=1, topology=rank(0, 1)) as loader:
        return [sorted(batch["n"].tolist()) for batch in loader]


def bytes_of_data(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))


@pytest.mark.ranks(4)
def test_what_some_ranks_have_saved_others_load_and_it_is_there_once(folder: Path) -> None:
    me, groups = dist.get_rank(), {size: dist.new_group([*range(size)]) for size in (1, 2, 4)}
    plain, done = steps_of_one_rank(folder), 4

    def loader_of(size: int) -> DataLoader:
        return DataLoader(dataset_of(folder), GLOBAL_BATCH // size, True, seed=1, topology=rank(me, size))

    for size, group in groups.items():
        if me < size:
            with loader_of(size) as loader:
                loop = iter(loader)
                steps = [numbers_of_step(next(loop), group) for _ in range(done)]
                assert steps == plain[:done]
                checkpoint = str(folder / str(size))
                save({"loader": loader}, checkpoint_id=checkpoint, process_group=group)
    dist.barrier()
    assert bytes_of_data(folder / "4") == bytes_of_data(folder / "2") == bytes_of_data(folder / "1") > 0
    for saved in groups:
        for size, group in groups.items():
            if me < size:
                with loader_of(size) as loader:
                    load({"loader": loader}, checkpoint_id=str(folder / str(saved)), process_group=group)
                    rest = [numbers_of_step(batch, group) for batch in loader]
                assert rest == plain[done:], f"saved by {saved} ranks, loaded by {size}"


def model_on(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[list[int], float]:
    """The samples and the loss of a step."""
    loss = model(batch["n"][:, None] / SAMPLES).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return batch["n"].tolist(), float(loss)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard"), *in_full(("dp_shard", "tp"))])
def test_an_asynchronous_save_on_a_mesh_has_the_position_where_it_was_called(
    folder: Path, names: tuple[str, str]
) -> None:
    """Of a hybrid mesh each rank has its own part, of one with a tensor-parallel dimension each two one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    data_dims = [name for name in names if name != "tp"]
    topology = detect_topology(replicate=data_ranks_of_mesh(mesh, *data_dims))
    assert topology.data_world_size == 2 ** len(data_dims)

    def begun() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
        size = GLOBAL_BATCH // topology.data_world_size
        loader = DataLoader(dataset_of(folder), size, True, seed=1, topology=topology)
        return *model_on(mesh if len(data_dims) == 2 else mesh["dp_shard"]), loader

    def parts(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> dict[str, Any]:
        model_state, optim_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optim_state, "loader": loader}

    model, optimizer, loader = begun()
    loop, checkpoint = iter(loader), str(folder / "checkpoint")
    for _ in range(3):
        trained(model, optimizer, next(loop))
    saving: Any = async_save(parts(model, optimizer, loader), checkpoint_id=checkpoint)
    rest = [trained(model, optimizer, batch) for batch in loop]
    getattr(saving, "upload_completion", saving).result()  # with newer stagers both are futures
    loader.close()

    model, optimizer, loader = begun()
    loaded = parts(model, optimizer, loader)
    load(loaded, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    assert [trained(model, optimizer, batch) for batch in loader] == rest
    loader.close()
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, [numbers for numbers, _ in rest])
    group = topology.replica_group or ()
    assert all(every[other] == every[topology.rank] for other in group)
    firsts = [every[(topology.data_ranks or ()).index(at)] for at in range(topology.data_world_size)]
    steps = [sorted(chain(*parts)) for parts in zip(*firsts, strict=True)]
    assert steps == steps_of_one_rank(folder)[3:]
