"""Reading columns of any shard in the types of the dataset, whatever the shard itself has: their bytes alone.

A block is decoded by its own schema. Columns of another type than the dataset's are brought to that, those
that the shard lacks are null. Where a shard has all columns in these types, nothing is done beside decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import ABSENT, Block, Columns, ColumnSpec, Format, Shard
from sharding.catalog.schema import DatasetSchema
from sharding.catalog.table import Catalog
from sharding.catalog.widening import is_alike
from sharding.formats.arrow.columns import TabularFormat, flattened, missing_column
from sharding.formats.arrow.schema import arrow_type

ReadInto = Callable[[Shard, int, NDArray[np.uint8]], object]
"""Fills an array with a shard's bytes from an offset on."""


def read_block(
    block: Block, read_into: ReadInto, ranges: Iterable[tuple[int, int]] | None = None
) -> memoryview:
    """The stored bytes of a block, of which some ranges (offset in the file, length) are read; None: all.

    Pages that hold none of them are never touched, so what is not read takes no memory.
    """
    data = np.empty(block.length, np.uint8)
    for offset, length in [(block.offset, block.length)] if ranges is None else ranges:
        start = offset - block.offset
        read_into(block.shard, offset, data[start : start + length])
    return data.data


class _Own(NamedTuple):
    """The columns that shards of one schema have."""

    present: list[str]
    other_types: dict[str, ColumnSpec]
    """Types of the dataset, of columns that have others."""
    absent: dict[str, ColumnSpec]
    """Likewise, of columns that are not there."""


class ColumnReader:
    """Decodes blocks. Thread-safe.

    Args:
        catalog: of the dataset.
        codec: its format.
        columns: names wanted.
        with_all: whether every column was asked for: one that cannot be delivered is then an error.
    """

    def __init__(
        self, catalog: Catalog, codec: Format, columns: Sequence[str], *, with_all: bool = False
    ) -> None:
        self._catalog, self._codec, self._columns = catalog, codec, columns
        merged = catalog.schema
        self._parts = [self._of_shards(schema, merged, with_all) for schema in catalog.schemas]

    def _of_shards(self, schema: Mapping[str, ColumnSpec], merged: DatasetSchema, with_all: bool) -> _Own:
        fills = self._codec.widens
        present = [name for name in self._columns if name in schema or name not in merged or not fills]
        both = [name for name in present if fills and name in schema and name in merged]
        others = {
            name: replace(merged[name], note=merged.owner(name, schema[name]))
            for name in both
            if schema[name] is not merged[name] and not is_alike(schema[name], merged[name])
        }
        absent = {name: merged[name] for name in self._columns if name not in present}
        if with_all:
            present += [name for name, spec in schema.items() if spec.kind == "other" and not spec.is_index]
        return _Own(present, others, absent)

    def of(self, block: Block) -> _Own:
        """Return what the block has of the columns."""
        return self._parts[self._catalog.schema_of(block)]

    def read(self, block: Block, read_into: ReadInto) -> memoryview:
        """The stored bytes of the block, for `decode` or `table`; no others than the columns' are read."""
        present = self.of(block).present
        return read_block(block, read_into, self._codec.select(block, present) if present else [])

    def decode(self, block: Block, data: memoryview) -> Columns:
        """The columns as arrays and spans; raises as `Format.decode` and `Format.decode_as` do."""
        part = self.of(block)
        if part.other_types:
            columns = self._codec.decode_as(block, data, {**dict.fromkeys(part.present), **part.other_types})
        else:
            columns = self._codec.decode(block, data, part.present) if part.present else {}
        for name, spec in part.absent.items():
            columns[name] = missing_column(spec, block.num_samples, ABSENT)
        return columns

    def table(self, block: Block, data: memoryview) -> pa.Table:
        """The columns as Arrow arrays, structs flattened, of a tabular format.

        Nulls of no type, and columns that are not there, have the dataset's type; others their own.
        """
        assert isinstance(self._codec, TabularFormat)
        part, columns = self.of(block), {}
        flat = flattened(self._codec.table(block, data, part.present)) if part.present else None
        for name in self._columns:
            array = None if flat is None or name in part.absent else flat.column(name)
            if array is None or pa.types.is_null(array.type):
                array = pa.nulls(block.num_samples, arrow_type(self._catalog.schema[name]))
            columns[name] = array
        return pa.table(columns)
