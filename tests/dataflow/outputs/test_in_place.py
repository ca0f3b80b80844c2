"""Blocks and images of local files are decoded where they lie, while a guard keeps the file as it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow import DataLoader, Image, ShardedDataset, ShardWriter, Shuffle
from dataflow.decode import image
from prefetch.memory.guards import FileGuard, FileGuards
from prefetch.memory.mapping import MappedShard
from prefetch.store.reader import StoreReader
from sharding.errors import DataflowError
from sharding.formats.arrow.parquet import ParquetFormat

simplejpeg = pytest.importorskip("simplejpeg")
TIMEOUT_S = 30
GROUPS, ROWS = 6, 40


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """240 rows in row groups of 40."""
    path = tmp_path / "rows.parquet"
    numbers = np.arange(GROUPS * ROWS)
    columns = {"x": numbers.astype(np.float32), "y": numbers * 2, "z": [f"{n:03d}" for n in numbers]}
    pq.write_table(pa.table(columns), path, row_group_size=ROWS)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """24 JPEGs, of which one is damaged and one is missing."""
    path, rng = tmp_path / "pictures.tar", np.random.default_rng(3)
    with ShardWriter(str(path)) as writer:
        for i in range(24):
            pixels = rng.integers(0, 255, (40 + i, 50, 3), np.uint8)
            data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels))
            sample: dict[str, Any] = {"__key__": f"{i:02d}", "cls": i, "jpg": data[: 300 if i == 5 else None]}
            writer.write({name: value for name, value in sample.items() if i != 9 or name != "jpg"})
    return path


def rows_of(path: Path, columns: list[str]) -> ShardedDataset:
    return ShardedDataset(str(path), columns=columns)


def images_of(path: Path) -> ShardedDataset:
    decode = {"jpg": Image(size=16, crop="random_resized", flip=0.5), "cls": "int"}
    return ShardedDataset(str(path), decode=decode, on_error="skip")


def is_guarded(path: Path) -> bool:
    """Whether this filesystem grants leases."""
    dataset, guards = ShardedDataset(str(path), on_error="skip"), FileGuards()
    held = MappedShard(dataset.catalog.shard(0), guards).guard is not None
    guards.close()
    return held


@pytest.mark.reads_here
@pytest.mark.parametrize("columns", [["x", "y"], ["x", "z"]])
def test_row_groups_are_the_same_decoded_in_place_and_read(
    table: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str]
) -> None:
    num_reads, read_into, has_guards = [0], StoreReader.read_into, is_guarded(table)

    def counted(*arguments: Any, **options: Any) -> None:
        num_reads[0] += 1
        read_into(*arguments, **options)

    monkeypatch.setattr(StoreReader, "read_into", counted)
    seen, reads = [], []
    for take in (FileGuards.take, lambda *_: None):
        monkeypatch.setattr(FileGuards, "take", take)
        num_reads[0] = 0
        with DataLoader(rows_of(table, columns), 7, shuffle=True) as loader:
            seen.append([repr(batch) for _ in range(2) for batch in loader])
        reads.append(num_reads[0] > 0)
    assert seen[0] == seen[1]
    assert reads == [not has_guards, True]


def test_images_are_the_same_decoded_in_place_and_copied(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for take in (FileGuards.take, lambda *_: None):
        monkeypatch.setattr(FileGuards, "take", take)
        with DataLoader(images_of(pictures), 5, shuffle=True) as loader:
            batches = [batch for _ in range(2) for batch in loader]
            assert loader.stats().skipped_samples == 4
        seen.append([(batch["cls"].tolist(), batch["jpg"].numpy().tobytes()) for batch in batches])
    assert seen[0] == seen[1]


def gate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> tuple[threading.Event, threading.Event]:
    """The first call of a function tells that it has begun, and goes on when it is let."""
    begun, let, function = threading.Event(), threading.Event(), getattr(owner, name)

    def gated(*arguments: Any, **options: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert let.wait(TIMEOUT_S)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, gated)
    return begun, let


def until_error(loop: Iterator[Any]) -> None:
    with suppress(DataflowError):
        for _ in loop:
            pass


@pytest.mark.here
@pytest.mark.parametrize("kind", ["rows", "images"])
def test_whoever_cuts_a_file_waits_for_the_decoding_in_it_and_no_longer(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path: Path = request.getfixturevalue({"rows": "table", "images": "pictures"}[kind])
    if not is_guarded(path):
        pytest.skip("this filesystem grants no leases")
    dataset = rows_of(path, ["x", "y"]) if kind == "rows" else images_of(path)
    owner, name = (ParquetFormat, "decode") if kind == "rows" else (image, "_sizes")
    begun, let = gate(monkeypatch, owner, name)
    asked, let_go = threading.Event(), FileGuards.let_go
    ended, end = threading.Event(), FileGuard.end

    def told(guards: FileGuards, guard: FileGuard) -> None:
        let_go(guards, guard)
        asked.set()

    def noted(guard: FileGuard) -> None:
        ended.set()
        end(guard)

    monkeypatch.setattr(FileGuards, "let_go", told)
    monkeypatch.setattr(FileGuard, "end", noted)
    cut = threading.Thread(target=os.truncate, args=(path, 1000))
    with DataLoader(dataset, 4, Shuffle("none"), timeout=TIMEOUT_S) as loader:
        loop = iter(loader)
        taker = threading.Thread(target=until_error, args=(loop,))
        taker.start()
        assert begun.wait(TIMEOUT_S)
        cut.start()
        assert asked.wait(TIMEOUT_S)
        assert not ended.is_set()
        assert cut.is_alive()  # the kernel waits for the lease, which ends with the decoding
        let.set()
        cut.join(TIMEOUT_S)
        assert not cut.is_alive()
        taker.join(TIMEOUT_S)
        assert not taker.is_alive()
