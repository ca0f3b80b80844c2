"""What `memory_limit` bounds: the process's memory, also where functions of the user or decoders make it.

A process of its own measures anonymous pages, private and shared: pages of mapped shards are the cache's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from parameters_kit import in_full
from pyarrow import parquet

from dataflow import DataLoader, Image, MemoryLimitError, ShardedDataset, ShardWriter, Shuffle
from dataflow.outputs.held_bytes import Ranges, held_bytes
from dataflow.ragged import Ragged
from sharding.order.selection import SelectedOrder

LIMIT = 50_000_000
BATCH_BYTES = 8 << 20
"""What a batch of these tests takes, at least."""
BESIDE = 150_000_000
"""The library's code, what a builder has in hand, and what the C library keeps of freed memory."""
MEASURE = """
def held():
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return sum(1024 * int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
"""
LOOP = """
import json, sys
import torch
torch.ones(10).sum()
bare = held()
import dataflow
{setup}
workers = dict(num_workers={threads}, workers="thread")
loader = dataflow.DataLoader(dataset, batch_size=8, memory_limit=50_000_000, **workers)
peak = ledger = 0
for number, batch in enumerate(loader):
    peak = max(peak, held())
    memory = loader.stats().memory
    ledger = max(ledger, memory.ready_bytes + memory.in_use_bytes)
print(json.dumps({{"bare": bare, "peak": peak, "ledger": ledger, "batches": number + 1}}))
"""


def measured(setup: str, *, threads: int = 2) -> dict[str, Any]:
    """What a process of its own says of a loop."""
    script = MEASURE + LOOP.format(setup=textwrap.dedent(setup), threads=threads)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shards(folder: Path, samples: list[dict[str, Any]]) -> str:
    with ShardWriter(str(folder / "s-{:05d}.tar")) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:06d}", **sample})
    return str(folder)


def pictures(same: bool) -> list[bytes]:
    simplejpeg = pytest.importorskip("simplejpeg")
    widths = [800 + (0 if same else 8 * i) for i in range(8)]
    return [simplejpeg.encode_jpeg(np.full((600, width, 3), width % 251, np.uint8)) for width in widths]


def assert_bounded(found: dict[str, Any], batches: int) -> None:
    assert found["batches"] == batches
    above = found["peak"] - found["bare"]
    assert above < LIMIT + BESIDE, f"{above:,} bytes above a bare torch process"
    # How many more are ready depends on who is faster.
    assert found["ledger"] >= BATCH_BYTES, "what the loop holds was not charged"


@pytest.mark.parametrize("kind", ["transform", *in_full("batch_transform", "collate_fn")])
def test_large_results_of_the_users_functions_stay_within_the_limit(tmp_path: Path, kind: str) -> None:
    url = shards(tmp_path, [{"cls": i} for i in range(200)])
    large = "torch.ones(65536 * {})"
    setup = {
        "transform": f"""
            dataset = dataflow.ShardedDataset({url!r}, transform=lambda sample: {{"x": {large.format(4)}}})
        """,
        "batch_transform": f"""
            made = lambda batch: {{"x": {large.format(32)}}}
            dataset = dataflow.ShardedDataset({url!r}, batch_transform=made)
        """,
        "collate_fn": f"""
            from functools import partial
            dataflow.DataLoader = partial(dataflow.DataLoader, collate_fn=lambda _: [{large.format(32)}])
            dataset = dataflow.ShardedDataset({url!r})
        """,
    }
    assert_bounded(measured(setup[kind]), 25)


@pytest.mark.parametrize("same", [True, *in_full(False)])
def test_images_of_free_size_stay_within_the_limit(tmp_path: Path, same: bool) -> None:
    coded = pictures(same)
    url = shards(tmp_path, [{"jpg": coded[i % 8]} for i in range(200)])
    setup = f"dataset = dataflow.ShardedDataset({url!r}, decode={{'jpg': dataflow.Image()}})"
    assert_bounded(measured(setup), 25)


def test_images_of_free_size_are_charged_while_they_live(tmp_path: Path) -> None:
    coded = pictures(False)
    dataset = ShardedDataset(shards(tmp_path, [{"jpg": one} for one in coded]), decode={"jpg": Image()})
    batch = next(iter(loader := DataLoader(dataset, batch_size=8)))
    nbytes = sum(image.nbytes for image in batch["jpg"])
    assert nbytes <= loader.stats().memory.in_use_bytes
    del batch
    loader.close()


def test_images_are_a_list_even_of_one_size_and_bad_ones_are_named(tmp_path: Path) -> None:
    coded = pictures(True)
    coded[3] = coded[3][:50]
    url = shards(tmp_path, [{"jpg": one} for one in coded])
    dataset = ShardedDataset(url, decode={"jpg": Image()}, on_error="skip")
    batches = list(loader := DataLoader(dataset, batch_size=2))
    assert [[tuple(image.shape) for image in batch["jpg"]] for batch in batches[::2]] == [
        [(3, 600, 800)] * 2
    ] * 2
    assert loader.stats().skipped_samples == 1
    assert "000003" in loader.stats().skipped[0]


# ---- plans, and what stats() shows ----------------------------------------------------------------------


@pytest.mark.here
@pytest.mark.parametrize("shuffle", [None, True])
def test_a_window_of_too_many_samples_is_an_error_before_they_are_listed(
    tmp_path: Path, shuffle: bool | None
) -> None:
    rows, path = 2_000_000, tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"x": np.zeros(rows, np.int8)}), path, row_group_size=rows)
    assert path.stat().st_size < 100_000
    loader = DataLoader(ShardedDataset(str(path)), batch_size=8, memory_limit="8MB", shuffle=shuffle)
    tracemalloc.start()
    with pytest.raises(MemoryLimitError, match=r"2,000,000 samples, .*bomb\.parquet at offset 4.*=8,000,000"):
        next(iter(loader))
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()


class VastDataset(ShardedDataset):
    """The order of its later epochs takes more memory than there is."""

    def windows(self, epoch: int, shuffle: Shuffle, *, seed: int) -> SelectedOrder:
        if epoch:
            raise MemoryError
        return super().windows(epoch, shuffle, seed=seed)


def test_an_epoch_that_cannot_be_planned_for_lack_of_memory_is_an_error_of_ours(tmp_path: Path) -> None:
    loader = DataLoader(VastDataset(shards(tmp_path, [{"cls": 1}] * 4)), batch_size=2)
    loader.set_epoch(1)
    with pytest.raises(MemoryLimitError, match="no memory to plan an epoch of 4 samples"):
        len(loader)


@pytest.mark.reads_here
def test_mapped_shard_pages_are_shown_apart(tmp_path: Path) -> None:
    url = shards(tmp_path, [{"bin": bytes(1000)} for _ in range(1000)])
    loader = DataLoader(ShardedDataset(url), batch_size=10)
    assert loader.stats().mapped_bytes == 0
    batches = iter(loader)
    next(batches)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert size // 2 < loader.stats().mapped_bytes <= size
    loader.close()
    assert loader.stats().mapped_bytes == 0


# ---- the shallow look ---------------------------------------------------------------------------------

WEIGHT = torch.ones(1000)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value, self.other = value, [value]


@pytest.mark.parametrize(
    ("batch", "nbytes"),
    [
        (WEIGHT, 4000),
        ([WEIGHT, WEIGHT[:10], {"a": WEIGHT}], 4000),
        (WEIGHT[:1], 4000),
        (torch.ones(1).expand(10**9), 4),
        (np.broadcast_to(np.ones(1), 10**6), 8),
        (np.ones((10, 10))[:, 0], 800),
        (Ragged(torch.ones(500), torch.zeros(3, dtype=torch.int64)), 2024),
        (Holder(WEIGHT), 4000),
        (torch.ones(1000, device="meta"), 0),
        (torch.eye(100).to_sparse(), 100 * (8 + 8 + 4)),
        (np.array([b"x" * 3000, None], object), 3000),
        ({"text": ["x" * 1000] * 1000}, 1_000_000),
        ([{"a": torch.ones(3000)} for _ in range(4)], 4 * 12_000),
        ([{"a": torch.ones(3000)} for _ in range(5)], 5 * 12_000),
        ([{"a": torch.ones(3000)} for _ in range(1003)], 1003 * 12_000),
        ([[[["x" * 1000]]]], 1000),
        (memoryview(b"x" * 1000), 1000),
        ((1, 2.0, None, True, {1}, type, len, "x"), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_are_counted_once_and_by_what_they_keep_alive(batch: Any, nbytes: int) -> None:
    found = held_bytes(batch, Ranges())
    assert nbytes <= found <= nbytes * 1.1 + 1200


def test_memory_with_credits_of_its_own_is_not_counted_again() -> None:
    memory = np.zeros(8000, np.uint8)
    slots = Ranges()
    for first in (4000, 0):
        slots.add(memory.ctypes.data + first, 4000)
    views = [torch.from_numpy(memory[first : first + 100]) for first in range(0, 8000, 100)]
    assert held_bytes(views, slots) < 2000
    assert held_bytes([*views, WEIGHT], slots) < 6000
