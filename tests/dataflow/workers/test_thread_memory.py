"""Memory of worker threads whose iterators are opened and dropped: nothing of an old round lives on.

glibc keeps freed items in the heaps of the threads that made them, more or less of it from round to round; a
process whose C library maps each item by itself shows what the loader holds.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from threads_kit import threads_left

from dataflow import DataLoader
from prefetch.memory.arena import HeapKeeper, keep_heap, trim_heap

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
for number in range(30):
    iterator = iter(loader)
    next(iterator)
    del iterator
    if number in (9, 29):
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


@pytest.mark.full
def test_memory_does_not_grow_with_the_rounds() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    after_10, after_30 = json.loads(done.stdout)
    assert after_30 - after_10 < ITEM


HOLES = """
import psutil
from dataflow import DataLoader

class Items:
    def __init__(self):
        self.kept = []
    def __len__(self):
        return 4
    def __getitem__(self, i):
        parts = [bytearray(50_000) for _ in range(1000)]
        self.kept.extend(parts[::20])  # between them are holes, which the C library keeps
        return i

process, items = psutil.Process(), Items()
iterator = iter(DataLoader(items, 4, workers="thread", num_workers=2))
next(iterator)
before = process.memory_info().rss
del iterator
print(before - process.memory_info().rss)
"""


def test_threads_that_end_give_freed_memory_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 32 << 20


class Heap:
    """Stands for the C library: how much freed memory it keeps, and how often it gave it back."""

    def __init__(self, kept_bytes: int) -> None:
        self.trims = 0

        def mallinfo2() -> Any:
            return SimpleNamespace(fordblks=kept_bytes)

        def malloc_trim(pad: int) -> None:
            assert pad == 0
            self.trims += 1

        self.mallinfo2, self.malloc_trim = mallinfo2, malloc_trim


def test_a_heap_is_trimmed_only_where_it_keeps_more_than_asked() -> None:
    heap = Heap(100)
    trim_heap(100, library=heap)
    assert heap.trims == 0
    trim_heap(99, library=heap)
    assert heap.trims == 1
    trim_heap(0, library=object())  # of a C library that cannot tell, or cannot trim


def test_a_heap_is_looked_at_whenever_an_eighth_of_the_limit_was_made_on_it() -> None:
    looks: list[int] = []
    keeper = HeapKeeper(480, looks.append)
    for _ in range(4):
        keeper.made(30)
    assert looks == [90, 90]


def test_a_heap_keeps_what_one_batch_takes_as_the_next_one_needs_it() -> None:
    """Given back to the system after each batch, each page of the next one costs a fault again."""
    looks: list[int] = []
    keeper = HeapKeeper(480, looks.append)
    for nbytes in (500, 20, 40, 700):
        keeper.made(nbytes)
    assert looks == [560, 560, 760]


class Again:
    """Page faults of making samples whose like was made, and freed, just before."""

    ARRAYS, PAGES = 64, 147

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> int:
        def make() -> int:
            arrays = [np.full(self.PAGES * 1024, i, np.float32) for _ in range(self.ARRAYS)]
            return len(arrays)

        make()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        make()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_samples_that_a_worker_makes_lie_where_those_before_them_did() -> None:
    with DataLoader(Again(), 1, num_workers=1) as loader:
        assert max(int(batch[0]) for batch in loader) < Again.ARRAYS * Again.PAGES // 10


@pytest.mark.parametrize("name", ["", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_of_the_heap_is_heeded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    if name:
        monkeypatch.setenv(name, "1")
    calls: list[tuple[int, int]] = []
    keep_heap(library=SimpleNamespace(mallopt=lambda option, value: calls.append((option, value))))
    assert calls == ([] if name else [(-3, 32 << 20), (-1, 128 << 20)])
    keep_heap(library=SimpleNamespace())  # of another C library
