"""Which epoch comes, and what of it: states at an epoch's end, `set_epoch`, loops that are left early."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets_kit import make_ints_tar
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, DistributedSampler, RandomSampler

from dataflow import DataLoader
from dataflow.state_checksum import checked_fields, with_checksum

THREADS = {"num_workers": 2, "workers": "thread"}
PROCESSES = {"num_workers": 2, "persistent_workers": True}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Eager(torch.utils.data.Sampler[list[int]]):
    """Batches in another order each time, drawn when `iter` is called, from a generator that it shares."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(64, generator=self.generator).view(-1, 8).tolist())

    def __len__(self) -> int:
        return 8


def make_map(**options: Any) -> Any:
    if options.get("sampler") == "distributed":
        options["sampler"] = DistributedSampler(range(64), 1, 0, seed=3)
    elif options.get("sampler") == "replacement":
        options["sampler"] = RandomSampler(range(64), replacement=True, generator=seeded())
    elif options.get("batch_sampler") == "distributed":
        options["batch_sampler"] = BatchSampler(DistributedSampler(range(64), 1, 0, seed=3), 8, False)
    elif options.get("batch_sampler"):
        options["batch_sampler"] = BatchSampler(RandomSampler(range(64), generator=seeded()), 8, False)
    else:
        options |= {"shuffle": True, "generator": seeded()}
    loader = DataLoader(range(64), 1 if "batch_sampler" in options else 8, **options)
    return loader, loader.set_epoch


def make_by_its_sampler(**options: Any) -> Any:
    loader, _ = make_map(sampler="distributed", **options)
    return loader, loader.sampler.set_epoch


def make_of_shards(ints: Any) -> Any:
    loader = DataLoader(ints.open(), 8, shuffle=True, num_workers=0)
    return loader, loader.set_epoch


KINDS: dict[str, Callable[[], Any]] = {
    "map-style": make_map,
    "map-style, threads": lambda: make_map(**THREADS),
    "map-style, processes": lambda: make_map(**PROCESSES),
    "a sampler of its own generator": lambda: make_map(sampler="replacement"),
    "a batch sampler": lambda: make_map(batch_sampler=True, **THREADS),
    "a batch sampler of a distributed one": lambda: make_map(batch_sampler="distributed"),
    "a distributed sampler": lambda: make_map(sampler="distributed"),
    "the sampler's own set_epoch": lambda: make_by_its_sampler(**THREADS),
}


def listed(batch: Any) -> list[int]:
    return sorted((batch["cls"] if isinstance(batch, dict) else batch).tolist())


def epochs_of(make: Callable[[], Any], numbers: Any, state: str | None = None, stop: int = 99) -> Any:
    """The batches of epochs that are named, and the state after each batch."""
    (loader, set_epoch), seen, states = make(), [], []
    with loader:
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for number in numbers:
            set_epoch(number)
            seen.append([])
            for batch in itertools.islice(loader, stop):
                seen[-1].append(listed(batch))
                states.append(json.dumps(loader.state_dict()))
    return seen, states


@pytest.fixture(params=[*KINDS, "shards"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    ints = make_ints_tar(tmp_path) if request.param == "shards" else None
    return KINDS.get(request.param, lambda: make_of_shards(ints))


# ---- states at the end of an epoch --------------------------------------------------------------------


def test_an_epoch_that_is_named_is_whole_after_a_state_of_the_last_batch_before(
    make: Callable[[], Any],
) -> None:
    whole, states = epochs_of(make, range(3))
    assert whole[0] != whole[1] != whole[2], "each epoch has an order of its own"
    last = states[len(whole[0]) - 1]
    assert epochs_of(make, [1, 2], last)[0] == whole[1:]


def test_a_state_inside_the_epoch_that_is_named_goes_on_there(make: Callable[[], Any]) -> None:
    whole, states = epochs_of(make, range(2))
    inside = states[len(whole[0]) + 1]
    assert epochs_of(make, [1], inside)[0] == [whole[1][2:]]


def test_another_epoch_than_that_of_a_state_is_begun_from_its_beginning(make: Callable[[], Any]) -> None:
    whole, states = epochs_of(make, range(2))
    assert epochs_of(make, [1], states[1])[0] == [whole[1]]


def test_a_loop_without_batches_after_such_a_state_warns_once(make: Callable[[], Any]) -> None:
    whole, states = epochs_of(make, range(2))
    loader, _ = make()
    with loader:
        loader.load_state_dict(json.loads(states[len(whole[0]) - 1]))
        with pytest.warns(UserWarning, match="after the last batch of epoch 0.*set_epoch"):
            assert list(loader) == []
        warnings.simplefilter("error")
        assert len(list(loader)) == len(whole[1])


def test_a_stateful_iterable_begins_an_epoch_that_is_named() -> None:
    def make() -> Any:
        loader = DataLoader(Stepping(), None)
        return loader, loader.set_epoch

    def plain(loader: Any) -> list[int]:
        return [int(number) for number in loader]

    loader, _ = make()
    for _ in zip(range(4), loader, strict=False):
        state = loader.state_dict()
    resumed, set_epoch = make()
    resumed.load_state_dict(state)
    set_epoch(1)
    assert plain(resumed) == [0, 1, 2, 3]


class Stepping(torch.utils.data.IterableDataset[int]):
    """Tells where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 4:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_states_count_epochs_and_those_of_before_are_refused() -> None:
    loader, _ = make_map()
    states = [json.loads(state) for state in epochs_of(make_map, [0, 1])[1]]
    assert [state["epoch"] for state in states] == [0] * 8 + [1] * 8
    old = checked_fields(states[3])
    del old["epoch"]
    with pytest.raises(ValueError, match="version 3"):
        loader.load_state_dict(with_checksum({**old, "version": 2}))


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_an_epoch_is_a_count(epoch: Any) -> None:
    with pytest.raises(ValueError, match="epoch must be an integer >= 0"):
        DataLoader(range(4)).set_epoch(epoch)


# ---- loops that are left early ------------------------------------------------------------------------


class Endless:
    """Batches without end, as Ultralytics' `InfiniteDataLoader` has them."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def two_loops_left_early(kind: Any, generator: torch.Generator, sampler: Any, **options: Any) -> Any:
    """What two loops deliver, and where they leave the generator."""
    loader = kind(range(64), batch_sampler=sampler, **options)
    seen = []
    for stop in (3, 5):
        batches = iter(loader)
        seen += [next(batches).tolist() for _ in range(stop)]
        del batches
    return seen if options.get("in_order", True) else None, generator.get_state().tolist()


def with_replacement(generator: torch.Generator) -> Any:
    return BatchSampler(RandomSampler(range(64), replacement=True, generator=generator), 2, False)


def near_its_end(generator: torch.Generator) -> Any:
    return BatchSampler(RandomSampler(range(12), generator=generator), 2, False)


@pytest.mark.parametrize(
    "sampler",
    [
        Eager,
        with_replacement,
        near_its_end,
        lambda generator: Endless(with_replacement(generator)),
        lambda generator: Endless(near_its_end(generator)),
    ],
    ids=["drawn by iter", "with replacement", "near its end", "endless", "endless, whole"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 3, "in_order": False}],
    ids=["none", "one", "any order"],
)
def test_what_follows_a_loop_that_is_left_is_drawn_as_in_torch(
    sampler: Callable[[torch.Generator], Any], options: Any
) -> None:
    threads = {**options, "workers": "thread"} if options else {}
    one, other = seeded(), seeded()
    expected = two_loops_left_early(TorchDataLoader, one, sampler(one), **options)
    assert two_loops_left_early(DataLoader, other, sampler(other), **threads) == expected


# ---- what changes between epochs ----------------------------------------------------------------------


def test_persistent_workers_see_what_is_changed_by_name_between_epochs(tmp_path: Path) -> None:
    looked_up = tmp_path / "size"
    paths = [str(looked_up)] * 16
    with DataLoader(paths, None, collate_fn=os.path.getsize, **PROCESSES) as loader:
        for epoch in range(3):
            looked_up.write_text("x" * epoch)
            assert list(loader) == [epoch] * 16


@pytest.mark.parametrize("others", [{}, {"num_workers": 1}, {**PROCESSES, "in_order": False}])
def test_only_persistent_workers_in_order_can_begin_the_next_epoch(others: Any) -> None:
    with pytest.raises(ValueError, match="needs persistent_workers=True and in_order=True"):
        DataLoader(range(4), prefetch_across_epochs=True, **others)
