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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from sharding.blocks import Block, Columns, ColumnSpec, Shard, ShardScan
from sharding.errors import CorruptShardError
from sharding.formats.arrow.columns import TabularFormat, check_columns, check_nested, columns_of
from sharding.formats.arrow.json_sizes import json_columns, tally_of_batch
from sharding.formats.arrow.messages import HEAD, LARGEST, Message, bytes_of, read_layout
from sharding.formats.arrow.schema import decoded_bytes, leaves, specs_of

_BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)


class ArrowFileFormat(TabularFormat):
    """Arrow IPC files (Feather version 2); a stream in such a file is recognised. Thread-safe, stateless.

    Args:
        allow_unfinished: read the whole batches of files and streams that end too early, too.
    """

    name = "arrow"

    def __init__(self, *, allow_unfinished: bool = False) -> None:
        self.allow_unfinished = allow_unfinished

    def options(self) -> dict[str, str | int]:
        """What shapes the blocks, see `Format.options`."""
        return {"allow_unfinished": True} if self.allow_unfinished else {}

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index the record batches by their headers.

        For compressed batches the 8-byte prefixes that tell the buffers' true sizes are read, too.

        Raises:
            CorruptShardError: neither file nor stream, truncated, or a dictionary is replaced.
        """
        layout = read_layout(file, shard, allow_unfinished=self.allow_unfinished)
        _check_dictionaries(layout.dictionaries, shard)
        footer = b"".join([layout.schema, *(bytes_of(file, m) for m in layout.dictionaries)])
        try:
            schema = _schema_of(footer, layout.footer)
            _check_lengths(layout.batches, schema, shard)
            batches = [m for m in layout.batches if m.rows]
            specs = specs_of(schema, shard.url, null_free=_null_free(schema, batches))
        except _BROKEN as error:
            raise CorruptShardError(shard.url, f"unreadable Arrow schema: {error}", 0) from error
        blocks = _joined(batches, block_bytes)
        sizes = _Sizes(
            schema, specs, max((m.body_length / max(1, m.rows) for m in layout.dictionaries), default=0)
        )
        return ShardScan(
            offset=np.array([b[0].offset for b in blocks], np.int64),
            length=np.array([_length(b) for b in blocks], np.int64),
            nbytes=np.array([sizes.decoded_bytes(file, b, shard) for b in blocks], np.int64),
            num_samples=np.array([sum(m.rows for m in b) for b in blocks], np.int64),
            schema=specs,
            footer=footer,
            unfinished=layout.unfinished,
        )

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Decode the wanted columns, see `TabularFormat.decode`: one uncompressed batch is not copied."""
        if columns is not None and not columns:
            return {}
        return columns_of(self._table(block, data, columns, full=False), columns, block)

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened; raises as `decode` does.

        Every value is checked, so that pyarrow may compute with them; `columns_of` checks for itself.
        """
        return self._table(block, data, columns, full=True)

    def _table(self, block: Block, data: memoryview, columns: Sequence[str] | None, full: bool) -> pa.Table:
        footer = bytes(block.footer)
        try:
            names, roots = _names(footer)
            check_columns(columns, names, block)
            wanted = None if columns is None else sorted({roots[names.index(name)] for name in columns})
            table = _read(footer, data, wanted)
            table.validate()  # Arrow trusts lengths in the message, and aborts the process where they lie
            for chunk in (chunk for column in table.columns for chunk in column.chunks if full):
                check_nested(chunk)
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


def _schema_of(footer: bytes, end: bytes) -> pa.Schema:
    """The schema that the first message tells, and so does the end of a file (b"" for a stream)."""
    schema = pa.ipc.read_schema(pa.BufferReader(footer))
    if end and not schema.equals(pa.ipc.open_file(pa.BufferReader(HEAD + end)).schema):
        raise pa.ArrowInvalid("the one at the file's end differs")
    return schema


def _check_lengths(batches: Iterable[Message], schema: pa.Schema, shard: Shard) -> None:
    """Raise where a batch has other arrays than the schema, or columns of other lengths than its rows."""
    sizes = [len(_owners(field.name, field.type)) for field in schema]
    firsts = [0, *accumulate(sizes)]
    for message in batches:
        if len(message.lengths) != firsts[-1] or {message.lengths[i] for i in firsts[:-1]} - {message.rows}:
            reason = f"broken Arrow message: a record batch of {message.rows} rows whose columns have others"
            raise CorruptShardError(shard.url, reason, message.offset)


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


@dataclass(frozen=True)
class _Sizes:
    """What decoded blocks of a shard take."""

    schema: pa.Schema
    specs: Mapping[str, ColumnSpec]
    entry_bytes: float
    """Mean size of the entries of a dictionary, of the largest such."""

    def decoded_bytes(self, file: BinaryIO, block: Sequence[Message], shard: Shard) -> int:
        """Bytes of one block, estimated from its batches' headers."""
        bools = {name: spec for name, spec in self.specs.items() if spec.dtype == "bool"}
        total = 0
        for message in block:
            sizes = _true_sizes(file, message, shard)
            total += message.length - sum(stored for _, stored in message.buffers) + sum(sizes)
            total += decoded_bytes(self.specs, message.rows)[1] + decoded_bytes(bools, message.rows)[0]
            total += self._json_bytes(message, sizes)
        return total

    def _json_bytes(self, message: Message, sizes: Sequence[int]) -> int:
        nested = json_columns(self.specs)
        if not nested:
            return 0
        tally = tally_of_batch(self.schema, message.lengths, sizes, message.views, self.entry_bytes)
        fields = ((name, field.type) for name, field in leaves(self.schema) if name in nested)
        return min(LARGEST, sum(tally.json_bytes(kind, (name,)) for name, kind in fields))


def _true_sizes(file: BinaryIO, message: Message, shard: Shard) -> list[int]:
    """Bytes of a batch's buffers; compressed ones begin with their true size, -1 for "as is"."""
    if not message.is_compressed:
        return [stored for _, stored in message.buffers]
    sizes = []
    for at, stored in message.buffers:
        size = stored
        if stored:
            file.seek(at)
            prefix = file.read(8)
            size = int.from_bytes(prefix, "little", signed=True)
            if not -1 <= size < LARGEST:
                raise CorruptShardError(shard.url, f"a compressed buffer of {size} bytes", at)
        sizes.append(stored if size < 0 else size)
    return sizes


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
