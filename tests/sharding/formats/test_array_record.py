"""ArrayRecord files that array_record wrote, and what of them is damaged."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats.records_kit import CountingFile, expected, fixture, values_in, varint, written_anew
from formats_kit import blocks_of, decoded_blocks, scan_of, shard_of
from numpy.typing import NDArray
from parameters_kit import in_full

from dataflow import DataLoader, ShardedDataset
from sharding.blocks import ColumnSpec
from sharding.errors import CorruptShardError, DataflowError
from sharding.formats.records.array_record import ArrayRecordFormat, _plain_records
from sharding.formats.records.riegeli_blocks import BLOCK, without_headers

URL = "a.array_record"
COMPRESSIONS = ("uncompressed", "brotli", "zstd", "snappy")
CHUNK = 64
"""Byte at which the first chunk begins, behind the signature."""


def decoded(content: bytes, block_bytes: int = 2000, **more: Any) -> list[dict[str, Any]]:
    return values_in(decoded_blocks(ArrayRecordFormat(), content, URL, block_bytes=block_bytes, **more))


def changed(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


@pytest.mark.parametrize(
    "name", ["default", *(f"{how}-{group}" for how in COMPRESSIONS for group in (1, 16))]
)
def test_examples_are_those_that_tensorflow_parses(name: str) -> None:
    assert decoded(fixture("array_record", f"{name}.array_record")) == expected("array_record", "examples")


@pytest.mark.full
@pytest.mark.timeout(180)
def test_what_the_installed_owner_writes_is_what_it_parses(tmp_path: Path) -> None:
    if not find_spec("array_record"):
        pytest.skip("array_record is not installed")
    written_anew("array_record", tmp_path)
    for name in ("default", *(f"{how}-{group}" for how in COMPRESSIONS for group in (1, 16))):
        content = fixture("array_record", f"{name}.array_record", tmp_path)
        assert decoded(content) == expected("array_record", "examples", tmp_path)


def test_chunks_at_every_64_kib_and_blocks_of_one_chunk_are_read() -> None:
    rows = decoded(fixture("array_record", "padded.array_record"), block_bytes=1)
    assert rows == expected("array_record", "examples")[:6]


@pytest.mark.parametrize("how", ["uncompressed", "zstd"])
def test_records_that_headers_interrupt_are_whole(how: str) -> None:
    rows = decoded(fixture("array_record", f"crossing-{how}.array_record"), block_bytes=100_000)
    assert [row["record"][0] for row in rows] == [bytes([i]) * (30_000 + i) for i in range(12)]


def test_records_that_are_no_examples_are_a_column_of_bytes() -> None:
    rows = decoded(fixture("array_record", "raw.array_record"))
    assert [row["record"][0] for row in rows] == expected("array_record", "raw")


def test_a_folder_is_trained_on(tmp_path: Path) -> None:
    for shard, name in enumerate(("zstd-1", "uncompressed-16", "none")):
        path = tmp_path / f"train.array_record-{shard:05d}-of-00003"
        path.write_bytes(fixture("array_record", f"{name}.array_record"))
    dataset = ShardedDataset(str(tmp_path), columns=["label", "box"], block_bytes=2000)
    wanted = expected("array_record", "examples") * 2
    with DataLoader(dataset, batch_size=9) as loader:
        batches = list(loader)
    assert [n for batch in batches for n in batch["label"].tolist()] == [row["label"][0] for row in wanted]
    assert [row for batch in batches for row in batch["box"].tolist()] == [row["box"] for row in wanted]
    assert dataset[47]["label"] == wanted[47]["label"][0]


def test_a_file_without_records_alone_is_an_empty_dataset(tmp_path: Path) -> None:
    (tmp_path / URL).write_bytes(fixture("array_record", "none.array_record"))
    with pytest.raises(DataflowError, match="no samples"):
        ShardedDataset(str(tmp_path))


def test_transposed_chunks_are_refused_with_the_option_to_write_without() -> None:
    with pytest.raises(CorruptShardError, match=r"transposed.*transpose:false"):
        scan_of(ArrayRecordFormat(), fixture("array_record", "transposed.array_record"), URL)


def test_long_byte_strings_are_passed_over_when_indexed() -> None:
    content = fixture("array_record", "long.array_record")
    file = CountingFile(content)
    scan = ArrayRecordFormat().scan(file, shard_of(content, URL), block_bytes=1 << 20)
    assert file.num_bytes - 2 * (1 << 16) < len(content) / 5
    assert file.num_reads < 2 * 12 + 10
    of = partial(ColumnSpec, is_repeated=True)
    sizes = (200_000, 200_011)
    assert scan.schema == {
        "image": of("bytes", size_range=sizes),
        "label": of("fixed", "int64"),
        "name": of("bytes", size_range=(1, 2)),
    }
    rows = decoded(content, 1 << 20)
    wanted = [{"image": [bytes([i]) * (200_000 + i)], "label": [i], "name": [b"%d" % i]} for i in range(12)]
    assert rows == wanted


@pytest.mark.parametrize(
    "name", ["uncompressed-1", "uncompressed-16", "zstd-16", "raw", "crossing-uncompressed"]
)
def test_passing_over_byte_strings_finds_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = fixture("array_record", f"{name}.array_record")
    whole = scan_of(ArrayRecordFormat(), content, URL, 2000)
    monkeypatch.setattr("sharding.formats.records.array_record.SPARSE_MEAN_BYTES", 0)
    monkeypatch.setattr("sharding.formats.records.sparse_copy.AHEAD_BYTES", 16)
    monkeypatch.setattr("sharding.formats.records.sparse_copy._SHORT_BYTES", 2)
    sparse = scan_of(ArrayRecordFormat(), content, URL, 2000)
    assert (sparse.schema, sparse.missing, sparse.index) == (whole.schema, whole.missing, whole.index)
    assert sparse.nbytes.tolist() == whole.nbytes.tolist()
    damaged = fixture("array_record", "uncompressed-16.array_record")
    for at, new, message in DAMAGE.values():
        with pytest.raises(CorruptShardError, match=message):
            scan_of(
                ArrayRecordFormat(),
                changed(damaged, CHUNK + at, new),
                URL,
            )


# ---- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"x", bytes(200), bytes(1 << 17), fixture("tfrecord", "plain.tfrecord")])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(CorruptShardError, match=r"no ArrayRecord file|truncated|unknown type"):
        scan_of(ArrayRecordFormat(), content, URL)


@pytest.mark.parametrize("end", [1, 65_536, 131_071])
def test_truncated_files_are_refused(end: int) -> None:
    with pytest.raises(CorruptShardError, match="truncated"):
        scan_of(ArrayRecordFormat(), fixture("array_record", "zstd-1.array_record")[:end], URL)


DAMAGE = {
    "bytes of data": (8, struct.pack("<Q", 1 << 40), "behind its block"),
    "type": (24, b"?", "unknown type 63"),
    "padding": (24, b"p", "padding stands"),
    "records": (25, b"\x02", "another number of records"),
    "bytes of records": (32, struct.pack("<Q", 5), "other sizes together"),
    "bytes of all": (32, struct.pack("<Q", 1 << 50), "more than 2 GiB"),
    "compression": (40, b"!", "unknown compression 33"),
    "bytes of sizes": (41, b"\xff\x7f", "list of sizes ends behind it"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_chunks_are_named_when_indexed_and_when_read(what: str) -> None:
    at, new, message = DAMAGE[what]
    whole = fixture("array_record", "uncompressed-16.array_record")
    damaged = changed(whole, CHUNK + at, new)
    with pytest.raises(CorruptShardError, match=message):
        scan_of(ArrayRecordFormat(), damaged, URL)
    block = blocks_of(scan_of(ArrayRecordFormat(), whole, URL), shard_of(whole, URL))[0]
    with pytest.raises(CorruptShardError, match=message):
        ArrayRecordFormat().decode(block, memoryview(damaged)[block.offset :][: block.length], None)


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_no_damage_is_another_error_than_the_library_s(how: str) -> None:
    whole = fixture("array_record", f"{how}-16.array_record")
    (block,) = blocks_of(scan_of(ArrayRecordFormat(), whole, URL, 1 << 20), shard_of(whole, URL))
    for at in range(0, block.length, 53):
        data = memoryview(changed(whole, CHUNK + at, b"\xff"))[block.offset :][: block.length]
        with contextlib.suppress(CorruptShardError):
            ArrayRecordFormat().decode(block, data, None)


@pytest.mark.parametrize("name", ["uncompressed-16", *in_full("uncompressed-1")])
def test_chunks_are_read_at_once_as_they_are_step_by_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, codec = fixture("array_record", f"{name}.array_record"), ArrayRecordFormat()
    blocks = blocks_of(scan_of(codec, whole, URL, 1 << 20), shard_of(whole, URL))
    changes = [(at, byte) for at in range(blocks[0].length) for byte in (b"", b"\0", b"\1", b"\xff")][::61]

    def outcomes() -> list[Any]:
        found = list[Any]()
        for at, byte in changes:
            data = memoryview(changed(whole, blocks[0].offset + at, byte))[blocks[0].offset :]
            try:
                records = codec.records(blocks[0], data[: blocks[0].length])
                found.append((bytes(records.data), records.starts.tolist(), records.sizes.tolist()))
            except CorruptShardError as error:
                found.append(str(error))
        return found

    at_once = outcomes()
    monkeypatch.setattr("sharding.formats.records.array_record._plain_records", lambda *_: None)
    assert outcomes() == at_once


def test_only_chunks_that_are_as_they_should_be_are_read_at_once() -> None:
    def chunk(**other: int) -> NDArray[np.uint8]:
        told = {
            "size": 8,
            "kind": ord("r"),
            "records": 2,
            "decoded": 4,
            "codec": 0,
            "listed": 2,
            "first": 3,
        } | other
        head = struct.pack("<QQQQQ", 0, told["size"], 0, told["kind"] | told["records"] << 8, told["decoded"])
        body = bytes([told["codec"], told["listed"], told["first"], 1]) + b"abcd"
        return np.frombuffer(head + body, np.uint8)

    def found(content: NDArray[np.uint8], at: int = 0, records: int = 2) -> list[int] | None:
        told = _plain_records(content, np.array([at]), np.array([records]))
        return None if told is None else [*told.starts.tolist(), *told.sizes.tolist()]

    assert found(chunk()) == [44, 47, 3, 1]
    two = np.array([[0, 2], [48, 2]])  # numbers that do not lie one behind the other
    told = _plain_records(np.concatenate([chunk(), chunk()]), two[:, 0], two[:, 1])
    assert told is not None
    assert told.starts.tolist() == [44, 47, 92, 95]
    assert found(chunk(size=9)) is found(chunk(size=7)) is found(chunk(size=1)) is None
    assert found(chunk(kind=ord("t"))) is found(chunk(codec=1)) is found(chunk(decoded=3)) is None
    assert (
        found(chunk(records=1))
        is found(chunk(records=1), records=1)
        is found(chunk(records=3), records=3)
        is None
    )
    assert found(chunk(listed=1)) is found(chunk(listed=3)) is found(chunk(listed=200)) is None
    assert found(chunk(first=2)) is found(chunk(first=4)) is found(chunk(first=200)) is None
    assert found(chunk(first=4, records=1), records=1) is None  # a size of no record is left
    assert found(chunk(), at=1) is found(chunk(), at=-1) is found(chunk()[:47]) is found(chunk()[:39]) is None


@pytest.mark.parametrize("size", [0, 1, 24, 25, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_headers_are_left_out_wherever_a_file_is_cut(size: int) -> None:
    content = bytes(i * 7 % 251 for i in range(size))
    for offset in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 24, 100_000):
        first = -offset % BLOCK
        kept = [byte for at, byte in enumerate(content) if at < first or (at - first) % BLOCK >= 24]
        assert without_headers(memoryview(content), offset).tobytes() == bytes(kept)


def test_a_footer_that_disagrees_with_itself_is_refused() -> None:
    whole = fixture("array_record", "uncompressed-16.array_record")
    block = blocks_of(scan_of(ArrayRecordFormat(), whole, URL, 1 << 20), shard_of(whole, URL))[0]
    footer = block.offset + block.length
    refused = 0
    for at in range(footer, footer + 100):
        try:
            scan_of(ArrayRecordFormat(), changed(whole, at, bytes([whole[at] ^ 1])), URL, 1 << 20)
        except CorruptShardError:
            refused += 1
    assert refused > 20  # hashes, and what writers say of themselves, are passed over


def test_an_index_that_does_not_fit_its_block_is_refused() -> None:
    whole = fixture("array_record", "uncompressed-16.array_record")
    block = blocks_of(scan_of(ArrayRecordFormat(), whole, URL, 1 << 20), shard_of(whole, URL))[0]
    ArrayRecordFormat().check(block)
    wrong = (
        replace(block, num_samples=39),
        replace(block, length=100),
        replace(block, index=block.index[:-4]),
    )
    for one in wrong:
        with pytest.raises(ValueError, match=r"chunk|buffer"):
            ArrayRecordFormat().check(one)


def test_a_part_that_would_be_larger_than_its_chunk_tells_is_not_decompressed():
    whole = fixture("array_record", "zstd-16.array_record")
    damaged = changed(whole, CHUNK + 32, (1).to_bytes(8, "little"))  # bytes of the records of the chunk
    with pytest.raises(CorruptShardError, match="larger than its chunk tells"):
        scan_of(ArrayRecordFormat(), damaged, URL)


@pytest.mark.parametrize("sparse_from", [0, 1 << 20])
@pytest.mark.parametrize("size", [(1 << 63) - 50, (1 << 64) - 3])
def test_a_list_of_sizes_so_long_that_sums_wrap_around_is_damage(
    size: int, sparse_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharding.formats.records.array_record.SPARSE_MEAN_BYTES", sparse_from)
    damaged = changed(fixture("array_record", "uncompressed-16.array_record"), CHUNK + 41, varint(size))
    with pytest.raises(CorruptShardError, match="list of sizes ends behind it"):
        scan_of(ArrayRecordFormat(), damaged, URL)
