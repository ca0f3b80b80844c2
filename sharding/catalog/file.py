"""A catalog as one Arrow IPC file: one row a shard, its blocks in a list of structs.

Loading maps the file and takes numpy views of its buffers, so the per-block `index` and per-shard `footer`
blobs are not in memory until touched. When all shards lie under the folder of the catalog, their URLs are
stored relative to it: shards copied together with their catalog need no new one.

Damage is found for certain: one CRC-32 is over all facts and numbers and is compared when the file is loaded,
and each blob has its own, compared when it is first touched (`Catalog.block`). Who edits a file on purpose
can compute them anew, so `Catalog` believes no number that could lead outside a shard.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.arrow_arrays import bytes_array, number_array, text_array
from sharding.blocks import Shard, ShardScan
from sharding.catalog.storage import open_url, store_errors
from sharding.errors import CorruptShardError, OldCatalogError
from sharding.redaction import identity_of
from sharding.urls import is_http, is_local, local_path
from sharding.write.file import PRIVATE_FILE, private_folder, user_folder

VERSION = 4
_MAGIC = b"dataflow-catalog"
_CURE = "index the shards again: dataflow index"
_COUNTS = ("offset", "length", "nbytes", "num_samples")
BLOCK_TYPE = pa.struct([*((name, pa.int64()) for name in _COUNTS), ("index", pa.large_binary())])
COLUMNS = pa.schema(
    [
        ("url", pa.large_string()),
        ("size", pa.int64()),
        ("version", pa.large_string()),
        ("footer", pa.large_binary()),
        ("schema", pa.int32()),
        ("blocks", pa.large_list(BLOCK_TYPE)),
    ]
)
CHECKSUMS = pa.field("checksums", pa.large_list(pa.uint32()))
"""An optional column: CRC-32 of the stored bytes of each block."""
BLOB_CRCS = pa.schema([("footer_crc", pa.uint32()), ("index_crc", pa.large_list(pa.uint32()))])
"""The last columns of the file: CRC-32 of each shard's footer, and of the index of each of its blocks."""
BlobCrcs = tuple[NDArray[np.uint32], NDArray[np.uint32]]
"""The checksums of the footers [num_shards], and of the indexes [num_blocks]."""


def arrow_rows(shards: Sequence[Shard], scans: Sequence[ShardScan], groups: NDArray[np.int32]) -> pa.Table:
    """One row a shard, from what indexing found; `groups`: which of the catalog's schemas is each shard's."""
    per_scan = [(scan.offset, scan.length, scan.nbytes, scan.num_samples) for scan in scans]
    counts = [
        number_array(np.concatenate(col).astype(np.int64, copy=False)) for col in zip(*per_scan, strict=True)
    ]
    indexes = [blob for scan in scans for blob in scan.index or repeat(None, len(scan.offset))]
    blocks = pa.StructArray.from_arrays([*counts, bytes_array(indexes)], fields=list(BLOCK_TYPE))
    ends = np.cumsum([0, *(len(scan.offset) for scan in scans)], dtype=np.int64)
    columns = [
        text_array([shard.url for shard in shards]),
        number_array(np.array([shard.size for shard in shards], np.int64)),
        text_array([shard.version for shard in shards]),
        bytes_array([scan.footer for scan in scans]),
        number_array(groups),
        pa.LargeListArray.from_arrays(number_array(ends), blocks),
    ]
    return pa.Table.from_arrays(columns, schema=COLUMNS)


def write_table(
    url: str, table: pa.Table, facts: Mapping[str, Any], options: Mapping[str, Any] | None
) -> None:
    """Save the rows and the JSON facts about them. Readers see the old file or the new one, never a part."""
    folder = folder_of(identity_of(url))
    urls = table.column("url").to_pylist()
    inside = all(url.startswith(folder) for url in urls)
    if inside:
        table = _with_urls(table, [url.removeprefix(folder) for url in urls])
    table = stored_table(table, {"version": VERSION, "relative": inside, **facts})
    if is_local(url):
        _write_local(local_path(url), table)
        return
    sink = pa.BufferOutputStream()
    _write(sink, table)
    fs, path = open_url(url, options)
    with store_errors(url, "written"):
        fs.pipe_file(path, sink.getvalue().to_pybytes())


def stored_table(rows: pa.Table, facts: Mapping[str, Any]) -> pa.Table:
    """Return the table of the file: rows with checksums of their blobs, and one more fact in the header."""
    rows = rows.select([name for name in rows.column_names if name not in BLOB_CRCS.names]).combine_chunks()
    blocks = rows.column("blocks").chunk(0)
    of_blocks = pa.LargeListArray.from_arrays(blocks.offsets, _crcs(blocks.values.field("index")))
    crcs = (_crcs(rows.column("footer").chunk(0)), of_blocks)
    for field, column in zip(BLOB_CRCS, crcs, strict=True):
        rows = rows.append_column(field, column)
    rows = rows.combine_chunks()
    stored = {**facts, "checksum": _checksum(rows, facts)}
    return rows.replace_schema_metadata({_MAGIC: json.dumps(stored).encode()})


def blob_crc(blob: pa.Scalar) -> int:
    """CRC-32 of an index or a footer; none has that of no bytes."""
    return zlib.crc32(blob.as_buffer()) if blob.is_valid else 0


def _crcs(blobs: pa.Array) -> pa.Array:
    return number_array(np.fromiter(map(blob_crc, blobs), np.uint32, len(blobs)))


def _checksum(rows: pa.Table, facts: Mapping[str, Any]) -> int:
    """CRC-32 of all that is stored but the blobs, which their own stand for."""
    crc = zlib.crc32(json.dumps(dict(facts), sort_keys=True).encode())
    for name in ("url", "version"):
        texts = rows.column(name).chunk(0)
        offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :][: len(texts) + 1]
        crc = zlib.crc32(np.diff(offsets).data, crc)
        if offsets[-1] > offsets[0]:
            crc = zlib.crc32(memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]], crc)
    blocks = rows.column("blocks").chunk(0)
    numbers = [blocks.offsets, *map(blocks.values.field, _COUNTS)]
    for name in ("size", "schema", CHECKSUMS.name, *BLOB_CRCS.names):
        if name in rows.column_names:
            column = rows.column(name).chunk(0)
            numbers.append(column.values if pa.types.is_large_list(column.type) else column)
    for array in numbers:
        crc = zlib.crc32(numpy_view(array).data, crc)
    return crc


def numpy_view(array: pa.Array) -> NDArray[Any]:
    """An Arrow array of numbers without nulls, as numpy sees it."""
    return np.from_dlpack(array)  # no copy; `to_numpy` would import pandas, which takes 0.3 s


def damaged(url: str, what: object) -> CorruptShardError:
    """The error of a catalog that is not as it was written."""
    return CorruptShardError(url, f"the catalog is damaged ({what}); {_CURE}")


def read_table(url: str, options: Mapping[str, Any] | None) -> tuple[pa.Table, dict[str, Any], BlobCrcs]:
    """The rows and facts that `write_table` saved, and the checksums that its blobs must have.

    A local file stays mapped, not read: blobs are to be compared when they are touched.

    Raises:
        ShardReadError: the file cannot be read.
        OldCatalogError: it is of another version.
        CorruptShardError: it is no catalog, or is damaged.
    """
    with store_errors(url):
        if is_local(url):
            source = pa.BufferReader(pa.memory_map(local_path(url)).read_buffer())
        else:
            fs, path = open_url(url, options)
            source = pa.BufferReader(fs.cat_file(path))
    try:
        # Without threads of pyarrow's: a process that has one can be forked, for worker processes.
        table = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()
        facts: dict[str, Any] = json.loads((table.schema.metadata or {})[_MAGIC])
        version, relative = facts["version"], facts["relative"]
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptShardError(url, f"is not a catalog, or is damaged; {_CURE}") from error
    schemas = (pa.schema([*COLUMNS, *BLOB_CRCS]), pa.schema([*COLUMNS, CHECKSUMS, *BLOB_CRCS]))
    if version != VERSION or not any(map(table.schema.equals, schemas)):
        reason = f"is a catalog of version {version}, and this release reads {VERSION}; {_CURE}"
        raise OldCatalogError(url, reason)
    try:
        table.validate(full=True)  # Offsets that lead outside a buffer would crash, not raise.
        table = table.combine_chunks()
        stored = facts.pop("checksum")
        if _checksum(table, facts) != stored:
            raise ValueError("its checksum is another")
        if relative:
            folder = folder_of(identity_of(url))
            table = _with_urls(table, [folder + name for name in table.column("url").to_pylist()])
        footer_crc, index_crc = (table.column(name).chunk(0) for name in BLOB_CRCS.names)
        crcs = numpy_view(footer_crc), numpy_view(index_crc.values)
    except (pa.ArrowException, LookupError, TypeError, ValueError) as error:
        raise damaged(url, error) from error
    return table.drop_columns(BLOB_CRCS.names), facts, crcs


def _with_urls(table: pa.Table, urls: Sequence[str]) -> pa.Table:
    return table.set_column(0, COLUMNS.field(0), text_array(urls))


def _write(sink: Any, table: pa.Table) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def kept_folder() -> str:
    """Return this user's folder of catalogs: `$XDG_CACHE_HOME/dataflow/catalogs`, or below `~/.cache`."""
    return user_folder("catalogs")


def _write_local(path: str, table: pa.Table) -> None:
    folder = os.path.dirname(path)
    is_kept = folder == os.path.abspath(kept_folder())
    unfinished = f"{path}.{uuid.uuid4().hex}.tmp"
    with store_errors(path, "written"):
        if is_kept:
            private_folder(folder)
        else:
            os.makedirs(folder, exist_ok=True)
        try:
            if is_kept:
                os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
            with pa.OSFile(unfinished, "wb") as sink:
                _write(sink, table)
            os.replace(unfinished, path)
        except BaseException:
            if os.path.exists(unfinished):
                os.unlink(unfinished)
            raise


def folder_of(url: str) -> str:
    """Everything up to the file's name, with the slash."""
    path = local_path(url) if is_local(url) else re.split("[?#]", url, maxsplit=1)[0] if is_http(url) else url
    return path.rpartition("/")[0] + "/"
