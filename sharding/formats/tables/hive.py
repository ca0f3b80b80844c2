"""Files of any format in folders that are called by values, `label=cat/`: these are columns of all samples.

What the folders of a shard say is one Arrow row, which is kept in front of the footer of its own format (see
`format`). That format does all else, and never sees these columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import Block, Columns, ColumnSpec, Format, Shard, ShardScan, Spans
from sharding.formats.arrow.columns import TabularFormat, columns_of
from sharding.formats.arrow.schema import BROKEN, decoded_bytes, specs_of
from sharding.formats.tables.format import common_to_all, facts_in, repeated, with_facts

_TRAITS = (
    "sibling_suffix",
    "may_lack_sibling",
    "has_keys",
    "has_empty_samples",
    "columns_are_extensions",
    "widens",
    "token_column",
    "listing_name",
    "if_changed",
    "alternatives",
    "rule",
)


class FolderValues(Struct, frozen=True, eq=False, kw_only=True):
    """The values that the folders of a file are called by."""

    values: Mapping[str, pa.Scalar]
    """By column."""
    listed: Any = None
    """The entry of it in a file that lists the shards, as its own format is given it."""


def in_folders(*, inner: Format, version: str = "") -> Format:
    """The format of files that lie in such folders; `version`: names and types of the columns."""
    return (HiveTable if isinstance(inner, TabularFormat) else HiveFormat)(inner, version)


class HiveFormat(Format):
    """Files of another format with the columns that their folders are called by.

    Where a file stores a column of the same name, that is the column. Where such a column is asked for, whole
    blocks are read: it lies nowhere in a file.
    """

    name = "hive"

    def __init__(self, inner: Format, version: str) -> None:
        self.inner, self.version, self.of = inner, version, inner.name
        for trait in _TRAITS:
            setattr(self, trait, getattr(inner, trait))

    def options(self) -> dict[str, str | int]:
        """Return names and types of the columns, and the files' own format and options."""
        of: dict[str, str | int] = {} if self.of == "parquet" else {"of": self.of}
        return {"version": self.version, **of, **self.inner.options()}

    def scan(
        self,
        file: BinaryIO,
        shard: Shard,
        *,
        block_bytes: int,
        listed: FolderValues | None = None,
        **beside: Any,
    ) -> ShardScan:
        """Index one file as its own format does; `listed`: what its folders say."""
        if listed is None:
            reason = "is indexed as a file in folders that are called by values: give the uppermost folder"
            raise shard.corrupt(reason)
        if self.inner.listing_name:
            beside["listed"] = listed.listed
        scan = self.inner.scan(file, shard, block_bytes=block_bytes, **beside)
        stored = {part for name in scan.schema for part in (name, name.partition(".")[0])}
        values = {name: value for name, value in listed.values.items() if name not in stored}
        arrays = [pa.array([value.as_py()], value.type) for value in values.values()]
        row = pa.RecordBatch.from_arrays(arrays, names=list(values))
        full = frozenset(name for name, value in values.items() if value.is_valid)
        specs = {
            name: replace(spec, is_index=False) for name, spec in specs_of(row.schema, null_free=full).items()
        }
        all_rows = f"all {int(scan.num_samples.sum()):,} rows of a file whose folder has no value"
        return replace(
            scan,
            nbytes=scan.nbytes + _sample_bytes(row.schema) * scan.num_samples,
            schema={**scan.schema, **specs},
            footer=with_facts(row, scan.footer),
            missing={**scan.missing, **dict.fromkeys(values.keys() - full, all_rows)},
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the row of facts cannot be read, or as the files' own format does."""
        try:
            self.inner.check(_plain(block))
        except BROKEN as error:
            raise ValueError(f"what its folders say cannot be read: {error}") from error

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """See `Format.locate`; None also where a column of folders is asked for."""
        names = _row(block).schema.names
        # Numbers that are delivered as they lie are so in all blocks, and those of folders lie nowhere.
        if self.inner.locates_numbers or (names and (columns is None or not {*names}.isdisjoint(columns))):
            return None
        return self.inner.locate(_plain(block), columns)

    def value_bytes(self, block: Block, column: str) -> NDArray[np.int64] | None:
        """See `Format.value_bytes`; of columns of folders, `known_values` tells."""
        return None if column in _row(block).schema.names else self.inner.value_bytes(_plain(block), column)

    def num_missing(self, block: Block, column: str) -> int | None:
        """See `Format.num_missing`."""
        row = _row(block)
        if column not in row.schema.names:
            return self.inner.num_missing(_plain(block), column)
        return block.num_samples * int(row.column(column).null_count)

    def known_values(self, block: Block, column: str) -> list[Any]:
        """See `Format.known_values`."""
        row = _row(block)
        if column not in row.schema.names:
            return self.inner.known_values(_plain(block), column)
        return [row.column(column)[0].as_py()] * block.num_samples

    def shard_name(self, url: str, footer: bytes | memoryview) -> str:
        """See `Format.shard_name`."""
        return self.inner.shard_name(url, _apart(bytes(footer))[1])

    def num_passed_over(self, footer: bytes) -> int:
        """See `Format.num_passed_over`."""
        return self.inner.num_passed_over(_apart(footer)[1])

    def select(self, block: Block, columns: Sequence[str]) -> list[tuple[int, int]]:
        """See `Format.select`: nothing is read for columns of folders."""
        names = _without(_row(block), columns)
        return self.inner.select(_plain(block), names) if names else []

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """See `Format.decode`."""
        row = _row(block)
        names = None if columns is None else _without(row, columns)
        decoded = self.inner.decode(_plain(block), data, names) if names is None or names else {}
        return {**decoded, **columns_of(_columns(row, block, columns), None, block)}

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """See `Format.decode_as`."""
        row = _row(block)
        stored_specs = {name: spec for name, spec in specs.items() if name not in row.schema.names}
        decoded = self.inner.decode_as(_plain(block), data, stored_specs) if stored_specs else {}
        return {**decoded, **columns_of(_columns(row, block, list(specs)), None, block, specs)}

    def keys(self, block: Block, data: memoryview) -> list[str]:
        """See `Format.keys`."""
        return self.inner.keys(_plain(block), data)

    def sample_offsets(self, block: Block, data: memoryview | None) -> NDArray[np.int64] | None:
        """See `Format.sample_offsets`."""
        return self.inner.sample_offsets(_plain(block), data)


class HiveTable(HiveFormat, TabularFormat):
    """The same of files whose blocks are Arrow tables."""

    inner: TabularFormat

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """See `TabularFormat.table`."""
        row = _row(block)
        folder_columns = _columns(row, block, columns)
        names = None if columns is None else _without(row, columns)
        if names is not None and not names:
            return folder_columns
        table = self.inner.table(_plain(block), data, names)
        for field, column in zip(folder_columns.schema, folder_columns.columns, strict=True):
            table = table.append_column(field, column)
        return table

    def schema(self, footer: bytes) -> pa.Schema:
        """The columns that are stored, and those of folders."""
        row, inner_footer = _apart(footer)
        stored = self.inner.schema(inner_footer)
        return pa.schema([*stored, *row.schema], stored.metadata)

    def matching_groups(
        self, footer: bytes, expression: Any, common: Any = None, schema: pa.Schema | None = None
    ) -> list[int] | None:
        """See `TabularFormat.matching_groups`; none where what all rows have in common rules them out."""
        import pyarrow.dataset as ds  # it imports pandas, which takes 0.3 s

        row, inner_footer = _apart(footer)
        common, schema, kind = common_to_all(row), self.schema(footer), ds.ParquetFileFormat()
        fragment = kind.make_fragment(pa.BufferReader(b""), partition_expression=common)
        if common is not None and not any(
            True for _ in ds.FileSystemDataset([fragment], schema, kind).get_fragments(expression)
        ):
            return []
        return self.inner.matching_groups(inner_footer, expression, common, schema)


def _row(block: Block) -> pa.RecordBatch:
    try:
        return _apart(bytes(block.footer))[0]
    except BROKEN as error:
        reason = f"the catalog has no footer that can be read: {error}; index the folders again"
        raise block.corrupt(reason) from error


@lru_cache(maxsize=64)
def _apart(footer: bytes) -> tuple[pa.RecordBatch, bytes]:
    """The row of values of a shard, and the footer of its own format."""
    if not footer:  # of a shard without a byte
        return pa.RecordBatch.from_arrays([], names=[]), footer
    row, inner_footer = facts_in(footer)
    # Catalogs of before have the columns that are stored, too.
    names = [field.name for field in row.schema if not field.metadata]
    return row.select(names), inner_footer


def _plain(block: Block) -> Block:
    """The block as one of its own format."""
    row, footer = _apart(bytes(block.footer))
    return replace(block, footer=footer, nbytes=block.nbytes - _sample_bytes(row.schema) * block.num_samples)


def _sample_bytes(schema: pa.Schema) -> int:
    """Bytes that the columns of folders take of each sample."""
    return sum(decoded_bytes(specs_of(schema), 1))


def _without(row: pa.RecordBatch, columns: Sequence[str]) -> list[str]:
    """The columns that folders do not tell."""
    return [name for name in columns if name not in row.schema.names]


def _columns(row: pa.RecordBatch, block: Block, columns: Sequence[str] | None) -> pa.Table:
    """The columns that folders tell, of those that are asked for; None: all."""
    names = [name for name in row.schema.names if columns is None or name in columns]
    return pa.table({name: repeated(row.column(name), block.num_samples) for name in names})
