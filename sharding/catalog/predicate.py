"""Conditions on columns: which blocks cannot match, and which rows do.

A condition is a pyarrow expression (`pyarrow.compute.field("year") > 1990`). Row groups of Parquet files are
ruled out by the statistics in their footers, by pyarrow's own rules, without reading data. What remains
is decided row by row on Arrow tables, so nulls, strings and times compare as Arrow compares them; a row for
which the condition is null is left out. Samples of tar are rows, too: of each member that they have its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import Block, Format
from sharding.catalog.table import Catalog
from sharding.formats.arrow.columns import TabularFormat, flattened
from sharding.formats.arrow.schema import arrow_type, is_list, leaves

_UNFIT = (pa.ArrowException, KeyError, TypeError, ValueError)


class Predicate:
    """An expression bound to the columns of a shard.

    A field of a struct is `field("outer", "inner")`, or `field("outer.inner")` as it is delivered. A column
    that the shard lacks and others have is null; nulls without a type have that of others.

    Args:
        expression: pyarrow's.
        schema: of the shard.
        others: of other shards.

    Raises `ValueError` for what is no condition on these columns.
    """

    def __init__(self, expression: Any, schema: pa.Schema, others: Sequence[pa.Schema] = ()) -> None:
        self._expression = expression
        whole = _filled_fields(list(schema), [list(other) for other in others])
        parts = _named_parts(whole, str(expression))
        bound = pa.schema([*whole, *(field.with_name(name) for name, field in parts)])
        try:
            kind = _evaluated(expression, bound.empty_table()).type
        except _UNFIT as error:
            raise ValueError(_misfit(expression, bound, error)) from error
        if kind != pa.bool_():
            raise ValueError(f"a filter must be true or false; {expression} is of type {kind}")
        self._fields = pa.schema([bound.field(i) for i in range(len(bound)) if self._needs(bound, i)])
        if not self._fields.names:
            raise ValueError(f"a filter must look at a column, and {expression} does not")
        try:
            # Some conditions fail only where there is a row.
            row = [pa.nulls(1, field.type) for field in self._fields]
            _evaluated(expression, pa.table(row, schema=self._fields))
        except _UNFIT as error:
            raise ValueError(_misfit(expression, bound, error)) from error
        self.fields = self._fields.names
        """Columns the condition looks at, structs whole."""
        of_parts = {name for name, _ in parts}
        self.columns = [
            name
            for field in self._fields
            for name, _ in ([(field.name, field)] if field.name in of_parts else leaves([field]))
        ]
        """The columns that it needs, structs flattened."""
        stored = [name for name, _ in leaves(schema)]
        self.stored_columns = [name for name in self.columns if name in stored]
        """The columns that the shard has."""
        self.named = [name for name in self.columns if name in self.fields or stored.count(name) < 2]
        """The columns whose name must mean one column; what is named as a field of a struct does."""
        types = {field.name: field.type for field in schema}
        self.is_of_shard = all(types.get(field.name) == field.type for field in self._fields)
        """True if it looks only at columns that the shard has whole, by their names there."""

    def _needs(self, bound: pa.Schema, number: int) -> bool:
        rest = pa.schema([bound.field(i) for i in range(len(bound)) if i != number])
        try:
            _evaluated(self._expression, rest.empty_table())
        except _UNFIT:
            return True
        return False

    def holds(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return which rows match, bool [rows], of a table with the `stored_columns` (structs whole)."""
        mask: NDArray[np.bool_] = _evaluated(self._expression, self._bound(table)).fill_null(False).to_numpy()
        return mask

    def _bound(self, table: pa.Table) -> pa.Table:
        """The columns that are looked at; dictionaries become plain values."""
        flat, columns = flattened(table), {}
        for field in self._fields:
            of = table if field.name in table.column_names else flat
            there = field.name in of.column_names
            column = of.column(field.name) if there else pa.nulls(table.num_rows, field.type)
            columns[field.name] = column.cast(field.type)
        return pa.table(columns)


def _filled_fields(base: Sequence[pa.Field], others: Sequence[Sequence[pa.Field]]) -> list[pa.Field]:
    """The fields with types for what is null, and with fields that are only in others."""
    by_name: dict[str, list[pa.DataType]] = {}
    for field in (field for fields in others for field in fields):
        by_name.setdefault(field.name, []).append(field.type)
    names = {field.name for field in base}
    lacking = [
        pa.field(name, _filled(kinds[0], kinds)) for name, kinds in by_name.items() if name not in names
    ]
    filled = [pa.field(field.name, _filled(field.type, by_name.get(field.name, []))) for field in base]
    return [*filled, *lacking]


def _filled(base: pa.DataType, others: Sequence[pa.DataType]) -> pa.DataType:
    if pa.types.is_null(base):
        known = next((kind for kind in others if not pa.types.is_null(kind)), base)
        return known if pa.types.is_null(known) else _filled(known, others)
    if pa.types.is_struct(base):
        return pa.struct(_filled_fields(list(base), [list(t) for t in others if pa.types.is_struct(t)]))
    if is_list(base) and pa.types.is_null(base.value_type):
        lists = (kind for kind in others if is_list(kind) and not pa.types.is_null(kind.value_type))
        return next(lists, base)
    return base


def _named_parts(fields: Sequence[pa.Field], text: str) -> list[tuple[str, pa.Field]]:
    """Fields of structs that an expression names as they are delivered: "outer.inner"."""
    whole = {field.name for field in fields}
    nested = [field for field in fields if pa.types.is_struct(field.type)]
    return [(name, field) for name, field in leaves(nested) if name in text and name not in whole]


def _misfit(expression: Any, schema: pa.Schema, error: Exception) -> str:
    text = f"{expression} does not fit the columns {schema.names}"
    if "timezone" not in str(error):
        return f"{text}: {error}"
    times = [field for field in schema if pa.types.is_timestamp(field.type) and field.name in str(expression)]
    which = ", ".join(
        f"{field.name!r} has times {'with' if field.type.tz else 'without'} a zone" for field in times
    )
    cure = "compare it with datetime(..., tzinfo=timezone.utc) or datetime(...), as the column is"
    return f"{text}: a time with a zone and one without cannot be compared; {which}; {cure}"


def member_schema(catalog: Catalog, codec: Format) -> pa.Schema:
    """Return the schema of samples whose columns are members: of how many bytes, or values that are known."""
    size, block = pa.struct([("size", pa.int64())]), catalog.block(0)
    return pa.schema(
        [
            (name, arrow_type(spec) if codec.value_bytes(block, name) is None else size)
            for name, spec in catalog.schema.items()
        ]
    )


def member_table(codec: Format, blocks: Sequence[Block], schema: pa.Schema) -> pa.Table:
    """The members of the samples of some blocks, by their indexes alone; null where a sample has none."""
    members = {}
    for field in schema:
        if not pa.types.is_struct(field.type):
            values = (codec.known_values(block, field.name) for block in blocks)
            members[field.name] = pa.array(chain.from_iterable(values), field.type)
            continue
        sizes = np.concatenate([_sizes(codec, block, field.name) for block in blocks])
        lacks = pa.array(sizes < 0)
        members[field.name] = pa.StructArray.from_arrays([pa.array(sizes)], ["size"], mask=lacks)
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


def blocks_that_may_match(
    catalog: Catalog, codec: TabularFormat, expression: Any, predicate_of: Callable[[Block], Predicate]
) -> NDArray[np.bool_]:
    """Blocks whose statistics do not rule the condition out, bool [blocks]: all, where there are none.

    Statistics are those of columns as the shard has them, under the names that they have there.
    """
    may = np.ones(catalog.num_blocks, bool)
    for shard in range(catalog.num_shards):
        first, last = (int(n) for n in catalog.first_block[shard : shard + 2])
        if first == last or not predicate_of(block := catalog.block(first)).is_of_shard:
            continue
        groups = codec.matching_groups(bytes(block.footer), expression)
        if groups is not None:
            may[first:last] = np.isin(_group_numbers(catalog, first, last), groups) if groups else False
    return may


def _group_numbers(catalog: Catalog, first: int, last: int) -> NDArray[np.int64]:
    """Row group of each block of a shard; the format keeps a number only where they differ from ordinals."""
    if not len(catalog.block(first).index):
        return np.arange(last - first)
    return np.array([int.from_bytes(catalog.block(b).index, "little") for b in range(first, last)], np.int64)
