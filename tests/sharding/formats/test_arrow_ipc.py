from __future__ import annotations

import contextlib
import io
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from formats_kit import blocks_of, decoded_blocks, rows_of, scan_of, shard_of
from hypothesis import given, strategies as st

from sharding.blocks import Block, Spans
from sharding.errors import CorruptShardError, DataflowError, SampleError, ShardError
from sharding.formats.arrow import ipc
from sharding.formats.arrow.ipc import ArrowFileFormat, ArrowStreamFormat

URL = "a.arrow"
BOTH = pytest.mark.parametrize("fmt", [ArrowFileFormat(), ArrowStreamFormat()], ids=lambda f: f.name)
WRITERS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}
BOTH_LAYOUTS = pytest.mark.parametrize("layout", list(WRITERS))


def written(batches: list[pa.RecordBatch], layout: str, **options) -> bytes:
    sink = io.BytesIO()
    with WRITERS[layout](sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def oracle(content: bytes) -> list[dict]:
    open_it = pa.ipc.open_file if content.startswith(b"ARROW1") else pa.ipc.open_stream
    table = open_it(pa.BufferReader(content)).read_all()
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    encoded = {str: str.encode}
    if "image.bytes" in table.column_names:  # a struct of bytes and path is a column, too
        table = table.append_column("image", table.column("image.bytes"))
    return [{k: encoded.get(type(v), lambda v: v)(v) for k, v in row.items()} for row in table.to_pylist()]


def mixed_batches(*sizes: int) -> list[pa.RecordBatch]:
    rows = sum(sizes)
    rng = np.random.default_rng(rows)
    table = pa.table(
        {
            "label": rng.integers(0, 10, rows),
            "x": rng.random(rows, np.float32),
            "words": pa.array([None if i % 7 == 0 else "word" * (i % 5) for i in range(rows)], pa.string()),
            "unique": pa.array([f"sample {i}" for i in range(rows)], pa.string()),
            "class": pa.DictionaryArray.from_arrays(np.arange(rows) % 3, ["cat", "dog", "owl"]),
            "tags": pa.array([list(range(i % 4)) for i in range(rows)], pa.list_(pa.int32())),
            "image": pa.array(
                [{"bytes": bytes([i % 256]) * (i % 9), "path": None} for i in range(rows)],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "flag": rng.random(rows) < 0.5,
        }
    )
    ends = np.cumsum(sizes)
    return [
        table[end - size : end].combine_chunks().to_batches()[0]
        for end, size in zip(ends, sizes, strict=True)
    ]


@BOTH
@BOTH_LAYOUTS
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_all_batches_equal_pyarrow(fmt, layout, compression):
    content = written(mixed_batches(50, 70, 30), layout, compression=compression)
    blocks = decoded_blocks(fmt, content, URL, block_bytes=1)
    assert [len(block["label"]) for block in blocks] == [50, 70, 30]
    assert rows_of(blocks) == oracle(content)


@BOTH_LAYOUTS
def test_small_neighbours_are_joined_into_blocks(layout):
    content = written(mixed_batches(*[10] * 30), layout)
    scan = scan_of(ArrowFileFormat(), content, URL, block_bytes=10_000)
    assert 1 < len(scan.offset) < 15
    assert (scan.length <= 10_000).all()
    assert rows_of(decoded_blocks(ArrowFileFormat(), content, URL, block_bytes=10_000)) == oracle(content)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(list(WRITERS)), st.integers(1, 4000)
)
def test_any_batches_in_any_blocks_equal_pyarrow(sizes, layout, block_bytes):
    if not sum(sizes):
        sizes = [*sizes, 1]
    whole = mixed_batches(sum(sizes))[0]
    ends = np.cumsum(sizes)
    batches = [whole.slice(end - size, size) for end, size in zip(ends, sizes, strict=True)]
    content = written(batches, layout)
    assert rows_of(decoded_blocks(ArrowFileFormat(), content, URL, block_bytes=block_bytes)) == oracle(
        content
    )


@pytest.mark.parametrize("columns", [["x"], ["words", "label"], ["image.bytes", "class"], ["tags"], []])
def test_compressed_columns_alone_are_those_of_all_in_the_wanted_order(columns):
    content = written(mixed_batches(20, 20), "file", compression="zstd")
    blocks = decoded_blocks(ArrowFileFormat(), content, URL, columns, block_bytes=1)
    assert all(list(block) == columns for block in blocks)
    if columns:
        assert rows_of(blocks) == [{name: row[name] for name in columns} for row in oracle(content)]


def test_nbytes_bounds_what_is_decompressed():
    content = written(mixed_batches(400, 600), "file", compression="lz4")
    scan = scan_of(ArrowFileFormat(), content, URL, block_bytes=1)
    blocks = decoded_blocks(ArrowFileFormat(), content, URL, block_bytes=1)
    for nbytes, block in zip(scan.nbytes, blocks, strict=True):
        parts = [(c.buffer, c.starts, c.lengths) if isinstance(c, Spans) else (c,) for c in block.values()]
        assert sum(array.nbytes for part in parts for array in part) <= nbytes


def first_block(content: bytes, block_bytes: int = 1):
    scan = scan_of(ArrowFileFormat(), content, URL, block_bytes)
    block = blocks_of(scan, shard_of(content, URL))[0]
    return block, memoryview(content)[block.offset : block.offset + block.length]


def test_columns_of_one_batch_are_views_of_the_block():
    block, data = first_block(written(mixed_batches(100), "file"))
    columns = ArrowFileFormat().decode(block, data, None)
    stored = np.frombuffer(data, np.uint8)
    assert np.shares_memory(columns["x"], stored)
    assert np.shares_memory(columns["unique"].buffer, stored)
    assert np.shares_memory(columns["tags"].buffer, stored)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_values_of_several_large_batches_are_views_of_the_block_unless_compressed(compression):
    rng = np.random.default_rng(5)
    batches = [
        pa.record_batch({"image": [rng.bytes(n) for n in sizes], "label": sizes})
        for sizes in ([0, 90_000, 70_000], [5, 30_000], [200_000, 0, 1])
    ]
    content = written(batches, "file", compression=compression)
    block, data = first_block(content, 4 << 20)
    columns = ArrowFileFormat().decode(block, data, None)
    assert rows_of([columns]) == oracle(content)
    is_view = np.shares_memory(columns["image"].buffer, np.frombuffer(data, np.uint8))
    assert is_view == (compression is None)


def test_the_schema_says_which_columns_may_be_missing():
    schema = scan_of(ArrowFileFormat(), written(mixed_batches(30, 30), "stream"), URL).schema
    assert {name for name, spec in schema.items() if spec.optional} == {"words", "class", "image.path"}
    assert schema["x"].dtype == "float32"


@BOTH_LAYOUTS
def test_every_version_of_the_message_prefix_is_read(layout):
    content = written(mixed_batches(9, 9), layout, use_legacy_format=True)
    assert b"\xff\xff\xff\xff" not in content
    assert rows_of(decoded_blocks(ArrowFileFormat(), content, URL, block_bytes=1)) == oracle(content)


def unfinished_rows(content: bytes) -> tuple[str, list[dict]]:
    """How it ends, and what can be read of it."""
    fmt = ArrowFileFormat(allow_unfinished=True)
    return scan_of(fmt, content, URL).unfinished, rows_of(decoded_blocks(fmt, content, URL))


def test_a_stream_without_its_end_mark_is_refused_or_taken_on_request():
    content = written(mixed_batches(9), "stream")
    assert content.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    error = scan_error(content[:-8])
    assert "no end mark stands behind its last message; allow_unfinished=True" in error.reason
    assert error.offset == len(content) - 8
    assert unfinished_rows(content[:-8]) == ("no end mark stands behind its last message", oracle(content))
    assert unfinished_rows(content) == ("", oracle(content))


@BOTH_LAYOUTS
def test_every_cut_raises_and_the_whole_batches_may_be_read(layout):
    content = written(plain_batches(), layout)
    scan = scan_of(ArrowFileFormat(), content, URL, block_bytes=1)
    ends, rows = scan.offset + scan.length, oracle(content)
    for cut in range(int(scan.offset[0]), len(content), 13):
        assert "truncated" in scan_error(content[:cut]).reason
        unfinished, read = unfinished_rows(content[:cut])
        assert unfinished
        assert read == rows[: 8 * int((ends <= cut).sum())]


def test_a_file_whose_first_bytes_are_no_message_is_read_by_its_footer():
    """So polars writes them; pyarrow looks at the footer only."""
    content = written(mixed_batches(9), "file")
    other = damaged(content, 8, bytes([4, 0, 0, 0, 0xF2, 0xFF, 0xFF, 0xFF]))
    assert rows_of(decoded_blocks(ArrowFileFormat(), other, URL)) == oracle(content)


def growing_dictionaries(*entries: list[str]) -> list[pa.RecordBatch]:
    arrays = [pa.DictionaryArray.from_arrays(np.arange(len(e)), e) for e in entries]
    return [pa.RecordBatch.from_arrays([array], ["class"]) for array in arrays]


@BOTH_LAYOUTS
def test_growing_dictionaries_are_read_and_kept_out_of_blocks(layout):
    batches = growing_dictionaries(["a"], ["a", "b"], ["a", "b", "c"])
    content = written(batches, layout, emit_dictionary_deltas=True)
    blocks = decoded_blocks(ArrowFileFormat(), content, URL)
    assert [len(block["class"]) for block in blocks] == [1, 2, 3]
    assert rows_of(blocks) == oracle(content)


WORDS = st.lists(st.text("abc", max_size=2), min_size=1, max_size=4, unique=True)


@given(
    st.lists(st.tuples(WORDS, WORDS, st.integers(0, 5)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(1, 2000),
)
def test_replaced_dictionaries_are_read_block_by_block(batches, has_deltas, block_bytes):
    rng = np.random.default_rng(0)
    names = ["one", "other", "n"]
    made = []
    for one, other, rows in batches:
        arrays = [
            pa.DictionaryArray.from_arrays(rng.integers(0, len(words), rows).astype(np.int32), words)
            for words in (one, other)
        ]
        made.append(pa.RecordBatch.from_arrays([*arrays, pa.array(range(rows), pa.int64())], names))
    content = written(made, "stream", emit_dictionary_deltas=has_deltas)
    blocks = decoded_blocks(ArrowStreamFormat(), content, URL, block_bytes=block_bytes)
    assert rows_of(blocks) == oracle(content)
    alone = decoded_blocks(ArrowStreamFormat(), content, URL, ["other"], block_bytes=block_bytes)
    assert rows_of(alone) == [{"other": row["other"]} for row in oracle(content)]


def test_an_index_of_dictionaries_outside_the_footer_is_damage():
    content = written(growing_dictionaries(["a", "b"], ["c", "d"]), "stream")
    fmt = ArrowFileFormat()
    block = blocks_of(scan_of(fmt, content, URL), shard_of(content, URL))[1]
    fmt.check(block)
    for parts in ([0, 1 << 40], [8, 0], [-8, 0]):
        with pytest.raises(ValueError, match="outside the footer"):
            fmt.check(replace(block, index=np.array(parts, "<i8").tobytes()))


@BOTH_LAYOUTS
def test_no_rows_give_no_blocks_but_a_schema(layout):
    batch = mixed_batches(3)[0]
    for content in (written([batch[:0]], layout), written([batch[:0], batch[:0]], layout)):
        scan = scan_of(ArrowFileFormat(), content, URL)
        assert len(scan.offset) == 0
        assert scan.schema["x"].dtype == "float32"


def test_only_headers_are_read_when_indexing():
    class Watched(io.BytesIO):
        total = 0

        def read(self, size=-1):
            data = super().read(size)
            self.total += len(data)
            return data

    batch = pa.RecordBatch.from_pydict({"x": np.zeros(100_000)})
    content = written([batch] * 5, "file")
    file = Watched(content)
    ArrowFileFormat().scan(file, shard_of(content, URL), block_bytes=1)
    assert file.total < 5000


def scan_error(content: bytes) -> CorruptShardError:
    with pytest.raises(CorruptShardError) as caught:
        scan_of(ArrowFileFormat(), content, URL)
    assert (caught.value.shard, caught.value.stage) == (URL, "index")
    return caught.value


def test_an_empty_file_is_not_arrow():
    assert "0 bytes" in scan_error(b"").reason


def damaged(content: bytes, at: int, by: bytes) -> bytes:
    return content[:at] + by + content[at + len(by) :]


def sectors_and_flips(content: bytes) -> list[bytes]:
    """The content with each sector zeroed, of two sizes, and with single bits flipped."""
    zeroed = [damaged(content, at, bytes(size)) for size in (24, 64) for at in range(0, len(content), size)]
    flips = np.random.default_rng(0).integers(0, 8 * len(content), 200).tolist()
    return [
        *zeroed,
        *(damaged(content, bit // 8, bytes([content[bit // 8] ^ 1 << bit % 8])) for bit in flips),
    ]


def plain_batches() -> list[pa.RecordBatch]:
    """Three batches of each kind of layout, without text: pyarrow would refuse what is no UTF-8."""
    rows = [
        {
            "i": np.arange(8) + number,
            "b": [b"x" * (i % 4) for i in range(8)],
            "l": pa.array([[i] * (i % 3) for i in range(8)], pa.list_(pa.int16())),
            "d": pa.DictionaryArray.from_arrays([i % 3 for i in range(8)], [b"a", b"b", b"c"]),
            "s": [{"f": i / 2} for i in range(8)],
            "flag": [i % 2 == 0 for i in range(8)],
            "maybe": [None if i % 3 else b"x" for i in range(8)],
        }
        for number in range(3)
    ]
    return [pa.RecordBatch.from_pydict(columns) for columns in rows]


def rows_or_error(read, content: bytes) -> str | None:
    """What it reads, as text, since NaNs are not equal; None where it raises."""
    try:
        rows = read(content)
    except (pa.ArrowException, CorruptShardError, SampleError, OSError, UnicodeDecodeError):
        return None
    return repr(rows)


def checked_by_pyarrow(content: bytes) -> list[dict]:
    open_it = pa.ipc.open_file if content.startswith(b"ARROW1") else pa.ipc.open_stream
    open_it(pa.BufferReader(content)).read_all().validate(full=True)
    return oracle(content)


@BOTH_LAYOUTS
def test_damage_gives_an_error_or_what_pyarrow_reads_and_loses_no_row(layout):
    content = written(plain_batches(), layout)
    block_bytes = len(content) // 2  # blocks of one batch and of two
    num_rows = len(oracle(content))

    def read(content: bytes) -> list[dict]:
        scan = ArrowFileFormat().scan(io.BytesIO(content), shard_of(content, URL), block_bytes=block_bytes)
        blocks = blocks_of(scan, shard_of(content, URL))
        parts = [memoryview(content)[b.offset : b.offset + b.length] for b in blocks]
        rows = rows_of([ArrowFileFormat().decode(b, p, None) for b, p in zip(blocks, parts, strict=True)])
        assert len(rows) == num_rows
        return rows

    wrong = []
    for number, one in enumerate(sectors_and_flips(content)):
        ours, theirs = rows_or_error(read, one), rows_or_error(checked_by_pyarrow, one)
        if ours is not None and ours != theirs:
            wrong.append((number, ours, theirs))
    assert not wrong


@pytest.mark.parametrize("number", range(4))
def test_a_zeroed_message_length_in_a_file_is_not_its_end(number):
    content = written(mixed_batches(100, 100, 100, 100), "file")
    offset = int(scan_of(ArrowFileFormat(), content, URL, block_bytes=1).offset[number])
    assert scan_error(damaged(content, offset + 4, bytes(4))).offset == offset


@BOTH_LAYOUTS
def test_a_record_batch_whose_count_is_not_that_of_its_columns_is_refused(layout):
    content = written(mixed_batches(50, 77), layout)
    scan = scan_of(ArrowFileFormat(), content, URL, block_bytes=1)
    start = int(scan.offset[1])
    header = content[start : start + 8 + int.from_bytes(content[start + 4 : start + 8], "little")]
    counts = [i for i in range(len(header)) if header[i : i + 8] == (77).to_bytes(8, "little")]
    assert len(counts) > 8  # of the batch, and of each of its arrays
    for at in counts[:8]:
        assert scan_error(damaged(content, start + at, bytes(8))).offset == start


def test_bytes_behind_the_end_of_a_stream_are_not_passed_over():
    content = written(mixed_batches(5), "stream")
    for more in (content, bytes(8), bytes(1)):
        error = scan_error(content + more)
        assert f"an end mark, and {len(more)} bytes behind it" in error.reason
        assert error.offset == len(content) - 8


def test_a_footer_that_contradicts_the_messages_is_refused():
    content = written(mixed_batches(5, 5), "file")
    first, second = (
        o.to_bytes(8, "little") for o in scan_of(ArrowFileFormat(), content, URL, 1).offset.tolist()
    )
    offset = int.from_bytes(second, "little")
    moved = scan_error(damaged(content, content.rindex(second), (offset + 8).to_bytes(8, "little")))
    assert moved.offset == offset + 8
    twice = scan_error(damaged(content, content.rindex(second), first))
    assert "broken Arrow file" in twice.reason
    at = content.rindex(first)
    assert content[at - 4 : at] == b"\2\0\0\0"
    fewer = scan_error(damaged(content, at - 4, b"\1"))
    assert (fewer.reason, fewer.offset) == (
        "broken Arrow file: here is what its footer does not list",
        offset,
    )
    swapped = damaged(content, at, content[at + 24 : at + 48] + content[at : at + 24])
    assert "out of order" in scan_error(swapped).reason
    renamed = content.rindex(b"label")
    assert "the one at the file's end differs" in scan_error(damaged(content, renamed, b"lapel")).reason
    assert "a footer of" in scan_error(damaged(content, len(content) - 10, b"\xff\xff\0\0")).reason


def test_truncation_inside_a_message_names_its_offset():
    content = written(mixed_batches(50, 50), "stream")
    scan = scan_of(ArrowFileFormat(), content, URL, block_bytes=1)
    for size in range(int(scan.offset[1]) + 1, int(scan.offset[1] + scan.length[1]), 61):
        assert scan_error(content[:size]).offset == scan.offset[1]


@pytest.mark.parametrize(
    "content", [b"x" * 100, bytes(100), b"\xff" * 100, b"\xff\xff\xff\xff" + b"\x08\0\0\0" * 30]
)
def test_garbage_is_not_arrow(content):
    scan_error(content)


def test_feather_version_1_is_named():
    assert "Feather version 1" in scan_error(b"FEA1" + bytes(100) + b"FEA1").reason


def test_of_two_columns_that_share_a_name_neither_is_decoded_and_both_are_named():
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1]), pa.array([{"b": 2}]), pa.array([3])], ["a.b", "a", "c"]
    )
    block, data = first_block(written([batch], "file"))
    with pytest.raises(
        ShardError, match=r"two columns are named 'a.b': the column 'a.b' and field 'b' of 'a'"
    ):
        ArrowFileFormat().decode(block, data, None)
    assert ArrowFileFormat().decode(block, data, ["c"])["c"] == [3]


@given(st.data())
def test_damaged_headers_raise_nothing_but_our_errors(data):
    content = bytearray(written(mixed_batches(4, 4), "stream"))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ShardError):
        shard, fmt = shard_of(content, URL), ArrowFileFormat()
        for block in blocks_of(fmt.scan(io.BytesIO(content), shard, block_bytes=1), shard):
            for column in fmt.decode(
                block, memoryview(content)[block.offset :][: block.length], None
            ).values():
                assert_inside_its_buffer(column)


def assert_inside_its_buffer(column) -> None:
    if isinstance(column, Spans):
        there = column.lengths >= 0
        assert (column.starts[there] >= 0).all()
        assert ((column.starts + column.lengths)[there] <= len(column.buffer)).all()


def test_a_message_of_an_unknown_kind_is_refused():
    content = written(mixed_batches(4), "stream")
    tensor = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(np.zeros(4)), tensor)
    assert "kind 4" in scan_error(content[:-8] + tensor.getvalue().to_pybytes()).reason


@pytest.mark.parametrize("read", [ArrowFileFormat.decode, ArrowFileFormat.table], ids=["decode", "table"])
def test_codes_outside_their_dictionary_are_refused_however_the_block_is_read(read):
    """One message of two small ones: 8 bytes of it lead 8 GiB away."""
    batch = pa.RecordBatch.from_arrays([pa.DictionaryArray.from_arrays(np.arange(4), ["a"] * 4)], ["class"])
    block, data = first_block(written([batch] * 2, "stream"), block_bytes=1 << 20)
    broken = bytes(data).replace(np.arange(4).tobytes(), np.array([0, 1 << 33, 2, 3]).tobytes())
    assert broken != data
    with pytest.raises(CorruptShardError, match=r"cannot be decoded|is broken") as caught:
        read(ArrowFileFormat(), block, memoryview(broken), None)
    assert (caught.value.offset, caught.value.stage) == (block.offset, "decode")


def test_broken_bodies_name_the_block():
    block, data = first_block(written(mixed_batches(100), "file", compression="zstd"))
    (header,) = struct.unpack_from("<i", data, 4)
    broken = bytes(data[: 8 + header]) + b"\x7f" * (len(data) - 8 - header)
    with pytest.raises(CorruptShardError, match="record batch cannot be decoded") as caught:
        ArrowFileFormat().decode(block, memoryview(broken), None)
    assert (caught.value.offset, caught.value.stage) == (block.offset, "decode")


def test_null_integers_are_masked():
    batches = [pa.RecordBatch.from_pydict({"i": values}) for values in ([1, 2], [3, None])]
    blocks = decoded_blocks(ArrowFileFormat(), written(batches, "file"), URL, block_bytes=1)
    assert [row["i"] for row in rows_of(blocks)] == [1, 2, 3, None]


# ---- record batches of plain values ---------------------------------------------------------------------

PLAIN = ArrowFileFormat()
ROWS = 30
NUMBERS = [pa.int8(), pa.uint16(), pa.float32(), pa.float64(), pa.time64("us"), pa.timestamp("us")]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


@pytest.fixture
def small_plain_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_LEAST_BYTES", 0)


def plain_values() -> pa.Table:
    numbers = pa.array(np.arange(ROWS) % 100, pa.int32())
    columns = {str(kind): numbers.cast(pa.int64()).cast(kind) for kind in NUMBERS}
    columns["half"] = pa.array(np.arange(ROWS, dtype=np.float16))
    columns |= {str(kind): pa.array(["é" * (i % 7) for i in range(ROWS)]).cast(kind) for kind in TEXTS}
    columns["gaps"] = pa.array([None if i % 9 == 0 else i for i in range(ROWS)])
    columns["flag"] = pa.array([i % 3 == 0 for i in range(ROWS)])
    return pa.table(columns)


def in_batches(table: pa.Table, rows_per_batch: int = 10, **options: str) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return sink.getvalue()


def one_block(content: bytes) -> tuple[Block, memoryview]:
    scan = scan_of(PLAIN, content, "a.arrow")
    (block,) = blocks_of(scan, shard_of(content, "a.arrow"))
    return block, memoryview(content)[block.offset : block.offset + block.length]


def with_index(block: Block, index: bytes = b"") -> Block:
    return replace(block, index=index)


@pytest.mark.parametrize("rows_per_batch", [10, ROWS])
@pytest.mark.usefixtures("small_plain_batches")
def test_values_are_those_that_pyarrow_reads(rows_per_batch: int) -> None:
    block, data = one_block(in_batches(plain_values(), rows_per_batch))
    PLAIN.check(block)
    names = [name for name in plain_values().column_names if name not in ("gaps", "flag")]
    plain = ipc._plain_columns(block, data, names)
    assert plain is not None
    assert rows_of([plain]) == rows_of([PLAIN.decode(with_index(block), data, names)])
    assert {name: getattr(column, "dtype", None) for name, column in plain.items()} == {
        name: getattr(column, "dtype", None)
        for name, column in PLAIN.decode(with_index(block), data, names).items()
    }


@pytest.mark.parametrize("columns", [["gaps"], ["flag"], ["int8", "gaps"], None])
@pytest.mark.usefixtures("small_plain_batches")
def test_bits_and_gaps_are_read_by_pyarrow(columns: list[str] | None) -> None:
    block, data = one_block(in_batches(plain_values()))
    assert ipc._plain_columns(block, data, columns) is None
    assert len(rows_of([PLAIN.decode(block, data, columns)])) == ROWS


@pytest.mark.parametrize(
    "content",
    [
        lambda: in_batches(plain_values(), compression="zstd"),
        lambda: in_batches(plain_values().append_column("lists", pa.array([[1]] * ROWS))),
    ],
    ids=["compressed", "lists"],
)
@pytest.mark.usefixtures("small_plain_batches")
def test_other_batches_have_no_index(content: Callable[[], bytes]) -> None:
    assert not one_block(content())[0].index


def rows_or_reason(block: Block, data: memoryview, columns: list[str]) -> str:
    try:
        return repr(rows_of([PLAIN.decode(block, data, columns)]))
    except DataflowError as error:
        return str(error)


@pytest.mark.usefixtures("small_plain_batches")
def test_damaged_blocks_are_what_pyarrow_finds() -> None:
    block, data = one_block(in_batches(plain_values()))
    columns, random_ = [str(kind) for kind in (*TEXTS, pa.int8())], random.Random(0)
    for number in range(100):
        damaged = bytearray(data)
        for _ in range(random_.choice([1, 40])):
            damaged[random_.randrange(len(damaged))] = random_.choice([0, 1, 127, 255])
        found, told = (
            rows_or_reason(one, memoryview(damaged), columns) for one in (block, with_index(block))
        )
        assert found == told, number


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.usefixtures("small_plain_batches")
def test_an_index_that_does_not_fit_its_block_is_refused(at: int) -> None:
    block, _ = one_block(in_batches(plain_values()))
    table = np.frombuffer(block.index, "<i8").copy()
    table[at] += block.length
    for index in (table.tobytes(), block.index[:-8]):
        with pytest.raises(ValueError, match=r"index of|outside"):
            PLAIN.check(with_index(block, index))
