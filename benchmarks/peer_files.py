"""Our own loaders over the files of peers, as their writers left them, and over tars of the same samples.

`prepare_*` builds the catalog only: the owner's `prepare_*` writes the files, and runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import LENGTH, Data
from benchmarks.peers.torch import Tokens
from benchmarks.tars import write_tar
from dataflow import DataLoader, ShardedDataset

FOLDERS = {
    ("mds", "W4"): "mosaic-W4",
    ("mds", "W2"): "mosaic-W2",
    ("litdata", "W4"): "litdata-W4",
    ("litdata", "W2"): "litdata-W2",
    ("tfrecord", "W4"): "tf-W4",
    ("tfrecord", "W2"): "tf-W2",
    ("array_record", "W4"): "grain-W4-plain",
    ("array_record", "W2"): "grain-W2-plain",
    ("tar", "W2"): "tars-W2",
}
"""The folder below `converted` that holds a workload in a format."""
ENDINGS = {"mds": "*.mds", "litdata": "*.bin", "tfrecord": "*.tfrecord", "array_record": "*.array_record"}
BATCHES = {"W2": 16, "W4": 256}
TOKEN_TARS = 20


class Batches:
    """A loader's batches as tuples of tensors, as the owners' loaders give them."""

    def __init__(self, loader: Any, delivered: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
        self._loader, self._delivered = loader, delivered

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return map(self._delivered, self._loader)

    def close(self) -> None:
        """End the loader."""
        self._loader.close()


def folder_of(data: Data, name: str, workload: str) -> Path:
    """The folder of a workload in a format."""
    if (name, workload) == ("tar", "W4"):
        return data.root / "W4"
    return data.root / "converted" / FOLDERS[name, workload]


def sources(data: Data, name: str, workload: str, server: str = "") -> list[str]:
    """Files of a workload in a format; `server`: their URLs at the server of the data's folder."""
    folder = folder_of(data, name, workload)
    paths = sorted(folder.glob(ENDINGS.get(name, "*.tar")))
    return [f"{server}/{path.relative_to(data.root)}" if server else str(path) for path in paths]


def loader(data: Data, name: str, workload: str, server: str = "") -> Batches:
    """Our loader over a workload in a format, shuffled, with no setting but what the samples are."""
    kind = "http" if server else "local"
    catalog = data.root / "converted" / "catalogs" / f"{name}-{workload}-{kind}.arrow"
    catalog.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {}
    if name == "tar":
        options = {"decode": {"bin": None, "cls": "int"} if workload == "W4" else None}
    elif name == "litdata" and workload == "W2":
        options = {"length": LENGTH + 1}
    elif workload == "W4":
        options = {"decode": None}
    dataset = ShardedDataset(sources(data, name, workload, server), catalog=str(catalog), **options)
    made = DataLoader(dataset, BATCHES[workload], shuffle=True, drop_last=True)
    return Batches(made, _DELIVERED.get((name, workload), _tokens if workload == "W2" else _records))


def _records(batch: dict[str, Any]) -> tuple[Any, ...]:
    rows, classes = batch["bin"], batch["cls"]
    # LitData writes such samples as rows of Arrow, whose byte strings may have any size.
    return rows if isinstance(rows, torch.Tensor) else rows.values.view(len(classes), -1), classes


def _tokens(batch: dict[str, Any]) -> tuple[Any, ...]:
    return (batch["tokens"].to(torch.int64),)


def _labelled(batch: dict[str, Any]) -> tuple[Any, ...]:
    rows = batch["record"]
    return rows[:, 8:], rows[:, :8].clone().view(torch.int64)[:, 0]


def _raw_tokens(name: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return lambda batch: (batch[name].view(torch.uint16).to(torch.int64),)


_DELIVERED = {
    ("array_record", "W4"): _labelled,
    ("array_record", "W2"): _raw_tokens("record"),
    ("tar", "W2"): _raw_tokens("bin"),
}


def token_tars(data: Data) -> Path:
    """The windows of W2 as members of tars, uint16."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        tokens = Tokens(data)
        per_tar = -(-len(tokens) // TOKEN_TARS)
        for shard in range(TOKEN_TARS):
            rows = range(shard * per_tar, min(len(tokens), (shard + 1) * per_tar))
            members = ((f"{i:08d}", {"bin": tokens[i].to(torch.uint16).numpy().tobytes()}) for i in rows)
            write_tar(folder / f"shard-{shard:05d}.tar", members)

    return data.converted("tars-W2", make)
