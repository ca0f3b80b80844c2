"""`loader.stats()` of loaders over datasets that are no shards."""

from __future__ import annotations

import os
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dataflow import DataLoader, stats
from dataflow.stats import WorkerStats
from dataflow.workers.fetching import DeliveryMeter

TIMEOUT_S = 20


class Rows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1000,), i, dtype=torch.int32)


class WideRows(Rows):
    """Batches that are large enough to stay in shared memory."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return super().__getitem__(i).repeat(10)


def test_before_the_first_loop_there_is_nothing() -> None:
    before = DataLoader(Rows(), 3).stats()
    assert before == WorkerStats(
        batches=0,
        delivered_bytes=0,
        elapsed_s=0.0,
        starved_s=0.0,
        first_batch_s=0.0,
        num_workers=0,
        workers="main",
        workers_reason="num_workers=0",
        ahead_batches=0,
        ready_batches=0,
        shared_bytes=0,
        worker_pids=(),
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workers", [None, "thread", "process"])
def test_what_was_delivered_is_counted_over_all_loops(workers: Any) -> None:
    loader = DataLoader(Rows(), 3, num_workers=2 if workers else 0, workers=workers)
    for _ in range(2):
        assert len(list(loader)) == 4
    seen = loader.stats()
    assert seen.batches == 8
    assert seen.delivered_bytes >= 2 * 12 * 4000
    assert seen.delivered_bytes < 1.2 * 2 * 12 * 4000
    assert seen.workers == (workers or "main")
    assert 0 < seen.first_batch_s < seen.elapsed_s
    assert 0 < seen.starved_s < seen.elapsed_s
    assert seen.stall_share <= 1
    assert seen.num_workers == (2 if workers else 0)


def test_the_first_batch_is_counted_from_the_first_loop_and_starved_time_leaves_the_training_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("dataflow.workers.fetching.time", clock)
    meter = DeliveryMeter()
    assert meter.elapsed_s == 0
    now = 102.0
    meter.begins(101)
    now = 108.0
    meter.delivered(104, 10)
    now = 111.0
    meter.delivered(110, 10)
    now = 120.0
    assert (meter.batches, meter.bytes) == (2, 20)
    assert (meter.first_batch_s, meter.starved_s, meter.elapsed_s) == (7, 6, 10)
    meter.waited(119)  # for the end
    now = 500.0
    assert (meter.starved_s, meter.elapsed_s) == (7, 19)
    meter.begins(499)  # another loop: the time between them is none of theirs
    assert (meter.starved_s, meter.elapsed_s) == (8, 20)


def test_batches_ahead_are_told_while_the_loop_runs() -> None:
    gate, there = threading.Event(), threading.Semaphore(0)

    class Gated(Rows):
        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 11:
                assert gate.wait(TIMEOUT_S)
            return super().__getitem__(i)

    def collate(items: list[Any]) -> int:
        there.release()
        return len(items)

    loader = DataLoader(Gated(), 3, num_workers=2, workers="thread", collate_fn=collate)
    it = iter(loader)
    for _ in range(3):
        assert there.acquire(timeout=TIMEOUT_S)
    assert next(it) == 3  # and it looks at what has come
    ahead = loader.stats()
    assert ahead.ahead_batches == 3
    assert ahead.ready_batches <= 2
    gate.set()
    assert list(it) == [3, 3, 3]
    after = loader.stats()
    assert (after.ahead_batches, after.ready_batches) == (0, 0)


def test_memory_of_worker_processes_is_told_and_kept_by_batches() -> None:
    loader = DataLoader(WideRows(), 3, num_workers=2, persistent_workers=True)
    with loader:
        it = iter(loader)
        kept = [next(it)]
        next(it)  # the other worker's: it has been forked by now
        during = loader.stats()
        assert during.shared_bytes >= 120_000
        assert len(during.worker_pids) == 2
        assert all(os.path.exists(f"/proc/{pid}") for pid in during.worker_pids)
    after = loader.stats()
    assert after.shared_bytes == 122_880, "the pages of the batch that is kept"
    assert (after.ahead_batches, after.ready_batches, after.worker_pids) == (0, 0, ())
    assert kept[0].sum() == 30_000
    kept.clear()
    assert loader.stats().shared_bytes == 0
    del it


def test_without_worker_processes_no_memory_is_shared() -> None:
    for options in ({}, {"num_workers": 2, "workers": "thread"}):
        loader = DataLoader(Rows(), 3, **options)
        it = iter(loader)
        next(it)
        assert loader.stats().shared_bytes == 0
        assert loader.stats().worker_pids == ()


def test_every_field_says_what_it_means() -> None:
    text = Path(stats.__file__).read_text().partition("class WorkerStats")[2]
    for field in fields(WorkerStats):
        after = text.partition(f"    {field.name}: ")[2].split("\n", 2)[1]
        assert after.strip().startswith('"""'), field.name
