"""TFRecord: records with their length before and checksums behind each, most often `tf.train.Example`.

    length u8 | masked CRC-32C of it u4 | record | masked CRC-32C of the record u4

Indexing walks from header to header and learns what the features hold; of large records it passes over the
byte strings, so that these cost little more than the members of a tar. A file that is compressed as a whole
(gzip or zlib, told by its first bytes, as its name need not say so) is one block. A block's index is the
sizes of its records, so decoding needs no walk; it verifies every checksum.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Block, Shard, ShardScan
from sharding.compression import compression_of, decompress, open_decompressed
from sharding.core.library import address_of, library
from sharding.errors import CorruptShardError
from sharding.formats.records.record_columns import (
    RecordFormat,
    RecordLearner,
    Records,
    footer_of,
    footer_value,
)
from sharding.formats.records.sparse_copy import SPARSE_MEAN_BYTES, SparseCopy
from sharding.spans import Bytes, Ints, numbers_at

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
        compression = _compression(file, shard)
        plain = file if compression is None else open_decompressed(file, shard.url, kind=compression)
        learner, offsets, sizes = RecordLearner(shard), list[int](), list[Ints]()
        for offset, records in _RunReader(plain, shard, block_bytes, compression is not None).runs(learner):
            offsets.append(offset)
            sizes.append(records.sizes)
            learner.add(records)
            if compression and sum(map(len, sizes)) > self.max_records:
                reason = f"more than {self.max_records} records in a compressed file"
                cure = "accept more with format=TFRecordFormat(max_records=...)"
                raise shard.corrupt(f"{reason}; {cure}", offset)
        nbytes, lengths = learner.decoded_bytes(), [int(run.sum()) + _AROUND * len(run) for run in sizes]
        if compression and sizes:
            offsets, lengths, nbytes, sizes = [0], [shard.size], [sum(nbytes)], [np.concatenate(sizes)]
        return ShardScan(
            offset=np.array(offsets, np.int64),
            length=np.array(lengths, np.int64),
            nbytes=np.array(nbytes, np.int64),
            num_samples=np.array([len(run) for run in sizes], np.int64),
            schema=learner.schema(),
            index=[run.astype("<u4").tobytes() for run in sizes],
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
        if (numbers_at(buffer, starts - _HEADER.size, "<u8") != sizes.astype(np.uint64)).any():
            raise block.corrupt(
                "shard changed or corrupt: the length of a record is not the one that was indexed"
            )
        wrong = _wrong_checksums(buffer, starts, sizes)
        if len(wrong):
            number, offset = int(wrong[0]), int(starts[wrong[0]]) - _HEADER.size
            reason = f"the checksum of record {block.first_in_shard + number} is wrong"
            raise block.shard.corrupt(reason, block.offset + offset, stage="decode")
        return Records(buffer, starts, sizes)

    def sample_offsets(self, block: Block, data: memoryview | None) -> Ints:
        """Return where the records' headers lie, of a compressed file in what it decompresses to."""
        sizes = _sizes(block) + _AROUND
        return np.asarray(block.offset + np.cumsum(sizes) - sizes)


def _masked(data: Bytes, starts: Ints, sizes: Ints) -> NDArray[np.uint32]:
    """The checksums of spans as the file has them, [n] uint32: rotated, and a number added."""
    starts, sizes = np.ascontiguousarray(starts), np.ascontiguousarray(sizes)
    crc = np.empty(len(starts), np.uint32)
    spans = (address_of(starts), address_of(sizes), len(starts), address_of(crc))
    if library().core_crc32c(address_of(data), len(data), *spans, False):
        raise ValueError("a span lies outside of the data")
    return (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK)


def _masked_length(length: bytes | memoryview) -> int:
    return int(_masked(np.frombuffer(length, np.uint8), np.zeros(1, np.int64), np.array([8]))[0])


def _compression(file: BinaryIO, shard: Shard) -> str | None:
    """Return how the file is compressed: by its name, or by its first bytes if these are no record's."""
    if (named := compression_of(shard.url)) is not None:
        return named
    file.seek(0)
    head = file.read(_HEADER.size)
    if len(head) == _HEADER.size and _masked_length(head[:8]) == _HEADER.unpack(head)[1]:
        return None
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    return "zlib" if head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 else None


class _RunReader:
    """Reads a file from header to header, in runs of whole records: as many as so many bytes hold, or one.

    Args:
        file: what is read, decompressed.
        shard: the context that errors name.
        run_bytes: bytes of a run.
        is_compressed: whether the file can only be read from its beginning to its end.
    """

    def __init__(self, file: BinaryIO, shard: Shard, run_bytes: int, is_compressed: bool) -> None:
        self._file, self._shard, self._run_bytes = file, shard, run_bytes
        self._is_compressed = is_compressed

    def runs(self, learner: RecordLearner) -> Iterator[tuple[int, Records]]:
        """(offset, records) of each run; of large records only what `learner` looks at, if that can be."""
        offset, ahead, num_bytes = 0, b"", self._run_bytes
        while ahead := self._filled(offset, ahead, num_bytes):
            starts, sizes, end, whole = self._walk(ahead, offset)
            wrong = _wrong_checksums(np.frombuffer(ahead, np.uint8), starts, sizes)
            if len(wrong):
                start = int(starts[wrong[0]]) - _HEADER.size
                raise self._corrupt("the checksum of this record is wrong", offset + start)
            if len(starts):
                yield offset, Records(np.frombuffer(ahead, np.uint8)[:end], starts, sizes)
            elif len(ahead) < num_bytes:
                raise self._corrupt(f"ends within this record, {whole - len(ahead)} bytes too early", offset)
            is_sparse = not self._is_compressed and end > SPARSE_MEAN_BYTES * len(starts)
            offset, ahead, num_bytes = offset + end, ahead[end:], max(self._run_bytes, whole - end)
            while is_sparse and (records := self._sparse_run(offset, learner)):
                yield offset, records
                offset, ahead, num_bytes = offset + len(records.data), b"", self._run_bytes
                is_sparse = len(records.data) > SPARSE_MEAN_BYTES * len(records.sizes)

    def _filled(self, offset: int, ahead: bytes, num_bytes: int) -> bytes:
        """Read so many bytes from `offset` on, fewer only at the end, where the first of them are there."""
        self._file.seek(offset + len(ahead))
        pieces, missing = [ahead], num_bytes - len(ahead)
        # Decompressing readers give less at a time.
        while missing > 0 and (piece := self._file.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def _walk(self, data: bytes, offset: int) -> tuple[Ints, Ints, int, int]:
        """The records that are whole in `data`: starts and sizes; where the last ends, and the next would.

        Raises `CorruptShardError`, where the length of the next one is wrong.
        """
        table, buffer = np.empty((2, len(data) // _AROUND), np.int64), np.frombuffer(data, np.uint8)
        room = (address_of(table), address_of(table[1:]), table.shape[1])
        count = library().core_tfrecords(address_of(buffer), len(data), *room)
        starts, sizes = table[:, :count].copy()
        end = int(starts[-1] + sizes[-1]) + _CRC_BYTES if count else 0
        stop = end + _HEADER.size
        if stop <= len(data):
            stop = end + _AROUND + self._length(memoryview(data), end, offset)
        return starts, sizes, end, stop

    def _sparse_run(self, offset: int, learner: RecordLearner) -> Records | None:
        """A run of records of which only what says what they hold is read; None: there are no more."""
        left = self._file.seek(0, io.SEEK_END) - offset
        run = SparseCopy(self._file, offset, min(left, self._run_bytes))
        start, spans = 0, list[tuple[int, int]]()
        while start < len(run.data):
            stop = start + _HEADER.size
            if stop <= len(run.data):
                run.need(start, stop)
                length = self._length(run.data.data, start, offset)
                stop = start + _AROUND + length
            if stop > left:
                raise self._corrupt(f"ends within this record, {stop - left} bytes too early", offset + start)
            if stop > len(run.data):
                if spans:
                    break
                run = SparseCopy(self._file, offset, stop)
                continue
            if learner.looks_into_records:
                run.need_structure(start + _HEADER.size, stop - _CRC_BYTES)
            spans.append((start + _HEADER.size, length))
            start = stop
        starts, sizes = np.array(spans, np.int64).reshape(-1, 2).T
        return Records(run.data[:start], starts, sizes) if spans else None

    def _length(self, data: memoryview, start: int, offset: int) -> int:
        """The length of a record by its header, whose checksum is verified."""
        length, crc = _HEADER.unpack_from(data, start)
        if _masked_length(data[start : start + 8]) != crc:
            what = "no TFRecord file: " if offset + start == 0 else ""
            raise self._corrupt(f"{what}the checksum of this record's length is wrong", offset + start)
        if length > _MOST_BYTES:
            raise self._corrupt(f"a record of {length} bytes; at most 2 GiB are read", offset + start)
        return int(length)

    def _corrupt(self, reason: str, offset: int) -> CorruptShardError:
        return CorruptShardError(self._shard.url, reason, offset)


def _wrong_checksums(data: Bytes, starts: Ints, sizes: Ints) -> Ints:
    """Return which records have another checksum than the one behind them."""
    return np.flatnonzero(numbers_at(data, starts + sizes, "<u4") != _masked(data, starts, sizes))


def _sizes(block: Block) -> Ints:
    return np.frombuffer(block.index, "<u4", block.num_samples).astype(np.int64)
