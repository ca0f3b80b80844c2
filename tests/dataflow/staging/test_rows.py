"""Rows of blocks are the same whichever window they are opened in, and are read no more than once."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from datasets_kit import MAKERS, Made, make_parquet, make_tar, make_tokens_bin, rows_of
from numpy.typing import NDArray

from dataflow import ShardedDataset
from dataflow.outputs.columns import ChunkColumns, ChunkRows, Randomness
from dataflow.staging.block_source import BlockSource
from dataflow.staging.reading import ReadWindow
from dataflow.staging.rows import (
    OpenRows,
    RowReader,
    WindowPart,
    counted_through,
    open_rows,
)
from dataflow.staging.window import RowFraction, StagedWindow
from prefetch.memory.arena import Arena
from prefetch.memory.guards import FileGuards
from prefetch.store.reader import StoreReader
from sharding.errors import ShardChangedError, ShardReadError

SHARES: list[RowFraction] = ["all", "many", "few"]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(limit_bytes=1 << 20)
    yield arena
    arena.close()


@pytest.fixture
def guards() -> Iterator[FileGuards]:
    guards = FileGuards()
    yield guards
    guards.close()


@pytest.fixture(autouse=True)
def no_files_left() -> Iterator[None]:
    yield
    memory = fsspec.filesystem("memory")
    if memory.exists("/rows"):
        memory.rm("/rows", recursive=True)


def built(
    dataset: ShardedDataset, parts: list[WindowPart], arena: Arena, num_rows: int
) -> list[dict[str, Any]]:
    """The samples in some rows of windows."""
    columns = ChunkColumns(
        ChunkRows(num_rows, lambda: parts),
        arena,
        Randomness(0, 0),
        may_load=False,
        closing=threading.Event(),
    )
    return rows_of({output.name: output.build(columns).whole(columns) for output in dataset.outputs})


def blocks_and_rows(
    dataset: ShardedDataset, samples: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Blocks in descending order, and where in them the samples lie."""
    block, row = dataset.selection.locate(samples)
    blocks, ordinal = np.unique(block, return_inverse=True)
    return blocks[::-1].copy(), len(blocks) - 1 - ordinal, row


def in_memory(made: Made) -> ShardedDataset:
    """The dataset behind a filesystem that cannot be mapped."""
    memory = fsspec.filesystem("memory")
    for path in made.shards:
        memory.pipe_file(f"/rows/{path.name}", path.read_bytes())
    return made.open(source=f"memory://rows/*{made.shards[0].suffix}")


def read(opened: StagedWindow | OpenRows) -> None:
    for task in opened.reads():
        task()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.one_in(3)
def test_the_rows_asked_for_are_the_windows_whatever_its_kind(
    tmp_path: Path, arena: Arena, guards: FileGuards, name: str, share: RowFraction, maps: bool
) -> None:
    made = MAKERS[name](tmp_path)
    dataset: ShardedDataset = made.open()
    samples = np.random.default_rng(1).permutation(len(dataset))[: len(dataset) if share == "all" else 9]
    source = dataset.source(0, guards, is_awaited=not maps)
    blocks, rows = counted_through(source, *blocks_and_rows(dataset, samples))
    some = np.insert(rows, 2, -1)  # as of another rank
    window = open_rows(source, arena, blocks, some, share=share)
    read(window)
    assert window.rows[2] == -1
    own = np.delete(window.rows, 2)
    assert window.samples.numbers(own).tolist() == samples.tolist()
    parts = [WindowPart(window, own, slice(0, len(own)))]
    assert built(dataset, parts, arena, len(own)) == [made.samples[at] for at in samples.tolist()]


KINDS: dict[str, tuple[Callable[[Path], Made], bool, dict[RowFraction, str]]] = {
    "values of local files are mapped": (make_tar, True, dict.fromkeys(SHARES, "MappedWindow")),
    "few values of others are read alone": (
        make_tar,
        False,
        {"all": "ReadWindow", "many": "ReadWindow", "few": "SparseWindow"},
    ),
    "tables are read in whole blocks": (make_parquet, True, dict.fromkeys(SHARES, "ReadWindow")),
}


@pytest.mark.parametrize("fact", KINDS)
def test_which_window_it_is(tmp_path: Path, arena: Arena, guards: FileGuards, fact: str) -> None:
    make, is_local, kinds = KINDS[fact]
    made = make(tmp_path)
    source = (made.open() if is_local else in_memory(made)).source(0, guards)
    opened = {share: open_rows(source, arena, np.arange(2), np.arange(3), share=share) for share in SHARES}
    assert {share: type(window).__name__ for share, window in opened.items()} == kinds


def test_nothing_is_mapped_for_who_waits_for_each_read(tmp_path: Path, arena: Arena) -> None:
    source = make_tar(tmp_path).open().source(is_awaited=True)
    window = open_rows(source, arena, np.arange(1), np.arange(1), share="few")
    assert type(window).__name__ == "SparseWindow"


class CountedReader(StoreReader):
    """Notes what is read; `fails` of the first reads do not succeed."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.reads: list[tuple[str, int]] = []
        self._fails = fails

    def read_into(self, shard: Any, offset: int, out: Any, **given: Any) -> None:
        self.reads.append((shard.url, offset))
        if self._fails:
            self._fails -= 1
            raise ShardReadError(shard.url, "not now", offset)
        super().read_into(shard, offset, out, **given)


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize(("name", "has_views"), [("tar.gz", False), ("tfrecord", True), ("arrow", True)])
def test_blocks_of_local_files_are_decoded_where_they_lie_and_stay_mapped_for_views(
    name: str, has_views: bool, given_up: bool, tmp_path: Path, arena: Arena, guards: FileGuards
) -> None:
    made = MAKERS[name](tmp_path)
    reader, dataset = CountedReader(), made.open()
    source = replace(dataset.source(0, guards), reader=reader)
    blocks, rows = counted_through(source, *blocks_and_rows(dataset, np.arange(len(dataset))))
    window = ReadWindow(source, arena, blocks, rows)
    read(window)
    assert not reader.reads
    nbytes = int(source.catalog.blocks.length[blocks].sum())
    assert source.mappings.mapped_bytes == (nbytes if has_views else 0)
    if given_up:
        guards.close()
    assert window.may_load == (not has_views or not given_up)
    parts = [WindowPart(window, window.rows, slice(0, len(rows)))]
    assert built(dataset, parts, arena, len(rows)) == list(made.samples)
    window.verify()
    window.close()
    assert source.mappings.mapped_bytes == 0


def test_values_in_a_mapped_block_whose_file_is_cut_are_an_error(
    tmp_path: Path, arena: Arena, guards: FileGuards
) -> None:
    made = MAKERS["tfrecord"](tmp_path)
    dataset = made.open()
    source = dataset.source(0, guards)
    blocks, rows = counted_through(source, *blocks_and_rows(dataset, np.arange(len(dataset))))
    window = ReadWindow(source, arena, blocks, rows)
    read(window)
    for shard in made.shards:
        os.truncate(shard, 0)
    parts = [WindowPart(window, window.rows, slice(0, len(rows)))]
    with pytest.raises(ShardReadError, match="truncated while it was read"):
        built(dataset, parts, arena, len(rows))
    with pytest.raises(ShardChangedError):
        window.verify()


def shared_source(tmp_path: Path, fails: int = 0) -> tuple[BlockSource, CountedReader, Made]:
    made = make_parquet(tmp_path)
    reader = CountedReader(fails)
    return replace(made.open().source(is_awaited=True), reader=reader), reader, made


def opened_twice(source: BlockSource, rows: RowReader) -> list[OpenRows]:
    """The first rows of two blocks, for two who need them."""
    every = np.arange(2)
    return [rows.open(source, every, every, np.zeros(2, np.int64), every, share="few") for _ in range(2)]


def test_a_block_that_is_decoded_whole_is_read_once_for_all_who_need_it_meanwhile(
    tmp_path: Path, arena: Arena
) -> None:
    source, reader, made = shared_source(tmp_path)
    shared = RowReader(arena)
    first, second = opened_twice(source, shared)
    for rows in (first, second):
        read(rows)
    starts = [int(at) for at in source.catalog.blocks.first_sample[:2]]
    dataset = made.open()
    for rows in (first, second):
        assert built(dataset, rows.parts, arena, 2) == [made.samples[at] for at in starts]
    once = len(reader.reads)
    assert once == len(set(reader.reads))
    for rows in (first, second):
        rows.close()
    assert not shared._used  # they go by their references, whether the collector comes or not
    read(opened_twice(source, shared)[0])
    assert len(reader.reads) == 2 * once


@pytest.mark.parametrize(("keep_bytes", "keep_blocks", "kept"), [(0, 0, 0), (0, 1, 1), (1 << 30, 0, 2)])
def test_so_many_blocks_stay_for_those_who_come_later(
    tmp_path: Path, arena: Arena, keep_bytes: int, keep_blocks: int, kept: int
) -> None:
    source, _, _ = shared_source(tmp_path)
    shared = RowReader(arena, keep_bytes=keep_bytes, keep_blocks=keep_blocks)
    for rows in opened_twice(source, shared):
        rows.close()
    gc.collect()
    assert len(shared._used) == kept


def test_who_comes_after_a_read_that_failed_reads_again(tmp_path: Path, arena: Arena) -> None:
    source, _, _ = shared_source(tmp_path, fails=1)
    first, second = opened_twice(source, RowReader(arena))
    with pytest.raises(ShardReadError, match="not now"):
        first.reads()[0]()
    read(second)
    assert len(second.parts[0].window.staged) == len(source.outputs)


def test_several_samples_at_once_are_read_in_one_request_where_they_are_neighbours(tmp_path: Path) -> None:
    made = make_tokens_bin(tmp_path)
    dataset, reader = in_memory(made), CountedReader()
    open_source = dataset.source
    dataset.source = lambda **given: replace(open_source(**given), reader=reader)  # type: ignore[method-assign]
    block = dataset.catalog.block(1)
    samples = list(range(block.first_sample, block.first_sample + block.num_samples))
    assert len(samples) > 1
    assert [sample["tokens"].tolist() for sample in dataset.__getitems__(samples[::-1])] == [
        made.samples[at]["tokens"] for at in samples[::-1]
    ]
    assert len(reader.reads) == 1
