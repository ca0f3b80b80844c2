"""The byte in a `SampleError` is where the sample begins, whoever builds and however it is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from datasets_kit import MAKERS, Made, Make

from dataflow import DataLoader, Mixture, SampleError, Shuffle

BAD = 29
"""Number of the sample that is refused: neither first nor last of its block or shard."""


class Refuses:
    """A transform that takes all samples but one, known by its values."""

    def __init__(self, row: dict[str, Any]) -> None:
        told = {name: value for name, value in row.items() if name in ("label", "cls", "tokens")}
        self.row = row if row.keys() == {"cls", "txt"} else told  # of loose files, many have one class

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if all(np.array_equal(np.asarray(sample[name]), value) for name, value in self.row.items()):
            raise ValueError("refused")
        return sample


def content_of(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    return zstandard.ZstdDecompressor().decompressobj().decompress(data) if path.suffix == ".zst" else data


def begins_sample(error: SampleError, row: dict[str, Any]) -> bool:
    """Whether the bytes from the error's on are the sample's."""
    content, path = content_of(Path(error.shard)), Path(error.shard)
    if error.offset is None:
        return path.suffix in (".parquet", ".arrow", ".arrows", ".array_record")
    if ".tar" in path.suffixes:
        before = (
            content[max(0, error.offset - 512) : error.offset].partition(b".")[0].decode(errors="replace")
        )
        with tarfile.open(fileobj=io.BytesIO(content[error.offset :])) as archive:
            name = archive.next().name  # type: ignore[union-attr]
        return name == f"{row['cls']:05d}.cls" and not before.startswith(f"{row['cls']:05d}")
    if path.suffix == ".txt":
        return error.offset == 0 and content.decode() == row["txt"]
    if ".jsonl" in path.suffixes:
        before = content[: error.offset]
        line = content[error.offset :].partition(b"\n")[0]
        return (not before or before.endswith(b"\n")) and json.loads(line)["label"] == row["label"]
    if ".tfrecord" in path.suffixes:
        size = int(np.frombuffer(content, "<u8", 1, error.offset)[0])
        return bytes(row["txt"]) in content[error.offset + 12 : error.offset + 12 + size]
    if (path.parent / "index.json").exists() and path.suffix == ".bin":
        return np.frombuffer(content, "<i8", 1, error.offset + 12).tolist() == [row["label"]]
    if ".mds" in path.suffixes:
        return np.frombuffer(content, "<i8", 1, error.offset + 8).tolist() == [row["label"]]
    dtype = np.load(path).dtype if path.suffix == ".npy" else np.dtype("<u2")
    tokens = np.frombuffer(content[error.offset :], dtype, len(row["tokens"]))
    return bool((tokens == row["tokens"]).all())


def error_of(loader: DataLoader[Any, Any]) -> SampleError:
    with pytest.raises(SampleError, match="refused") as caught, loader:
        for _ in loader:
            pass
    return caught.value


@pytest.mark.parametrize("name", MAKERS)
def test_the_byte_is_the_sample_s_in_every_format(made: Make, name: str) -> None:
    this = made(name)
    row = this.samples[BAD]
    dataset = this.open(transform=Refuses(row))
    for shuffle in (False, True):
        error = error_of(DataLoader(dataset, 4, shuffle=shuffle, collate_fn=list, num_workers=0))
        assert begins_sample(error, row), f"{error} (shuffle={shuffle})"
    with pytest.raises(SampleError, match="refused") as caught:
        dataset[BAD]
    assert begins_sample(caught.value, row), f"{caught.value} (random access)"


def other_ways(this: Made, other: Made, row: dict[str, Any]) -> dict[str, Any]:
    """Loaders that come to a sample in other ways."""
    refuses = Refuses(row)
    dataset = this.open(transform=refuses)
    keys = "__key__" if "cls" in row else "label"

    def joined() -> Any:
        view = this.open().join(other.open(columns={"beside": "txt"}), on=(keys, keys))
        view.transform = refuses
        return view

    return {
        "processes": lambda: DataLoader(dataset, 4, collate_fn=list, num_workers=1, memory_limit="64MB"),
        "threads": lambda: DataLoader(dataset, 4, collate_fn=list, num_workers=2, workers="thread"),
        "full shuffle": lambda: DataLoader(
            dataset, 4, shuffle=Shuffle("full"), collate_fn=list, num_workers=0
        ),
        "mixture": lambda: DataLoader(Mixture({other.open(): 1, dataset: 1}), 4, collate_fn=list),
        "subset": lambda: DataLoader(dataset.subset(range(BAD - 3, BAD + 3)), 4, collate_fn=list),
        "join": lambda: DataLoader(joined(), 4, collate_fn=list, num_workers=0),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["processes", "threads", "full shuffle", "mixture", "subset", "join"])
@pytest.mark.parametrize("name", ["tar", "jsonl"])
def test_the_byte_is_the_sample_s_however_it_is_reached(made: Make, name: str, way: str) -> None:
    if (name, way) == ("jsonl", "full shuffle"):
        pytest.skip("lines are read in blocks")
    this, row = made(name), made(name).samples[BAD]
    error = error_of(other_ways(this, this, row)[way]())
    assert begins_sample(error, row), str(error)
    assert error.key == (f"{BAD:05d}" if name == "tar" else error.key)


def test_samples_that_are_left_out_are_listed_with_their_bytes(tmp_path: Path) -> None:
    """A member that cannot be decoded; the first of the shard is at byte 0 by right."""
    this = MAKERS["tar"](tmp_path)
    this.open()
    shard = this.shards[1]
    content = bytearray(shard.read_bytes())
    at = content.index(b"\x93NUMPY", 20_000)
    content[at + 1] = 0
    times = shard.stat()
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    dataset = this.open(on_error="skip")
    with DataLoader(dataset, 4, collate_fn=list, num_workers=0) as loader:
        for _ in loader:
            pass
        (told,) = loader.stats().skipped
    offset = int(told.partition("byte ")[2].partition(",")[0])
    with tarfile.open(fileobj=io.BytesIO(bytes(content[offset:]))) as archive:
        names = [archive.next().name for _ in range(4)]  # type: ignore[union-attr]
    assert names[0].endswith(".cls")
    assert names[3] == f"{names[0][:5]}.npy"
    assert f"sample '{names[0][:5]}'" in told
    assert offset < at < offset + 6 * 1024
