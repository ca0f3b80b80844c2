"""`DataLoader` over any dataset gives what torch's DataLoader gives: batches, order, random values."""

from __future__ import annotations

import itertools
import json
import random
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import make_ints_tar
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchDataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from dataflow import DataLoader
from dataflow.workers.iterator import WorkerIterator
from prefetch.ipc.generators import Draws

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


ACROSS = {"persistent_workers": True, "prefetch_across_epochs": True}


class Squares(Dataset[Any]):
    """Sample i, and who fetched it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "index": index,
            "array": np.full((3, index % 4 + 1), index)[:, :1],
            "text": f"sample {index}",
            "pair": (torch.tensor([index, index * index]), float(index)),
            "worker": info.id if info else -1,
        }


class Drawn(Dataset[Any]):
    """Samples that draw from every global generator."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[float]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]
        return [index, *drawn, *([float(np.random.randn())] if index % 3 else [])][:5]


class Counted(IterableDataset[Any]):
    """Each worker yields its own numbers, and not equally many."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        lane, lanes = (info.id, info.num_workers) if info else (0, 1)
        for number in range(7 * lane + 5 if info else 19):
            yield number * lanes + lane


class Place(IterableDataset[Any]):
    """An iterable that tells its place."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.resumed = size, 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.at = 0
        self.resumed = False
        info = get_worker_info()
        lane = info.id if info else 0
        while self.at < self.size + lane:
            self.at += 1
            yield self.at * 10 + lane

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], True


def plain(value: Any) -> Any:
    """Lists in place of tensors and arrays: comparable."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def epochs(loader: Any, count: int = 1) -> list[Any]:
    return [plain(batch) for _ in range(count) for batch in loader]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 5, "shuffle": True},
        {"batch_sampler": [[1, 2], [3], [21, 0, 7]]},
        {"sampler": [5, 4, 4, 1], "batch_size": 3},
    ],
    ids=str,
)
def test_batches_are_those_of_torch(workers: int, arguments: dict[str, Any]) -> None:
    torch.manual_seed(5)
    expected = epochs(TorchDataLoader(Squares(22), num_workers=workers, **arguments), 2)
    torch.manual_seed(5)
    assert epochs(DataLoader(Squares(22), num_workers=workers, **arguments), 2) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_random_values_in_workers_are_those_of_torch(workers: int, persistent: bool) -> None:
    def loader(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        return kind(
            Drawn(),
            4,
            shuffle=True,
            num_workers=workers,
            generator=generator,
            persistent_workers=persistent,
        )

    assert epochs(loader(DataLoader), 3) == epochs(loader(TorchDataLoader), 3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 2, 3])
def test_iterables_take_turns_as_with_torch(workers: int, batch_size: int | None) -> None:
    expected = epochs(TorchDataLoader(Counted(), batch_size, num_workers=workers))
    assert epochs(DataLoader(Counted(), batch_size, num_workers=workers)) == expected


WAYS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "processes": {"num_workers": 2},
    "persistent processes": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "thread"},
    "persistent threads": {"num_workers": 2, "workers": "thread", "persistent_workers": True},
}


@pytest.mark.parametrize("dataset", [lambda: Squares(5), Counted], ids=["map-style", "iterable"])
@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_that_has_ended_stays_ended(way: str, dataset: Any) -> None:
    """As with torch, whatever becomes of the loader afterwards."""
    kinds = [DataLoader] if "workers" in WAYS[way] else [DataLoader, TorchDataLoader]
    for kind in kinds:
        loader = kind(dataset(), 2, **WAYS[way])
        iterator = iter(loader)
        assert len(list(iterator)) > 2
        assert [next(iterator, "over") for _ in range(3)] == ["over"] * 3
        if kind is DataLoader:
            loader.close()
            assert next(iterator, "over") == "over"


def test_an_iterator_over_shards_that_has_ended_stays_ended(tmp_path: Path) -> None:
    with DataLoader(make_ints_tar(tmp_path).open(), 10) as loader:
        iterator = iter(loader)
        assert len(list(iterator)) == len(loader)
        assert [next(iterator, "over") for _ in range(2)] == ["over"] * 2
        assert len(list(loader)) == len(loader)
        assert next(iterator, "over") == "over"
    assert next(iterator, "over") == "over"


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_are_read_side_by_side_have_the_orders_of_torch(workers: int) -> None:
    def read(kind: Any) -> Any:
        torch.manual_seed(3)
        loaders = [kind(range(9), 2, shuffle=True, num_workers=workers) for _ in range(2)]
        return [plain(pair) for _ in range(2) for pair in zip(*loaders, strict=True)], torch.rand(2).tolist()

    assert read(DataLoader) == read(TorchDataLoader)


def test_a_state_from_before_the_first_batch_has_the_order_that_is_yet_to_be_drawn() -> None:
    loader, resumed = (DataLoader(range(9), 2, shuffle=True) for _ in range(2))
    begun = iter(loader)
    resumed.load_state_dict(loader.state_dict())
    again = iter(resumed)  # draws, as whatever else is done here may
    resumed.load_state_dict(resumed.state_dict())
    expected = plain(list(begun))
    assert plain(list(again)) == epochs(resumed) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_generator_advances_as_with_torch(workers: int) -> None:
    def after(kind: Any) -> float:
        torch.manual_seed(9)
        epochs(kind(Squares(9), 2, shuffle=True, num_workers=workers), 2)
        return float(torch.rand(()))

    assert after(DataLoader) == after(TorchDataLoader)


SAMPLERS = {
    "none": lambda data: {},
    "shuffle": lambda data: {"shuffle": True},
    "generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "random": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=31)},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(3, 20))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(range(1, 24), 17)},
    "distributed": lambda data: {"sampler": DistributedSampler(data, 2, 1)},
    "batch": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, True)},
    "list": lambda data: {"sampler": [3, 1, 2, 2, 9, 8]},
}


def made(kind: str, workers: int, **arguments: Any) -> DataLoader:
    data = Squares(23)
    chosen = SAMPLERS[kind](data)
    if "batch_sampler" not in chosen:
        chosen["batch_size"] = 3
    return DataLoader(data, num_workers=workers, **chosen, **arguments)


def indices(batches: list[Any]) -> list[Any]:
    return [batch["index"] for batch in batches]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("persistent", [False, True])
def test_random_values_go_on_after_a_resume(persistent: bool) -> None:
    def loader() -> DataLoader:
        return DataLoader(
            Drawn(),
            3,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(6),
        )

    whole, states = [], []
    running = loader()
    for _ in range(2):
        for batch in running:
            whole.append(plain(batch))
            states.append(running.state_dict())
    for place in (1, 4, 7, 8, 10, 13):
        resumed = loader()
        resumed.load_state_dict(json.loads(json.dumps(states[place - 1])))
        rest = epochs(resumed)
        assert len(rest) == -place % 8, place
        rest += epochs(resumed)
        assert rest[: len(whole) - place] == whole[place:], place


class DrawnLate(Drawn):
    """Draws nothing for its first samples."""

    def __getitem__(self, index: int) -> list[float]:
        return super().__getitem__(index) if index >= 12 else [index]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dataset", [Drawn, DrawnLate])
@pytest.mark.parametrize(("taken_with", "resumed_with"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_draws_of_an_epoch_go_on_with_any_number_of_worker_processes(
    dataset: Any, taken_with: int, resumed_with: int
) -> None:
    """From any place in it, the beginning too, and also where nothing was drawn before."""
    loader = DataLoader(dataset(), 3, num_workers=taken_with)
    iterator = iter(loader)
    expected, states = [], [loader.state_dict()]
    for batch in iterator:
        expected.append(plain(batch))
        states.append(loader.state_dict())
    for place in (0, 1, 2, 5):
        resumed = DataLoader(dataset(), 3, num_workers=resumed_with)
        resumed.load_state_dict(json.loads(json.dumps(states[place])))
        assert epochs(resumed) == expected[place:], place


@pytest.mark.parametrize(("taken_with", "resumed_with"), [(0, 2), (2, 0)])
def test_from_and_to_no_workers_the_order_goes_on_and_draws_do_not(
    taken_with: int, resumed_with: int
) -> None:
    """Without workers samples draw from the training code's own generators, which no loader can set."""

    def order(batches: list[Any]) -> list[Any]:
        return [batch[0] for batch in batches]

    loader = DataLoader(Drawn(), 3, shuffle=True, num_workers=taken_with)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    expected = [plain(batch) for batch in iterator]
    resumed = DataLoader(Drawn(), 3, shuffle=True, num_workers=resumed_with)
    resumed.load_state_dict(state)
    found = epochs(resumed)
    assert order(found) == order(expected)
    assert found != expected


def test_more_persistent_workers_than_a_state_had_all_work_from_the_next_epoch_on() -> None:
    loader = DataLoader(Squares(12), 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    resumed = DataLoader(Squares(12), 2, num_workers=2, persistent_workers=True)
    resumed.load_state_dict(loader.state_dict())
    assert {int(batch["worker"][0]) for batch in resumed} == {0}
    for _ in range(2):
        assert [int(batch["worker"][0]) for batch in resumed] == [0, 1] * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("taken_with", [0, 1, 3])
@pytest.mark.parametrize("resumed_with", [0, 2, 3])
@pytest.mark.parametrize("dataset", [lambda: Place(7), Counted], ids=["with a state", "without"])
def test_iterables_resume_with_another_number_of_workers(
    dataset: Any, taken_with: int, resumed_with: int
) -> None:
    loader = DataLoader(dataset(), 2, num_workers=taken_with)
    expected, states = [], []
    for batch in loader:
        expected.append(batch.tolist())
        states.append(loader.state_dict())
    for place in (1, 2, len(states) // 2, len(states)):
        resumed = DataLoader(dataset(), 2, num_workers=resumed_with)
        resumed.load_state_dict(json.loads(json.dumps(states[place - 1])))
        assert [batch.tolist() for batch in resumed] == expected[place:], place


@pytest.mark.one_in(3)
@pytest.mark.parametrize("every", [1, 3, 100])
def test_states_taken_every_few_batches_resume_as_exactly(every: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(Place(9), 2, num_workers=2, snapshot_every_n_steps=every)

    whole = [batch.tolist() for batch in loader()]
    for place in (1, len(whole) - 2):
        first = loader()
        list(itertools.islice(first, place))
        second = loader()
        second.load_state_dict(first.state_dict())
        assert [batch.tolist() for batch in second] == whole[place:]


def test_a_state_of_another_kind_is_refused() -> None:
    state = DataLoader(Squares(4)).state_dict()
    with pytest.raises(ValueError, match="iterable"):
        DataLoader(Counted()).load_state_dict(state)
    with pytest.raises(ValueError, match="not a state"):
        DataLoader(Squares(4)).load_state_dict({"seed": 1})


@pytest.mark.parametrize(
    "arguments",
    [{}, {"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}],
    ids=["in order", "shuffled", "with a generator"],
)
def test_where_asked_to_persistent_workers_begin_the_next_epoch_by_themselves(
    arguments: Any,
) -> None:
    torch.manual_seed(2)
    loader = DataLoader(Squares(12), 2, num_workers=2, **ACROSS, **arguments)
    iterator: WorkerIterator = iter(loader)  # of all epochs, as the workers are
    first = indices(epochs(iterator))
    ahead = iterator.next_epoch
    assert ahead is not None
    assert len(ahead.indices) == 4
    sent = list(ahead.indices)
    second = indices(epochs(loader))
    assert second[:4] == sent
    assert iterator.generation == 1
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(12))


def test_a_wrong_guess_of_the_next_epoch_changes_no_value() -> None:
    def three_epochs(kind: Any) -> list[Any]:
        torch.manual_seed(8)
        across = ACROSS if kind is DataLoader else {"persistent_workers": True}
        loader = kind(Drawn(), 2, shuffle=True, num_workers=2, **across)
        seen = []
        for _ in range(3):
            seen += epochs(loader)
            torch.rand(1)  # as training code does: now the shuffle's seed is another one
        return seen

    assert three_epochs(DataLoader) == three_epochs(TorchDataLoader)


def test_a_distributed_sampler_s_next_epoch_is_guessed_from_its_steps() -> None:
    data = Squares(16)
    sampler = DistributedSampler(data, 2, 0)
    loader = DataLoader(data, 2, sampler=sampler, num_workers=2, **ACROSS)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        iterator: WorkerIterator = iter(loader)
        seen = indices(epochs(iterator))
        assert list(itertools.chain(*seen)) == list(sampler)
    assert iterator.generation == 2 + 1 + 1  # the first guess was that nothing changes


def test_an_idle_worker_goes_on_while_the_consumer_waits_for_another(tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    loader = DataLoader(Gated(str(gate), opens_at=9), 1, num_workers=2, prefetch_factor=2)
    assert [batch.item() for batch in loader] == list(range(14))


class Gated(Dataset[Any]):
    """Sample 0 is there once sample `opens_at` was fetched."""

    def __init__(self, path: str, opens_at: int) -> None:
        import os

        self.path, self.opens_at = path, opens_at
        os.mkfifo(path)

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> int:
        if index == self.opens_at:
            with open(self.path, "w") as file:
                file.write("x")
        if index == 0:
            with open(self.path) as file:
                file.read(1)
        return index


@pytest.mark.parametrize("kind", [np.int32, np.uint8, torch.tensor])
@pytest.mark.parametrize("workers", ["process", "thread"])
def test_the_number_of_workers_may_be_any_integer(kind: Any, workers: Any) -> None:
    loader = DataLoader(range(4), num_workers=kind(1), workers=workers)
    assert epochs(loader) == [[0], [1], [2], [3]]
    assert json.dumps(loader.state_dict())


def test_settings_are_attributes_as_in_torch() -> None:
    data = Squares(4)
    loader = DataLoader(data, 2, num_workers=2, persistent_workers=True)
    torchs = TorchDataLoader(data, 2, num_workers=2, persistent_workers=True)
    assert isinstance(loader, TorchDataLoader)
    for name, value in vars(torchs).items():
        if not name.startswith("_") and name not in ("sampler", "batch_sampler"):
            assert getattr(loader, name) == value, name
    with pytest.raises(ValueError, match="should not be set after DataLoader is initialized"):
        loader.batch_size = 3


def test_objects_of_any_class_come_back_as_they_were() -> None:
    loader = DataLoader(Objects(), None, num_workers=1)
    assert [type(item) for item in loader] == [Thing, Thing]
    assert [item.tensor.tolist() for item in loader] == [[0, 0], [1, 1]]


class Thing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Objects(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Thing:
        return Thing(torch.full((2,), index))


class Point:
    """A type that only `default_collate` with our entry knows."""

    def __init__(self, x: float) -> None:
        self.x = x


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Point]:
        return {"point": Point(index)}


def test_types_registered_with_default_collate_are_known_to_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def collate_points(batch: list[Point], *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.tensor([point.x for point in batch])

    monkeypatch.setitem(default_collate_fn_map, Point, collate_points)
    loader = DataLoader(Points(), 3, num_workers=2)
    assert [batch["point"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_kept_batches_keep_their_content() -> None:
    loader = DataLoader(Large(), 4, num_workers=2)
    kept = list(loader)
    del loader
    for number, batch in enumerate(kept):
        assert batch.unique().tolist() == list(range(4 * number, 4 * number + 4))


class Large(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100, 100), index)


class DrawnIterable(IterableDataset[Any]):
    """Draws, and counts the epochs in its own copy."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        info = get_worker_info()
        for number in range(3 + 4 * (info.id if info else 0)):
            yield [number, self.epoch, random.random(), float(torch.rand(()))]


class Unwilling(UserDict[str, int]):
    """A mapping that gives no list of its values."""

    def values(self) -> Any:
        raise RuntimeError("one by one")


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "workers": "thread"}], ids=str
)
def test_batches_come_whose_bytes_nobody_tells(options: Any) -> None:
    items = [torch.eye(2).to_sparse(), Unwilling(a=1)]
    loader: Any = DataLoader(items, batch_size=None, timeout=30, **options)
    sparse, mapping = loader
    assert (sparse.layout, sparse.to_dense().tolist(), mapping["a"]) == (
        torch.sparse_coo,
        [[1, 0], [0, 1]],
        1,
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_where_asked_to_those_of_iterables_begin_the_next_epoch_too(workers: int) -> None:
    def loader(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        across = ACROSS if kind is DataLoader else {"persistent_workers": True}
        return kind(DrawnIterable(), 2, num_workers=workers, generator=generator, **across)

    ours = loader(DataLoader)
    iterator: WorkerIterator = iter(ours)
    assert epochs(iterator) + epochs(ours, 3) == epochs(loader(TorchDataLoader), 4)
    ahead = iterator.next_epoch
    assert ahead is not None
    assert len(ahead.tasks) == 2 * workers


def test_every_draw_from_a_global_generator_is_noticed() -> None:
    ways = [random.random, np.random.rand, torch.seed, np.random.randn, np.random.randn, np.random.randn]
    for by_address in (True, False):
        draws = Draws(by_address=by_address)
        assert draws.since() is None
        for draw in [*ways, lambda: torch.rand(()), lambda: random.gauss(0, 1), lambda: random.gauss(0, 1)]:
            draw()
            assert draws.since() is not None, draw
            assert draws.since() is None
