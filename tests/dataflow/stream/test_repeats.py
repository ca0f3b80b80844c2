"""`mark_repeats=True`: what an epoch delivers a second time is told apart, whatever tail and batch are."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets_kit import NUM_SAMPLES, Made, Make, make_ints_tar, rank
from forked_kit import fast_ranks
from loader_kit import stream_of
from parameters_kit import in_pairs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataflow import (
    Bucketed,
    DataLoader,
    GradSchedule,
    Mixture,
    Packed,
    ShardedDataset,
    Shuffle,
    TokenBudget,
    Topology,
)

TAILS = ["drop", "pad", "even", "uneven"]
SHUFFLES = [None, Shuffle("window", 3, 1), Shuffle("window", 4, 4), Shuffle("full")]


def marked(dataset: Any, batch_size: int, place: Topology, **options: Any) -> list[tuple[int, bool]]:
    """(number, whether it is a repeat) of each sample of an epoch of a rank."""
    found: list[tuple[int, bool]] = []
    with DataLoader(dataset, batch_size, topology=place, mark_repeats=True, **options) as loader:
        for batch in loader:
            repeats = batch["__repeat__"]
            assert (repeats.dtype, repeats.shape) == (torch.bool, batch["cls"].shape)
            found += zip(batch["cls"].tolist(), repeats.tolist(), strict=True)
        return found


def of_all(world_size: int, *given: Any, **options: Any) -> list[tuple[int, bool]]:
    return list(chain(*(marked(*given, rank(r, world_size), **options) for r in range(world_size))))


# ---- samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "tail", "shuffle"), in_pairs([1, 2, 3], TAILS, SHUFFLES), ids=str)
def test_what_is_not_marked_is_the_epoch(ints: Made, world_size: int, tail: str, shuffle: Any) -> None:
    found = of_all(world_size, ints.open(), 4, shuffle=shuffle, tail=tail)
    once = Counter(number for number, repeat in found if not repeat)
    assert set(once.values()) == {1}
    left = NUM_SAMPLES % (4 * world_size)
    assert len(once) == NUM_SAMPLES - (left if tail == "drop" else 0)
    again = sum(repeat for _, repeat in found)
    assert again == {"pad": -left % (4 * world_size), "even": -left % world_size}.get(tail, 0)


def test_a_resumed_epoch_marks_what_came_before_it_was_left(ints: Made) -> None:
    with DataLoader(ints.open(), 40) as loader:
        batches = iter(loader)
        head = next(batches)["cls"].tolist()
        state = loader.state_dict()
    rest = []
    for r in range(2):
        with DataLoader(ints.open(), 4, topology=rank(r, 2), mark_repeats=True) as loader:
            loader.load_state_dict(state)
            for batch in loader:
                rest += zip(batch["cls"].tolist(), batch["__repeat__"].tolist(), strict=True)
    assert head + sorted(n for n, repeat in rest if not repeat) == list(range(NUM_SAMPLES))
    assert [n for n, repeat in rest if repeat] == [0]


def test_a_mixture_marks_its_own_repeats_only(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    sources = [make_ints_tar(tmp_path / name, size).open() for name, size in (("a", 9), ("b", 4))]
    mixture = Mixture(sources, repeats=[1, 2])
    found = of_all(2, mixture, 4, tail="pad")
    assert len(found) == 24
    assert sum(repeat for _, repeat in found) == 24 - 17


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": 2 * sample["cls"]}


def odd_only(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] % 2 == 0:
        raise ValueError("even")
    return sample


def as_column(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"cls": torch.tensor([sample["cls"] for sample in samples])}


def as_user_dict(batch: dict[str, Any]) -> UserDict[str, Any]:
    return UserDict(batch)


@pytest.mark.parametrize(
    ("of_dataset", "of_loader"),
    [
        ({"transform": double}, {}),
        ({}, {"collate_fn": as_column}),
        ({"transform": double}, {"collate_fn": as_column}),
        ({"batch_transform": dict}, {}),
        ({"batch_transform": as_user_dict}, {}),
        ({"transform": odd_only, "on_error": "skip"}, {}),
        ({"transform": odd_only, "on_error": "skip"}, {"collate_fn": as_column}),
        ({"decode": {"cls": lambda data: int(data) if int(data) % 3 else 1 // 0}, "on_error": "skip"}, {}),
    ],
)
def test_marks_come_after_what_the_user_does_with_samples_and_batches(
    tmp_path: Path, of_dataset: dict[str, Any], of_loader: dict[str, Any]
) -> None:
    """Also where a part of the batch is skipped: the mark is of the samples that are left."""
    dataset = make_ints_tar(tmp_path, 20).open(**of_dataset)
    factor = 2 if of_dataset.get("transform") is double else 1

    def numbers(batch: Any) -> list[int]:
        return [int(number) // factor for number in batch["cls"]]

    found: list[tuple[int, bool]] = []
    for r in range(2):
        options = {"topology": rank(r, 2), "tail": "pad", "mark_repeats": True, **of_loader}
        with DataLoader(dataset, 8, **options) as loader:
            for batch in loader:
                found += zip(numbers(batch), batch["__repeat__"].tolist(), strict=True)
    once = [number for number, repeat in found if not repeat]
    assert len(set(once)) == len(once)
    assert {number for number, repeat in found if repeat} <= set(range(12))
    if "on_error" not in of_dataset:
        assert sorted(once) == list(range(20))


# ---- batches by length ----------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "batching", [Packed(8, "lst"), TokenBudget(24, "lst"), Bucketed(5, "lst", boundaries=(2,))], ids=str
)
def test_rows_and_batches_by_length_are_marked_as_they_repeat(made: Make, batching: Any, tail: str) -> None:
    """Of packed rows each row, of others each sample."""
    data, packed = made("parquet"), isinstance(batching, Packed)
    options: dict[str, Any] = {"batching": batching, "tail": tail, **({"batch_size": 2} if packed else {})}
    units, again = 0, 0
    for r in range(3):
        with DataLoader(data.open(), topology=rank(r, 3), mark_repeats=True, **options) as loader:
            plan = stream_of(loader).epoch_plan(0, 0)
            batches = list(loader)
        for batch in batches:
            repeats = batch["__repeat__"]
            assert len(repeats) == len(batch["lst"].tokens if packed else batch["label"])
            if not packed:
                assert repeats.all() == repeats.any()
        flags = [bool(f) for b in batches for f in (b["__repeat__"] if packed else b["__repeat__"][:1])]
        units, again = units + len(flags), again + sum(flags)
        assert sum(flags) == plan.num_padded
    assert again == plan.num_padded_global
    assert units - again == plan.position_after(plan.num_global_batches)


# ---- what has no place for a mark -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_dataset", "of_loader", "says"),
    [
        ({}, {"collate_fn": list}, r"mark_repeats=True .* collate_fn returned a list"),
        ({"batch_transform": lambda b: (b["cls"],)}, {}, "batch_transform returned a tuple"),
        ({"transform": lambda s: s["cls"]}, {}, "the transformed samples were collated to a Tensor"),
    ],
)
def test_a_batch_that_is_no_dict_cannot_be_marked(
    ints: Made, of_dataset: dict[str, Any], of_loader: dict[str, Any], says: str
) -> None:
    dataset = ints.open(**of_dataset)
    with (
        DataLoader(dataset, 4, mark_repeats=True, **of_loader) as loader,
        pytest.raises(TypeError, match=says),
    ):
        next(iter(loader))


def test_without_the_setting_batches_have_no_mark(ints: Made) -> None:
    with DataLoader(ints.open(), 4, topology=rank(1, 3)) as loader:
        assert {name for batch in loader for name in batch} == {"cls"}


# ---- gradients ------------------------------------------------------------------------------------------


def unmarked(batch: dict[str, Any]) -> int:
    return int((~batch["__repeat__"]).sum())


def squared(model: Callable[..., Any], batch: dict[str, Any]) -> torch.Tensor:
    """The sum of the losses of what is no repeat."""
    x = batch["cls"].double()[:, None] / 7
    losses: torch.Tensor = (model(x) - x.sin()).square().sum(1)
    return (losses * ~batch["__repeat__"]).sum()


def gradients(kwargs: dict[str, Any], tail: str, shuffle: bool, accumulate: int) -> tuple[list[Any], float]:
    """Of each window of an epoch, and the samples that counted."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = DistributedDataParallel(plain) if dist.get_world_size() > 1 else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    found: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append([p.grad.flatten().tolist() for p in plain.parameters()])
    )
    options: dict[str, Any] = {"tail": tail, "mark_repeats": True, "seed": 3}
    counted = 0.0
    with (
        DataLoader(ShardedDataset(**kwargs), 4, shuffle, **options) as loader,
        GradSchedule(loader, model, optimizer, accumulate, weights={"samples": unmarked}) as sched,
    ):
        for batch in sched:
            sched.backward(squared(model, batch) * sched.scale("samples"))
            if info := sched.step():
                counted += info.totals["samples"]
    return found, counted


@pytest.mark.one_in(3)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tail", ["pad", "even", "uneven"])
def test_repeats_of_weight_zero_give_exactly_the_gradient_of_the_epoch(
    tmp_path: Path, world_size: int, tail: str
) -> None:
    ints = make_ints_tar(tmp_path, 45)
    ints.open()
    whole = {"cls": torch.arange(45), "__repeat__": torch.zeros(45, dtype=torch.bool)}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    (squared(model, whole) / 45).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    args = (ints.kwargs, tail, True, 100)
    for windows, counted in fast_ranks(gradients, world_size, args=args, timeout_s=120):
        assert counted == 45
        (found,) = windows
        gradient = torch.tensor(list(chain(*found)), dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
