"""Sources of conversions, functions that workers import, and digests of what was written."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataflow import ShardWriter

NUM_SAMPLES = 40


def picture(i: int) -> bytes:
    """A JPEG of its own for each number."""
    out = io.BytesIO()
    pixels = np.full((8, 8, 3), i, np.uint8)
    pixels[i % 8] = 255
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def make_source(folder: Path, num_samples: int = NUM_SAMPLES) -> str:
    """Tars with pictures, texts, numbers, arrays and JSON; a glob of them."""
    with ShardWriter(f"{folder}/source/%03d.tar", max_count=8) as shards:
        for i in range(num_samples):
            shards.write(
                {
                    "__key__": f"k{i:04d}",
                    "jpg": picture(i),
                    "txt": f"bild {i} ü",
                    "cls": i,
                    "npy": np.arange(1 + i % 3, dtype=np.float32),
                    "json": {"n": i, "tags": ["a"] * (i % 2)},
                }
            )
    return f"{folder}/source/*.tar"


def renamed(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "image": sample["jpg"],
        "text": sample["txt"],
        "label": sample["cls"],
        "vector": sample["npy"],
        "small": np.int16(sample["cls"]),
    }


def grouped(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Join texts of three samples each, in one call; the last has fewer."""
    firsts = range(0, len(columns["txt"]), 3)
    return {
        "text": [" ".join(columns["txt"][i : i + 3]) for i in firsts],
        "first": np.array(columns["cls"])[list(firsts)],
    }


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


def is_late(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] >= 20)


def with_other_columns(sample: dict[str, Any]) -> dict[str, Any]:
    return {"text": sample["txt"], **({"more": 1} if sample["cls"] == 33 else {})}


def that_fails(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 33:
        raise KeyError("caption")
    return {"text": sample["txt"]}


class KilledAt:
    """A map that kills its process at some call: of the first, second, ... process one call later."""

    fingerprint = "killed"

    def __init__(self, folder: str) -> None:
        self.folder, self.calls = folder, 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample, unless this is where to die."""
        self.calls += 1
        ends = Path(self.folder, "ends")
        if ends.exists() and self.calls == int(ends.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed(sample)


class DiesOnce:
    """A map that kills its worker process at one sample, the first time only."""

    fingerprint = "dies-once"

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample, if the process lives on."""
        in_worker = multiprocessing.parent_process() is not None
        if in_worker and sample["cls"] == 25 and not Path(self.path).exists():
            Path(self.path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed(sample)


class Numbers:
    """An iterable that begins anew each time, and counts what was taken."""

    fingerprint = "numbers"

    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at, self.taken = count, fails_at, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.count):
            self.taken += 1
            if i == self.fails_at:
                raise OSError("the line went dead")
            yield {"n": i, "text": "x" * i}


def digest(folder: str | Path) -> dict[str, str]:
    """Names and hashes of what was written, `.convert/` and versions in catalogs aside."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file() and path.suffix != ".catalog")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def pil_value(pixels: NDArray[np.uint8], mode: str) -> bytes:
    """An image as MDS's `pil` and LitData store it: width, height, the mode, the raw pixels."""
    image = Image.fromarray(pixels).convert(mode)
    return struct.pack("<III", *image.size, len(mode)) + mode.encode() + image.tobytes()


def mds_of(folder: Path, encodings: dict[str, str], rows: list[dict[str, bytes]]) -> str:
    """A dataset of one MDS shard, of values that are encoded already."""
    samples = []
    for row in rows:
        values = [row[name] for name in sorted(encodings)]
        samples.append(b"".join([struct.pack("<I", len(value)) for value in values] + values))
    columns = {
        "column_names": sorted(encodings),
        "column_encodings": [encodings[n] for n in sorted(encodings)],
    }
    head = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": None, **columns}
    head["column_sizes"] = [None] * len(encodings)
    config = json.dumps(head, sort_keys=True).encode()
    offsets = np.cumsum([8 + 4 * len(rows) + len(config), *map(len, samples)]).astype("<u4")
    data = struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(samples)
    folder.mkdir()
    (folder / "shard.00000.mds").write_bytes(data)
    raw = {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}
    shard = {**head, "samples": len(rows), "raw_data": raw, "zip_data": None}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return str(folder)
