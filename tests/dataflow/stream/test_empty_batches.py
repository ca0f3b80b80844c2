"""Batches of which `on_error` leaves nothing: left out, or the rank's last good one in their place."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets_kit import Made, make_ints_tar, make_parquet, rank, write_tar
from forked_kit import fast_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataflow import (
    Bucketed,
    DataflowError,
    DataLoader,
    GradSchedule,
    Mixture,
    Packed,
    ShardedDataset,
    TokenBudget,
    Topology,
)
from dataflow.stream.read_ahead import choose_read_ahead

SIZE = 24


@pytest.fixture(scope="module")
def ints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_ints_tar(tmp_path_factory.mktemp("ints"), SIZE)


def without(*bad: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A transform that refuses some samples."""

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] in bad:
            raise ValueError(f"{sample['cls']} is bad")
        return sample

    return transform


def undecodable(*bad: int) -> Callable[[bytes], int]:
    """A decoder that refuses some samples."""

    def decode(data: bytes) -> int:
        if int(data) in bad:
            raise ValueError(f"{int(data)} is bad")
        return int(data)

    return decode


HOW: dict[str, Callable[..., dict[str, Any]]] = {
    "transform": lambda *bad: {"transform": without(*bad)},
    "decode": lambda *bad: {"decode": {"cls": undecodable(*bad)}},
}


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch["cls"]]


# ---- one rank -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_one_rank_leaves_an_empty_batch_out(ints: Made, how: str, batch_size: int) -> None:
    bad = {0, 1, 2, 3, 7, 12, 13, 14, 15, 16, 17, 18, 19, 23}
    dataset = ints.open(**HOW[how](*bad), on_error="skip")
    with DataLoader(dataset, batch_size) as loader:
        found = [numbers(batch) for batch in loader]
        stats = loader.stats()
    good = [[n for n in range(at, at + batch_size) if n not in bad] for at in range(0, SIZE, batch_size)]
    assert found == [batch for batch in good if batch]
    assert (stats.batches, stats.empty_batches) == (len(found), good.count([]))
    assert (stats.samples, stats.skipped_samples) == (SIZE - len(bad), len(bad))


def test_a_state_counts_the_batches_that_were_left_out(ints: Made) -> None:
    dataset = ints.open(transform=without(*range(4, 12), 20, 21, 22, 23), on_error="skip")

    def make() -> DataLoader:
        return DataLoader(dataset, 4)

    with make() as loader:
        whole = [numbers(batch) for batch in loader]
    for cut in range(len(whole) + 1):
        with make() as loader:
            head = [numbers(batch) for batch in islice(loader, cut)]
            state = loader.state_dict()
        with make() as resumed:
            resumed.load_state_dict(state)
            assert head + [numbers(batch) for batch in resumed] == whole
            assert resumed.stats().skipped_samples == 12


def test_an_epoch_that_ends_with_empty_batches_ends(ints: Made) -> None:
    with DataLoader(ints.open(transform=without(*range(8, SIZE)), on_error="skip"), 4) as loader:
        for _ in range(2):
            assert [numbers(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.epoch == 2


def test_nobody_is_called_with_nothing(ints: Made) -> None:
    def collate(samples: list[Any]) -> Any:
        return {"cls": [max(sample["cls"] for sample in samples)]}

    def batch_transform(batch: Any) -> Any:
        return {"cls": batch["cls"] + [batch["cls"][0]]}

    options = {"on_error": "skip", "batch_transform": batch_transform}
    for how in HOW.values():
        with DataLoader(ints.open(**how(*range(4)), **options), 4, collate_fn=collate) as loader:
            assert [numbers(batch) for batch in loader] == [[n, n] for n in range(7, SIZE, 4)]


# ---- several ranks --------------------------------------------------------------------------------------


def of_rank(dataset: Any, batch_size: int, r: int, world_size: int = 2, **options: Any) -> list[Any]:
    """Batches, each spoilt by the training code before the next one is asked for."""
    found = []
    with DataLoader(dataset, batch_size, topology=rank(r, world_size), **options) as loader:
        steps = len(loader)
        for batch in loader:
            found.append(copy.deepcopy(batch))
            batch["cls"][:] = -1 if isinstance(batch["cls"], torch.Tensor) else [-1]
            batch.clear()
        stats = loader.stats()
    assert len(found) == steps
    assert stats.samples == sum(len(batch["cls"]) for batch in found)
    return [found, stats]


WIDE_BYTES = 3000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Numbers beside so many bytes that a small memory limit has room for one batch of two at a time."""
    folder = tmp_path_factory.mktemp("wide")
    members = [
        (f"{i:02d}.{name}", data)
        for i in range(SIZE)
        for name, data in (("cls", str(i).encode()), ("bin", bytes(WIDE_BYTES)))
    ]
    write_tar(folder / "shard-0.tar", members)
    kwargs = {"source": str(folder / "*.tar"), "catalog": str(folder / "kept.catalog"), "block_bytes": 1}
    return Made(kwargs, [{"cls": i} for i in range(SIZE)], folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("memory_limit", "chunk"), [(250_000, 1), (1 << 30, 128)])
@pytest.mark.parametrize("how", HOW)
def test_several_ranks_repeat_their_last_good_batch(
    wide: Made, how: str, memory_limit: int, chunk: int
) -> None:
    """Rank 0 has 0 1, 4 5, 8 9 ..., and nothing is left of 8 9, 12 13 and 20 21."""
    ahead = choose_read_ahead(memory_limit, batch_bytes=2 * WIDE_BYTES, is_local=True)
    assert ahead.batches_per_chunk == chunk
    dataset = wide.open(**HOW[how](5, 8, 9, 12, 13, 20, 21), on_error="skip")
    found, stats = of_rank(dataset, 2, 0, mark_repeats=True, memory_limit=memory_limit)
    assert [numbers(batch) for batch in found] == [[0, 1], [4], [4], [4], [16, 17], [16, 17]]
    marks = [batch["__repeat__"].tolist() for batch in found]
    assert marks == [[False] * 2, [False], [True], [True], [False] * 2, [True] * 2]
    assert (stats.empty_batches, stats.skipped_samples, stats.batches) == (3, 7, 6)
    other, stats = of_rank(dataset, 2, 1, mark_repeats=True, memory_limit=memory_limit)
    assert [numbers(batch) for batch in other] == [[n, n + 1] for n in range(2, SIZE, 4)]
    assert stats.empty_batches == 0


def test_the_last_good_batch_may_be_one_of_the_epoch_before(ints: Made) -> None:
    dataset = ints.open(transform=Second(), on_error="skip")
    with DataLoader(dataset, 4, topology=rank(0, 2), num_workers=1, workers="thread") as loader:
        first, second = ([numbers(batch) for batch in loader] for _ in range(2))
    assert first == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert second == [[16, 17, 18, 19], [8, 9, 10, 11], [16, 17, 18, 19]]


class Second:
    """A transform that refuses samples 0 to 3 when they come for the second time."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        number = sample["cls"]
        if number in self.seen and number < 4:
            raise ValueError("seen")
        self.seen.add(number)
        return sample


@pytest.mark.here
def test_what_cannot_be_copied_is_repeated_as_it_is(ints: Made) -> None:
    dataset = ints.open(transform=without(4, 5), on_error="skip")

    def lazy(samples: list[Any]) -> Any:
        return {"cls": [sample["cls"] for sample in samples], "later": (n for n in ())}

    with DataLoader(dataset, 2, topology=rank(0, 2), collate_fn=lazy, workers="thread") as loader:
        assert [numbers(batch) for batch in loader][:3] == [[0, 1], [0, 1], [8, 9]]


@pytest.mark.parametrize("bad", [[0, 1, 2], [0, 1, 2, 6, 7, 8]])
def test_before_any_good_batch_there_is_nothing_to_repeat(ints: Made, bad: list[int]) -> None:
    dataset = ints.open(transform=without(*bad), on_error="skip")
    says = r"all 3 samples of a batch were left out.*no earlier batch.*shard-0\.tar.*0 is bad"
    with (
        DataLoader(dataset, 3, topology=rank(0, 2)) as loader,
        pytest.raises(DataflowError, match=says) as caught,
    ):
        list(loader)
    assert "ValueError: 0 is bad" in str(caught.value.__cause__)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "batching", [Packed(4, "lst"), TokenBudget(3, "lst"), Bucketed(2, "lst", boundaries=(1, 2))], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_by_length_may_be_empty_too(tmp_path: Path, batching: Any, world_size: int) -> None:
    made = make_parquet(tmp_path, 40)

    def decode(data: bytes) -> int:
        if 10 <= int(data.decode().split()[1]) < 30:
            raise ValueError("bad")
        return len(data)

    dataset = made.open(columns=["lst", "txt", "label"], decode={"txt": decode}, on_error="skip")
    empty = 0
    for r in range(world_size):
        place, rows = rank(r, world_size), {"batch_size": 1} if isinstance(batching, Packed) else {}
        with DataLoader(dataset, topology=place, batching=batching, mark_repeats=True, **rows) as loader:
            steps, seen = len(loader), 0
            for batch in loader:
                seen += 1
                assert len(batch["label"])
                assert batch["__repeat__"].shape == (
                    (1,) if isinstance(batching, Packed) else batch["label"].shape
                )
            stats = loader.stats()
        assert seen == steps - (stats.empty_batches if world_size == 1 else 0)
        empty += stats.empty_batches
    assert empty


def test_a_mixture_leaves_empty_batches_out_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    options = {"transform": without(*range(4)), "on_error": "skip"}
    sources = [make_ints_tar(tmp_path / name, 8).open(**options) for name in "ab"]
    with DataLoader(Mixture(sources), 2) as loader:
        assert [numbers(batch) for batch in loader] == [[n, n] for n in range(4, 8)]


# ---- training -------------------------------------------------------------------------------------------


def mean_losses(kwargs: dict[str, Any]) -> list[float]:
    """A rank of a training step by step; every step has a reduction that hangs if a rank lacks one."""
    found = []
    dataset = ShardedDataset(**kwargs, transform=without(5, 8, 9, 12, 13), on_error="skip")
    with DataLoader(dataset, 2) as loader:
        for batch in loader:
            loss = batch["cls"].double().mean()
            dist.all_reduce(loss)
            found.append(float(loss))
    return found


def test_ranks_step_together_and_no_mean_is_nan(ints: Made) -> None:
    ints.open()
    found = fast_ranks(mean_losses, 2, args=(ints.kwargs,), timeout_s=60)
    assert found[0] == found[1]
    assert len(found[0]) == SIZE // 4
    assert not any(math.isnan(loss) for loss in found[0])


def windows_of_unlike_ranks(kwargs: dict[str, Any]) -> tuple[list[float], int]:
    """Ranks that each have a loader for themselves, of which one leaves batches out."""
    bad = range(8, 16) if dist.get_rank() else ()
    dataset = ShardedDataset(**kwargs, transform=without(*bad), on_error="skip")
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    totals = []
    with (
        DataLoader(dataset, 4, topology=Topology()) as loader,
        GradSchedule(loader, model, optimizer, accumulate=2, weights={"batches": 1.0}) as sched,
    ):
        for batch in sched:
            loss = model(batch["cls"].float()[:, None]).sum() * sched.scale("batches")
            sched.backward(loss)
            if info := sched.step():
                totals.append(info.totals["batches"])
        return totals, loader.stats().batches


def test_a_schedule_does_not_rely_on_a_length_that_batches_may_be_missing_from(ints: Made) -> None:
    ints.open()
    found = fast_ranks(windows_of_unlike_ranks, 2, args=(ints.kwargs,), timeout_s=90)
    assert [batches for _, batches in found] == [6, 4]
    assert found[0][0] == found[1][0] == [4.0, 4.0, 2.0]
