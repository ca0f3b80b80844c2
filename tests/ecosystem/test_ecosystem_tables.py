"""Delta and Iceberg tables at a version are read as their owners read them.

The fixtures were written by deltalake and pyiceberg; `expected.json` is what these read (`tests/fixtures`).
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from formats_kit import rows_of

from dataflow import ShardedDataset
from sharding.catalog.reading import ColumnReader

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

FIXTURES = Path(__file__).parents[1] / "fixtures"
DELTA, ICEBERG = FIXTURES / "delta", FIXTURES / "iceberg"
Rows = list[dict[str, Any]]
pytestmark = pytest.mark.usefixtures("own_cache")


def told(folder: Path) -> dict[str, dict[str, Rows]]:
    tables: dict[str, dict[str, Rows]] = json.loads((folder / "expected.json").read_text())
    return tables


VERSIONS = [
    (folder / name, version)
    for folder in (DELTA, ICEBERG)
    for name, versions in told(folder).items()
    if name != "vectors"
    for version in versions
]


def stored_rows(dataset: ShardedDataset[Any]) -> Rows:
    """All rows as they are decoded, nulls and all."""
    catalog, codec = dataset.catalog, dataset.catalog.codec()
    reader = ColumnReader(catalog, codec, list(dataset.schema))
    blocks = []
    with closing(dataset.new_reader()) as store:
        for number in range(catalog.num_blocks):
            block = catalog.block(number)
            blocks.append(reader.decode(block, reader.read(block, store.read_into)))
    kinds = {name: spec.kind for name, spec in dataset.schema.items()}
    return [{name: _plain(value, kinds[name]) for name, value in row.items()} for row in rows_of(blocks)]


def _plain(value: Any, kind: str) -> Any:
    if value is None or kind == "fixed":
        return None if value != value else value
    if kind in ("list", "bytes_list"):
        return list(value)
    if kind == "json":
        return json.loads(value)
    return value.decode() if kind == "text" else {"bytes": value.hex()}


def in_order(rows: Rows) -> Rows:
    return sorted(
        [dict(sorted(row.items())) for row in rows], key=lambda row: json.dumps(row, sort_keys=True)
    )


@pytest.mark.parametrize(("table", "version"), VERSIONS, ids=lambda one: getattr(one, "name", one))
def test_rows_are_those_that_the_owner_reads(table: Path, version: str) -> None:
    dataset = ShardedDataset(table, revision=version)
    assert in_order(stored_rows(dataset)) == in_order(told(table.parent)[table.name][version])
    assert dataset.commit == version
