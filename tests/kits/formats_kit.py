"""What the tests of formats need: shards, blocks and all decoded columns of bytes in memory.

And a format that is trivial, for tests of what surrounds formats; and small files that ask for much memory,
indexed in a process of its own.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from programs_kit import Script

from sharding.blocks import (
    DEFAULT_BLOCK_BYTES,
    NULL_INSIDE,
    Block,
    Column,
    Columns,
    ColumnSpec,
    Format,
    Masked,
    Shard,
    ShardScan,
    Spans,
)
from sharding.catalog.build import catalog_of, listed_entries, scan_shards
from sharding.catalog.reading import ColumnReader
from sharding.catalog.table import Catalog
from sharding.errors import CorruptShardError
from sharding.lengths.column_lengths import column_lengths


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
            assert column.dtype == spec.dtype
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


# ---- a trivial format -----------------------------------------------------------------------------------


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


# ---- files that ask for much memory ---------------------------------------------------------------------

LIMIT_MB = 512
_ADDRESS_SPACE = 6 << 30
_TIMEOUT_S = 120.0
_IMPORTED = (
    *("sharding.formats.arrow.jsonl", "pyarrow.parquet", "zstandard"),
    *("sharding.catalog.build", "sharding.formats", "formats_kit"),
)


def build_catalog(
    urls: Sequence[str],
    codec: Format,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    map: Any = map,  # noqa: A002
    progress: Callable[[int, int, int], None] | None = None,
) -> Catalog:
    """The catalog of some shards; `map` calls a function on each."""
    listed = listed_entries(urls, codec, None)
    scans = scan_shards(urls, codec, storage_options=None, block_bytes=block_bytes, map=map, listed=listed)
    return catalog_of(urls, codec, scans, block_bytes=block_bytes, progress=progress)


def index_apart(path: Path, format_name: str = "auto") -> tuple[str, float]:
    """Index a file in a process of its own: what was raised ("": nothing), and peak MB besides imports."""
    program = "import sys, formats_kit\nformats_kit.tell(*sys.argv[1:])\n"
    with Script(program, path, format_name, how="forked", folder=path.parent, imported=_IMPORTED) as indexing:
        code, out, err = indexing.end(_TIMEOUT_S)
    assert code == 0, f"exit status {code}: {err[-2000:]}"
    answer = json.loads(out)
    return answer["error"], answer["megabytes"]


def tell(path: str, format_name: str) -> None:
    """Index a file and print what came of it."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    from sharding.formats import resolve_format

    before, error = _peak(), ""
    try:
        build_catalog(
            [path], resolve_format(format_name, [path], length=8 if format_name == "tokens" else None)
        )
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"error": error[:3000], "megabytes": _peak() - before}))


def _peak() -> float:
    """MB of this program at the most; `ru_maxrss` would begin with those of the process that started it."""
    kilobytes = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes
    return int(kilobytes[1]) * 1024 / 1e6


def write_gzip(path: Path, pieces: Iterable[bytes]) -> None:
    """Compress piece by piece."""
    with gzip.open(path, "wb", compresslevel=6) as file:
        for piece in pieces:
            file.write(piece)


def write_zstd(path: Path, pieces: Iterable[bytes]) -> None:
    """Compress piece by piece."""
    import zstandard

    with path.open("wb") as stored, zstandard.ZstdCompressor(level=3).stream_writer(stored) as file:
        for piece in pieces:
            file.write(piece)


def lengths_of(catalog: Catalog, column: str, on_read: Callable[[int], object] = int) -> NDArray[np.integer]:
    """The lengths of a column of local shards; `on_read` is told the bytes of each read."""
    reader = ColumnReader(catalog, catalog.codec(), [column])

    def read_into(shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
        on_read(len(out))
        out[:] = np.fromfile(shard.url, np.uint8, len(out), offset=offset)

    def read(block: Block, _: str) -> Column:
        return reader.decode(block, reader.read(block, read_into))[column]

    return column_lengths(catalog, column, read)
