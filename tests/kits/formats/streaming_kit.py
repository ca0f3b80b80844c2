"""Shards of Streaming (MDS) and LitData as their writers make them, written field by field."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

Encoded = Mapping[str, bytes]
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.compress,
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "br": lambda data: pa.Codec("brotli").compress(data, asbytes=True),
    "snappy": lambda data: pa.Codec("snappy").compress(data, asbytes=True),
}


def mds_shard(columns: Mapping[str, tuple[str, int | None]], samples: Sequence[Encoded]) -> bytes:
    """One shard: columns by name, each with encoding and size of its values; samples of encoded values."""
    names = sorted(columns)
    config = {
        "column_encodings": [columns[name][0] for name in names],
        "column_names": names,
        "column_sizes": [columns[name][1] for name in names],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    }
    text = json.dumps(config, sort_keys=True).encode()
    bodies = []
    for sample in samples:
        heads = [len(sample[name]) for name in names if columns[name][1] is None]
        bodies.append(np.array(heads, "<u4").tobytes() + b"".join(sample[name] for name in names))
    return offset_table(bodies, text)


def offset_table(bodies: Sequence[bytes], between: bytes = b"") -> bytes:
    """The number of samples, their offsets, what is between, and the samples."""
    first = 4 * (len(bodies) + 2) + len(between)
    offsets = np.cumsum([first, *map(len, bodies)]).astype("<u4")
    return np.uint32(len(bodies)).tobytes() + offsets.tobytes() + between + b"".join(bodies)


def write_mds(
    folder: Path,
    columns: Mapping[str, tuple[str, int | None]],
    shards: Sequence[Sequence[Encoded]],
    compression: str | None = None,
    name: str = "shard.{:05d}.mds",
    **changes: Any,
) -> None:
    """A folder of shards with their `index.json`, of which `changes` are made of every shard's entry."""
    names, entries = sorted(columns), []
    for number, samples in enumerate(shards):
        raw, path = mds_shard(columns, samples), name.format(number)
        entry = {
            "column_encodings": [columns[one][0] for one in names],
            "column_names": names,
            "column_sizes": [columns[one][1] for one in names],
            "compression": compression,
            "format": "mds",
            "hashes": [],
            "raw_data": {"basename": path, "bytes": len(raw), "hashes": {}},
            "samples": len(samples),
            "size_limit": None,
            "version": 2,
            "zip_data": None,
        }
        stored = raw
        if compression:
            stored, path = COMPRESSIONS[compression](raw), f"{path}.{compression}"
            entry["zip_data"] = {"basename": path, "bytes": len(stored), "hashes": {}}
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(stored)
        entries.append({**entry, **changes})
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))


def litdata_chunk(names: Sequence[str], samples: Sequence[Encoded]) -> bytes:
    """One chunk of samples of encoded leaves."""
    return offset_table(
        [
            np.array([len(sample[name]) for name in names], "<u4").tobytes()
            + b"".join(sample[name] for name in names)
            for sample in samples
        ]
    )


def write_litdata(
    folder: Path, leaves: Mapping[str, str], shards: Sequence[Sequence[Encoded]], name: str = "chunk-0-{}.bin"
) -> None:
    """A folder of chunks, none of which is empty, with their `index.json`; `leaves`: encodings by name."""
    chunks = []
    for number, samples in enumerate(shards):
        if not samples:
            continue
        data, path = litdata_chunk([*leaves], samples), name.format(number)
        (folder / path).write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(samples), "dim": None, "filename": path})
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "builtins.dict", "context": json.dumps([*leaves]), "children_spec": [leaf] * len(leaves)}
    config = {
        "compression": None,
        "data_format": [*leaves.values()],
        "data_spec": json.dumps([1, tree]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
