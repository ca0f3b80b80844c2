"""Files of a table (Delta, Iceberg) at one version: Parquet, with columns that the table says more about.

A table says which files there are, and of each what it calls the columns, their types, and values that are
the same in all rows of a file: of partition columns, and of columns that the file is too old to have. One
Arrow row per file holds all of that: a field for each column of the table, whose metadata says what it is
called in the file, or whose value is that of all rows. It is kept in front of the Parquet footer, so that
blocks are read and decoded as those of other Parquet files.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from msgspec import Struct

from sharding.arrow_arrays import number_array
from sharding.blocks import Block, ColumnSpec, Shard, ShardScan
from sharding.errors import ShardError
from sharding.formats.arrow.columns import check_columns
from sharding.formats.arrow.parquet import ParquetFormat
from sharding.formats.arrow.schema import (
    BROKEN,
    decoded_bytes,
    dtype_of,
    is_bytes,
    is_text,
    named_columns,
    specs_of,
)
from sharding.formats.tables.fitting import STORED, UNFIT, TableFile, fitted

_HEAD = struct.Struct("<4sI")  # magic, bytes of the row
_MAGIC = b"tbl1"


class _Opened(Struct, frozen=True):
    """A footer of ours, taken apart."""

    row: pa.RecordBatch
    parquet: bytes
    """The Parquet footer."""
    stored: Mapping[str, str]
    """Column -> what it is called in the file, of those that are stored, structs flattened."""
    names: tuple[str, ...]
    """The columns, structs flattened, in the table's order."""
    schema: pa.Schema
    """Columns as `table` gives them."""
    is_renamed: bool
    """True if a column has another name or type in the file."""


class TableFormat(ParquetFormat):
    """The Parquet files of a table at a version.

    Args:
        version: of the table; kept with its catalogs, and part of what a state says of the samples.
    """

    def __init__(self, *, version: str = "") -> None:
        self.version = version

    def options(self) -> dict[str, str | int]:
        """Return the version."""
        return {"version": self.version}

    def scan(
        self, file: BinaryIO, shard: Shard, *, block_bytes: int, listed: TableFile | None = None
    ) -> ShardScan:
        """Index one file; see `ParquetFormat.scan`. `listed`: what the table says of it.

        Raises:
            CorruptShardError: it is not the file that the table means.
        """
        if listed is None:
            raise shard.corrupt(f"is indexed as a file of a table: give the folder of the {self.name} table")
        if listed.size not in (None, shard.size):
            raise shard.corrupt(
                f"has {shard.size:,} bytes, and {listed.table} says that it has {listed.size or 0:,}: it was "
                "cut short or written over; restore the file, or open another version",
            )
        scan = super().scan(file, shard, block_bytes=block_bytes)
        num_rows = int(scan.num_samples.sum())
        if listed.num_rows not in (None, num_rows):
            raise shard.corrupt(
                f"has {num_rows:,} rows, and {listed.table} says that it has {listed.num_rows:,}: it is "
                "another file under this name; restore it",
            )
        stored = super().schema(scan.footer)
        footer = with_facts(fitted(listed, stored, shard), scan.footer)
        opened = _opened(footer)
        specs = _specs(opened, scan.schema)
        before = {name: scan.schema[of].dtype for name, of in opened.stored.items()}
        # What takes memory besides the file's own columns.
        more = {name: spec for name, spec in specs.items() if spec.dtype != before.get(name)}
        row_bytes = sum(decoded_bytes(more, 1))
        missing = {name: scan.missing[of] for name, of in opened.stored.items() if of in scan.missing}
        for name in _nulls(opened.row):
            missing[name] = f"all {num_rows:,} rows of a file without it"
        return ShardScan(
            offset=scan.offset,
            length=scan.length,
            nbytes=scan.nbytes + row_bytes * scan.num_samples,
            num_samples=scan.num_samples,
            schema=specs,
            index=scan.index,
            footer=footer,
            missing=missing,
        )

    def num_missing(self, block: Block, column: str) -> int | None:
        """See `ParquetFormat.num_missing`; of a column with one value, it is known."""
        opened = _opened_of(block)
        if column in opened.stored:
            return super().num_missing(_plain(block, opened), opened.stored[column])
        return block.num_samples if column in _nulls(opened.row) else 0

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns of a row group under their names and types in the table."""
        opened = _opened_of(block)
        names = opened.names if columns is None else columns
        check_columns(columns, opened.names, block)
        leaves = {name: opened.stored[name] for name in names if name in opened.stored}
        table = super().table(_plain(block, opened), data, list(leaves.values())) if leaves else None
        arrays: dict[str, pa.Array | pa.ChunkedArray] = {}
        for number, field in enumerate(opened.row.schema):
            stored = _stored_name(field)
            if stored is not None and table is not None and stored in table.column_names:
                arrays[field.name] = _brought(table.column(stored), field, block)
            elif stored is None and field.name in names:
                arrays[field.name] = repeated(opened.row.column(number), block.num_samples)
        return pa.table(arrays)

    def schema(self, footer: bytes) -> pa.Schema:
        """Columns of a shard as the table has them."""
        return _opened(footer).schema

    def matching_groups(
        self, footer: bytes, expression: Any, common: Any = None, schema: pa.Schema | None = None
    ) -> list[int] | None:
        """Row groups that may match, by what all rows have in common, and by statistics.

        Statistics are not asked where a column has another name or type in the file.
        """
        opened = _opened(footer)
        if opened.is_renamed:
            return None
        names = [field.name for field in opened.row.schema if _stored_name(field) is None]
        same = common_to_all(opened.row.select(names))
        return super().matching_groups(opened.parquet, expression, same, opened.schema)

    def select(self, block: Block, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Byte ranges of the wanted columns that are stored; see `ParquetFormat.select`."""
        opened = _opened_of(block)
        check_columns(columns, opened.names, block)
        stored = [opened.stored[name] for name in columns if name in opened.stored]
        return super().select(_plain(block, opened), stored) if stored else []


class DeltaFormat(TableFormat):
    """The files of a Delta table at a version."""

    name = "delta"


class IcebergFormat(TableFormat):
    """The files of an Iceberg table at a snapshot."""

    name = "iceberg"


# ---- footers --------------------------------------------------------------------------------------------


def with_facts(row: pa.RecordBatch, footer: bytes) -> bytes:
    """A footer with a row of what is known of all rows of a file in front."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    facts: bytes = sink.getvalue().to_pybytes()
    return _HEAD.pack(_MAGIC, len(facts)) + facts + footer


def _opened_of(block: Block) -> _Opened:
    try:
        return _opened(bytes(block.footer))
    except BROKEN as error:
        reason = f"the catalog has no footer that can be read: {error}; index the table again"
        raise block.corrupt(reason) from error


def facts_in(footer: bytes) -> tuple[pa.RecordBatch, bytes]:
    """The row of facts that a footer begins with, and the rest. Raises one of `BROKEN`."""
    try:
        magic, length = _HEAD.unpack_from(footer)
    except struct.error as error:
        raise pa.ArrowInvalid(str(error)) from error
    if magic != _MAGIC:
        raise pa.ArrowInvalid("it is of no table")
    with pa.ipc.open_stream(pa.BufferReader(footer[_HEAD.size : _HEAD.size + length])) as reader:
        row = reader.read_next_batch()
    row.validate(full=True)
    if row.num_rows != 1 and row.num_columns:
        raise pa.ArrowInvalid(f"{row.num_rows} rows of facts")
    return row, footer[_HEAD.size + length :]


def common_to_all(row: pa.RecordBatch) -> Any:
    """An expression that is true of all rows of a file with these facts; None: there is none."""
    import pyarrow.dataset as ds  # it imports pandas, which takes 0.3 s

    common = None
    for name, column in zip(row.schema.names, row.columns, strict=True):
        if not pa.types.is_nested(column.type):
            field = ds.field(name)
            same = field == column[0] if column[0].is_valid else field.is_null()
            common = same if common is None else common & same
    return common


@lru_cache(maxsize=64)
def _opened(footer: bytes) -> _Opened:
    row, parquet = facts_in(footer)
    of_file = ParquetFormat().schema(parquet)
    leaf_names = [column.name for column in named_columns(of_file)]
    stored: dict[str, str] = {}
    names: list[str] = []
    fields: list[pa.Field] = []
    is_renamed = False
    for field in row.schema:
        stored_name = _stored_name(field)
        if stored_name is None:
            names.append(field.name)
            fields.append(field.remove_metadata())
            continue
        leaves = [name for name in leaf_names if name == stored_name or name.startswith(f"{stored_name}.")]
        for leaf in leaves:
            stored[field.name + leaf.removeprefix(stored_name)] = leaf
            names.append(field.name + leaf.removeprefix(stored_name))
        kind = of_file.field(stored_name).type
        kind = field.type if _is_cast(kind, field.type) else kind
        is_renamed = is_renamed or stored_name != field.name or kind != of_file.field(stored_name).type
        fields.append(pa.field(field.name, kind))
    return _Opened(row, parquet, stored, tuple(names), pa.schema(fields, of_file.metadata), is_renamed)


def _plain(block: Block, opened: _Opened) -> Block:
    """The block as one of a Parquet file that belongs to no table."""
    return replace(block, footer=opened.parquet)


def _stored_name(field: pa.Field) -> str | None:
    """Return what a column is called in the file; None: it is not stored there."""
    name = (field.metadata or {}).get(STORED)
    return None if name is None else name.decode()


def _nulls(row: pa.RecordBatch) -> list[str]:
    """The columns that are null in all rows."""
    return [
        field.name
        for number, field in enumerate(row.schema)
        if _stored_name(field) is None and row.column(number).null_count
    ]


def _specs(opened: _Opened, file_specs: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:
    """Describe the columns, given those that the file has."""
    of_table, specs = specs_of(opened.schema), {}
    for name in opened.names:
        stored = opened.stored.get(name)
        spec = of_table[name]
        if stored is not None:
            before = file_specs[stored]
            spec = before if spec.kind != "fixed" else replace(before, dtype=spec.dtype, unit=spec.unit)
        elif spec.kind not in ("fixed", "other"):
            spec = replace(spec, optional=name in _nulls(opened.row))
        specs[name] = replace(spec, is_index=False)
    for field in opened.row.schema:
        if note := (field.metadata or {}).get(UNFIT):
            specs[field.name] = ColumnSpec("unreadable", note=note.decode())
    return specs


def _is_cast(stored: pa.DataType, target: pa.DataType) -> bool:
    return stored != target and dtype_of(stored) is not None and dtype_of(target) is not None


def _brought(column: pa.ChunkedArray, field: pa.Field, block: Block) -> pa.ChunkedArray:
    """A column of numbers or times in the type of the table; others stay as they are."""
    if not _is_cast(column.type, field.type):
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        reason = f"column {field.name!r} is {column.type} here, of which a value is no {field.type}: {error}"
        raise ShardError(block.shard.url, reason, block.offset, stage="decode") from error


def repeated(value: pa.Array, num_rows: int) -> pa.Array:
    """A value for each row; of text and bytes, the value is there once."""
    if value.null_count:
        return pa.nulls(num_rows, value.type)
    if is_text(value.type) or is_bytes(value.type):
        codes = number_array(np.zeros(num_rows, np.int32))
        return pa.DictionaryArray.from_arrays(codes, value)
    return pa.repeat(value[0], num_rows)
