"""The catalog: built from shards, saved and loaded, compared with the store; and its errors."""

from __future__ import annotations

import functools
import http.server
import io
import os
import pickle
import tarfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_kit import exit_code_in_child, on_file_events
from formats_kit import RecordFormat, build_catalog, records
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, strategies as st

from dataflow.sources.listing.expand import expand
from sharding.blocks import ColumnSpec, Shard, ShardScan
from sharding.catalog.build import (
    changes,
    changes_text,
    default_catalog_path,
    find_catalog,
    is_catalog,
)
from sharding.catalog.file import arrow_rows, read_table, write_table
from sharding.catalog.schema import group_schemas, merge_schemas
from sharding.catalog.storage import check_shard, version_of
from sharding.catalog.table import MOST_IN_BLOCK, Catalog
from sharding.errors import CorruptShardError, OldCatalogError, ShardReadError
from sharding.formats import resolve_format
from sharding.formats.tokens import TokensFormat

ARRAYS = ("shard", "offset", "length", "nbytes", "num_samples", "first_sample")
BLOCK_BYTES = 24  # three records of two int32


@pytest.fixture
def shards(tmp_path):
    """Three local shards of 7, 0 and 4 samples."""
    urls = []
    for number, samples in enumerate((7, 0, 4)):
        (tmp_path / f"part-{number}.rec").write_bytes(records(samples))
        urls.append(str(tmp_path / f"part-{number}.rec"))
    return urls


def build(urls, codec=None, **more):
    return build_catalog(urls, codec or RecordFormat(blobs=True), block_bytes=BLOCK_BYTES, **more)


def assert_equal(one, other):
    for name in ("format", "options", "block_bytes", "schema"):
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.schema) == list(other.schema)
    assert one.rows.equals(other.rows)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one.blocks, name), getattr(other.blocks, name), name)
    assert one.fingerprint() == other.fingerprint()


# Building


def test_the_block_table_lists_every_block_of_every_shard(shards):
    catalog = build(shards)
    table = catalog.blocks
    assert table.shard.tolist() == [0, 0, 0, 2, 2]
    assert table.offset.tolist() == [8, 32, 56, 8, 32]
    assert table.length.tolist() == table.nbytes.tolist() == [24, 24, 8, 24, 8]
    assert table.num_samples.tolist() == [3, 3, 1, 3, 1]
    assert table.first_sample.tolist() == [0, 3, 6, 7, 10]
    assert table.shard.dtype == np.int32
    assert {getattr(table, name).dtype for name in ARRAYS[1:]} == {np.dtype(np.int64)}
    assert (catalog.num_samples, catalog.num_blocks, catalog.num_shards) == (11, 5, 3)
    assert catalog.urls == shards
    assert catalog.schema == {"a": ColumnSpec("fixed", "int32"), "b": ColumnSpec("fixed", "int32")}


def test_a_block_knows_its_place_in_its_shard_and_its_blobs(shards):
    block = build(shards).block(4)
    assert block.shard == Shard(shards[2], 40, f"mtime:{os.stat(shards[2]).st_mtime_ns}")
    assert (block.first_sample, block.first_in_shard, block.number, block.number_in_shard) == (10, 3, 4, 1)
    assert (block.offset, block.length, block.nbytes, block.num_samples) == (32, 8, 8, 1)
    assert bytes(block.index) == f"{shards[2]}/1".encode()
    assert bytes(block.footer) == b"REC1ab  "
    plain = build(shards, RecordFormat()).block(0)
    assert (plain.index, bytes(plain.footer)) == (b"", b"")
    for number in (-1, 5):
        with pytest.raises(IndexError, match=r"\[0, 5\)"):
            build(shards).block(number)


def test_the_table_cannot_be_written_to(shards):
    table = build(shards).blocks
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(table, name)[0] = 1


def test_an_executors_map_builds_the_same_catalog(shards):
    with ThreadPoolExecutor(3) as pool:
        assert_equal(build(shards, map=pool.map), build(shards))


def test_progress_counts_shards_and_samples(shards):
    seen = []
    build(shards, progress=lambda *now: seen.append(now))
    assert seen == [(1, 3, 7), (2, 3, 7), (3, 3, 11)]


def test_a_memory_store_gives_the_same_blocks(shards):
    root = f"memory://{uuid.uuid4().hex}"
    fs = fsspec.filesystem("memory")
    for url in shards:
        fs.put_file(url, f"{root}/{os.path.basename(url)}")
    copy = build(expand(f"{root}/*.rec"), RecordFormat())
    local = build(shards, RecordFormat())
    assert copy.block(4).shard.version.startswith("mtime:")
    assert copy.fingerprint() == local.fingerprint()
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(copy.blocks, name), getattr(local.blocks, name))


def test_a_missing_shard_is_named_and_the_others_counted(shards):
    os.unlink(shards[1])
    os.unlink(shards[2])
    with pytest.raises(ShardReadError, match="no such file") as caught:
        build(shards)
    assert caught.value.shard == shards[1]
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert "1 of the other 2 shards cannot be indexed either" in caught.value.__notes__[0]


def test_a_corrupt_shard_keeps_the_formats_error(shards):
    with open(shards[0], "r+b") as file:
        file.write(b"JUNK")
    with pytest.raises(CorruptShardError, match="begins with b'JUNK'") as caught:
        build(shards)
    assert caught.value.offset == 0


def test_what_a_scan_raises_names_the_shard(shards):
    class Broken(RecordFormat):
        def scan(self, file, shard, *, block_bytes):
            raise KeyError("x")

    with pytest.raises(ShardReadError, match="indexing it failed; cannot be read: KeyError") as caught:
        build(shards, Broken())
    assert caught.value.shard == shards[0]


class _Guarded(MemoryFileSystem):
    """A store that forbids "secret", fails at "flaky", and gives "etag-N" the etag N."""

    protocol = "guarded"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("guarded://", "memory://"))

    def info(self, path, **kwargs):
        if "secret" in path:
            raise PermissionError(f"AccessDenied: {path}")
        if "flaky" in path:
            raise RuntimeError("503 slow down")
        info = super().info(path, **kwargs)
        return {**info, "ETag": '"1"'} if "etag" in path else info


@pytest.fixture
def guarded():
    fsspec.register_implementation("guarded", _Guarded, clobber=True)
    root = f"guarded://{uuid.uuid4().hex}"
    for name in ("secret", "flaky", "etag"):
        fsspec.filesystem("memory").pipe_file(f"memory://{root[10:]}/{name}.rec", records(2))
    return root


def test_failing_stores_are_told_in_words(guarded):
    with pytest.raises(ShardReadError, match=r"secret\.rec: permission denied \(AccessDenied"):
        build([f"{guarded}/secret.rec"])
    with pytest.raises(ShardReadError, match=r"flaky\.rec: cannot be read: RuntimeError: 503 slow down"):
        build([f"{guarded}/flaky.rec"])


def test_an_etag_is_preferred_to_a_time(guarded):
    assert build([f"{guarded}/etag.rec"]).shard(0).version == 'etag:"1"'


def test_megatron_style_formats_get_the_file_beside_the_shard(tmp_path):
    class Beside(RecordFormat):
        sibling_suffix = ".idx"

        def scan(self, file, shard, *, block_bytes, sibling):
            assert file.read(4) == b"REC1"
            assert sibling.read() == b"index"
            return super().scan(file, shard, block_bytes=block_bytes)

    (tmp_path / "x.rec").write_bytes(records(2))
    with pytest.raises(ShardReadError, match=r"x\.idx: no such file"):
        build([str(tmp_path / "x.rec")], Beside())
    (tmp_path / "x.idx").write_bytes(b"index")
    assert build([str(tmp_path / "x.rec")], Beside()).num_samples == 2


def test_options_of_the_format_are_kept(tmp_path):
    (tmp_path / "x.bin").write_bytes(np.arange(9, dtype=np.uint16).tobytes())
    catalog = build_catalog([str(tmp_path / "x.bin")], TokensFormat(dtype="uint16", length=4))
    catalog.save(str(tmp_path / "x.catalog"))
    codec = Catalog.load(str(tmp_path / "x.catalog")).codec()
    assert isinstance(codec, TokensFormat)
    assert (codec.dtype, codec.length) == ("uint16", 4)
    with pytest.raises(ValueError, match="got 'records'"):
        Catalog("records", {}, 1, [{}], rows=catalog.rows).codec()


class Scaled(RecordFormat):
    """A user's own, with an option."""

    def __init__(self, scale, name="scaled"):
        super().__init__(name)
        self.scale = scale

    def options(self):
        return {"scale": self.scale}


def test_options_of_a_users_own_format_are_kept_and_its_codec_is_asked_for(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    catalog = build(shards, Scaled(3))
    catalog.save(default_catalog_path(shards, Scaled(3), BLOCK_BYTES))
    found = find_catalog(default_catalog_path(shards, Scaled(3), BLOCK_BYTES))
    assert_equal(found, catalog)
    assert found.options == {"scale": 3}
    assert find_catalog(default_catalog_path(shards, Scaled(4), BLOCK_BYTES)) is None
    with pytest.raises(ValueError, match="option 'scale' of format 'scaled' is of a class of your own"):
        found.codec()


@pytest.mark.parametrize("scale", [np.int64(3), (1, 2), {1}, float("nan")])
def test_an_option_that_no_catalog_can_keep_is_refused(shards, scale):
    for refuse in (build, default_catalog_path):
        with pytest.raises(ValueError, match="option 'scale' of format 'scaled' cannot be kept"):
            refuse(shards, Scaled(scale))


def test_an_option_of_a_class_that_bears_the_name_of_another_format_is_refused(shards):
    for refuse in (build, default_catalog_path):
        with pytest.raises(ValueError, match="option 'scale' of format 'tar' is none of its options"):
            refuse(shards, Scaled(3, "tar"))


def write_tar(folder):
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for key in range(3):
                member = tarfile.TarInfo(f"{number}{key}.txt")
                member.size = 5
                archive.addfile(member, io.BytesIO(b"hello"))


def write_parquet(folder):
    for number in range(2):
        table = pa.table({"x": np.arange(3, dtype=np.int32) + 3 * number})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=2)


def write_jsonl(folder):
    for number in range(2):
        (folder / f"{number}.jsonl").write_text('{"x": 1}\n' * 3)


@pytest.mark.parametrize("write", [write_tar, write_parquet, write_jsonl])
def test_shards_of_real_formats_decode_by_a_loaded_catalog(tmp_path, write):
    write(tmp_path)
    urls = expand(tmp_path)
    codec = resolve_format("auto", urls)
    build_catalog(urls, codec).save(str(tmp_path / "all.catalog"))
    catalog = Catalog.load(str(tmp_path / "all.catalog"))
    assert (catalog.num_samples, catalog.num_shards) == (6, 2)
    for number in range(catalog.num_blocks):
        block = catalog.block(number)
        with open(block.shard.url, "rb") as file:
            file.seek(block.offset)
            data = file.read(block.length)
        columns = catalog.codec().decode(block, memoryview(data), None)
        assert columns.keys() == catalog.schema.keys()
        assert {len(column) for column in columns.values()} == {block.num_samples}


# HTTP


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, with byte ranges and etags; `deny` answers 403, `whole` has no ranges."""

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        path = self.translate_path(self.path)
        if "deny" in path or not os.path.exists(path):
            self.send_error(403 if "deny" in path else 404)
            return
        with open(path, "rb") as file:
            content = file.read()
        first, last = 0, len(content) - 1
        if asked := self.headers.get("Range"):
            first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(content) - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Accept-Ranges", "none" if "whole" in path else "bytes")
        self.send_header("ETag", f'"{len(content)}"')
        self.end_headers()
        if with_body:
            self.wfile.write(content[first : last + 1])

    def log_message(self, *args):
        pass


@contextmanager
def serving(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Ranges, directory=folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_shards_behind_http_are_indexed_and_compared_by_etag(shards, tmp_path):
    pytest.importorskip("aiohttp")
    for name in ("deny", "whole"):
        (tmp_path / f"{name}.rec").write_bytes(records(1))
    with serving(tmp_path) as root:
        catalog = build(expand(f"{root}/part-{{0..2}}.rec"), RecordFormat())
        assert catalog.shard(0).version == 'etag:"64"'
        assert catalog.fingerprint() == build(shards, RecordFormat()).fingerprint()
        assert changes(catalog) == []
        os.unlink(shards[1])
        assert [(one.url, one.what) for one in changes(catalog)] == [(f"{root}/part-1.rec", "no such file")]
        with pytest.raises(ShardReadError, match=r"deny\.rec: permission denied \(403"):
            build([f"{root}/deny.rec"])
        with pytest.raises(ShardReadError, match="put 'simplecache::' before the URL"):
            build([f"{root}/whole.rec"])


# Schemas


def spec(dtype="int32", low=0, high=9, optional=False):
    return ColumnSpec("list", dtype, size_range=(low, high), optional=optional)


def test_another_type_names_both_shards_the_column_and_both_types(shards):
    with open(shards[2], "wb") as file:
        file.write(records(3, "aB"))
    schema = build(shards).schema
    with pytest.raises(CorruptShardError) as caught:
        schema.check(["a", "b"])
    assert caught.value.shard == shards[2]
    cure = "leave it out by columns=, or write it as one type in all shards"
    assert caught.value.reason == f"column 'b' is float32 here but int32 in {shards[0]}; {cure}"
    schema.check(["a"])


def test_a_format_that_cannot_widen_must_have_one_type():
    groups = [("one", {"x": spec()}), ("two", {"x": spec("int64")})]
    with pytest.raises(CorruptShardError, match="'x' is list of int64 here but list of int32 in one"):
        merge_schemas(groups, widens=False).check(["x"])
    assert merge_schemas(groups, widens=True) == {"x": spec("int64")}


@pytest.mark.parametrize(("first", "second"), [("ab", "a"), ("a", "ab")])
def test_a_missing_column_names_both_shards(shards, first, second):
    for url, names in ((shards[0], first), (shards[2], second)):
        with open(url, "wb") as file:
            file.write(records(3, names))
    has, lacks = (shards[0], shards[2]) if first == "ab" else (shards[2], shards[0])
    with pytest.raises(
        CorruptShardError, match=rf"column 'b' \(int32\) is in {has} but not in {lacks}"
    ) as caught:
        build(shards).schema.check(["b"])
    assert caught.value.shard == shards[2]


def test_a_tar_shard_may_lack_a_column(shards):
    for url, names in ((shards[0], "ab"), (shards[2], "ac")):
        with open(url, "wb") as file:
            file.write(records(3, names))

    class Members(RecordFormat):
        columns_are_extensions = True

    schema = build(shards, Members()).schema
    assert [(name, one.optional) for name, one in schema.items()] == [("a", False), ("b", True), ("c", True)]


def test_sizes_and_optional_columns_are_united():
    two = [{"x": spec(low=3)}, {"x": spec(high=12, optional=True)}]
    groups, numbers = group_schemas(two, together=False)
    assert (groups, numbers.tolist()) == ([{"x": spec(low=0, high=12, optional=True)}], [0, 0])
    unknown = ColumnSpec("list", "int32")
    assert group_schemas([{"x": spec()}, {"x": unknown}], together=False)[0] == [{"x": unknown}]
    assert merge_schemas([("one", two[0]), ("two", two[1])], widens=True) == groups[0]


# Saving and loading

counts = st.integers(0, 2**40)
in_a_block = st.integers(0, MOST_IN_BLOCK)
blobs = st.binary(max_size=9)


@st.composite
def catalogs(draw):
    """Any table of blocks that lie inside their shards."""
    shards, scans, with_index = [], [], draw(st.booleans())
    for number in range(draw(st.integers(1, 5))):
        size = draw(counts)
        ranges = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted), max_size=5))
        n = len(ranges)
        first = np.array([low for low, _ in ranges], np.int64)
        shards.append(Shard(f"s3://b/é{number}-{draw(st.text(max_size=3))}", size, draw(st.text(max_size=5))))
        scans.append(
            ShardScan(
                offset=first,
                length=np.array([high for _, high in ranges], np.int64) - first,
                nbytes=np.array(draw(st.lists(counts, min_size=n, max_size=n)), np.int64),
                num_samples=np.array(draw(st.lists(in_a_block, min_size=n, max_size=n)), np.int64),
                schema={},
                index=draw(st.lists(blobs, min_size=n, max_size=n)) if with_index else None,
                footer=draw(blobs),
            )
        )
    sizes = st.none() | st.tuples(counts, counts).map(sorted).map(tuple)
    specs = st.builds(
        ColumnSpec,
        kind=st.sampled_from(["fixed", "bytes"]),
        dtype=st.sampled_from(["uint8", "float32"]),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        size_range=sizes,
        optional=st.booleans(),
    )
    options = draw(
        st.fixed_dictionaries({}, optional={"dtype": st.just("uint16"), "length": st.integers(1, 9)})
    )
    schema = draw(st.dictionaries(st.text(max_size=5), specs, max_size=3))
    rows = arrow_rows(shards, scans, np.zeros(len(shards), np.int32))
    return Catalog("records", options, draw(counts), (schema,), rows=rows), shards, scans


@given(catalogs())
def test_a_loaded_catalog_equals_the_saved_one(tmp_path_factory, drawn):
    catalog, shards, scans = drawn
    path = str(tmp_path_factory.getbasetemp() / "x.catalog")
    catalog.save(path)
    loaded = Catalog.load(path)
    assert_equal(loaded, catalog)
    number = 0
    for s, (shard, scan) in enumerate(zip(shards, scans, strict=True)):
        assert loaded.shard(s) == shard
        for i in range(len(scan.offset)):
            block = loaded.block(number)
            assert (block.shard, block.number_in_shard, block.offset) == (shard, i, scan.offset[i])
            assert (block.length, block.nbytes) == (scan.length[i], scan.nbytes[i])
            assert bytes(block.footer) == scan.footer
            assert bytes(block.index) == (scan.index[i] if scan.index else b"")
            assert block.first_in_shard == scan.num_samples[:i].sum()
            assert block.first_sample == loaded.blocks.num_samples[:number].sum()
            number += 1
    assert loaded.num_blocks == number


def test_checksums_are_kept_with_the_blocks_and_change_no_fingerprint(shards, tmp_path):
    plain = build(shards)
    assert plain.checksums is None
    assert plain.block(0).checksum is None
    given = np.arange(plain.num_blocks, dtype=np.uint32) + 2**31
    catalog = plain.with_checksums(given).with_checksums(given + np.uint32(1))
    catalog.save(str(tmp_path / "x.catalog"))
    loaded = Catalog.load(str(tmp_path / "x.catalog"))
    assert [loaded.block(i).checksum for i in range(loaded.num_blocks)] == (given + 1).tolist()
    assert loaded.fingerprint() == plain.fingerprint()
    with pytest.raises(ValueError, match="checksums must have shape"):
        plain.with_checksums(given[1:])


def test_a_catalog_saved_in_a_store_loads_from_there(shards):
    url = f"memory://{uuid.uuid4().hex}/x.catalog"
    catalog = build(shards)
    catalog.save(url)
    assert_equal(Catalog.load(url), catalog)


def test_saving_leaves_no_other_file_and_makes_the_folder(shards, tmp_path):
    path = tmp_path / "new" / "x.catalog"
    catalog = build(shards)
    catalog.save(str(path))
    catalog.save(str(path))
    assert os.listdir(path.parent) == ["x.catalog"]


def test_a_failed_save_keeps_the_old_file(shards, tmp_path):
    path = tmp_path / "new" / "x.catalog"
    catalog = build(shards)
    catalog.save(str(path))

    def fail(event, arguments):
        if event == "os.rename":
            raise OSError("disk full")

    def save_in_vain():
        on_file_events(fail)
        with pytest.raises(ShardReadError, match="disk full"):
            catalog.save(str(path))

    assert exit_code_in_child(save_in_vain) == 0
    assert os.listdir(path.parent) == ["x.catalog"]
    assert_equal(Catalog.load(str(path)), catalog)


def test_a_catalog_beside_its_shards_moves_with_them(shards, tmp_path):
    catalog = build(shards)
    catalog.save(str(tmp_path / "all.catalog"))
    moved = tmp_path.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    loaded = Catalog.load(str(moved / "all.catalog"))
    assert loaded.urls == [str(moved / f"part-{n}.rec") for n in range(3)]
    assert loaded.fingerprint() == catalog.fingerprint()
    assert changes(loaded) == []


def test_a_local_catalog_is_mapped_and_not_read(tmp_path):
    """Blobs of 64 MiB load without memory for them."""
    scan = ShardScan(*(np.zeros(64, np.int64) for _ in range(4)), schema={}, index=[bytes(1 << 20)] * 64)
    path = str(tmp_path / "x.catalog")
    Catalog(
        "records", {}, 1, [{}], rows=arrow_rows([Shard("s3://b/x", 0, "")], [scan], np.zeros(1, np.int32))
    ).save(path)
    before = pa.total_allocated_bytes()
    catalog = Catalog.load(path)
    assert len(catalog.block(63).index) == 1 << 20
    assert pa.total_allocated_bytes() - before < 1 << 16


def test_a_pickled_catalog_is_the_same(shards):
    catalog = build(shards)
    assert_equal(pickle.loads(pickle.dumps(catalog)), catalog)


@pytest.mark.parametrize("damage", ["empty", "text", "arrow", "truncated", "version", "outside"])
def test_a_damaged_catalog_says_so(shards, tmp_path, damage):
    path = tmp_path / "x.catalog"
    catalog = build(shards)
    if damage == "outside":
        rows = catalog.rows.set_column(1, "size", pa.array([1, 1, 1]))
        catalog = Catalog("records", {}, 1, [{}], rows=rows)
    catalog.save(str(path))
    if damage == "version":
        rows, facts, _ = read_table(str(path), None)
        write_table(str(path), rows, {**facts, "version": 99}, None)
    content = path.read_bytes()
    if damage == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("x", pa.int8())])):
            pass
    elif damage not in ("version", "outside"):
        path.write_bytes({"empty": b"", "text": b"hello", "truncated": content[: len(content) // 2]}[damage])
    reason = {"version": "version 99, and this release reads 4", "outside": "outside its shard"}
    error = OldCatalogError if damage == "version" else CorruptShardError
    with pytest.raises(error, match=reason.get(damage, "no.? a catalog, or is damaged")):
        Catalog.load(str(path))


@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_changed_byte_of_a_catalog_raises_or_does_no_harm(tmp_path_factory, place, value):
    folder = tmp_path_factory.getbasetemp()
    (folder / "x.rec").write_bytes(records(7))
    build([str(folder / "x.rec")]).save(str(folder / "y.catalog"))
    content = bytearray((folder / "y.catalog").read_bytes())
    content[int(place * len(content))] = value
    (folder / "y.catalog").write_bytes(content)
    try:
        catalog = Catalog.load(str(folder / "y.catalog"))
        blocks = [catalog.block(number) for number in range(catalog.num_blocks)]
    except CorruptShardError:
        return
    for block in blocks:
        assert 0 <= block.offset <= block.offset + block.length <= block.shard.size


# The fingerprint


def test_the_fingerprint_forgets_where_and_when_but_not_what(shards, tmp_path):
    catalog = build(shards)
    copies = []
    for url in shards:
        copies.append(str(tmp_path / "copy" / os.path.basename(url)))
        os.makedirs(tmp_path / "copy", exist_ok=True)
        with open(url, "rb") as old, open(copies[-1], "wb") as new:
            new.write(old.read())
    os.utime(copies[0], (1, 1))
    assert build(copies).fingerprint() == catalog.fingerprint()
    assert len(catalog.fingerprint()) == 16
    others = [
        build(shards[::-1]),
        build(shards[:2]),
        build_catalog(shards, RecordFormat(), block_bytes=2 * BLOCK_BYTES),
        build(shards, RecordFormat("tar")),
    ]
    assert len({other.fingerprint() for other in [catalog, *others]}) == 5


def test_the_fingerprint_is_the_same_in_every_release(shards):
    assert build(shards).fingerprint() == "1fa8986610922d53"


# What changed


def test_changed_and_missing_shards_are_told_in_words(shards):
    catalog = build(shards)
    assert changes(catalog) == []
    with open(shards[0], "ab") as file:
        file.write(b"more")
    os.utime(shards[1], ns=(5, 5))
    os.unlink(shards[2])
    then = catalog.shard(1).version.removeprefix("mtime:")
    assert [(one.url, one.what) for one in changes(catalog)] == [
        (shards[0], "its size is 68 bytes; it was 64 when it was indexed"),
        (shards[1], f"its modification time is 5; it was {then} when it was indexed"),
        (shards[2], "no such file"),
    ]
    assert "3 of 3 shards changed since they were indexed: part-0.rec: its size" in changes_text(
        changes(catalog), 3
    )


def test_a_long_list_of_changes_is_cut(shards):
    catalog = build(shards)
    os.unlink(shards[0])
    text = changes_text(changes(catalog) * 5, 9)
    assert text.startswith("5 of 9 shards changed")
    assert text.endswith("; and 2 more")


def test_a_rewritten_object_is_noticed_though_its_size_is_the_same():
    url = f"memory://{uuid.uuid4().hex}/x.rec"
    fs = fsspec.filesystem("memory")
    fs.pipe_file(url, records(2))
    catalog = build([url])
    fs.store[fs.info(url)["name"]].created += timedelta(microseconds=1)
    assert "modification time" in changes(catalog)[0].what


def test_versions_of_different_kinds_are_not_compared():
    shard = Shard("x", 5, "etag:1")
    assert check_shard(shard, {"size": 5, "mtime_ns": 3}) is None
    assert check_shard(shard, {"size": 5}) is None
    assert check_shard(shard, {"size": None, "ETag": "1"}) is None
    assert check_shard(shard, {"size": 5, "etag": "2"}) == "its etag is 2; it was 1 when it was indexed"
    assert "its size is 6" in (check_shard(shard, {"size": 6, "etag": "1"}) or "")
    assert check_shard(Shard("x", 5, ""), {"size": 5, "etag": "2"}) is None


@pytest.mark.parametrize(
    ("info", "version"),
    [
        ({"ETag": '"a"', "LastModified": 1}, 'etag:"a"'),
        ({"e_tag": None, "last_modified": datetime(1970, 1, 1, 0, 0, 1, 7, UTC)}, "mtime:1000007000"),
        ({"created": datetime(1970, 1, 1, 1, 0, 1, tzinfo=timezone(timedelta(hours=1)))}, "mtime:1000000000"),
        ({"mtime": 1.5}, "mtime:1500000000"),
        ({"mtime": datetime(1970, 1, 2)}, "mtime:86400000000000"),
        ({"updated": "2024-01-01T00:00:00Z"}, "mtime:2024-01-01T00:00:00Z"),
        ({"size": 3}, ""),
    ],
)
def test_the_version_is_the_etag_or_else_the_time(info, version):
    assert version_of(info) == version


# Where catalogs are kept


def test_a_kept_catalog_is_found_again_by_all_that_shapes_it(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    codec = RecordFormat(blobs=True)
    assert find_catalog(default_catalog_path(shards, codec, BLOCK_BYTES)) is None
    catalog = build(shards)
    path = default_catalog_path(shards, codec, BLOCK_BYTES)
    assert path.startswith(str(tmp_path / "cache" / "dataflow" / "catalogs"))
    assert is_catalog(path)
    assert not is_catalog([path])
    catalog.save(path)
    found = find_catalog(default_catalog_path(shards, codec, BLOCK_BYTES))
    assert found is not None
    assert_equal(found, catalog)
    assert find_catalog(default_catalog_path(shards[:2], codec, BLOCK_BYTES)) is None
    assert find_catalog(default_catalog_path(shards, codec)) is None
    assert find_catalog(default_catalog_path(shards, RecordFormat("other"), BLOCK_BYTES)) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_catalog_path(shards, codec).startswith("/home/someone/.cache/dataflow/catalogs/")


def test_one_look_tells_that_local_shards_are_as_they_were(shards):
    catalog = build(shards)
    assert catalog.is_unchanged_here()
    os.utime(shards[1], ns=(0, 0))
    assert not catalog.is_unchanged_here()
    assert [change.url for change in changes(catalog)] == [shards[1]]
    os.unlink(shards[1])
    assert not catalog.is_unchanged_here()


def test_shards_elsewhere_are_not_looked_for_here():
    url = f"memory://{uuid.uuid4().hex}/x.rec"
    fsspec.filesystem("memory").pipe_file(url, records(2))
    assert not build([url]).is_unchanged_here()


def test_a_damaged_kept_catalog_counts_as_none(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_catalog_path(shards, RecordFormat())
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as file:
        file.write(b"junk")
    assert find_catalog(default_catalog_path(shards, RecordFormat())) is None
