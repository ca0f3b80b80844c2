"""Small datasets of every format and their samples as plain Python values, the oracle of loader tests.

Every maker writes a few shards into a folder and gives the arguments of `ShardedDataset` and the samples in
file order. Numbers are Python numbers, arrays and byte strings lists of them, so `rows_of(batch)` compares
with `==`, value by value. Blocks are tiny, so that few samples make many blocks and windows.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from formats.records_kit import array_record_of, example_of, tfrecord_of
from formats.streaming_kit import write_litdata, write_mds
from formats.tables_kit import write_delta, write_iceberg
from torch import Tensor

from dataflow import DataLoader, Ragged, ShardedDataset, Topology
from dataflow.state_checksum import checked_fields, with_checksum
from sharding.order.order import Order
from sharding.plan.batch_plan import Tail
from sharding.plan.plan import EpochPlan

Row = dict[str, Any]
NUM_SAMPLES = 47
"""Prime, so that no batch size divides it."""
NUM_SHARDS = 3


@dataclass
class Made:
    """A dataset on disk and what it must deliver."""

    kwargs: dict[str, Any]
    """Of `ShardedDataset`, the source included."""
    samples: list[Row]
    """In file order, as `rows_of` gives them."""
    folder: Path

    def open(self, **more: Any) -> ShardedDataset:
        return ShardedDataset(**{**self.kwargs, **more})

    @property
    def shards(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.startswith("shard"))


Make = Callable[[str], Made]
"""The fixture `made`: a dataset of the format named, one of `MAKERS`."""


# ---- the samples --------------------------------------------------------------------------------------


def plain_sample(i: int) -> Row:
    """What the columnar and tar datasets hold: a scalar, a float, text, a list and a fixed vector."""
    return {
        "label": i,
        "x": i / 8,
        "txt": f"text {i} " + "é" * (i % 5),
        "lst": list(range(i, i + i % 4)),
        "vec": [i / 2, i / 4, float(i)],
    }


def shares(samples: Sequence[Row], num_shards: int = NUM_SHARDS) -> list[list[Row]]:
    """Shards of unequal size."""
    bounds = [0, *(len(samples) * k * k // (num_shards * num_shards) for k in range(1, num_shards + 1))]
    return [list(samples[a:b]) for a, b in pairwise(bounds)]


def _made(folder: Path, samples: list[Row], pattern: str, **kwargs: Any) -> Made:
    source = str(folder / pattern)
    kwargs = {"source": source, "catalog": str(folder / "kept.catalog"), "block_bytes": 1, **kwargs}
    return Made(kwargs, samples, folder)


# ---- tar ----------------------------------------------------------------------------------------------


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """A tar file, compressed as its name says."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    path.write_bytes(_compressed(raw.getvalue(), path.name))


def _compressed(data: bytes, name: str) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    return zstandard.compress(data) if name.endswith(".zst") else data


def npy(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(values))
    return out.getvalue()


def tar_sample(i: int) -> Row:
    return {
        "cls": i,
        "txt": f"text {i} " + "é" * (i % 5),
        "json": {"i": i, "even": i % 2 == 0},
        "npy": [i / 2, i / 4, float(i)],
        "bin": list(f"{i}".encode() * (i % 4)),
        "key": list(f"{i:08d}".encode()),
    }


def tar_members(i: int) -> list[tuple[str, bytes]]:
    sample = tar_sample(i)
    return [
        (f"{i:05d}.cls", str(i).encode()),
        (f"{i:05d}.txt", sample["txt"].encode()),
        (f"{i:05d}.json", json.dumps(sample["json"]).encode()),
        (f"{i:05d}.npy", npy(np.array(sample["npy"], np.float32))),
        (f"{i:05d}.bin", bytes(sample["bin"])),
        (f"{i:05d}.key", bytes(sample["key"])),
    ]


def make_tar(folder: Path, num_samples: int = NUM_SAMPLES, suffix: str = "tar") -> Made:
    for k, share in enumerate(shares([tar_sample(i) for i in range(num_samples)])):
        write_tar(folder / f"shard-{k}.{suffix}", (m for row in share for m in tar_members(row["cls"])))
    return _made(folder, [tar_sample(i) for i in range(num_samples)], f"*.{suffix}", block_bytes=10_000)


def make_ints_tar(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """One integer a sample, three samples a block: for what does not depend on content."""
    samples = [{"cls": i} for i in range(num_samples)]
    for k, share in enumerate(shares(samples)):
        write_tar(folder / f"shard-{k}.tar", ((f"{r['cls']:05d}.cls", str(r["cls"]).encode()) for r in share))
    return _made(folder, samples, "*.tar", block_bytes=3 * 1024)


# ---- columns ------------------------------------------------------------------------------------------


def table_of(samples: Sequence[Row]) -> pa.Table:
    types = {"label": pa.int64(), "x": pa.float32(), "txt": pa.string(), "lst": pa.list_(pa.int32())}
    types["vec"] = pa.list_(pa.float32(), 3)
    return pa.table({name: pa.array([s[name] for s in samples], type=kind) for name, kind in types.items()})


def make_parquet(folder: Path, num_samples: int = NUM_SAMPLES, rows: int = 3) -> Made:
    samples = [plain_sample(i) for i in range(num_samples)]
    for k, share in enumerate(shares(samples)):
        pq.write_table(table_of(share), folder / f"shard-{k}.parquet", row_group_size=rows)
    return _made(folder, samples, "*.parquet")


def make_arrow(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    return _arrow(folder, num_samples, "arrow", pa.ipc.new_file)


def make_arrow_stream(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    return _arrow(folder, num_samples, "arrows", pa.ipc.new_stream)


def _arrow(folder: Path, num_samples: int, suffix: str, new: Callable[..., Any]) -> Made:
    samples = [plain_sample(i) for i in range(num_samples)]
    for k, share in enumerate(shares(samples)):
        table = table_of(share)
        with (
            pa.OSFile(str(folder / f"shard-{k}.{suffix}"), "wb") as sink,
            new(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=3)
    return _made(folder, samples, f"*.{suffix}")


def make_jsonl(folder: Path, num_samples: int = NUM_SAMPLES, suffix: str = "jsonl") -> Made:
    samples = [{k: v for k, v in plain_sample(i).items() if k != "vec"} for i in range(num_samples)]
    for k, share in enumerate(shares(samples)):
        text = "".join(json.dumps(row) + "\n" for row in share)
        path = folder / f"shard-{k}.{suffix}"
        path.write_bytes(_compressed(text.encode(), path.name))
    return _made(folder, samples, f"*.{suffix}", block_bytes=300)


# ---- tables, and folders with a description -------------------------------------------------------------


def make_delta(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """The number of its file is a column of each sample, from the log."""
    parts = shares([plain_sample(i) for i in range(num_samples)])
    write_delta(folder, [table_of(share).drop_columns("vec") for share in parts], "part")
    samples = [{**_without_vec(row), "part": str(k)} for k, share in enumerate(parts) for row in share]
    return _made(folder, samples, "", format="delta")


def make_iceberg(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """Files that are older than a column of the table, which is left out as no sample has it."""
    samples = [_without_vec(plain_sample(i)) for i in range(num_samples)]
    tables = [
        table_of(share).drop_columns("vec") for share in shares([plain_sample(i) for i in range(num_samples)])
    ]
    write_iceberg(folder, tables, "added")
    return _made(folder, samples, "", format="iceberg", columns=list(samples[0]))


def _without_vec(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "vec"}


def make_energon(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """Fields of members and of JSON."""
    made = make_tar(folder, num_samples)
    names = [path.name for path in made.shards]
    counts = dict(zip(names, map(len, shares(made.samples)), strict=True))
    files = {
        ".info.json": {"energon_version": "7.4.1", "shard_counts": counts},
        "split.yaml": {"split_parts": {"train": names}},
        "dataset.yaml": {
            "__module__": "megatron.energon",
            "__class__": "CaptioningWebdataset",
            "field_map": {"cls": "cls", "txt": "txt", "even": "json[even]"},
        },
    }
    (folder / ".nv-meta").mkdir()
    for name, value in files.items():  # JSON is YAML
        (folder / ".nv-meta" / name).write_text(json.dumps(value))
    samples = [{"cls": row["cls"], "txt": row["txt"], "even": row["json"]["even"]} for row in made.samples]
    return Made({**made.kwargs, "source": str(folder)}, samples, folder)


# ---- tokens -------------------------------------------------------------------------------------------

LENGTH = 4


def _token_shards(num_samples: int) -> list[list[int]]:
    sizes = [len(s) for s in shares([{}] * num_samples)]
    tokens = np.random.default_rng(0).integers(0, 60_000, num_samples * LENGTH + len(sizes) * 3)
    flat, out = tokens.tolist(), []
    for k, size in enumerate(sizes):
        take = size * LENGTH + 1 + (k if size else 0)  # a few tokens too many are not used
        out.append(flat[:take])
        flat = flat[take:]
    return out


def _windows(shard: Sequence[int]) -> list[Row]:
    count = (len(shard) - 1) // LENGTH
    return [{"tokens": list(shard[i * LENGTH : (i + 1) * LENGTH + 1])} for i in range(count)]


def make_tokens_bin(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    shards = _token_shards(num_samples)
    for k, shard in enumerate(shards):
        np.array(shard, np.uint16).tofile(folder / f"shard-{k}.bin")
    samples = [row for shard in shards for row in _windows(shard)]
    options = {"format": "tokens", "dtype": "uint16", "length": LENGTH, "block_bytes": 26}
    return _made(folder, samples, "*.bin", **options)


def make_tokens_npy(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    shards = _token_shards(num_samples)
    for k, shard in enumerate(shards):
        np.save(folder / f"shard-{k}.npy", np.array(shard, np.int32))
    return _made(folder, [r for s in shards for r in _windows(s)], "*.npy", length=LENGTH, block_bytes=52)


def make_megatron(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """Documents of 1 to 6 tokens."""
    samples = [{"tokens": list(range(i, i + 1 + i % 6))} for i in range(num_samples)]
    for k, share in enumerate(shares(samples)):
        write_megatron(folder / f"shard-{k}.bin", [row["tokens"] for row in share])
    return _made(folder, samples, "*.bin", format="megatron", block_bytes=24)


def make_megatron_windows(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    shards = _token_shards(num_samples)
    for k, shard in enumerate(shards):
        write_megatron(folder / f"shard-{k}.bin", [shard[i : i + 7] for i in range(0, len(shard), 7)])
    samples = [row for shard in shards for row in _windows(shard)]
    return _made(folder, samples, "*.bin", format="megatron", length=LENGTH, block_bytes=26)


def write_megatron(path: Path, documents: Sequence[Sequence[int]]) -> None:
    """`name.bin` and `name.idx` as Megatron's builder writes them, uint16."""
    lengths = np.array([len(d) for d in documents], np.int32)
    np.concatenate([np.array(d, np.uint16) for d in documents]).tofile(path)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    bounds = np.arange(len(documents) + 1, dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(bounds))
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())


# ---- formats of streaming libraries -------------------------------------------------------------------


def make_mds(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """Two columns without a fixed size, beside numbers and arrays."""
    samples = [plain_sample(i) for i in range(num_samples)]
    columns = {
        "label": ("int", 8),
        "x": ("float32", 4),
        "txt": ("str", None),
        "lst": ("ndarray:int32", None),
        "vec": ("ndarray:float32:3", 12),
    }
    for row in samples:
        row["lst"] = row["lst"] or [0]  # Streaming writes no empty arrays
    shards_ = [[_mds_values(row) for row in share] for share in shares(samples)]
    write_mds(folder, columns, shards_, name="shard-{}.mds")
    return _made(folder, samples, "*.mds", block_bytes=200)


def _mds_values(row: Row) -> dict[str, bytes]:
    return {
        "label": np.int64(row["label"]).tobytes(),
        "x": np.float32(row["x"]).tobytes(),
        "txt": row["txt"].encode(),
        "lst": bytes([1 << 2, len(row["lst"])]) + np.array(row["lst"], np.int32).tobytes(),
        "vec": np.array(row["vec"], np.float32).tobytes(),
    }


# ---- records ------------------------------------------------------------------------------------------


def make_tfrecord(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    return _examples(folder, num_samples, "tfrecord", tfrecord_of)


def make_array_record(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    return _examples(folder, num_samples, "array_record", partial(array_record_of, group=2))


def _examples(
    folder: Path, num_samples: int, suffix: str, written: Callable[[Sequence[bytes]], bytes]
) -> Made:
    """Text is bytes: an Example has no text."""
    samples = [{**plain_sample(i), "txt": list(plain_sample(i)["txt"].encode())} for i in range(num_samples)]
    for k, share in enumerate(shares(samples)):
        records = [
            example_of(
                label=[row["label"]], x=[row["x"]], txt=[bytes(row["txt"])], lst=row["lst"], vec=row["vec"]
            )
            for row in share
        ]
        (folder / f"shard-{k}.{suffix}").write_bytes(written(records))
    return _made(folder, samples, f"*.{suffix}", block_bytes=200)


def make_litdata(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """Two leaves without a fixed size, beside a number."""
    samples = [{n: plain_sample(i)[n] for n in ("label", "txt", "lst")} for i in range(num_samples)]
    leaves = {"label": "int", "txt": "str", "lst": "no_header_numpy:2"}
    encoded = [
        {
            "label": np.int64(row["label"]).tobytes(),
            "txt": row["txt"].encode(),
            "lst": np.array(row["lst"], np.int32).tobytes(),
        }
        for row in samples
    ]
    write_litdata(folder, leaves, shares(encoded), name="shard-{}.bin")
    return _made(folder, samples, "*.bin", format="litdata", block_bytes=200)


# ---- loose files ----------------------------------------------------------------------------------------


def make_files(folder: Path, num_samples: int = NUM_SAMPLES) -> Made:
    """A text file a sample, in folders of classes."""
    samples = []
    for k, share in enumerate(shares([plain_sample(i) for i in range(num_samples)])):
        (folder / "train" / f"class {k}").mkdir(parents=True)
        for row in share:
            (folder / "train" / f"class {k}" / f"{row['label']:05d}.txt").write_text(row["txt"])
            samples.append({"txt": row["txt"], "cls": k})
    return _made(folder, samples, "train", format="files")


MAKERS: dict[str, Callable[..., Made]] = {
    "tar": make_tar,
    "tar.gz": lambda folder, n=NUM_SAMPLES: make_tar(folder, n, "tar.gz"),
    "tar.zst": lambda folder, n=NUM_SAMPLES: make_tar(folder, n, "tar.zst"),
    "parquet": make_parquet,
    "arrow": make_arrow,
    "arrow-stream": make_arrow_stream,
    "jsonl": make_jsonl,
    "jsonl.gz": lambda folder, n=NUM_SAMPLES: make_jsonl(folder, n, "jsonl.gz"),
    "tokens.bin": make_tokens_bin,
    "tokens.npy": make_tokens_npy,
    "megatron": make_megatron,
    "megatron-windows": make_megatron_windows,
    "mds": make_mds,
    "array_record": make_array_record,
    **({"tfrecord": make_tfrecord} if find_spec("crc32c") else {}),
    "litdata": make_litdata,
    "files": make_files,
    "energon": make_energon,
    "delta": make_delta,
    "iceberg": make_iceberg,
}


# ---- what came out ------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A delivered value as Python numbers, text and lists."""
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


def rows_of(batch: Mapping[str, Any]) -> list[Row]:
    """The samples of a batch."""
    columns = {
        name: [plain(r) for r in (value.rows() if isinstance(value, Ragged) else value)]
        for name, value in batch.items()
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def edited(state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The state with other values, by somebody who knows about checksums."""
    return with_checksum({**checked_fields(state), **changes})


def rank(r: int, world_size: int) -> Topology:
    return Topology(rank=r, world_size=world_size, source="test")


def sort_key(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def by_plan(
    loader: DataLoader,
    samples: Sequence[Row],
    epoch: int,
    *,
    start: int = 0,
) -> list[list[Row]]:
    """The oracle: this rank's batches, from the plan's positions and the order's sample numbers alone."""
    counts = loader.dataset.catalog.blocks.num_samples
    order = Order(counts, loader.shuffle, seed=loader.seed, epoch=epoch)
    tail: Tail = loader.tail
    place = loader.topology
    plan = EpochPlan(
        order,
        batch_size=loader.batch_size,
        rank=place.rank,
        world_size=place.world_size,
        tail=tail,
        start=start,
    )
    batches = []
    for number in range(plan.num_batches):
        positions, _ = plan.positions(number, number + 1)
        batches.append([samples[int(s)] for s in order.samples(positions)])
    return batches


def delivered(loader: Iterable[Any]) -> list[list[Row]]:
    """One epoch, batch by batch."""
    return [rows_of(batch) for batch in loader]
