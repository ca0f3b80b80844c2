"""LitData's chunks are read as LitData reads them, and damaged ones are errors that say what is wrong.

The fixtures were written by LitData, and `expected.json` is what its reader gave (`tests/fixtures`).
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from formats.owners_kit import FIXTURES, assert_delivers, assert_equal, expected, samples_of

from dataflow import DataflowError, DataLoader, ShardedDataset, Shuffle
from sharding.errors import CorruptShardError
from sharding.formats.streaming.litdata_columns import array_of, leaf_names, nested_of

LIT = FIXTURES / "litdata"
TREES = ("leaves", "nested", "text", "text zstd", "scalar", "pair", "images", "zstd", "zstd 4", "frames")
FORMS = {"as it is": "leaves", "one leaf": "scalar", "zstd": "zstd", "frames": "frames", "Arrow": "text"}


@pytest.fixture(autouse=True)
def no_catalogs_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs of fixtures that lay there earlier would be compared with these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", TREES)
def test_values_are_those_that_litdata_reads(name: str) -> None:
    for block_bytes in (1, 2 << 20) if name in ("leaves", "text") else (2 << 20,):
        assert_delivers(ShardedDataset(str(LIT / name), block_bytes=block_bytes), expected(LIT, name))


@pytest.mark.parametrize("name", ["tokens", "tokens uint16"])
def test_windows_of_tokens_are_the_blocks_of_its_tokens_loader(name: str) -> None:
    for block_bytes in (1, 2 << 20):
        dataset = ShardedDataset(str(LIT / name), length=4, block_bytes=block_bytes)
        assert_delivers(dataset, expected(LIT, name))


@pytest.mark.parametrize("name", ["tokens", "tokens uint16"])
def test_without_a_length_samples_are_the_documents_that_were_written(name: str) -> None:
    with DataLoader(ShardedDataset(str(LIT / name)), 10) as loader:
        (batch,) = loader
    assert [row.tolist() for row in batch["tokens"].rows()] == [
        list(range(10 * i, 11 * i + 7)) for i in range(6)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_each_sample_is_there_by_its_number_in_every_form(form: str) -> None:
    dataset, told = ShardedDataset(str(LIT / FORMS[form])), expected(LIT, FORMS[form])
    for number in (len(told) - 1, 0, len(told) // 2):
        sample = dataset[number]
        for column, value in told[number].items():
            assert_equal(sample[column], value, column)


@pytest.mark.parametrize("form", FORMS)
def test_a_full_shuffle_delivers_each_sample_once(form: str) -> None:
    column = {"as it is": "int", "one leaf": "value"}.get(form, "x")
    dataset = ShardedDataset(str(LIT / FORMS[form]))
    with DataLoader(dataset, 3, shuffle=Shuffle("full"), seed=1) as loader:
        rows = [int(row[column]) for batch in loader for row in samples_of(batch)]
    assert sorted(rows) == sorted(one[column] for one in expected(LIT, FORMS[form]))


def test_its_index_and_a_store_give_the_same() -> None:
    files = fsspec.filesystem("memory")
    for path in (LIT / "frames").iterdir():
        files.pipe(f"/frames/{path.name}", path.read_bytes())
    for source in (str(LIT / "frames/index.json"), "memory://frames", "memory://frames/index.json"):
        assert_delivers(ShardedDataset(source), expected(LIT, "frames"))
    assert_delivers(ShardedDataset("memory://frames/chunk-*.bin"), expected(LIT, "frames"))


def test_chunks_of_parquet_are_parquet(tmp_path: Path) -> None:
    for number in range(2):
        pq.write_table(pa.table({"x": [2 * number, 2 * number + 1]}), tmp_path / f"part-{number}.parquet")
    names = ["part-1.parquet", "part-0.parquet"]
    chunks = [{"chunk_bytes": 9, "chunk_size": 2, "dim": None, "filename": name} for name in names]
    config = {"compression": None, "data_format": ["int"], "item_loader": "ParquetLoader"}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    with DataLoader(ShardedDataset(str(tmp_path)), 4) as loader:
        (batch,) = loader
    assert batch["x"].tolist() == [2, 3, 0, 1]


def test_pickles_are_refused_and_can_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"column 'a' holds pickled data.*decode=\{\"a\": \"pickle\"\}"):
        ShardedDataset(str(LIT / "pickled"))
    assert ShardedDataset(str(LIT / "pickled"), columns=["b"])[0] == {"b": 2}


def test_tensors_of_older_releases_are_read_too() -> None:
    values = torch.arange(6, dtype=torch.int64).reshape(2, 3)
    for order in "<>":
        data = struct.pack(f"{order}IIII", 18, 2, 2, 3) + values.numpy().tobytes()
        assert array_of(data, {18: "int64"}).tolist() == values.tolist()


# ---- what is refused ------------------------------------------------------------------------------------


def copied(tmp_path: Path, name: str) -> Path:
    shutil.copytree(LIT / name, tmp_path / "data")
    return tmp_path / "data"


def edited(folder: Path, *, chunk: dict[str, Any] | None = None, **config: Any) -> Path:
    """Change what `index.json` says of all chunks, and of the first."""
    index = json.loads((folder / "index.json").read_text())
    index["config"].update(config)
    index["chunks"][0].update(chunk or {})
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"encryption": {"algorithm": "fernet", "level": "chunk"}}, "encrypted chunks are not read"),
        ({"item_loader": "TemporalArrayLoader"}, "chunks of TemporalArrayLoader are not read"),
        ({"item_loader": "TokensLoader"}, r"cannot be read: .* encodings|tokens of 'int'"),
        ({"data_format": ["int"]}, "1 encodings of the columns"),
        ({"data_format": None}, "cannot be read"),
        ({"data_spec": "[2, {}]"}, "of version 2; only version 1 is known"),
        ({"data_spec": '[1, {"type": "mine.Tree", "context": null, "children_spec": []}]'}, "'mine.Tree'"),
        ({"data_spec": None}, "its data_format or data_spec is no list"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CorruptShardError, match=says):
        ShardedDataset(str(edited(copied(tmp_path, "zstd"), **config)))


def test_so_are_samples_that_are_compressed_one_by_one() -> None:
    with pytest.raises(
        CorruptShardError, match="'sample' is not read: write it with compression_level='batch'"
    ):
        ShardedDataset(str(LIT / "per sample"))


def test_so_are_arrays_of_types_without_a_tensor(tmp_path: Path) -> None:
    folder = edited(copied(tmp_path, "zstd"), data_format=["int", "no_header_numpy:14"])
    assert ShardedDataset(str(folder), columns=["x"])[3] == {"x": 3}
    with pytest.raises(DataflowError, match="no_header_numpy:14"):
        ShardedDataset(str(folder))[0]


def test_a_length_is_for_tokens(tmp_path: Path) -> None:
    with pytest.raises(
        CorruptShardError, match="length= is for chunks that TokensLoader reads; this is of PyTreeLoader"
    ):
        ShardedDataset(str(LIT / "scalar"), length=4)


def test_chunks_without_their_index_are_an_error(tmp_path: Path) -> None:
    folder = copied(tmp_path, "scalar")
    (folder / "index.json").unlink()
    with pytest.raises(DataflowError, match=r"needs the index\.json that lists it"):
        ShardedDataset(str(folder), format="litdata")


# ---- damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_an_index_that_disagrees_is_an_error(tmp_path: Path, form: str) -> None:
    folder = edited(copied(tmp_path, FORMS[form]), chunk={"chunk_size": 5})
    with pytest.raises(CorruptShardError, match=r"index\.json says that it has 5 samples, and it has 4"):
        ShardedDataset(str(folder))


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_chunk_is_an_error(tmp_path: Path, form: str) -> None:
    folder = copied(tmp_path, FORMS[form])
    (first, *_) = sorted(folder.glob("*.bin"))
    sound = first.read_bytes()
    for size in (3, 9, len(sound) // 2, len(sound) - 1):
        first.write_bytes(sound[:size])
        with pytest.raises(DataflowError, match=first.name):
            ShardedDataset(str(folder))[0]


@pytest.mark.parametrize("name", ["zstd", "frames"])
def test_damage_inside_of_what_is_compressed_is_an_error(tmp_path: Path, name: str) -> None:
    folder = copied(tmp_path, name)
    (first, *_) = sorted(folder.glob("*.bin"))
    data = bytearray(first.read_bytes())
    data[-40:] = bytes(40)
    first.write_bytes(data)
    with pytest.raises(DataflowError, match=first.name):
        ShardedDataset(str(folder))[3]


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (8, b"\2\0", "version 2"),
        (12, b"\xff\xff\xff\xff", "4294967295 samples"),
        (20, b"\xff\xff\xff\0", "frames of"),
        (28, b"\xff\xff", "offsets of samples fall|frames do not hold"),
        (44, b"\1", "frames do not hold the samples"),
    ],
)
def test_a_table_of_frames_that_lies_is_an_error(tmp_path: Path, at: int, value: bytes, says: str) -> None:
    folder = copied(tmp_path, "frames")
    data = bytearray((folder / "chunk-0-0.bin").read_bytes())
    data[at : at + len(value)] = value
    (folder / "chunk-0-0.bin").write_bytes(data)
    with pytest.raises(CorruptShardError, match=says):
        ShardedDataset(str(folder))


@pytest.mark.parametrize("at", [(1 << 63) - 2, (1 << 63) + 5])
def test_a_frame_at_a_place_that_no_file_has_is_an_error(tmp_path: Path, at: int) -> None:
    folder = copied(tmp_path, "frames")
    data = bytearray((folder / "chunk-0-0.bin").read_bytes())
    place = (
        24 + 4 * (int.from_bytes(data[12:16], "little") + 1) + 8
    )  # in the first row of the table of frames
    data[place : place + 8] = at.to_bytes(8, "little")
    (folder / "chunk-0-0.bin").write_bytes(data)
    with pytest.raises(CorruptShardError, match="frames do not hold the samples"):
        ShardedDataset(str(folder))


def test_sizes_that_are_none_of_a_sample_are_noticed(tmp_path: Path) -> None:
    folder = copied(tmp_path, "leaves")
    data = bytearray((folder / "chunk-0-0.bin").read_bytes())
    data[24:28] = (9).to_bytes(4, "little")  # of an integer
    (folder / "chunk-0-0.bin").write_bytes(data)
    with pytest.raises(DataflowError, match="the columns of sample 0 do not take the bytes that it has"):
        ShardedDataset(str(folder))[0]


@pytest.mark.parametrize(
    "value", [b"\x05\xff\xff\xff\xff", b"\x01\x01\0\0\0\x09\0\0\0a", b"\x63", b"\x0a", b"\x0b\0"]
)
def test_nested_values_that_are_none_are_errors(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"no nested value of LitData|Expecting value"):
        nested_of(value)


def test_names_of_leaves_are_their_paths() -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    pair = {"type": "builtins.tuple", "context": "null", "children_spec": [leaf, leaf]}
    tree = {"type": "builtins.dict", "context": '["a", "b"]', "children_spec": [pair, leaf]}
    assert leaf_names(json.dumps([1, tree])) == ["a.0", "a.1", "b"]
    assert leaf_names(json.dumps([1, pair])) == ["0", "1"]
    assert leaf_names(json.dumps([1, leaf])) == ["value"]


@pytest.mark.full
def test_files_that_litdata_has_just_written_are_read_alike(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    script = FIXTURES / "make.py"
    subprocess.run([sys.executable, script, "litdata", "--to", tmp_path], check=True, timeout=100)
    folder = tmp_path / "litdata"
    for name in json.loads((folder / "expected.json").read_text()):
        more = {"length": 4} if name.startswith("tokens") else {}
        assert_delivers(ShardedDataset(str(folder / name), **more), expected(folder, name))
