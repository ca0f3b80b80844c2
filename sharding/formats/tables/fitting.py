"""Fit the columns of a table to those of one of its files.

The result is one Arrow row: a field for each column of the table, whose metadata says what it is called in
the file, or whose value is that of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct

from sharding.blocks import ColumnSpec, Shard
from sharding.errors import ShardError
from sharding.formats.arrow.schema import is_list, is_media, spec_of

FIELD_ID = b"PARQUET:field_id"
"""The metadata of a field that has its id, as pyarrow reads it from Parquet files."""
STORED, UNFIT = b"stored", b"unfit"
"""Metadata of the fields of a row: the name in the file; why the column cannot be delivered."""


class TableFile(Struct, frozen=True, eq=False, kw_only=True):
    """The facts of one file that a table tells."""

    table: str
    """The table and its version, for messages."""
    schema: pa.Schema
    """The columns of the table. Files of all versions of a table may share it."""
    size: int | None
    """Bytes of the file; None: the table does not say."""
    num_rows: int | None = None
    """Rows of the file; None: the table does not say."""
    constants: Mapping[str, pa.Scalar]
    """By column, a value that all rows have and the file does not store."""
    defaults: Mapping[str, pa.Scalar] = {}
    """By column, the value that rows have if the file lacks the column."""
    stored_names: Mapping[str, Sequence[str]] = {}
    """By column, what it may be called in the file, where that is not its own name."""
    by_id: bool = False
    """True if columns are found by the ids of fields, and by their names only where the file has none."""


def fitted(listed: TableFile, stored: pa.Schema, shard: Shard) -> pa.RecordBatch:
    """The row of facts of a file with these columns."""
    fields, values = [], []
    schema = listed.schema
    stored_names = _found(listed, schema, stored, shard)

    def add(field: pa.Field, metadata: Mapping[bytes, bytes], value: pa.Scalar | None = None) -> None:
        fields.append(pa.field(field.name, field.type, metadata=metadata))
        is_there = value is not None and value.is_valid
        values.append(pa.repeat(value, 1).cast(field.type) if is_there else pa.nulls(1, field.type))

    for field in schema:
        stored_name = stored_names[field.name]
        value = listed.constants.get(field.name, listed.defaults.get(field.name))
        if stored_name is None:
            parts = [field] if value is not None else _flat(field)
            for part in parts:
                add(part, {}, value)
            continue
        _check_type(field, stored.field(stored_name), listed, shard)
        unfit, younger = _unlike_inside(field, stored.field(stored_name), by_id=listed.by_id)
        if unfit:
            note = f"column {field.name!r}: {unfit}, as {listed.table} has it: rewrite the table's files"
            add(pa.field(field.name, pa.null()), {UNFIT: note.encode()})
            continue
        add(field, {STORED: stored_name.encode()})
        for part in younger:
            add(part, {})
    return pa.RecordBatch.from_arrays(values, schema=pa.schema(fields))


def _flat(field: pa.Field) -> list[pa.Field]:
    """The columns that a field is delivered as, structs flattened."""
    if is_media(field.type):
        return [pa.field(field.name, pa.binary())]
    if not pa.types.is_struct(field.type):
        return [field]
    return [leaf for part in field.type for leaf in _flat(part.with_name(f"{field.name}.{part.name}"))]


def _found(listed: TableFile, schema: pa.Schema, stored: pa.Schema, shard: Shard) -> dict[str, str | None]:
    """Return by column of the table what it is called in the file; None: the file does not have it."""
    ids = {_id_of(field): field.name for field in stored if _id_of(field) is not None}
    stored_names: dict[str, str | None] = {}
    for field in schema:
        if field.name in listed.constants:
            stored_names[field.name] = None
        elif listed.by_id and ids:
            stored_names[field.name] = ids.get(_id_of(field))
        else:
            names = listed.stored_names.get(field.name, () if listed.by_id else (field.name,))
            stored_names[field.name] = next((name for name in names if name in stored.names), None)
    if listed.by_id and not ids and not listed.stored_names:
        raise ShardError(
            shard.url,
            f"has no ids of fields, and {listed.table} no name mapping: which column is which, nothing "
            "tells; rewrite the file (rewrite_data_files), or set 'schema.name-mapping.default'",
        )
    twice = [name for name in stored_names.values() if name is not None and stored.names.count(name) > 1]
    if twice:
        raise shard.corrupt(f"has two columns {twice[0]!r}")
    return stored_names


def _id_of(field: pa.Field) -> bytes | None:
    return (field.metadata or {}).get(FIELD_ID)


def _check_type(field: pa.Field, stored: pa.Field, listed: TableFile, shard: Shard) -> None:
    """Raise `CorruptShardError` where the file has a column in a type that the table's cannot come of."""
    spec, other = spec_of(field.type), spec_of(stored.type)
    if spec is None or other is None or other.kind == "null":
        return
    unlike = (spec.kind, spec.feature) != (other.kind, other.feature) or (
        spec.kind == "fixed" and (spec.shape != other.shape or _family(other) not in _FAMILIES[_family(spec)])
    )
    if unlike and {spec.kind, other.kind} != {"list", "json"}:
        raise shard.corrupt(
            f"column {stored.name!r} is {stored.type} here, and {field.type} in {listed.table}: it is "
            "another file under this name; restore it",
        )


def _family(spec: ColumnSpec) -> str:
    if spec.unit:
        return next(name for name in ("timestamp", "date", "duration", "time") if spec.unit.startswith(name))
    return np.dtype(spec.dtype).kind


_FAMILIES = {
    "timestamp": ("timestamp", "date"),
    "date": ("date",),
    "duration": ("duration",),
    "time": ("time",),
    "b": ("b",),
    "i": ("i", "u"),
    "u": ("i", "u"),
    "f": ("i", "u", "f"),
}
"""By what the numbers of a column of the table count, what those of a file may."""


def _unlike_inside(field: pa.Field, stored: pa.Field, *, by_id: bool) -> tuple[str, list[pa.Field]]:
    """Say how the parts of a nested column contradict those of the table, and which it lacks.

    What is lacking in lists and maps is a contradiction, too: their items are delivered whole.
    """
    if not pa.types.is_nested(field.type) or not pa.types.is_nested(stored.type):
        return "", []
    of_table, stored_parts = dict(_parts(field, field.name)), dict(_parts(stored, field.name))
    for path, part in stored_parts.items():
        if path not in of_table:
            return f"its part {path!r} is called otherwise, or is gone", []
        ids = _id_of(part), _id_of(of_table[path])
        if by_id and None not in ids and ids[0] != ids[1]:
            return f"its part {path!r} is another one", []
    younger: dict[str, list[pa.Field]] = {}
    for path, part in of_table.items():
        above = path.rpartition(".")[0]
        if path in stored_parts:
            continue
        if "]." in path:
            return f"its part {path!r} is younger than the file", []
        # Those of a struct that is lacking come with it.
        younger[path] = [] if above in younger else _flat(part.with_name(path))
    return "", [leaf for leaves in younger.values() for leaf in leaves]


def _parts(field: pa.Field, path: str) -> Iterator[tuple[str, pa.Field]]:
    """The fields of structs at any depth, by their paths; what lists and maps hold goes by its place."""
    kind = field.type
    if pa.types.is_struct(kind):
        for inner in kind:
            yield f"{path}.{inner.name}", inner
            yield from _parts(inner, f"{path}.{inner.name}")
    elif pa.types.is_map(kind):
        yield from _parts(kind.key_field, f"{path}[key]")
        yield from _parts(kind.item_field, f"{path}[value]")
    elif is_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _parts(kind.value_field, f"{path}[]")
