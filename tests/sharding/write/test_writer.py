"""`ShardWriter`: what webdataset and pyarrow read back, and what is left behind when something fails."""

from __future__ import annotations

import errno
import gc
import io
import json
import pickle
import re
import resource
import tarfile
import tempfile
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset as wds
from forked_kit import limited
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from hypothesis import given, strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from sharding.compression import open_decompressed
from sharding.errors import SampleError, ShardWriteError
from sharding.formats.tar.samples import split_name
from sharding.write.writer import ShardWriter, WrittenShard

SUFFIXES = ["tar", "tar.gz", "tgz", "tar.zst", "parquet"]


def samples(count: int, size: int = 100) -> list[dict[str, Any]]:
    return [{"__key__": f"a/{i:05d}", "bin": bytes([i % 256]) * size, "cls": i} for i in range(count)]


def write_all(
    pattern: str, items: list[dict[str, Any]], *, then: type[BaseException] | None = None, **options: Any
) -> ShardWriter:
    with ShardWriter(pattern, **options) as writer:
        for sample in items:
            writer.write(sample)
        if then is not None:
            raise then
    return writer


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_back(url: str) -> list[dict[str, Any]]:
    """Samples without URLs, as webdataset or pyarrow reads them."""
    with fsspec.open(url, "rb") as file:
        if url.endswith("parquet"):
            return pq.read_table(pa.BufferReader(file.read())).to_pylist()  # type: ignore[no-any-return]
        plain = file if url.endswith(".tar") else open_decompressed(file, url)
        found = list(group_by_keys(tar_file_expander([{"url": url, "stream": io.BytesIO(plain.read())}])))
    return [{k: v for k, v in sample.items() if k != "__url__"} for sample in found]


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


# What is written


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_shards_hold_the_samples_in_order(tmp_path: Path, suffix: str) -> None:
    with ShardWriter(f"{tmp_path}/t-%06d.{suffix}", max_count=4) as writer:
        for sample in samples(10):
            writer.write(sample)
    found = [sample for shard in writer.shards for sample in read_back(shard.url)]
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in samples(10)]
    assert [sample["bin"] for sample in found] == [sample["bin"] for sample in samples(10)]
    assert [int(sample["cls"]) for sample in found] == list(range(10))
    assert names(tmp_path) == [f"t-{i:06d}.{suffix}" for i in range(3)]


def test_shards_are_listed_with_samples_and_bytes(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar", max_count=2, start=7) as writer:
        for sample in samples(3):
            writer.write(sample)
        assert [shard.num_samples for shard in writer.shards] == [2]
    sizes = [(tmp_path / name).stat().st_size for name in ("007.tar", "008.tar")]
    assert writer.shards == (
        WrittenShard(f"{tmp_path}/007.tar", 2, sizes[0]),
        WrittenShard(f"{tmp_path}/008.tar", 1, sizes[1]),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_second_run_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for run in ("one", "two"):
        with ShardWriter(f"{tmp_path}/{run}/%d.{suffix}", max_count=5) as writer:
            for sample in samples(8):
                writer.write(sample)
    for i in range(2):
        one, two = (tmp_path / run / f"{i}.{suffix}" for run in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        if "gz" in suffix:
            assert one.read_bytes()[3:8] == bytes(5)  # no name, no time


def test_members_have_no_times_and_no_owners(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/a.tar") as writer:
        writer.write(samples(1)[0])
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, 0, "", "")}
        assert {tuple(m.pax_headers) for m in tar} == {()}


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="./\0"), min_size=1, max_size=140),
            st.sampled_from([0, 1, 511, 512, 513, 9_000, 20_000]),
        ),
        unique_by=itemgetter(0),
        max_size=6,
    )
)
def test_a_tar_has_the_bytes_that_webdataset_writes(members: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own, theirs = f"{folder}/own.tar", f"{folder}/theirs.tar"
        one = wds.TarWriter(theirs, encoder=False, mtime=0, user="", group="", mode=0o644)
        with ShardWriter(own) as writer, one as other:
            for key, size in members:
                sample = {"__key__": key, "b.bin": b"x" * size, "a": b"y"}
                try:
                    writer.write(sample)
                except SampleError:  # a name that no header holds, or that would be read as another
                    continue
                other.write(sample)
        if writer.shards:
            assert Path(own).read_bytes() == Path(theirs).read_bytes()


def test_values_are_encoded_by_extension_as_webdataset_does(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    sample = {
        "__key__": "k",
        "txt": "é",
        "json": {"a": [1]},
        "cls": 3,
        "npy": array,
        "x.npy": array,
        "b": b"\0",
    }
    with ShardWriter(f"{tmp_path}/a.tar") as writer:
        writer.write({**sample, "__url__": "not written"})
    (decoded,) = wds.filters.decode()(read_back(f"{tmp_path}/a.tar"))
    assert (decoded["txt"], decoded["json"], decoded["cls"], decoded["b"]) == ("é", {"a": [1]}, 3, b"\0")
    np.testing.assert_array_equal(decoded["npy"], array)
    np.testing.assert_array_equal(np.load(io.BytesIO(read_back(f"{tmp_path}/a.tar")[0]["x.npy"])), array)


@pytest.mark.parametrize("suffix", ["tar", "parquet"])
def test_a_shard_ends_when_it_has_its_bytes(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    with ShardWriter(f"{tmp_path}/%d.{suffix}", max_bytes=200_000, row_group_size=5) as writer:
        for i in range(100):
            writer.write({"__key__": f"{i}", "bin": rng.bytes(10_000)})
    sizes = [shard.num_bytes for shard in writer.shards]
    assert len(sizes) >= 5
    assert all(200_000 <= size < 290_000 for size in sizes[:-1])


def test_parquet_row_groups_have_their_size_and_absent_values_are_null(tmp_path: Path) -> None:
    rows = [{"x": i, "tokens": np.arange(i)} | ({"text": "t"} if i % 2 else {}) for i in range(25)]
    with ShardWriter(f"{tmp_path}/a.parquet", row_group_size=10) as writer:
        for row in rows:
            writer.write(row)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [10, 10, 5]
    assert file.read().column("text").to_pylist() == [None, "t"] * 12 + [None]
    assert file.read().column("tokens").to_pylist() == [list(range(i)) for i in range(25)]
    file.close()


def test_parquet_columns_of_more_bytes_than_an_array_holds_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharding.arrow_arrays.MOST", 20)
    rows = [{"text": f"text {i}", "data": bytes(5)} for i in range(6)]
    write_all(f"{tmp_path}/a.parquet", rows)
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == rows


def test_a_given_schema_is_used(tmp_path: Path) -> None:
    schema = pa.schema({"x": pa.float32(), "y": pa.list_(pa.int32(), 2)})
    with ShardWriter(f"{tmp_path}/a.parquet", schema=schema) as writer:
        writer.write({"x": 1, "y": [1, 2]})
    assert pq.read_schema(tmp_path / "a.parquet").equals(schema)


fields = st.dictionaries(
    st.text("abz.09_é", min_size=1, max_size=6),
    st.binary(max_size=50),
    min_size=1,
    max_size=3,
)
keys = st.text("ab/_.é\n ", min_size=1, max_size=10) | st.just("k" * 150)


@given(st.lists(st.tuples(keys, fields), max_size=5))
def test_what_is_accepted_is_read_back_as_it_was(pairs: list[tuple[str, dict[str, bytes]]]) -> None:
    MemoryFileSystem.store.clear()
    accepted = []
    with ShardWriter("memory://w/a.tar") as writer:
        for key, values in pairs:
            try:
                writer.write({"__key__": key, **values})
            except SampleError:
                continue
            written = {name: value for name, value in values.items() if not name.startswith("_")}
            accepted.append({"__key__": key, **written})
    assert ([] if not accepted else read_back("memory://w/a.tar")) == accepted
    assert len(writer.shards) == bool(accepted)


# What is refused


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"txt": "no key"}, "__key__"),
        ({"__key__": 3, "txt": ""}, "__key__"),
        ({"__key__": "k"}, "field"),
        ({"__key__": "k", "_meta": "x"}, "field"),
        ({"__key__": "image.v1", "txt": ""}, "not be read back as"),
        ({"__key__": "__meta__/k", "txt": ""}, "not be read back as"),
        ({"__key__": "k\0", "txt": ""}, "not be read back as"),
        ({"__key__": "k", "a/b": ""}, "not be read back as"),
        ({"__key__": "k", "": ""}, "not be read back as"),
        ({"__key__": "k", "JPG": b""}, "not be read back as"),
        (
            {"__key__": "k", "unheardof": 3},
            "'unheardof' of type int cannot be encoded: no handler .*; give its bytes",
        ),
        ({"__key__": "k", "txt": "t", "npy": torch.zeros(2)}, "'npy' of type Tensor cannot be encoded"),
        (
            {"__key__": "k", "cls": torch.tensor(3)},
            "'cls' would be written as 'tensor\\(3\\)', which is no int64",
        ),
        ({"__key__": "k", "left.index": None}, "'None', which is no int64; give an int"),
        ({"__key__": "k", "cls": 3.0}, "'3.0', which is no int64"),
        ({"__key__": "k", "cls": 1 << 63}, "'9223372036854775808', which is no int64"),
        ({"__key__": "k", "npy": np.ma.array([1, 2], mask=[0, 1])}, "a masked array .*: fill it"),
        ({"__key__": "k", "pickle": {}}, "allow_pickle"),
        ({"__key__": "k", "pkl": b"x"}, "allow_pickle"),
        ({"__key__": "k", "model.pth": b"x"}, "allow_pickle"),
        ({"__key__": "k", "pickle.gz": {}}, "allow_pickle"),
        ({"__key__": "k", "npy": np.array([None])}, "allow_pickle"),
        ({"__key__": "k", "npz": {"a": np.array([None])}}, "allow_pickle"),
    ],
)
def test_a_sample_that_would_be_read_back_otherwise_is_refused(
    tmp_path: Path, sample: dict[str, Any], says: str
) -> None:
    with ShardWriter(f"{tmp_path}/a.tar") as writer:
        with pytest.raises(SampleError, match=says) as caught:
            writer.write(sample)
        assert (caught.value.shard, caught.value.stage) == (f"{tmp_path}/a.tar", "write")
    assert names(tmp_path) == []


def test_pickles_are_written_when_allowed(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/a.tar", allow_pickle=True) as writer:
        writer.write({"__key__": "k", "pyd": {"a": 1}})
    assert read_back(f"{tmp_path}/a.tar")[0]["pyd"].startswith(b"\x80")


def test_one_key_twice_in_a_row_is_refused_within_a_shard_only(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/%d.tar", max_count=2) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        with pytest.raises(SampleError, match="one key"):
            writer.write({"__key__": "a", "cls": 1})
        writer.write({"__key__": "b", "txt": "2"})
        writer.write({"__key__": "b", "txt": "3"})
    assert [shard.num_samples for shard in writer.shards] == [2, 1]


def test_parquet_values_of_another_type_are_refused_with_their_column(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="column 'x'"):
        write_all(f"{tmp_path}/a.parquet", [{"x": x} for x in (1, 2, 3, "four")], row_group_size=2)
    with pytest.raises(SampleError, match="lacks: y"):
        write_all(f"{tmp_path}/a.parquet", [{"x": 1}, {"x": 1, "y": 2}], row_group_size=1)
    assert names(tmp_path) == []


def test_the_only_shard_is_not_begun_again(tmp_path: Path) -> None:
    writer = ShardWriter(f"{tmp_path}/a.tar", overwrite=True)
    writer.write(samples(1)[0])
    writer.close()
    with pytest.raises(ValueError, match="only shard is finished"):
        writer.write(samples(1)[0])


@pytest.mark.parametrize("place", ["{tmp_path}/%d.tar", "memory://w/%d.tar"])
def test_shards_that_exist_are_replaced_only_when_allowed(
    tmp_path: Path, memory: MemoryFileSystem, place: str
) -> None:
    pattern = place.format(tmp_path=tmp_path)
    with ShardWriter(pattern, max_count=1) as writer:
        writer.write(samples(1)[0])
    with pytest.raises(FileExistsError, match="overwrite=True"), ShardWriter(pattern) as writer:
        writer.write(samples(2)[1])
    assert read_back(pattern % 0)[0]["__key__"] == "a/00000"
    with ShardWriter(pattern, overwrite=True) as writer:
        writer.write(samples(2)[1])
    assert read_back(pattern % 0)[0]["__key__"] == "a/00001"


def test_a_shard_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    writer = ShardWriter(f"{tmp_path}/a.tar")
    writer.write(samples(1)[0])
    (tmp_path / "a.tar").write_bytes(b"by another writer")
    with pytest.raises(FileExistsError):
        writer.close()
    assert names(tmp_path) == ["a.tar"]
    assert (tmp_path / "a.tar").read_bytes() == b"by another writer"


# Complete or not there


@pytest.mark.one_in(3)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_exception_removes_the_shard_in_progress_and_keeps_the_finished(
    tmp_path: Path, suffix: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_all(
            f"{tmp_path}/%d.{suffix}",
            samples(25, size=5000),
            then=KeyboardInterrupt,
            max_count=10,
            row_group_size=2,
        )
    gc.collect()  # what streams flush when they are collected must not bring the shard back
    assert names(tmp_path) == [f"0.{suffix}", f"1.{suffix}"]
    assert len(read_back(f"{tmp_path}/1.{suffix}")) == 10


def test_a_shard_has_no_final_name_while_it_is_written(tmp_path: Path, memory: MemoryFileSystem) -> None:
    for pattern in (f"{tmp_path}/a.tar", "memory://w/a.tar"):
        with ShardWriter(pattern) as writer:
            for sample in samples(50, size=1000):
                writer.write(sample)
            assert not fsspec.open(pattern).fs.exists(pattern)
        assert len(read_back(pattern)) == 50
    assert list(memory.find("/w")) == ["/w/a.tar"]


def test_remote_shards_in_progress_are_removed_as_well(memory: MemoryFileSystem) -> None:
    with pytest.raises(ZeroDivisionError):
        write_all("memory://w/%d.tar", samples(1), then=ZeroDivisionError)
    assert memory.find("/") == []


class _Upload(AbstractBufferedFile):
    """Shows its bytes when closed, as object stores do."""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts = [*getattr(self, "parts", []), self.buffer.getvalue()]
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def _initiate_upload(self) -> None:
        pass

    def discard(self) -> None:
        self.fs.discarded.append(self.path)


class _ObjectStore(AbstractFileSystem):
    protocol = ("s3", "fakes3")
    objects: dict[str, bytes] = {}  # noqa: RUF012 - one store for all instances, as in MemoryFileSystem
    discarded: list[str] = []  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return (
            _Upload(self, path, mode, block_size=5 << 10) if mode == "wb" else io.BytesIO(self.objects[path])
        )

    def exists(self, path: str, **kwargs: Any) -> bool:
        return self._strip_protocol(path) in self.objects

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a rename in an object store is a copy")


@pytest.fixture
def object_store() -> type[_ObjectStore]:
    fsspec.register_implementation("fakes3", _ObjectStore, clobber=True)
    _ObjectStore.objects.clear()
    _ObjectStore.discarded.clear()
    return _ObjectStore


@pytest.mark.one_in(3)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_object_stores_get_whole_uploads_or_none(object_store: type[_ObjectStore], suffix: str) -> None:
    with ShardWriter(f"fakes3://b/a.{suffix}") as writer:
        for sample in samples(60, size=500):
            writer.write(sample)
        assert object_store.objects == {}
    assert list(object_store.objects) == [f"b/a.{suffix}"]
    with pytest.raises(ZeroDivisionError):
        write_all(f"fakes3://b/b.{suffix}", samples(60, size=500), then=ZeroDivisionError, row_group_size=7)
    gc.collect()
    assert list(object_store.objects) == [f"b/a.{suffix}"]
    assert object_store.discarded == [f"b/b.{suffix}"]


def test_a_file_that_the_system_does_not_take_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(f"{tmp_path}/a.tar")
    writer.write(samples(1)[0])
    with limited(resource.RLIMIT_FSIZE, 100), pytest.raises(OSError, match="File too large"):
        writer.close()
    assert names(tmp_path) == []
    assert writer.shards == ()


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "parquet", "arrow", "jsonl", "jsonl.zst"])
def test_a_full_disk_names_path_space_and_what_is_whole(tmp_path: Path, suffix: str) -> None:
    writer = ShardWriter(f"{tmp_path}/%d.{suffix}", max_count=2, row_group_size=1)
    rng = np.random.default_rng(0)
    rows = [{"__key__": f"{i}", "x.bin": rng.bytes(3000).hex().encode()} for i in range(6)]
    if suffix.startswith("jsonl"):
        rows = [{**row, "x.bin": row["x.bin"].decode()} for row in rows]
    writer.write(rows[0])
    writer.write(rows[1])
    writer.close()

    def write_rest() -> None:
        for row in rows[2:]:
            writer.write(row)
        writer.close()

    with limited(resource.RLIMIT_FSIZE, 4000), pytest.raises(ShardWriteError) as caught:
        write_rest()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.errno, error.filename, error.stage) == (errno.EFBIG, f"{tmp_path}/1.{suffix}", "write")
    place = re.escape(f"{tmp_path}/0.{suffix}")
    assert re.match(
        r"File too large: this shard, of \d samples and [\d,]+ bytes so far, is removed; [\d,]+ bytes are "
        rf"free; 1 shards are whole, the last is {place}; free some space and write its samples again, in "
        r"another run with start=1",
        error.reason,
    )
    assert names(tmp_path) == [f"0.{suffix}"]
    writer.write(rows[0])  # once there is room
    writer.close()
    assert names(tmp_path) == [f"0.{suffix}", f"1.{suffix}"]


def test_a_writer_without_samples_writes_no_shard(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/%d.tar") as writer:
        pass
    assert (writer.shards, names(tmp_path)) == ((), [])


def test_names_are_split_as_webdataset_splits_them() -> None:
    assert split_name(b"a/b.c.d") == (b"a/b", b"c.d")
    assert split_name(b"__meta__") is split_name(b"a.b/c") is None


def test_a_refused_sample_leaves_the_others(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/a.tar") as writer:
        writer.write({"__key__": "a", "json": 1})
        with pytest.raises(SampleError) as caught:
            writer.write({"__key__": "b", "json": {1, 2}})
        assert isinstance(caught.value.__cause__, TypeError)
        writer.write({"__key__": "c", "json": 2})
    assert [json.loads(sample["json"]) for sample in read_back(f"{tmp_path}/a.tar")] == [1, 2]


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
IN_DICTS: dict[str, Any] = {}
IN_DICTS["a"] = [{"b": IN_DICTS}]


def nested(depth: int) -> Any:
    """Lists in one another."""
    return [nested(depth - 1)] if depth else 1


ENDLESS = "column 'json':?.* holds itself, or is nested over 100 deep"
NO_ROWS: list[tuple[dict[Any, Any], str]] = [
    ({"json": HOLDS_ITSELF}, ENDLESS),
    ({"json": {"a": (HOLDS_ITSELF, HOLDS_ITSELF)}}, ENDLESS),
    ({"json": nested(101)}, ENDLESS),
    ({"json": IN_DICTS}, ENDLESS),
    ({"json": [IN_DICTS, IN_DICTS]}, ENDLESS),
    ({"json": [1], 1: "text"}, "a column is called 1, of type int: names are text"),
]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "mds"])
def test_lists_may_be_a_hundred_deep(tmp_path: Path, ending: str) -> None:
    with ShardWriter(f"{tmp_path}/0.{ending}") as shards:
        shards.write({"json": nested(100)})
    assert [shard.num_samples for shard in shards.shards] == [1]


@pytest.mark.parametrize(("bad", "words"), NO_ROWS)
def test_a_table_names_the_row_that_has_no_end_or_no_name_when_its_group_is_written(
    tmp_path: Path, bad: dict[Any, Any], words: str
) -> None:
    rows = [{"__key__": "first", "json": [1]}, {"__key__": "second", **bad}]
    for path in (f"{tmp_path}/0.parquet", f"{tmp_path}/0.arrow"):
        with pytest.raises(SampleError, match=words) as caught, ShardWriter(path) as shards:
            shards.write_many(rows)
        assert caught.value.key == "second"


@pytest.mark.parametrize("ending", ["tar", "jsonl", "mds"])
@pytest.mark.parametrize(("bad", "words"), NO_ROWS)
def test_what_holds_itself_or_has_no_name_is_an_error_of_its_sample(
    tmp_path: Path, ending: str, bad: dict[Any, Any], words: str
) -> None:
    with ShardWriter(f"{tmp_path}/0.{ending}") as shards:
        shards.write({"__key__": "first", "json": "[1]"})
        with pytest.raises(SampleError, match=words) as caught:
            shards.write({"__key__": "second", **bad})
        with pytest.raises(SampleError, match=words) as of_many:
            shards.write_many([{"__key__": "2", **bad}] if ending == "tar" else [{"json": "[2]"}, bad])
    assert (caught.value.key, of_many.value.key) == ("second", "2")
    assert [shard.num_samples for shard in shards.shards] == [1]
