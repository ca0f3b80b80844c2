"""States that were damaged, edited or taken elsewhere: a `ValueError`, never other samples without a word."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets_kit import Made, rows_of
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from dataflow import DataLoader, Shuffle
from dataflow.state_checksum import with_checksum
from dataflow.workers.state import decoded

MUTATIONS = 150
STRANGE = [None, True, False, 0, 1, -1, 2**70, 0.5, float("nan"), "", "x", [], [0], {}, {"kind": "full"}]


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


class Endless(IterableDataset[int]):
    """Numbers from 0 on, and its own word about where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def taken(loader: DataLoader, batches: int = 2) -> dict[str, Any]:
    """The state after some batches, through JSON."""
    iterator = iter(loader)
    for _ in itertools.islice(iterator, batches):
        pass
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def shuffled() -> DataLoader:
    return DataLoader(numbers(40), 4, shuffle=True)


def with_generator() -> DataLoader:
    return DataLoader(numbers(40), 4, shuffle=True, generator=torch.Generator().manual_seed(1))


def distributed() -> DataLoader:
    data = numbers(40)
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1))


def endless() -> DataLoader:
    return DataLoader(Endless(), 4)


MAKERS = [shuffled, with_generator, distributed, endless]


# ---- what is no state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, [], {}, "", 0, {"version": 2}], ids=repr)
def test_nothing_is_no_state(ints: Made, nothing: Any) -> None:
    """A run that lost its state must not start over without a word."""
    for loader in (DataLoader(numbers(40), 4), DataLoader(Endless(), 4), DataLoader(ints.open(), 4)):
        with loader, pytest.raises(ValueError, match=r"not a state.*to begin anew, load no state"):
            loader.load_state_dict(nothing)


# ---- states of other loaders ----------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[], DataLoader], str]] = {
    "fewer samples": (lambda: DataLoader(numbers(14), 4, shuffle=True), "length=40.*length=14"),
    "more samples": (lambda: DataLoader(numbers(400), 4, shuffle=True), "length=40.*length=400"),
    "another batch size": (
        lambda: DataLoader(numbers(40), 5, shuffle=True),
        "batch_size=4.*batch_size=5",
    ),
    "no batches": (lambda: DataLoader(numbers(40), None, shuffle=True), "batch_size=4.*batch_size=None"),
    "in order": (lambda: DataLoader(numbers(40), 4), "of RandomSampler.*of SequentialSampler"),
    "a subset": (
        lambda: DataLoader(numbers(40), 4, sampler=SubsetRandomSampler(range(40))),
        "of RandomSampler.*of SubsetRandomSampler",
    ),
    "another number of draws": (
        lambda: DataLoader(numbers(40), 4, sampler=RandomSampler(numbers(40), num_samples=39)),
        "sampler_length=40.*sampler_length=39",
    ),
    "a dataset of another kind": (lambda: DataLoader(Endless(), 4), "kind='map'.*kind='iterable'"),
    "a batch sampler": (
        lambda: DataLoader(numbers(40), batch_sampler=BatchSampler(SequentialSampler(range(40)), 4, True)),
        "of RandomSampler.*of SequentialSampler",
    ),
    "batches of a list": (
        lambda: DataLoader(numbers(40), batch_sampler=[[1, 2], [3]]),
        "batch_size=4.*batch_size=None",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_is_refused_where_its_place_means_other_samples(other: str) -> None:
    make, message = OTHERS[other]
    loader = make()
    with pytest.raises(ValueError, match=rf"{message}.*means other samples.*give .*begin anew, without the"):
        loader.load_state_dict(taken(shuffled()))


@pytest.mark.parametrize("other", [name for name in OTHERS if name != "a dataset of another kind"])
def test_between_two_epochs_a_state_is_one_for_any_length_batches_and_sampler(other: str) -> None:
    """Seeds go on where they were: the next epoch is the one that this loader draws from them."""
    first, (make, _) = shuffled(), OTHERS[other]
    list(first)
    state = json.loads(json.dumps(first.state_dict()))
    torch.manual_seed(0)  # a new process
    loader, again = make(), make()
    loader.load_state_dict(state)
    torch.manual_seed(1)
    handed_on = loader.state_dict()
    got = [list(loader) for _ in range(2)]
    again.load_state_dict(handed_on)
    torch.manual_seed(2)
    assert str([list(again) for _ in range(2)]) == str(got)
    assert loader.state_dict()["epoch"] == state["epoch"] + 2
    torch.set_rng_state(decoded(state["chain"]))  # as a loader that is told nothing, from there on
    assert str([list(make()) for _ in range(2)]) == str(got)


def test_between_two_epochs_generators_of_a_sampler_go_on_over_more_data() -> None:
    first = with_generator()
    list(first)
    state = first.state_dict()
    generator = torch.Generator()
    grown = DataLoader(numbers(60), 4, shuffle=True, generator=generator)
    grown.load_state_dict(state)
    got = [batch[0].tolist() for batch in grown]
    generator.set_state(decoded(state["generator"]))
    fresh = DataLoader(numbers(60), 4, shuffle=True, generator=generator)
    assert [batch[0].tolist() for batch in fresh] == got
    other = DataLoader(numbers(60), 4, sampler=Drawing())
    other.load_state_dict(state)  # the state of another kind of generator says nothing to this one
    drawn = [batch[0].tolist() for batch in DataLoader(numbers(60), 4, sampler=Drawing())]
    assert [batch[0].tolist() for batch in other] == drawn


class Drawing:
    """A sampler with a generator of numpy."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(60).tolist())


def test_an_iterable_goes_on_with_another_batch_size_between_two_epochs() -> None:
    class Ten(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    first = DataLoader(Ten(), 4)
    list(first)
    between, inside = first.state_dict(), taken(DataLoader(Ten(), 4), 1)
    other = DataLoader(Ten(), 5)
    other.load_state_dict(between)
    assert [batch.tolist() for batch in other] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(ValueError, match=r"batch_size=4, .* batch_size=5.*give batch_size=4"):
        other.load_state_dict(inside)


def test_a_batch_sampler_given_or_made_is_the_same() -> None:
    loader = DataLoader(numbers(40), batch_sampler=BatchSampler(RandomSampler(numbers(40)), 4, False))
    state = taken(first := shuffled())
    rest = [batch[0].tolist() for batch in itertools.islice(resumed(first, state), 100)]
    loader.load_state_dict(state)
    assert [batch[0].tolist() for batch in loader] == rest


def resumed(loader: DataLoader, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return iter(loader)


def test_the_number_of_ranks_matters_inside_an_epoch_only() -> None:
    data = numbers(40)
    inside = taken(distributed())
    here = distributed()
    assert len(list(here)) == 5
    between = here.state_dict()
    other = DataLoader(data, 4, sampler=DistributedSampler(data, 4, 1))
    with pytest.raises(ValueError, match=r"sampler_length=20.*sampler_length=10"):
        other.load_state_dict(inside)
    other.load_state_dict(between)
    assert len(list(other)) == 3


def test_a_state_that_is_refused_changes_nothing() -> None:
    elsewhere = taken(DataLoader(numbers(14), 4, shuffle=True))
    loader = shuffled()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for wrong in ({**state, "batches": 2}, elsewhere, None):
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
        assert loader.state_dict() == state
    assert len(list(iterator)) == 9


# ---- damaged states -------------------------------------------------------------------------------------


def places(value: Any) -> list[tuple[Any, ...]]:
    """The paths to everything inside a JSON value, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in [(key,), *((key, *rest) for rest in places(item))]]


def inside(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(value: Any, rng: random.Random) -> Any:
    """Something near a value, or something strange."""
    near: list[Any] = [rng.choice(STRANGE)]
    if isinstance(value, bool):
        near += [not value, int(value)]
    elif isinstance(value, int):
        near += [value + 1, value - 1, -value, 2 * value, float(value), str(value)]
    elif isinstance(value, str) and value:
        at = rng.randrange(len(value))
        near += [value[:at], value[:at] + rng.choice("0Aa/") + value[at + 1 :], value[::-1]]
    elif isinstance(value, list):
        near += [[*value, 1], value[1:], value[::-1], tuple(value)]
    elif isinstance(value, dict):
        near += [{**value, "more": 1}, [value]]
    return rng.choice(near)


def mutated(state: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """A state with one thing changed, and where."""
    out = copy.deepcopy(state)
    path = rng.choice(places(state))
    there = inside(out, path[:-1])
    if rng.random() < 0.2:
        del there[path[-1]]
    else:
        there[path[-1]] = changed(there[path[-1]], rng)
    return out, path


def mutants(state: dict[str, Any], seed: int) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """States that differ from this one as JSON texts do."""
    rng, text = random.Random(seed), json.dumps(state)
    return (pair for pair in (mutated(state, rng) for _ in range(MUTATIONS)) if json.dumps(pair[0]) != text)


def is_refused(loader: DataLoader, state: dict[str, Any]) -> bool:
    try:
        loader.load_state_dict(state)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("make", MAKERS)
def test_every_mutated_state_is_refused(make: Callable[[], DataLoader]) -> None:
    loader = make()
    found = [path for state, path in mutants(taken(make()), seed=1) if not is_refused(loader, state)]
    assert found == []


def test_every_mutated_state_over_shards_is_refused(ints: Made) -> None:
    with DataLoader(ints.open(), 4, Shuffle("window", 2)) as loader:
        found = [path for state, path in mutants(taken(loader), seed=2) if not is_refused(loader, state)]
    assert found == []


def without_checksum(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "checksum"}


@pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning")
def test_an_edited_state_with_the_right_checksum_is_refused_or_means_what_it_says() -> None:
    """Over a map-style dataset: the order follows from the seed, and what was handed out is left out."""
    accepted = 0
    for fields, path in mutants(without_checksum(taken(shuffled())), seed=3):
        loader = shuffled()
        try:
            loader.load_state_dict(with_checksum(fields))
        except ValueError:
            continue
        accepted += 1
        found = [batch[0].tolist() for batch in loader]
        if fields["complete"]:
            assert sorted(itertools.chain(*found)) == list(range(40)), path
            continue
        generator = torch.Generator().manual_seed(decoded(fields["sampler"])["seed"])
        order = list(BatchSampler(RandomSampler(range(40), generator=generator), 4, False))
        given = {*range(fields["batches"]), *fields["ahead"]}
        assert found == [batch for number, batch in enumerate(order) if number not in given], path
    assert accepted > MUTATIONS / 20


def test_an_edited_state_over_shards_with_the_right_checksum_is_refused_or_means_what_it_says(
    ints: Made,
) -> None:
    """The position in an order that follows from seed, epoch and shuffle; batches are cut from there on."""
    accepted = 0
    with DataLoader(ints.open(), 4, Shuffle("window", 2)) as loader, DataLoader(ints.open(), 1) as oracle:
        fields = without_checksum(taken(loader))
        for other, path in mutants(fields, seed=4):
            try:
                loader.load_state_dict(with_checksum(other))
            except ValueError:
                continue
            accepted += 1
            oracle.load_state_dict(with_checksum({**other, "position": 0}))
            order = [rows_of(batch)[0]["cls"] for batch in oracle]
            assert sorted(order) == list(range(len(ints.samples))), path
            left = order[other["position"] :]
            expected = [sorted(left[at : at + 4]) for at in range(0, len(left), 4)]
            assert [sorted(row["cls"] for row in rows_of(batch)) for batch in loader] == expected, path
            same = ("version", "num_samples", "fingerprint")
            assert [other[name] for name in same] == [fields[name] for name in same]
    assert accepted > MUTATIONS / 20
