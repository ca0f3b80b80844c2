"""Files that ask for far more memory than they are long: indexing says so, in little memory and time."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from itertools import chain, repeat
from pathlib import Path

import pytest
from formats_kit import (
    LIMIT_MB,
    blocks_of,
    decoded_blocks,
    index_apart,
    rows_of,
    scan_of,
    shard_of,
    write_gzip,
    write_zstd,
)
from parameters_kit import in_full

from dataflow import DataLoader, ShardedDataset
from sharding.errors import CorruptShardError, SampleError
from sharding.formats.arrow.json_types import MAX_LEVELS
from sharding.formats.arrow.jsonl import JsonlFormat
from sharding.formats.tar.format import TarFormat

URL = "a.jsonl"
NESTED = {
    "lists": lambda n: '{"a":' + "[" * n + "]" * n + "}",
    "objects": lambda n: '{"a":' * n + "1" + "}" * n,
    "unclosed": lambda n: '{"a":' + "[" * n,
    "beside strings": lambda n: r'{"d":"\\","c":"\"]]]]","a":' + "[" * n + "]" * n + "}",
}
KEYS = "".join(f'{{"k{i}":1}}\n' for i in range(51_000)).encode()
MANY = {
    "lines": KEYS,
    "one object": b"{" + KEYS.replace(b"\n", b",").replace(b"{", b"").replace(b"}", b"")[:-1] + b"}\n",
    "objects": b"{%s}\n"
    % b",".join(b'"%d":{%s}' % (i, b",".join(b'"%d":1' % j for j in range(200))) for i in range(256)),
}


def outcome(path: Path, format_name: str = "auto") -> str:
    """What indexing a file says, after checking what it takes."""
    error, megabytes = index_apart(path, format_name)
    assert megabytes < LIMIT_MB
    return error


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("levels", [*in_full(20_000), 200_000])
def test_a_line_nested_too_deeply_is_named(tmp_path, kind, levels):
    line = NESTED[kind](levels).encode()
    path = tmp_path / URL
    path.write_bytes(b'{"b":"x"}\n' * 3 + line + b"\n" + b'{"b":"x"}\n' * 200_000)
    assert "byte 30: this line is nested too deeply to be read; write deep values as a string of JSON" in (
        outcome(path)
    )


@pytest.mark.parametrize("kind", ["lists", "objects"])
def test_deep_values_are_text_and_objects_are_columns_down_to_a_level(kind):
    value = json.loads(NESTED[kind](300))["a"]
    (block,) = decoded_blocks(JsonlFormat(), json.dumps({"a": value}).encode(), URL)
    levels = MAX_LEVELS if kind == "objects" else 1
    for _ in range(levels - 1):
        value = value["a"]
    assert list(block) == [".".join("a" * levels)]
    assert json.loads(rows_of([block])[0][".".join("a" * levels)]) == value


def test_brackets_in_strings_are_no_levels():
    content = json.dumps({"a": "[" * 30_000 + '\\"[{' * 3000}).encode() + b"\n"
    assert rows_of(decoded_blocks(JsonlFormat(), content, URL))[0]["a"] == json.loads(content)["a"].encode()


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_line_that_was_replaced_by_a_deep_one_is_named_when_it_is_read(tmp_path, compression):
    write = {"": lambda p, x: p.write_bytes(b"".join(x)), ".gz": write_gzip, ".zst": write_zstd}[compression]
    before, after = tmp_path / "before", tmp_path / f"a.jsonl{compression}"
    deep = b'{"a": 1}\n' + NESTED["lists"](20_000).encode() + b"\n"
    write(before, [b'{"a": 1}\n' * 2 + b" " * len(deep)])
    write(after, [deep])
    block = blocks_of(scan_of(JsonlFormat(), before.read_bytes(), after.name), shard_of(b"", after.name))[0]
    with pytest.raises(CorruptShardError, match="nested too deeply") as caught:
        JsonlFormat().decode(block, memoryview(after.read_bytes()), ["a"])
    assert (caught.value.offset, caught.value.stage) == (9, "decode")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MANY)
def test_too_many_different_keys_are_refused(tmp_path, kind):
    path = tmp_path / URL
    path.write_bytes(MANY[kind])
    assert "there are more than 50000 different keys" in outcome(path)


def test_the_limit_of_keys_is_an_option():
    content = KEYS[: KEYS.index(b'{"k300"')]
    with pytest.raises(CorruptShardError, match=r"more than 299 different keys.*max_columns=") as caught:
        scan_of(JsonlFormat(max_columns=299), content, URL)
    assert caught.value.offset is not None
    assert len(scan_of(JsonlFormat(max_columns=300), content, URL).schema) == 300


def test_keys_that_are_data_take_little_memory(tmp_path):
    """A key of a list's objects is text; one of an object is a column, of which a block has few lines."""
    elements = b",".join([b'{"k%d":1}' % i for i in range(5000)] + [b"{}"] * 1_000_000)
    path = tmp_path / URL
    path.write_bytes(b'{"x":[' + elements + b"]}\n")
    assert outcome(path) == ""
    path.write_bytes(b"".join(b'{"arguments":{"name_%d":1}}\n' % i for i in range(12_000)))
    assert outcome(path) == ""


@pytest.mark.parametrize("columns", [None, ["k7"]])
def test_blocks_of_many_keys_have_few_lines(columns):
    codec = JsonlFormat()
    codec.max_cells = 300
    rows = [{f"k{i % 30}": i, **({"k7": i} if i % 2 else {})} for i in range(100)]
    content = "".join(json.dumps(row) + "\n" + "\n" * (i % 3) for i, row in enumerate(rows)).encode()
    scan = scan_of(codec, content, URL)
    assert scan.num_samples.max() <= 10
    assert (scan.offset[1:] == (scan.offset + scan.length)[:-1]).all()
    got = rows_of(decoded_blocks(codec, content, URL, columns))
    assert got == [{name: row.get(name) for name in columns or got[0]} for row in rows]


def test_lines_of_any_keys_in_any_order_give_what_all_have_together():
    codec = JsonlFormat()
    rows = [
        {f"k{i % 7}": float(i), "m": [{f"n{i % 3}": "x"}] * (i % 4), f"t{i % 11}": "y" * i}
        for i in range(300)
    ]
    scan = scan_of(codec, "".join(json.dumps(row) + "\n" for row in rows).encode(), URL)
    assert len(scan.offset) == 1
    assert set(scan.schema) == {"m", *(f"k{i}" for i in range(7)), *(f"t{i}" for i in range(11))}
    assert all(spec.optional for name, spec in scan.schema.items() if name[0] == "t")
    assert not scan.schema["m"].optional


@pytest.mark.parametrize("write", [*in_full(write_gzip), write_zstd])
def test_a_line_of_4_gb_in_a_small_file_is_refused(tmp_path, write):
    path = tmp_path / ("a.jsonl.gz" if write is write_gzip else "a.jsonl.zst")
    pieces = repeat(b"x" * (1 << 20), 4000 if write is write_zstd else 400)
    write(path, chain([b'{"a":1}\n{"a":"'], pieces, [b'"}\n']))
    assert "byte 8: this line is longer than 16777216 bytes; accept longer ones with" in outcome(path)


@pytest.mark.parametrize("element", [b"1", *in_full(b"[]", b'{"b":1}')])
def test_the_longest_line_takes_bounded_memory(tmp_path, element):
    path = tmp_path / URL
    path.write_bytes(b'{"a":[' + b",".join([element] * ((15 << 20) // (len(element) + 1))) + b"]}\n")
    assert outcome(path) == ""


def test_the_longest_line_is_an_option():
    content = b'{"a": "' + b"x" * 5000 + b'"}\n'
    with pytest.raises(CorruptShardError, match="longer than 1000 bytes") as caught:
        scan_of(JsonlFormat(max_line_bytes=1000), b'{"a": "y"}\n' + content, URL, block_bytes=64)
    assert caught.value.offset == 11
    assert scan_of(JsonlFormat(max_line_bytes=6000), content, URL, block_bytes=64).num_samples.sum() == 1
    for limit in ("max_line_bytes", "max_columns"):
        with pytest.raises(ValueError, match=f"{limit} must be an integer >= 1, got 0"):
            JsonlFormat(**{limit: 0})


def test_a_json_member_nested_too_deeply_is_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for name, data in (("a.json", b"{}"), ("b.json", b"[" * 20_000 + b"]" * 20_000)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            shard.addfile(info, io.BytesIO(data))
    loader = DataLoader(ShardedDataset(str(tmp_path / "a.tar")), batch_size=1)
    with pytest.raises(SampleError, match=r"a\.tar.*sample 'b': column 'json': .*recursion"):
        list(loader)


def header(name: str, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("length", "times"), [(1, 300), (20_000, 100)])
def test_too_many_members_in_a_small_file_are_refused(tmp_path, length, times):
    path = tmp_path / "a.tar.zst"
    pair = header("a" * length + ".x") + header("b" * length + ".x")
    write_zstd(path, chain(repeat(pair * ((1 << 20) // len(pair)), times), [bytes(1024)]))
    assert "more than 500000 members, or very long names, in a compressed shard" in outcome(path)


def test_the_limit_of_members_is_an_option():
    content = gzip.compress(header("a.x") + header("b.x") + header("c.x") + bytes(1024))
    with pytest.raises(CorruptShardError, match=r"more than 2 members.*max_members="):
        scan_of(TarFormat(max_members=2), content, "a.tar.gz")
    assert scan_of(TarFormat(max_members=3), content, "a.tar.gz").num_samples.tolist() == [3]
    with pytest.raises(ValueError, match="max_members must be an integer >= 1, got 0"):
        TarFormat(max_members=0)


def test_a_member_of_2_gb_in_a_small_file_is_indexed_in_little_memory(tmp_path):
    path = tmp_path / "a.tar.zst"
    write_zstd(path, chain([header("a.x", 2 << 30)], repeat(bytes(1 << 20), 2 << 10), [bytes(1024)]))
    assert outcome(path) == ""


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize("bits", [51, 62, 80])
def test_a_member_of_impossible_size_is_damage(name, bits):
    content = header("a.x", 1 << bits) + bytes(2048)
    content = gzip.compress(content) if name.endswith(".gz") else content
    with pytest.raises(CorruptShardError, match=f"the header states {1 << bits} bytes of payload") as caught:
        scan_of(TarFormat(), content, name)
    assert caught.value.offset == 0
