"""Shards of unlike columns and types: what is delivered of them, and what is an error, for whom."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats_kit import lengths_of
from pyarrow.compute import field

from dataflow import DataLoader, Mixture, Optional, Ragged, ShardedDataset
from dataflow.tools.cli import main
from dataflow.tools.inspect.labels import labels_of
from sharding.catalog.file import read_table, write_table
from sharding.catalog.table import Catalog
from sharding.errors import CorruptShardError, SampleError, ShardError

TABLES = pytest.mark.parametrize("ending", ["parquet", "arrow"])
NAIVE, ZONED = dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def write(folder: Path, ending: str, tables: Sequence[pa.Table]) -> str:
    """One shard a table; gives the source."""
    folder.mkdir(exist_ok=True)
    for number, table in enumerate(tables):
        path = str(folder / f"{number}.{ending}")
        if ending == "parquet":
            pq.write_table(table, path)
        else:
            make = pa.ipc.new_file if ending == "arrow" else pa.ipc.new_stream
            with make(path, table.schema) as file:
                file.write_table(table)
    return f"{folder}/*.{ending}"


def of_x(*values: Any) -> list[pa.Table]:
    """Tables of a column x each, as arrays or lists of values, beside row numbers of the dataset."""
    tables, first = [], 0
    for one in values:
        array = one if isinstance(one, pa.Array) else pa.array(one)
        tables.append(pa.table({"x": array, "row": range(first, first + len(array))}))
        first += len(array)
    return tables


def delivered(source: Any, name: str = "x", **options: Any) -> list[Any]:
    """A column by the loader in file order, and the same by random access."""
    dataset = source if not isinstance(source, str) else ShardedDataset(source, **options)
    with DataLoader(dataset, 3, drop_last=False) as loader:
        batches = [batch[name] for batch in loader]
    batches = [batch.rows() if isinstance(batch, Ragged) else batch for batch in batches]
    rows = [one.tolist() if hasattr(one, "tolist") else one for batch in batches for one in batch]
    if isinstance(dataset, ShardedDataset):
        again = [dataset[i][name] for i in range(len(dataset))]
        again = [one.tolist() if hasattr(one, "tolist") else one for one in again]
        np.testing.assert_equal(again, rows)
    return rows


# ---- columns that nobody asks for -----------------------------------------------------------------------

CLASHES: dict[str, tuple[pa.Array, pa.Array]] = {
    "text and numbers": (pa.array(["a"]), pa.array([1])),
    "zones": (pa.array([NAIVE]), pa.array([ZONED])),
    "a decimal": (pa.array([1]).cast(pa.decimal128(21, 2)), pa.array([0.5])),
    "lengths": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), pa.array([[1, 2, 3]], pa.list_(pa.int8(), 3))),
    "bytes and text": (pa.array([b"a"]), pa.array(["a"])),
    "date and time": (pa.array([NAIVE.date()]), pa.array([NAIVE])),
}


@TABLES
@pytest.mark.parametrize("clash", CLASHES)
def test_a_clash_is_an_error_of_who_asks_for_the_column_alone(
    tmp_path: Path, ending: str, clash: str
) -> None:
    source = write(tmp_path, ending, of_x(*CLASHES[clash]))
    assert delivered(source, "row", columns=["row"]) == [0, 1]
    assert list(ShardedDataset(source, columns=["row"]).schema.conflicts) == ["x"]
    for columns in (None, ["x"], {"y": "x"}):
        with pytest.raises(CorruptShardError, match=r"'x' is .* here but .* in .*; leave it out") as caught:
            ShardedDataset(source, columns=columns)
        assert caught.value.shard.endswith(f"1.{ending}")
        assert f"0.{ending}" in caught.value.reason
    dataset: ShardedDataset = ShardedDataset(source, columns=["row"])
    for ask in (
        lambda: dataset.filter(field("x") == 1),
        lambda: lengths_of(dataset.catalog, "x"),
        lambda: labels_of(dataset, "x"),
        lambda: dataset.join(dataset, on="x", suffix="_"),
    ):
        with pytest.raises(CorruptShardError, match=r"'x' is .* here but"):
            ask()


@TABLES
def test_two_routes_to_one_name_are_named_to_who_asks(tmp_path: Path, ending: str) -> None:
    source = write(tmp_path, ending, [pa.table({"a.b": [1], "a": [{"b": 2, "c": 4}], "z": [3]})])
    assert delivered(source, "z", columns=["z", "a.c"]) == [3]
    routes = "two columns are named 'a.b': the column 'a.b' and field 'b' of 'a'; rename"
    dataset: ShardedDataset = ShardedDataset(source, columns=["z"])
    for ask in (
        lambda: ShardedDataset(source),
        lambda: ShardedDataset(source, columns=["a.b"]),
        lambda: dataset.filter(field("a.b") == 1),
    ):
        with pytest.raises(CorruptShardError, match=re.escape(routes)):
            ask()
    assert len(dataset.filter(field("a", "b") == 2)) == 1
    assert len(dataset.filter(field("a", "b") == 1)) == 0


def test_classes_of_other_names_and_other_nested_types_are_no_matter_of_other_columns(tmp_path: Path) -> None:
    tables = []
    for names, nested in (("ab", [[{"k": 1}]]), ("ba", [[{"k": "x", "l": None}]])):
        label = {"_type": "ClassLabel", "names": list(names)}
        metadata = {"huggingface": json.dumps({"info": {"features": {"label": label}}})}
        table = pa.table({"label": [0], "nested": nested, "z": [0]})
        tables.append(table.replace_schema_metadata(metadata))
    source = write(tmp_path, "parquet", tables)
    assert delivered(source, "nested", columns=["nested"]) == [[{"k": 1}], [{"k": "x", "l": None}]]
    with pytest.raises(
        CorruptShardError, match="the classes of column 'label' have other names, or another order, than in "
    ):
        ShardedDataset(source, columns=["label"])


def test_features_go_by_the_names_that_columns_are_delivered_by(tmp_path: Path) -> None:
    label, value = {"_type": "ClassLabel", "names": ["a", "b"]}, {"_type": "Value", "dtype": "int64"}
    metadata = {
        "huggingface": json.dumps(
            {"info": {"features": {"label": label, "s": {"deep": {"k": value}}, "z": value}}}
        )
    }
    table = pa.table({"label": [0], "s": [{"deep": {"k": 1}}], "z": [0]}).replace_schema_metadata(metadata)
    source = write(tmp_path, "parquet", [table])
    dataset: ShardedDataset = ShardedDataset(source)
    assert dataset.features.keys() == {output.name for output in dataset.outputs}
    renamed: ShardedDataset = ShardedDataset(
        source, columns={"y": "label", "k": "s.deep.k", "two": ["z", "z"]}
    )
    assert renamed.features == {"y": label, "k": value}
    assert renamed.select(["k"]).features == {"k": value}
    pq.write_table(table, tmp_path / "other.parquet")
    other: ShardedDataset = ShardedDataset(str(tmp_path / "other.parquet"), columns=["z", "label"])
    joined = renamed.select(["k"]).join(other, on="z", suffix="_2").select(["k", "label"])
    assert joined.features == {"k": value, "label": label}


def test_the_index_command_prints_conflicts_and_does_not_fail(tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path, "parquet", of_x(["a"], [1]))
    assert main(["index", source, "--output", str(tmp_path / "c.catalog")], standalone_mode=False) in (
        0,
        None,
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "conflict 1.parquet: column 'x' is int64 here but text in" in printed
    assert "row: int64" in printed
    assert delivered(str(tmp_path / "c.catalog"), "row", columns=["row"]) == [0, 1]


# ---- columns that some shards lack ----------------------------------------------------------------------


@TABLES
@pytest.mark.parametrize(
    ("values", "missing", "rule"),
    [
        ([7], -1, Optional(default=-1)),
        ([0.5], math.nan, Optional()),
        (["a"], None, Optional()),
        ([b"ab"], [0], Optional(default=b"\0")),
        ([[1, 2]], [], Optional(mask=True)),
        ([["a"]], None, Optional()),
        (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [0, 0], Optional(mask=True)),
    ],
    ids=["int", "float", "text", "bytes", "list", "json", "fixed"],
)
@pytest.mark.parametrize("lack", ["no column", "null type"])
@pytest.mark.one_in(3)
def test_a_column_that_some_shards_lack_is_missing_there(
    tmp_path: Path, ending: str, values: Any, missing: Any, rule: Any, lack: str
) -> None:
    tables = of_x(pa.nulls(2), values)
    if lack == "no column":
        tables[0] = tables[0].drop_columns(["x"])
    source = write(tmp_path, ending, tables)
    there = tables[1]["x"].to_pylist()[0]
    there = list(there) if isinstance(there, bytes) else there
    np.testing.assert_equal(delivered(source, decode={"x": rule}), [missing, missing, there])
    if lack == "null type" and isinstance(there, float):
        np.testing.assert_equal(delivered(source), [missing, missing, there])  # a null of a float is NaN
        return
    with (
        pytest.raises(SampleError, match=r"decode=\{'x': Optional\(") as caught,
        DataLoader(ShardedDataset(source), 3, drop_last=False) as loader,
    ):
        list(loader)
    assert caught.value.shard.endswith(f"0.{ending}")
    kept = ShardedDataset(source, decode={"x": rule}).filter(field("x").is_valid())
    assert delivered(kept) == [there]
    skipping: ShardedDataset = ShardedDataset(source, on_error="skip")
    with DataLoader(skipping, 3, drop_last=False) as loader:
        assert [row for batch in loader for row in batch["row"].tolist()] == [2]


def test_a_view_of_shards_that_have_the_column_needs_no_optional(tmp_path: Path) -> None:
    source = write(tmp_path, "parquet", [pa.table({"row": [0]}), *of_x([5, 6])])
    dataset: ShardedDataset = ShardedDataset(source, columns=["x"])
    assert delivered(dataset.skip(1)) == [5, 6]
    with pytest.raises(SampleError, match="the shard has no such column, which other shards have"):
        DataLoader(dataset.take(2), 2)
    with pytest.raises(SampleError, match="lacks this column"):
        dataset[0]
    assert dataset[1] == {"x": 5}


def test_members_that_whole_tars_lack_are_missing_under_optional(tmp_path: Path) -> None:
    for number, names in enumerate((["a.cls", "a.txt"], ["b.cls"])):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 1
                tar.addfile(member, io.BytesIO(b"1"))
    source = f"{tmp_path}/*.tar"
    assert delivered(source, "cls", columns=["cls"]) == [1, 1]
    assert delivered(source, "txt", decode={"txt": Optional()}) == ["1", None]
    with pytest.raises(SampleError, match=r"samples of other shards have; decode=\{'txt': Optional\("):
        DataLoader(ShardedDataset(source), 1)


def test_an_empty_member_before_the_one_that_is_missing_is_not_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, size in (("a.txt", 0), ("a.cls", 1), ("b.cls", 1), ("c.txt", 1)):
            member = tarfile.TarInfo(name)
            member.size = size
            tar.addfile(member, io.BytesIO(b"1"))
    with pytest.raises(SampleError, match="no member 'txt'") as caught:
        DataLoader(ShardedDataset(f"{tmp_path}/0.tar", columns=["txt"]).subset([0, 1]), 1)
    assert caught.value.key == "1"


def test_a_field_that_some_structs_lack_is_missing_there(tmp_path: Path) -> None:
    tables = [pa.table({"m": [{"a": 1, "b": "x"}]}), pa.table({"m": [{"a": 2}]}), pa.table({"z": [1]})]
    source = write(tmp_path, "arrow", tables)
    got = delivered(source, "m.b", columns=["m.b"], decode={"m.b": Optional()})
    assert got == ["x", None, None]


# ---- types that go together ---------------------------------------------------------------------------


@TABLES
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1, None, 3], pa.int32()), pa.array([2**40])),
        (pa.array([1, -3], pa.int16()), pa.array([0.5], pa.float32())),
        (pa.array([2**31 - 1], pa.int32()), pa.array([0.5], pa.float32())),
        (pa.array([2**53]), pa.array([0.5])),
        (pa.array([3]), pa.array([2**63], pa.uint64())),
        (pa.array([[1], [], None], pa.list_(pa.int8())), pa.array([[2**40]])),
        (pa.array([[], None]), pa.array([[0.5]])),
        (pa.array([[]]), pa.array([["a"]])),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), pa.array([[2**40]])),
        (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), pa.array([[1, 2**40]], pa.list_(pa.int64(), 2))),
        (pa.array([[1, 2]]), pa.array([[[1]], []])),
        (pa.array(["a"], pa.string()), pa.array(["b"], pa.large_string())),
        (pa.array(["a", "b", "a"]).dictionary_encode(), pa.array(["b"])),
        (pa.array([1, 1], pa.int8()).dictionary_encode(), pa.array([2**40])),
    ],
    ids=lambda array: str(array.type),
)
@pytest.mark.one_in(3)
def test_types_that_go_together_change_no_value(
    tmp_path: Path, ending: str, one: pa.Array, other: pa.Array
) -> None:
    for number, pair in enumerate(((one, other), (other, one))):
        source = write(tmp_path / str(number), ending, of_x(*pair))
        values = [value for array in pair for value in array.to_pylist()]
        spec = ShardedDataset(source, columns=["x"]).schema["x"]
        nothing = {"fixed": -1, "list": [], "json": None}.get(spec.kind)
        rule = Optional(default=nothing) if None in values else "auto"
        expected = [nothing if value is None else value for value in values]
        assert delivered(source, columns=["x"], decode={"x": rule}) == expected


@TABLES
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([2**53 + 1]), pa.array([0.5])),
        (pa.array([-1]), pa.array([2**63], pa.uint64())),
        (pa.array([2**40], pa.timestamp("s")), pa.array([1], pa.timestamp("ns"))),
        (pa.array([[2**53 + 1]]), pa.array([[0.5]])),
    ],
    ids=lambda array: str(array.type),
)
def test_a_value_that_the_common_type_cannot_hold_names_both_shards(
    tmp_path: Path, ending: str, one: pa.Array, other: pa.Array
) -> None:
    source = write(tmp_path, ending, of_x(one, other))
    assert delivered(source, "row", columns=["row"]) == [0, 1]
    with pytest.raises(
        ShardError, match=r"column 'x' is .* here, of which a value is no .*leave it out"
    ) as caught:
        delivered(source, columns=["x"])
    assert caught.value.shard.endswith(f"0.{ending}")
    assert f"1.{ending}" in caught.value.reason


@TABLES
def test_times_come_in_the_finest_unit(tmp_path: Path, ending: str) -> None:
    arrays = [pa.array([NAIVE], pa.timestamp(unit)) for unit in ("us", "ns", "ms")]
    moment = int(ZONED.timestamp()) * 10**9
    assert delivered(write(tmp_path, ending, of_x(*arrays))) == [moment] * 3


def test_a_block_is_counted_at_the_width_in_which_it_is_held(tmp_path: Path) -> None:
    lists = pa.array([[1] * 1000] * 50, pa.list_(pa.int8()))
    source = write(tmp_path, "parquet", of_x(lists, pa.array([[1]])))
    narrow, wide = (ShardedDataset(source, columns=[name]).catalog for name in ("row", "x"))
    assert wide.block(0).nbytes - narrow.block(0).nbytes >= 8 * 50_000
    assert wide.block(1).nbytes == narrow.block(1).nbytes
    assert narrow.block(0).nbytes >= 50_000
    assert wide.fingerprint() == narrow.fingerprint()


def test_the_order_of_columns_and_what_may_be_null_are_no_types(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("row", pa.int64(), nullable=False), pa.field("x", pa.int64())])
    source = write(tmp_path, "parquet", [*of_x([1]), pa.table({"row": [1], "x": [2]}, schema)])
    assert delivered(source) == [1, 2]
    assert len(ShardedDataset(source).catalog.schemas) == 1


# ---- pandas -------------------------------------------------------------------------------------------


def test_an_index_of_pandas_is_delivered_where_it_is_named(tmp_path: Path) -> None:
    named = pa.table({"x": [1], "k": ["a"]}).replace_schema_metadata({"pandas": '{"index_columns": ["k"]}'})
    unnamed = pa.table({"x": [2], "__index_level_0__": [7]})
    source = write(tmp_path, "parquet", [named, unnamed, pa.table({"x": [3]})])
    dataset: ShardedDataset = ShardedDataset(source)
    assert [output.name for output in dataset.outputs] == ["x"]
    assert delivered(dataset) == [1, 2, 3]
    rule = {"k": Optional(), "__index_level_0__": Optional(default=-1)}
    assert delivered(source, "k", columns=["k"], decode={"k": rule["k"]}) == ["a", None, None]
    name = "__index_level_0__"
    assert delivered(source, name, columns=[name], decode={name: rule[name]}) == [-1, 7, -1]


# ---- filter, join, lengths, mixtures ------------------------------------------------------------------


@TABLES
def test_a_filter_takes_a_field_of_a_struct_as_it_is_delivered(tmp_path: Path, ending: str) -> None:
    metas = [{"lang": "en", "n": 1}, {"lang": "de", "n": 2}]
    tables = [
        pa.table({"meta": metas, "row": [0, 1]}),
        pa.table({"meta": [{"n": 3}], "row": [2]}),
        pa.table({"row": [3]}),
        pa.table({"meta": [{"lang": None}], "row": [4]}),
    ]
    dataset: ShardedDataset = ShardedDataset(write(tmp_path, ending, tables), columns=["row"])
    for condition, rows in (
        (field("meta.lang") == "en", [0]),
        (field("meta", "lang") == "en", [0]),
        ((field("meta.lang") == "de") | (field("meta.n") == 3), [1, 2]),
        (field("meta.lang").is_null(), [2, 3, 4]),
        (field("meta").is_null(), [3]),
        (field("meta.n") > 1, [1, 2]),
        (field("row") > 2, [3, 4]),
    ):
        assert delivered(dataset.filter(condition), "row") == rows


@TABLES
@pytest.mark.parametrize(("stored", "asked"), [(NAIVE, ZONED), (ZONED, NAIVE)])
def test_a_time_compared_with_one_of_no_zone_says_what_to_write(
    tmp_path: Path, ending: str, stored: dt.datetime, asked: dt.datetime
) -> None:
    dataset: ShardedDataset = ShardedDataset(write(tmp_path, ending, of_x([stored])))
    assert len(dataset.filter(field("x") >= stored)) == 1
    with pytest.raises(ValueError, match=r"'x' has times with.* a zone; compare it with datetime"):
        dataset.filter(field("x") >= asked)


def test_keys_lengths_and_labels_are_read_of_shards_that_have_them(tmp_path: Path) -> None:
    tables = of_x(pa.array([4], pa.int32()), [1, 2**40], pa.nulls(1))
    source = write(tmp_path / "own", "parquet", [*tables, pa.table({"row": [4]})])
    dataset: ShardedDataset = ShardedDataset(source, columns=["row"])
    assert lengths_of(dataset.catalog, "x").tolist() == [4, 1, 2**40, -1, -1]
    np.testing.assert_equal(labels_of(dataset, "x")[0], [4, 1, 2**40, math.nan, math.nan])
    other: ShardedDataset = ShardedDataset(
        write(tmp_path / "other", "arrow", [pa.table({"x": [2**40, 4], "w": ["a", "b"]})]), columns=["w"]
    )
    with pytest.warns(UserWarning, match="3 of 5 samples have no match"):
        joined = dataset.join(other, on="x")
    assert [joined[i] for i in range(2)] == [{"row": 0, "w": "b"}, {"row": 2, "w": "a"}]


@TABLES
def test_a_mixture_takes_columns_in_any_order_in_their_common_type(tmp_path: Path, ending: str) -> None:
    columns = [
        pa.array([1], pa.int32()),
        pa.array([2**40]),
        pa.nulls(1),
    ]
    tables = of_x(*columns)
    tables[1] = tables[1].select(["row", "x"])
    rule = {"x": Optional(default=-1)}
    sources = [
        ShardedDataset(write(tmp_path / str(number), ending, [table]), decode=rule)
        for number, table in enumerate(tables)
    ]
    mixture = Mixture(sources)
    assert [output.name for output in mixture.outputs] == ["x", "row"]
    assert delivered(mixture) == [1, 2**40, -1]
    exact = write(tmp_path / "e", ending, of_x([2**53 + 1]))
    halves = write(tmp_path / "h", ending, of_x([0.5]))
    with pytest.raises(ShardError, match=rf"as .*0\.{ending} has others"):
        delivered(Mixture([ShardedDataset(exact), ShardedDataset(halves)]))


# ---- catalogs -------------------------------------------------------------------------------------------


def test_the_catalog_keeps_each_schema_once(tmp_path: Path) -> None:
    arrays = [pa.array([1], kind) for kind in (pa.int8(), pa.int16(), pa.int8(), pa.int8())]
    catalog = ShardedDataset(write(tmp_path, "parquet", of_x(*arrays))).catalog
    assert (len(catalog.schemas), catalog.shard_schemas.tolist()) == (2, [0, 1, 0, 0])
    catalog.save(str(tmp_path / "c.catalog"))
    assert Catalog.load(str(tmp_path / "c.catalog")).schema == catalog.schema


@pytest.mark.parametrize("wrong", [[0, 1, 0], [0, -1, 0], [0, -2, 0]])
def test_a_catalog_whose_shards_have_no_such_schema_is_damaged(tmp_path: Path, wrong: list[int]) -> None:
    catalog = ShardedDataset(write(tmp_path, "parquet", of_x([1], [2], [3]))).catalog
    path = str(tmp_path / "c.catalog")
    catalog.save(path)
    rows, facts, _ = read_table(path, None)
    at = rows.column_names.index("schema")
    write_table(path, rows.set_column(at, "schema", pa.array(wrong, pa.int32())), facts, None)
    with pytest.raises(CorruptShardError, match="a shard has none of its schemas"):
        Catalog.load(path)


def test_an_old_catalog_is_made_anew_or_refused_where_it_is_the_source(tmp_path: Path) -> None:
    source, path = write(tmp_path, "parquet", of_x([1], [2])), str(tmp_path / "c.catalog")
    ShardedDataset(source, catalog=path)
    rows, facts, _ = read_table(path, None)
    write_table(path, rows, {**facts, "version": 3}, None)
    with pytest.raises(
        CorruptShardError, match="version 3, and this release reads 4; index the shards again"
    ):
        ShardedDataset(path)
    with pytest.warns(UserWarning, match="a catalog of version 3, and this release reads 4; indexing again"):
        dataset: ShardedDataset = ShardedDataset(source, catalog=path)
    assert delivered(dataset) == [1, 2]
    assert len(ShardedDataset(path)) == 2
