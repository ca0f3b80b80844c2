from __future__ import annotations

import io
import math
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from formats_kit import arrow_block, rows_of
from hypothesis import given, settings, strategies as st

from sharding.blocks import NULL_INSIDE, ColumnSpec, Masked, Spans
from sharding.errors import CorruptShardError, ShardError
from sharding.formats.arrow import columns as arrow_columns
from sharding.formats.arrow.columns import columns_of
from sharding.formats.arrow.schema import specs_of


def converted(array: pa.Array | pa.ChunkedArray):
    table = pa.table({"x": array})
    return columns_of(table, None, arrow_block(len(array)))["x"]


def python_values(column) -> list:
    return [row["x"] for row in rows_of([{"x": column}])]


NUMBERS = {
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 65535),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.list_(pa.float32(), 2): st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2),
    pa.list_(pa.bool_(), 3): st.lists(st.booleans(), min_size=3, max_size=3),
    pa.list_(pa.list_(pa.int16(), 2), 2): st.lists(
        st.lists(st.integers(-9, 9), min_size=2, max_size=2), min_size=2, max_size=2
    ),
}
VARIABLE = {
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.large_binary(): st.binary(max_size=5),
    pa.string_view(): st.text(max_size=20),
    pa.binary_view(): st.binary(max_size=20),
    pa.list_(pa.int32()): st.lists(st.integers(-9, 9), max_size=4),
    pa.large_list(pa.float64()): st.lists(st.floats(allow_nan=False), max_size=4),
    pa.list_(pa.bool_()): st.lists(st.booleans(), max_size=9),
    pa.list_view(pa.int32()): st.lists(st.integers(-9, 9), max_size=4),
    pa.large_list_view(pa.int16()): st.lists(st.integers(-9, 9), max_size=4),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["", "cat", "a dog"]),
    pa.dictionary(pa.uint16(), pa.large_binary()): st.sampled_from([b"", b"\x00", b"xyz"]),
}


def array_of(rows: list, kind: pa.DataType) -> pa.Array:
    """`pa.array`, which not every release of pyarrow has for every type of dictionary."""
    if not pa.types.is_dictionary(kind):
        return pa.array(rows, kind)
    encoded = pa.array(rows, kind.value_type).dictionary_encode()
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(kind.index_type), encoded.dictionary)


@st.composite
def sliced_arrays(draw, types, nulls: bool):
    kind = draw(st.sampled_from(list(types)))
    values = types[kind] if not nulls else st.none() | types[kind]
    rows = draw(st.lists(values, max_size=20))
    array = array_of(rows, kind)
    first = draw(st.integers(0, len(rows)))
    size = draw(st.integers(0, len(rows) - first))
    return array.slice(first, size)


def with_bytes(values: list) -> list:
    return [v.encode() if isinstance(v, str) else v for v in values]


@given(sliced_arrays(NUMBERS, nulls=False))
def test_fixed_width_slices_equal_pyarrow(array):
    column = converted(array)
    spec = specs_of(pa.schema([("x", array.type)]))["x"]
    assert isinstance(column, np.ndarray)
    assert (column.dtype, column.shape) == (np.dtype(spec.dtype), (len(array), *spec.shape))
    assert python_values(column) == array.to_pylist()


@given(sliced_arrays(VARIABLE, nulls=True))
def test_variable_length_slices_with_nulls_equal_pyarrow(array):
    column = converted(array)
    spec = specs_of(pa.schema([("x", array.type)]))["x"]
    assert isinstance(column, Spans)
    assert column.starts.dtype == column.lengths.dtype == np.int64
    assert column.buffer.dtype == spec.dtype
    assert python_values(column) == with_bytes(array.to_pylist())


@given(st.lists(sliced_arrays({pa.dictionary(pa.int8(), pa.string()): st.text(max_size=2)}, nulls=True)))
def test_chunks_with_dictionaries_of_their_own_are_joined(arrays):
    chunked = pa.chunked_array(arrays, pa.dictionary(pa.int8(), pa.string()))
    assert python_values(converted(chunked)) == with_bytes(chunked.to_pylist())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [*VARIABLE, *NUMBERS], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_chunks_are_joined_whatever_the_type(kind, data):
    types = VARIABLE if kind in VARIABLE else NUMBERS
    arrays = data.draw(st.lists(sliced_arrays({kind: types[kind]}, nulls=True), max_size=3))
    chunked = pa.chunked_array(arrays, kind)
    assert python_values(converted(chunked)) == with_bytes(chunked.to_pylist())


def read_back(chunked: pa.ChunkedArray, shift: int = 0) -> tuple[pa.Table, memoryview]:
    """A table of the chunks whose buffers lie in the bytes of one stream, at an address of any alignment."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("x", chunked.type)])) as writer:
        for chunk in chunked.chunks:
            writer.write_batch(pa.record_batch([chunk], ["x"]))
    stored = memoryview(bytes(shift) + sink.getvalue())[shift:]
    return pa.ipc.open_stream(pa.py_buffer(stored)).read_all(), stored


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", list(VARIABLE), ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_chunks_in_the_bytes_of_a_block_equal_pyarrow_whatever_the_type(kind, data):
    arrays = data.draw(st.lists(sliced_arrays({kind: VARIABLE[kind]}, nulls=True), max_size=4))
    chunked = pa.chunked_array(arrays, kind)
    table, stored = read_back(chunked, data.draw(st.sampled_from([0, 1, 4])))
    with mock.patch.object(arrow_columns, "_LEAST_CHUNK_BYTES", 0):
        column = columns_of(table, None, arrow_block(len(chunked)), stored=stored)["x"]
    assert python_values(column) == with_bytes(chunked.to_pylist())


@pytest.mark.parametrize(
    "rows",
    [
        [[b"a" * 1000, None, b""] * 200, [b"bc" * 90] * 300, [b"d" * 400] * 100],
        [["text " * 200] * 200, ["more text " * 20] * 300],
        [[[1.5] * 300, None, []] * 100, [[-2.0] * 50] * 200],
    ],
    ids=["bytes", "text", "lists"],
)
def test_values_of_large_chunks_stay_in_the_bytes_of_the_block(rows):
    chunked = pa.chunked_array([pa.array(part) for part in rows])
    table, stored = read_back(chunked)
    column = columns_of(table, None, arrow_block(len(chunked)), stored=stored)["x"]
    assert np.shares_memory(column.buffer, np.frombuffer(stored, np.uint8))
    assert python_values(column) == with_bytes(chunked.to_pylist())


def test_offsets_that_fall_in_a_later_chunk_are_refused():
    chunked = pa.chunked_array([pa.array(["a" * 999] * 500), pa.array(["b" * 999] * 500)])
    table, stored = read_back(chunked)
    offsets = np.frombuffer(table.column("x").chunk(1).buffers()[1], np.int32)
    at = offsets.ctypes.data - np.frombuffer(stored, np.uint8).ctypes.data
    broken = bytearray(stored)
    broken[at + 4 * 250 : at + 4 * 251] = (7).to_bytes(4, "little")
    table = pa.ipc.open_stream(pa.py_buffer(broken)).read_all()
    with pytest.raises(CorruptShardError, match="offsets fall"):
        columns_of(table, None, arrow_block(1000), stored=memoryview(broken))


@given(st.lists(st.none() | st.floats(width=16), min_size=1), st.sampled_from([pa.float16(), pa.float32()]))
def test_missing_floats_become_nan(values, kind):
    array = pa.array([None if v is None else np.float16(v) for v in values], kind).slice(1)
    wanted = [math.nan if v is None else v for v in array.to_pylist()]
    column = converted(array)
    assert isinstance(column, Masked) == (None in array.to_pylist())
    floats = column.values if isinstance(column, Masked) else column
    np.testing.assert_array_equal(floats.astype(float), np.array(wanted, float))


def test_numbers_are_views_of_the_arrow_buffer():
    array = pa.array(np.arange(1000))
    assert converted(array).ctypes.data == array.buffers()[1].address


def test_text_spans_are_views_of_the_arrow_buffer():
    array = pa.array(["ab", "c"])
    assert converted(array).buffer.ctypes.data == array.buffers()[2].address


def test_dictionary_spans_share_the_entries():
    column = converted(pa.array(["a long value", "b"] * 50).dictionary_encode())
    assert len(column.buffer) == len("a long valueb")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.timestamp("us", "UTC"), "int64"),
        (pa.date32(), "int32"),
        (pa.time32("s"), "int32"),
        (pa.duration("ns"), "int64"),
    ],
    ids=str,
)
def test_times_are_integers_in_their_unit(kind, dtype):
    array = pa.array([5, 7], dtype).cast(kind)
    column = converted(array)
    assert column.dtype == dtype
    assert column.tolist() == [5, 7]


def test_structs_become_one_column_a_leaf():
    rows = [{"a": {"b": 1, "c": {"d": "x"}}, "e": 2.0}, {"a": {"b": 3, "c": {"d": None}}, "e": 4.0}]
    columns = columns_of(pa.Table.from_pylist(rows), None, arrow_block(2))
    assert list(columns) == ["a.b", "a.c.d", "e"]
    assert columns["a.b"].tolist() == [1, 3]
    assert columns["a.c.d"].lengths.tolist() == [1, -1]


def test_a_leaf_of_a_missing_struct_is_missing():
    columns = columns_of(pa.table({"s": pa.array([{"t": "x"}, None])}), ["s.t"], arrow_block(2))
    assert columns["s.t"].lengths.tolist() == [1, -1]


def test_fixed_size_binary_is_rows_of_bytes():
    array = pa.array([b"ab", b"cd", b"ef"], pa.binary(2)).slice(1)
    assert converted(array).tolist() == [list(b"cd"), list(b"ef")]


def test_tensors_keep_their_shape():
    tensors = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)
    np.testing.assert_array_equal(converted(array), tensors)
    assert specs_of(pa.schema([("x", array.type)]))["x"].shape == (3, 2)


def test_run_length_encoded_numbers_are_decoded():
    array = pa.RunEndEncodedArray.from_arrays([2, 3], [7, 9])
    assert converted(array).tolist() == [7, 7, 9]


def test_a_column_of_only_nulls_is_missing_text():
    assert converted(pa.nulls(3)).lengths.tolist() == [-1, -1, -1]


def test_a_dictionary_of_only_nulls_is_missing_text():
    array = pa.array([None, None], pa.dictionary(pa.int8(), pa.string()))
    assert converted(array).lengths.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("array", "lacks"),
    [
        (pa.array([1, 2, None, None]), [0, 0, -1, -1]),
        (pa.nulls(2, pa.int64()), [-1, -1]),
        (pa.array([True, None]), [0, -1]),
        (pa.array([0, None], pa.timestamp("s")), [0, -1]),
        (pa.array([[1, 2], [3, None], None], pa.list_(pa.int32(), 2)), [0, NULL_INSIDE, -1]),
        (pa.array([[1.0, 2.0], [3.0, None], None], pa.list_(pa.float32(), 2)), [0, 0, -1]),
        (pa.array([[], None], pa.list_(pa.int32(), 0)), [0, -1]),
        (pa.array([b"ab", None], pa.binary(2)), [0, -1]),
        (pa.array([9, 9, 1, None]).slice(2), [0, -1]),
        (pa.array([1, None, 1]).dictionary_encode(), [0, -1, 0]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], pa.array([7, None])), [0, 0, -1]),
    ],
    ids=str,
)
def test_nulls_of_fixed_width_are_masked(array, lacks):
    column = converted(array)
    assert isinstance(column, Masked)
    assert column.lacks.tolist() == lacks
    spec = specs_of(pa.schema([("x", array.type)]))["x"]
    assert (column.values.dtype, column.values.shape) == (np.dtype(spec.dtype), (len(array), *spec.shape))
    plain = [None if lack else value for value, lack in zip(column.values.tolist(), lacks, strict=True)]
    there = [value for value, lack in zip(array.to_pylist(), lacks, strict=True) if not lack]
    if column.values.dtype.kind not in "f" and array.type not in (pa.timestamp("s"), pa.binary(2)):
        assert [value for value in plain if value is not None] == there


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, pa.list_view])
def test_a_null_inside_a_list_of_integers_spoils_that_list_alone(kind):
    lists = [[1, 2], [], [3, None], None, [4]]
    assert converted(pa.array(lists, kind(pa.int64()))).lengths.tolist() == [2, 0, NULL_INSIDE, -1, 1]
    assert converted(pa.array(lists, kind(pa.float64()))).lengths.tolist() == [2, 0, 2, -1, 1]
    sliced = pa.array([[None], *lists], kind(pa.int64())).slice(1, 2)
    assert converted(sliced).lengths.tolist() == [2, 0]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.array([[[b"ab"]]]),
    ],
    ids=lambda array: str(array.type),
)
def test_a_type_without_array_form_says_how_to_leave_it_out(array):
    table = pa.table({"x": array, "y": [1]})
    with pytest.raises(ShardError, match=r"column 'x'.*pass columns= without it"):
        columns_of(table, None, arrow_block(1))
    assert list(columns_of(table, ["y"], arrow_block(1))) == ["y"]
    specs = specs_of(table.schema)
    assert (specs["x"].kind, specs["x"].note) == ("other", str(array.type))


def test_two_columns_of_one_name_cannot_be_read_and_others_can():
    specs = specs_of(pa.schema([("a", pa.int8()), ("a", pa.int8()), ("b", pa.int8())]))
    assert specs["a"].kind == "unreadable"
    assert "two columns are named 'a': the column 'a' and the column 'a'; rename" in specs["a"].note
    assert specs["b"] == ColumnSpec("fixed", "int8")


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.int8())])
def test_offsets_outside_the_buffer_are_refused(kind):
    raw = pa.py_buffer(np.array([0, 9, 3], np.int32))
    if pa.types.is_list(kind):
        array = pa.Array.from_buffers(kind, 2, [None, raw], children=[pa.array([1, 2, 3], pa.int8())])
    else:
        array = pa.Array.from_buffers(kind, 2, [None, raw, pa.py_buffer(b"abc")])
    with pytest.raises(CorruptShardError, match=r"column 'x'.*is broken") as caught:
        converted(array)
    assert caught.value.offset == 128


def test_codes_outside_the_dictionary_are_refused():
    codes = pa.Array.from_buffers(pa.int32(), 2, [None, pa.py_buffer(np.array([0, 7], np.int32))])
    array = pa.DictionaryArray.from_arrays(codes, pa.array(["a"]), safe=False)
    with pytest.raises(CorruptShardError, match="is broken"):
        converted(array)


def codes(*values: int, valid: int | None = None) -> pa.Array:
    """Codes as they are stored, with a bitmap of what is valid."""
    bitmap = None if valid is None else pa.py_buffer(bytes([valid]))
    return pa.Array.from_buffers(pa.int32(), len(values), [bitmap, pa.py_buffer(np.array(values, np.int32))])


def test_broken_codes_are_refused_before_chunks_are_joined():
    """Joining looks up each code: one of 2**30 would be read from memory far away."""
    chunks = [pa.DictionaryArray.from_arrays(codes(0, 1 << 30), [name], safe=False) for name in "ab"]
    with pytest.raises(CorruptShardError, match="codes 0 to 1073741824 of a dictionary of 1 entries"):
        converted(pa.chunked_array(chunks))


def test_codes_beneath_nulls_lead_nowhere():
    chunks = [pa.DictionaryArray.from_arrays(codes(0, 1 << 30, valid=1), [name], safe=False) for name in "ab"]
    assert python_values(converted(pa.chunked_array(chunks))) == [b"a", None, b"b", None]


def test_broken_views_are_refused_before_chunks_are_joined():
    """A view says in 8 bytes in which buffer its text lies, and where."""
    view = np.array([20, 0, 7, 1 << 30], np.int32)  # length, prefix, buffer, offset
    array = pa.Array.from_buffers(pa.string_view(), 1, [None, pa.py_buffer(view), pa.py_buffer(bytes(20))])
    with pytest.raises(CorruptShardError, match="is broken"):
        converted(pa.chunked_array([array, array]))


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_beneath_nulls_lead_nowhere(kind):
    """Of three, after a slice of one: the text "abc", and one that is missing."""
    abc, wild = [3, int.from_bytes(b"abc", "little"), 0, 0], [20, 0, 7, 1 << 30]
    views = pa.py_buffer(np.array([wild, abc, wild], np.int32))
    array = pa.Array.from_buffers(
        kind, 2, [pa.py_buffer(b"\x02"), views, pa.py_buffer(bytes(20))], 1, offset=1
    )
    assert python_values(converted(array)) == [b"abc", None]
    assert python_values(converted(pa.chunked_array([array, array]))) == [b"abc", None] * 2
    entries = pa.DictionaryArray.from_arrays([0, 1], array)
    assert python_values(converted(entries)) == [b"abc", None]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.float32()], ids=str)
def test_a_bitmap_of_other_nulls_than_are_told_is_refused(kind):
    width = 4 if pa.types.is_floating(kind) else 0
    buffers = [np.arange(3, dtype=np.int32), *([] if width else [np.zeros(2, np.uint8)])]
    raw = [pa.py_buffer(b"\x00"), *map(pa.py_buffer, buffers)]
    array = pa.Array.from_buffers(kind, 2, raw, null_count=1)
    for column in (array, pa.chunked_array([array, array])):
        with pytest.raises(CorruptShardError, match="is broken"):
            converted(column)
