"""Parquet: a block is a row group.

A row group's column chunks (dictionary pages included) lie inside one byte range, which is what a worker
reads; the file's footer travels with the block, so decoding needs no other read. pyarrow decodes from a
file that only has the block's bytes, at their offsets. Row groups without rows are no blocks; the row
group's number is then kept in `Block.index`, elsewhere it is `Block.number_in_shard`.

Strings that the writer dictionary-encoded stay so (see `columns`): a column of three distinct values
costs its codes and three strings, whatever the number of rows, and `nbytes` can promise that.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, product
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sharding.blocks import DECIMAL, Block, ColumnSpec, Shard, ShardScan
from sharding.errors import ShardError
from sharding.formats.arrow.columns import TabularFormat, check_columns, flattened
from sharding.formats.arrow.schema import (
    BROKEN,
    NUMBER_BYTES,
    columns_of_kind,
    decoded_bytes,
    is_media,
    leaves,
    named_columns,
    spec_of,
    specs_of,
    with_items,
)

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10
_GAP_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class _ParsedFooter:
    """A parsed footer and what is asked of it at every block."""

    metadata: Any
    schema: pa.Schema
    names: Mapping[str, Sequence[str]]
    """By the name of each column, structs flattened, the leaves that store it."""
    far: Collection[str]
    """Columns of times of 96 bits, which nanoseconds may not hold."""
    texts: dict[str, int]
    """Columns of strings or byte strings: name -> number of the column chunk in a row group."""
    counted: dict[str, int]
    """Likewise, columns whose nulls statistics count: of single values, but floats, whose nulls are NaN."""


class ParquetFormat(TabularFormat):
    """Row groups of a Parquet file; every codec pyarrow was built with. Thread-safe, stateless."""

    name = "parquet"

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index the row groups from the footer alone; `block_bytes` plays no role.

        Raises:
            CorruptShardError: not Parquet, truncated, encrypted, or chunks outside the file.
        """
        raw, size = _read_footer(file, shard)
        try:
            footer = _parse(raw)
        except BROKEN as error:
            raise shard.corrupt(f"unreadable Parquet footer: {error}", size - len(raw)) from error
        metadata = footer.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        for i, group in enumerate(groups):
            if reason := _contradiction(metadata.schema, group, range(group.num_columns)):
                raise shard.corrupt(f"unreadable Parquet footer: row group {i}: {reason}", size - len(raw))
        ranges = [_chunk_ranges(group) for group in groups]
        starts = [min((a for a, _ in r), default=0) for r in ranges]
        ends = [max((a + n for a, n in r), default=0) for r in ranges]
        for i, end in enumerate(ends):
            if end > size - len(raw):
                reason = f"row group {i} reaches to byte {end}, past the data of {size - len(raw)} bytes"
                raise shard.corrupt(reason, starts[i])
        nulls = {
            name: [_num_nulls(group.column(i)) for group in groups] for name, i in footer.counted.items()
        }
        full = {name for name in footer.texts if set(nulls[name]) <= {0}}
        specs = specs_of(footer.schema, null_free=full)
        specs = with_items(
            specs, {name: _mean_items(groups, name) for name in columns_of_kind(specs, "bytes_list")}
        )
        rows = np.array([group.num_rows for group in groups], np.int64)
        used = np.flatnonzero(rows)
        index = [int(i).to_bytes(4, "little") for i in used] if len(used) < len(rows) else None
        return ShardScan(
            offset=np.array(starts, np.int64)[used],
            length=(np.array(ends, np.int64) - np.array(starts, np.int64))[used],
            nbytes=np.array([_decoded_bytes(group, specs) for group in groups], np.int64)[used],
            num_samples=rows[used],
            schema=specs,
            index=index,
            footer=raw,
            missing=_missing(groups, nulls),
        )

    def num_missing(self, block: Block, column: str) -> int | None:
        """Nulls by the statistics; None where the writer left these out, and of lists and nested values."""
        footer, group = _indexed(block)
        if column not in footer.counted:
            return None
        row_group, number = footer.metadata.row_group(group), footer.counted[column]
        if reason := _contradiction(footer.metadata.schema, row_group, [number]):
            what = f"the catalog's footer of row group {group}: {reason}"
            raise block.corrupt(f"{what}; index the shards again")
        return _num_nulls(row_group.column(number))

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns of a row group, see `TabularFormat.table`. Encrypted pages are an error, too."""
        footer, group = _indexed(block)
        check_columns(columns, footer.names, block)
        selection = footer.names.values() if columns is None else [footer.names[name] for name in columns]
        names = list(dict.fromkeys(leaf for leaves in selection for leaf in leaves))
        try:
            table = _read_group(block, data, footer, group, names)
        except BROKEN as error:
            if _NULL_LISTS in str(error):
                _raise_null_lists(block, data, footer, group, names)
            raise block.corrupt(f"row group {group} cannot be decoded: {error}") from error
        if far := [name for name in names if name in footer.far]:
            _check_times(block, table, _read_group(block, data, footer, group, far, "s"))
        if table.num_rows != block.num_samples:
            raise block.corrupt(f"row group {group} has {table.num_rows} rows, not {block.num_samples}")
        return table

    def schema(self, footer: bytes) -> pa.Schema:
        """Columns of a shard, from its footer."""
        return _parse(footer).schema

    def matching_groups(
        self, footer: bytes, expression: Any, common: Any = None, schema: pa.Schema | None = None
    ) -> list[int] | None:
        """Row groups that may hold rows for which a pyarrow expression is true, by their statistics.

        pyarrow reads the statistics from a file that consists of the footer alone. Least and greatest values
        leave NaN out, so each column of floats is asked for twice: by these, and as if its rows were NaN.
        """
        import pyarrow.dataset as ds  # it imports pandas, which takes 0.3 s

        fields, text, groups = schema or self.schema(footer), str(expression), set[int]()
        floats = [n for n, f in leaves(fields) if pa.types.is_floating(f.type) and n.split(".")[-1] in text]
        if len(floats) > 4:  # each one doubles the questions
            return None
        for are_nan in product((False, True), repeat=len(floats)):
            known = ds.scalar(True) if common is None else common
            for name in compress(floats, are_nan):
                known &= (ds.field(name) == math.nan) & (ds.field(*name.split(".")) == math.nan)
            file = pa.BufferReader(_MAGIC + footer)
            fragment = ds.ParquetFileFormat().make_fragment(file, partition_expression=known)
            groups.update(group.id for group in fragment.subset(expression, schema=schema).row_groups)
        return sorted(groups)

    def select(self, block: Block, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Byte ranges (offset in the file, length) that hold the wanted columns of a block.

        Ranges less than 64 KiB apart are joined. Raises `CorruptShardError` for an unknown column.
        """
        footer, number = _indexed(block)
        check_columns(columns, footer.names, block)
        group = footer.metadata.row_group(number)
        pairs = zip(_chunk_ranges(group), map(group.column, range(group.num_columns)), strict=True)
        return _joined([span for span, chunk in pairs if _belongs(chunk.path_in_schema, columns)])


_NULL_LISTS = "Expected all lists to be of size"
"""The error of pyarrow before 26 for fixed-size lists some of which are null."""


def _read_group(
    block: Block, data: memoryview, footer: _ParsedFooter, group: int, names: Sequence[str], unit: str = "ns"
) -> pa.Table:
    with pq.ParquetFile(
        pa.PythonFile(_BlockFile(block, data), "r"),
        metadata=footer.metadata,
        read_dictionary=_encoded_texts(footer, group, names),
        coerce_int96_timestamp_unit=unit,
        pre_buffer=False,  # the bytes are here: Arrow's I/O threads would only keep them longer
    ) as reader:
        return reader.read_row_group(group, columns=list(names), use_threads=False)


def _raise_null_lists(
    block: Block, data: memoryview, footer: _ParsedFooter, group: int, names: Sequence[str]
) -> None:
    """Raise `ShardError` for the first column that this pyarrow cannot read as it holds null lists."""
    for name in names:
        try:
            _read_group(block, data, footer, group, [name])
        except BROKEN as error:
            if _NULL_LISTS not in str(error):
                continue
            what = f"column {name!r} has fixed-size lists that are null, which pyarrow {pa.__version__}"
            cure = "cannot read; install pyarrow 26 or later, or leave the column out by columns="
            raise ShardError(block.shard.url, f"{what} {cure}", block.offset, stage="decode") from error


def _check_times(block: Block, table: pa.Table, seconds: pa.Table) -> None:
    """Raise `ShardError` where nanoseconds do not hold a time of 96 bits, which pyarrow wraps around."""
    for name, column in zip((flat := flattened(seconds)).column_names, flat.columns, strict=True):
        near = flattened(table).column(name).cast(pa.int64()).drop_null().to_numpy() // 10**9
        if (abs(near - column.cast(pa.int64()).drop_null().to_numpy()) > 1).any():
            reason = f"column {name!r} has times before 1677 or after 2262, which no nanoseconds hold"
            raise ShardError(block.shard.url, reason, block.offset, stage="decode")


class _BlockFile(io.RawIOBase):
    """The shard as pyarrow sees it: only the block's bytes are there, read as views of `data`."""

    def __init__(self, block: Block, data: memoryview) -> None:
        super().__init__()
        self._data, self._first, self._size, self._cursor = data, block.offset, block.shard.size, 0

    def read(self, size: int | None = -1) -> memoryview:
        start = self._cursor - self._first
        end = len(self._data) if size is None or size < 0 else start + size
        if start < 0 or end > len(self._data):
            raise OSError(f"bytes {self._cursor} to {self._first + end} lie outside the row group")
        self._cursor = self._first + end
        return self._data[start:end]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._cursor = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._cursor, io.SEEK_END: self._size}[whence]
        return self._cursor

    def tell(self) -> int:
        return self._cursor

    def readable(self) -> bool:
        return True

    seekable = readable


def _read_footer(file: BinaryIO, shard: Shard) -> tuple[bytes, int]:
    """The footer with its length and magic, and the size of the file."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    if tail[-4:] == b"PARE":
        raise shard.corrupt("the Parquet footer is encrypted", size - 4)
    if size < 12 or tail[-4:] != _MAGIC:
        reason = f"not a Parquet file, or truncated: {size} bytes ending in {tail[-4:]!r}, not {_MAGIC!r}"
        raise shard.corrupt(reason, max(0, size - 4))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + 4 > size:
        raise shard.corrupt(f"truncated: a footer of {length} bytes in a file of {size}", size - 8)
    if length > len(tail):
        file.seek(size - length)
        tail = file.read(length)
    return bytes(tail[-length:]), size


@lru_cache(maxsize=64)
def _parse(footer: bytes) -> _ParsedFooter:
    metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
    schema = metadata.schema.to_arrow_schema()
    paths = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    names = {
        name: (f"{name}.bytes", f"{name}.path") if is_media(field.type) else (name,)
        for name, field, _, _ in named_columns(schema)
    }
    specs = {name: spec for name, field in leaves(schema) if name in paths and (spec := spec_of(field.type))}
    encoded = [name for name, spec in specs.items() if spec.kind in ("text", "bytes")]
    texts = {name: paths[name] for name in encoded if specs[name].feature != DECIMAL}
    counted = {
        name: paths[name]
        for name, spec in specs.items()
        if name in texts or (spec.kind == "fixed" and np.dtype(spec.dtype).kind != "f")
    }
    far = {name for name, i in paths.items() if metadata.schema.column(i).physical_type == "INT96"}
    return _ParsedFooter(metadata=metadata, schema=schema, names=names, far=far, texts=texts, counted=counted)


def _indexed(block: Block) -> tuple[_ParsedFooter, int]:
    """The footer that the catalog has, and which row group the block is. `CorruptShardError` if none."""
    group = int.from_bytes(block.index, "little") if block.index else block.number_in_shard
    try:
        footer = _parse(bytes(block.footer))
    except BROKEN as error:
        reason = f"the catalog has no footer that can be read: {error}; index the shards again"
        raise block.corrupt(reason) from error
    facts = footer.metadata
    if group >= facts.num_row_groups or facts.row_group(group).num_rows != block.num_samples:
        reason = f"the catalog says {block.num_samples} rows in row group {group}, and the footer does not"
        raise block.corrupt(f"{reason}; index the shards again")
    return footer, group


def _contradiction(schema: Any, group: Any, columns: Iterable[int]) -> str:
    """Say where a column chunk has another type than its column; "": nowhere.

    pyarrow ends the process where somebody asks such a chunk for its statistics.
    """
    for i in columns:
        chunk, column = group.column(i), schema.column(i)
        if chunk.physical_type != column.physical_type:
            return f"column {column.path!r} is {column.physical_type}, and here {chunk.physical_type}"
    return ""


def _chunk_ranges(group: Any) -> list[tuple[int, int]]:
    """(offset, length) of every column chunk of a row group."""
    ranges = []
    for i in range(group.num_columns):
        chunk = group.column(i)
        first, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
        # Some writers leave a dictionary offset of 0 where there is no dictionary.
        ranges.append((min(first, dictionary or first), chunk.total_compressed_size))
    return ranges


def _belongs(path: str, names: Collection[str]) -> bool:
    """Return whether a column chunk is part of one of the named columns ("tags.list.element" of "tags")."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        end = offset + length
        if joined and offset - sum(joined[-1]) < _GAP_BYTES:
            end, offset = max(sum(joined[-1]), end), joined.pop()[0]
        joined.append((offset, end - offset))
    return joined


def _num_nulls(chunk: Any) -> int | None:
    """Return the number of nulls of a column chunk, by its statistics."""
    statistics = chunk.statistics
    return statistics.null_count if statistics is not None and statistics.has_null_count else None


def _missing(groups: Sequence[Any], nulls: Mapping[str, Sequence[int | None]]) -> dict[str, str]:
    """Say, of columns with nulls by the statistics, how many the first row group has that has any."""
    missing = {}
    for name, counts in nulls.items():
        for number, (group, count) in enumerate(zip(groups, counts, strict=True)):
            if count:
                missing[name] = f"{count:,} of {group.num_rows:,} rows of row group {number}"
                break
    return missing


def _encoded_texts(footer: _ParsedFooter, group: int, columns: Sequence[str]) -> list[str]:
    """Return the string columns that the writer dictionary-encoded throughout this row group.

    A writer that gave the dictionary up shows it: codes take less than 4 bytes a row, compressed or not.
    """
    row_group = footer.metadata.row_group(group)
    return [n for n in columns if n in footer.texts and _is_encoded(row_group.column(footer.texts[n]))]


def _is_encoded(chunk: Any, headers: int = 256) -> bool:
    """`headers`: bytes that the headers of pages may take."""
    if not chunk.dictionary_page_offset:
        return False
    dictionary = chunk.data_page_offset - chunk.dictionary_page_offset
    return bool(chunk.total_compressed_size - dictionary <= 4 * chunk.num_values + headers)


def _decoded_bytes(group: Any, specs: dict[str, ColumnSpec]) -> int:
    fixed, spans = decoded_bytes(specs, group.num_rows)
    nested, lists, numbers = (columns_of_kind(specs, kind) for kind in ("json", "bytes_list", "list"))
    chunks = [group.column(i) for i in range(group.num_columns)] if nested or lists or numbers else []
    texts = sum(_json_bytes(chunk) for chunk in chunks if _belongs(chunk.path_in_schema, nested))
    copies = sum(_decoded_text(chunk) for chunk in chunks if _belongs(chunk.path_in_schema, lists))
    encoded: int = sum(  # more than in their encoding
        max(0, chunk.num_values * np.dtype(specs[name].dtype).itemsize - chunk.total_uncompressed_size)
        for name in numbers
        for chunk in chunks
        if _belongs(chunk.path_in_schema, (name,))
    )
    return max(int(group.total_byte_size), fixed) + spans + texts + 2 * copies + encoded


def _json_bytes(chunk: Any) -> int:
    """Return what a leaf of nested values adds to their JSON text, estimated from above.

    Text counts twice: for itself, and for what is escaped in it and the Arrow form that it is made from.
    """
    # Each value may bring the brackets and names of all levels above it.
    around = NUMBER_BYTES + len(chunk.path_in_schema.encode())
    return 2 * _decoded_text(chunk) + int(chunk.num_values) * around


def _mean_items(groups: Sequence[Any], name: str) -> int:
    """Items of the lists of a column, where they are most; an empty list counts as one."""
    means = [0.0]
    for group in groups:
        chunks = (group.column(i) for i in range(group.num_columns))
        counts = [chunk.num_values for chunk in chunks if _belongs(chunk.path_in_schema, (name,))]
        means.append(max(counts, default=0) / max(1, group.num_rows))
    return math.ceil(max(means))


def _decoded_text(chunk: Any) -> int:
    """Bytes of a column chunk's values, decoded.

    Encoded text does not tell how often each entry of its dictionary is used: every value counts like the
    longer of the two that the statistics show.
    """
    text = int(chunk.total_uncompressed_size)
    statistics = chunk.statistics
    if chunk.physical_type == "BYTE_ARRAY" and statistics is not None and statistics.has_min_max:
        shown = max(len(statistics.min_raw), len(statistics.max_raw))
        if _is_encoded(chunk, 256 + 4 * shown):  # pages repeat both
            text = max(text, shown * int(chunk.num_values))
    return text
