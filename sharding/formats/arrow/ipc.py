"""Arrow IPC files and streams: a block is one record batch, or several small neighbours.

Record batches are found by their headers (`messages`). Neighbours are joined up to `block_bytes`: some
writers, Hugging Face `datasets` among them, write batches of a thousand rows, far less than a read of an
object store is worth. The schema message and all dictionaries are the shard's footer, so that a block
decodes alone: pyarrow reads the footer and the block's bytes as one stream. Of uncompressed batches text,
byte strings and lists are not copied (those of small batches are, once), of a single batch nothing is. Where
large batches of numbers and text alone lie is in the index, and they are looked at without pyarrow.

Dictionaries may grow (delta batches). Where one is *replaced* on the way, as streams may, each block has an
index that says which of the footer's messages hold for it.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import Block, Column, Columns, ColumnSpec, Shard, ShardScan, Spans
from sharding.formats.arrow.checks import check_nested
from sharding.formats.arrow.columns import TabularFormat, check_columns
from sharding.formats.arrow.messages import HEAD, LARGEST, Message, bytes_of, is_little_endian, read_layout
from sharding.formats.arrow.schema import (
    BROKEN,
    NUMBER_BYTES,
    columns_of_kind,
    decoded_bytes,
    dtype_of,
    is_bytes,
    is_text,
    leaves,
    named_columns,
    specs_of,
    with_items,
)

_LEAST_BYTES = 128 << 10
"""Mean size of the batches of a block with an index: smaller ones are joined in less time."""
_FACTS = 4
_VALUE_BYTES = 6  # of a bool, null, brackets or quotes, and a comma in JSON


class ArrowFileFormat(TabularFormat):
    """Arrow IPC files (Feather version 2); a stream in such a file is recognised. Thread-safe, stateless.

    Args:
        allow_unfinished: read the whole batches of files and streams that end too early, too.
    """

    name = "arrow"

    def __init__(self, *, allow_unfinished: bool = False) -> None:
        self.allow_unfinished = allow_unfinished

    def options(self) -> dict[str, str | int]:
        """Return the options that shape the blocks; see `Format.options`."""
        return {"allow_unfinished": True} if self.allow_unfinished else {}

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index the record batches by their headers.

        For compressed batches the 8-byte prefixes that tell the buffers' true sizes are read, too.

        Raises:
            CorruptShardError: neither file nor stream, or truncated.
        """
        layout = read_layout(file, shard, allow_unfinished=self.allow_unfinished)
        footer = b"".join([layout.schema, *(bytes_of(file, m) for m in layout.dictionaries)])
        try:
            schema = _schema_of(footer, layout.footer)
            _check_lengths(layout.batches, schema, shard)
            batches = [m for m in layout.batches if m.rows]
            specs = specs_of(schema, null_free=_null_free(schema, batches))
        except BROKEN as error:
            raise shard.corrupt(f"unreadable Arrow schema: {error}", 0) from error
        specs = with_items(specs, _mean_items(schema, batches, columns_of_kind(specs, "bytes_list")))
        blocks = _joined(batches, block_bytes)
        known = _plain_fields(schema) if is_little_endian(layout.schema) else None
        index = None if known is None else [_plain_index(block, known) for block in blocks]
        whole = [message.dictionary for message in layout.dictionaries if not message.is_delta]
        if len({*whole}) < len(whole):  # one has other entries in some batches than in those before
            index = _dictionary_indexes(blocks, layout.dictionaries, len(layout.schema))
        sizes = _BlockSizes(
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
            index=index,
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where an index does not fit its block."""
        if not len(block.index):
            return
        if _plain_footer(bytes(block.footer)) is None and len(block.index) % 16 == 0:
            parts = np.frombuffer(block.index, "<i8")
            if (np.diff(parts, prepend=0) < 0).any() or parts[-1] > len(block.footer):
                raise ValueError("a dictionary lies outside the footer")
            return
        table = _index_table(block)
        if table is None or (table < 0).any() or table[:, 3].sum() != block.num_samples:
            raise ValueError(f"an index of {len(block.index)} bytes for {block.num_samples} samples")
        pieces = np.delete(table, (2, 3), axis=1).reshape(-1, 2)
        if (pieces > block.length).any() or (pieces.sum(axis=1) > block.length).any():
            raise ValueError("a buffer lies outside the block")

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """See `TabularFormat.decode`: of batches whose buffers are known, only offsets are looked at."""
        plain = _plain_columns(block, data, columns)
        return super().decode(block, data, columns) if plain is None else plain

    def unchecked_table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """See `TabularFormat.unchecked_table`: one uncompressed batch is not copied."""
        footer = _own_footer(block)
        try:
            names, roots = _names(footer)
            check_columns(columns, names, block)
            fields = None if columns is None else sorted({roots[names.index(name)] for name in columns})
            stream = pa.PythonFile(_TwoInOne(footer, data), "r")
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
            with pa.ipc.open_stream(stream, options=options) as reader:
                table = reader.read_all()
            table.validate()  # Arrow trusts lengths in the message, and aborts the process where they lie
        except BROKEN as error:
            raise block.corrupt(f"record batch cannot be decoded: {error}") from error
        if table.num_rows != block.num_samples:
            raise block.corrupt(f"{table.num_rows} rows where {block.num_samples} were indexed")
        return table

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened; raises as `decode` does.

        Every value is checked, so that pyarrow may compute with them; `columns_of` checks for itself.
        """
        table = self.unchecked_table(block, data, columns)
        try:
            for chunk in (chunk for column in table.columns for chunk in column.chunks):
                check_nested(chunk)
        except BROKEN as error:
            raise block.corrupt(f"record batch cannot be decoded: {error}") from error
        return table


class ArrowStreamFormat(ArrowFileFormat):
    """Arrow IPC streams; a file is recognised. The two differ by their bytes, not by their index."""

    name = "arrow-stream"


class _TwoInOne(io.RawIOBase):
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


@lru_cache(maxsize=64)
def _names(footer: bytes) -> tuple[list[str], list[int]]:
    """Column names, structs flattened, and the number of the top-level field each lies in."""
    schema = pa.ipc.read_schema(pa.BufferReader(footer))
    pairs = [(column.name, i) for i in range(len(schema)) for column in named_columns(pa.schema([schema[i]]))]
    return [name for name, _ in pairs], [i for _, i in pairs]


def _schema_of(footer: bytes, end: bytes) -> pa.Schema:
    """The schema that the first message tells, and so does the end of a file (b"" for a stream)."""
    schema = pa.ipc.read_schema(pa.BufferReader(footer))
    if end and not schema.equals(pa.ipc.open_file(pa.BufferReader(HEAD + end)).schema):
        raise pa.ArrowInvalid("the one at the file's end differs")
    return schema


def _check_lengths(batches: Iterable[Message], schema: pa.Schema, shard: Shard) -> None:
    """Raise where a batch has other arrays than the schema, or columns of other lengths than its rows."""
    firsts = [0, *accumulate(len(_owners(field.name, field.type)) for field in schema)]
    for message in batches:
        if len(message.lengths) != firsts[-1] or {message.lengths[i] for i in firsts[:-1]} - {message.rows}:
            reason = f"broken Arrow message: a record batch of {message.rows} rows whose columns have others"
            raise shard.corrupt(reason, message.offset)


def _dictionary_indexes(
    blocks: Iterable[Sequence[Message]], dictionaries: Sequence[Message], schema_bytes: int
) -> list[bytes]:
    """The parts of the footer that hold for each block: the schema, and dictionaries as they are there."""
    ends = list(accumulate((m.length for m in dictionaries), initial=schema_bytes))
    in_force: dict[int, list[tuple[int, int]]] = {}
    indexes, number = list[bytes](), 0
    for block in blocks:
        while number < len(dictionaries) and dictionaries[number].offset < block[0].offset:
            message = dictionaries[number]
            before = in_force.get(message.dictionary, []) if message.is_delta else []
            in_force[message.dictionary] = [*before, (ends[number], ends[number + 1])]
            number += 1
        parts = sorted(part for spans in in_force.values() for part in spans)
        indexes.append(np.array([(0, schema_bytes), *parts], "<i8").tobytes())
    return indexes


def _own_footer(block: Block) -> bytes:
    """The schema and the dictionaries of a block."""
    footer = bytes(block.footer)
    if not len(block.index) or _plain_footer(footer) is not None:
        return footer
    return b"".join(footer[start:end] for start, end in np.frombuffer(block.index, "<i8").reshape(-1, 2))


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
class _BlockSizes:
    """The sizes of decoded blocks of a shard."""

    schema: pa.Schema
    specs: Mapping[str, ColumnSpec]
    entry_bytes: float
    """Mean size of the entries of a dictionary, of the largest such."""

    def decoded_bytes(self, file: BinaryIO, block: Sequence[Message], shard: Shard) -> int:
        """Bytes of one block, estimated from its batches' headers."""
        bools = {name: spec for name, spec in self.specs.items() if spec.dtype == "bool"}
        nested, total = columns_of_kind(self.specs, "json"), 0
        copies = 1 + bool(columns_of_kind(self.specs, "bytes_list"))
        for message in block:
            sizes = _true_sizes(file, message, shard)
            total += message.length - sum(stored for _, stored in message.buffers) + copies * sum(sizes)
            total += decoded_bytes(self.specs, message.rows)[1] + decoded_bytes(bools, message.rows)[0]
            if nested:
                texts = _JsonText(iter(message.lengths), iter(sizes), iter(message.views), self.entry_bytes)
                total += min(LARGEST, texts.of_columns(self.schema, nested))
        return total


@dataclass
class _JsonText:
    """An upper bound of the bytes of the JSON text of a batch's columns, by the header's vectors.

    Goes through types and vectors side by side; a vector that is too short (damage) counts as zeros. A
    constant times the batch's bytes would not do: a code of a dictionary stands for any length of text, and a
    list of nulls has no bytes at all (docs/notes/design.md).
    """

    lengths: Iterator[int]
    """The lengths of the arrays, parents before children."""
    buffers: Iterator[int]
    """The bytes of each buffer."""
    views: Iterator[int]
    """The number of buffers that each array of string views has for its text."""
    entry_bytes: float
    """Mean size of an entry of the dictionaries, which lie elsewhere."""

    def of_columns(self, fields: Iterable[pa.Field], names: Collection[str], prefix: str = "") -> int:
        """Bytes of the named columns, structs flattened."""
        total = 0
        for field in fields:
            if pa.types.is_struct(field.type):
                next(self.lengths, 0)
                self._take(1)
                total += self.of_columns(list(field.type), names, f"{prefix}{field.name}.")
            else:
                _, text_bytes = self._of(field.type)
                total += text_bytes if prefix + field.name in names else 0
        return total

    def _of(self, kind: pa.DataType) -> tuple[int, int]:
        """Values of the next array, and bytes of their text with that of the arrays below.

        Text counts twice: for itself, and for what is escaped in it and the Arrow form that it is made from.
        """
        while isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        count = next(self.lengths, 0)
        if pa.types.is_dictionary(kind):
            self._take(2)
            return count, _value_bytes(kind.value_type) * count + 2 * int(count * self.entry_bytes)
        if pa.types.is_run_end_encoded(kind):
            self._of(kind.run_end_type)
            runs, text_bytes = self._of(kind.value_type)
            return count, text_bytes * count // max(1, runs)  # a run is as long as runs are on average
        if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            self._take(1)
            return count, _VALUE_BYTES * count + 2 * self._take(1 + next(self.views, 0))  # short text: views
        if is_text(kind) or is_bytes(kind):
            self._take(2)
            return count, _VALUE_BYTES * count + 2 * self._take(1)
        if pa.types.is_nested(kind):
            self._take(kind.num_buffers - pa.types.is_union(kind))  # pyarrow counts a bitmap unions lack
            children = [kind.field(i) for i in range(kind.num_fields)]
            names = sum(len(child.name.encode()) + 4 for child in children) if pa.types.is_struct(kind) else 0
            return count, (_VALUE_BYTES + names) * count + sum(self._of(child.type)[1] for child in children)
        self._take(0 if pa.types.is_null(kind) else 2)
        return count, _value_bytes(kind) * count

    def _take(self, num_buffers: int) -> int:
        return sum(next(self.buffers, 0) for _ in range(num_buffers))


def _value_bytes(kind: pa.DataType) -> int:
    return NUMBER_BYTES if pa.types.is_integer(kind) or pa.types.is_floating(kind) else _VALUE_BYTES


def _true_sizes(file: BinaryIO, message: Message, shard: Shard) -> list[int]:
    """Bytes of a batch's buffers; compressed ones begin with their true size, -1 for "as is"."""
    if not message.is_compressed:
        return [stored for _, stored in message.buffers]
    sizes = []
    for offset, stored in message.buffers:
        size = stored
        if stored:
            file.seek(offset)
            size = int.from_bytes(file.read(8), "little", signed=True)
            if not -1 <= size < LARGEST:
                raise shard.corrupt(f"a compressed buffer of {size} bytes", offset)
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


def _mean_items(schema: pa.Schema, batches: Sequence[Message], columns: Collection[str]) -> dict[str, int]:
    """Items of the lists of each column, where they are most."""
    owners = [owner for field in schema for owner in _owners(field.name, field.type)]
    items = {name: 1 + owners.index(name) for name in columns}  # the array behind that of the lists
    return {
        name: math.ceil(max((m.lengths[index] / m.rows for m in batches), default=0))
        for name, index in items.items()
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


# ---- record batches of plain values ----------------------------------------------------------------------
#
# pyarrow takes 0.2 ms to read a block of two batches, half as long as copying it. Where they are large, and
# of numbers, text and byte strings alone, a block's index has for each of them, int64 each: its first byte in
# the block, the bytes of its header and their CRC-32, its rows, and of each buffer the first byte and the
# length; that of a bitmap is 0 if no value is missing. What differs from that in any way, pyarrow reads, and
# finds what is wrong.


class _Plain(Struct, frozen=True):
    """A column of plain values."""

    dtype: np.dtype[Any]
    """Type of its numbers, or of its offsets."""
    buffer: int
    """The number of its first buffer, a bitmap."""
    has_offsets: bool


def _plain_index(batches: Sequence[Message], known: dict[str, _Plain | None]) -> bytes:
    start, length = batches[0].offset, sum(m.length for m in batches)
    if length < _LEAST_BYTES * len(batches):
        return b""
    rows = []
    for m in batches:
        if m.is_compressed or len(m.buffers) != _num_buffers(known):
            return b""
        buffers = [(offset - start, size) for offset, size in m.buffers]
        for column, nulls in zip(known.values(), m.null_counts, strict=True):
            if column is not None:
                buffers[column.buffer] = 0, int(nulls != 0)
        facts = (m.offset - start, m.length - m.body_length, m.head_sum, m.rows)
        rows.append([*facts, *(number for pair in buffers for number in pair)])
    return np.array(rows, "<i8").tobytes()


def _index_table(block: Block) -> NDArray[np.int64] | None:
    """The batches of an index; None: it is none of this schema."""
    known = _plain_footer(bytes(block.footer)) if len(block.index) else None
    width = 8 * (_FACTS + 2 * _num_buffers(known)) if known else 0
    if not width or len(block.index) % width:
        return None
    return np.frombuffer(block.index, "<i8").reshape(-1, width // 8)


def _plain_columns(block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns | None:
    """The columns of a block, views of `data` where nothing need be joined; None: pyarrow is to read."""
    table = _index_table(block)
    if table is None or len(data) != block.length:
        return None
    known = _plain_footer(bytes(block.footer)) or {}
    names = list(known) if columns is None else columns
    content, values = np.frombuffer(data, np.uint8), dict[str, Column]()
    batches: list[list[int]] = table.tolist()
    if any(zlib.crc32(data[start : start + size]) != checksum for start, size, checksum, *_ in batches):
        return None
    for name in names:
        column = known.get(name)
        value = None if column is None else _plain_column(content, column, batches)
        if value is None:
            return None
        values[name] = value
    return values


def _plain_column(
    content: NDArray[np.uint8], column: _Plain, batches: Sequence[Sequence[int]]
) -> Column | None:
    pieces, lengths, dtype = [], [], column.dtype
    index = _FACTS + 2 * column.buffer
    for batch in batches:
        nulls, start, size = batch[index + 1 : index + 4]
        nbytes = (batch[3] + column.has_offsets) * dtype.itemsize
        if nulls or size < nbytes:
            return None
        numbers = content[start : start + nbytes].view(dtype)
        if column.has_offsets:
            first, nbytes = batch[index + 4 : index + 6]
            offsets = numbers.astype(np.int64)
            lengths.append(np.diff(offsets))
            if offsets[0] < 0 or offsets[-1] > nbytes or lengths[-1].min(initial=0) < 0:
                return None
            numbers = offsets[:-1] + first
        pieces.append(numbers)
    joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Spans(content, joined, np.concatenate(lengths)) if column.has_offsets else joined


@lru_cache(maxsize=64)
def _plain_footer(footer: bytes) -> dict[str, _Plain | None] | None:
    return _plain_fields(pa.ipc.read_schema(pa.BufferReader(footer)))


def _plain_fields(schema: pa.Schema) -> dict[str, _Plain | None] | None:
    """Return the columns of a schema by name, None for those of bits; None: it has others, too."""
    fields, buffer = dict[str, _Plain | None](), 0
    for field in schema:
        kind = field.type
        is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        if is_large or pa.types.is_string(kind) or pa.types.is_binary(kind):
            fields[field.name] = _Plain(
                np.dtype(np.int64 if is_large else np.int32), buffer, has_offsets=True
            )
            buffer += 3
            continue
        dtype = dtype_of(kind) if pa.types.is_primitive(kind) else None
        if dtype is None:
            return None
        fields[field.name] = None if dtype == np.bool_ else _Plain(dtype, buffer, has_offsets=False)
        buffer += 2
    return fields if len(fields) == len(schema) else None


def _num_buffers(known: dict[str, _Plain | None]) -> int:
    return sum(3 if column is not None and column.has_offsets else 2 for column in known.values())
