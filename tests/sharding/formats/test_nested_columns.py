"""Nested columns of every tabular format, block by block: what pyarrow and the json module say they hold."""

from __future__ import annotations

import io
import json
import math
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats_kit import arrow_block, decoded_blocks, scan_of
from hypothesis import example, given, strategies as st
from threads_kit import python_calls

from sharding.blocks import Columns, ColumnSpec, Format, Spans, spec_text
from sharding.errors import CorruptShardError, ShardError
from sharding.formats.arrow.columns import columns_of
from sharding.formats.arrow.ipc import ArrowFileFormat, ArrowStreamFormat
from sharding.formats.arrow.jsonl import JsonlFormat
from sharding.formats.arrow.parquet import ParquetFormat
from sharding.formats.arrow.schema import specs_of

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
TURN = pa.struct(
    [
        ("role", pa.string()),
        ("scores", pa.list_(pa.float64())),
        ("calls", pa.list_(pa.struct([("name", pa.string()), ("args", pa.map_(pa.string(), pa.int64()))]))),
    ]
)
ENCODED = pa.dictionary(pa.int8(), pa.string())

CHAT = [
    [{"role": "user", "content": 'Grüße "日本" 🙂\n\\ \x00\x7f'}, {"role": "assistant", "content": ""}],
    [],
    None,
    [{"role": None, "content": "a"}, None],
]
TYPES: dict[pa.DataType, list[Any]] = {
    pa.list_(MESSAGE): CHAT,
    pa.large_list(MESSAGE): CHAT,
    pa.list_view(MESSAGE): CHAT,
    pa.large_list_view(MESSAGE): CHAT,
    pa.list_(pa.string()): [["a", None, "ü"], [], None],
    pa.list_(pa.large_string()): [["a", None, "ü"], [], None],
    pa.list_(pa.string_view()): [["a", None, "ü" * 40], [], None],
    pa.list_(ENCODED): [["a", "b", "a", None], [], None],
    pa.list_(pa.null()): [[None, None], [], None],
    pa.list_(pa.list_(pa.int64())): [[[1, 2], [], None, [None, -(2**63)]], [], None],
    pa.list_(pa.list_(pa.bool_()), 2): [[[True], [False, None]], None],
    pa.list_(pa.string(), 2): [["a", None], None],
    pa.list_(pa.list_(pa.int8(), 2)): [[[1, 2], [3, 4]], [], None],
    pa.map_(pa.string(), pa.float32()): [[("k", 0.5), ("l", None)], [], None],
    pa.map_(pa.int32(), pa.list_(MESSAGE)): [[(1, CHAT[0]), (2, None)], [], None],
    pa.list_(TURN): [
        [
            {
                "role": "r",
                "scores": [0.1, math.inf, None],
                "calls": [{"name": "f", "args": [("x", 2**63 - 1)]}],
            }
        ],
        [{"role": None, "scores": None, "calls": []}],
        None,
    ],
    pa.list_(pa.list_(pa.uint64())): [[[2**64 - 1]]],
    pa.list_(pa.list_(pa.float16())): [[[0.5]]],
}


def as_json(value: Any) -> Any:
    """What JSON makes of a value: pairs become lists. NaN becomes text, to compare equal to itself."""
    return json.loads(json.dumps(value), parse_constant=str)


def texts_of(column: Any) -> list[bytes | None]:
    assert isinstance(column, Spans)
    return [None if column.lengths[i] < 0 else column.value(i).tobytes() for i in range(len(column))]


def values_of(blocks: list[Columns], name: str = "x") -> list[Any]:
    texts = [text for block in blocks for text in texts_of(block[name])]
    return [None if text is None else json.loads(text, parse_constant=str) for text in texts]


def converted(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    return values_of([columns_of(pa.table({"x": array}), None, arrow_block(len(array)))])


def parquet(table: pa.Table, rows: int = 3) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=rows)
    return file.getvalue()


def ipc(
    table: pa.Table, rows: int = 3, *, writer: Any = pa.ipc.new_file, compression: str | None = None
) -> bytes:
    sink = io.BytesIO()
    with writer(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
        out.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_texts_are_those_of_the_json_module_byte_for_byte(kind: pa.DataType) -> None:
    array = pa.array(TYPES[kind], kind)
    (texts,) = [texts_of(columns_of(pa.table({"x": array}), None, arrow_block(len(array)))["x"])]
    written = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in array.to_pylist()]
    assert texts == [None if text == "null" else text.encode() for text in written]


def test_every_character_is_written_as_by_the_json_module() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    array = pa.array([characters], pa.list_(pa.string()))
    (text,) = texts_of(columns_of(pa.table({"x": array}), None, arrow_block(1))["x"])
    assert text == json.dumps(characters, ensure_ascii=False, separators=(",", ":")).encode()


WRITERS: dict[str, tuple[Format, Any]] = {
    "parquet": (ParquetFormat(), parquet),
    "arrow": (ArrowFileFormat(), ipc),
    "arrow-lz4": (ArrowFileFormat(), partial(ipc, compression="lz4")),
    "arrow-stream": (ArrowStreamFormat(), partial(ipc, writer=pa.ipc.new_stream)),
}
TABULAR = pytest.mark.parametrize("name", list(WRITERS))
EVERY_TYPE = pytest.mark.parametrize("kind", list(TYPES), ids=str)


def held_bytes(block: Columns) -> int:
    parts = [(c.buffer, c.starts, c.lengths) if isinstance(c, Spans) else (c,) for c in block.values()]
    return sum(array.nbytes for part in parts for array in part)


# ---- values -------------------------------------------------------------------------------------------


@EVERY_TYPE
def test_values_are_what_pyarrow_says(kind):
    array = pa.array(TYPES[kind], kind)
    of_nulls = kind == pa.list_(pa.null())
    assert specs_of(pa.schema([("x", kind)]))["x"] == ColumnSpec(
        "null_list" if of_nulls else "json", optional=True
    )
    assert converted(array) == as_json(array.to_pylist())


@EVERY_TYPE
def test_slices_and_chunks_are_what_pyarrow_says(kind):
    array = pa.array(TYPES[kind] * 200, kind)  # more rows than are converted at a time
    column = pa.chunked_array([array[1:], array[:0], array[2:7], array[:1]])
    assert converted(column) == as_json(column.to_pylist())
    assert converted(pa.chunked_array([], kind)) == []


@TABULAR
@EVERY_TYPE
def test_files_give_what_pyarrow_says(kind, name):
    fmt, write = WRITERS[name]
    if name == "parquet" and "list_view" in str(kind):
        pytest.skip("pyarrow writes no list views to Parquet")
    table = pa.table({"x": pa.array(TYPES[kind] * 2, kind), "i": range(2 * len(TYPES[kind]))})
    blocks = decoded_blocks(fmt, write(table), f"a.{name}", block_bytes=1)
    assert len(blocks) == -(-table.num_rows // 3)
    assert values_of(blocks) == as_json(table["x"].to_pylist())


def test_the_text_is_compact_json_in_utf8():
    value = [{"role": "user", "content": 'Grüße "日本"\n\\ \x00\x7f'}, {"role": None, "content": ""}]
    column = columns_of(pa.table({"x": [value]}), None, arrow_block(1))["x"]
    text = r'[{"role":"user","content":"Grüße \"日本\"\n\\ \u0000' + '\x7f"},{"role":null,"content":""}]'
    assert texts_of(column) == [text.encode()]


def test_nan_stays_nan():
    assert converted(pa.array([[[math.nan, -math.inf]]])) == [[["NaN", "-Infinity"]]]


class Scores(pa.ExtensionType):
    """Says nothing of what it stores."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "dataflow.test.scores")

    def __hash__(self) -> int:
        return hash(self.storage_type)

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, _: bytes) -> pa.ExtensionType:
        return cls(storage)


@pytest.mark.parametrize("is_whole", [True, False])
def test_nan_stays_nan_below_an_extension_type_whose_name_says_nothing_of_it(is_whole: bool) -> None:
    pairs = pa.array([[math.nan, 0.1], [1e22, None]], pa.list_(pa.float64(), 2))
    column = pa.ListArray.from_arrays([0, 2], pairs)
    if is_whole:
        column = pa.ExtensionArray.from_storage(Scores(column.type), column)
    else:
        column = pa.ListArray.from_arrays([0, 2], pa.ExtensionArray.from_storage(Scores(pairs.type), pairs))
    assert converted(column) == [[["NaN", 0.1], [1e22, None]]]


def test_a_nested_value_below_a_dictionary_or_an_extension_type_is_json():
    values = pa.array([["a"], ["b", None]])
    indices = pa.array([1, 0, None], pa.int8())
    assert converted(pa.DictionaryArray.from_arrays(indices, values)) == [["b", None], ["a"], None]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4).reshape(2, 2))
    assert converted(pa.ListArray.from_arrays([0, 1, 2], tensors)) == [[[0, 1]], [[2, 3]]]
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], ["x", "y"])
    assert converted(pa.ListArray.from_arrays([0, 3], runs)) == [["x", "x", "y"]]


def test_top_level_structs_are_flattened_and_what_is_nested_in_them_is_json():
    table = pa.table({"meta": [{"tags": ["a"], "n": 1}, {"tags": None, "n": 2}]})
    for fmt, write in WRITERS.values():
        blocks = decoded_blocks(fmt, write(table), "a")
        assert values_of(blocks, "meta.tags") == [["a"], None]
        assert blocks[0]["meta.n"].tolist() == [1, 2]


LEAVES = st.sampled_from([pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.null(), ENCODED])


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(st.tuples(st.text(max_size=3), inner), max_size=3, unique_by=lambda pair: pair[0])
    wrap = st.sampled_from([pa.list_, pa.large_list, lambda kind: pa.map_(pa.string(), kind)])
    structs = fields.map(pa.struct)
    return st.builds(lambda w, kind: w(kind), wrap, inner | structs)


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({f.name: _values(f.type) for f in kind})
    if pa.types.is_map(kind):
        return st.none() | st.lists(st.tuples(st.text(max_size=3), _values(kind.item_type)), max_size=3)
    if pa.types.is_nested(kind):
        return st.none() | st.lists(_values(kind.value_type), max_size=3)
    by_type = {
        pa.int64(): st.integers(-(2**63), 2**63 - 1),
        pa.float64(): st.floats(),
        pa.bool_(): st.booleans(),
        pa.null(): st.none(),
    }
    return st.none() | by_type.get(kind, st.text(max_size=4))


@given(st.data(), st.sampled_from(["arrow", "arrow-stream", "arrow-lz4", "parquet"]))
def test_any_nested_type_is_read_as_pyarrow_says(data, name):
    kind = data.draw(st.recursive(LEAVES, _nested, max_leaves=6).map(lambda inner: pa.list_(pa.list_(inner))))
    rows = data.draw(st.lists(_values(kind), min_size=1, max_size=8))
    fmt, write = WRITERS[name]
    table = pa.table({"x": pa.array(rows, kind)})
    try:
        content = write(table)
    except pa.ArrowException:  # Parquet has no struct without fields
        return
    expected = json.loads(json.dumps(table["x"].to_pylist()), parse_constant=str)
    blocks = decoded_blocks(fmt, content, "a", block_bytes=1)
    assert values_of(blocks) == expected


# ---- JSON Lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 20])
def test_json_lines_are_what_the_json_module_says(block_bytes):
    rows = [{"x": value, "i": i} for i, value in enumerate([*CHAT[:2], [{"role": "a", "content": None}]])]
    rows *= 5
    blocks = decoded_blocks(JsonlFormat(), jsonl(rows), "a.jsonl", block_bytes=block_bytes)
    assert values_of(blocks) == [row["x"] for row in rows]


def test_absent_and_null_values_of_json_lines_are_missing():
    content = jsonl([{"x": ["a"]}, {"x": None}, {}, {"x": []}])
    assert values_of(decoded_blocks(JsonlFormat(), content, "a.jsonl", block_bytes=1)) == [
        ["a"],
        None,
        None,
        [],
    ]


@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_keys_that_some_objects_lack_stay_absent_and_nulls_stay_null(block_bytes):
    rows = [{"x": [{"a": 1}]}, {"x": [{"b": [], "a": 1.5}, {}]}, {"x": [{"a": None}]}, {"x": []}]
    blocks = decoded_blocks(JsonlFormat(), jsonl(rows), "a.jsonl", block_bytes=block_bytes)
    assert values_of(blocks) == [row["x"] for row in rows]


def test_texts_that_look_like_dates_stay_texts_inside_lists():
    rows = [{"x": [{"day": "2024-01-01"}]}]
    assert values_of(decoded_blocks(JsonlFormat(), jsonl(rows), "a.jsonl")) == [[{"day": "2024-01-01"}]]


# ---- what is read and kept ------------------------------------------------------------------------------


def test_only_wanted_columns_are_converted():
    table = pa.table({"x": [[{"score": 0.5}]] * 9, "i": [1] * 9})  # what holds floats is written in Python
    for fmt, write in WRITERS.values():
        content = write(table)
        texts_written = []
        for columns in (["i"], ["i", "x"]):
            blocks = []
            calls = python_calls(lambda: blocks.extend(decoded_blocks(fmt, content, "a", columns)))  # noqa: B023
            assert np.concatenate([block["i"] for block in blocks]).tolist() == [1] * 9
            texts_written.append(calls.count("JSONEncoder.encode"))
        assert texts_written[1] == texts_written[0] + 9


def typical(rows: int) -> dict[str, pa.Array]:
    """Columns of the kinds people have, their lengths far apart."""
    rng = np.random.default_rng(rows)
    lengths = (rng.pareto(1.5, (rows, 2)) * 60).astype(int).clip(0, 4000).tolist()
    chat = [
        [
            {"role": "user", "content": f'Say "{i}":\n' + "wörd " * a},
            {"role": "assistant", "content": "x" * b if i % 9 else None},
        ]
        for i, (a, b) in enumerate(lengths)
    ]
    return {
        "messages": pa.array(chat, pa.list_(MESSAGE)),
        "tags": pa.array([["train", "chat"][: i % 3] for i in range(rows)], pa.list_(pa.string())),
        "floats": pa.array([rng.random((3, 4)).tolist() for _ in range(rows)]),
        "integers": pa.array([[[-(2**62) - i] * 5, []] for i in range(rows)]),
        "bools": pa.array([[[True, False, None]]] * rows),
        "views": pa.array([["y" * 50, "z"]] * rows, pa.list_(pa.string_view())),
        "encoded": pa.array([["a long name of a label " * 3] * 4] * rows, pa.list_(ENCODED)),
        "same": pa.array([[{"role": "system", "content": "You are a helper. " * 30}]] * rows),
        "nulls": pa.array([[None] * 6] * rows, pa.list_(pa.null())),
        "empty": pa.array([[[]] * 6] * rows, pa.list_(pa.list_(MESSAGE))),
        "pairs": pa.array([[("key", i)] for i in range(rows)], pa.map_(pa.string(), pa.int64())),
        "meta": pa.array([{"tags": [f"tag {i}"]} for i in range(rows)]),
    }


@pytest.mark.parametrize("column", list(typical(1)))
@pytest.mark.parametrize("name", [*WRITERS, "jsonl"])
def test_nbytes_bounds_what_typical_data_holds_and_is_not_far_above(column, name):
    table = pa.table({column: typical(300)[column]})
    if name == "jsonl":
        fmt: Format = JsonlFormat()
        values = as_json(table[column].to_pylist())
        content = jsonl([{column: dict(value) if column == "pairs" else value} for value in values])
    else:
        fmt, write = WRITERS[name]
        content = write(table, 100)
    scan = scan_of(fmt, content, "a", 20_000)
    held = [held_bytes(block) for block in decoded_blocks(fmt, content, "a", block_bytes=20_000)]
    assert all(h <= n for h, n in zip(held, scan.nbytes, strict=True))
    # pyarrow writes views with the text of all batches; Parquet's footer does not tell that lists are empty.
    if column not in ("views", "empty"):
        assert scan.nbytes.sum() <= 8 * sum(held) + 2000 * len(held)


@pytest.mark.filterwarnings("ignore:a.jsonl, line 1. key 'a' is there twice:UserWarning")
def test_nested_values_are_the_text_of_their_line():
    rows = [b'[ {"b": 1e2 ,"a":1, "a" : "\\u00e9" } ]', b"[[1.0,  1],true]", b'["NaN", NaN]', b'["\\ud800"]']
    content = b"".join(b'{"i": 0, "x" :  %s \t}\n' % row for row in rows)
    for block_bytes in (1, 1000):
        blocks = decoded_blocks(JsonlFormat(), content, "a.jsonl", ["x"], block_bytes)
        assert [text for block in blocks for text in texts_of(block["x"])] == rows


SPELLINGS = st.one_of(
    st.integers(-(2**64), 2**64).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True),
    st.sampled_from(["1e15", "-1E15", "9e+15", "1e5", "1e-4", "-0", "0", "1", "null"]),
)


def _listed(values: list[str]) -> str:
    return f"[{','.join(values)}]"


SHORT_LISTS = st.lists(SPELLINGS, max_size=8)
LONG_LISTS = st.lists(SPELLINGS, min_size=1, max_size=3).map(lambda values: values * 300)


@pytest.mark.full
@given(st.lists(st.lists(SHORT_LISTS | LONG_LISTS, max_size=3), min_size=1, max_size=5), st.integers(1, 500))
@example([[["1e15"] * 300]], 1)
def test_however_numbers_in_nested_lists_are_spelled_nbytes_bounds_what_they_become(lists, block_bytes):
    texts = (_listed([_listed(inner) for inner in outer]) for outer in lists)
    content = "".join(f'{{"x":{text}}}\n' for text in texts).encode()
    scan = scan_of(JsonlFormat(), content, "a.jsonl", block_bytes)
    blocks = decoded_blocks(JsonlFormat(), content, "a.jsonl", block_bytes=block_bytes)
    assert all(held_bytes(block) <= n for block, n in zip(blocks, scan.nbytes, strict=True))


@pytest.mark.parametrize("numbers", ["1e15", "1.5", "null"])
def test_lists_of_nulls_are_counted_as_the_numbers_that_they_are_elsewhere(numbers):
    rows = [f'{{"x":[{",".join([spelling] * 500)}]}}\n' for spelling in ("null", numbers)]
    content = "".join(rows).encode()
    scan = scan_of(JsonlFormat(), content, "a.jsonl", 1)
    blocks = decoded_blocks(JsonlFormat(), content, "a.jsonl", block_bytes=1)
    told = np.uint8 if numbers == "null" else np.float64  # of nulls only, the text
    assert [block["x"].buffer.dtype for block in blocks] == [told] * 2
    assert all(held_bytes(block) <= n for block, n in zip(blocks, scan.nbytes, strict=True))


def test_numbers_of_a_dictionary_are_counted_at_their_longest():
    """Four bytes an entry, and up to 24 in the text of each value."""
    numbers = np.random.default_rng(0).random(1000).astype(np.float32)
    encoded = pa.DictionaryArray.from_arrays(np.tile(np.arange(1000, dtype=np.int16), 5), numbers)
    lists = pa.ListArray.from_arrays(np.arange(0, 5001, 10, dtype=np.int32), encoded)
    table = pa.table({"x": pa.ListArray.from_arrays(np.arange(0, 501, 5, dtype=np.int32), lists)})
    content = ipc(table, 100)
    (nbytes,) = scan_of(ArrowFileFormat(), content, "a").nbytes
    (block,) = decoded_blocks(ArrowFileFormat(), content, "a")
    assert held_bytes(block) <= nbytes


# ---- what stays out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "held"),
    [
        (pa.array([[[b"ab"]]]), "binary"),
        (pa.array([[{"a": [b"ab"]}]]), "binary"),
        (pa.array([[{"a": 1}]], pa.list_(pa.struct([("a", pa.decimal128(9, 2))]))), r"decimal128\(9, 2\)"),
        (pa.array([[{"a": 0}]], pa.list_(pa.struct([("a", pa.timestamp("s"))]))), r"timestamp\[s\]"),
        (pa.array([[("k", b"v")]], pa.map_(pa.string(), pa.binary())), "binary"),
        (
            pa.ListArray.from_arrays(
                [0, 1], pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
            ),
            "sparse_union",
        ),
        (
            pa.ListArray.from_arrays([0, 1], pa.StructArray.from_arrays([[1], [2]], names=["a", "a"])),
            "two fields of one name",
        ),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_what_json_cannot_say_names_column_and_type(array, held):
    table = pa.table({"x": array, "y": [["b"]]})
    told = rf"column 'x' of type .* has no array form; pass columns= without it \(it holds {held}.*JSON"
    with pytest.raises(ShardError, match=told):
        columns_of(table, None, arrow_block(1))
    assert values_of([columns_of(table, ["y"], arrow_block(1))], "y") == [["b"]]
    specs = specs_of(table.schema)
    assert (specs["x"].kind, specs["x"].note) == ("other", str(array.type))


def test_broken_offsets_inside_a_nested_column_are_refused():
    offsets = pa.py_buffer(np.array([0, 99, 3], np.int32))
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc")])
    array = pa.ListArray.from_arrays([0, 2], text)
    with pytest.raises(CorruptShardError, match=r"column 'x'.*is broken"):
        converted(array)


NULLS_OVER_AN_EMPTY_DICTIONARY: dict[pa.DataType, list[Any]] = {
    pa.list_(pa.struct([("a", ENCODED)])): [[None], [{"a": None}], None],
    pa.large_list(pa.struct([("a", ENCODED)])): [[None], []],
    pa.list_view(pa.struct([("a", ENCODED)])): [[None], []],
    pa.map_(pa.string(), pa.struct([("a", ENCODED)])): [[("k", None)]],
    pa.list_(pa.list_(pa.struct([("a", ENCODED)]), 2)): [[[None, None]], [None]],
    pa.list_(pa.struct([("n", pa.null()), ("a", ENCODED)])): [[None, None], []],
}


@pytest.mark.parametrize("kind", list(NULLS_OVER_AN_EMPTY_DICTIONARY), ids=str)
def test_codes_of_an_empty_dictionary_beneath_nulls_are_no_damage(kind):
    array = pa.array(NULLS_OVER_AN_EMPTY_DICTIONARY[kind], kind)
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        array.validate(full=True)  # else this test shows nothing
    assert converted(array) == as_json(array.to_pylist())
    assert converted(array[1:]) == as_json(array[1:].to_pylist())


@pytest.mark.parametrize(("make", "width"), [(pa.list_, np.int32), (pa.large_list, np.int64)])
def test_broken_offsets_beside_an_empty_dictionary_are_refused(make, width):
    inner = pa.array([None] * 3, pa.struct([("a", ENCODED)]))
    offsets = pa.py_buffer(np.array([0, 99, 3], width))
    array = pa.Array.from_buffers(make(inner.type), 2, [None, offsets], children=[inner])
    with pytest.raises(CorruptShardError, match=r"column 'x'.*is broken"):
        converted(pa.ListArray.from_arrays([0, 2], array))


@pytest.mark.parametrize("codes", [[0, 5], [0, -100]])
@pytest.mark.parametrize("entries", [["x"], []])
def test_codes_outside_a_nested_dictionary_are_refused(codes, entries):
    values = pa.array(entries, pa.string())
    encoded = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), values, safe=False)
    with pytest.raises(CorruptShardError, match=r"column 'x'.*is broken"):
        converted(pa.ListArray.from_arrays([0, 2], encoded))


def test_a_code_of_an_empty_dictionary_that_nothing_masks_is_refused():
    encoded = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array([], pa.string()), safe=False)
    with pytest.raises(CorruptShardError, match=r"column 'x'.*is broken"):
        converted(pa.ListArray.from_arrays([0, 1], encoded))


def test_a_batch_beside_columns_that_cannot_be_delivered_is_still_counted_right():
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    dense = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    runs = pa.RunEndEncodedArray.from_arrays([1], ["x"])
    text = ["long " * 1000]
    table = pa.table({"u": union, "d": dense, "r": runs, "n": pa.nulls(1), "x": [text]})
    scan = scan_of(ArrowFileFormat(), ipc(table), "a")
    assert 2 * 5000 <= scan.nbytes.sum() - scan.length.sum() <= 2 * 5000 + 1000


def test_the_type_is_told_as_json():
    assert spec_text(ColumnSpec("json", optional=True)) == "json"
