"""Files that owners write now, with random content, are read as the owners read them.

Where an owner is not installed its tests are skipped. Each seed draws columns, values, sizes and compression.
"""

from __future__ import annotations

import importlib.util
import json
import string
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from formats.owners_kit import FIXTURES, assert_delivers
from formats.records_kit import _plain, values_in
from formats_kit import decoded_blocks

from dataflow import ShardedDataset
from sharding.formats.records.array_record import ArrayRecordFormat
from sharding.formats.records.tfrecord import TFRecordFormat

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # of the owners
]
SEEDS = range(12)
Rng = np.random.Generator
_ALPHABET = string.ascii_letters + " éß日本✓\U0001f600\0\n"


@pytest.fixture(autouse=True)
def no_catalogs_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs of files that lay there earlier would be compared with these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def script(name: str) -> ModuleType:
    """A module of the scripts that made the fixtures."""
    sys.path.insert(0, str(FIXTURES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FIXTURES))


def text(rng: Rng) -> str:
    return "".join(rng.choice(list(_ALPHABET), int(rng.choice([0, 1, 7, 300]))))


def content(rng: Rng) -> bytes:
    return rng.bytes(int(rng.choice([0, 1, 40, 5000])))


def numbers(rng: Rng, dtype: str, shape: tuple[int, ...] = ()) -> Any:
    """Any numbers of a type but those that are not equal to themselves."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith("float"):
        values = rng.choice([0.0, -0.0, 1.5, -2.25, 1e4, np.inf, 1e-4, rng.standard_normal()], shape)
        return np.asarray(values).astype(dtype)[()]
    limits = np.iinfo(dtype)
    some = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return np.where(rng.random(shape) < 0.5, some, rng.choice([0, 1, limits.max], shape)).astype(dtype)[()]


def shape(rng: Rng, ndim: int) -> tuple[int, ...]:
    return tuple(rng.choice([1, 2, 3, 5, 17], ndim).tolist())


def nested(rng: Rng, depth: int = 0) -> Any:
    kind = int(rng.integers(0, 7 if depth < 3 else 5))
    if kind < 5:
        return [int(rng.integers(-9, 9)), float(rng.integers(0, 9)) / 4, text(rng), None, bool(kind)][kind]
    if kind == 5:
        return [nested(rng, depth + 1) for _ in range(rng.integers(0, 4))]
    return {text(rng)[:5]: nested(rng, depth + 1) for _ in range(rng.integers(0, 4))}


# ---- Streaming ------------------------------------------------------------------------------------------


def mds_columns(rng: Rng, make: ModuleType) -> dict[str, tuple[str, Callable[[int], Any]]]:
    """Encodings, and what draws values of sample i, by column."""
    lists = str(rng.choice(["uint8", "int64", "float32", "uint16"]))
    fixed = shape(rng, int(rng.integers(1, 4)))
    known: dict[str, tuple[str, Callable[[int], Any]]] = {
        "bytes": ("bytes", lambda i: content(rng)),
        "str": ("str", lambda i: text(rng)),
        "名": ("str", lambda i: text(rng)),
        "int": ("int", lambda i: int(numbers(rng, "int64"))),
        **{
            name: (name, lambda i, name=name: numbers(rng, name))
            for name in ("uint8", "int16", "uint32", "int64", "uint64", "float16", "float32", "float64")
        },
        "str_int": ("str_int", lambda i: int(numbers(rng, "int64"))),
        "str_float": ("str_float", lambda i: float(rng.standard_normal())),
        "str_decimal": ("str_decimal", lambda i: Decimal(int(numbers(rng, "int32"))).scaleb(-3)),
        "list": ("ndarray", lambda i: numbers(rng, lists, (int(rng.choice([1, 2, 255, 256, 70_000])),))),
        "typed": (f"ndarray:{lists}", lambda i: numbers(rng, lists, shape(rng, 1))),
        "grid": (
            "ndarray",
            lambda i: numbers(rng, str(rng.choice(["int8", "float64"])), shape(rng, 2 + i % 2)),
        ),
        "fixed": (f"ndarray:{lists}:{','.join(map(str, fixed))}", lambda i: numbers(rng, lists, fixed)),
        "json": ("json", lambda i: {"a": nested(rng)}),
        "pil": ("pil", lambda i: make._pixels(i, "RGB")),
        "jpeg": ("jpeg", lambda i: make._file(i, "JPEG")),
        "png list": ("list[png]", lambda i: make._listed([make._file(i, "PNG")] * (i % 3))),
    }
    chosen = rng.choice(list(known), int(rng.integers(1, 7)), replace=False).tolist()
    return {name: known[name] for name in chosen}


@pytest.mark.parametrize("seed", SEEDS)
def test_mds_is_what_streaming_reads(seed: int, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    from streaming.base.local import LocalDataset

    rng, make = np.random.default_rng(seed), script("make_streaming")
    columns = mds_columns(rng, make)
    how: dict[str, Any] = {
        "compression": rng.choice([None, None, "zstd:3", "gz", "snappy", "br:2", "bz2"]),
        "size_limit": int(rng.choice([2000, 100_000, 1 << 26])),
        "hashes": rng.choice([[], ["sha1"], ["xxh64", "md5"]][seed % 3 :][:1][0] or ["crc32"], 1).tolist(),
    }
    how["compression"] = None if how["compression"] is None else str(how["compression"])
    if how["hashes"] == ["crc32"]:
        how["hashes"] = []
    samples = [{name: draw(i) for name, (_, draw) in columns.items()} for i in range(rng.integers(1, 40))]
    encodings = {name: encoding for name, (encoding, _) in columns.items()}
    folder = tmp_path / "mds"
    with streaming.MDSWriter(out=str(folder), columns=encodings, **how) as writer:
        for sample in samples:
            writer.write(sample)
    (tmp_path / "plain").mkdir()
    own = LocalDataset(make._unpacked(folder, tmp_path / "plain"))
    told = [as_told(make.told(own[i])) for i in range(own.num_samples)]
    assert len(told) == len(samples)
    assert_delivers(ShardedDataset(str(folder), block_bytes=int(rng.choice([1, 3000, 2 << 20]))), told)


def as_told(value: Any) -> Any:
    """A value as `expected.json` has it."""
    return json.loads(json.dumps(value))


# ---- LitData --------------------------------------------------------------------------------------------


def litdata_leaves(rng: Rng, torch: ModuleType) -> dict[str, Callable[[int], Any]]:
    known: dict[str, Callable[[int], Any]] = {
        "int": lambda i: int(numbers(rng, "int64")),
        "float": lambda i: float(rng.standard_normal()),
        "bool": lambda i: bool(rng.integers(0, 2)),
        "str": lambda i: text(rng),
        "名": lambda i: text(rng),
        "bytes": lambda i: content(rng),
        "grid": lambda i: numbers(rng, "float32", shape(rng, 2)),
        "tensor": lambda i: torch.from_numpy(numbers(rng, "int32", shape(rng, 3))),
        **{
            f"array {name}": lambda i, name=name: numbers(rng, name, shape(rng, 1))
            for name in ("int8", "uint16", "int64", "float16", "float64", "bool")
        },
        **{
            f"list {name}": lambda i, name=name: torch.from_numpy(numbers(rng, name, shape(rng, 1)))
            for name in ("uint8", "int16", "int32", "float32", "bool")
        },
    }
    return {name: known[name] for name in rng.choice(list(known), int(rng.integers(1, 8)), replace=False)}


@pytest.mark.parametrize("seed", SEEDS)
def test_litdata_is_what_litdata_reads(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    import torch
    from litdata import StreamingDataset
    from litdata.streaming.item_loader import PyTreeLoader
    from litdata.streaming.writer import BinaryWriter

    rng, make = np.random.default_rng(seed), script("make_streaming")
    leaves = litdata_leaves(rng, torch)
    how = [
        {},
        {"compression": "zstd", "compression_level": "chunk"},
        {"compression": "zstd", "compression_batch_size": int(rng.integers(1, 6))},
    ][seed % 3]
    folder = tmp_path / "litdata"
    writer = BinaryWriter(str(folder), chunk_size=int(rng.integers(1, 20)), **how)
    for i in range(int(rng.integers(1, 40))):
        writer[i] = {name: draw(i) for name, draw in leaves.items()}
    writer.done()
    writer.merge()
    own = StreamingDataset(make._copied(folder), item_loader=PyTreeLoader())
    told = [as_told(make.told(own[i])) for i in range(len(own))]
    assert_delivers(ShardedDataset(str(folder), block_bytes=int(rng.choice([1, 3000, 2 << 20]))), told)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_tokens_are_what_litdata_reads(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    from litdata import StreamingDataset
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    rng, make = np.random.default_rng(seed), script("make_streaming")
    length, dtype = int(rng.integers(1, 9)), str(rng.choice(["uint16", "int32", "int64"]))
    folder = tmp_path / "litdata"
    writer = BinaryWriter(str(folder), chunk_bytes=int(rng.integers(300, 900)), item_loader=TokensLoader())
    for i in range(int(rng.integers(5, 30))):
        writer[i] = np.arange(i, i + rng.integers(1, 12)).astype(dtype)
    writer.done()
    writer.merge()
    own = StreamingDataset(make._copied(folder), item_loader=TokensLoader(block_size=length))
    told = [{"tokens": as_told(make.told(own[i]))} for i in range(len(own))]
    assert_delivers(ShardedDataset(str(folder), length=length), told)


# ---- TensorFlow's records -------------------------------------------------------------------------------


def examples(rng: Rng, make: ModuleType, tf: ModuleType) -> list[bytes]:
    """Examples whose features are there or not, of a fixed number of values or of any."""
    features = []
    for name in rng.choice(["a", "b", "image/encoded", "名", "x" * 200, "y"], int(rng.integers(1, 6)), False):
        kind, count = int(rng.integers(0, 3)), rng.choice([1, 1, 3, -1])
        shift = int(rng.choice([0, 34, 50, 57]))
        features.append((str(name), kind, int(count), float(rng.choice([1.0, 1.0, 0.5])), shift))
    records = []
    for _ in range(int(rng.integers(1, 60))):
        message = tf.train.Example()
        for at in rng.permutation(len(features)).tolist():
            name, kind, count, share, shift = features[at]
            if rng.random() > share:
                continue
            many = int(rng.choice([0, 1, 2, 40])) if count < 0 else count
            drawn = [
                [content(rng) for _ in range(many)],
                numbers(rng, "float32", (many,)).tolist(),
                # Small ones take few bytes, negative ones ten.
                (numbers(rng, "int64", (many,)) >> np.int64(shift) & (-1 if shift < 50 else 0x3FFF)).tolist(),
            ][kind]
            listed = [tf.train.BytesList, tf.train.FloatList, tf.train.Int64List][kind](value=drawn)
            make._put(message.features.feature[name], listed)
        records.append(message.SerializeToString())
    return records


def parsed(records: list[bytes], make: ModuleType, tf: ModuleType) -> list[dict[str, Any]]:
    told = [make._features(tf.train.Example.FromString(record).features) for record in records]
    return [{name: _plain(values) for name, values in one.items()} for one in told]


@pytest.mark.parametrize("seed", SEEDS)
def test_tfrecord_is_what_tensorflow_parses(seed: int, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    rng, make = np.random.default_rng(seed), script("make")
    records = examples(rng, make, tf)
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path), str(rng.choice(["", "", "GZIP", "ZLIB"]))) as writer:
        for record in records:
            writer.write(record)
    size = int(rng.choice([1, 700, 2 << 20]))
    blocks = decoded_blocks(TFRecordFormat(), path.read_bytes(), "a.tfrecord", block_bytes=size)
    assert values_in(blocks) == parsed(records, make, tf)


@pytest.mark.parametrize("seed", SEEDS)
def test_array_record_is_what_was_written(seed: int, tmp_path: Path) -> None:
    tf, owner = (
        pytest.importorskip(name) for name in ("tensorflow", "array_record.python.array_record_module")
    )
    rng, make = np.random.default_rng(seed), script("make")
    records, path = examples(rng, make, tf), tmp_path / "a.array_record"
    codec = rng.choice(["uncompressed", "brotli:5", "zstd:3", "snappy"])
    writer = owner.ArrayRecordWriter(str(path), f"group_size:{rng.choice([1, 3, 100])},{codec}")
    for record in records:
        writer.write(record)
    writer.close()
    size = int(rng.choice([1, 700, 2 << 20]))
    blocks = decoded_blocks(ArrayRecordFormat(), path.read_bytes(), "a.array_record", block_bytes=size)
    assert values_in(blocks) == parsed(records, make, tf)
