"""Hugging Face `datasets`: Arrow on disk, memory-mapped; one `dataset[indices]` per batch.

Formats that keep whole batches in Arrow ("arrow") are used wherever they are the faster way to tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.data import FEATURES, LENGTH, Data
from benchmarks.peers.torch import TarFields, Tokens

datasets.disable_progress_bars()


def _write(data: Data, name: str, schema: pa.Schema, batches: Callable[[], Iterable[list[Any]]]) -> Path:
    """An Arrow file of a dataset, written once in the format `datasets` maps."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for columns in batches():
                writer.write_batch(pa.record_batch(columns, schema=schema))

    return data.converted(name, make) / "data.arrow"


def _members(data: Data, workload: str, extension: str, kind: pa.DataType) -> Path:
    def batches() -> Iterator[list[Any]]:
        fields = TarFields(data.index(workload), extension)
        for rows in np.array_split(np.arange(len(fields)), max(1, len(fields) // 1000)):
            yield [pa.array([fields.read(i) for i in rows], kind), pa.array(fields.labels[rows])]

    schema = pa.schema([(extension, kind), ("cls", pa.int64())])
    return _write(data, f"hf-{workload}", schema, batches)


def _loader(dataset: Any, batch: int, to_tensors: Callable[..., Any], workers: int) -> Any:
    """A batch sampler as the sampler: one `dataset[indices]` per batch."""
    sampler = BatchSampler(RandomSampler(dataset), batch, drop_last=True)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    return DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=to_tensors, **options)


def prepare_w1(data: Data) -> None:
    _members(data, "W1", "jpg", pa.binary())


prepare_w1_raw = prepare_w1


def w1(data: Data, workers: int) -> Iterable[Any]:
    from benchmarks.peers.images import decode_crop_resize, image_batch

    dataset = datasets.Dataset.from_file(str(_members(data, "W1", "jpg", pa.binary()))).with_format("arrow")

    def to_tensors(table: pa.Table) -> Any:
        images = [decode_crop_resize(np.frombuffer(value.as_buffer(), np.uint8)) for value in table["jpg"]]
        return image_batch(images, table["cls"].to_numpy())

    return _loader(dataset, 64, to_tensors, workers)


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    path = str(_members(data, "W1", "jpg", pa.binary()))
    one = datasets.Dataset.from_file(path)
    dataset = datasets.concatenate_datasets([one] * 16).with_format("arrow")

    def to_tensors(table: pa.Table) -> Any:
        column = table["jpg"].combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        _, offsets, values = column.buffers()
        ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
        # Copied when the buffer is the mapped file itself: a tensor must not be read-only.
        flat = torch.from_numpy(np.frombuffer(values, np.uint8)[ends[0] : ends[-1]].copy())
        return flat, torch.from_numpy(ends - ends[0]), torch.tensor(table["cls"].to_numpy())

    return _loader(dataset, 64, to_tensors, workers)


TOKENS = pa.list_(pa.uint16(), LENGTH + 1)


def _tokens(data: Data) -> Path:
    def batches() -> Iterator[list[Any]]:
        tokens = Tokens(data)
        for rows in np.array_split(np.arange(len(tokens)), max(1, len(tokens) // 1000)):
            flat = tokens.__getitems__(rows).numpy().astype(np.uint16).ravel()
            yield [pa.FixedSizeListArray.from_arrays(pa.array(flat), type=TOKENS)]

    return _write(data, "hf-W2", pa.schema([("tokens", TOKENS)]), batches)


def prepare_w2(data: Data) -> None:
    _tokens(data)


def w2(data: Data, workers: int) -> Iterable[Any]:
    dataset = datasets.Dataset.from_file(str(_tokens(data))).with_format("arrow")

    def to_tensors(table: pa.Table) -> Any:
        flat = np.concatenate([chunk.flatten().to_numpy() for chunk in table["tokens"].chunks])
        return torch.from_numpy(flat.astype(np.int64).reshape(-1, LENGTH + 1))

    return _loader(dataset, 16, to_tensors, workers)


def _rows(data: Data) -> Path:
    import pyarrow.parquet as pq

    def batches() -> Iterator[list[Any]]:
        for path in data.files("W3"):
            for batch in pq.ParquetFile(path).iter_batches(data.sizes.rows_per_group):
                yield batch.columns

    schema = pa.schema([(name, pa.float32()) for name in FEATURES] + [("label", pa.int64())])
    return _write(data, "hf-W3", schema, batches)


def prepare_w3(data: Data) -> None:
    _rows(data)


def w3(data: Data, workers: int) -> Iterable[Any]:
    """Its Arrow fast path: batches in file order rows are not shuffled."""
    dataset = datasets.Dataset.from_file(str(_rows(data))).to_iterable_dataset(num_shards=100)
    batches = _ArrowBatches(dataset)
    return DataLoader(batches, None, num_workers=workers, persistent_workers=workers > 0)


class _ArrowBatches(torch.utils.data.IterableDataset):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")

    def __iter__(self) -> Iterator[Any]:
        for table in self._dataset.iter(4096, drop_last_batch=True):
            columns = [torch.from_numpy(table[name].to_numpy()) for name in FEATURES]
            yield torch.stack(columns, dim=1), torch.tensor(table["label"].to_numpy())


def prepare_w4(data: Data) -> None:
    _members(data, "W4", "bin", pa.binary(data.sizes.record_bytes))


def w4(data: Data, workers: int) -> Iterable[Any]:
    n = data.sizes.record_bytes
    dataset = datasets.Dataset.from_file(str(_members(data, "W4", "bin", pa.binary(n)))).with_format("arrow")

    def to_tensors(table: pa.Table) -> Any:
        parts = [
            np.frombuffer(c.buffers()[1], np.uint8)[c.offset * n :][: len(c) * n] for c in table["bin"].chunks
        ]
        return torch.from_numpy(np.concatenate(parts).reshape(-1, n)), torch.tensor(table["cls"].to_numpy())

    return _loader(dataset, 256, to_tensors, workers)
