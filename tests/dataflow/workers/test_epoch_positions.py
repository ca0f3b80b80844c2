"""Which epoch comes, and what of it: states at an epoch's end, `set_epoch`, loops that are left early."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import make_ints_tar
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchDataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

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


class Telling(Stepping):
    """Tells where it is, and does not go there."""

    load_state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_tells_a_state_and_takes_none_is_passed_over(workers: int) -> None:
    with DataLoader(Telling(), None, num_workers=workers) as loader:
        whole = list(loader)
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(Telling(), None, num_workers=workers) as resumed:
        resumed.load_state_dict(state)
        assert list(resumed) == whole[1:]


def test_states_count_epochs_and_those_of_before_are_refused() -> None:
    loader, _ = make_map()
    states = [json.loads(state) for state in epochs_of(make_map, [0, 1])[1]]
    assert [state["epoch"] for state in states] == [0] * 8 + [1] * 8
    old = checked_fields(states[3])
    del old["epoch"]
    with pytest.raises(ValueError, match="version 5"):
        loader.load_state_dict(with_checksum({**old, "version": 2}))


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


@pytest.mark.one_in(2)
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


# ---- samplers at every position -----------------------------------------------------------------------

ITEMS = 6


class Drawing(torch.utils.data.Sampler[int]):
    """Draws all indices in `iter`, or each one when it is asked for."""

    def __init__(self, generator: Any, *, at_once: bool = True) -> None:
        self.whatever_name, self._at_once = generator, at_once

    def _indices(self, count: int) -> list[int]:
        generator = self.whatever_name
        if isinstance(generator, torch.Generator):
            return torch.randint(ITEMS, (count,), generator=generator).tolist()
        if isinstance(generator, random.Random):
            return generator.choices(range(ITEMS), k=count)
        if isinstance(generator, np.random.Generator):
            return generator.integers(ITEMS, size=count).tolist()
        return [int(index) for index in generator(count)]

    def __iter__(self) -> Iterator[int]:
        if self._at_once:
            return iter(self._indices(ITEMS))
        return (self._indices(1)[0] for _ in range(ITEMS))

    def __len__(self) -> int:
        return ITEMS


class DrawingBatches(Drawing):
    """The same in batches of three."""

    def __iter__(self) -> Iterator[Any]:
        if self._at_once:
            return iter([self._indices(3) for _ in range(3)])
        return (self._indices(3) for _ in range(3))

    def __len__(self) -> int:
        return 3


class MixedBatches(BatchSampler):
    """Those of another sampler in a random order."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        generator: Any = getattr(self.sampler, "generator", None)
        return iter([batches[at] for at in torch.randperm(len(batches), generator=generator)])


class Stateful(Drawing):
    """Tells where it is; after its last index that is the beginning of the next epoch, or the end of this."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__(random.Random(4))
        self._ends, self._at, self._order = ends, 0, None

    def __iter__(self) -> Iterator[int]:
        self._order = self._order or self._indices(ITEMS)
        while self._at < ITEMS:
            self._at += 1
            yield self._order[self._at - 1]
            if self._at == ITEMS and not self._ends:
                self._at, self._order = 0, None
                return
        self._at, self._order = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.whatever_name.getstate(), "at": self._at, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.whatever_name.setstate(state["random"])
        self._at, self._order = state["at"], state["order"]


def single(sampler: Any, **options: Any) -> dict[str, Any]:
    return {"sampler": sampler, "batch_size": 3, **options}


def of_batches(sampler: Any, **options: Any) -> dict[str, Any]:
    return {"batch_sampler": sampler, **options}


def shared(make: Callable[[torch.Generator], dict[str, Any]]) -> dict[str, Any]:
    """The loader's own generator is the sampler's, too."""
    generator = seeded()
    return {**make(generator), "generator": generator}


def weights() -> list[float]:
    return [1.0 + number for number in range(ITEMS)]


def globally(count: int) -> Any:
    return torch.randint(ITEMS, (count,))


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: single(RandomSampler(range(ITEMS))),
    "random, own generator": lambda: single(RandomSampler(range(ITEMS), generator=seeded())),
    "replacement": lambda: single(RandomSampler(range(ITEMS), True, 40), batch_size=15),
    "replacement, own": lambda: single(
        RandomSampler(range(ITEMS), True, 40, generator=seeded()), batch_size=15
    ),
    "several rounds, own": lambda: single(
        RandomSampler(range(ITEMS), False, 14, generator=seeded()), batch_size=4
    ),
    "weighted": lambda: single(WeightedRandomSampler(weights(), ITEMS)),
    "weighted, own": lambda: single(WeightedRandomSampler(weights(), ITEMS, generator=seeded())),
    "subset": lambda: single(SubsetRandomSampler(range(ITEMS))),
    "subset, own": lambda: single(SubsetRandomSampler(range(ITEMS), generator=seeded())),
    "in order": lambda: {"batch_size": 3},
    "a list": lambda: single([3, 1, 2, 2, 9, 8]),
    "batches of random": lambda: of_batches(
        BatchSampler(RandomSampler(range(ITEMS), generator=seeded()), 3, False)
    ),
    "batches of weighted": lambda: of_batches(
        BatchSampler(WeightedRandomSampler(weights(), ITEMS, generator=seeded()), 4, True)
    ),
    "distributed": lambda: single(DistributedSampler(range(2 * ITEMS), 2, 1, seed=3)),
    "drawn by iter": lambda: single(Drawing(seeded())),
    "drawn by iter, shared": lambda: shared(lambda generator: single(Drawing(generator))),
    "drawn by iter, no batches": lambda: {"sampler": Drawing(seeded()), "batch_size": None},
    "drawn one by one": lambda: single(Drawing(seeded(), at_once=False)),
    "drawn one by one, shared": lambda: shared(lambda one: single(Drawing(one, at_once=False))),
    "batches drawn by iter": lambda: of_batches(DrawingBatches(seeded())),
    "batches drawn by iter, shared": lambda: shared(lambda one: of_batches(DrawingBatches(one))),
    "batches drawn one by one": lambda: of_batches(DrawingBatches(seeded(), at_once=False)),
    "batches mixed": lambda: of_batches(
        MixedBatches(RandomSampler(range(ITEMS), generator=seeded()), 3, False)
    ),
    "batches mixed globally": lambda: of_batches(MixedBatches(RandomSampler(range(ITEMS)), 3, False)),
    "numpy's generator": lambda: of_batches(DrawingBatches(np.random.default_rng(3))),
    "random's, one by one": lambda: single(Drawing(random.Random(3), at_once=False)),
    "the global one": lambda: of_batches(DrawingBatches(globally)),
    "with a state": lambda: single(Stateful(ends=False)),
    "with a state that ends": lambda: single(Stateful(ends=True)),
}


def loops(kind: Any, options: dict[str, Any], first: int = 0, state: str | None = None, **more: Any) -> Any:
    """The batches of two epochs from `first` on, and the states: before, after each batch, and behind."""
    loader = kind(range(2 * ITEMS), **options, **more)
    if state is not None:
        loader.load_state_dict(json.loads(state))
    seen: list[list[Any]] = []
    states: list[list[str]] = []
    for epoch in range(first, 2):
        if isinstance(options.get("sampler"), DistributedSampler):
            options["sampler"].set_epoch(epoch)
        state_now = getattr(loader, "state_dict", dict)
        seen.append([])
        states.append([json.dumps(state_now())])
        for batch in loader:
            seen[-1].append(torch.as_tensor(batch).tolist())
            states[-1].append(json.dumps(state_now()))
        states[-1].append(json.dumps(state_now()))
    return seen, states


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore:this loop had no batch")
@pytest.mark.parametrize("workers", [{}, THREADS], ids=["no workers", "threads"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_goes_on_at_every_position_as_torchs_loader_without_a_break(
    name: str, workers: Any
) -> None:
    make, num_workers = SAMPLERS[name], {"num_workers": workers.get("num_workers", 0)}
    torch.manual_seed(1)
    expected, _ = loops(TorchDataLoader, make(), **num_workers)
    torch.manual_seed(1)
    seen, states = loops(DataLoader, make(), **workers)
    assert seen == expected
    for epoch, of_epoch in enumerate(states):
        for at, state in enumerate(of_epoch):
            torch.manual_seed(9)  # another process, where everything is made anew
            is_behind = at > len(expected[epoch])
            rest, _ = loops(DataLoader, make(), epoch + is_behind, state, **workers)
            left = [expected[epoch][at:]] * (not is_behind) + expected[epoch + 1 :]
            assert rest == left, (epoch, at)


def test_persistent_workers_begin_a_sampler_once_after_a_state_between_two_epochs() -> None:
    for make in (SAMPLERS["batches drawn by iter"], SAMPLERS["batches drawn by iter, shared"]):
        more = {**THREADS, "persistent_workers": True}
        seen, states = loops(DataLoader, make(), **more)
        assert loops(DataLoader, make(), 1, states[0][-1], **more)[0] == seen[1:]


def hidden() -> dict[str, Any]:
    """Draws from a generator that no attribute holds."""
    generator = seeded()
    return of_batches(DrawingBatches(lambda count: torch.randint(ITEMS, (count,), generator=generator)))


class FirstWaits:
    """Item 4, which only the first batch has, comes when it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __len__(self) -> int:
        return 2 * ITEMS

    def __getitem__(self, index: int) -> int:
        assert index != 4 or self.go_on.wait(60)
        return index


def test_an_order_that_cannot_be_drawn_again_is_warned_of_where_a_later_batch_came_first() -> None:
    options, dataset = {**hidden(), **THREADS, "in_order": False}, FirstWaits()
    loader = DataLoader(dataset, **options)
    batches = iter(loader)
    assert next(batches).tolist() == [5, 2, 0]
    state = loader.state_dict()
    dataset.go_on.set()
    assert sorted(batch.tolist() for batch in batches) == [[0, 3, 0], [4, 1, 0]]
    with pytest.warns(UserWarning, match="another order than the one that this state"):
        loops(DataLoader, hidden(), 0, json.dumps(state), **THREADS, in_order=False)


class Counting(Sampler[int]):
    """Tells how far it is; begins with the item that waits."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        while self.at < 4:
            self.at += 1
            yield 4 + self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_sampler_with_a_state_loses_no_batch_that_a_later_one_has_overtaken() -> None:
    dataset, options = FirstWaits(), {"batch_size": 1, **THREADS, "in_order": False}
    loader = DataLoader(dataset, sampler=Counting(), **options)
    batches = iter(loader)
    assert next(batches).tolist() == [5]
    state = json.loads(json.dumps(loader.state_dict()))
    dataset.go_on.set()
    assert sorted(batch.item() for batch in batches) == [4, 6, 7]
    resumed = DataLoader(dataset, sampler=Counting(), **options)
    resumed.load_state_dict(state)
    assert sorted(batch.item() for batch in resumed) == [4, 6, 7]


@pytest.mark.parametrize("workers", [{}, THREADS, {**THREADS, "in_order": False}])
def test_an_order_that_cannot_be_drawn_again_is_warned_of_once(workers: Any) -> None:
    _, states = loops(DataLoader, hidden(), **workers)
    for state in states[0][1:3]:
        with pytest.warns(UserWarning, match="another order than the one that this state") as caught:
            rest, _ = loops(DataLoader, hidden(), 0, state, **workers)
        assert len(rest[0]) < 3
        assert len(caught) == 1


class Shrinking(Drawing):
    """Has fewer indices each time that it is begun."""

    def __init__(self) -> None:
        self._left = ITEMS

    def __iter__(self) -> Iterator[int]:
        self._left -= 2
        return iter(range(self._left))


def test_a_sampler_that_ends_before_the_place_of_a_state_is_warned_of() -> None:
    options = single(Shrinking())
    _, states = loops(DataLoader, options)
    options["sampler"]._left = 2
    with pytest.warns(UserWarning, match="another order than the one that this state"):
        list(resumed(options, states[0][2]))


def resumed(options: dict[str, Any], state: str) -> DataLoader:
    loader = DataLoader(range(2 * ITEMS), **options)
    loader.load_state_dict(json.loads(state))
    return loader


def test_who_seeds_a_generator_for_each_epoch_does_so_after_a_resume_too() -> None:
    def epochs(first: int, state: str | None = None) -> Any:
        options = shared(lambda generator: of_batches(DrawingBatches(generator)))
        loader = DataLoader(range(2 * ITEMS), **options) if state is None else resumed(options, state)
        for epoch in range(first, 3):
            options["generator"].manual_seed(epoch)
            yield [batch.tolist() for batch in loader], json.dumps(loader.state_dict())

    whole = list(epochs(0))
    rest = list(epochs(2, whole[1][1]))
    assert [batches for batches, _ in rest] == [whole[2][0]]


def test_a_dataset_that_draws_from_the_samplers_generator_goes_on_as_it_would_have() -> None:
    def make() -> Any:
        generator = seeded()
        data = Noisy(generator)
        return DataLoader(data, 3, sampler=Drawing(generator))

    def drawn(loader: Any) -> list[Any]:
        return [batch.tolist() for batch in loader]

    first = make()
    iterator = iter(first)
    next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    expected = [*drawn(iterator), *drawn(first)]
    again = make()
    again.load_state_dict(state)
    assert [*drawn(again), *drawn(again)] == expected


class Noisy(torch.utils.data.Dataset[int]):
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getitem__(self, index: int) -> int:
        return 1000 * index + int(torch.randint(1000, (1,), generator=self._generator))


# ---- two loaders in a cycle -----------------------------------------------------------------------------


def cycled(loaders: list[Any], steps: int, *, begun: int = 0, named: int | None = None) -> list[Any]:
    """As Lightning's `max_size_cycle`: epochs are named, and the shorter loader begins again by itself."""
    got, epoch = [], named or 0
    for loader in loaders:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
    loops = [iter(loader) for loader in loaders]
    while len(got) < steps:
        if begun == 8:
            return got + cycled(loaders, steps - len(got), named=epoch + 1)
        row = []
        for number, loader in enumerate(loaders):
            if (batch := next(loops[number], None)) is None:
                loops[number] = iter(loader)
                batch = next(loops[number])
            row.append(str(batch))
        got.append(row)
        begun += 1
    return got


PAIRS: dict[str, Callable[[Any], list[Any]]] = {
    "map": lambda _: [DataLoader(range(n), 4, shuffle=True) for n in (32, 12)],
    "map with workers": lambda _: [
        DataLoader(range(n), 4, shuffle=True, num_workers=1, workers="thread") for n in (32, 12)
    ],
    "shards": lambda ints: [
        DataLoader(ints.open().take(n), 4, shuffle=True, seed=2, num_workers=0) for n in (32, 12)
    ],
    "both": lambda ints: [
        DataLoader(range(32), 4, shuffle=True),
        DataLoader(ints.open().take(12), 4, shuffle=True, num_workers=0),
    ],
}


@pytest.mark.parametrize("kind", PAIRS)
def test_two_loaders_in_a_cycle_go_on_as_without_a_break(kind: str, tmp_path: Path) -> None:
    """In later epochs, too: they draw from one generator by turns, and one ran ahead of the epoch named."""
    ints = make_ints_tar(tmp_path)
    torch.manual_seed(0)
    whole = cycled(PAIRS[kind](ints), 24)
    for cut in (1, 4, 7, 13):
        torch.manual_seed(0)
        first = PAIRS[kind](ints)
        assert cycled(first, cut) == whole[:cut]
        states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
        torch.manual_seed(99)  # another process
        again = PAIRS[kind](ints)
        for loader, state in zip(again, states, strict=True):
            loader.load_state_dict(state)
        got = cycled(again, 24 - cut, begun=cut % 8, named=cut // 8)
        assert got == whole[cut:], f"differs when resumed after {cut}"


def test_a_state_that_is_loaded_twice_goes_on_twice() -> None:
    """Its loaders share no generator, nor do two states of one loader."""
    torch.manual_seed(0)
    first = DataLoader(range(12), 4, shuffle=True)
    states = [first.state_dict() for _ in first]
    expected = [str(batch) for batch in first]
    loaders = [DataLoader(range(12), 4, shuffle=True) for _ in range(3)]
    for loader, state in zip(loaders, (states[0], states[0], states[1]), strict=True):
        loader.load_state_dict(state)
    for loader in loaders:
        list(loader)
    assert [[str(batch) for batch in loader] for loader in loaders] == [expected] * 3
