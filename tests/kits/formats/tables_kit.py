"""Tables of Delta and Iceberg over Parquet files whose names tell their order; reading takes an extra."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def write_delta(folder: Path, tables: Sequence[pa.Table], part: str) -> None:
    """One commit of a file for each table; `part` is a column of text that only the log has."""
    pytest.importorskip("deltalake")
    (folder / "_delta_log").mkdir()
    fields = [*((field.name, _delta_type(field.type)) for field in tables[0].schema), (part, "string")]
    schema = {
        "type": "struct",
        "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields],
    }
    actions = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {
            "metaData": {
                "id": "0",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(schema),
                "partitionColumns": [part],
                "configuration": {},
                "createdTime": 0,
            }
        },
    ]
    for k, table in enumerate(tables):
        path = folder / f"shard-{k}.parquet"
        pq.write_table(table, path, row_group_size=3)
        add = {"path": path.name, "size": path.stat().st_size, "partitionValues": {part: str(k)}}
        actions.append({"add": {**add, "modificationTime": 0, "dataChange": True}})
    log = "".join(json.dumps(action) + "\n" for action in actions)
    (folder / "_delta_log" / f"{0:020d}.json").write_text(log)


def _delta_type(kind: pa.DataType) -> object:
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _delta_type(kind.value_type), "containsNull": True}
    return {pa.int64(): "long", pa.int32(): "integer", pa.float32(): "float", pa.string(): "string"}[kind]


def write_iceberg(folder: Path, tables: Sequence[pa.Table], added: str) -> None:
    """Files that a table took in, and a column `added` to it afterwards."""
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.catalog.memory import InMemoryCatalog
    from pyiceberg.types import StringType

    files = [str(folder / f"shard-{k}.parquet") for k in range(len(tables))]
    for file, table in zip(files, tables, strict=True):
        pq.write_table(table, file, row_group_size=3)
    catalog = InMemoryCatalog("tests", warehouse=f"file://{folder}")
    catalog.create_namespace("tests")
    written = catalog.create_table("tests.rows", tables[0].schema, location=f"file://{folder}")
    written.add_files(files)
    with written.update_schema() as schema:
        schema.add_column(added, StringType())
    catalog.close()
