"""What the tests of every format need: shards, blocks and all decoded columns of bytes in memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharding.blocks import NULL_INSIDE, Block, Columns, Format, Masked, Shard, ShardScan, Spans


def shard_of(content: bytes, url: str) -> Shard:
    return Shard(url, len(content), "etag:1")


def blocks_of(scan: ShardScan, shard: Shard) -> list[Block]:
    firsts = np.cumsum(scan.num_samples) - scan.num_samples
    return [
        Block(
            shard=shard,
            offset=int(scan.offset[i]),
            length=int(scan.length[i]),
            nbytes=int(scan.nbytes[i]),
            first_sample=int(firsts[i]),
            first_in_shard=int(firsts[i]),
            num_samples=int(scan.num_samples[i]),
            number=i,
            number_in_shard=i,
            index=b"" if scan.index is None else scan.index[i],
            footer=scan.footer,
        )
        for i in range(len(scan.offset))
    ]


def arrow_block(num_samples: int) -> Block:
    """One in the middle of a shard, for what decodes a block without its bytes."""
    return Block(
        Shard("s.arrow", 999, ""),
        128,
        64,
        64,
        first_sample=1000,
        first_in_shard=100,
        num_samples=num_samples,
        number=3,
        number_in_shard=1,
    )


def scan_of(fmt: Format, content: bytes, url: str, block_bytes: int = 4 << 20, **more: Any) -> ShardScan:
    scan = fmt.scan(io.BytesIO(content), shard_of(content, url), block_bytes=block_bytes, **more)
    lengths = {len(scan.offset), len(scan.length), len(scan.nbytes), len(scan.num_samples)}
    assert len(lengths) == 1
    assert scan.offset.dtype == scan.length.dtype == scan.nbytes.dtype == scan.num_samples.dtype == np.int64
    assert (scan.offset >= 0).all()
    assert (scan.offset + scan.length <= len(content)).all()
    assert (scan.num_samples > 0).all()
    assert scan.index is None or len(scan.index) == len(scan.offset)
    return scan


def decoded_blocks(
    fmt: Format,
    content: bytes,
    url: str,
    columns: Sequence[str] | None = None,
    block_bytes: int = 4 << 20,
    **more: Any,
) -> list[Columns]:
    """All blocks decoded, each from nothing but its own bytes; checked against the scan's promises."""
    scan = scan_of(fmt, content, url, block_bytes, **more)
    decoded = []
    for block in blocks_of(scan, shard_of(content, url)):
        data = memoryview(bytes(content[block.offset : block.offset + block.length]))
        values = fmt.decode(block, data, columns)
        assert all(len(column) == block.num_samples for column in values.values())
        assert_keeps_schema(values, scan)
        decoded.append(values)
    return decoded


def assert_keeps_schema(values: Columns, scan: ShardScan) -> None:
    for name, column in values.items():
        spec = scan.schema[name]
        if isinstance(column, Spans):
            assert spec.kind not in ("fixed", "other", "unreadable")
            assert column.buffer.dtype == spec.dtype
            assert column.buffer.ndim == 1
            assert column.starts.dtype == column.lengths.dtype == np.int64
            assert spec.optional or ((column.lengths >= 0) | (column.lengths == NULL_INSIDE)).all()
        else:
            array = column.values if isinstance(column, Masked) else column
            assert spec.kind == "fixed"
            assert array.dtype == spec.dtype
            assert array.shape[1:] == spec.shape


def rows_of(blocks: Sequence[Columns]) -> list[dict[str, Any]]:
    """Samples as plain Python values: text stays bytes, missing values are None."""
    rows: list[dict[str, Any]] = []
    for block in blocks:
        names = list(block)
        values = [_values(column) for column in block.values()]
        rows.extend(dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))
    return rows


def _values(column: Any) -> list[Any]:
    if isinstance(column, Masked):
        assert column.lacks.any()
        pairs = zip(column.values.tolist(), column.lacks.tolist(), strict=True)
        return [None if lacks else value for value, lacks in pairs]
    if not isinstance(column, Spans):
        return list(column.tolist())
    return [_one(column, i) for i in range(len(column))]


def _one(column: Spans, i: int) -> Any:
    if column.lengths[i] < 0:
        return None
    value = column.value(i)
    assert len(value) == column.lengths[i]
    return value.tobytes() if value.dtype == np.uint8 else value.tolist()
