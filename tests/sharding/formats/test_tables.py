"""Files of tables under the table's names, types and values: what the table says, and what the file has.

That whole tables are read as their owners read them: `tests/ecosystem/test_ecosystem_tables.py`.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats_kit import blocks_of, decoded_blocks, rows_of, scan_of, shard_of
from pyarrow.compute import field

from sharding.blocks import Columns
from sharding.errors import CorruptShardError, DataflowError, ShardError
from sharding.formats.tables.fitting import FIELD_ID, TableFile
from sharding.formats.tables.format import DeltaFormat, IcebergFormat

URL = "/t/part-0.parquet"


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def listed(content: bytes, schema: pa.Schema, num_rows: int = 3, **facts: Any) -> TableFile:
    facts = {"constants": {}, "size": len(content), "num_rows": num_rows, **facts}
    return TableFile(table="version 3 of the Delta table /t", schema=schema, **facts)


def read(
    stored: pa.Table, schema: pa.Schema, columns: list[str] | None = None, **facts: Any
) -> list[dict[str, Any]]:
    content = written(stored)
    file = listed(content, schema, len(stored), **facts)
    blocks: list[Columns] = decoded_blocks(DeltaFormat(version="3"), content, URL, columns, listed=file)
    return rows_of(blocks)


NUMBERS = pa.table({"n": pa.array([1, None, 3], pa.int32())})


@pytest.mark.parametrize(
    ("value", "kind", "delivered"),
    [
        ("größe", pa.string(), "größe".encode()),
        (b"\x00\xff", pa.binary(), b"\x00\xff"),
        (-7, pa.int16(), -7),
        (True, pa.bool_(), True),
        (0.5, pa.float64(), 0.5),
        (date(1969, 12, 31), pa.date32(), -1),
        (datetime(1970, 1, 1, 0, 0, 1), pa.timestamp("us", "UTC"), 1_000_000),
        (None, pa.string(), None),
        (None, pa.int64(), None),
    ],
)
def test_a_value_of_all_rows_is_a_column(value: Any, kind: pa.DataType, delivered: Any) -> None:
    schema = pa.schema([("part", kind), ("n", pa.int32())])
    rows = read(NUMBERS, schema, constants={"part": pa.scalar(value, kind)})
    assert rows == [{"part": delivered, "n": n} for n in (1, None, 3)]
    assert (
        read(NUMBERS, schema, ["part"], constants={"part": pa.scalar(value, kind)})
        == [{"part": delivered}] * 3
    )


def test_a_value_of_all_rows_takes_no_read_and_holds_back_row_groups() -> None:
    content = written(pa.table({"n": pa.array([1, 2, 3], pa.int32())}))
    schema = pa.schema([("part", pa.string()), ("n", pa.int32())])
    codec = DeltaFormat(version="3")
    scan = scan_of(codec, content, URL, listed=listed(content, schema, constants={"part": pa.scalar("a")}))
    block = blocks_of(scan, shard_of(content, URL))[0]
    assert codec.select(block, ["part"]) == []
    assert codec.num_missing(block, "part") == 0
    assert codec.num_missing(block, "n") == 0
    assert codec.matching_groups(scan.footer, field("part") == "b") == []
    assert codec.matching_groups(scan.footer, (field("part") == "a") & (field("n") > 1)) == [0]
    assert codec.matching_groups(scan.footer, field("n") > 3) == []


def test_columns_that_a_file_lacks_are_null_and_those_that_the_table_lost_are_gone() -> None:
    schema = pa.schema(
        [
            ("new", pa.float64()),
            ("point", pa.struct([("x", pa.int64()), ("name", pa.string())])),
            ("tags", pa.list_(pa.string())),
        ]
    )
    assert read(NUMBERS, schema) == [{"new": None, "point.x": None, "point.name": None, "tags": None}] * 3


def test_indexing_says_which_samples_lack_a_column() -> None:
    content, schema = written(NUMBERS), pa.schema([("new", pa.string()), ("n", pa.int32())])
    scan = scan_of(DeltaFormat(version="3"), content, URL, listed=listed(content, schema))
    assert scan.missing == {"new": "all 3 rows of a file without it", "n": "1 of 3 rows of row group 0"}
    assert scan.schema["new"].optional


@pytest.mark.parametrize(
    ("stored", "wanted", "values"),
    [
        (pa.array([1, None, -3], pa.int32()), pa.int64(), [1, None, -3]),
        (pa.array([1, 2, 3], pa.int8()), pa.float64(), [1.0, 2.0, 3.0]),
        (pa.array([0.5, None, 2], pa.float32()), pa.float64(), [0.5, None, 2.0]),
        (pa.array([1000, 2000, None], pa.timestamp("ns")), pa.timestamp("us", "UTC"), [1, 2, None]),
        (pa.array([1, None, 0], pa.date32()), pa.timestamp("us"), [86_400_000_000, None, 0]),
    ],
)
def test_numbers_and_times_have_the_tables_type(stored: pa.Array, wanted: pa.DataType, values: Any) -> None:
    assert read(pa.table({"v": stored}), pa.schema([("v", wanted)])) == [{"v": value} for value in values]


def test_a_time_finer_than_the_tables_is_an_error() -> None:
    with pytest.raises(ShardError, match="of which a value is no timestamp"):
        read(pa.table({"v": pa.array([1001], pa.timestamp("ns"))}), pa.schema([("v", pa.timestamp("us"))]))


def with_ids(schema: pa.Schema, ids: Mapping[str, int]) -> pa.Schema:
    return pa.schema([one.with_metadata({FIELD_ID: str(ids[one.name]).encode()}) for one in schema])


def test_columns_are_found_by_name_mapping_and_by_id() -> None:
    stored = pa.table({"a": [1, 2, 3], "b": ["x", "y", None]})
    swapped = pa.schema([("b", pa.int64()), ("c", pa.string())])
    rows = [{"b": 1, "c": b"x"}, {"b": 2, "c": b"y"}, {"b": 3, "c": None}]
    assert read(stored, swapped, stored_names={"b": ["a"], "c": ["b"]}) == rows
    with_field_ids = stored.cast(with_ids(stored.schema, {"a": 1, "b": 2}))
    assert read(with_field_ids, with_ids(swapped, {"b": 1, "c": 2}), by_id=True) == rows
    assert read(with_field_ids, with_ids(swapped, {"b": 9, "c": 2}), by_id=True)[0] == {"b": None, "c": b"x"}
    assert read(stored, with_ids(swapped, {"b": 1, "c": 2}), by_id=True, stored_names={"c": ["z", "b"]})[
        0
    ] == {
        "b": None,
        "c": b"x",
    }
    with pytest.raises(ShardError, match=r"no ids of fields, and .* no name mapping"):
        read(stored, with_ids(swapped, {"b": 1, "c": 2}), by_id=True)


def test_statistics_of_renamed_columns_are_not_asked() -> None:
    content = written(pa.table({"a": [1, 2, 3], "b": [7, 8, 9]}))
    schema = pa.schema([("b", pa.int64())])
    file = listed(content, schema, stored_names={"b": ["a"]})
    scan = scan_of(DeltaFormat(version="3"), content, URL, listed=file)
    assert DeltaFormat(version="3").matching_groups(scan.footer, field("b") < 3) is None


POINTS = pa.table({"point": pa.array([{"x": 1, "name": "a"}]), "boxes": pa.array([[{"left": 1}]])})


def test_a_part_of_a_struct_may_be_younger_than_the_file() -> None:
    point = pa.struct(
        [("x", pa.int64()), ("y", pa.float32()), ("name", pa.string()), ("in", pa.struct([("z", pa.int8())]))]
    )
    schema = pa.schema([("point", point)])
    assert read(POINTS, schema) == [{"point.x": 1, "point.name": b"a", "point.y": None, "point.in.z": None}]


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("point", pa.struct([("x", pa.int64())]), "its part 'point.name' is called otherwise, or is gone"),
        ("boxes", pa.list_(pa.struct([("left", pa.int64()), ("top", pa.int64())])), "younger than the file"),
        ("boxes", pa.list_(pa.struct([("right", pa.int64())])), "'boxes[].left' is called otherwise"),
    ],
)
def test_other_changes_inside_a_column_are_an_error_for_who_asks_for_it(
    name: str, kind: pa.DataType, why: str
) -> None:
    content = written(POINTS)
    file = listed(content, pa.schema([(name, kind)]), 1)
    spec = scan_of(DeltaFormat(version="3"), content, URL, listed=file).schema[name]
    assert spec.kind == "unreadable"
    assert spec.note.endswith("has it: rewrite the table's files")
    assert why in spec.note


def test_a_part_with_another_id_is_another_part() -> None:
    def with_part_id(number: str) -> pa.Schema:
        part = pa.field("x", pa.int64(), metadata={FIELD_ID: number.encode()})
        return pa.schema([pa.field("p", pa.struct([part]), metadata={FIELD_ID: b"1"})])

    stored = pa.table({"p": [{"x": 1}]}, schema=with_part_id("2"))
    assert read(stored, with_part_id("2"), by_id=True) == [{"p.x": 1}]
    content = written(stored)
    file = listed(content, with_part_id("3"), 1, by_id=True)
    spec = scan_of(IcebergFormat(version="3"), content, URL, listed=file).schema["p"]
    assert "its part 'p.x' is another one" in spec.note


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"size": 7}, "and version 3 of the Delta table /t says that it has 7"),
        ({"num_rows": 4}, "has 3 rows, and version 3 .* says that it has 4"),
    ],
)
def test_a_file_that_is_not_the_one_that_the_table_means_is_refused(facts: Any, what: str) -> None:
    content = written(NUMBERS)
    with pytest.raises(CorruptShardError, match=what):
        scan_of(DeltaFormat(version="3"), content, URL, listed=listed(content, NUMBERS.schema, **facts))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.bool_(), pa.time64("us"), pa.list_(pa.int32()), pa.binary(4)]
)
def test_a_file_with_another_type_is_another_file(kind: pa.DataType) -> None:
    content = written(NUMBERS)
    with pytest.raises(CorruptShardError, match=r"column 'n' is int32 here, and .* another file"):
        scan_of(DeltaFormat(version="3"), content, URL, listed=listed(content, pa.schema([("n", kind)])))


def test_a_file_alone_is_no_table() -> None:
    with pytest.raises(CorruptShardError, match="give the folder of the iceberg table"):
        scan_of(IcebergFormat(version="3"), written(NUMBERS), URL)


def test_memory_is_promised_for_what_files_do_not_store() -> None:
    rows = 1000
    stored = pa.table({"n": pa.array([1] * rows, pa.int8())})
    content = written(stored)
    schema = pa.schema([("n", pa.int64()), ("part", pa.int64()), ("name", pa.string())])
    constants = {"part": pa.scalar(1), "name": pa.scalar("x")}
    scan = scan_of(
        DeltaFormat(version="3"), content, URL, listed=listed(content, schema, rows, constants=constants)
    )
    assert int(scan.nbytes[0]) >= rows * (8 + 8 + 16)


def test_damaged_footers_are_errors_of_the_catalog() -> None:
    content = written(NUMBERS)
    schema = pa.schema([("part", pa.string()), ("n", pa.int64())])
    codec = DeltaFormat(version="3")
    scan = scan_of(codec, content, URL, listed=listed(content, schema, constants={"part": pa.scalar("a")}))
    block = blocks_of(scan, shard_of(content, URL))[0]
    data = memoryview(content)[block.offset : block.offset + block.length]
    footer, chosen = bytes(scan.footer), random.Random(0)
    for _ in range(300):
        at = chosen.randrange(len(footer))
        damaged = bytearray(footer)
        damaged[at] ^= 1 << chosen.randrange(8)
        if chosen.random() < 0.2:
            del damaged[at:]
        with suppress(DataflowError):
            codec.decode(replace(block, footer=bytes(damaged)), data, ["part", "n"])
