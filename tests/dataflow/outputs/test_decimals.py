"""Decimals of tables: numbers as exact as they are stored."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, strategies as st

from dataflow import DataLoader, Optional, ShardedDataset, convert
from sharding.blocks import decimal_of
from sharding.errors import CorruptShardError
from sharding.formats.arrow.schema import spec_of

VALUES = [Decimal("1.10"), Decimal("-0.01"), Decimal("12345678901234567890.12")]


def written(folder: Path, ending: str, name: str, **columns: Any) -> str:
    table = pa.table(columns)
    if ending == "parquet":
        pq.write_table(table, folder / f"{name}.parquet")
    else:
        feather.write_feather(table, folder / f"{name}.arrow")
    return f"{folder}/*.{ending}"


def delivered(source: str, **options: Any) -> Any:
    with DataLoader(ShardedDataset(source, **options), 3) as loader:
        return next(iter(loader))["x"]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_decimals_come_as_a_list_of_decimals_or_as_they_are_asked_for(tmp_path: Path, ending: str) -> None:
    source = written(tmp_path, ending, "0", x=pa.array(VALUES), y=[{"z": value} for value in VALUES])
    assert delivered(source) == VALUES
    assert [str(value) for value in delivered(source)] == ["1.10", "-0.01", "12345678901234567890.12"]
    floats = delivered(source, decode={"x": "float"})
    assert (floats.dtype, floats.tolist()) == (torch.float64, [1.1, -0.01, 12345678901234567890.12])
    assert delivered(source, decode={"x": "text"}) == [str(value) for value in VALUES]
    assert delivered(source, columns={"x": "y.z"}) == VALUES
    assert ShardedDataset(source)[1]["x"] == VALUES[1]


@pytest.mark.parametrize("kind", [pa.decimal32(9, 3), pa.decimal64(18, 3), pa.decimal256(60, 30)])
def test_missing_and_encoded_decimals_come_likewise(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array([Decimal("1.5"), None, Decimal("1.5")], kind)
    source = written(tmp_path, "arrow", "0", x=array)
    assert delivered(source, decode={"x": Optional()}) == [Decimal("1.5"), None, Decimal("1.5")]
    (tmp_path / "encoded").mkdir()
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), array.slice(0, 1))
    source = written(tmp_path / "encoded", "arrow", "0", x=encoded)
    assert delivered(source) == [Decimal("1.5")] * 2


def test_shards_may_have_other_digits_and_no_other_numbers(tmp_path: Path) -> None:
    written(tmp_path, "parquet", "0", x=[Decimal("1.5")])
    source = written(tmp_path, "parquet", "1", x=[Decimal("100.25"), Decimal("1")])
    assert delivered(source) == [Decimal("1.5"), Decimal("100.25"), Decimal("1")]
    for folder, other in ((tmp_path / "a", [1]), (tmp_path / "b", ["1.5"])):
        folder.mkdir()
        written(folder, "arrow", "0", x=other)
        with pytest.raises(CorruptShardError, match=r"'x' is text \(Decimal\) here but .* in "):
            ShardedDataset(written(folder, "arrow", "1", x=VALUES))


@pytest.mark.parametrize("to", ["parquet", "mds"])
def test_decimals_are_converted_exactly_or_refused(tmp_path: Path, to: str) -> None:
    source = written(tmp_path, "parquet", "0", x=VALUES, n=[1, 2, 3])
    if to == "mds":
        with pytest.raises(ValueError, match="'x': MDS has no encoding for a value of type Decimal"):
            convert(source, tmp_path / "out", to=to, workers=1)
        return
    made = convert(source, tmp_path / "out", to=to, map=dict, workers=1, verify=True)
    assert delivered(made.catalog) == VALUES


def test_an_error_says_of_what_type_a_column_is_and_not_that_there_is_none(tmp_path: Path) -> None:
    source = written(tmp_path, "parquet", "0", x=[[value] for value in VALUES], s=[{"a": 1}] * 3)
    for options in ({"columns": ["x"]}, {"columns": ["s.a"], "decode": {"x": "float"}}):
        with pytest.raises(CorruptShardError, match=r"column 'x' is list<.*>, which has no array form"):
            ShardedDataset(source, **options)
    with pytest.raises(ValueError, match=r"column 's' is a struct: name its parts, s\.a"):
        ShardedDataset(source, columns=["s"])


@given(st.decimals(allow_nan=False, allow_infinity=False, places=30, min_value=-(10**20), max_value=10**20))
def test_any_decimal_is_its_digits(value: Decimal) -> None:
    array = pa.array([value], pa.decimal256(76, 30))
    assert decimal_of(array.cast(pa.string())[0].as_py().encode()) == value
    assert spec_of(array.type).kind == "text"
