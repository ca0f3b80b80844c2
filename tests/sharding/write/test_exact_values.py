"""What is written is read back equal, or refused: values of any types, in any order, in each format."""

from __future__ import annotations

import datetime
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as nps

from dataflow import ShardedDataset, convert
from sharding.errors import DataflowError, SampleError
from sharding.write.arrays import array_of
from sharding.write.writer import ShardWriter

numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**65), 2**65),
    st.sampled_from([2**53 + 1, 2**63, 2**64 - 1, -(2**63), 1.0, 0.1, 1e300, float("inf"), float("nan")]),
    st.floats(),
)
INTEGERS = ["int8", "uint8", "int16", "uint32", "int64", "uint64", ">i4"]
dtypes = st.sampled_from([*INTEGERS, "float16", "float32", "float64", "bool", ">f8"])
arrays = dtypes.flatmap(lambda dtype: nps.arrays(dtype, nps.array_shapes(min_side=0, max_dims=3, max_side=3)))


def numbers_of(dtype: str) -> st.SearchStrategy[Any]:
    return nps.arrays(dtype, ()).map(lambda array: array[()])


scalars = st.one_of(
    numbers,
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none(),
    dtypes.flatmap(numbers_of),
    st.sampled_from(
        [
            Decimal("1.10"),
            Decimal("-123.4567"),
            datetime.date(2020, 1, 2),
            datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
            datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
            np.datetime64("2020-01-01T00:00:00.123456789"),
            torch.tensor(3),
            torch.tensor(0.1),
            torch.tensor([1.5, 2]),
            torch.ones(2, 2, dtype=torch.uint8),
        ]
    ),
)
values = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.dictionaries(st.integers(0, 1), inner, max_size=1),
    ),
    max_leaves=4,
)
columns = st.one_of(
    st.lists(values, min_size=1, max_size=6),
    st.lists(numbers, min_size=1, max_size=8),
    dtypes.flatmap(lambda dtype: st.lists(numbers_of(dtype) | st.none(), min_size=1, max_size=4)),
    st.lists(st.lists(numbers, max_size=2), min_size=1, max_size=6),
    st.lists(arrays, min_size=1, max_size=4),
)


def plain(value: Any) -> Any:
    """A value as Python has it: arrays are lists, structs have no fields without a value."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "M":
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if inner is not None}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def equal(was: Any, now: Any) -> bool:
    was, now = plain(was), plain(now)
    if isinstance(was, bytes) and isinstance(now, list):
        now = bytes(now)  # as loaders deliver byte strings
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(equal, was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(equal(was[name], now[name]) for name in was)
    if isinstance(was, np.datetime64 | datetime.date) and isinstance(now, int):  # loaders count in a unit
        if isinstance(was, datetime.datetime) and was.tzinfo:
            was = was.astimezone(datetime.UTC).replace(tzinfo=None)
        return any(np.datetime64(now, unit) == np.datetime64(was) for unit in ("D", "s", "ms", "us", "ns"))
    if isinstance(was, np.datetime64):
        return bool(was == np.datetime64(now)) or now.value == was.astype("M8[ns]").astype(int)
    kinds = [int, float] if {type(was), type(now)} <= {int, float} else [type(was)]
    return (type(now) in kinds and was == now) or (was != was and now != now)


def rows_of(path: str) -> list[dict[str, Any]]:
    """The rows of a shard, as other programs read them."""
    if path.endswith("jsonl"):
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    table = pq.read_table(path) if path.endswith("parquet") else feather.read_table(path)
    return table.to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
@given(columns)
def test_any_values_are_read_back_equal_or_refused(ending: str, column: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with ShardWriter(f"{folder}/%d.{ending}", row_group_size=2) as writer:
                for value in column:
                    writer.write({"x": value, "row": 0})
        except SampleError:
            return
        found = [row["x"] for shard in writer.shards for row in rows_of(shard.url)]
    assert len(found) == len(column)
    assert [(was, now) for was, now in zip(column, found, strict=True) if not equal(was, now)] == []


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_arrays_of_truth_values_are_read_back(ending: str, tmp_path: Path) -> None:
    arrays = [np.array([True, False, True] * 3), np.array([[False, True], [True, True]])]
    for at, array in enumerate(arrays):
        with ShardWriter(f"{tmp_path}/{at}-%d.{ending}") as writer:
            writer.write({"x": array})
            writer.write({"x": ~array})
        assert [row["x"] for row in rows_of(writer.shards[0].url)] == [array.tolist(), (~array).tolist()]


@pytest.mark.parametrize("to", ["parquet", "mds", "tar", "jsonl"])
@given(st.lists(scalars | arrays, min_size=1, max_size=5) | st.lists(numbers, min_size=2, max_size=5))
@settings(max_examples=8)
def test_any_values_are_delivered_equal_or_refused(to: str, column: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"x": value, "row": number} for number, value in enumerate(column)]
        try:
            if to == "jsonl":
                with ShardWriter(f"{folder}/0.jsonl") as writer:
                    for row in rows:
                        writer.write(row)
                catalog = f"{folder}/0.jsonl"
            else:
                catalog = convert(rows, folder, to=to, workers=1, verify=True, progress=False).catalog
            dataset = ShardedDataset(catalog, progress=False)
            found = [dataset[number] for number in range(len(rows))]
        except (DataflowError, ValueError):
            return
    for row, sample in zip(rows, found, strict=True):
        if row["x"] is None:  # NaN among floats, which formats.md says
            continue
        assert [equal(row["x"], value) for name, value in sample.items() if name[0] == "x"] in ([], [True]), (
            row
        )


# ---- types ----------------------------------------------------------------------------------------------


def written(folder: Path, column: list[Any], name: str = "%d.parquet", **options: Any) -> list[Any]:
    """The types of the shards that a column becomes, in row groups of two rows."""
    with ShardWriter(f"{folder}/{name}", row_group_size=2, **options) as writer:
        for value in column:
            writer.write({"x": value})
    return [str(pq.read_schema(shard.url).field("x").type) for shard in writer.shards]


@pytest.mark.parametrize(
    ("column", "types"),
    [
        ([1, 1.5, 2, 3], ["double"]),
        ([1, 2, 3, 1.5, 4, 5], ["int64", "double"]),
        ([1, 2, 1.5], ["int64", "double"]),
        ([np.float32(1), None, 1e300, 2.0], ["float", "double"]),
        ([None, None, "a"], ["null", "string"]),
        (["a", None, None, None], ["string"]),
        ([1, 2, 2**64 - 1, 3], ["int64", "uint64"]),
        ([[1], [], [1.5], [2]], ["list<element: int64>", "list<element: double>"]),
        ([Decimal("1.5"), None, Decimal("10.25"), None], ["decimal128(2, 1)", "decimal128(4, 2)"]),
        ([{"a": 1}, None, {"b": "t"}, {"a": 2}], ["struct<a: int64>", "struct<b: string, a: int64>"]),
    ],
)
def test_types_widen_inside_what_is_not_written_and_else_in_the_next_shard(
    tmp_path: Path, column: list[Any], types: list[str]
) -> None:
    assert written(tmp_path, column) == types
    found = [row["x"] for path in sorted(tmp_path.iterdir()) for row in rows_of(str(path))]
    assert all(map(equal, column, found))


def test_shards_of_types_that_widened_are_read_as_one_dataset(tmp_path: Path) -> None:
    written(tmp_path, [1, 2, 3, 1.5])
    dataset = ShardedDataset(f"{tmp_path}/*.parquet")
    assert [dataset[i]["x"] for i in range(4)] == [1.0, 2.0, 3.0, 1.5]


@pytest.mark.parametrize(
    ("column", "key", "says"),
    [
        ([1, 2, 3, "four"], "3", "int64 and string have no type in common"),
        (["a", "b", b"c"], "2", "string and binary"),
        ([True, 1], "1", "bool and int64"),
        ([2**53 + 1, 0.5], "0", "9007199254740993 not in range"),
        ([1, 2**64], "1", "fit no type of 64 bits"),
        ([0, {1, 2}], "1", "a set has no order"),
        ([datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)], "1", "date32.* and timestamp"),
        ([{1: 2}], "0", "names are text"),
    ],
)
def test_types_with_nothing_in_common_are_refused_by_sample_column_and_types(
    tmp_path: Path, column: list[Any], key: str, says: str
) -> None:
    with pytest.raises(SampleError, match=f"column 'x': .*{says}.*; schema= tells the types") as caught:
        written(tmp_path, column)
    assert caught.value.key == key


def test_the_one_shard_of_a_pattern_without_a_number_does_not_widen(tmp_path: Path) -> None:
    with pytest.raises(
        SampleError, match=r"double is no int64; .* with %06d in the pattern another"
    ) as caught:
        written(tmp_path, [1, 2, 3, 1.5], "a.parquet")
    assert caught.value.key == "3"
    assert list(tmp_path.iterdir()) == []


def test_columns_that_come_later_begin_another_shard(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/%d.arrow", row_group_size=1) as writer:
        writer.write_many([{"a": 1}, {"a": 2, "b": 3}, {"b": 4}])
    assert [shard.num_samples for shard in writer.shards] == [1, 2]
    assert ShardedDataset(f"{tmp_path}/*.arrow").select(["a"])[1] == {"a": 2}


def test_a_given_schema_rounds_floats_and_changes_nothing_else(tmp_path: Path) -> None:
    schema = pa.schema({"x": pa.float32()})
    written(tmp_path, [0.1, 2], "a.parquet", schema=schema)
    assert rows_of(f"{tmp_path}/a.parquet") == [{"x": float(np.float32(0.1))}, {"x": 2.0}]
    cases: list[tuple[Any, Any]] = [
        *((pa.float32(), 1e300), (pa.int64(), 1.5), (pa.int8(), 300), (pa.string(), b"b")),
        *((pa.binary(), "a"), (pa.date32(), datetime.datetime(2020, 1, 1, 5)), (pa.list_(pa.int64()), [1.5])),
        *((pa.struct({"a": pa.int64()}), {"a": 1, "b": 2}), (pa.float32(), 16777217)),
    ]
    for kind, value in cases:
        with pytest.raises(SampleError, match="column 'x'"):
            written(tmp_path, [value], "b.parquet", schema=pa.schema({"x": kind}))
    with pytest.raises(SampleError, match=r"0.1 \(double\) does not fit float"):
        written(tmp_path, [0.1], "b.parquet", schema=schema, rounds=False)


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.float64()),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.dictionary(pa.int8(), pa.float64())),
        pa.list_(pa.decimal128(9, 2)),
    ],
)
def test_lists_become_what_a_schema_names(kind: pa.DataType) -> None:
    array = array_of([[1, 2], None, (3, 4)], kind)
    assert (array.type, array.to_pylist()) == (kind, [[1, 2], None, [3, 4]])


@pytest.mark.parametrize("columns", [None, {"x": "float32"}])
def test_mds_rounds_floats_only_to_an_encoding_that_is_given(
    tmp_path: Path, columns: dict[str, str] | None
) -> None:
    with ShardWriter(f"{tmp_path}/%d.mds", columns=columns) as writer:
        writer.write({"x": np.float32(0.1)})
        writer.write({"x": 2})
        if columns:
            writer.write({"x": 0.1})
        for value in (1e300, 16777217, True, "1", *([] if columns else [0.1])):
            with pytest.raises(SampleError, match="column 'x' has encoding 'float32', which cannot hold"):
                writer.write({"x": value})


def test_arrays_without_dimensions_are_numbers(tmp_path: Path) -> None:
    column = [np.array(5), None, np.array(7), 1.5]
    with ShardWriter(str(tmp_path / "a.parquet")) as writer:
        writer.write_many([{"x": value} for value in column])
    assert pq.read_table(tmp_path / "a.parquet")["x"].to_pylist() == [5, None, 7, 1.5]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "shard.%05d.mds"])
def test_masks_and_halves_of_letters_are_refused_by_sample(tmp_path: Path, name: str) -> None:
    masked = np.ma.array([1, 2], mask=[False, True])
    columns: list[tuple[list[Any], str]] = [
        (["a", "\ud800"], "surrogates not allowed"),
        ([np.array([3, 4]), masked], "a masked array .*: fill it"),
    ]
    for values, says in columns:
        writer = ShardWriter(str(tmp_path / name), overwrite=True)
        with pytest.raises(SampleError, match=f"sample '1'.*({says})"), writer:
            writer.write_many([{"x": value} for value in values])
