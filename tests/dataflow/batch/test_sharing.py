"""The samples of a batch, made side by side: by whom, from when on, and that no batch shows it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.batch import sharing
from dataflow.batch.sharing import SampleOutcomes, part_size
from dataflow.stream import resources
from prefetch.control.chunk_time import ChunkTime

TIMEOUT_S = 10


@pytest.mark.parametrize(
    ("num_made", "made_s", "thread_s", "num_left", "size"),
    [
        (0, 1.0, 0.0, 32, 0),  # nothing is known
        (4, 0.004, 0.0, 28, 0),  # not long yet
        (1, 0.005, 0.0, 31, 1),
        (1, 0.1, 0.0, 31, 1),  # a sample is never cut
        (10, 0.005, 0.0, 22, 10),
        (10, 0.005, 0.0, 19, 0),  # less than two parts are left
        (1, 0.005, 0.0002, 31, 1),  # 16 such threads wait, mostly
        (1, 0.005, 0.00025, 31, 1),  # they compute, 0.25 ms a part
        (5, 0.005, 0.00025, 32, 5),
        (10, 0.05, 0.0025, 31, 1),
        (20, 0.05, 0.0025, 31, 2),
        (40, 0.04, 0.002, 31, 5),
        (4, 0.005, 0.00022, 32, 4),
        (4, 0.1, 0.0045, 32, 1),
        (80, 0.1, 0.0045, 32, 4),
    ],
)
def test_parts_take_a_few_milliseconds_and_compute_for_a_few_tenths(
    num_made: int, made_s: float, thread_s: float, num_left: int, size: int
) -> None:
    assert part_size(num_made, made_s, thread_s, num_left, num_builders=16) == size


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_all_that_is_left_is_shared_once_and_comes_by_its_number() -> None:
    clock, made = _Clock(), list[int]()

    def make(at: int) -> tuple[Any, str, None]:
        made.append(at)
        clock.now_s += 0.005
        return at, "", None

    outcomes = SampleOutcomes(make, 6, is_shared=True, closing=threading.Event(), now=clock)
    assert outcomes.parts_from(0) == []
    assert outcomes.take(0)[0] == 0
    parts = outcomes.parts_from(1)
    for part in reversed(parts):
        part()
    assert made == [0, 5, 4, 3, 2, 1]
    assert not outcomes.may_share
    assert [outcomes.take(at)[0] for at in range(1, 6)] == [1, 2, 3, 4, 5]
    assert outcomes.shared_s == pytest.approx(0.025)
    assert len(made) == 6


@pytest.mark.parametrize(
    ("thread_s", "num_builders", "built_s"),
    [
        (0.001, 16, 0.1),  # they wait
        (0.004, 16, 0.1),
        (0.005, 16, 0.005),  # they compute, and wait for the lock in between
        (0.09, 1, 0.09),
    ],
)
def test_threads_that_compute_take_their_own_time(thread_s: float, num_builders: int, built_s: float) -> None:
    assert sharing.building_s(0.1, thread_s, num_builders) == built_s


def test_nobody_makes_samples_of_a_loader_that_is_closed() -> None:
    clock, closing = _Clock(), threading.Event()

    def make(at: int) -> tuple[Any, str, None]:
        clock.now_s += 0.005
        closing.set()
        return at, "", None

    outcomes = SampleOutcomes(make, 3, is_shared=True, closing=closing, now=clock)
    outcomes.take(0)
    parts = outcomes.parts_from(1)
    for part in parts:
        part()
    assert clock.now_s == 0.005


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    with ShardWriter(str(tmp_path / "s-%d.tar"), max_count=16) as out:
        for i in range(48):
            out.write({"__key__": f"{i:02d}", "npy": np.full(3, i), "cls": i})
    return str(tmp_path / "s-*.tar")


def _drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["cls"] % 11 == 5:
        raise ValueError("eleven")
    return {"x": sample["npy"] + int(rng.integers(1000)), "y": sample["cls"]}


def _delivered(numbers: str, **options: Any) -> tuple[list[Any], tuple[str, ...]]:
    dataset = ShardedDataset(numbers, transform=_drawn, on_error="skip")
    with DataLoader(dataset, 8, shuffle=True, seed=3, **options) as loader:
        batches = [(batch["x"].tolist(), batch["y"].tolist()) for _ in range(2) for batch in loader]
        return batches, loader.stats().skipped


@pytest.mark.parametrize("part_s", [0.0, 1e9])
@pytest.mark.parametrize("chunk_s", [0.0, 1e3])
def test_batches_and_what_is_left_out_depend_neither_on_parts_nor_on_chunks(
    numbers: str, monkeypatch: pytest.MonkeyPatch, part_s: float, chunk_s: float
) -> None:
    expected = _delivered(numbers, num_workers=0)
    assert len(expected[1]) == 8
    monkeypatch.setattr(sharing, "PART_S", part_s)
    monkeypatch.setattr(sharing, "COMPUTED_S", 0.0)
    monkeypatch.setattr(resources, "ChunkTime", lambda: ChunkTime(chunk_s))
    assert _delivered(numbers, num_workers=3, workers="thread") == expected


def test_threads_make_the_samples_of_one_batch_side_by_side(
    numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All seven that are left of the batch stand at the barrier at the same time."""
    monkeypatch.setattr(sharing, "PART_S", 0.0)
    monkeypatch.setattr(sharing, "COMPUTED_S", 0.0)
    together, begun = threading.Barrier(7, timeout=TIMEOUT_S), threading.Event()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if begun.is_set():
            together.wait()
        begun.set()
        return {"y": sample["cls"]}

    dataset = ShardedDataset(numbers, transform=transform).take(8)
    with DataLoader(dataset, 8, num_workers=7, workers="thread") as loader:
        assert next(iter(loader))["y"].tolist() == [*range(8)]
