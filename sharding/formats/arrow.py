"""Arrow IPC files and streams: a block is one record batch, or several small neighbours.

Record batches are found by their headers (`ipc_messages`). Neighbours are joined up to `block_bytes`: some
writers, Hugging Face `datasets` among them, write batches of a thousand rows, far less than a read of an
object store is worth. The schema message and all dictionaries are the shard's footer, so that a block
decodes alone: pyarrow reads the footer and the block's bytes as one stream. A block of one uncompressed
batch decodes without copying; joining batches copies them once.

Dictionaries may grow (delta batches). A dictionary that is *replaced* on the way would mean different
things in different blocks, and is an error.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from sharding.blocks import Block, Columns, ColumnSpec, Shard, ShardScan, Spans
from sharding.errors import CorruptShardError
from sharding.formats.arrow_columns import check_columns, columns_of
from sharding.formats.arrow_schema import decoded_bytes, leaves, specs_of
from sharding.formats.ipc_messages import DICTIONARY, LARGEST, RECORDS, SCHEMA, Message, messages

_BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)


class ArrowFileFormat:
    """Arrow IPC files (Feather version 2); a stream in such a file is recognised. Thread-safe, stateless."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather", ".ipc")

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index the record batches by their headers.

        For compressed batches the 8-byte prefixes that tell the buffers' true sizes are read, too.

        Raises:
            CorruptShardError: neither file nor stream, truncated, or a dictionary is replaced.
        """
        found = list(messages(file, shard))
        if not found or found[0].kind != SCHEMA:
            raise CorruptShardError(shard.url, "not Arrow IPC: it does not begin with a schema", 0)
        dictionaries = [m for m in found if m.kind == DICTIONARY]
        _check_dictionaries(dictionaries, shard)
        footer = b"".join(_bytes_of(file, m) for m in [found[0], *dictionaries])
        batches = [m for m in found if m.kind == RECORDS and m.rows]
        try:
            schema = pa.ipc.read_schema(pa.BufferReader(footer))
            specs = specs_of(schema, shard.url, null_free=_null_free(schema, batches))
        except _BROKEN as error:
            raise CorruptShardError(
                shard.url, f"unreadable Arrow schema: {error}", found[0].offset
            ) from error
        blocks = _joined(batches, block_bytes)
        return ShardScan(
            offset=np.array([b[0].offset for b in blocks], np.int64),
            length=np.array([_length(b) for b in blocks], np.int64),
            nbytes=np.array([_decoded_bytes(file, b, specs, shard) for b in blocks], np.int64),
            num_samples=np.array([sum(m.rows for m in b) for b in blocks], np.int64),
            schema=specs,
            footer=footer,
        )

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """None: where values lie is said in each batch's header, inside the block."""
        return None

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Decode the wanted columns, as views of `data` where it is one uncompressed batch.

        Raises:
            CorruptShardError: a column is not there, or the batches cannot be read.
            SampleError, ShardError: see `columns_of`.
        """
        if columns is not None and not columns:
            return {}
        return columns_of(self.table(block, data, columns), columns, block)

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened; raises as `decode` does."""
        footer = bytes(block.footer)
        try:
            names, roots = _names(footer)
            check_columns(columns, names, block)
            wanted = None if columns is None else sorted({roots[names.index(name)] for name in columns})
            table = _read(footer, data, wanted)
            table.validate()  # Arrow trusts lengths in the message, and aborts the process where they lie
        except _BROKEN as error:
            reason = f"record batch cannot be decoded: {error}"
            raise CorruptShardError(block.shard.url, reason, block.offset, stage="decode") from error
        if table.num_rows != block.num_samples:
            reason = f"record batches of {table.num_rows} rows where {block.num_samples} were indexed"
            raise CorruptShardError(block.shard.url, reason, block.offset, stage="decode")
        return table

    def schema(self, footer: bytes) -> pa.Schema:
        """Columns of a shard, from its footer."""
        return pa.ipc.read_schema(pa.BufferReader(footer))


class ArrowStreamFormat(ArrowFileFormat):
    """Arrow IPC streams; a file is recognised. The two differ by their bytes, not by their index."""

    name = "arrow-stream"
    suffixes: tuple[str, ...] = (".arrows", ".stream")


class _Joined(io.RawIOBase):
    """Two byte strings as one stream, read as views. Messages never span both, nor do pyarrow's reads."""

    def __init__(self, first: bytes, second: memoryview) -> None:
        super().__init__()
        self._rest = [memoryview(first), second]

    def read(self, size: int | None = -1) -> memoryview:
        while len(self._rest) > 1 and not len(self._rest[0]):
            del self._rest[0]
        head = self._rest[0]
        size = len(head) if size is None or size < 0 else size
        self._rest[0] = head[size:]
        return head[:size]

    def readable(self) -> bool:
        return True


def _read(footer: bytes, data: memoryview, wanted: list[int] | None) -> pa.Table:
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted)
    stream = pa.PythonFile(_Joined(footer, data), "r")
    with pa.ipc.open_stream(stream, options=options) as reader:
        return reader.read_all()


@lru_cache(maxsize=64)
def _names(footer: bytes) -> tuple[list[str], list[int]]:
    """Column names, structs flattened, and the number of the top-level field each lies in."""
    schema = pa.ipc.read_schema(pa.BufferReader(footer))
    pairs = [(name, i) for i, field in enumerate(schema) for name, _ in leaves([field])]
    return [name for name, _ in pairs], [i for _, i in pairs]


def _bytes_of(file: BinaryIO, message: Message) -> bytes:
    file.seek(message.offset)
    return bytes(file.read(message.length))


def _check_dictionaries(dictionaries: Iterable[Message], shard: Shard) -> None:
    seen: set[int] = set()
    for message in dictionaries:
        if message.dictionary in seen and not message.is_delta:
            reason = "a dictionary is replaced between batches; write with unify_dictionaries=True"
            raise CorruptShardError(shard.url, reason, message.offset)
        seen.add(message.dictionary)


def _joined(batches: Iterable[Message], block_bytes: int) -> list[list[Message]]:
    """Runs of adjacent batches of at most `block_bytes` together, single batches aside."""
    blocks: list[list[Message]] = []
    for message in batches:
        previous = blocks[-1] if blocks else []
        adjacent = bool(previous) and previous[-1].offset + previous[-1].length == message.offset
        if adjacent and _length(previous) + message.length <= block_bytes:
            previous.append(message)
        else:
            blocks.append([message])
    return blocks


def _length(block: Sequence[Message]) -> int:
    return block[-1].offset + block[-1].length - block[0].offset


def _decoded_bytes(
    file: BinaryIO, block: Sequence[Message], specs: dict[str, ColumnSpec], shard: Shard
) -> int:
    stored = sum(m.length - sum(n for _, n in m.buffers) + _true_sizes(file, m, shard) for m in block)
    rows = sum(m.rows for m in block)
    spans = decoded_bytes(specs, rows)[1]
    bools = decoded_bytes({n: s for n, s in specs.items() if s.dtype == "bool"}, rows)[0]
    return stored + spans + bools


def _true_sizes(file: BinaryIO, message: Message, shard: Shard) -> int:
    """Bytes of a compressed batch's buffers when decompressed: each begins with its size, -1 for "as is"."""
    total = 0
    for at, stored in message.buffers:
        if stored:
            file.seek(at)
            prefix = file.read(8)
            size = int.from_bytes(prefix, "little", signed=True)
            if not -1 <= size < LARGEST:
                raise CorruptShardError(shard.url, f"a compressed buffer of {size} bytes", at)
            total += stored if size < 0 else size
    return total


def _null_free(schema: pa.Schema, batches: Iterable[Message]) -> set[str]:
    """Columns without nulls in any batch. Those of a dictionary's entries are not in the headers."""
    owners = [owner for field in schema for owner in _owners(field.name, field.type)]
    with_nulls = {
        owner for m in batches for owner, nulls in zip(owners, m.null_counts, strict=False) if nulls
    }
    return {
        name
        for name, field in leaves(schema)
        if not pa.types.is_dictionary(field.type)
        and not any(name == owner or name.startswith(f"{owner}.") for owner in with_nulls)
    }


def _owners(name: str, kind: pa.DataType) -> list[str]:
    """The column each array of a field belongs to, parents before children, as in a batch's header."""
    if isinstance(kind, pa.BaseExtensionType):
        return _owners(name, kind.storage_type)
    owners = [name]
    for i in range(kind.num_fields):
        child = kind.field(i)
        owners += _owners(f"{name}.{child.name}" if pa.types.is_struct(kind) else name, child.type)
    return owners
