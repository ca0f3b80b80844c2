"""MDS shards are read as MosaicML Streaming reads them, and damaged ones are errors that say what is wrong.

The fixtures were written by Streaming, and `expected.json` is what its reader gave (`tests/fixtures`).
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from formats.owners_kit import FIXTURES, assert_delivers, assert_equal, expected, samples_of
from formats.streaming_kit import COMPRESSIONS, mds_shard, write_mds
from http_kit import RangeServer, serving

from dataflow import DataflowError, DataLoader, ShardedDataset, Shuffle
from sharding.blocks import Shard
from sharding.errors import CorruptShardError
from sharding.formats.streaming.mds import MdsFormat

MDS = FIXTURES / "mds"
COMPRESSED = ("zstd", "gz", "snappy", "br", "bz2")
NUMBERS = {"a": ("int", 8), "b": ("bytes", None)}


@pytest.fixture(autouse=True)
def no_catalogs_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs of fixtures that lay there earlier would be compared with these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["all", "numbers", "single", "tokens", *COMPRESSED, "merged"])
def test_values_are_those_that_streaming_reads(name: str) -> None:
    for block_bytes in (1, 2 << 20) if name in ("all", "numbers", "single") else (2 << 20,):
        assert_delivers(ShardedDataset(str(MDS / name), block_bytes=block_bytes), expected(MDS, name))


@pytest.mark.parametrize("name", ["all", "single", "zstd"])
def test_each_sample_is_there_by_its_number(name: str) -> None:
    dataset, told = ShardedDataset(str(MDS / name)), expected(MDS, name)
    for number in (len(told) - 1, 0, len(told) // 2):
        sample = dataset[number]
        for column, value in told[number].items():
            assert_equal(sample[column], value, column)


@pytest.mark.parametrize("name", ["all", "single", "br"])
def test_a_full_shuffle_delivers_each_sample_once(name: str) -> None:
    with DataLoader(ShardedDataset(str(MDS / name)), 3, shuffle=Shuffle("full"), seed=1) as loader:
        rows = [row for batch in loader for row in samples_of(batch)]
    column = "int" if name == "all" else "label"
    assert sorted(int(row[column]) for row in rows) == sorted(one[column] for one in expected(MDS, name))


@pytest.mark.parametrize("source", ["{}", "{}/index.json", "{}/*.mds", "{}/shard.{{00000..00001}}.mds"])
def test_a_folder_its_index_and_its_shards_are_the_same_dataset(source: str) -> None:
    assert_delivers(ShardedDataset(source.format(MDS / "single")), expected(MDS, "single"))


def test_so_are_those_of_a_store() -> None:
    files = fsspec.filesystem("memory")
    for path in (MDS / "merged").rglob("*.*"):
        files.pipe(f"/merged/{path.relative_to(MDS / 'merged')}", path.read_bytes())
    for source in ("memory://merged", "memory://merged/index.json", "memory://merged/*/*.mds"):
        dataset = ShardedDataset(source)
        with DataLoader(dataset, 40) as loader:
            (batch,) = loader
        assert sorted(batch["label"].tolist()) == [*range(24)]


@pytest.mark.parametrize("query", ["", "?signature=abc"])
def test_over_http_its_index_names_the_shards(query: str) -> None:
    with serving(RangeServer(MDS)) as server:
        server.may_read = lambda asked, _: asked == query[1:]
        for name in ("zstd", "merged"):
            assert_delivers(ShardedDataset(f"{server.url}/{name}/index.json{query}"), expected(MDS, name))
        server.may_read = lambda asked, _: True  # who may not read the folder is told that
        with pytest.raises(ValueError, match=r"HTTP servers cannot be listed.* or the index\.json of MDS"):
            ShardedDataset(f"{server.url}/single/")


def test_of_a_shard_over_http_only_its_head_is_read_to_index_it(tmp_path: Path) -> None:
    write_mds(tmp_path, NUMBERS, [[{"a": bytes(8), "b": bytes(1 << 20)} for _ in range(9)]])
    with serving(RangeServer(tmp_path)) as server:
        assert len(ShardedDataset(f"{server.url}/index.json")) == 9
        read = sum(one.nbytes for one in server.asked if one.name.endswith(".mds"))
    assert read < 4 << 20  # of 9 MiB


class _Counted(io.BytesIO):
    """A file that counts what is read of it."""

    nbytes = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.nbytes += len(data)
        return data


def test_of_a_first_sample_only_what_tells_dimensions_of_arrays_is_read() -> None:
    columns = {"a": ("bytes", None), "b": ("ndarray", None), "c": ("ndarray:int32", None)}
    values = {"a": bytes(1 << 20), "b": bytes([32, 4, 3]) + bytes(12), "c": bytes([8, 1, 2]) + bytes(8)}
    data = mds_shard(columns, [values])
    file = _Counted(data)
    scan = MdsFormat().scan(file, Shard("x.mds", len(data), ""), block_bytes=1 << 20)
    assert file.nbytes < 1000
    assert [scan.schema[name].kind for name in columns] == ["bytes", "list", "bytes"]


@pytest.mark.parametrize(
    "kind", [kind if kind == "zstd" else pytest.param(kind, marks=pytest.mark.full) for kind in COMPRESSED]
)
def test_arrays_behind_long_values_of_a_compressed_shard_are_lists(tmp_path: Path, kind: str) -> None:
    columns = {"a": ("bytes", None), "b": ("ndarray", None)}
    data = mds_shard(columns, [{"a": bytes(3 << 20), "b": bytes([33, 4, 3]) + bytes(12)}])
    (tmp_path / f"x.mds.{kind}").write_bytes(COMPRESSIONS[kind](data))
    sample = ShardedDataset(str(tmp_path / f"x.mds.{kind}"))[0]
    assert sample["b"].tolist() == [0, 0, 0]


def test_a_split_is_a_folder_of_its_name(tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(MDS / "numbers", tmp_path / split)
    assert len(ShardedDataset(str(tmp_path), split="train")) == 40
    with pytest.raises((ValueError, DataflowError), match="train"):
        ShardedDataset(str(tmp_path))


def test_arrays_of_one_length_are_one_tensor() -> None:
    dataset = ShardedDataset(str(MDS / "tokens"))
    with DataLoader(dataset, 5, shuffle=None) as loader:
        batch = next(iter(loader))
    assert batch["tokens"].dtype == torch.int32
    assert batch["tokens"].tolist() == [list(range(i, i + 10)) for i in range(5)]


def test_pickles_are_refused_and_can_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"column 'a' holds pickled data.*decode=\{\"a\": \"pickle\"\}"):
        ShardedDataset(str(MDS / "pickled"))
    assert ShardedDataset(str(MDS / "pickled"), columns=["b"])[0] == {"b": 2}
    assert ShardedDataset(str(MDS / "pickled"), decode={"a": "pickle"})[0] == {"a": {1}, "b": 2}


def test_a_dataset_without_shards_is_an_error() -> None:
    with pytest.raises(CorruptShardError, match=r"index\.json.*lists no shards: the dataset is empty"):
        ShardedDataset(str(MDS / "empty"))


# ---- damage ---------------------------------------------------------------------------------------------


def numbered(values: range) -> list[dict[str, bytes]]:
    return [{"a": np.int64(i).tobytes(), "b": bytes([i]) * i} for i in values]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_mds(tmp_path / "data", NUMBERS, [numbered(range(5)), numbered(range(5, 9))])
    return tmp_path / "data"


def read(source: Path) -> list[int]:
    with DataLoader(ShardedDataset(str(source)), 4, shuffle=None, num_workers=0) as loader:
        return [n for batch in loader for n in batch["a"].tolist()]


def edited(folder: Path, **changes: Any) -> None:
    """Change what `index.json` says of the first shard."""
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0].update(changes)
    (folder / "index.json").write_text(json.dumps(index))


def test_the_index_says_which_shards_there_are_and_in_which_order(folder: Path) -> None:
    (folder / "shard.00009.mds").write_bytes(mds_shard(NUMBERS, numbered(range(99, 100))))
    index = json.loads((folder / "index.json").read_text())
    index["shards"].reverse()
    (folder / "index.json").write_text(json.dumps(index))
    assert read(folder) == [5, 6, 7, 8, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../shard.00000.mds", "leads out of its folder"),
        ("/etc/passwd", "leads out of its folder"),
        ("s3://bucket/x.mds", "leads out of its folder"),
        ("a\\b", "leads out of its folder"),
        ("", "file name of shard 0 is ''"),
        (7, "file name of shard 0 is 7"),
        ("shard.00001.mds", "lists one of its shards twice"),
        ("shard.00007.mds", "no such file"),
    ],
)
def test_names_that_mean_no_file_of_the_folder_are_errors(folder: Path, name: Any, says: str) -> None:
    edited(folder, raw_data={"basename": name, "bytes": 1, "hashes": {}})
    with pytest.raises(DataflowError, match=says):
        ShardedDataset(str(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 6}, r"shard\.00000\.mds: index\.json says that it has 6 samples, and it has 5"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 9}}, "says that it has 9 bytes"),
        (
            {"raw_data": "x", "zip_data": {"basename": "shard.00000.mds"}},
            r"shard\.00000\.mds: .*'x' as its raw_",
        ),
        ({"version": 3}, "of version 3 of MDS; only version 2 is known"),
        ({"format": "json"}, "Streaming's format 'json', which is not read: .*format='jsonl'"),
        ({"format": "xsv"}, "Streaming's format 'xsv', which is not read: .*ShardWriter"),
    ],
)
def test_an_index_that_disagrees_is_an_error(folder: Path, changes: dict[str, Any], says: str) -> None:
    edited(folder, **changes)
    with pytest.raises(CorruptShardError, match=says):
        ShardedDataset(str(folder))


@pytest.mark.parametrize(
    "text", ['{"shards": [', '{"version": 2, "shards": [1]}', '{"shards": [], "version": 2}']
)
def test_so_is_one_that_is_broken(folder: Path, text: str) -> None:
    (folder / "index.json").write_text(text)
    with pytest.raises(CorruptShardError, match=r"index\.json"):
        ShardedDataset(str(folder))


def test_an_index_of_something_else_is_none(folder: Path) -> None:
    (folder / "index.json").write_text('{"weight_map": {}}')
    assert read(folder) == [*range(9)]


def test_swapped_shards_are_noticed(folder: Path) -> None:
    one, other = folder / "shard.00000.mds", folder / "shard.00001.mds"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    with pytest.raises(CorruptShardError, match=r"says that it has 5 samples, and it has 4"):
        ShardedDataset(str(folder))


@pytest.mark.parametrize("size", [0, 3, 10, 27, 150, 270])
def test_a_truncated_shard_is_an_error(folder: Path, size: int) -> None:
    path = folder / "shard.00000.mds"
    assert size < path.stat().st_size
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptShardError, match=r"shard\.00000\.mds"):
        ShardedDataset(str(folder / "*.mds"))


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 4, "its samples end at byte"),
        (0, 1 << 31, "begins with a number of 2147483648 samples"),
        (8, 1 << 20, "sample 2 begins at"),
        (4, 4, "sample 0 begins at 4, before what precedes it ends"),
    ],
)
def test_a_table_of_offsets_that_lies_is_an_error(folder: Path, at: int, value: int, says: str) -> None:
    path = folder / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match=says):
        ShardedDataset(str(folder / "*.mds"))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"a": ("int", 4)}, "column 'a' of encoding 'int' has values of 4 bytes, not 8"),
        ({"a": ("ndarray:float32:-1", None)}, "of encoding 'ndarray:float32:-1'"),
        ({}, "its columns are"),
    ],
)
def test_columns_that_no_shard_has_are_errors(tmp_path: Path, columns: Any, says: str) -> None:
    (tmp_path / "x.mds").write_bytes(mds_shard(columns, [dict.fromkeys(columns, bytes(8))]))
    with pytest.raises(CorruptShardError, match=says):
        ShardedDataset(str(tmp_path / "x.mds"))


@pytest.mark.parametrize(("encoding", "size"), [("int128", 16), ("ndarray:object:3", 24), ("own", None)])
def test_an_encoding_that_is_not_known_refuses_who_asks_for_the_column_alone(
    tmp_path: Path, encoding: str, size: int | None
) -> None:
    columns: Any = {"a": (encoding, size), "b": ("str", None)}
    (tmp_path / "x.mds").write_bytes(mds_shard(columns, [{"a": bytes(size or 3), "b": b"text"}]))
    assert ShardedDataset(str(tmp_path / "x.mds"), columns=["b"])[0] == {"b": "text"}
    with pytest.raises(CorruptShardError, match=f"column 'a' is MDS's {encoding}, which has no array form"):
        ShardedDataset(str(tmp_path / "x.mds"), columns=["a"])
    with (
        DataLoader(ShardedDataset(str(tmp_path / "x.mds"))) as loader,
        pytest.raises(DataflowError, match=f"MDS's {encoding} is not read: leave the column out by columns="),
    ):
        next(iter(loader))


def test_lengths_of_columns_that_do_not_fit_are_noticed_when_they_are_read(tmp_path: Path) -> None:
    columns = {"a": ("str", None), "b": ("str", None)}
    data = bytearray(mds_shard(columns, [{"a": b"abc", "b": b"de"}]))
    data[-13:-9] = (4).to_bytes(4, "little")
    (tmp_path / "x.mds").write_bytes(data)
    with pytest.raises(DataflowError, match="the columns of sample 0 do not take the bytes that it has"):
        ShardedDataset(str(tmp_path / "x.mds"))[0]


@pytest.mark.parametrize(
    ("encoding", "value", "says"),
    [
        ("ndarray:int32", b"\x04\x02" + bytes(4), "an array does not take the bytes that it has"),
        ("list[jpeg]", np.array([0, 9], "<u4").tobytes(), "more items than bytes"),
        ("jpeg_array", np.array([1, 9], "<u4").tobytes(), "the items of a list do not take"),
        ("jpeg_array", b"\x01", "a list is truncated"),
        (
            "pil",
            np.array([2, 2, 3], "<u4").tobytes() + b"RGB" + bytes(9),
            "an image of 2 x 2 pixels of mode RGB has 9",
        ),
        ("pil", np.array([2, 2, 1], "<u4").tobytes() + b"F" + bytes(16), "Pillow's mode 'F'"),
        ("pil", b"\x01", "pixels of an image are truncated"),
    ],
)
def test_values_that_are_none_of_their_encoding_are_errors(
    tmp_path: Path, encoding: str, value: bytes, says: str
) -> None:
    (tmp_path / "x.mds").write_bytes(mds_shard({"a": (encoding, None)}, [{"a": value}]))
    with pytest.raises(DataflowError, match=says):
        ShardedDataset(str(tmp_path / "x.mds"))[0]


def test_arrays_of_several_dimensions_among_lists_are_an_error_with_its_cure(tmp_path: Path) -> None:
    values = [b"\x04\x01" + bytes(4), b"\x08\x01\x01" + bytes(4)]
    (tmp_path / "x.mds").write_bytes(mds_shard({"a": ("ndarray:int32", None)}, [{"a": v} for v in values]))
    with pytest.raises(
        DataflowError, match=r"not of one dimension and int32, .* leave the column out by columns="
    ):
        ShardedDataset(str(tmp_path / "x.mds"))[1]


# ---- compressed shards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COMPRESSED)
def test_damage_of_a_compressed_shard_is_an_error(tmp_path: Path, kind: str) -> None:
    write_mds(tmp_path, NUMBERS, [numbered(range(60))], kind)
    path = tmp_path / f"shard.00000.mds.{kind}"
    sound = path.read_bytes()
    for damaged in (sound[: len(sound) // 2], sound[:-1], sound + b"more", bytes(len(sound))):
        path.write_bytes(damaged)
        for source in (path, tmp_path):
            with pytest.raises(DataflowError, match=r"shard\.00000\.mds"):
                ShardedDataset(str(source))[59]


@pytest.mark.parametrize("kind", ["zstd", "gz", "br", "bz2"])
def test_damage_behind_the_table_of_a_compressed_shard_is_of_the_shard(tmp_path: Path, kind: str) -> None:
    write_mds(tmp_path, NUMBERS, [numbered(range(60))], kind)
    path = tmp_path / f"shard.00000.mds.{kind}"
    sound = path.read_bytes()
    for cut in (len(sound) // 2, len(sound) - 9):
        damaged = tmp_path / f"{cut}.mds.{kind}"
        damaged.write_bytes(sound[:cut] + bytes(b ^ 255 for b in sound[cut : cut + 8]) + sound[cut + 8 :])
        with pytest.raises(CorruptShardError, match=damaged.name):
            ShardedDataset(str(damaged))[59]


def test_a_snappy_shard_that_claims_more_than_it_can_hold_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds.snappy"
    path.write_bytes(b"\xff\xff\xff\xff\x0f" + bytes(20))
    with pytest.raises(CorruptShardError, match="its size is none"):
        ShardedDataset(str(path))


def test_a_hash_that_fails_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(MDS / "zstd", tmp_path / "zstd")
    index = (tmp_path / "zstd" / "index.json").read_text()
    digest = json.loads(index)["shards"][0]["zip_data"]["hashes"]["md5"]
    (tmp_path / "zstd" / "index.json").write_text(index.replace(digest, "0" * 32))
    dataset = ShardedDataset(str(tmp_path / "zstd"))
    with pytest.raises(DataflowError, match=f"its md5 is {digest}, and index.json says 0000"):
        dataset[0]


def test_a_shard_that_its_cache_keeps_decompressed_is_read_so(tmp_path: Path) -> None:
    write_mds(tmp_path, NUMBERS, [numbered(range(5))], "zstd")
    (tmp_path / "shard.00000.mds").write_bytes(mds_shard(NUMBERS, numbered(range(5))))
    dataset = ShardedDataset(str(tmp_path))
    assert dataset.catalog.urls == [str(tmp_path / "shard.00000.mds")]
    assert read(tmp_path) == [*range(5)]


@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_bomb_meets_its_limit(tmp_path: Path, kind: str) -> None:
    """A table that promises 5 samples, and four megabytes behind it."""
    raw = mds_shard(NUMBERS, numbered(range(5)))
    (tmp_path / f"x.mds.{kind}").write_bytes(COMPRESSIONS[kind](raw + bytes(4 << 20)))
    with pytest.raises(DataflowError, match="decompresses to"):
        ShardedDataset(str(tmp_path / f"x.mds.{kind}"))[0]


@pytest.mark.full
def test_files_that_streaming_has_just_written_are_read_alike(tmp_path: Path) -> None:
    pytest.importorskip("streaming")
    script = FIXTURES / "make.py"
    subprocess.run([sys.executable, script, "mds", "--to", tmp_path], check=True, timeout=100)
    for name, told in json.loads((tmp_path / "mds" / "expected.json").read_text()).items():
        assert_delivers(ShardedDataset(str(tmp_path / "mds" / name)), told)
