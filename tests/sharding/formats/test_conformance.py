"""What every format keeps, a row a format: a small dataset's blocks in whole, in part, cut short and damaged.

What only one format has is in its own file.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pytest
from datasets_kit import MAKERS, Make
from formats_kit import rows_of

from dataflow import DataLoader, ShardedDataset
from sharding.blocks import Block, ColumnSpec, Format, Masked, Shard, ShardScan, Spans
from sharding.errors import CorruptShardError, ShardError
from sharding.formats.arrow.columns import TabularFormat

ROW_BYTES, ROWS = 16, 100
NOISE = 0xA5
CUTS = 17


class FloatRows(Format):
    """A user's own: rows of numbers that lie where `locate` says."""

    name = "float-rows"
    locates_numbers = True

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        if shard.size % ROW_BYTES:
            raise CorruptShardError(shard.url, "a row is cut", shard.size)
        starts = np.arange(0, shard.size, block_bytes // ROW_BYTES * ROW_BYTES)
        lengths = np.diff(starts, append=shard.size)
        schema = {"x": ColumnSpec("fixed", "float32", (4,))}
        return ShardScan(starts, lengths, lengths, lengths // ROW_BYTES, schema=schema)

    def decode(self, block: Block, data: Any, columns: Sequence[str] | None) -> dict[str, Any]:
        if len(data) != block.length or {*(columns or ())} - {"x"}:
            reason = "no column 'z'; the shard has x"
            raise CorruptShardError(block.shard.url, reason, block.offset, stage="decode")
        rows = np.frombuffer(data, np.float32).reshape(-1, 4)
        return {"x": rows} if columns is None or columns else {}

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans]:
        starts = np.arange(block.num_samples) * ROW_BYTES
        spans = Spans(np.empty(0, np.uint8), starts, np.full(len(starts), ROW_BYTES))
        return {"x": spans} if columns is None or columns else {}


def float_rows(folder: Path) -> ShardedDataset:
    np.arange(4 * ROWS, dtype=np.float32).tofile(folder / "a.rows")
    return ShardedDataset(f"{folder}/a.rows", format=FloatRows(), block_bytes=20 * ROW_BYTES)


class Stored(NamedTuple):
    """A dataset's format, its blocks with their bytes, and the columns that all samples may have."""

    codec: Format
    blocks: list[tuple[Block, bytes]]
    names: list[str]


LISTED = {"megatron", "mds", "litdata"}
"""What a shard of these holds, an index beside it tells; their own files cut them."""
ENDS_ANYWHERE = {"jsonl", "tfrecord", "tokens", "files", "float-rows"}
OF_TABLES = {"delta", "iceberg"}
"""Whose shards are Parquet's."""


@pytest.fixture(params=[*(name for name in MAKERS if name not in OF_TABLES), "float-rows"])
def stored(request: pytest.FixtureRequest, made: Make, tmp_path: Path) -> Stored:
    dataset = float_rows(tmp_path) if request.param == "float-rows" else made(request.param).open()
    catalog = dataset.catalog
    blocks = [catalog.block(number) for number in range(catalog.num_blocks)]
    bytes_of = {block.shard.url: Path(block.shard.url).read_bytes() for block in blocks}
    parts = [(block, bytes_of[block.shard.url][block.offset :][: block.length]) for block in blocks]
    return Stored(dataset.codec, parts, [*catalog.schema])


def decoded(stored: Stored, block: Block, data: bytes, columns: Sequence[str] | None) -> dict[str, Any]:
    return dict(stored.codec.decode(block, memoryview(data), columns))


def test_columns_alone_and_in_any_order_are_those_of_all(stored: Stored) -> None:
    """And take no other bytes than those that are selected for them."""
    for block, data in stored.blocks:
        whole = decoded(stored, block, data, None)
        rows = rows_of([whole])
        for chosen in (list(whole), list(whole)[::-1], list(whole)[:1], list(whole)[-1:]):
            read = bytearray([NOISE]) * block.length
            for offset, length in stored.codec.select(block, chosen):
                at = offset - block.offset
                assert 0 <= at <= at + length <= block.length
                read[at : at + length] = data[at : at + length]
            part = decoded(stored, block, bytes(read), chosen)
            assert list(part) == chosen
            assert rows_of([part]) == [{name: row[name] for name in chosen} for row in rows]
        assert decoded(stored, block, data, []) == {}
        assert stored.codec.locate(block, []) in (None, {})


def arrays_in(columns: dict[str, Any]) -> Iterator[np.ndarray]:
    for column in columns.values():
        if isinstance(column, Spans):
            yield from (column.buffer, column.starts, column.lengths)
        elif isinstance(column, Masked):
            yield from (column.values, column.lacks)
        else:
            yield column


def test_what_is_decoded_keeps_the_promises_of_the_index(stored: Stored) -> None:
    for block, data in stored.blocks:
        columns = decoded(stored, block, data, None)
        assert all(len(column) == block.num_samples for column in columns.values())
        arrays = {array.ctypes.data: array.nbytes for array in arrays_in(columns)}  # some share memory
        if isinstance(stored.codec, TabularFormat):  # columns of others are views of the block
            assert sum(arrays.values()) <= block.nbytes


def test_values_lie_where_they_are_located(stored: Stored) -> None:
    for block, data in stored.blocks:
        columns = decoded(stored, block, data, None)
        for name, spans in (stored.codec.locate(block, list(columns)) or {}).items():
            assert len(spans) == block.num_samples
            column = columns[name]
            for i, (start, length) in enumerate(zip(spans.starts, spans.lengths, strict=True)):
                if length >= 0:
                    value = column.value(i) if isinstance(column, Spans) else column[i]
                    assert value.tobytes() == data[start : start + length]


def test_a_column_that_is_not_there_is_an_error_that_lists_those_there_or_missing(stored: Stored) -> None:
    """Missing where samples name their own columns."""
    block, data = stored.blocks[0]
    if stored.codec.name in ("tar", "files"):
        column = decoded(stored, block, data, ["z"])["z"]
        assert isinstance(column, Spans)
        assert (column.lengths < 0).all()
    else:
        first = stored.names[0].partition(".")[0]
        with pytest.raises(CorruptShardError, match=f"no column 'z'; the shard has {first}"):
            decoded(stored, block, data, ["z"])


def test_too_few_bytes_of_a_block_are_an_error_of_its_shard(stored: Stored) -> None:
    block, data = stored.blocks[-1]
    for size in (0, len(data) // 3, len(data) // 2):
        with pytest.raises(CorruptShardError) as caught:
            decoded(stored, block, data[:size], None)
        assert (caught.value.shard, caught.value.stage) == (block.shard.url, "decode")


def test_a_shard_that_is_cut_is_refused_or_has_its_first_samples(
    stored: Stored, request: pytest.FixtureRequest
) -> None:
    """Lines, records and tokens may end anywhere; of nothing else is a part taken for the whole."""
    block = stored.blocks[0][0]
    if stored.codec.name in LISTED:
        return
    content = Path(block.shard.url).read_bytes()
    whole = samples_in(stored.codec, block, content)
    num_cuts = len(content) if request.config.getoption("--full") else CUTS
    cuts = {*range(0, len(content), max(1, len(content) // num_cuts)), len(content) - 1}
    for cut in sorted(cuts):
        part = samples_in(stored.codec, block, content[:cut])
        assert part in (None, whole) or (stored.codec.name in ENDS_ANYWHERE and part < (whole or 0)), cut


def samples_in(codec: Format, block: Block, content: bytes) -> int | None:
    """How many samples are indexed; None: it is refused."""
    shard = Shard(block.shard.url, len(content), "etag:1")
    try:
        return int(codec.scan(io.BytesIO(content), shard, block_bytes=1 << 20).num_samples.sum())
    except CorruptShardError as caught:
        error = caught
    assert (error.shard, error.stage) == (shard.url, "index")
    return None


def test_damage_raises_an_error_of_the_library_or_leaves_values_inside_of_their_buffers(
    stored: Stored,
) -> None:
    rng = np.random.default_rng(7)
    for block, data in stored.blocks[:3]:
        for at in rng.integers(0, len(data), 12):
            broken = bytearray(data)
            broken[at] ^= int(rng.integers(1, 256))
            with contextlib.suppress(ShardError):
                for column in decoded(stored, block, bytes(broken), None).values():
                    if isinstance(column, Spans):
                        there, size = column.lengths >= 0, column.dtype.itemsize if column.element else 1
                        ends = (column.starts + column.lengths * size)[there]
                        assert (column.starts[there] >= 0).all()
                        assert (ends <= len(column.buffer)).all()


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 1}, {"num_workers": 0}])
def test_rows_of_a_users_own_format_are_delivered_as_they_are_stored(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    dataset = float_rows(tmp_path)
    stored = np.arange(4 * ROWS, dtype=np.float32).reshape(-1, 4)
    with DataLoader(dataset, batch_size=7, **options) as loader:
        rows = [row for batch in loader for row in batch["x"].tolist()]
    assert sorted(rows) == stored.tolist()
    assert dataset[41]["x"].tolist() == stored[41].tolist()
