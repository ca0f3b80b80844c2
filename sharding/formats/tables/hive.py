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
        own = self.inner.scan(file, shard, block_bytes=block_bytes, **beside)
        stored = {part for name in own.schema for part in (name, name.partition(".")[0])}
        made = {name: value for name, value in listed.values.items() if name not in stored}
        arrays = [pa.array([value.as_py()], value.type) for value in made.values()]
        row = pa.RecordBatch.from_arrays(arrays, names=list(made))
        full = frozenset(name for name, value in made.items() if value.is_valid)
        specs = {
            name: replace(one, is_index=False) for name, one in specs_of(row.schema, null_free=full).items()
        }
        all_rows = f"all {int(own.num_samples.sum()):,} rows of a file whose folder has no value"
        return replace(
            own,
            nbytes=own.nbytes + _sample_bytes(row.schema) * own.num_samples,
            schema={**own.schema, **specs},
            footer=with_facts(row, own.footer),
            missing={**own.missing, **dict.fromkeys(made.keys() - full, all_rows)},
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the row of facts cannot be read, or as the files' own format does."""
        try:
            self.inner.check(_plain(block))
        except BROKEN as error:
            raise ValueError(f"what its folders say cannot be read: {error}") from error

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """See `Format.locate`; None also where a column of folders is asked for."""
        made = _row(block).schema.names
        # Numbers that are delivered as they lie are so in all blocks, and those of folders lie nowhere.
        if self.inner.locates_numbers or (made and (columns is None or not {*made}.isdisjoint(columns))):
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
        own = _without(_row(block), columns)
        return self.inner.select(_plain(block), own) if own else []

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """See `Format.decode`."""
        row = _row(block)
        own = None if columns is None else _without(row, columns)
        decoded = self.inner.decode(_plain(block), data, own) if own is None or own else {}
        return {**decoded, **columns_of(_columns(row, block, columns), None, block)}

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """See `Format.decode_as`."""
        row = _row(block)
        own = {name: spec for name, spec in specs.items() if name not in row.schema.names}
        decoded = self.inner.decode_as(_plain(block), data, own) if own else {}
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
        made = _columns(row, block, columns)
        own = None if columns is None else _without(row, columns)
        if own is not None and not own:
            return made
        table = self.inner.table(_plain(block), data, own)
        for field, column in zip(made.schema, made.columns, strict=True):
            table = table.append_column(field, column)
        return table

    def schema(self, footer: bytes) -> pa.Schema:
        """The columns that are stored, and those of folders."""
        row, own = _apart(footer)
        stored = self.inner.schema(own)
        return pa.schema([*stored, *row.schema], stored.metadata)

    def matching_groups(
        self, footer: bytes, expression: Any, common: Any = None, schema: pa.Schema | None = None
    ) -> list[int] | None:
        """See `TabularFormat.matching_groups`; none where what all rows have in common rules them out."""
        import pyarrow.dataset as ds  # it imports pandas, which takes 0.3 s

        row, own = _apart(footer)
        common, schema, kind = common_to_all(row), self.schema(footer), ds.ParquetFileFormat()
        fragment = kind.make_fragment(pa.BufferReader(b""), partition_expression=common)
        if common is not None and not any(
            True for _ in ds.FileSystemDataset([fragment], schema, kind).get_fragments(expression)
        ):
            return []
        return self.inner.matching_groups(own, expression, common, schema)


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
    row, own = facts_in(footer)
    # Catalogs of before have the columns that are stored, too.
    made = [field.name for field in row.schema if not field.metadata]
    return row.select(made), own


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
