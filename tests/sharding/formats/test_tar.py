"""Tar shards: webdataset's and CPython's tar readers are the oracles."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import mmap
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import zstandard
from formats_kit import blocks_of, rows_of, scan_of, shard_of
from hypothesis import assume, example, given, strategies as st
from parameters_kit import in_full, in_pairs, others_in_full
from webdataset.tariterators import group_by_keys, tar_file_expander

from sharding.blocks import Shard, Spans
from sharding.compression import compression_of, decompress, open_decompressed
from sharding.errors import CorruptShardError
from sharding.formats.tar.format import TarFormat
from sharding.formats.tar.members import list_members

TAR = TarFormat()
Sample = dict[str, bytes | None]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "a.tar": bytes,
    "a.tar.gz": gzip.compress,
    "a.tgz": gzip.compress,
    "a.tar.zst": zstandard.ZstdCompressor().compress,
}


def tar_of(
    members: Iterable[tuple[str, bytes]], *, fmt: int = tarfile.USTAR_FORMAT, mtime: float = 0, **info: Any
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt, **info) as tar:
        for name, payload in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(payload), mtime
            tar.addfile(member, io.BytesIO(payload))
    return out.getvalue()


def with_header(content: bytes, at: int, field: slice, text: bytes) -> bytes:
    """The archive with one header field replaced and its checksum made right again."""
    head = bytearray(content[at : at + 512])
    head[field] = text
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return content[:at] + bytes(head) + content[at + 512 :]


def may_be_of_a_sample(name: str) -> bool:
    """Not hidden, and not what a Mac keeps beside files: of these webdataset makes samples, and we do not."""
    folder, _, last = name.rpartition("/")
    return not last.startswith(".") and "__MACOSX" not in folder.split("/")


def by_webdataset(content: bytes) -> list[Sample]:
    archives = [{"url": "a.tar", "stream": io.BytesIO(content)}]
    files = tar_file_expander(archives, select_files=may_be_of_a_sample)
    return [{k: v for k, v in sample.items() if k != "__url__"} for sample in group_by_keys(files)]


def by_us(
    content: bytes, url: str = "a.tar", block_bytes: int = 4 << 20, *, allow_unfinished: bool = False
) -> list[Sample]:
    """All samples as webdataset would give them: key as text, absent fields left out."""
    scan = scan_of(TarFormat(allow_unfinished=allow_unfinished), content, url, block_bytes)
    samples = []
    for block in blocks_of(scan, shard_of(content, url)):
        data = memoryview(content)[block.offset : block.offset + block.length]
        columns = TAR.decode(block, data, ["__key__", *scan.schema])
        for row in rows_of([columns]):
            key = row.pop("__key__").decode(errors="surrogateescape")
            samples.append({"__key__": key} | {k: v for k, v in row.items() if v is not None})
    return samples


def simple(num_samples: int = 3, size: int = 700) -> bytes:
    rng = np.random.default_rng(0)
    pairs = [(f"d/{i:04d}.{ext}", rng.bytes(size)) for i in range(num_samples) for ext in ("cls", "jpg")]
    return tar_of(pairs)


def error_of(content: bytes, url: str = "a.tar") -> CorruptShardError:
    with pytest.raises(CorruptShardError) as caught:
        scan_of(TAR, content, url)
    assert caught.value.shard == url
    assert caught.value.stage == "index"
    return caught.value


# Same samples as webdataset

PECULIAR_NAMES = [
    "a.jpg",
    "a.seg.png",
    "a.CLS",
    "./b/x.jpg",
    "./b/x.json",
    "c.d/e.f.g",
    "c.d/e.h",
    "no_extension",
    "dir/no_extension",
    ".hidden",
    "dir/.hidden",
    "x/dir/.hidden.txt",
    "x.y/dir/.hidden.txt",
    "x.y/.hidden.txt",
    "/.h",
    "a//.h",
    "__meta__",
    "__meta__/x.jpg",
    "__not_meta.jpg",
    "__meta__.jpg",
    "m/__meta__/x.jpg",
    "ends.",
    "two..dots",
    "line\nbreak.txt",
    "line.\nbreak/x.txt",
    "new\nline.d/x.txt",
    "é/ü.Ä",
    "n" * 95 + ".txt",
    "n" * 95 + ".json",
    "p" * 60 + "/" + "q" * 60 + ".jpg",
    "p" * 60 + "/" + "q" * 60 + ".txt",
    "r" * 100 + "/" + "s" * 50 + ".x.y",
]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("block_bytes", [1, 3000, 1 << 20])
def test_peculiar_names_give_the_samples_of_webdataset(fmt: int, block_bytes: int) -> None:
    content = tar_of(((name, name.encode()) for name in PECULIAR_NAMES), fmt=fmt)
    assert by_us(content, block_bytes=block_bytes) == by_webdataset(content)


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize("length", [99, 100, 101, 155, 256, 257, 1000, 5000])
def test_long_names_give_the_samples_of_webdataset(fmt: int, length: int) -> None:
    names = [f"{'k' * (length - 10)}{i}.{ext}" for i in range(3) for ext in ("jpg", "cls")]
    content = tar_of(((name, b"x" * 600) for name in ["short.txt", *names]), fmt=fmt)
    assert by_us(content) == by_webdataset(content)


@pytest.mark.parametrize("url", COMPRESS)
def test_compressed_shards_are_one_block_with_the_same_samples(url: str) -> None:
    plain = simple(50)
    content = COMPRESS[url](plain)
    assert by_us(content, url) == by_webdataset(plain)
    scan = scan_of(TAR, content, url, block_bytes=2000)
    if url != "a.tar":
        assert (scan.offset.tolist(), scan.length.tolist()) == ([0], [len(content)])
        assert scan.nbytes.tolist() == [len(plain)]
        assert TAR.locate(blocks_of(scan, shard_of(content, url))[0], None) is None


def test_times_in_pax_headers_before_every_member_change_nothing() -> None:
    pairs = [(f"{i:05d}.{ext}", b"v" * (i % 700)) for i in range(1200) for ext in ("a", "b")]
    content = tar_of(pairs, fmt=tarfile.PAX_FORMAT, mtime=1e9 + 0.25)
    assert by_us(content) == by_webdataset(content)


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"V"])
def test_members_that_are_no_files_are_passed_over(kind: bytes) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for i in range(4):
            other = tarfile.TarInfo(f"d{i}.d")
            other.type = kind
            tar.addfile(other)
            member = tarfile.TarInfo(f"{i // 2}.{'ab'[i % 2]}")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"%05d" % i))
    assert by_us(out.getvalue()) == by_webdataset(out.getvalue())
    assert len(by_us(out.getvalue())) == 2


def test_a_payload_that_is_a_tar_archive_is_not_searched() -> None:
    inner = simple(5)
    content = tar_of([("a.tar", inner), ("a.txt", b"x"), ("b.tar", inner), ("b.txt", b"y")])
    assert by_us(content) == by_webdataset(content)


@pytest.mark.parametrize("name", ["path", "comment"])
def test_global_pax_headers_apply_to_all_that_follows(name: str) -> None:
    members = [("a.x", b"1"), ("b.x", b"2")][: 2 if name == "comment" else 1]
    content = tar_of(members, fmt=tarfile.PAX_FORMAT, pax_headers={name: "dir/é.y"})
    assert by_us(content) == by_webdataset(content)


def test_a_global_path_names_every_member_as_in_tarfile() -> None:
    content = tar_of([("a.x", b"1"), ("b.x", b"2")], fmt=tarfile.PAX_FORMAT, pax_headers={"path": "é.y"})
    with pytest.raises(ValueError, match="duplicate"):
        by_webdataset(content)
    assert error_of(content).key == "é"


def test_a_pax_size_outweighs_the_one_in_the_header() -> None:
    payload = tar_of([("inner.x", b"not a member")])[:1024]
    body = b"13 size=1024\n"
    pax = tarfile.TarInfo("x")
    pax.type, pax.size = tarfile.XHDTYPE, len(body)
    content = pax.tobuf(tarfile.USTAR_FORMAT) + body.ljust(512, b"\0")
    content += tarfile.TarInfo("a.x").tobuf(tarfile.USTAR_FORMAT) + payload + simple(3)
    assert by_us(content) == by_webdataset(content)
    assert by_us(content)[0] == {"__key__": "a", "x": payload}


def old_style(content: bytes) -> bytes:
    """Every header without magic and with type 0, as before ustar."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            content = with_header(content, member.offset, slice(156, 512), bytes(356))
    return content


def test_v7_archives_have_no_magic() -> None:
    content = old_style(simple(4))
    assert b"ustar" not in content
    assert by_us(content, block_bytes=2000) == by_webdataset(content)


@pytest.mark.parametrize(
    "size",
    [
        b"\x80" + (700).to_bytes(11, "big"),
        b"       1274 ",
        b"1274\0\0\0\0\0\0\0\0",
        b"000000001274",
        b"00000001274 ",
    ],
)
def test_sizes_in_any_notation_are_read(size: bytes) -> None:
    content = with_header(simple(4), 0, slice(124, 136), size)
    assert by_us(content) == by_webdataset(content) == by_us(simple(4))


def test_checksums_of_signed_bytes_and_of_seven_digits_hold() -> None:
    content = bytearray(tar_of([("ü.a", b"1"), ("v.a", b"2")]))
    high = sum(byte > 127 for byte in content[:512])
    content[148:156] = b"%06o\0 " % (int(content[148:154], 8) - 256 * high)
    content[1024 + 148 : 1024 + 156] = b"%07o\0" % int(content[1024 + 148 : 1024 + 154], 8)
    assert by_us(bytes(content)) == by_webdataset(bytes(content))


@pytest.mark.skipif(not shutil.which("tar"), reason="needs GNU tar")
@pytest.mark.parametrize("fmt", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_archives_of_the_tar_program_give_the_samples_of_webdataset(tmp_path: Path, fmt: str) -> None:
    long = "p" * 50 if fmt == "v7" else "p" * 90 + "/" + "q" * 90 if fmt == "ustar" else "p" * 200
    for name in ["a.jpg", "a.cls", "sub/b.jpg", "sub/b.c.d", ".hidden", "sub/.hid", f"{long}.t", f"{long}.u"]:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 40)
    command = ["tar", f"--format={fmt}", "--sort=name", "-C", str(tmp_path / "data"), "-cf", "-", "."]
    content = subprocess.run(command, check=True, capture_output=True).stdout
    assert by_us(content) == by_webdataset(content)
    assert len(by_us(content)) >= 3


name_parts = st.text(alphabet="abB._-é\n ", min_size=1, max_size=12) | st.sampled_from(
    ["__x__", "jpg", "k.CLS", "n" * 60, "l" * 120, "ü" * 140, ".", ".."]
)
names = st.lists(name_parts, min_size=1, max_size=4).map("/".join)
files = st.lists(st.tuples(names, st.integers(0, 2000)), max_size=12)


@given(
    files,
    st.sampled_from(list(FORMATS.values())),
    st.sampled_from([1, 5000, 1 << 20]),
    st.sampled_from([0, 1e9 + 0.5]),
)
@example([("a.__bad__", 3), ("b.x", 3)], tarfile.USTAR_FORMAT, 1, 0)
@example([("é.x", 3), ("b.x", 3), ("é.y", 3)], tarfile.PAX_FORMAT, 1, 0)
def test_any_archive_gives_the_samples_of_webdataset(
    members: list[tuple[str, int]], fmt: int, block_bytes: int, mtime: float
) -> None:
    try:
        content = tar_of(((name, b"%d" % size * (size // 4)) for name, size in members), fmt=fmt, mtime=mtime)
    except ValueError:
        assume(False)  # ustar cannot hold the name
    expected = None
    with contextlib.suppress(ValueError):  # a duplicate extension
        expected = by_webdataset(content)
    if expected is None:
        assert "duplicate" in error_of(content).reason
        return
    if len({sample["__key__"] for sample in expected}) < len(expected):
        assert "tar --sort=name" in error_of(content).reason
        return
    if any(name.endswith("__bad__") for name, _ in members):
        assert "reserved" in error_of(content).reason
        return
    assert by_us(content, block_bytes=block_bytes) == expected


# Members and blocks


@pytest.mark.parametrize("buffer_bytes", [512, 1024, 4096, 65536])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_members_are_those_of_tarfile_whatever_the_buffer(buffer_bytes: int, fmt: int) -> None:
    rng = np.random.default_rng(1)
    names = [("k" * 40 + "/") * int(rng.integers(0, 4)) + f"{i:04d}.x" for i in range(300)]
    content = tar_of([(name, bytes(int(rng.integers(0, 3000)))) for name in names], fmt=fmt, mtime=0.5)
    members = list_members(io.BytesIO(content), "a.tar", buffer_bytes=buffer_bytes)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(m.offset, m.offset_data - 512, m.size) for m in tar]
    found = zip(members.first.tolist(), members.header.tolist(), members.size.tolist(), strict=True)
    assert list(found) == expected


class CountedReads(io.BytesIO):
    num_bytes = 0

    def readinto(self, into: Any) -> int:
        count = super().readinto(into)
        self.num_bytes += count
        return count


def test_large_payloads_are_not_read() -> None:
    content = tar_of([(f"{i:03d}.bin", bytes(200_000)) for i in range(200)])
    file = CountedReads(content)
    assert len(list_members(file, "a.tar")) == 200
    assert file.num_bytes < len(content) / 15


def test_small_members_after_large_ones_are_read_in_windows_again() -> None:
    sizes = [300_000] * 80 + [100] * 3000
    content = tar_of([(f"{i:05d}.bin", bytes(size)) for i, size in enumerate(sizes)])
    file = CountedReads(content)
    assert list_members(file, "a.tar").size.tolist() == sizes


@pytest.mark.parametrize("block_bytes", [1, 1536, 3072, 5000, 1 << 20])
def test_blocks_are_consecutive_whole_samples_of_at_least_the_wanted_bytes(block_bytes: int) -> None:
    content = simple(40)
    scan = scan_of(TAR, content, "a.tar", block_bytes)
    assert scan.num_samples.sum() == 40
    assert scan.offset[0] == 0
    assert (scan.offset[1:] == (scan.offset + scan.length)[:-1]).all()
    assert (scan.length[:-1] >= block_bytes).all()
    sample_bytes = 2 * (512 + 1024)
    assert (scan.length < block_bytes + sample_bytes).all()
    assert scan.offset[-1] + scan.length[-1] == 40 * sample_bytes


def test_a_block_begins_with_the_extension_headers_of_its_first_member() -> None:
    content = tar_of([(f"{'k' * 120}{i}.x", b"v") for i in range(4)], fmt=tarfile.GNU_FORMAT)
    scan = scan_of(TAR, content, "a.tar", 1)
    assert scan.offset.tolist() == [i * 4 * 512 + 0 for i in range(4)]


def test_the_schema_tells_sizes_and_which_columns_are_optional() -> None:
    content = tar_of([("a.jpg", b"123"), ("a.cls", b"1"), ("b.jpg", b"12345")])
    schema = scan_of(TAR, content, "a.tar").schema
    assert list(schema) == ["cls", "jpg"]
    assert [schema["cls"].size_range, schema["jpg"].size_range] == [(1, 1), (3, 5)]
    assert [schema["cls"].optional, schema["jpg"].optional] == [True, False]
    assert {spec.kind for spec in schema.values()} == {"bytes"}


def test_names_passed_over_are_counted_in_the_footer() -> None:
    content = tar_of([("README", b"x"), ("a.jpg", b"x"), ("__meta__", b"x"), ("a.txt", b"x")])
    scan = scan_of(TAR, content, "a.tar")
    assert json.loads(scan.footer) == {"columns": ["jpg", "txt"], "passed_over": 2}
    assert by_us(content) == by_webdataset(content)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_locate_gives_the_places_of_decode_without_bytes(fmt: int) -> None:
    pairs = [(f"{i:03d}.{ext}", bytes([i]) * i) for i in range(1, 60) for ext in "ab"[: 1 + i % 2]]
    content = tar_of(pairs, fmt=fmt)
    scan = scan_of(TAR, content, "a.tar", 4000)
    for block in blocks_of(scan, shard_of(content, "a.tar")):
        data = memoryview(content)[block.offset : block.offset + block.length]
        places = TAR.locate(block, ["b", "__key__"])
        assert places is not None
        for name, column in TAR.decode(block, data, ["b", "__key__"]).items():
            assert isinstance(column, Spans)
            assert len(places[name].buffer) == 0
            np.testing.assert_array_equal(places[name].starts, column.starts)
            np.testing.assert_array_equal(places[name].lengths, column.lengths)


def test_values_are_views_of_the_data() -> None:
    content = simple(3)
    scan = scan_of(TAR, content, "a.tar")
    columns = TAR.decode(blocks_of(scan, shard_of(content, "a.tar"))[0], memoryview(content), None)
    assert list(columns) == ["cls", "jpg"]
    column = columns["jpg"]
    assert isinstance(column, Spans)
    assert np.shares_memory(column.value(0), np.frombuffer(content, np.uint8))


def test_keys_are_given_as_text() -> None:
    content = tar_of([("é/1.a", b""), ("é/2.a", b""), ("p" * 99 + "/3.a", b"")])
    block = blocks_of(scan_of(TAR, content, "a.tar"), shard_of(content, "a.tar"))[0]
    assert TAR.keys(block, memoryview(content)) == ["é/1", "é/2", "p" * 99 + "/3"]


def test_members_and_blocks_beyond_four_gib_are_indexed(tmp_path: Path) -> None:
    path, big = tmp_path / "big.tar", 9 << 30  # more than 11 octal digits can say
    with path.open("wb") as file:
        for fmt in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            for name, size in ((f"{fmt}.bin", big), (f"{fmt}.txt", 3)):
                member = tarfile.TarInfo(name)
                member.size = size
                file.write(member.tobuf(fmt))
                file.write(b"abc")
                file.seek(-(-size // 512) * 512 - 3, io.SEEK_CUR)
        file.write(bytes(1024))
    shard = Shard(str(path), path.stat().st_size, "")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        scan = TAR.scan(file, shard, block_bytes=64 << 30)
        assert scan.schema["bin"].size_range == (big, big)
        column = TAR.decode(blocks_of(scan, shard)[0], memoryview(mapped), ["txt"])["txt"]
        assert isinstance(column, Spans)
        assert [column.value(i).tobytes() for i in range(2)] == [b"abc", b"abc"]
        assert int(column.starts[1]) > 2 * big
        del column


# Empty shards and the end of the archive


@pytest.mark.parametrize("url", COMPRESS)
@pytest.mark.parametrize("members", [[], [("README", b"no samples here")]])
def test_shards_without_samples_have_no_blocks(url: str, members: list[tuple[str, bytes]]) -> None:
    scan = scan_of(TAR, COMPRESS[url](tar_of(members)), url)
    assert len(scan.offset) == 0
    assert dict(scan.schema) == {}


@pytest.mark.parametrize("url", COMPRESS)
def test_a_file_without_a_byte_lacks_its_end(url: str) -> None:
    for content in (b"", COMPRESS[url](b"")):
        error = error_of(content, url)
        assert (error.offset, "no block of zeros" in error.reason) == (0, True)


def two_members(fmt: int) -> tuple[bytes, int]:
    """A small archive, and where its last member ends, padding included."""
    content = tar_of([("a.x", b"1"), ("b.x", b"2" * 300)], fmt=fmt, mtime=0.5)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        last = tar.getmembers()[-1]
    return content, last.offset_data + -(-last.size // 512) * 512


@pytest.mark.parametrize("url", others_in_full(COMPRESS, "a.tar", "a.tar.gz"))
@pytest.mark.parametrize("fmt", [*in_full(tarfile.USTAR_FORMAT), tarfile.PAX_FORMAT])
def test_every_cut_before_the_end_marker_raises_and_none_behind_it(
    fmt: int, url: str, request: pytest.FixtureRequest
) -> None:
    content, end = two_members(fmt)
    step = 1 if request.config.getoption("--full") else 13
    beside = [at + by for at in range(512, end + 1024, 512) for by in (-1, 0, 1)]
    for cut in sorted({*range(0, end + 512, step), *beside} & {*range(end + 512)}):
        error = error_of(COMPRESS[url](content[:cut]), url)
        assert "truncated" in error.reason
        assert error.offset is not None
        assert error.offset <= cut
        if cut >= end:
            assert error.offset == end
            assert "'b.x'" in error.reason
    for cut in (end + 512, end + 600, end + 1024, end + 2000):
        assert by_us(COMPRESS[url](content[:cut]), url) == by_us(content)


@pytest.mark.parametrize("url", ["a.tar.gz", "a.tar.zst"])
def test_every_cut_of_a_compressed_archive_raises(url: str) -> None:
    stored = COMPRESS[url](two_members(tarfile.PAX_FORMAT)[0])
    for cut in range(len(stored)):
        assert "truncated" in error_of(stored[:cut], url).reason


@pytest.mark.parametrize("url", ["a.tar.gz", "a.tar.zst"])
def test_a_cut_between_members_or_frames_of_the_compression_raises(url: str) -> None:
    content, end = two_members(tarfile.GNU_FORMAT)
    for cut in (0, 512, 1024, end - 100, end, end + 500):
        assert "truncated" in error_of(COMPRESS[url](content[:cut]), url).reason
        joined = COMPRESS[url](content[:cut]) + COMPRESS[url](content[cut:])
        assert by_us(joined, url) == by_us(content)


def test_a_cut_in_the_padding_names_the_end_of_the_file_and_the_last_member() -> None:
    content = simple(3)
    cut = 6 * 1536 - 1024 + 700
    error = error_of(content[:cut])
    assert (error.offset, "'d/0002.jpg'" in error.reason) == (cut, True)
    long = tar_of([("k" * 120 + ".x", b"v")], fmt=tarfile.GNU_FORMAT)
    assert repr("k" * 120 + ".x") in error_of(long[: 3 * 512 + 100]).reason


@pytest.mark.parametrize("fmt", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "pax"])
def test_an_unfinished_archive_has_the_whole_samples_before_the_cut(fmt: int) -> None:
    pairs = [(f"{i}.{ext}", bytes([i]) * 300) for i in range(3) for ext in ("x", "y")]
    content = tar_of(pairs, fmt=fmt, mtime=0.5)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = [(m.offset_data, m.offset_data + m.size, m.name) for m in tar.getmembers()]
    whole = by_us(content)
    for cut in range(0, members[-1][0] + 1100, 61):
        there = [name for _, stop, name in members if stop <= cut]
        expected = whole[: len(there) // 2]
        if len(there) == 1 and cut < members[1][0]:  # no sample tells that this one is not whole
            expected = [{"__key__": "0", "x": whole[0]["x"]}]
        scan = scan_of(TarFormat(allow_unfinished=True), content[:cut], "a.tar")
        assert by_us(content[:cut], allow_unfinished=True) == expected
        assert bool(scan.unfinished) == (cut < members[-1][0] + 1024)


@pytest.mark.parametrize("url", COMPRESS)
def test_an_unfinished_archive_says_where_it_ends(url: str) -> None:
    content = COMPRESS[url](simple(3)[: 5 * 1536 + 600])
    scan = scan_of(TarFormat(allow_unfinished=True), content, url)
    assert scan.unfinished == "it ends inside the payload of its last member, 'd/0002.jpg'"
    assert scan.num_samples.sum() == 2
    assert by_us(content, url, allow_unfinished=True) == by_us(simple(3))[:2]


@pytest.mark.parametrize("gap", [0, 3 << 20])
def test_archives_joined_by_cat_are_refused_where_the_second_begins(gap: int) -> None:
    content = simple(3)
    error = error_of(content + bytes(gap) + content)
    assert "second archive" in error.reason
    assert error.offset == len(content) + gap


@pytest.mark.parametrize("url", COMPRESS)
def test_only_zeros_may_follow_the_end(url: str) -> None:
    content = simple(2)
    assert by_us(COMPRESS[url](content + bytes(100_000)), url) == by_us(content)
    error = error_of(COMPRESS[url](content + bytes(2000) + b"x"), url)
    assert (error.offset, "after the end" in error.reason) == ((len(content) + 2000) // 512 * 512, True)


def test_a_hole_of_zeros_between_members_is_no_end() -> None:
    """As a download in several pieces leaves it: the space is there, one piece is not."""
    content = bytearray(simple(2000))
    content[3 * 1536 : 1500 * 1536] = bytes(1497 * 1536)
    assert error_of(bytes(content)).offset in (3 * 1536, 1500 * 1536)


@pytest.mark.skipif(not shutil.which("tar"), reason="needs GNU tar")
def test_archives_joined_or_appended_to_by_the_tar_program_are_one(tmp_path: Path) -> None:
    for name in ("a.x", "b.x", "c.x"):
        (tmp_path / name).write_bytes(name.encode() * 100)
        subprocess.run(["tar", "-C", str(tmp_path), "-cf", str(tmp_path / f"{name}.tar"), name], check=True)
    joined = tmp_path / "a.x.tar"
    subprocess.run(["tar", "-A", "-f", str(joined), str(tmp_path / "b.x.tar")], check=True)
    subprocess.run(["tar", "-C", str(tmp_path), "-r", "-f", str(joined), "c.x"], check=True)
    assert [sample["__key__"] for sample in by_us(joined.read_bytes())] == ["a", "b", "c"]


def test_the_writer_of_webdataset_ends_its_archives() -> None:
    out = io.BytesIO()
    with webdataset.TarWriter(out) as writer:
        writer.write({"__key__": "a", "cls": 1})
        length = out.tell()
    assert by_us(out.getvalue()) == [{"__key__": "a", "cls": b"1"}]
    assert error_of(out.getvalue()[:length]).offset == length


def test_a_single_zero_block_before_more_members_is_refused() -> None:
    content = simple(2)
    error = error_of(content[:1536] + bytes(512) + content[1536:])
    assert (error.offset, "zero block" in error.reason) == (1536, True)


# Damage


@pytest.mark.parametrize("url", COMPRESS)
def test_a_member_cut_in_its_payload_names_its_header(url: str) -> None:
    content = simple(3)[: 4 * 1536 + 512 + 100]
    error = error_of(COMPRESS[url](content), url)
    assert (error.offset, "payload" in error.reason) == (4 * 1536, True)


@pytest.mark.parametrize("url", COMPRESS)
def test_a_member_cut_in_its_header_names_it(url: str) -> None:
    error = error_of(COMPRESS[url](simple(3)[: 4 * 1536 + 100]), url)
    assert (error.offset, "header" in error.reason) == (4 * 1536, True)


@pytest.mark.parametrize("cut", [300, 512, 600, 1024, 1100])
@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_an_archive_cut_in_an_extension_header_names_it(fmt: int, cut: int) -> None:
    start = len(tar_of([("a.x", b"1")])[:1024])
    content = tar_of([("a.x", b"1"), ("k" * 300 + ".x", b"2")], fmt=fmt)
    error = error_of(content[: start + cut])
    assert error.offset is not None
    assert error.offset >= start
    assert "truncated" in error.reason


def test_garbage_between_members_names_its_offset() -> None:
    content = bytearray(simple(3))
    content[2 * 1536 : 2 * 1536 + 512] = bytes(range(256)) * 2
    error = error_of(bytes(content))
    assert (error.offset, "checksum" in error.reason) == (2 * 1536, True)


def test_a_flipped_size_digit_names_its_offset() -> None:
    content = bytearray(simple(3))
    content[1536 + 132] ^= 1
    assert error_of(bytes(content)).offset == 1536


def test_a_duplicate_extension_names_key_and_offset() -> None:
    content = tar_of([("a/x.jpg", b"1"), ("a/x.txt", b"2"), ("a/x.JPG", b"3")])
    with pytest.raises(ValueError, match="duplicate"):
        by_webdataset(content)
    error = error_of(content)
    assert (error.key, error.offset) == ("a/x", 2048)
    assert "duplicate" in error.reason


@pytest.mark.parametrize("extension", ["__key__", "__url__", "__bad__"])
def test_reserved_extensions_are_refused(extension: str) -> None:
    error = error_of(tar_of([("a.jpg", b"1"), (f"a.{extension}", b"2")]))
    assert (error.key, error.offset) == ("a", 1024)


def test_an_extension_that_is_not_utf8_is_refused() -> None:
    assert error_of(tar_of([("a.j\udcff", b"1")], encoding="utf-8", errors="surrogateescape")).key == "a"


def test_sparse_members_are_refused() -> None:
    content = with_header(simple(2), 1536, slice(156, 157), b"S")
    error = error_of(content)
    assert (error.offset, "sparse" in error.reason) == (1536, True)
    pax = tar_of([("a.x", b"1")], fmt=tarfile.PAX_FORMAT)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("b.x")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(member)
    assert error_of(pax[:1024] + out.getvalue()).offset == 1024


@pytest.mark.parametrize("body", [b"5 path=a.x\n", b"99 path=a.x\n", b"13 size=12x\n\n"])
def test_malformed_pax_records_are_refused(body: bytes) -> None:
    head = tarfile.TarInfo("x")
    head.type, head.size = tarfile.XHDTYPE, len(body)
    content = head.tobuf(tarfile.USTAR_FORMAT) + body.ljust(512, b"\0") + simple(1)
    assert error_of(content).offset == 0


@given(st.data(), st.sampled_from(list(FORMATS.values())), st.sampled_from([0, 0.5]))
def test_damage_is_noticed_or_harmless_and_never_a_foreign_error(data: Any, fmt: int, mtime: float) -> None:
    members = [("a.x", b"1" * 600), ("a.y", b""), ("k" * 98 + ".x", b"2"), ("c/d.x", b"3" * 1500)]
    whole = tar_of(members, fmt=fmt, mtime=mtime)
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    with contextlib.suppress(CorruptShardError):
        by_us(bytes(content))


@given(st.sampled_from([0, 1536, 3072]), st.integers(0, 511), st.integers(1, 255))
def test_a_changed_byte_in_a_header_is_noticed_while_indexing(header: int, at: int, change: int) -> None:
    content = bytearray(simple(3))
    content[header + at] ^= change
    if 148 <= at < 156:
        with contextlib.suppress(CorruptShardError):
            assert by_us(bytes(content)) == by_us(simple(3))
    else:
        assert error_of(bytes(content)).offset == header


# Shards that changed since they were indexed


def decode_other(indexed: bytes, now: bytes, url: str = "a.tar") -> CorruptShardError:
    block = blocks_of(scan_of(TAR, indexed, url), shard_of(indexed, url))[0]
    with pytest.raises(CorruptShardError) as caught:
        TAR.decode(block, memoryview(now)[block.offset : block.offset + block.length], None)
    assert caught.value.stage == "decode"
    return caught.value


@pytest.mark.parametrize("place", [124 + 5, 124 + 10, 257, 261])
def test_a_changed_size_or_magic_is_noticed_while_decoding(place: int) -> None:
    content = bytearray(simple(3))
    content[3 * 1536 + place] ^= 1
    error = decode_other(simple(3), bytes(content))
    assert error.offset == 3 * 1536
    assert "changed or corrupt" in error.reason


def test_a_block_cut_short_is_noticed_while_decoding() -> None:
    assert "truncated" in decode_other(simple(3), simple(3)[:4000]).reason


@pytest.mark.parametrize("url", ["a.tar.gz", "a.tar.zst"])
def test_another_compressed_shard_is_noticed_while_decoding(url: str) -> None:
    compress = COMPRESS[url]
    for other in (simple(2), simple(30), simple(3, size=600)):
        decode_other(compress(simple(3)), compress(other).ljust(len(compress(simple(3))), b"\0"), url)


@pytest.mark.parametrize("url", ["a.tar.gz", "a.tar.zst"])
def test_a_shard_that_became_a_bomb_meets_the_size_it_was_indexed_with(url: str) -> None:
    assert (
        "more than"
        in decode_other(COMPRESS[url](bytes(simple(3))), COMPRESS[url](bytes(60_000))[:4000], url).reason
    )


def test_v7_and_odd_sizes_are_not_compared_while_decoding() -> None:
    content = with_header(old_style(simple(3)), 0, slice(124, 136), b"       1274 ")
    assert by_us(content) == by_us(simple(3))


def test_a_column_that_only_other_shards_have_is_missing_from_every_sample() -> None:
    content = simple(3)
    (block,) = blocks_of(scan_of(TAR, content, "a.tar"), shard_of(content, "a.tar"))
    column = TAR.decode(block, memoryview(content), ["png", "cls"])["png"]
    assert isinstance(column, Spans)
    assert column.lengths.tolist() == [-1, -1, -1]


# Compression


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://b/a.tar.gz?versionId=3", "gzip"),
        ("https://h/A.TGZ?sig=a.zst", "gzip"),
        ("simplecache::s3://b/a.tar.zst", "zstd"),
        ("zip://a.tar.gz::/x/y.zip", "gzip"),
        ("/x/a.tar", None),
        ("a.gz/b.tar", None),
    ],
)
def test_the_ending_of_the_name_tells_the_compression(url: str, kind: str | None) -> None:
    assert compression_of(url) == kind


def zstd_streamed(content: bytes) -> bytes:
    """Two frames without content size, and a skippable frame between."""
    frames = []
    for part in (content[: len(content) // 2], content[len(content) // 2 :]):
        stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
        frames.append(stream.compress(part) + stream.flush())
    return (b"\x50\x2a\x4d\x18\x03\0\0\0abc").join(frames)


def gzip_members(content: bytes) -> bytes:
    return gzip.compress(content[:1000]) + gzip.compress(content[1000:]) + bytes(100)


MULTIPLE = {"a.tar.gz": gzip_members, "a.tar.zst": zstd_streamed}


@pytest.mark.parametrize("limit_bytes", [200_000, 300_000])
@pytest.mark.parametrize("url", MULTIPLE)
def test_several_members_or_frames_are_one_file(url: str, limit_bytes: int) -> None:
    content = np.random.default_rng(0).integers(0, 9, 200_000, dtype=np.uint8).tobytes()
    stored = MULTIPLE[url](content)
    assert decompress(memoryview(stored), url, limit_bytes=limit_bytes) == content
    assert open_decompressed(io.BytesIO(stored), url).read() == content


LARGE = bytes(3 << 20)
"""Much more than is decompressed in one piece."""
MOST = 16 << 20
"""More than what these tests decompress."""


@pytest.mark.parametrize(
    ("members", "tail"),
    in_pairs(
        [[LARGE], [LARGE, LARGE], [LARGE, b"", LARGE], [b""], [b"", LARGE]], [b"", bytes(1), bytes(100_000)]
    ),
)
def test_gzip_members_of_any_size_and_zero_padding_are_one_file(members: list[bytes], tail: bytes) -> None:
    stored, content = b"".join(map(gzip.compress, members)) + tail, b"".join(members)
    assert decompress(memoryview(stored), "a.gz", limit_bytes=MOST) == content
    assert open_decompressed(io.BytesIO(stored), "a.gz").read() == content
    with pytest.raises(CorruptShardError, match="gzip data") as caught:
        decompress(memoryview(stored + b"garbage"), "a.gz", limit_bytes=MOST)
    assert caught.value.offset == len(content)


@pytest.mark.parametrize("frames", [[LARGE], [LARGE, LARGE], [LARGE, b"", LARGE], [b""]])
def test_zstd_frames_of_any_size_are_one_file(frames: list[bytes]) -> None:
    stored, content = b"".join(map(COMPRESS["a.tar.zst"], frames)), b"".join(frames)
    assert decompress(memoryview(stored), "a.zst", limit_bytes=MOST) == content
    assert open_decompressed(io.BytesIO(stored), "a.zst").read() == content
    for tail in (bytes(100), b"garbage"):
        with pytest.raises(CorruptShardError, match="zstd data") as caught:
            decompress(memoryview(stored + tail), "a.zst", limit_bytes=MOST)
        assert caught.value.offset == len(content)


@pytest.mark.parametrize("url", MULTIPLE)
def test_a_dense_bomb_is_decompressed_in_small_pieces(url: str) -> None:
    reader = open_decompressed(io.BytesIO(COMPRESS[url](bytes(100 << 20))), url)
    tracemalloc.start()
    try:
        assert reader.seek(0, io.SEEK_END) == 100 << 20
        assert tracemalloc.get_traced_memory()[1] < 72 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("url", MULTIPLE)
def test_every_truncation_is_noticed(url: str) -> None:
    stored = COMPRESS[url](simple(3))
    for length in [1, 2, 5, 20, len(stored) // 2, len(stored) - 9, len(stored) - 1]:
        with pytest.raises(CorruptShardError, match="truncated") as caught:
            decompress(memoryview(stored)[:length], url, limit_bytes=MOST)
        assert (caught.value.shard, caught.value.stage) == (url, "decode")
        with pytest.raises(CorruptShardError, match="truncated") as caught:
            open_decompressed(io.BytesIO(stored[:length]), url).read()
        assert caught.value.stage == "index"


@pytest.mark.parametrize("url", MULTIPLE)
def test_corrupt_compressed_data_is_noticed(url: str) -> None:
    stored = MULTIPLE[url](simple(30))
    with pytest.raises(CorruptShardError, match="corrupt"):
        decompress(memoryview(b"no compressed data at all"), url, limit_bytes=MOST)
    with pytest.raises(CorruptShardError):
        decompress(
            memoryview(stored[:200] + bytes([stored[200] ^ 255]) + stored[201:]), url, limit_bytes=MOST
        )
    with pytest.raises(CorruptShardError, match="corrupt"):
        decompress(memoryview(stored + b"trailing garbage"), url, limit_bytes=MOST)


@pytest.mark.parametrize("url", MULTIPLE)
def test_a_decompression_bomb_meets_the_limit(url: str) -> None:
    stored = COMPRESS[url](bytes(50 << 20))
    with pytest.raises(CorruptShardError, match="more than"):
        decompress(memoryview(stored), url, limit_bytes=1 << 20)
    with pytest.raises(CorruptShardError, match="more than"):
        open_decompressed(io.BytesIO(stored), url, limit_bytes=1 << 20).seek(0, 2)


def test_the_reader_seeks_forwards_only() -> None:
    content = bytes(range(256)) * 1000
    file = open_decompressed(io.BytesIO(gzip.compress(content)), "a.gz")
    assert (file.seek(5000), file.read(3), file.tell()) == (5000, content[5000:5003], 5003)
    assert file.seek(2, io.SEEK_CUR) == 5005
    for back in ((0, io.SEEK_SET), (-1, io.SEEK_CUR), (-1, io.SEEK_END)):
        with pytest.raises(io.UnsupportedOperation):
            file.seek(*back)
    assert file.seek(0, io.SEEK_END) == len(content)
    assert file.read(1) == b""
