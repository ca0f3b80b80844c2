from __future__ import annotations

import base64
import io
import math
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats_kit import blocks_of, decoded_blocks, rows_of, scan_of, shard_of
from hypothesis import given, strategies as st

from sharding.blocks import MISSING, Masked, Spans
from sharding.errors import CorruptShardError, ShardError
from sharding.formats.arrow.parquet import ParquetFormat

FORMAT = ParquetFormat()
URL = "a.parquet"


def parquet(table: pa.Table, **options) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def oracle(content: bytes) -> list[dict]:
    table = pq.read_table(io.BytesIO(content))
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    encoded = {str: str.encode}
    if "image.bytes" in table.column_names:  # a struct of bytes and path is a column, too
        table = table.append_column("image", table.column("image.bytes"))
    return [{k: encoded.get(type(v), lambda v: v)(v) for k, v in row.items()} for row in table.to_pylist()]


def mixed_table(rows: int) -> pa.Table:
    rng = np.random.default_rng(rows)
    words = [None if i % 7 == 0 else "word" * (i % 5) for i in range(rows)]
    return pa.table(
        {
            "label": rng.integers(0, 10, rows),
            "x": rng.random(rows, np.float32),
            "embedding": pa.FixedSizeListArray.from_arrays(rng.random(rows * 4), 4),
            "words": words,
            "unique": [f"sample {i}" for i in range(rows)],
            "tags": [list(range(i % 4)) for i in range(rows)],
            "image": [{"bytes": bytes([i % 256]) * (i % 9), "path": None} for i in range(rows)],
            "flag": rng.random(rows) < 0.5,
        }
    )


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_all_row_groups_equal_pyarrow(compression, dictionary):
    content = parquet(
        mixed_table(250), row_group_size=100, compression=compression, use_dictionary=dictionary
    )
    blocks = decoded_blocks(FORMAT, content, URL)
    assert [len(block["label"]) for block in blocks] == [100, 100, 50]
    assert rows_of(blocks) == oracle(content)


@pytest.mark.parametrize(
    "options", [{"version": "1.0"}, {"data_page_version": "2.0"}, {"use_byte_stream_split": ["x"]}]
)
def test_every_page_layout_is_read(options):
    content = parquet(mixed_table(64), row_group_size=40, **{"use_dictionary": False, **options})
    assert rows_of(decoded_blocks(FORMAT, content, URL)) == oracle(content)


@given(
    st.lists(
        st.tuples(
            st.integers(-9, 9), st.none() | st.text(max_size=4), st.lists(st.integers(0, 3), max_size=3)
        )
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_any_rows_in_any_groups_equal_pyarrow(rows, group, dictionary):
    schema = pa.schema([("i", pa.int32()), ("t", pa.string()), ("l", pa.list_(pa.int64()))])
    table = pa.Table.from_pylist([dict(zip("itl", row, strict=True)) for row in rows], schema)
    content = parquet(table, row_group_size=group, use_dictionary=dictionary)
    assert rows_of(decoded_blocks(FORMAT, content, URL)) == oracle(content)


def test_the_schema_says_which_columns_may_be_missing():
    schema = scan_of(FORMAT, parquet(mixed_table(30)), URL).schema
    assert schema["words"].optional
    assert not schema["unique"].optional
    assert not schema["image.bytes"].optional
    assert (schema["embedding"].dtype, schema["embedding"].shape) == ("float64", (4,))
    assert {name: schema[name].kind for name in ("label", "words", "tags", "image.bytes")} == {
        "label": "fixed",
        "words": "text",
        "tags": "list",
        "image.bytes": "bytes",
    }


def test_blocks_are_the_byte_ranges_of_their_column_chunks():
    content = parquet(mixed_table(90), row_group_size=30)
    scan = scan_of(FORMAT, content, URL)
    assert scan.offset[0] == 4
    np.testing.assert_array_equal(scan.offset[1:], (scan.offset + scan.length)[:-1])
    assert content.endswith(scan.footer)
    assert scan.offset[-1] + scan.length[-1] + len(scan.footer) == len(content)


def test_repeated_strings_cost_their_dictionary_not_their_rows():
    table = pa.table({"t": ["a" * 1000, "b" * 1000] * 5000})
    content = parquet(table)
    (block,) = decoded_blocks(FORMAT, content, URL)
    column = block["t"]
    assert isinstance(column, Spans)
    assert len(column.buffer) == 2000
    assert column.value(9999).tobytes() == b"b" * 1000
    decoded = column.buffer.nbytes + column.starts.nbytes + column.lengths.nbytes
    assert decoded <= scan_of(FORMAT, content, URL).nbytes[0] < 10 * 1000 * 50


def test_a_given_up_dictionary_is_read_as_plain_strings():
    rng = np.random.default_rng(0)
    table = pa.table({"t": [rng.bytes(40) for _ in range(3000)]})
    content = parquet(table, dictionary_pagesize_limit=1000, row_group_size=1500, compression="none")
    assert rows_of(decoded_blocks(FORMAT, content, URL)) == oracle(content)


def test_row_groups_without_rows_are_no_blocks():
    table = mixed_table(10)
    file = io.BytesIO()
    with pq.ParquetWriter(file, table.schema) as writer:
        for part in (table[:0], table[:4], table[:0], table[4:], table[:0]):
            writer.write_table(part)
    content = file.getvalue()
    assert pq.read_metadata(io.BytesIO(content)).num_row_groups == 5
    assert scan_of(FORMAT, content, URL).num_samples.tolist() == [4, 6]
    assert rows_of(decoded_blocks(FORMAT, content, URL)) == oracle(content)


def test_a_file_without_rows_has_no_blocks_but_a_schema():
    scan = scan_of(FORMAT, parquet(mixed_table(0)), URL)
    assert len(scan.offset) == 0
    assert scan.schema["x"].dtype == "float32"


def test_a_footer_longer_than_the_first_read_is_read_whole():
    content = parquet(pa.table({f"column {i} {'x' * 100}": [i] for i in range(400)}))
    scan = scan_of(FORMAT, content, URL)
    assert len(scan.footer) > 64 << 10
    assert rows_of(decoded_blocks(FORMAT, content, URL)) == oracle(content)


def test_only_the_tail_of_the_file_is_read_when_indexing():
    class Watched(io.BytesIO):
        first_read = math.inf

        def read(self, size=-1):
            self.first_read = min(self.first_read, self.tell())
            return super().read(size)

    content = parquet(pa.table({"x": np.random.default_rng(0).random(100_000)}))
    file = Watched(content)
    FORMAT.scan(file, shard_of(content, URL), block_bytes=1)
    assert file.first_read == len(content) - (64 << 10)


def test_threads_share_a_format():
    content = parquet(mixed_table(400), row_group_size=20)
    shard = shard_of(content, URL)
    blocks = blocks_of(scan_of(FORMAT, content, URL), shard)

    def decoded(block):
        return FORMAT.decode(block, memoryview(content)[block.offset : block.offset + block.length], None)

    with ThreadPoolExecutor(4) as pool:
        assert rows_of(list(pool.map(decoded, blocks))) == oracle(content)


def test_select_gives_ranges_that_hold_the_columns():
    rng = np.random.default_rng(0)
    table = pa.table({name: rng.random(20_000) for name in "abcd"})
    content = parquet(table, use_dictionary=False, compression="none")
    (block,) = blocks_of(scan_of(FORMAT, content, URL), shard_of(content, URL))
    whole = FORMAT.select(block, list("abcd"))
    assert whole == [(block.offset, block.length)]
    ((start, length),) = FORMAT.select(block, ["b"])
    assert table["b"].to_numpy().tobytes() in content[start : start + length]
    assert length < 20_000 * 8 + 200
    assert len(FORMAT.select(block, ["a", "d"])) == 2
    with pytest.raises(CorruptShardError, match="no column 'z'"):
        FORMAT.select(block, ["z"])


def scan_error(content: bytes) -> CorruptShardError:
    with pytest.raises(CorruptShardError) as caught:
        scan_of(FORMAT, content, URL)
    assert (caught.value.shard, caught.value.stage) == (URL, "index")
    return caught.value


def test_an_empty_file_is_not_parquet():
    assert "0 bytes" in scan_error(b"").reason


def test_a_wrong_magic_is_named():
    assert "b'nope'" in scan_error(parquet(mixed_table(2))[:-4] + b"nope").reason


def test_a_footer_larger_than_the_file_is_named():
    content = bytearray(parquet(mixed_table(2)))
    content[-8:-4] = (1 << 30).to_bytes(4, "little")
    assert "in a file of" in scan_error(bytes(content)).reason


def test_an_encrypted_footer_is_named():
    assert "encrypted" in scan_error(b"PARE" + bytes(40) + b"PARE").reason


def test_two_columns_of_one_name_are_named():
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    assert "two columns are named 'a'" in scan_of(FORMAT, parquet(table), URL).schema["a"].note


def test_garbage_in_the_footer_is_named_with_its_offset():
    content = bytearray(parquet(mixed_table(2)))
    size = int.from_bytes(content[-8:-4], "little")
    content[-8 - size : -8] = b"\xff" * size
    error = scan_error(bytes(content))
    assert "footer" in error.reason
    assert error.offset == len(content) - 8 - size


def test_a_chunk_of_another_type_than_its_column_is_named():
    # pyarrow would end the process when its statistics are looked at.
    content = parquet(pa.table({"label": pa.array([1, 2, 3], pa.int64())}))
    int64, int32 = b"\x1c\x15\x04\x19", b"\x1c\x15\x02\x19"  # where metadata of a chunk begins: its type
    assert content.count(int64) == 1
    error = scan_error(content.replace(int64, int32))
    assert "row group 0: column 'label' is INT64, and here INT32" in error.reason


def test_missing_data_is_noticed_by_the_footer():
    content = parquet(mixed_table(500), compression="none")
    size = int.from_bytes(content[-8:-4], "little") + 8
    error = scan_error(b"PAR1" + content[-size:])
    assert "past the data" in error.reason


def first_block(content: bytes):
    block = blocks_of(scan_of(FORMAT, content, URL), shard_of(content, URL))[0]
    return block, memoryview(content)[block.offset : block.offset + block.length]


def test_broken_pages_name_the_row_group():
    content = parquet(mixed_table(100), row_group_size=50)
    block, data = first_block(content)
    with pytest.raises(CorruptShardError, match="row group 0") as caught:
        FORMAT.decode(block, memoryview(b"\xff" * len(data)), None)
    assert (caught.value.offset, caught.value.stage) == (block.offset, "decode")


def test_an_unknown_column_lists_those_there():
    block, data = first_block(parquet(pa.table({"a": [1], "s": [{"b": 2}]})))
    with pytest.raises(CorruptShardError, match=r"no column 'z'; the shard has a, s\.b"):
        FORMAT.decode(block, data, ["z"])


def test_nulls_that_statistics_count_are_in_the_scan():
    table = pa.table(
        {
            "i": pa.array([1, 2, 3, None, None], pa.int16()),
            "f": [0.5, None, 0.5, 0.5, 0.5],
            "s": pa.array([{"t": "x"}, None, {"t": None}, {"t": "y"}, {"t": "z"}]),
            "l": [[1], [None], [1], None, [1]],
            "full": [1, 2, 3, 4, 5],
        }
    )
    content = parquet(table, row_group_size=2)
    scan = scan_of(FORMAT, content, URL)
    assert scan.missing == {"i": "1 of 2 rows of row group 1", "s.t": "1 of 2 rows of row group 0"}
    blocks = blocks_of(scan, shard_of(content, URL))
    assert [FORMAT.num_missing(block, "i") for block in blocks] == [0, 1, 1]
    assert [FORMAT.num_missing(blocks[1], name) for name in ("f", "s.t", "l", "full")] == [None, 1, None, 0]
    bare = parquet(table, row_group_size=2, write_statistics=False)
    assert scan_of(FORMAT, bare, URL).missing == {}


def test_a_column_of_decimals_in_lists_can_be_left_out():
    content = parquet(pa.table({"d": pa.array([[1]]).cast(pa.list_(pa.decimal128(30, 2))), "i": [5]}))
    with pytest.raises(ShardError, match=r"column 'd' of type list<element: decimal128\(30, 2\)"):
        decoded_blocks(FORMAT, content, URL)
    assert rows_of(decoded_blocks(FORMAT, content, URL, ["i"])) == [{"i": 5}]


NULL_LISTS = (
    "c-oazK~EDw6n-<i8CSxgAT!xb8q*lqU;?!zsUfBYra&pNC~cykw^BDNu>~yHHlFwup8N?MJ$f{rOuTw9#)C(GgzwF?Tdah{O"
    "}jI1-uJ!ldvBWV=z3ndG9zcJ(vvU^kSYS4tpLC(e(-y?DnZ_n;ewoyDJi5#`!1cD_ln~4m!hdD<V~$|d^^()y}vo!`3<O$li"
    "4b=Nx^p+++;;U(c=tOl$nwK0)hrI-Z0~PY_L->f5oYhotUM9f^lb-^ip!BiVNv^X##R9VLC}9TskE`SQ<MSMVC4e;F8Np2F&"
    "5o4L%gW7bneEQM(}p6u8g&l1ov=xk178-PXa$spKHNIqu(xT2VVXJVi$sv3CaE#w@MfD{1@^ZSHpU{FX;nlnBy6F@&`Af&z$"
    "Cu*~{~GK5O5Ce$aUKC`eAde`4kut1X`F~C7^DBcZ)8<eqG52Z-NwIb*k>k9Rgsb4I7&%>|m|E}d<B@u);QLDnON`<vqcf1*)"
    "&YAki!XHj}?p%LSSG5DdGrDoQIrYU=BJ|XE7lO1usq6J8yASOB`4`STdY0mn*1D$c^GNHSF2%a6b*$H7b5=sYHf`3l-ZBTHR"
    "om3MiC>%8lzK{~39?={adU*<F!=<!nHwC|Y<^=Mnai}Pl?^FQNCsc3C8b_cs!}DqiT8JK+auhT0d0=_=!CS{%Dvb%nmRwk>k"
    "Z@oaExCW<C|^eh;~~vr!@nKlkx`nc-(*QZ~u0v#!6%?#uQkqvCWiC{pUp8PKGmVp|8j0IT~tXuio0PnUPt3ocMkSe&)E*dGj"
    "_pU2Gm7FE%=zqh6*PbxsbB4l_&lv$<?OD5e4I2QKg@y@UUce*n=_<l+"
)
"""x: [[1, 2], None, [3, 4]], lists of two float32, and z: [1, 2, 3]; pyarrow before 26 cannot write it."""


def test_null_lists_of_one_length_are_read_or_name_column_and_version():
    content = zlib.decompress(base64.b85decode(NULL_LISTS))
    assert [row["z"] for row in rows_of(decoded_blocks(FORMAT, content, URL, ["z"]))] == [1, 2, 3]
    if int(pa.__version__.partition(".")[0]) < 26:
        told = rf"'x' has .* null, which pyarrow {pa.__version__} cannot read; install"
        with pytest.raises(ShardError, match=told):
            decoded_blocks(FORMAT, content, URL, ["z", "x"])
    else:
        (block,) = decoded_blocks(FORMAT, content, URL, ["z", "x"])
        assert isinstance(block["x"], Masked)
        assert block["x"].lacks.tolist() == [0, MISSING, 0]
