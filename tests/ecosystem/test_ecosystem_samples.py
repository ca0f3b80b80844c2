"""Samplers, transforms and batches of other packages give with `DataLoader` what they give with torch's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ecosystem_kit import (
    Compose,
    GraphBatch,
    Graphs,
    Items,
    Numbers,
    Told,
    Transformed,
    Twins,
    as_list,
    batch_graphs,
    plain,
    random_crop,
    random_flip,
    random_noise,
)
from torch.utils.data import (
    DataLoader as TorchDataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dataflow import DataLoader

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning", "ignore:'pin_memory' argument:UserWarning"
)

SIZE = 23
Loader = type[TorchDataLoader[Any]]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": seeded()},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(3, 20))},
    "subset, generator": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(9), seeded())},
    "weighted": lambda: {"batch_size": 5, "sampler": WeightedRandomSampler([0.1, 2.0, 1.0], 17)},
    "replacement": lambda: {"batch_size": 5, "sampler": RandomSampler(range(SIZE), replacement=True)},
    "twins": lambda: {"batch_sampler": Twins(RandomSampler(range(SIZE)), 2, False)},
    "twins, generator": lambda: {
        "batch_sampler": Twins(RandomSampler(range(9), generator=seeded()), 2, False)
    },
    "distributed": lambda: {"batch_size": 2, "sampler": DistributedSampler(range(SIZE), 3, 1, seed=5)},
    "twins, distributed": lambda: {"batch_sampler": Twins(DistributedSampler(range(SIZE), 2, 0), 2, False)},
}


def epochs_of(loader: Any, sampler: Any = None) -> list[Any]:
    """Two epochs, told to the sampler as users of `DistributedSampler` do."""
    found = []
    for epoch in range(2):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        found.append([plain(batch) for batch in loader])
    return found


def sampled(cls: Loader, kind: str, workers: int) -> list[Any]:
    torch.manual_seed(3)
    arguments = SAMPLERS[kind]()
    outer = arguments.get("batch_sampler") or arguments.get("sampler")
    return epochs_of(cls(Numbers(SIZE), num_workers=workers, **arguments), getattr(outer, "sampler", outer))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_give_the_order_that_they_give_with_torch(kind: str, workers: int) -> None:
    ours = sampled(DataLoader, kind, workers)
    assert ours == sampled(TorchDataLoader, kind, workers)
    assert ours[0] != ours[1]


@pytest.mark.parametrize("kind", ["twins", "twins, generator", "twins, distributed"])
def test_states_hold_what_decides_the_order_of_samplers_inside_samplers(kind: str) -> None:
    def make() -> tuple[DataLoader, Any]:
        arguments = SAMPLERS[kind]()
        return DataLoader(Numbers(SIZE), **arguments), arguments["batch_sampler"].sampler

    loader, sampler = make()
    assert len(list(loader)) == len(loader)  # generators go on to another epoch
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(4)
    batches = iter(loader)
    head = [next(batches) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    tail = [plain(batch) for batch in batches]

    torch.manual_seed(99)
    again, _ = make()
    again.load_state_dict(state)
    assert [plain(batch) for batch in again] == tail
    assert len(head) + len(tail) == len(again)


def test_an_epoch_that_is_set_between_iter_and_next_is_the_one_in_the_state() -> None:
    sampler = DistributedSampler(range(SIZE), 1, 0)
    loader = DataLoader(Numbers(SIZE), 4, sampler=sampler)
    batches = iter(loader)
    sampler.set_epoch(7)
    next(batches)
    state = loader.state_dict()
    tail = [plain(batch) for batch in batches]
    again = DataLoader(Numbers(SIZE), 4, sampler=DistributedSampler(range(SIZE), 1, 0))
    again.load_state_dict(state)
    assert [plain(batch) for batch in again] == tail


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_s_stateful_sampler_resumes_where_it_was(workers: int) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def make(cls: Loader) -> Any:
        sampler = module.StatefulDistributedSampler(range(SIZE), 2, 1, seed=3)
        sampler.set_epoch(2)
        return cls(Numbers(SIZE), 3, sampler=sampler, num_workers=workers)

    whole = [plain(batch) for batch in make(TorchDataLoader)]
    loader = make(DataLoader)
    batches = iter(loader)
    head = [plain(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    assert head + [plain(batch) for batch in batches] == whole
    again = make(DataLoader)
    again.load_state_dict(state)
    assert [plain(batch) for batch in again] == whole[2:]


# ---- transforms -----------------------------------------------------------------------------------------


def transformed(cls: Loader, transform: Any, **arguments: Any) -> list[Any]:
    torch.manual_seed(8)
    loader = cls(Transformed(transform), 4, shuffle=True, **arguments)
    return [[batch[0].tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}], ids=["", "persistent"])
def test_random_transforms_give_the_values_that_they_give_with_torch(arguments: Any) -> None:
    transform = Compose(random_crop, random_flip, random_noise)
    ours = transformed(DataLoader, transform, num_workers=2, **arguments)
    assert ours == transformed(TorchDataLoader, transform, num_workers=2, **arguments)
    assert ours[0] != ours[1]


def test_torchvision_s_transforms_give_the_values_that_they_give_with_torch() -> None:
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError, OSError) as error:  # built for another torch: RuntimeError
        pytest.skip(f"torchvision: {error}")
    transform = v2.Compose([v2.RandomCrop(6), v2.RandomHorizontalFlip(), v2.GaussianBlur(3)])
    ours = transformed(DataLoader, transform, num_workers=2)
    assert ours == transformed(TorchDataLoader, transform, num_workers=2)


# ---- batches --------------------------------------------------------------------------------------------


def batches_of(cls: Loader, dataset: Any, workers: int, **arguments: Any) -> list[Any]:
    torch.manual_seed(2)
    return list(cls(dataset, num_workers=workers, **arguments))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_graphs_are_those_of_torch(workers: int) -> None:
    arguments = {"batch_size": 4, "collate_fn": batch_graphs}
    ours = batches_of(DataLoader, Graphs(), workers, **arguments)
    assert [type(batch) for batch in ours] == [GraphBatch] * 3
    theirs = batches_of(TorchDataLoader, Graphs(), workers, **arguments)
    assert [plain(batch) for batch in ours] == [plain(batch) for batch in theirs]


@pytest.mark.parametrize("collate", [None, as_list], ids=["default", "own"])
def test_data_classes_named_tuples_and_slots_cross_from_workers(collate: Any) -> None:
    arguments = {"batch_size": 2 if collate else None, "collate_fn": collate}
    ours = batches_of(DataLoader, Items(), 2, **arguments)
    assert plain(ours) == plain(batches_of(TorchDataLoader, Items(), 2, **arguments))


def test_the_pin_memory_of_a_batch_is_called_by_torch_s_own_rule() -> None:
    """Without an accelerator nothing is pinned, as with torch; with one, the method is called."""
    (ours, *_) = batches_of(DataLoader, Graphs(), 2, batch_size=9, collate_fn=batch_graphs, pin_memory=True)
    assert ours.pinned == torch.accelerator.is_available()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_batches_of_pytorch_geometric_are_those_of_its_own_loader(workers: int) -> None:
    data = pytest.importorskip("torch_geometric.data", exc_type=ImportError)
    loaders = pytest.importorskip("torch_geometric.loader")
    graphs = [data.Data(**vars(Graphs()[i])) for i in range(9)]
    torch.manual_seed(2)
    theirs = list(loaders.DataLoader(graphs, 4, shuffle=True, num_workers=workers))
    torch.manual_seed(2)
    collate = loaders.dataloader.Collater(graphs)
    ours = list(DataLoader(graphs, 4, shuffle=True, num_workers=workers, collate_fn=collate))
    assert len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        assert {k: plain(v) for k, v in mine.to_dict().items()} == {
            k: plain(v) for k, v in other.to_dict().items()
        }
        assert [plain(g.x) for g in mine.to_data_list()] == [plain(g.x) for g in other.to_data_list()]


# ---- datasets -------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_tensors_in_shared_memory_are_the_same_memory_in_the_workers(context: Any) -> None:
    dataset = Told()
    with DataLoader(
        dataset, 4, num_workers=2, persistent_workers=True, multiprocessing_context=context
    ) as loader:
        for epoch in range(3):
            dataset.epoch.fill_(epoch)
            dataset.table[4] = 100 + epoch
            for epochs, rows in loader:
                assert epochs.tolist() == [epoch] * 4
                assert rows.tolist() == [[0, 2, 100 + epoch, 6, 8, 10]] * 4


def test_any_number_of_shared_tensors_is_inherited_by_a_fork() -> None:
    dataset = TensorDataset(*(torch.full((2,), i).share_memory_() for i in range(65)))
    (batch,) = DataLoader(dataset, 2, num_workers=1)
    assert [tensor.tolist() for tensor in batch] == [[i, i] for i in range(65)]
