"""The common type of a column that shards have in several: values stay what they were, or are an error."""

from __future__ import annotations

import datetime as dt
from fractions import Fraction
from itertools import permutations

import numpy as np
import pyarrow as pa
import pytest
from formats_kit import arrow_block
from hypothesis import given, strategies as st

from sharding.blocks import ColumnSpec, Masked, Spans
from sharding.catalog.widening import common_spec, growth_of
from sharding.errors import ShardError
from sharding.formats.arrow.columns import columns_of
from sharding.formats.arrow.schema import arrow_type, spec_of, specs_of

INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(f"float{bits}") for bits in (16, 32, 64)]
UNITS = ("s", "ms", "us", "ns")


def number(name: str) -> ColumnSpec:
    return ColumnSpec("fixed", name)


def times(unit: str) -> ColumnSpec:
    spec = spec_of(pa.type_for_alias(unit))
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("types", "common"),
    [
        ("int32 int64", "int64"),
        ("int8 float32", "float32"),
        ("int16 float32", "float32"),
        ("uint16 int16 float16", "float32"),
        ("int32 float32", "float64"),
        ("int32 float16", "float64"),
        ("int64 float32", "float64"),
        ("uint8 int8", "int16"),
        ("uint32 int8", "int64"),
        ("int64 uint64", "uint64"),
        ("float16 float32", "float32"),
        ("bool int8", None),
        ("bool float32", None),
    ],
)
def test_numbers_take_the_narrowest_type_that_changes_no_value(types, common):
    for order in permutations(types.split()):
        found = common_spec([number(name) for name in order])
        assert (None if found is None else found.dtype) == common


@pytest.mark.parametrize(
    ("units", "common"),
    [
        ("timestamp[s] timestamp[ns] timestamp[us]", "timestamp[ns]"),
        ("duration[ms] duration[s]", "duration[ms]"),
        ("time32[s] time64[us]", "time64[us]"),
        ("time32[s] time32[ms]", "time32[ms]"),
        ("date32[day] date64[ms]", "date64[ms]"),
        ("date32[day] timestamp[s]", None),
        ("duration[s] timestamp[s]", None),
    ],
)
def test_times_take_the_finest_unit(units, common):
    for order in permutations(units.split()):
        found = common_spec([times(unit) for unit in order])
        assert (None if found is None else found.unit) == common
        if found is not None:
            assert arrow_type(found).bit_width == 8 * np.dtype(found.dtype).itemsize


def test_nulls_and_empty_lists_take_the_type_of_others():
    nothing, empty = ColumnSpec("null"), ColumnSpec("null_list")
    for other in (number("int8"), ColumnSpec("text"), ColumnSpec("json"), ColumnSpec("bytes_list")):
        found = common_spec([nothing, other])
        assert found is not None
        assert (found.kind, found.dtype, found.optional) == (other.kind, other.dtype, True)
    for other in (ColumnSpec("list", "int8"), ColumnSpec("json"), ColumnSpec("bytes_list")):
        found = common_spec([empty, nothing, other])
        assert found is not None
        assert (found.kind, found.dtype) == (other.kind, other.dtype)
    of_three = common_spec([empty, ColumnSpec("fixed", "int8", (3,))])
    assert of_three == ColumnSpec("list", "int8")
    assert common_spec([empty, number("int8")]) is None
    assert common_spec([empty, ColumnSpec("text")]) is None
    assert [getattr(common_spec([one]), "kind", "") for one in (nothing, empty)] == ["text", "json"]


ELEMENTS = st.sampled_from([*INTEGERS, *FLOATS])


@st.composite
def columns_of_numbers(draw):
    """Columns of one name in several types, as Arrow arrays: of numbers, or of lists of them."""
    in_lists = draw(st.booleans())
    arrays = []
    for dtype in draw(st.lists(ELEMENTS, min_size=1, max_size=4)):
        if dtype.kind == "f":
            one = st.floats(width=8 * dtype.itemsize, allow_nan=False)
        else:
            one = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        values = st.none() | (st.lists(one, max_size=3) if in_lists else one)
        kind = pa.from_numpy_dtype(dtype)
        arrays.append(pa.array(draw(st.lists(values, max_size=4)), pa.list_(kind) if in_lists else kind))
    return arrays


def python_values(column):
    if isinstance(column, Spans):
        lengths = column.lengths.tolist()
        return [column.value(i).tolist() if n >= 0 else None for i, n in enumerate(lengths)]
    if isinstance(column, Masked):
        return [v if not lack else None for v, lack in zip(column.values.tolist(), column.lacks, strict=True)]
    return column.tolist()


def exactly(value):
    """A number as one that compares exactly, whatever its type."""
    if isinstance(value, list):
        return [exactly(one) for one in value]
    return Fraction(value) if value is not None and np.isfinite(value) else value


@given(columns_of_numbers())
def test_every_value_is_what_it_was_or_an_error(arrays):
    common = common_spec([spec for array in arrays if (spec := spec_of(array.type)) is not None])
    assert common is not None
    for array in arrays:
        table, block = pa.table({"x": array}), arrow_block(len(array))
        try:
            column = columns_of(table, ["x"], block, {"x": common})["x"]
        except ShardError:
            flat = pa.compute.list_flatten(array) if pa.types.is_list(array.type) else array
            numbers = [one for one in flat.to_pylist() if one is not None]
            low, high = (0, 2**64 - 1) if common.dtype == "uint64" else (-(2**53), 2**53)
            assert any(not low <= one <= high for one in numbers)
        else:
            values = column.buffer if isinstance(column, Spans) else getattr(column, "values", column)
            assert values.dtype == common.dtype
            assert exactly(python_values(column)) == exactly(array.to_pylist())


@given(st.lists(st.sampled_from(UNITS), min_size=2, max_size=3), st.integers(-(2**62), 2**62))
def test_times_are_the_same_moments_or_an_error(units, count):
    finest = max(units, key=UNITS.index)
    common = common_spec([times(f"timestamp[{unit}]") for unit in units])
    assert common is not None
    for unit in units:
        table = pa.table({"x": pa.array([count], pa.timestamp(unit))})
        factor = 1000 ** (UNITS.index(finest) - UNITS.index(unit))
        try:
            column = columns_of(table, ["x"], arrow_block(1), {"x": common})["x"]
        except ShardError:
            assert abs(count * factor) >= 2**63 - 1
        else:
            assert column.tolist() == [count * factor]


@given(st.permutations([np.dtype(d) for d in ("int8", "uint8", "int16", "uint16", "float16", "float32")]))
def test_the_common_type_does_not_depend_on_the_order_of_shards(dtypes):
    for size in range(1, len(dtypes) + 1):
        forth = common_spec([number(dtype.name) for dtype in dtypes[:size]])
        back = common_spec([number(dtype.name) for dtype in reversed(dtypes[:size])])
        assert forth == back


NULLS_IN_LISTS = [[], [None], None, [None, None]]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_lists_of_nulls_and_views_become_lists_of_any_numbers(kind):
    wanted = ColumnSpec("list", "float64")
    table = pa.table({"x": pa.array(NULLS_IN_LISTS, pa.list_(pa.null()))})
    column = columns_of(table, ["x"], arrow_block(4), {"x": wanted})["x"]
    assert column.lengths.tolist() == [0, 1, -1, 2]
    assert np.isnan(column.value(3)).all()
    table = pa.table({"x": pa.array([[1, 2], None, [3]], kind(pa.int8()))})
    column = columns_of(table, ["x"], arrow_block(3), {"x": wanted})["x"]
    assert python_values(column) == [[1.0, 2.0], None, [3.0]]


def test_an_index_of_pandas_is_known_by_its_name_or_by_metadata():
    fields = [("x", pa.int8()), ("k", pa.string()), ("__index_level_0__", pa.int64())]
    specs = specs_of(pa.schema(fields, {"pandas": b'{"index_columns": ["k", {"kind": "range"}]}'}))
    assert [name for name, spec in specs.items() if spec.is_index] == ["k", "__index_level_0__"]
    for broken in (b"", b"[]", b'{"index_columns": 3}', b'{"index_columns": [["k"]]}', b"[" * 9999):
        specs = specs_of(pa.schema(fields, {"pandas": broken}))
        assert [name for name, spec in specs.items() if spec.is_index] == ["__index_level_0__"]


def test_what_is_widened_is_counted():
    own = {"a": ColumnSpec("fixed", "int8"), "l": ColumnSpec("list", "int8"), "same": number("int8")}
    merged = {**own, "a": number("int64"), "l": ColumnSpec("list", "int64"), "n": ColumnSpec("text")}
    assert growth_of(own, merged, ["same"]) == (0, 0)
    assert growth_of(own, merged, ["a"]) == (8, 0)
    assert growth_of(own, merged, ["l"]) == (16, 8)
    assert growth_of(own, merged, ["n"]) == (16, 0)


def test_zones_do_not_change_the_moment():
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    kinds = [pa.timestamp("s", "Asia/Tokyo"), pa.timestamp("ms", "UTC")]
    common = common_spec([spec for kind in kinds if (spec := spec_of(kind)) is not None])
    assert common is not None
    assert common.unit == "timestamp[ms, tz=UTC]"
    for kind in kinds:
        table = pa.table({"x": pa.array([moment], kind)})
        column = columns_of(table, ["x"], arrow_block(1), {"x": common})["x"]
        assert column.tolist() == [int(moment.timestamp() * 1000)]
