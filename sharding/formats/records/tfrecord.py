"""TFRecord: records with their length before and checksums behind each, most often `tf.train.Example`.

    length u8 | masked CRC-32C of it u4 | record | masked CRC-32C of the record u4

Indexing walks from header to header and learns what the features hold. A file that is compressed as a whole
(gzip or zlib, told by its first bytes, as its name need not say so) is one block. A block's index is the
sizes of its records, so decoding needs no walk; it verifies every checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from sharding.blocks import Block, Shard, ShardScan
from sharding.compression import compression_of, decompress, open_decompressed
from sharding.errors import CorruptShardError
from sharding.formats.records.record_columns import (
    RecordFormat,
    RecordLearner,
    Records,
    footer_of,
    footer_value,
)
from sharding.formats.records.spans import numbers_at
from sharding.formats.records.wire import Ints

_HEADER = struct.Struct("<QI")
_CRC_BYTES = 4
_AROUND = _HEADER.size + _CRC_BYTES
"""The bytes that a record takes beside its own."""
_MASK = 0xA282EAD8
_MOST_BYTES = (2 << 30) - 1
"""The bytes of a record, at most: a protobuf message can have no more."""


class TFRecordFormat(RecordFormat):
    """The `Format` of TFRecord files; stateless and thread-safe.

    Args:
        max_records: records of a compressed file that indexing accepts; each takes some bytes of memory.
    """

    name = "tfrecord"
    has_empty_samples = False

    def __init__(self, *, max_records: int = 10_000_000) -> None:
        if not isinstance(max_records, int) or max_records < 1:
            raise ValueError(f"max_records must be an integer >= 1, got {max_records!r}")
        self.max_records = max_records

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index one shard; see `Format.scan`.

        Raises:
            CorruptShardError: a checksum is wrong, or the file ends within a record; offsets count bytes of
                the decompressed file.
        """
        checksum, compression = _checksum(), _compression(file, shard)
        file.seek(0)
        plain = file if compression is None else open_decompressed(file, shard.url, kind=compression)
        learner, offsets, sizes = RecordLearner(shard), list[int](), list[Ints]()
        for offset, records in _runs(plain, shard, block_bytes, checksum):
            offsets.append(offset)
            sizes.append(records.sizes)
            learner.add(records)
            if compression and sum(map(len, sizes)) > self.max_records:
                reason = f"more than {self.max_records} records in a compressed file"
                cure = "accept more with format=TFRecordFormat(max_records=...)"
                raise CorruptShardError(shard.url, f"{reason}; {cure}", offset)
        nbytes, lengths = learner.decoded_bytes(), [int(run.sum()) + _AROUND * len(run) for run in sizes]
        if compression and sizes:
            offsets, lengths, nbytes, sizes = [0], [shard.size], [sum(nbytes)], [np.concatenate(sizes)]
        return ShardScan(
            offset=np.array(offsets, np.int64),
            length=np.array(lengths, np.int64),
            nbytes=np.array(nbytes, np.int64),
            num_samples=np.array([len(run) for run in sizes], np.int64),
            schema=learner.schema(),
            index=[_packed(run) for run in sizes],
            footer=footer_of(learner, compression=compression),
            missing=learner.missing(),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block's records take other bytes than it has."""
        super().check(block)
        if len(block.index) != 4 * block.num_samples:
            raise ValueError(f"an index of {len(block.index)} bytes for {block.num_samples} records")
        stored = int((sizes := _sizes(block)).sum()) + _AROUND * len(sizes)
        is_plain = footer_value(bytes(block.footer), "compression") is None
        if stored > block.nbytes or (is_plain and stored != block.length):
            raise ValueError(f"{len(sizes)} records of {stored} bytes in {block.length}")

    def records(self, block: Block, data: memoryview) -> Records:
        """Find the records of a block, and verify their checksums."""
        compression = footer_value(bytes(block.footer), "compression")
        if compression is not None:
            data = decompress(data, block.shard.url, limit_bytes=block.nbytes, kind=compression)
        sizes = _sizes(block)
        ends = np.cumsum(sizes + _AROUND)
        if len(data) != ends[-1]:
            raise block.corrupt(f"{len(data)} bytes where {ends[-1]} were indexed")
        buffer, starts = np.frombuffer(data, np.uint8), ends - sizes - _CRC_BYTES
        if (numbers_at(buffer, starts - _HEADER.size, "<u8")[:, 0] != sizes.astype(np.uint64)).any():
            raise block.corrupt(
                "shard changed or corrupt: the length of a record is not the one that was indexed"
            )
        wrong = _wrong_checksums(data, starts, sizes, _checksum())
        if len(wrong):
            number, offset = int(wrong[0]), int(starts[wrong[0]]) - _HEADER.size
            reason = f"the checksum of record {block.first_in_shard + number} is wrong"
            raise CorruptShardError(block.shard.url, reason, block.offset + offset, stage="decode")
        return Records(buffer, starts, sizes)

    def sample_offsets(self, block: Block, data: memoryview | None) -> Ints:
        """Return where the records' headers lie, of a compressed file in what it decompresses to."""
        sizes = _sizes(block) + _AROUND
        return np.asarray(block.offset + np.cumsum(sizes) - sizes)


Checksum = Callable[[memoryview], int]


def _checksum() -> Checksum:
    """Return the function that computes a CRC-32C; 0.25 us a call, and 25 GB/s."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        raise ImportError("reading TFRecord files needs `pip install 'dataflow-loader[tfrecord]'`") from error
    function: Checksum = crc32c
    return function


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _compression(file: BinaryIO, shard: Shard) -> str | None:
    """Return how the file is compressed: by its name, or by its first bytes if these are no record's."""
    if (named := compression_of(shard.url)) is not None:
        return named
    file.seek(0)
    head = file.read(_HEADER.size)
    if len(head) == _HEADER.size and _masked(_checksum()(memoryview(head)[:8])) == _HEADER.unpack(head)[1]:
        return None
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    return "zlib" if head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 else None


def _runs(file: BinaryIO, shard: Shard, run_bytes: int, checksum: Checksum) -> Iterator[tuple[int, Records]]:
    """(offset, records) over a whole file: as many whole records as so many bytes hold, at least one."""
    offset, data, wanted = 0, b"", run_bytes
    while data := data + _read(file, wanted - len(data)):
        starts, sizes, end, whole = _walk(data, offset, shard, checksum)
        wrong = _wrong_checksums(memoryview(data), starts, sizes, checksum)
        if len(wrong):
            at = offset + int(starts[wrong[0]]) - _HEADER.size
            raise CorruptShardError(shard.url, "the checksum of this record is wrong", at)
        if len(starts):
            yield offset, Records(np.frombuffer(data, np.uint8)[:end], starts, sizes)
        elif len(data) < wanted:
            reason = f"ends within this record, {whole - len(data)} bytes too early"
            raise CorruptShardError(shard.url, reason, offset)
        offset, data, wanted = offset + end, data[end:], max(run_bytes, whole - end)


def _walk(data: bytes, offset: int, shard: Shard, checksum: Checksum) -> tuple[Ints, Ints, int, int]:
    """The records that are whole in `data`: starts, sizes, where the last ends; where the next one would."""
    view, at, found = memoryview(data), 0, list[tuple[int, int]]()
    while (stop := at + _HEADER.size) <= len(data):
        length, crc = _HEADER.unpack_from(data, at)
        if _masked(checksum(view[at : at + 8])) != crc:
            what = "no TFRecord file: " if offset + at == 0 else ""
            raise CorruptShardError(
                shard.url, f"{what}the checksum of this record's length is wrong", offset + at
            )
        if length > _MOST_BYTES:
            raise CorruptShardError(
                shard.url, f"a record of {length} bytes; at most 2 GiB are read", offset + at
            )
        stop = at + _AROUND + length
        if stop > len(data):
            break
        found.append((at + _HEADER.size, length))
        at = stop
    starts, sizes = np.array(found, np.int64).reshape(-1, 2).T
    return starts, sizes, at, stop


def _wrong_checksums(data: memoryview, starts: Ints, sizes: Ints, checksum: Checksum) -> Ints:
    """Return which records have another checksum than the one behind them.

    One call a record: no library takes many at once, and numpy would take twenty times as long.
    """
    spans = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    crc = np.array([checksum(data[start:end]) for start, end in spans], np.uint32)
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK)
    return np.flatnonzero(numbers_at(np.frombuffer(data, np.uint8), starts + sizes, "<u4")[:, 0] != masked)


def _packed(sizes: Ints) -> bytes:
    """Sizes of records, which are below 4 GiB."""
    return sizes.astype("<u4").tobytes()


def _sizes(block: Block) -> Ints:
    return np.frombuffer(block.index, "<u4", block.num_samples).astype(np.int64)


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """Read that many bytes, fewer only at the end; decompressing readers give less at a time."""
    pieces = []
    while num_bytes > 0 and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
