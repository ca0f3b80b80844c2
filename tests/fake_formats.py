"""A trivial format for tests of what surrounds formats: fixed-size records of little-endian int32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from sharding.blocks import Block, Columns, ColumnSpec, Format, Shard, ShardScan
from sharding.errors import CorruptShardError


class RecordFormat(Format):
    """`columns` int32 values a record, after an 8-byte header "REC1" + the column names' letters."""

    def __init__(self, name: str = "records", blobs: bool = False) -> None:
        self.name = name
        self.blobs = blobs

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        file.seek(0)
        header = file.read(8)
        if header[:4] != b"REC1":
            raise CorruptShardError(shard.url, f"begins with {header[:4]!r}, not b'REC1'", 0)
        names = header[4:].decode().strip()
        record = 4 * len(names)
        samples = (shard.size - 8) // record
        per_block = max(1, block_bytes // record)
        first = np.arange(0, samples, per_block, dtype=np.int64)
        counts = np.minimum(per_block, samples - first)
        return ShardScan(
            offset=8 + first * record,
            length=counts * record,
            nbytes=counts * record,
            num_samples=counts,
            schema={name.lower(): _spec(name) for name in names},
            index=[f"{shard.url}/{i}".encode() for i in range(len(first))] if self.blobs else None,
            footer=header if self.blobs else b"",
        )

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        values = np.frombuffer(data, "<i4").reshape(block.num_samples, -1)
        return {str(i): values[:, i] for i in range(values.shape[1])}


def _spec(name: str) -> ColumnSpec:
    """Upper-case columns say that they are float32."""
    return ColumnSpec("fixed", "float32" if name.isupper() else "int32")


def records(num_samples: int, names: str = "ab") -> bytes:
    return b"REC1" + names.ljust(4).encode() + np.arange(num_samples * len(names), dtype="<i4").tobytes()
