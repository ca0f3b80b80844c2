from __future__ import annotations

import gzip
import json
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from formats_kit import blocks_of, decoded_blocks, rows_of, scan_of, shard_of
from hypothesis import given, strategies as st

from sharding.blocks import Masked
from sharding.errors import CorruptShardError
from sharding.formats.arrow import json_scan
from sharding.formats.arrow.json_scan import LineScanner, note_doubled
from sharding.formats.arrow.jsonl import JsonlFormat

FORMAT = JsonlFormat()
URL = "a.jsonl"


def jsonl(rows: list[dict[str, Any]], newline: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + newline for row in rows).encode()


def oracle(content: bytes) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    return [{k: v.encode() if isinstance(v, str) else v for k, v in row.items()} for row in rows]


ROWS = [
    {"label": i, "x": i / 3, "text": f"sämple\n{i}" * (i % 4), "ok": i % 2 == 0, "ids": list(range(i % 5))}
    for i in range(60)
]

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\r\n"), max_size=6
)
LINES = st.fixed_dictionaries(
    {
        "i": st.integers(-(2**63), 2**63 - 1),
        "f": st.floats(allow_nan=False, allow_infinity=False, width=32),
        "t": TEXTS,
        "b": st.booleans(),
        "l": st.lists(st.integers(-9, 9), min_size=1, max_size=3),
    }
)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\n \t\n"])
@pytest.mark.parametrize("block_bytes", [1, 100, 1000, 1 << 20])
def test_all_blocks_equal_the_json_module(newline, block_bytes):
    content = jsonl(ROWS, newline)
    assert rows_of(decoded_blocks(FORMAT, content, URL, block_bytes=block_bytes)) == oracle(content)


@given(st.lists(LINES, min_size=1, max_size=8), st.integers(1, 400), st.booleans())
def test_any_lines_in_any_blocks_equal_the_json_module(rows, block_bytes, ends_in_newline):
    content = jsonl(rows)
    content = content if ends_in_newline else content[:-1]
    assert rows_of(decoded_blocks(FORMAT, content, URL, block_bytes=block_bytes)) == rows_of_json(rows)


def rows_of_json(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "t": row["t"].encode()} for row in rows]


@given(st.lists(st.sampled_from([b'{"a":1}', b'{"a":22222}', b"", b"  "])), st.integers(1, 40))
def test_blocks_cover_the_file_in_whole_lines(lines, block_bytes):
    content = b"\n".join(lines)
    scan = scan_of(FORMAT, content, URL, block_bytes)
    for offset, length in zip(scan.offset, scan.length, strict=True):
        assert offset == 0 or content[offset - 1 : offset] == b"\n"
        assert offset + length == len(content) or content[offset + length - 1 : offset + length] == b"\n"
    assert scan.num_samples.sum() == sum(1 for line in lines if line.strip())


def test_blocks_are_near_the_asked_size():
    content = jsonl(ROWS * 20)
    scan = scan_of(FORMAT, content, URL, 5000)
    assert (scan.length <= 5000).all()
    assert (scan.length[:-1] > 4500).all()


def test_a_line_longer_than_a_block_is_a_block():
    content = jsonl([{"t": "a"}, {"t": "b" * 5000}, {"t": "c"}])
    assert rows_of(decoded_blocks(FORMAT, content, URL, block_bytes=64)) == oracle(content)


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("tail", [b"", b"\n" * 5000])
def test_a_compressed_file_is_one_block(compression, tail):
    content = jsonl(ROWS) + tail
    if compression == "gz":
        stored = gzip.compress(content)
    else:
        stored = pytest.importorskip("zstandard").compress(content)
    url = f"a.jsonl.{compression}"
    scan = scan_of(FORMAT, stored, url, block_bytes=200)
    assert (scan.offset.tolist(), scan.length.tolist()) == ([0], [len(stored)])
    assert scan.nbytes[0] >= len(content)
    assert rows_of(decoded_blocks(FORMAT, stored, url, block_bytes=200)) == oracle(content)


def test_integers_and_floats_unify_across_blocks():
    content = jsonl([{"x": 1}, {"x": 2.5}, {"x": 3}])
    blocks = decoded_blocks(FORMAT, content, URL, block_bytes=1)
    assert {block["x"].dtype.name for block in blocks} == {"float64"}
    assert [row["x"] for row in rows_of(blocks)] == [1.0, 2.5, 3.0]


def test_missing_strings_and_lists_are_missing_in_every_block():
    content = jsonl([{"i": 1}, {"i": 2, "t": "x", "l": [1]}, {"i": 3, "t": None, "l": []}])
    for block_bytes in (1, 1000):
        rows = rows_of(decoded_blocks(FORMAT, content, URL, block_bytes=block_bytes))
        assert [row["t"] for row in rows] == [None, b"x", None]
        assert [row["l"] for row in rows] == [None, [1], []]
    schema = scan_of(FORMAT, content, URL).schema
    assert schema["t"].optional
    assert not schema["i"].size_range


def test_columns_that_no_line_lacks_are_not_optional():
    schema = scan_of(FORMAT, jsonl(ROWS), URL, 100).schema
    assert not any(spec.optional for spec in schema.values())
    assert {n: s.kind for n, s in schema.items()} == {
        "label": "fixed",
        "x": "fixed",
        "text": "text",
        "ok": "fixed",
        "ids": "list",
    }


def test_missing_floats_are_nan():
    (block,) = decoded_blocks(FORMAT, jsonl([{"x": 1.5}, {"x": None}, {"y": 1.0}]), URL)
    assert isinstance(block["x"], Masked)
    np.testing.assert_array_equal(block["x"].values, [1.5, np.nan, np.nan])


def test_missing_integers_are_masked():
    content = jsonl([{"i": 1}, {"i": 2}, {"t": "x"}])
    blocks = decoded_blocks(FORMAT, content, URL, block_bytes=1)
    assert [row["i"] for row in rows_of(blocks)] == [1, 2, None]


@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_strings_that_look_like_dates_stay_strings(block_bytes):
    content = jsonl([{"t": "2020-01-01", "s": {"d": "2020-01-01T00:00:00Z"}}, {"t": "x", "s": {"d": "y"}}])
    rows = rows_of(decoded_blocks(FORMAT, content, URL, block_bytes=block_bytes))
    assert rows[0] == {"t": b"2020-01-01", "s.d": b"2020-01-01T00:00:00Z"}


@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_objects_become_one_column_a_field(block_bytes):
    content = jsonl([{"a": {"b": 1.0}}, {"a": {"b": 2, "c": {"d": "x"}}}])
    rows = rows_of(decoded_blocks(FORMAT, content, URL, block_bytes=block_bytes))
    assert rows == [{"a.b": 1.0, "a.c.d": None}, {"a.b": 2.0, "a.c.d": b"x"}]


def test_lists_that_are_always_empty_are_text_since_nothing_tells_what_they_hold():
    (block,) = decoded_blocks(FORMAT, jsonl([{"l": []}, {"l": []}]), URL)
    assert block["l"].buffer.tobytes() == b"[][]"


@pytest.mark.parametrize("content", [b"", b"\n", b"\n \n\r\n"])
def test_a_file_without_lines_has_no_samples(content):
    assert len(scan_of(FORMAT, content, URL).offset) == 0


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": 1',
        b'{"a": tru}',
        b"5",
        b"[1]",
        b'"x"',
        b'{"a": 1} garbage',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b'{"a": 3, "b": [["\xff"]]}',
        b"}",
        b"{a: 1}",
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_a_broken_line_is_named_by_its_offset(line, block_bytes):
    before = jsonl([{"a": 1}, {"a": 2}]) + b"\n"
    content = before + line + b"\n" + jsonl([{"a": 3}])
    with pytest.raises(CorruptShardError, match="line") as caught:
        scan_of(FORMAT, content, URL, block_bytes)
    assert (caught.value.shard, caught.value.offset, caught.value.stage) == (URL, len(before), "index")


MIXED = [
    ([1, 2, "x"], "a number on the line at byte {0}, but text on the line at byte {2};"),
    ([True, 1], "true or false on the line at byte {0}, but a number on the line at byte {1};"),
    ([{"b": 1}, [1]], "an object on the line at byte {0}, but a list on the line at byte {1};"),
    ([[{}], "x"], "a list on the line at byte {0}, but text on the line at byte {1};"),
    (
        [-1, 2**63],
        "an integer beyond 2^63 - 1 on the line at byte {1}, and one below 0 on the line at byte {0}:",
    ),
    ([1, 2**64], "an integer on the line at byte {1} that takes more than 64 bits;"),
    ([[-(2**63) - 1]], "an integer on the line at byte {0} that takes more than 64 bits;"),
    (
        [0.5, 2**53 + 1],
        "an integer beyond 2^53 on the line at byte {1}, and a fraction on the line at byte {0}:",
    ),
    ([[1, 0.5], [-(2**53) - 1]], "an integer beyond 2^53 on the line at byte {1}, and a fraction"),
    (["\ud800"], "text with half of a surrogate pair, which UTF-8 cannot hold, on the line at byte {0};"),
]


@pytest.mark.parametrize(("values", "told"), MIXED, ids=str)
@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_a_key_of_two_types_is_an_error_for_who_asks_for_it(values, told, block_bytes):
    lines = [json.dumps({"a": value, "i": i}).encode() + b"\n" for i, value in enumerate(values)]
    content = b"".join(lines)
    scan = scan_of(FORMAT, content, URL, block_bytes)
    assert [name for name, spec in scan.schema.items() if spec.kind != "unreadable"] == ["i"]
    assert scan.schema["a"].note.startswith("column 'a' holds ")
    blocks = blocks_of(scan, shard_of(content, URL))
    read = [(block, memoryview(content)[block.offset : block.offset + block.length]) for block in blocks]
    assert [i for block, data in read for i in FORMAT.decode(block, data, ["i"])["i"]] == [*range(len(lines))]
    places = [sum(map(len, lines[:i])) for i in range(len(lines))]
    for columns in (["a"], ["i", "a"], None):
        with pytest.raises(CorruptShardError, match="out of columns=") as caught:
            FORMAT.decode(*read[-1], columns)
        assert f"column 'a' holds {told.format(*places)}" in caught.value.reason


def test_a_truncated_gzip_file_is_noticed():
    stored = gzip.compress(jsonl(ROWS))
    with pytest.raises(CorruptShardError, match="truncated"):
        scan_of(FORMAT, stored[:-20], "a.jsonl.gz")


def first_block(content: bytes):
    block = blocks_of(scan_of(FORMAT, content, URL), shard_of(content, URL))[0]
    return block, memoryview(content)[block.offset : block.offset + block.length]


def test_bytes_that_changed_since_indexing_are_noticed():
    block, data = first_block(jsonl([{"a": 1}, {"a": 2}]))
    with pytest.raises(CorruptShardError, match="1 samples where 2") as caught:
        FORMAT.decode(block, data[:8], None)
    assert caught.value.stage == "decode"
    with pytest.raises(CorruptShardError, match="does not fit") as caught:
        FORMAT.decode(block, memoryview(b'{"a": 1}\n{"a": "x"}\n'), None)
    assert caught.value.offset == 9


def test_two_columns_of_one_name_are_named():
    content = jsonl([{"a.b": 1, "a": {"b": 2}}])
    ways = "two columns are named 'a.b': the column 'a.b' and field 'b' of 'a'"
    assert scan_of(FORMAT, content, URL).schema["a.b"].note.startswith(ways)


@pytest.mark.parametrize(
    ("lines", "says", "rows"),
    [
        (['{"a":1,"a":2}', '{"a":3}'], "line 1: key 'a' is", [{"a": 2}, {"a": 3}]),
        (['{"a":1}', '{"a":{"b":1,"b":2}}'], "line 2: key 'b' is", None),
        (['{"n":1}'] * 70 + ['{"n":1,"x":[{"z":1,"z":2}]}'], "line 71: key 'z' is", None),
    ],
)
def test_of_a_key_that_is_there_twice_the_last_counts_with_one_warning(lines, says, rows):
    content = "\n".join(lines).encode()
    with pytest.warns(UserWarning, match=f"{says} there twice in an object: the last counts") as caught:
        scan_of(JsonlFormat(), content, "t.jsonl")
    assert len(caught) == 1
    if rows is not None:
        with pytest.warns(UserWarning, match="the last counts"):
            assert rows_of(decoded_blocks(JsonlFormat(), content, "t.jsonl")) == rows


def wide_zst(content: bytes, window_log: int) -> bytes:
    """A frame as `zstd --long` writes it into a pipe: its size is not told, and its window is."""
    zstandard = pytest.importorskip("zstandard")
    params = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return compressor.compress(content) + compressor.flush()


@pytest.mark.parametrize("window_log", [27, 28])
def test_a_window_of_zstd_is_named_where_it_is_too_wide_and_read_where_it_may_be(window_log):
    content = wide_zst(b'{"a":1}\n{"a":2}\n', window_log)
    fmt = JsonlFormat(window_bytes=1 << window_log)
    assert rows_of(decoded_blocks(fmt, content, "t.jsonl.zst")) == [{"a": 1}, {"a": 2}]
    if window_log == 28:
        text = r"its zstd window is 268,435,456 bytes, and .* of 134,217,728 are .*window_bytes=268435456"
        with pytest.raises(CorruptShardError, match=text):
            scan_of(JsonlFormat(), content, "t.jsonl.zst")


# ---- keys that are there twice ----------------------------------------------------------------------------


def doubled_in(content: bytes) -> tuple[int, str] | None:
    scanner = LineScanner(1000)
    scanner.scan(content, 0)
    return scanner.doubled


class Pairs(list[Any]):
    """The keys and values of an object, as they are written."""


def objects(values: Any) -> Any:
    """Objects whose keys may come twice."""
    return st.lists(st.tuples(st.sampled_from(["a", "b", 'a"', "é"]), values), max_size=4).map(Pairs)


JSON_VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('ab":\\{}[],é', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | objects(inner),
    max_leaves=8,
)


def written(value: Any) -> str:
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)} :{written(one)}" for key, one in value) + "}"
    return "[" + ",".join(map(written, value)) + "]" if isinstance(value, list) else json.dumps(value)


@given(st.lists(objects(JSON_VALUES).map(written), min_size=1, max_size=6), st.sampled_from([2, 1 << 12]))
def test_the_first_line_with_a_key_twice_is_named_wherever_it_is_nested(lines: list[str], slots: int) -> None:
    found: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        doubled: list[str] = []
        json.loads(line, object_pairs_hook=partial(note_doubled, doubled))
        found += [(number, key) for key in doubled[:1]]
    with mock.patch.object(json_scan, "_KEY_SLOTS", slots):
        assert doubled_in("\n".join(lines).encode()) == (found[0] if found else None)


def test_a_key_that_comes_twice_is_named_behind_many_lines_that_are_alike() -> None:
    lines = [b'{"a": %d, "m": [{"r": "x", "c": "\\":"}]}' % n for n in range(30_000)]
    assert doubled_in(b"\n".join(lines)) is None
    lines[29_000] = b'{"a": 1, "m": [{"r": "x", "r": "y"}]}'
    with pytest.warns(UserWarning, match=r"line 29001: key 'r' is there twice in an object: the last counts"):
        scan_of(JsonlFormat(), b"\n\n".join(lines), "a.jsonl", 1 << 20)


@pytest.mark.parametrize("end", [b'{"a": 1}{"a": 2}\n\n', b'{"a":\n1}{"a": 2}\n'])
def test_a_line_that_is_not_one_object_is_refused_behind_many_that_are(end: bytes) -> None:
    with pytest.raises(CorruptShardError, match="this line is not JSON") as error:
        scan_of(JsonlFormat(), b'{"a": 1}\n' * 100_000 + end, "a.jsonl", 4 << 20)
    assert error.value.offset == 900_000
