"""ArrayRecord, the format of Grain and TFDS: chunks of riegeli, found by a footer.

    chunks of records | chunk of footers | at 64 KiB before the end: chunk of postscripts

A header of 24 bytes, which only repairs need, stands at every 64 KiB and interrupts whatever is there, so a
block's bytes are copied once without these. A chunk:

    hash u8 | bytes of data u8 | hash u8 | type u1, records u7 | bytes of records u8
    data: compression u1 | bytes of sizes, varint | sizes of records, varints | records one after the other

where sizes and records are compressed, each behind its decompressed size. A block is a run of chunks; its
index has where each begins, and its records. Transposed chunks, which riegeli makes of protobuf messages
field by field, are refused. Its hashes (HighwayHash) are not verified, as nothing but riegeli computes them
fast enough: damage is noticed where sizes, compression or Examples show it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import Block, Shard, ShardScan
from sharding.core.library import address_of, library
from sharding.errors import CorruptShardError
from sharding.formats.records.record_columns import RecordFormat, RecordLearner, Records, footer_of
from sharding.formats.records.riegeli_blocks import BLOCK, PlainFile, plain_positions, without_headers
from sharding.formats.records.sparse_copy import SPARSE_MEAN_BYTES, SparseCopy
from sharding.formats.records.wire import (
    SPAN,
    VARINT,
    WireError,
    fields,
    numbers_in,
    varints_at,
    whole_numbers,
)
from sharding.spans import Bytes, Ints, cuts_reaching, numbers_at

_HEADER = 40
_MAGIC = 0x71930E704FDAE05E
_SIMPLE, _TRANSPOSED = ord("r"), ord("t")
_CODECS = {ord("z"): "zstd", ord("s"): "snappy"}
_MOST_BYTES = (2 << 30) - 1
"""The bytes of a chunk's records, at most."""
_MOST_RECORDS = 1 << 24
"""Records of a block of compressed chunks, of which a few bytes may tell."""
_CHUNK = np.dtype([("at", "<u4"), ("records", "<u4")])
_REFUSED = {
    _TRANSPOSED: "its chunks are transposed, which is not read: write it with the option transpose:false",
    ord("p"): "a chunk of padding stands where the footer tells of records",
}
_Fail = Callable[[str], CorruptShardError]


class ArrayRecordFormat(RecordFormat):
    """The `Format` of ArrayRecord files; stateless and thread-safe."""

    name = "array_record"

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index one shard by its footer, and learn what its records hold; see `Format.scan`.

        Raises:
            CorruptShardError: it is no ArrayRecord file, is truncated or contradicts itself, or its chunks
                are transposed.
        """
        starts, counts = _read_footer(file, shard)
        cuts = cuts_reaching(starts, block_bytes)
        learner, indexes = RecordLearner(shard), list[bytes]()
        for first, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            offset, stop = starts[[first, end]].tolist()
            fail, index = _failure(shard, offset, "index"), np.empty(end - first, _CHUNK)
            index["at"], index["records"] = starts[first:end] - offset, counts[first:end]
            if stop - offset > SPARSE_MEAN_BYTES * counts[first:end].sum():
                learner.add(_sparse_records(file, starts[first : end + 1], counts[first:end], learner, fail))
            else:
                file.seek(offset)
                learner.add(_records(memoryview(file.read(stop - offset)), offset, index, fail))
            indexes.append(index.tobytes())
        return ShardScan(
            offset=starts[cuts[:-1]],
            length=np.diff(starts[cuts]),
            nbytes=np.array(learner.decoded_bytes(), np.int64),
            num_samples=np.add.reduceat(counts, cuts[:-1]) if len(counts) else counts,
            schema=learner.schema(),
            index=indexes,
            footer=footer_of(learner),
            missing=learner.missing(),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block's chunks lie outside it, or have other records than it has."""
        super().check(block)
        index = np.frombuffer(block.index, _CHUNK)
        heads = index["at"].astype(np.int64)
        if int(index["records"].sum(dtype=np.int64)) != block.num_samples:
            raise ValueError(f"chunks of other than {block.num_samples} records")
        if not len(heads) or heads[0] or (np.diff(heads) <= 0).any() or heads[-1] + _HEADER > block.length:
            raise ValueError(f"a chunk lies outside of {block.length} bytes")

    def records(self, block: Block, data: memoryview) -> Records:
        """Find the records of a block, decompressed."""
        if len(data) != block.length:
            raise block.corrupt(f"{len(data)} bytes where {block.length} were indexed")
        index = np.frombuffer(block.index, _CHUNK)
        return _records(data, block.offset, index, _failure(block.shard, block.offset, "decode"))


def _failure(shard: Shard, offset: int, stage: str) -> _Fail:
    return lambda reason: shard.corrupt(reason, offset, stage=stage)


def _read_footer(file: BinaryIO, shard: Shard) -> tuple[Ints, Ints]:
    """Return where chunks of records begin, and where the last one ends; how many records each has."""
    size = file.seek(0, io.SEEK_END)
    fail = _failure(shard, max(0, size - BLOCK), "index")
    not_one = "no ArrayRecord file, or truncated: it does not end in a postscript"
    if size < 2 * BLOCK or size % BLOCK:
        raise fail(not_one)
    try:
        postscript = _one_chunk(file, size - BLOCK, size, fail)
        footer_at, magic = _fields_of(postscript, 2)[0][0].tolist()
        if magic != _MAGIC or not 0 < footer_at < size - BLOCK:
            raise fail(not_one)
        fail = _failure(shard, footer_at, "index")
        footer = _one_chunk(file, footer_at, size - BLOCK, fail)
        size_of_facts, facts_at = (array[:1, 0] for array in _fields_of(footer, 1, SPAN))
        if not facts_at.any():
            raise WireError("it tells nothing of an ArrayRecord")
        facts = Records(footer.data, facts_at, size_of_facts)
        version, num_chunks, num_records = _fields_of(facts, 3)[0][0].tolist()
        table = _fields_of(footer, 3)[0][1:]
    except WireError as error:
        raise fail(f"a broken footer: {error}") from error
    if version != 1:
        raise fail(f"version {version} of ArrayRecord; only version 1 is known")
    starts, counts = np.append(table[:, 0], footer_at), table[:, 2]
    if len(counts) != num_chunks or ((counts <= 0) | (counts >> 32)).any() or counts.sum() != num_records:
        claim = f"{num_records} records in {num_chunks} chunks"
        raise fail(f"the footer tells {claim}, and lists {counts.sum()} in {len(counts)}")
    outside = (starts < 0) | (starts > footer_at)  # differences of such numbers may wrap around
    if outside.any() or (np.diff(starts) < _HEADER).any():
        raise fail("the chunks that the footer lists do not lie one behind the other")
    return starts, counts


def _one_chunk(file: BinaryIO, start: int, end: int, fail: _Fail) -> Records:
    """The records of a single chunk between two bytes of the file."""
    file.seek(start)
    return _records(memoryview(file.read(end - start)), start, None, fail)


def _fields_of(records: Records, count: int, kind: int = VARINT) -> tuple[Ints, Ints]:
    return fields(records.data, records.starts, records.starts + records.sizes, count, kind)


def _records(data: memoryview, offset: int, index: NDArray[np.void] | None, fail: _Fail) -> Records:
    """The records of chunks, decompressed.

    Args:
        data: the bytes of the file.
        offset: where in the file they begin.
        index: where each chunk begins, and its records; None: there is one, of any number.
        fail: makes the error of a reason.
    """
    starts = np.zeros(1, np.int64) if index is None else index["at"].astype(np.int64)
    starts = plain_positions(offset + starts) - plain_positions(np.array([offset]))
    counts = None if index is None else index["records"].astype(np.int64)
    return _records_in(without_headers(data, offset), starts, counts, fail)


def _records_in(plain: Bytes, starts: Ints, expected: Ints | None, fail: _Fail) -> Records:
    """The records of chunks that begin at some of the bytes without headers, and have so many records."""
    if expected is not None and (records := _plain_records(plain, starts, expected)) is not None:
        return records
    if int(starts.max()) + _HEADER > len(plain):
        raise fail("truncated: a chunk lies behind its end")
    _, size, _, kind, decoded = numbers_at(plain, starts, "<u8", (5,)).T
    counts = kind >> np.uint64(8)
    if expected is not None and (counts != expected.astype(np.uint64)).any():
        raise fail("shard changed or corrupt: a chunk has another number of records than its footer tells")
    if (wrong := kind & np.uint64(0xFF) != _SIMPLE).any():
        number = int(kind[wrong][0]) & 0xFF
        raise fail(_REFUSED.get(number, f"a chunk of the unknown type {number}, or none at all"))
    body = starts + _HEADER
    if (
        (size < 2).any()
        or (size > (len(plain) - body).astype(np.uint64)).any()
        or (decoded > _MOST_BYTES).any()
        or decoded.sum() > _MOST_BYTES
    ):
        raise fail("truncated or corrupt: a chunk ends behind its block, or the block has more than 2 GiB")
    try:
        counts, decoded = counts.astype(np.int64), decoded.astype(np.int64)
        return _unpacked(plain, body, body + size.astype(np.int64), decoded, counts)
    except (WireError, OSError, ValueError, pa.ArrowException) as error:
        raise fail(f"corrupt chunk: {error}") from error


def _plain_records(plain: Bytes, starts: Ints, counts: Ints) -> Records | None:
    """The records of chunks that are as they should be and not compressed, else None."""
    starts, counts = whole_numbers(starts), whole_numbers(counts)
    num_records = int(counts.sum())
    if num_records > len(plain):
        return None
    table = np.empty((2, num_records), np.int64)
    spans = (address_of(plain), len(plain), address_of(starts), address_of(counts), len(starts))
    if library().core_records(*spans, address_of(table), address_of(table[1:])):
        return None
    return Records(plain, table[0], table[1])


def _sparse_records(
    file: BinaryIO, starts: Ints, counts: Ints, learner: RecordLearner, fail: _Fail
) -> Records:
    """The records of chunks: of those that are not compressed, only what says what they hold is read."""
    bounds = plain_positions(starts)
    run = SparseCopy(PlainFile(file), int(bounds[0]), int(bounds[-1] - bounds[0]))
    positions = bounds[:-1] - bounds[0]
    for first, end in zip(positions.tolist(), [*positions[1:].tolist(), len(run.data)], strict=True):
        body = first + _HEADER + 1
        run.need(first, min(end, body + 10))
        size = int(numbers_at(run.data, np.array([first + 8]), "<u8")[0]) if body <= end else 0
        if size > end - first - _HEADER or run.data[body - 1]:
            run.need(first, end)
            continue
        length, sizes_at = (int(array[0]) for array in varints_at(run.data, np.array([body]), 10))
        values_at = sizes_at + length
        if not sizes_at <= values_at <= end:
            continue  # which the caller says
        run.need(sizes_at, values_at)
        try:
            sizes, _ = numbers_in(run.data, np.array([sizes_at]), np.array([values_at]))
        except WireError:
            continue
        if (sizes < 0).any() or (sizes > end - values_at).any():  # sums of others may wrap around
            continue
        ends = values_at + np.cumsum(sizes)
        for start, stop in zip([values_at, *ends.tolist()], ends.tolist(), strict=False):
            if learner.looks_into_records and stop <= end:
                run.need_structure(start, stop)
    return _records_in(run.data, positions, counts, fail)


def _unpacked(plain: Bytes, start: Ints, end: Ints, decoded: Ints, counts: Ints) -> Records:
    """The records of chunks whose data lie between these bytes, with so many bytes and records each."""
    codecs = plain[start]
    length, sizes_at = varints_at(plain, start + 1, 10)
    values_at = sizes_at + length
    if (length < 0).any() or (length > end - sizes_at).any():  # as a sum might wrap around
        raise WireError("its list of sizes ends behind it")
    if not codecs.any():
        sizes, per_chunk = numbers_in(plain, sizes_at, values_at)
        data, starts, ends = plain, values_at, end
    else:
        if (counts < 0).any() or int(counts.max()) > _MOST_RECORDS or int(counts.sum()) > _MOST_RECORDS:
            raise WireError(f"a block of compressed chunks has more than {_MOST_RECORDS:,} records")
        data, starts, ends = _joined(_decompressed(plain, codecs, values_at, end, most=decoded))
        sizes, per_chunk = (
            decoded,
            counts,
        )  # the only one of a chunk has its size: no list is decompressed, too
        if (counts != 1).any():
            listed = _joined(_decompressed(plain, codecs, sizes_at, values_at, most=10 * counts))
            sizes, per_chunk = numbers_in(*listed)
    if (per_chunk != counts).any():
        raise WireError("it has another number of sizes than of records")
    if (sizes < 0).any() or (sizes > _MOST_BYTES).any():
        raise WireError("a record is larger than its chunk")
    before, past = np.append(0, np.cumsum(sizes)), np.cumsum(counts)
    totals = before[past] - before[past - counts]
    if (totals != decoded).any() or (starts + totals != ends).any():
        raise WireError("its records have other sizes together than it has")
    first = np.repeat(starts - before[past - counts], counts)
    return Records(data, first + before[:-1], sizes)


def _joined(parts: list[bytes]) -> tuple[Bytes, Ints, Ints]:
    """The bytes of all, where each begins, and where it ends."""
    ends = np.cumsum([len(part) for part in parts])
    return np.frombuffer(b"".join(parts), np.uint8), np.append(0, ends[:-1]), ends


def _decompressed(plain: Bytes, codecs: Bytes, start: Ints, end: Ints, *, most: Ints) -> list[bytes]:
    """Decompress one part of each chunk: its decompressed size, and what has it. `most`: bytes that fit."""
    sizes, packed = varints_at(plain, start, 10)
    sizes, packed = np.where(codecs == 0, end - start, sizes), np.where(codecs == 0, start, packed)
    if (packed > end).any() or (sizes < 0).any() or (sizes > most).any():
        raise WireError("a part without a size, or larger than its chunk tells")
    if (snappy := codecs == ord("s")).any() and (
        varints_at(plain, packed[snappy], 10)[0] != sizes[snappy]
    ).any():
        raise WireError("two sizes of a part that disagree")
    data, ways = plain.data, {codec: _way(codec) for codec in set(codecs.tolist())}
    parts = zip(codecs.tolist(), packed.tolist(), end.tolist(), sizes.tolist(), strict=True)
    return [ways[codec](data[first:last], size) for codec, first, last, size in parts]


def _way(codec: int) -> Callable[[memoryview, int], bytes]:
    """Return what decompresses bytes to so many, or fails."""
    if codec == 0:
        return lambda data, _: bytes(data)
    if codec == ord("b"):
        return _unbrotlied
    if codec not in _CODECS:
        raise WireError(f"an unknown compression {codec}")
    decompress = pa.Codec(_CODECS[codec]).decompress
    return lambda data, size: bytes(decompress(data, size, asbytes=True)) if size else b""


def _unbrotlied(data: memoryview, size: int) -> bytes:
    """Decompress by a stream, as one call would not tell that there is less."""
    with pa.CompressedInputStream(pa.py_buffer(data), "brotli") as stream:
        plain = bytes(stream.read(size + 1))
    if len(plain) != size:
        raise WireError(f"a part of other than {size} bytes")
    return plain
