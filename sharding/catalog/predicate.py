"""Conditions on columns: which blocks cannot match, and which rows do.

A condition is a pyarrow expression (`pyarrow.compute.field("year") > 1990`). Row groups of Parquet files are
ruled out by the statistics in their footers, by pyarrow's own rules, without reading data. What remains
is decided row by row on Arrow tables, so nulls, strings and times compare as Arrow compares them; a row for
which the condition is null is left out. Samples of tar are rows, too: of each member that they have its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import Block, Format
from sharding.catalog.table import Catalog
from sharding.formats.arrow.columns import TabularFormat
from sharding.formats.arrow.schema import leaves

_UNFIT = (pa.ArrowException, KeyError, TypeError, ValueError)


class Predicate:
    """An expression bound to the columns of a shard.

    Raises `ValueError` for what is no condition on these columns.
    """

    def __init__(self, expression: Any, schema: pa.Schema) -> None:
        self._expression, self._schema = expression, schema
        try:
            kind = _evaluated(expression, schema.empty_table()).type
        except _UNFIT as error:
            raise ValueError(f"{expression} does not fit the columns {schema.names}: {error}") from error
        if kind != pa.bool_():
            raise ValueError(f"a filter must be true or false; {expression} is of type {kind}")
        needed = [name for name in schema.names if self._needs(name)]
        if not needed:
            raise ValueError(f"a filter must look at a column, and {expression} does not")
        self._fields = pa.schema([schema.field(name) for name in needed])
        self.fields = needed
        """Likewise, structs whole."""
        self.columns = [name for name, _ in leaves(self._fields)]
        """Columns the condition looks at, structs flattened."""

    def _needs(self, name: str) -> bool:
        rest = pa.schema([field for field in self._schema if field.name != name])
        try:
            _evaluated(self._expression, rest.empty_table())
        except _UNFIT:
            return True
        return False

    def holds(self, table: pa.Table) -> NDArray[np.bool_]:
        """Which rows match, bool [rows]."""
        table = table.select(self._fields.names).cast(self._fields)  # dictionaries become plain strings
        mask: NDArray[np.bool_] = _evaluated(self._expression, table).fill_null(False).to_numpy()
        return mask


def member_schema(columns: Iterable[str]) -> pa.Schema:
    """What can be asked of samples whose columns are their members: which they have, of how many bytes."""
    return pa.schema([(name, pa.struct([("size", pa.int64())])) for name in columns])


def member_table(codec: Format, blocks: Sequence[Block], columns: Sequence[str]) -> pa.Table:
    """The members of the samples of some blocks, by their indexes alone; null where a sample has none."""
    members = {}
    for name in columns:
        sizes = np.concatenate([_sizes(codec, block, name) for block in blocks])
        lacks = pa.array(sizes < 0)
        members[name] = pa.StructArray.from_arrays([pa.array(sizes)], ["size"], mask=lacks)
    return pa.table(members)


def _sizes(codec: Format, block: Block, column: str) -> NDArray[np.int64]:
    sizes = codec.value_bytes(block, column)
    assert sizes is not None  # the index of a sample's members has them
    return sizes


def _evaluated(expression: Any, table: pa.Table) -> pa.ChunkedArray:
    if not table.num_columns:  # pyarrow would lose the number of rows
        table = table.append_column("__row__", pa.nulls(table.num_rows))
    import pyarrow.dataset as pads  # it imports pandas, which takes 0.3 s

    scanner = pads.dataset(table).scanner(columns={"holds": expression}, use_threads=False)
    return scanner.to_table().column("holds")


def blocks_that_may_match(catalog: Catalog, expression: Any) -> NDArray[np.bool_]:
    """Blocks whose statistics do not rule the condition out, bool [blocks]: all, where there are none."""
    may = np.ones(catalog.num_blocks, bool)
    codec = catalog.codec()
    if not isinstance(codec, TabularFormat):
        return may
    for shard in range(catalog.num_shards):
        first, last = (int(n) for n in catalog.first_block[shard : shard + 2])
        if first == last:
            continue
        groups = codec.matching_groups(bytes(catalog.block(first).footer), expression)
        if groups is not None:
            may[first:last] = np.isin(_group_numbers(catalog, first, last), groups)
    return may


def _group_numbers(catalog: Catalog, first: int, last: int) -> NDArray[np.int64]:
    """Row group of each block of a shard; the format keeps a number only where they differ from ordinals."""
    if not len(catalog.block(first).index):
        return np.arange(last - first)
    return np.array([int.from_bytes(catalog.block(b).index, "little") for b in range(first, last)], np.int64)
