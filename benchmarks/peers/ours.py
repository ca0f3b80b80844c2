"""Our own loaders, through the public API, with the settings the documentation names and no others.

The catalog is built once by `prepare_*`, as `dataflow index` does, so that the first batch needs no scan.
`workers` is not used: the loader picks its own threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import FEATURES, LENGTH, Data
from benchmarks.peers.bars import MEMORY_LIMIT_MB
from dataflow import DataLoader, Image, ShardedDataset


def _dataset(data: Data, workload: str, name: str, **options: Any) -> ShardedDataset:
    folder = data.converted(f"dataflow-{name}", lambda folder: folder.mkdir(parents=True))
    return ShardedDataset(data.files(workload), catalog=str(Path(folder) / "catalog.arrow"), **options)


def _loader(dataset: ShardedDataset, batch: int) -> Iterable[Any]:
    return DataLoader(
        dataset, batch_size=batch, shuffle=True, drop_last=True, memory_limit=int(MEMORY_LIMIT_MB * 1e6)
    )


def _images(data: Data) -> ShardedDataset:
    decode = {"jpg": Image(size=224, crop="random_resized"), "cls": "int"}
    return _dataset(data, "W1", "w1", decode=decode)


def w1(data: Data, workers: int) -> Iterable[Any]:
    return _loader(_images(data), 64)


def _raw(data: Data) -> ShardedDataset:
    return _dataset(data, "W1-raw", "w1-raw", decode={"jpg": None, "cls": "int"})


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    return _loader(_raw(data), 64)


def _tokens(data: Data) -> ShardedDataset:
    return _dataset(data, "W2", "w2", format="tokens", dtype="uint16", length=LENGTH)


def w2(data: Data, workers: int) -> Iterable[Any]:
    return _loader(_tokens(data), 16)


def _rows(data: Data) -> ShardedDataset:
    return _dataset(data, "W3", "w3", columns={"features": FEATURES, "label": "label"})


def w3(data: Data, workers: int) -> Iterable[Any]:
    return _loader(_rows(data), 4096)


def _records(data: Data) -> ShardedDataset:
    return _dataset(data, "W4", "w4", decode={"bin": None, "cls": "int"})


def w4(data: Data, workers: int) -> Iterable[Any]:
    return _loader(_records(data), 256)


def prepare_w1(data: Data) -> None:
    len(_images(data))


def prepare_w1_raw(data: Data) -> None:
    len(_raw(data))


def prepare_w2(data: Data) -> None:
    len(_tokens(data))


def prepare_w3(data: Data) -> None:
    len(_rows(data))


def prepare_w4(data: Data) -> None:
    len(_records(data))
