"""TFRecord files that TensorFlow wrote, and what of them is damaged."""

from __future__ import annotations

import gzip
import io
import random
import struct
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats.records_kit import (
    FIXTURES,
    CountingFile,
    example_of,
    expected,
    fixture,
    span,
    tfrecord_of,
    values_in,
    varint,
    written_anew,
)
from formats_kit import blocks_of, decoded_blocks, scan_of, shard_of
from hypothesis import given, strategies as st

from dataflow import DataLoader, Optional, ShardedDataset
from sharding.blocks import ColumnSpec
from sharding.errors import CorruptShardError
from sharding.formats.records import examples, wire
from sharding.formats.records.tfrecord import TFRecordFormat

pytest.importorskip("crc32c")
FOLDER = FIXTURES / "tfrecord"
URL = "a.tfrecord"


def decoded(content: bytes, block_bytes: int = 600, **more: Any) -> list[dict[str, Any]]:
    return values_in(decoded_blocks(TFRecordFormat(), content, URL, block_bytes=block_bytes, **more))


# ---- equal to what TensorFlow gives -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "block_bytes"), [("plain", 1), ("plain", 600), ("gzip", 600), ("zlib", 1 << 20)]
)
def test_examples_are_those_that_tensorflow_parses(name: str, block_bytes: int) -> None:
    rows = decoded(fixture("tfrecord", f"{name}.tfrecord"), block_bytes)
    assert rows == expected("tfrecord", "examples")


@pytest.mark.full
@pytest.mark.timeout(180)
def test_what_the_installed_owner_writes_is_what_it_parses(tmp_path: Path) -> None:
    if not find_spec("tensorflow"):
        pytest.skip("tensorflow is not installed")
    written_anew("tfrecord", tmp_path)
    for name in ("plain", "gzip", "zlib"):
        content = fixture("tfrecord", f"{name}.tfrecord", tmp_path)
        assert decoded(content) == expected("tfrecord", "examples", tmp_path)


def test_columns_have_the_type_that_all_records_hold() -> None:
    schema = scan_of(TFRecordFormat(), fixture("tfrecord", "plain.tfrecord"), URL).schema
    of = partial(ColumnSpec, is_repeated=True)
    assert schema == {
        "box": of("fixed", "float32", (4,)),
        "ids": of("list", "int64", size_range=(0, 3)),
        "image/encoded": schema["image/encoded"],
        "label": of("fixed", "int64"),
        "pair": of("fixed", "int64", (2,)),
        "rare": of("fixed", "int64", optional=True),
        "score": of("fixed", "float32"),
        "weights": of("list", "float32", size_range=(0, 2), optional=True),
        "words": of("bytes_list", items=2),
        "名": of("bytes", size_range=(3, 4)),
    }
    assert schema["image/encoded"].kind == "bytes"


def test_a_sequence_example_is_its_context_and_its_lists_over_steps() -> None:
    content = fixture("tfrecord", "sequence.tfrecord")
    columns = ["frames", "id", "name", "speed", "token"]
    rows = decoded(content, columns=columns)
    for row, wanted in zip(rows, expected("tfrecord", "sequences"), strict=True):
        steps = {
            name: [step[0] for step in wanted[name]]
            for name in ("frames", "speed", "token")
            if name in wanted
        }
        assert row == {"id": wanted["id"], "name": wanted["name"], **steps}
    with pytest.raises(
        CorruptShardError, match="'points' cannot be delivered: feature list of several values"
    ):
        decoded(content, columns=["points"])


def test_records_that_are_no_examples_are_a_column_of_bytes() -> None:
    rows = decoded(fixture("tfrecord", "raw.tfrecord"), block_bytes=50)
    assert [row["record"][0] for row in rows] == expected("tfrecord", "raw")


def test_a_folder_is_trained_on_with_empty_and_compressed_shards(tmp_path: Path) -> None:
    for name in (
        "part.tfrecord-00000-of-00002",
        "part.tfrecord-00001-of-00002",
        "none.tfrecord",
        "named.tfrecord.gz",
    ):
        (tmp_path / name).write_bytes(fixture("tfrecord", name))
    columns = ["label", "words", "ids", "rare"]
    dataset = ShardedDataset(str(tmp_path), columns=columns, decode={"rare": Optional(default=-1)})
    wanted = expected("tfrecord", "examples") * 2
    with DataLoader(dataset, batch_size=7) as loader:
        batches = list(loader)
    assert [n for batch in batches for n in batch["label"].tolist()] == [row["label"][0] for row in wanted]
    assert [n for batch in batches for n in batch["rare"].tolist()] == [
        row.get("rare", [-1])[0] for row in wanted
    ]
    ids = [one.tolist() for batch in batches for one in batch["ids"].rows()]
    assert ids == [row["ids"] for row in wanted]
    words = [[bytes(item.numpy()) for item in one] for batch in batches for one in batch["words"]]
    assert words == [row["words"] for row in wanted]
    assert dataset[21]["label"] == wanted[21]["label"][0]


def test_features_with_other_numbers_of_values_in_other_shards_are_lists(tmp_path: Path) -> None:
    shards = (
        [{"n": [1], "pair": [1, 2], "b": [b"x"], "f": [0.5]}] * 3,
        [
            {"n": [3, 4], "pair": [5, 6], "b": [b"y"], "f": [1.5]},
            {"n": [7], "pair": [8, 9], "b": [b"z", b""]},
        ],
    )
    for number, rows in enumerate(shards):
        content = tfrecord_of([example_of(**row) for row in rows])
        (tmp_path / f"{number}.tfrecord").write_bytes(content)
    dataset = ShardedDataset(str(tmp_path), decode={"f": Optional()})
    assert dataset.schema["pair"].shape == (2,)
    with DataLoader(dataset, batch_size=5) as loader:
        (batch,) = list(loader)
    rows = [row for shard in shards for row in shard]
    assert [one.tolist() for one in batch["n"].rows()] == [row["n"] for row in rows]
    assert [[bytes(item.numpy()) for item in one] for one in batch["b"]] == [row["b"] for row in rows]
    assert batch["pair"].tolist() == [row["pair"] for row in rows]
    assert np.isnan(batch["f"].numpy()).tolist() == [False] * 4 + [True]


def test_a_feature_of_two_kinds_in_two_shards_is_refused_by_name(tmp_path: Path) -> None:
    for number, values in enumerate(([1], [0.5])):
        (tmp_path / f"{number}.tfrecord").write_bytes(tfrecord_of([example_of(x=values)]))
    with pytest.raises(CorruptShardError, match="column 'x' is float32 here but int64 in"):
        next(iter(DataLoader(ShardedDataset(str(tmp_path)), batch_size=1)))


# ---- Examples of any kind -----------------------------------------------------------------------------

_VALUES = st.one_of(
    st.lists(st.binary(max_size=6), min_size=1, max_size=3),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["a", "é", "a/b", "long name"]), _VALUES), st.data())
def test_any_features_in_any_order_come_back(features: dict[str, list[Any]], data: st.DataObject) -> None:
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        names = data.draw(st.permutations([name for name in features if data.draw(st.booleans())]))
        rows.append({name: features[name] for name in names})
    content = tfrecord_of([example_of(**row) for row in rows])
    if any(rows):
        assert decoded(content, 40) == rows
    else:
        assert all(row["record"] == [b"\n\x00"] for row in decoded(content, 40))


def test_numbers_that_are_not_packed_and_names_given_twice_are_as_protobuf_has_them() -> None:
    ints = span(3, varint(1 << 3) + varint(300) + varint(1 << 3) + varint(-1))
    floats = span(2, b"".join(varint(1 << 3 | 5) + struct.pack("<f", x) for x in (0.5, 2.0)))
    first, second, third = (
        span(1, span(1, b"x") + span(2, body)) for body in (floats, ints, span(3, span(1, varint(7))))
    )
    assert decoded(tfrecord_of([span(1, first), span(1, first)])) == [{"x": [0.5, 2.0]}] * 2
    assert decoded(tfrecord_of([span(1, first + second), span(1, third)])) == [{"x": [300, -1]}, {"x": [7]}]


def test_a_list_without_values_is_empty_and_a_feature_without_a_list_is_missing() -> None:
    without = span(1, span(1, span(1, b"x") + span(2, b"")))
    assert decoded(tfrecord_of([example_of(x=[5]), without, example_of(x=[])])) == [{"x": [5]}, {}, {"x": []}]
    assert decoded(tfrecord_of([example_of(x=[5]), without])) == [{"x": [5]}, {}]
    assert decoded(tfrecord_of([example_of(x=[]), example_of(x=[])])) == [{"x": []}] * 2


def test_a_record_of_many_byte_strings_beside_short_ones_is_read() -> None:
    rows = [{"x": [b"%d" % i for i in range(3000)]}, {"x": [b"a"]}, {"x": [b"b", b""]}]
    assert decoded(tfrecord_of([example_of(**row) for row in rows])) == rows


def test_a_feature_of_two_kinds_is_refused_by_name_and_others_are_read() -> None:
    content = tfrecord_of([example_of(x=[1], y=[2]), example_of(x=[0.5], y=[3])])
    assert decoded(content, columns=["y"]) == [{"y": [2]}, {"y": [3]}]
    with pytest.raises(
        CorruptShardError, match="feature 'x' holds floats in some records and integers in others"
    ):
        decoded(content, columns=["x"])


def test_too_many_names_of_features_are_refused() -> None:
    with pytest.raises(CorruptShardError, match="more than 2000 names of features"):
        decoded(tfrecord_of([example_of(**{f"id{i}": [1] for i in range(2001)})]))


# ---- damage -------------------------------------------------------------------------------------------

SMALL = tfrecord_of([example_of(x=[i], y=[b"%d" % i]) for i in range(4)])


def test_each_changed_bit_is_noticed() -> None:
    for at in range(len(SMALL)):
        changed = bytearray(SMALL)
        changed[at] ^= 1 << at % 8
        with pytest.raises(CorruptShardError, match=r"checksum|a record of"):
            scan_of(TFRecordFormat(), bytes(changed), URL)


def test_a_file_that_ends_within_a_record_is_refused() -> None:
    whole = {0, *np.cumsum([len(SMALL) // 4] * 4).tolist()}
    for end in range(1, len(SMALL)):
        if end not in whole:
            with pytest.raises(CorruptShardError, match="too early"):
                scan_of(TFRecordFormat(), SMALL[:end], URL, block_bytes=50)


def test_a_shard_that_changes_behind_its_index_is_noticed() -> None:
    shard = shard_of(SMALL, URL)
    (block,) = blocks_of(scan_of(TFRecordFormat(), SMALL, URL), shard)
    for at in range(len(SMALL)):
        changed = bytearray(SMALL)
        changed[at] ^= 0x10
        is_of_length = at % (len(SMALL) // 4) in range(8, 12)  # the checksum of the length, which is known
        if not is_of_length:
            with pytest.raises(CorruptShardError, match=r"checksum of record|length of a record"):
                TFRecordFormat().decode(block, memoryview(changed), None)
    with pytest.raises(CorruptShardError, match=r"where .* were indexed"):
        TFRecordFormat().decode(block, memoryview(SMALL[:-1]), None)


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damaged_compressed_files_are_refused(compress: Any) -> None:
    content = compress(SMALL)
    assert len(decoded(content)) == 4
    for end in (1, 13, len(content) // 2, len(content) - 1):
        with pytest.raises(CorruptShardError):
            scan_of(TFRecordFormat(), content[:end], URL)


def test_a_compressed_file_of_very_many_records_is_refused() -> None:
    content = gzip.compress(tfrecord_of([b""] * 2000))
    with pytest.raises(CorruptShardError, match=r"more than 1000 records.*max_records"):
        TFRecordFormat(max_records=1000).scan(io.BytesIO(content), shard_of(content, URL), block_bytes=4096)


def test_an_index_that_does_not_fit_its_block_is_refused() -> None:
    from dataclasses import replace

    (block,) = blocks_of(scan_of(TFRecordFormat(), SMALL, URL), shard_of(SMALL, URL))
    TFRecordFormat().check(block)
    for wrong in (
        replace(block, length=block.length - 1),
        replace(block, num_samples=3),
        replace(block, num_samples=5),
    ):
        with pytest.raises(ValueError, match=r"records of|an index of"):
            TFRecordFormat().check(wrong)


# ---- large records ------------------------------------------------------------------------------------


def test_long_byte_strings_are_passed_over_when_indexed() -> None:
    rows = [{"a": [i], "image": [bytes(300_000)], "z": [b"%d" % i]} for i in range(30)]
    content = tfrecord_of([example_of(**row) for row in rows])
    file = CountingFile(content)
    scan = TFRecordFormat().scan(file, shard_of(content, URL), block_bytes=1 << 20)
    assert file.num_bytes < len(content) / 5
    assert file.num_reads < 2 * len(rows)
    assert scan.schema == {
        "a": ColumnSpec("fixed", "int64", is_repeated=True),
        "image": ColumnSpec("bytes", size_range=(300_000, 300_000), is_repeated=True),
        "z": ColumnSpec("bytes", size_range=(1, 2), is_repeated=True),
    }
    assert decoded(content, 1 << 20) == rows


def test_long_records_behind_empty_ones_are_examples() -> None:
    rows = [{}] * 20 + [{"image": [bytes(300_000)]}] * 20
    content = tfrecord_of([example_of(**row) for row in rows])
    assert decoded(content, 1 << 20) == rows


@pytest.mark.parametrize(("name", "block_bytes"), [("plain", 1000), ("sequence", 100), ("raw", 100)])
def test_passing_over_byte_strings_finds_the_same(
    name: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = fixture("tfrecord", f"{name}.tfrecord")
    whole = scan_of(TFRecordFormat(), content, URL, block_bytes)
    monkeypatch.setattr("sharding.formats.records.tfrecord.SPARSE_MEAN_BYTES", 1)
    monkeypatch.setattr("sharding.formats.records.sparse_copy.AHEAD_BYTES", 16)
    monkeypatch.setattr("sharding.formats.records.sparse_copy._SHORT_BYTES", 2)
    sparse = scan_of(TFRecordFormat(), content, URL, block_bytes)
    assert (sparse.schema, sparse.missing, sparse.index) == (whole.schema, whole.missing, whole.index)
    for one, other in (
        (sparse.offset, whole.offset),
        (sparse.length, whole.length),
        (sparse.nbytes, whole.nbytes),
    ):
        assert one.tolist() == other.tolist()
    for end in range(len(content) - 13, len(content), 4):
        with pytest.raises(CorruptShardError, match="too early"):
            scan_of(TFRecordFormat(), content[:end], URL, block_bytes)


# ---- protobuf's encoding, beside plain loops ------------------------------------------------------------


def plain_number(data: bytes, at: int, end: int, most_bytes: int) -> tuple[int, int]:
    for size in range(1, most_bytes + 1):
        if at + size > end:
            raise wire.WireError
        if data[at + size - 1] < 0x80:
            bits = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[at : at + size]))
            return bits % (1 << 64), at + size
    raise wire.WireError


def plain_fields(data: bytes, starts: list[int], ends: list[int]) -> list[tuple[int, ...]]:
    found = []
    for message, (at, end) in enumerate(zip(starts, ends, strict=True)):
        while at < end:
            tag, at = plain_number(data, at, end, 5)
            start, kind = at, tag & 7
            if kind == wire.SPAN:
                size, start = plain_number(data, at, end, 5)
                at = start + size
            elif kind == wire.VARINT:
                at = plain_number(data, at, end, 10)[1]
            else:
                at += {wire.FIXED32: 4, wire.FIXED64: 8}.get(kind, end)
            if not tag >> 3 or at > end:
                raise wire.WireError
            found.append((message, tag >> 3, kind, start, at))
    return found


def plain_numbers(data: bytes, starts: list[int], ends: list[int]) -> list[list[int]]:
    lists = []
    for at, end in zip(starts, ends, strict=True):
        lists.append(list[int]())
        while at < end:
            number, at = plain_number(data, at, end, 10)
            lists[-1].append(number)
    return lists


def outcome(found: Any) -> Any:
    try:
        return found()
    except wire.WireError:
        return "damaged"


NUMBERS = st.one_of(
    st.integers(0, 1 << 64), st.integers(0, 300), st.sampled_from([1 << 28, 1 << 56, (1 << 64) - 1])
)
BODIES = st.one_of(
    st.tuples(st.integers(0, 40), st.just(wire.VARINT), NUMBERS.map(varint)),
    st.tuples(st.integers(0, 40), st.just(wire.FIXED32), st.binary(min_size=4, max_size=4)),
    st.tuples(st.integers(0, 40), st.just(wire.FIXED64), st.binary(min_size=8, max_size=8)),
    st.tuples(
        st.integers(0, 40), st.just(wire.SPAN), st.binary(max_size=200).map(lambda b: varint(len(b)) + b)
    ),
)
MESSAGES = st.lists(BODIES, max_size=5).map(lambda all_: b"".join(varint(n << 3 | k) + b for n, k, b in all_))
BROKEN = st.one_of(st.binary(max_size=80), st.binary(max_size=20).map(lambda b: b + b"\x80" * 12 + b))


@given(
    st.lists(st.one_of(MESSAGES, MESSAGES, BROKEN), max_size=6),
    st.integers(0, 3),
    st.sampled_from([wire.VARINT, wire.SPAN]),
)
def test_fields_are_those_of_a_walk_from_byte_to_byte(messages: list[bytes], cut: int, kind: int) -> None:
    data, ends = b"".join(messages), np.cumsum([len(one) for one in messages], dtype=np.int64)
    starts = ends - [len(one) for one in messages]
    ends = np.maximum(starts, ends - cut)

    def found() -> list[Any]:
        return [one.tolist() for one in wire.fields(np.frombuffer(data, np.uint8), starts, ends, 20, kind)]

    def expected() -> list[Any]:
        table = np.zeros((2, len(messages), 20), np.int64)
        for message, number, wire_type, start, end in plain_fields(data, starts.tolist(), ends.tolist()):
            if wire_type == kind and number <= 20:
                is_span = kind == wire.SPAN
                value = end - start if is_span else plain_number(data, start, end, 10)[0]
                table[:, message, number - 1] = np.uint64(value).astype(np.int64), start if is_span else end
        return list(table.tolist())

    assert outcome(found) == outcome(expected)


def plain_features(data: bytes, starts: list[int], ends: list[int]) -> list[tuple[Any, ...]]:
    """Record, name, whether it is a feature list, and its steps: lists of a kind and where its values lie."""

    def within(start: int, end: int, most: int) -> list[tuple[int, ...]]:
        found = plain_fields(data, [start], [end])
        if any(number > most or kind != wire.SPAN for _, number, kind, _, _ in found):
            raise wire.WireError
        return found

    def lists(start: int, end: int) -> list[tuple[int, list[tuple[int, int]]]]:
        told = []
        for _, number, _, first, last in within(start, end, 3):
            values = plain_fields(data, [first], [last])
            alone = {1: wire.SPAN, 2: wire.FIXED32, 3: wire.VARINT}[number]
            if any(n != 1 or kind not in (wire.SPAN, alone) for _, n, kind, _, _ in values):
                raise wire.WireError
            told.append((number, [value[3:] for value in values]))
        return told

    features = []
    for record, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for _, number, _, first, last in within(start, end, 2):
            for _, _, _, *entry in within(first, last, 1):
                parts = {one[1]: one[3:] for one in within(*entry, 2)}
                key, value = parts.get(1, (0, 0)), parts.get(2, (0, 0))
                steps = [value] if number == 1 else [one[3:] for one in within(*value, 1)]
                try:
                    name = data[slice(*key)].decode()
                except UnicodeDecodeError as error:
                    raise wire.WireError from error
                features.append((record, name, number == 2, [lists(*step) for step in steps]))
    return features


def told_features(entries: examples.Entries) -> list[tuple[Any, ...]]:
    values = [
        (of, (start, end))
        for of, start, end in zip(*map(list, (entries.value_of, entries.start, entries.end)), strict=True)
    ]
    lists = [
        (of, (kind, [value for at, value in values if at == i]))
        for i, (of, kind) in enumerate(zip(entries.list_of.tolist(), entries.kind.tolist(), strict=True))
    ]
    steps = [(of, [one for at, one in lists if at == i]) for i, of in enumerate(entries.step_of.tolist())]
    features = zip(entries.record.tolist(), entries.name.tolist(), entries.is_series.tolist(), strict=True)
    return [
        (record, entries.names[name], is_series, [step for at, step in steps if at == i])
        for i, (record, name, is_series) in enumerate(features)
    ]


def record_bytes(*more: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Examples and SequenceExamples; `more`: what else is among the fields of all messages in them."""

    def fields_of(*own: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return st.lists(st.one_of(*own, *more), max_size=3).map(b"".join)

    def spans_of(number: int, body: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return body.map(lambda one: span(number, one))

    packed = spans_of(1, st.binary(max_size=4))
    float_alone = st.binary(min_size=4, max_size=4).map(lambda one: varint(1 << 3 | wire.FIXED32) + one)
    alone = {1: packed, 2: float_alone, 3: NUMBERS.map(lambda one: varint(1 << 3) + varint(one))}
    lists = fields_of(*(spans_of(kind, fields_of(packed, alone[kind])) for kind in alone))
    keys = spans_of(1, st.sampled_from([b"a", b"b", b"bc", b"", "é".encode()]))
    entries = spans_of(1, fields_of(keys, spans_of(2, lists)))
    series = spans_of(1, fields_of(keys, spans_of(2, fields_of(spans_of(1, lists)))))
    return fields_of(spans_of(1, fields_of(entries)), spans_of(2, fields_of(series)))


RECORDS = st.lists(record_bytes(), max_size=5) | st.lists(record_bytes(MESSAGES), max_size=3)


@given(RECORDS, st.sampled_from([None, ("a",), ("bc", "a"), ()]))
def test_features_are_those_of_a_walk_from_field_to_field(
    records: list[bytes], wanted: tuple[str, ...] | None
) -> None:
    data, ends = b"".join(records), np.cumsum([len(one) for one in records], dtype=np.int64)
    starts = ends - [len(one) for one in records]

    def found() -> list[tuple[Any, ...]]:
        return told_features(examples.parse(np.frombuffer(data, np.uint8), starts, ends, ("a",), wanted))

    def walked() -> list[tuple[Any, ...]]:
        features = plain_features(data, starts.tolist(), ends.tolist())
        return [one for one in features if wanted is None or one[1] in wanted]

    expected = outcome(walked)
    # What is in features that nobody wants is not looked at.
    assert outcome(found) == expected or (expected == "damaged" and wanted is not None)


@given(
    st.lists(st.one_of(st.lists(NUMBERS, max_size=90).map(lambda all_: b"".join(map(varint, all_))), BROKEN)),
    st.integers(0, 2),
)
def test_packed_numbers_are_those_of_a_walk_from_byte_to_byte(spans: list[bytes], cut: int) -> None:
    data, ends = b"".join(spans), np.cumsum([len(one) for one in spans], dtype=np.int64)
    starts = ends - [len(one) for one in spans]
    ends = np.maximum(starts, ends - cut)

    def found() -> list[list[int]]:
        numbers, counts = wire.numbers_in(np.frombuffer(data, np.uint8), starts, ends)
        lists = np.split(numbers.view(np.uint64), np.cumsum(counts)[:-1]) if len(counts) else []
        return [one.tolist() for one in lists]

    assert outcome(found) == outcome(lambda: plain_numbers(data, starts.tolist(), ends.tolist()))


@pytest.mark.parametrize("most", [0x7F, 0xFFFF, 0xFFFFFFF, 0x7FFFFFFFF, (1 << 64) - 1])
def test_packed_numbers_of_any_size_are_read(most: int) -> None:
    rng = random.Random(most)
    numbers = [rng.choice([0, 1, 127, 128, most, rng.randint(0, most)]) % (most + 1) for _ in range(300)]
    data = np.frombuffer(b"".join(map(varint, numbers)), np.uint8)
    found, counts = wire.numbers_in(data, np.array([0, 5]), np.array([len(data), 5]))
    assert (found.view(np.uint64).tolist(), counts.tolist()) == (numbers, [300, 0])


@pytest.mark.parametrize("data", [b"\x80" * 11 + b"\x00", b"\x01" + b"\xff" * 70 + b"\x01", b"\x01\x80"])
def test_packed_numbers_that_are_none_are_damage(data: bytes) -> None:
    with pytest.raises(wire.WireError, match=r"too many bytes|behind its message"):
        wire.numbers_in(np.frombuffer(data, np.uint8), np.array([0]), np.array([len(data)]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (span(1, b"abc")[:-1], "behind its message"),
        (varint(1 << 3 | wire.FIXED32) + bytes(3), "behind its message"),
        (varint(1 << 3 | wire.FIXED64) + bytes(7), "behind its message"),
        (b"\x08", "behind its message"),
        (b"\x8a", "behind its message|more than 5 bytes"),
        (span(0, b"abc"), "number 0"),
        (b"\x08" + b"\x80" * 10 + b"\x01", "more than 10 bytes"),
        (b"\x8a" + b"\x80" * 4 + b"\x01\x00", "more than 5 bytes"),
        (b"\x0a" + b"\x80" * 5 + b"\x00", "too many bytes"),
        (b"\x0b\x00", "wire type"),
        (b"\x0e\x00", "wire type"),
    ],
)
def test_damaged_messages_are_refused_wherever_they_are(data: bytes, says: str) -> None:
    whole = span(3, b"abc")
    for before, behind in ((b"", b""), (whole, b""), (whole, whole)):
        content = before + data + behind
        bounds = np.cumsum([0, len(before), len(data), len(behind)])
        with pytest.raises(wire.WireError, match=says):
            wire.fields(np.frombuffer(content, np.uint8), bounds[:-1], bounds[1:], 3)


def test_spans_outside_of_their_bytes_are_damage() -> None:
    data = np.ones(8, np.uint8)
    for start, end in ((-1, 4), (0, 9), (9, 10)):
        spans = data, np.array([start]), np.array([end])
        with pytest.raises(wire.WireError):
            wire.fields(*spans, 1)
        with pytest.raises(wire.WireError):
            wire.numbers_in(*spans)
