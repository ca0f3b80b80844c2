"""A catalog as one Arrow IPC file: one row a shard, its blocks in a list of structs.

Loading maps the file and takes numpy views of its buffers, so the per-block `index` and per-shard `footer`
blobs are not in memory until touched. When all shards lie under the folder of the catalog, their URLs are
stored relative to it: shards copied together with their catalog need no new one.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sharding.blocks import Shard, ShardScan
from sharding.errors import CorruptShardError
from sharding.storage import open_url, store_errors
from sharding.urls import is_local, local_path

VERSION = 1
_MAGIC = b"dataflow-catalog"
_COUNTS = ("offset", "length", "nbytes", "num_samples")
BLOCK_TYPE = pa.struct([*((name, pa.int64()) for name in _COUNTS), ("index", pa.large_binary())])
COLUMNS = pa.schema(
    [
        ("url", pa.large_string()),
        ("size", pa.int64()),
        ("version", pa.large_string()),
        ("footer", pa.large_binary()),
        ("blocks", pa.large_list(BLOCK_TYPE)),
    ]
)
CHECKSUMS = pa.field("checksums", pa.large_list(pa.uint32()))
"""An optional last column: CRC-32 of the stored bytes of each block."""


def arrow_rows(shards: Sequence[Shard], scans: Sequence[ShardScan]) -> pa.Table:
    """One row a shard, from what indexing found."""
    counts = [pa.array(_joined([getattr(scan, name) for scan in scans])) for name in _COUNTS]
    indexes = pa.array([blob for scan in scans for blob in _indexes(scan)], pa.large_binary())
    blocks = pa.StructArray.from_arrays([*counts, indexes], fields=list(BLOCK_TYPE))
    ends = np.cumsum([0, *(len(scan.offset) for scan in scans)], dtype=np.int64)
    columns = [
        pa.array([shard.url for shard in shards], pa.large_string()),
        pa.array([shard.size for shard in shards], pa.int64()),
        pa.array([shard.version for shard in shards], pa.large_string()),
        pa.array([scan.footer for scan in scans], pa.large_binary()),
        pa.LargeListArray.from_arrays(pa.array(ends), blocks),
    ]
    return pa.Table.from_arrays(columns, schema=COLUMNS)


def with_checksums(rows: pa.Table, checksums: NDArray[np.uint32]) -> pa.Table:
    """The rows with one checksum a block, [num_blocks] in their order."""
    per_shard = pa.LargeListArray.from_arrays(rows.column("blocks").chunk(0).offsets, pa.array(checksums))
    return rows.select(COLUMNS.names).append_column(CHECKSUMS, per_shard)


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays).astype(np.int64, copy=False)


def _indexes(scan: ShardScan) -> Sequence[bytes | None]:
    return [None] * len(scan.offset) if scan.index is None else scan.index


def write_table(
    url: str, table: pa.Table, facts: Mapping[str, Any], options: Mapping[str, Any] | None
) -> None:
    """Save the rows and the JSON facts about them. Readers see the old file or the new one, never a part."""
    folder = _folder(url)
    urls = table.column("url")
    inside = bool(pc.all(pc.starts_with(urls, folder)).as_py())
    if inside:
        table = table.set_column(
            0, COLUMNS.field(0), pc.binary_replace_slice(urls, 0, len(folder.encode()), "")
        )
    header = {_MAGIC: json.dumps({"version": VERSION, "relative": inside, **facts}).encode()}
    table = table.replace_schema_metadata(header).combine_chunks()
    if is_local(url):
        _write_local(local_path(url), table)
        return
    sink = pa.BufferOutputStream()
    _write(sink, table)
    fs, path = open_url(url, options)
    with store_errors(url):
        fs.pipe_file(path, sink.getvalue().to_pybytes())


def read_table(url: str, options: Mapping[str, Any] | None) -> tuple[pa.Table, dict[str, Any]]:
    """The rows and facts that `write_table` saved; a local file stays mapped, not read.

    Raises:
        ShardReadError: the file cannot be read.
        CorruptShardError: it is no catalog, is damaged, or is of another version.
    """
    source = _source(url, options)
    try:
        table = pa.ipc.open_file(source).read_all()
        facts: dict[str, Any] = json.loads((table.schema.metadata or {})[_MAGIC])
        version, relative = facts["version"], facts["relative"]
        if version == VERSION:
            table.validate(full=True)  # Offsets that lead outside a buffer would crash, not raise.
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptShardError(url, "is not a catalog, or is damaged; index the shards again") from error
    known = table.schema.equals(COLUMNS) or table.schema.equals(COLUMNS.append(CHECKSUMS))
    if version != VERSION or not known:
        reason = (
            f"is a catalog of version {version}, and this release reads {VERSION}; index the shards again"
        )
        raise CorruptShardError(url, reason)
    table = table.combine_chunks()
    if relative:
        full = pc.binary_replace_slice(table.column("url"), 0, 0, _folder(url))
        table = table.set_column(0, COLUMNS.field(0), full)
    return table, facts


def _source(url: str, options: Mapping[str, Any] | None) -> Any:
    with store_errors(url):
        if is_local(url):
            return pa.memory_map(local_path(url))
        fs, path = open_url(url, options)
        return pa.BufferReader(fs.cat_file(path))


def _write(sink: Any, table: pa.Table) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _write_local(path: str, table: pa.Table) -> None:
    unfinished = f"{path}.{uuid.uuid4().hex}.tmp"
    with store_errors(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with pa.OSFile(unfinished, "wb") as sink:
                _write(sink, table)
            os.replace(unfinished, path)
        except BaseException:
            if os.path.exists(unfinished):
                os.unlink(unfinished)
            raise


def _folder(url: str) -> str:
    """Everything up to the file's name, with the slash."""
    return (local_path(url) if is_local(url) else url).rpartition("/")[0] + "/"


__all__ = ["COLUMNS", "VERSION", "arrow_rows", "read_table", "write_table"]
