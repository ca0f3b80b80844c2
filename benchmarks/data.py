"""The data of the workloads: deterministic from a seed, made once, kept in one folder.

A folder is complete when its `done.json` holds the arguments it was made from; anything else is made anew.
Peers that need a format of their own convert into `converted/<peer>-<workload>` beside it, by the same rule.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.jpegs import jpegs
from benchmarks.tars import TarIndex, write_tar

FEATURES = [f"f{i:02d}" for i in range(20)]
LENGTH = 2048
"""Tokens a W2 sample advances; a sample holds one more, the last target."""
RAW_COPIES = 16
"""Hard links to each W1 tar that make a W1-raw epoch long enough to be steady."""

LAYOUT = 2
"""Raised when what is written changes, so that older folders are made anew."""


@dataclass(frozen=True)
class Sizes:
    """How much data; the defaults are the workloads' definition, tests use less."""

    images: int = 4_000
    image_shards: int = 8
    tokens: int = 200_000_000
    rows: int = 10_000_000
    row_shards: int = 10
    rows_per_group: int = 100_000
    records: int = 200_000
    record_shards: int = 100
    record_bytes: int = 3_072
    seed: int = 0


@dataclass(frozen=True)
class Data:
    """Where the data lies. Paths only: cheap to make in every process."""

    root: Path
    sizes: Sizes = Sizes()
    jpeg_folder: Path | None = None

    def files(self, workload: str) -> list[str]:
        """The shards of a workload, sorted."""
        suffix = {"W2": ".bin", "W3": ".parquet"}.get(workload, ".tar")
        return sorted(str(p) for p in (self.root / workload).iterdir() if p.suffix == suffix)

    def index(self, workload: str) -> TarIndex:
        return TarIndex.load(self.root / workload / "index.npz")

    def converted(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that `make(folder)` fills once; `folder` does not exist when it is called."""
        return once(
            self.root / "converted" / name, make, asdict(self.sizes) | {"jpegs": str(self.jpeg_folder)}
        )

    def make(self, workload: str) -> None:
        """Make what a workload reads, unless it is there."""
        makers = {
            "W1": self._images,
            "W1-raw": self._raw,
            "W2": self._tokens,
            "W3": self._rows,
            "W4": self._records,
        }
        if workload == "W1-raw":
            self.make("W1")
        arguments = asdict(self.sizes) | {"jpegs": str(self.jpeg_folder) if "W1" in workload else None}
        once(self.root / workload, makers[workload], arguments)

    def _images(self, folder: Path) -> None:
        s = self.sizes
        folder.mkdir(parents=True)
        images = jpegs(s.images, seed=s.seed, folder=self.jpeg_folder)
        labels = np.random.default_rng(s.seed + 1).integers(0, 1000, s.images)
        numbers = np.array_split(np.arange(s.images), s.image_shards)

        def samples(shard: int) -> Iterator[tuple[str, dict[str, bytes]]]:
            for i in numbers[shard]:
                yield f"{i:08d}", {"jpg": next(images), "cls": b"%d" % labels[i]}

        self._write_tars(folder, s.image_shards, samples, labels)

    def _records(self, folder: Path) -> None:
        s = self.sizes
        folder.mkdir(parents=True)
        labels = np.random.default_rng(s.seed + 1).integers(0, 1000, s.records)
        numbers = np.array_split(np.arange(s.records), s.record_shards)

        def samples(shard: int) -> Iterator[tuple[str, dict[str, bytes]]]:
            rng = np.random.default_rng([s.seed, shard])
            for i in numbers[shard]:
                yield f"{i:08d}", {"bin": rng.bytes(s.record_bytes), "cls": b"%d" % labels[i]}

        self._write_tars(folder, s.record_shards, samples, labels)

    def _write_tars(
        self,
        folder: Path,
        count: int,
        samples: Callable[[int], Iterator[tuple[str, dict[str, bytes]]]],
        labels: NDArray[np.int64],
    ) -> None:
        names = [f"shard-{i:05d}.tar" for i in range(count)]
        indexes = [write_tar(folder / name, samples(i)) for i, name in enumerate(names)]
        TarIndex.of_shards(names, indexes, labels).save(folder / "index.npz")

    def _raw(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        index = self.index("W1")
        for copy in range(RAW_COPIES):
            for path in index.paths:
                os.link(path, folder / f"copy{copy:02d}-{Path(path).name}")
        paths = sorted(str(p) for p in folder.iterdir())
        shard = np.concatenate([index.shard + copy * len(index.paths) for copy in range(RAW_COPIES)])
        fields = {name: np.tile(rows, (RAW_COPIES, 1)) for name, rows in index.fields.items()}
        TarIndex(paths, shard, fields, np.tile(index.labels, RAW_COPIES)).save(folder / "index.npz")

    def _tokens(self, folder: Path) -> None:
        """One file: what the hand-written peers, which gather from one mapped array, read fastest."""
        folder.mkdir(parents=True)
        rng = np.random.default_rng([self.sizes.seed, 2])
        with open(folder / "tokens.bin", "wb") as file:
            for at in range(0, self.sizes.tokens, 1 << 22):
                count = min(1 << 22, self.sizes.tokens - at)
                rng.integers(0, 50_257, count, dtype=np.uint16).tofile(file)

    def _rows(self, folder: Path) -> None:
        """Plain-encoded Parquet with snappy, pyarrow's default codec; no dictionary (random floats).

        The label is the row's number, so a batch shows which row groups it mixes.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        s = self.sizes
        folder.mkdir(parents=True)
        per_shard = s.rows // s.row_shards
        for i in range(s.row_shards):
            rng = np.random.default_rng([s.seed, 3, i])
            columns = {name: rng.standard_normal(per_shard, np.float32) for name in FEATURES}
            label = np.arange(i * per_shard, (i + 1) * per_shard, dtype=np.int64)
            path = folder / f"part-{i:05d}.parquet"
            table = pa.table(columns | {"label": label})
            pq.write_table(table, path, row_group_size=s.rows_per_group, use_dictionary=False)


def once(folder: Path, make: Callable[[Path], None], arguments: Mapping[str, object]) -> Path:
    """Fill `folder` by `make(temporary folder)` unless it was made from the same arguments; return it."""
    stamp, arguments = folder / "done.json", {"layout": LAYOUT, **arguments}
    if stamp.exists() and json.loads(stamp.read_text()) == arguments:
        return folder
    temporary = folder.with_name(folder.name + ".part")
    for old in (folder, temporary):
        shutil.rmtree(old, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    make(temporary)
    (temporary / "done.json").write_text(json.dumps(arguments))
    temporary.rename(folder)
    return folder


def read_through(folder: Path) -> int:
    """Read every file below `folder` so that it lies in the page cache; return the bytes read."""
    total, buffer = 0, bytearray(1 << 22)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total
