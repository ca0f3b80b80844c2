"""Write plain ustar shards quickly, and index them once for the peers that read by offset.

The index of a shard is two int64 arrays per extension, data offset and size, one entry per sample.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK = 512


def write_tar(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> dict[str, NDArray[np.int64]]:
    """Write `(key, {extension: bytes})` samples; return {extension: int64 [n, 2] of data offset and size}."""
    index: dict[str, list[tuple[int, int]]] = {}
    position = 0
    with open(path, "wb") as file:
        for key, fields in samples:
            for extension, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                file.write(info.tobuf(tarfile.USTAR_FORMAT))
                file.write(data)
                file.write(b"\0" * (-len(data) % BLOCK))
                index.setdefault(extension, []).append((position + BLOCK, len(data)))
                position += BLOCK + len(data) + (-len(data) % BLOCK)
        file.write(b"\0" * (2 * BLOCK))
    return {extension: np.array(rows, np.int64).reshape(-1, 2) for extension, rows in index.items()}


class TarIndex:
    """Where every sample of several tars lies: the table a careful user of a map-style dataset would save."""

    def __init__(
        self,
        paths: Sequence[str],
        shard: NDArray[np.int64],
        fields: Mapping[str, NDArray[np.int64]],
        labels: NDArray[np.int64],
    ) -> None:
        self.paths, self.shard, self.fields, self.labels = list(paths), shard, dict(fields), labels

    def __len__(self) -> int:
        return len(self.shard)

    @classmethod
    def of_shards(
        cls,
        paths: Sequence[str],
        indexes: Sequence[Mapping[str, NDArray[np.int64]]],
        labels: NDArray[np.int64],
    ) -> TarIndex:
        """Join the indexes that `write_tar` returned, in the order of `paths`."""
        sizes = [len(next(iter(index.values()))) for index in indexes]
        fields = {name: np.concatenate([index[name] for index in indexes]) for name in indexes[0]}
        return cls(paths, np.repeat(np.arange(len(paths)), sizes), fields, labels)

    def save(self, path: Path) -> None:
        """Write beside the shards; only their names are kept, so the folder may move."""
        columns: dict[str, NDArray[np.generic]] = {f"field.{k}": v for k, v in self.fields.items()}
        np.savez(
            path,
            allow_pickle=False,
            names=np.array([Path(p).name for p in self.paths]),
            shard=self.shard,
            labels=self.labels,
            **columns,
        )

    @classmethod
    def load(cls, path: Path) -> TarIndex:
        with np.load(path) as saved:
            fields = {name[6:]: saved[name] for name in saved.files if name.startswith("field.")}
            return cls(
                [str(path.parent / name) for name in saved["names"]], saved["shard"], fields, saved["labels"]
            )
