"""Memory of worker threads whose iterators are opened and dropped: nothing of an old round lives on.

glibc keeps freed items in the heaps of the threads that made them, more or less of it from round to round; a
process whose C library maps each item by itself shows what the loader holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from threads_kit import threads_left

from dataflow import DataLoader
from prefetch.memory import arena as heap

ITEM = 8_000_000
ROUNDS = """
import json, torch
from dataflow import DataLoader
from prefetch.memory.arena import trim_heap

class Items:
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return torch.full((2_000_000,), float(i))

def held():
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return sum(1024 * int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))

loader, seen = DataLoader(Items(), 2, workers="thread", num_workers=4), []
for number in range(60):
    iterator = iter(loader)
    next(iterator)
    del iterator
    if number in (9, 59):
        trim_heap()
        seen.append(held())
print(json.dumps(seen))
"""


class Watched:
    """Items that are watched."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> torch.Tensor:
        item = torch.full((1000,), float(i))
        self.made.append(weakref.ref(item))
        return item


@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_of_an_iterator_that_was_dropped_lives_on(persistent: bool) -> None:
    dataset = Watched()
    loader: Any = DataLoader(dataset, 2, workers="thread", num_workers=4, persistent_workers=persistent)
    workers = []
    for _ in range(5):
        iterator = iter(loader)
        next(iterator)
        workers.append(weakref.ref(iterator.runners))
        del iterator
    loader.close()
    assert dataset.made
    assert [item() for item in dataset.made if item() is not None] == []
    assert [runners() for runners in workers if runners() is not None] == []
    assert threads_left() == []


def test_memory_does_not_grow_with_the_rounds() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    after_10, after_60 = json.loads(done.stdout)
    assert after_60 - after_10 < ITEM


def test_threads_that_end_give_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("dataflow.workers.threads.trim_heap", asked.append)
    loader = DataLoader(Watched(), 2, workers="thread", num_workers=2)
    for _ in range(3):
        iterator = iter(loader)
        next(iterator)
        del iterator
    assert len(asked) == 3


def test_a_heap_is_trimmed_only_where_it_keeps_more_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []

    class Library:
        def mallinfo2(self) -> Any:
            return heap._Mallinfo(fordblks=100)

        def malloc_trim(self, pad: int) -> None:
            trims.append(pad)

    monkeypatch.setattr(heap, "_libc", Library)
    heap.trim_heap(100)
    assert trims == []
    heap.trim_heap(99)
    assert trims == [0]
    keeper = heap.HeapKeeper(120)  # looks whenever 60 bytes were made
    for _ in range(4):
        keeper.made(30)
    assert trims == [0, 0, 0]
    monkeypatch.setattr(heap, "_libc", lambda: None)
    heap.trim_heap(0)
    assert trims == [0, 0, 0]
