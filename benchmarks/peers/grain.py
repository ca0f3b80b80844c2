"""Grain: random-access sources, `MapDataset` shuffles globally, reads ahead on threads.

`workers` is the number of read threads; 0 means none, which Grain advises for data in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.data import Data
from benchmarks.peers.torch import Images, TarFields, Tokens, collate_images, row_group_batches

_PLAIN = "group_size:1,uncompressed"


def _read(dataset: Any, workers: int) -> Iterable[Any]:
    return dataset.to_iter_dataset(
        grain.ReadOptions(num_threads=workers, prefetch_buffer_size=64 if workers else 0)
    )


def w1(data: Data, workers: int) -> Iterable[Any]:
    dataset = grain.MapDataset.source(Images(data)).shuffle(seed=0)
    return _Epochs(_read(dataset, workers).batch(64, drop_remainder=True, batch_fn=collate_images))


class _Epochs:
    """Grain's batches as an iterable that may be iterated again."""

    def __init__(self, dataset: Any, to_tensors: Callable[[Any], Any] = lambda batch: batch) -> None:
        self._dataset, self._to_tensors = dataset, to_tensors

    def __iter__(self) -> Any:
        return map(self._to_tensors, self._dataset)


def w2(data: Data, workers: int) -> Iterable[Any]:
    dataset = grain.MapDataset.source(Tokens(data)).shuffle(seed=0).map(lambda tokens: tokens.numpy())
    return _Epochs(_read(dataset, workers).batch(16, drop_remainder=True), torch.from_numpy)


class _RowGroups:
    """Row groups as a random-access source: element i is row group i, cut into shuffled batches."""

    def __init__(self, data: Data) -> None:
        import pyarrow.parquet as pq

        self._footers = {path: pq.read_metadata(path) for path in data.files("W3")}
        self._groups = [(p, i) for p, footer in self._footers.items() for i in range(footer.num_row_groups)]

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, i: int) -> list[Any]:
        import pyarrow.parquet as pq

        path, number = self._groups[i]
        with pq.ParquetFile(path, metadata=self._footers[path], memory_map=True) as file:
            return list(row_group_batches(file.read_row_group(number, use_threads=False)))


def w3(data: Data, workers: int) -> Iterable[Any]:
    """Rows are shuffled inside a row group only. Few row groups are read ahead: each is 8 MB."""
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    groups = grain.MapDataset.source(_RowGroups(data)).shuffle(seed=0).to_iter_dataset(options)

    class Batches:
        def __iter__(self) -> Any:
            for batches in groups:
                yield from batches

    return Batches()


def _write(data: Data, name: str, records: Iterable[bytes], options: str) -> str:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        writer = ArrayRecordWriter(str(folder / "records.array_record"), options)
        for record in records:
            writer.write(record)
        writer.close()

    return str(data.converted(name, make) / "records.array_record")


def _records(data: Data, name: str = "grain-W4", options: str = "group_size:1") -> str:
    fields = TarFields(data.index("W4"), "bin")
    records = (int(fields.labels[i]).to_bytes(8, "little") + fields.read(i) for i in range(len(fields)))
    return _write(data, name, records, options)


def prepare_w4(data: Data) -> None:
    _records(data)


def w4(data: Data, workers: int) -> Iterable[Any]:
    """From ArrayRecord, Grain's own format, compressed as it is by default."""
    return _labelled(_records(data), workers)


def _plain_records(data: Data) -> str:
    return _records(data, "grain-W4-plain", _PLAIN)


def prepare_w4_plain(data: Data) -> None:
    _plain_records(data)


def w4_plain(data: Data, workers: int) -> Iterable[Any]:
    """From ArrayRecord that is not compressed."""
    return _labelled(_plain_records(data), workers)


def _labelled(path: str, workers: int) -> Iterable[Any]:
    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path)).shuffle(seed=0)

    def batch(records: list[bytes]) -> Any:
        rows = np.stack([np.frombuffer(record, np.uint8) for record in records])
        return torch.from_numpy(rows[:, 8:]), torch.from_numpy(rows[:, :8].copy().view(np.int64)[:, 0])

    # Batched before reading ahead: a batch is then one `__getitems__`.
    return _Epochs(_read(dataset.batch(256, drop_remainder=True, batch_fn=batch), workers))


def _plain_tokens(data: Data) -> str:
    tokens = Tokens(data)
    records = (tokens[i].numpy().astype(np.uint16).tobytes() for i in range(len(tokens)))
    return _write(data, "grain-W2-plain", records, _PLAIN)


def prepare_w2_plain(data: Data) -> None:
    _plain_tokens(data)


def w2_plain(data: Data, workers: int) -> Iterable[Any]:
    """From ArrayRecord that is not compressed, tokens as uint16."""
    source = grain.sources.ArrayRecordDataSource(_plain_tokens(data))
    dataset = grain.MapDataset.source(source).shuffle(seed=0)

    def batch(records: list[bytes]) -> Any:
        return np.stack([np.frombuffer(record, np.uint16) for record in records]).astype(np.int64)

    return _Epochs(_read(dataset.batch(16, drop_remainder=True, batch_fn=batch), workers), torch.from_numpy)
