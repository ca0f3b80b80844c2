"""The forms of LitData's chunks that are not one table of offsets: frames of zstd, and rows of Arrow."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np

from sharding.blocks import Shard, ShardScan
from sharding.errors import CorruptShardError
from sharding.formats.arrow.ipc import ArrowFileFormat
from sharding.formats.streaming.layout import SampleLayout
from sharding.formats.streaming.listing import LISTING_NAME

FRAMES_BEGIN = b"LDFZ01\0\0"
"""The first bytes of a chunk of frames."""
ROWS_END = b"LDARW01\0"
"""The last bytes of a chunk of rows."""
ROWS = ArrowFileFormat()
"""Reads the Arrow file that rows are."""
_PREFIX = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("at", "<u8"), ("length", "<u4"), ("nbytes", "<u4")])


def as_footer(layout: SampleLayout, codec: str | None, **more: Any) -> bytes:
    """The footer of a chunk of these columns; `more`: further facts."""
    columns = [[column.name, column.encoding] for column in layout.columns]
    return json.dumps({"columns": columns, "heads": layout.heads, "codec": codec, **more}).encode()


def check_count(chunk: Mapping[str, Any], count: int, shard: Shard) -> None:
    """Raise `CorruptShardError` where `index.json` says another number of samples."""
    if chunk.get("chunk_size") != count:
        said = chunk.get("chunk_size")
        reason = (
            f"{LISTING_NAME} says that it has {said} samples, and it has {count}: one is another dataset's"
        )
        raise shard.corrupt(reason)


def scan_frames(file: BinaryIO, shard: Shard, layout: SampleLayout, chunk: Mapping[str, Any]) -> ShardScan:
    """Frames of zstd, whose table stands behind that of the samples."""

    def corrupt(reason: str, position: int) -> CorruptShardError:
        return shard.corrupt(f"in its table of frames: {reason}", position)

    file.seek(0)
    head = file.read(_PREFIX.size)
    if len(head) < _PREFIX.size:
        raise corrupt("truncated", len(head))
    _, version, _, count, _, num_frames = _PREFIX.unpack(head)
    end = _PREFIX.size + 4 * (count + 1) + _FRAME.itemsize * num_frames
    if version != 1 or end > shard.size:
        raise corrupt(f"version {version}, {count} samples in {num_frames} frames of {shard.size} bytes", 8)
    offsets = np.frombuffer(file.read(4 * (count + 1)), "<u4").astype(np.int64)
    table = file.read(_FRAME.itemsize * num_frames)
    if (np.diff(offsets, prepend=0) < 0).any() or offsets[0]:
        raise corrupt("offsets of samples fall", _PREFIX.size)
    layout.check_sizes(offsets, shard)
    check_count(chunk, count, shard)
    rows = np.frombuffer(table, _FRAME)
    first = np.append(rows["first"].astype(np.int64), count)
    counts, length, nbytes = (rows[name].astype(np.int64) for name in ("count", "length", "nbytes"))
    fits = rows["at"] <= shard.size  # before they are signed numbers
    offset = np.where(fits, rows["at"], 0).astype(np.int64)
    fits &= (np.diff(first) == counts) & (counts > 0) & (offset >= end) & (length > 0)
    fits &= offset + length <= shard.size
    if not fits.all() or first[0] or (np.diff(offsets[first]) != nbytes).any():
        raise corrupt("frames do not hold the samples", end - _FRAME.itemsize * num_frames)
    sizes = np.diff(offsets).astype("<u4")
    return ShardScan(
        offset=offset,
        length=length,
        nbytes=nbytes,
        num_samples=counts,
        schema=layout.schema(np.diff(offsets)),
        index=[sizes[a:b].tobytes() for a, b in pairwise(first.tolist())],
        footer=as_footer(layout, "zstd", framed=True),
    )


def scan_rows(file: BinaryIO, shard: Shard, block_bytes: int, chunk: Mapping[str, Any]) -> ShardScan:
    """Rows in an Arrow file at the end, with its length and a mark behind."""
    file.seek(0)
    count = int.from_bytes(file.read(4), "little")
    file.seek(max(0, shard.size - 12))
    length = int.from_bytes(file.read(4), "little")
    start = shard.size - 12 - length
    if start < 4 * (count + 2):
        reason = f"its rows, {length} bytes of Arrow, begin before its table of {count} samples ends"
        raise shard.corrupt(reason, shard.size - 12)
    inner = cast(BinaryIO, _Part(file, start, length))
    scan = ROWS.scan(inner, replace(shard, size=length), block_bytes=block_bytes)
    check_count(chunk, int(scan.num_samples.sum()), shard)
    return replace(scan, offset=scan.offset + start)


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._cursor = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._cursor

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._cursor, io.SEEK_END: self._length}[whence]
        self._cursor = max(0, base + offset)
        return self._cursor

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._cursor)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._cursor)
        data = self._file.read(size)
        self._cursor += len(data)
        return data
