"""torch `DataLoader`, `StatefulDataLoader` and `torchdata.nodes` over careful map-style datasets.

Tar shards are read at indexed offsets; W2 and W4 are the hand-written memory-mapped `__getitems__` that
fetches a whole batch in one call, the fastest form torch offers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from benchmarks.data import FEATURES, LENGTH, Data
from benchmarks.tars import TarIndex


class TarFields:
    """Reads members of indexed tars with `pread`; handles open once per process."""

    def __init__(self, index: TarIndex, extension: str) -> None:
        self.paths, self.shard = index.paths, index.shard
        self.at, self.size = index.fields[extension].T.copy()
        self.labels = index.labels
        self._handles: dict[int, int] = {}
        self._owner = 0

    def __len__(self) -> int:
        return len(self.shard)

    def read(self, i: int) -> bytes:
        if self._owner != os.getpid():
            self._handles, self._owner = {}, os.getpid()
        shard = int(self.shard[i])
        if shard not in self._handles:
            self._handles[shard] = os.open(self.paths[shard], os.O_RDONLY)
        return os.pread(self._handles[shard], int(self.size[i]), int(self.at[i]))


class Images(Dataset):
    """Decoded, cropped images from the tars."""

    def __init__(self, data: Data) -> None:
        from benchmarks.peers.images import decode_crop_resize

        self._fields, self._decode = TarFields(data.index("W1"), "jpg"), decode_crop_resize

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self._decode(self._fields.read(i)), self._fields.labels[i]


def collate_images(samples: Sequence[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    from benchmarks.peers.images import image_batch

    images, labels = zip(*samples, strict=True)
    return image_batch(images, np.array(labels))


def _options(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "persistent_workers": workers > 0}


def w1(data: Data, workers: int) -> Iterable[Any]:
    return DataLoader(Images(data), 64, shuffle=True, collate_fn=collate_images, **_options(workers))


def w1_stateful(data: Data, workers: int) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Images(data), 64, shuffle=True, collate_fn=collate_images, **_options(workers))


def w1_nodes(data: Data, workers: int) -> Iterable[Any]:
    """Threads, as the tutorial of `torchdata.nodes` advises for work that releases the GIL."""
    return _nodes(Images(data).__getitem__, range(data.sizes.images), 64, collate_images, workers)


def _nodes(
    fetch: Callable[..., Any], source: Any, batch: int, collate: Callable[..., Any], workers: int
) -> Any:
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    node = SamplerWrapper(RandomSampler(source))
    if workers:
        node = ParallelMapper(node, fetch, num_workers=workers, method="thread")
    else:
        node = Mapper(node, fetch)
    return Loader(Prefetcher(Mapper(Batcher(node, batch, drop_last=True), collate), 4))


def loose_files(data: Data) -> list[str]:
    """Each W1 image as a file of its own, written once."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        fields = TarFields(data.index("W1"), "jpg")
        for i in range(len(fields)):
            (folder / f"{i:06d}.jpg").write_bytes(fields.read(i))

    return sorted(str(p) for p in data.converted("torch-loose", write).glob("*.jpg"))


def prepare_w1_raw(data: Data) -> None:
    loose_files(data)


class RawFiles(Dataset):
    """Undecoded files; a batch is read into one tensor, ragged by offsets."""

    def __init__(self, data: Data) -> None:
        index = data.index("W1")
        self.paths, self.sizes = loose_files(data), index.fields["jpg"][:, 1].copy()
        self.labels = index.labels

    def __len__(self) -> int:
        return 16 * len(self.paths)  # as long an epoch as the others have

    def __getitems__(self, picks: Sequence[int]) -> Any:
        rows = np.asarray(picks) % len(self.paths)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(self.sizes[rows], out=offsets[1:])
        values = torch.empty(int(offsets[-1]), dtype=torch.uint8)
        target = memoryview(values.numpy())
        for row, start, end in zip(rows.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            handle = os.open(self.paths[row], os.O_RDONLY)
            os.readv(handle, [target[start:end]])
            os.close(handle)
        return values, torch.from_numpy(offsets), torch.from_numpy(self.labels[rows])


def _as_is(batch: Any) -> Any:
    return batch


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    return DataLoader(RawFiles(data), 64, shuffle=True, collate_fn=_as_is, **_options(workers))


def w1_raw_nodes(data: Data, workers: int) -> Iterable[Any]:
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    files = RawFiles(data)
    node = Batcher(SamplerWrapper(RandomSampler(range(len(files)))), 64)
    if workers:
        return Loader(ParallelMapper(node, files.__getitems__, num_workers=workers, method="thread"))
    return Loader(Prefetcher(Mapper(node, files.__getitems__), 4))


class Tokens(Dataset):
    """Memory-mapped tokens: one gather and one widening copy per batch."""

    def __init__(self, data: Data) -> None:
        self._path = data.files("W2")[0]
        self._count = (os.path.getsize(self._path) // 2 - 1) // LENGTH
        self._samples: torch.Tensor | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._mapped()[i].view(torch.uint16).to(torch.int64)

    def __getitems__(self, picks: Sequence[int]) -> torch.Tensor:
        rows = self._mapped().index_select(0, torch.as_tensor(picks))
        return rows.view(torch.uint16).to(torch.int64)  # torch gathers int16, and widens uint16

    def _mapped(self) -> torch.Tensor:
        if self._samples is None:
            tokens = torch.from_numpy(np.asarray(np.memmap(self._path, np.int16, "c")))
            self._samples = tokens.as_strided((self._count, LENGTH + 1), (LENGTH, 1))
        return self._samples


def w2(data: Data, workers: int) -> Iterable[Any]:
    return DataLoader(Tokens(data), 16, shuffle=True, collate_fn=_as_is, **_options(workers))


class _PerSample(Dataset):
    def __init__(self, data: Data) -> None:
        self._tokens = Tokens(data)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._tokens[i]


def w2_per_sample(data: Data, workers: int) -> Iterable[Any]:
    return DataLoader(_PerSample(data), 16, shuffle=True, **_options(workers))


def w2_nodes(data: Data, workers: int) -> Iterable[Any]:
    tokens = Tokens(data)
    return _batched_nodes(tokens.__getitems__, range(len(tokens)), 16, workers)


def _batched_nodes(fetch: Callable[..., Any], source: Any, batch: int, workers: int) -> Any:
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, SamplerWrapper

    node = Batcher(SamplerWrapper(RandomSampler(source)), batch)
    if workers:
        return Loader(ParallelMapper(node, fetch, num_workers=workers, method="thread"))
    return Loader(Mapper(node, fetch))


class RowGroups(IterableDataset):
    """Row groups in random order, rows shuffled inside each; workers take every n-th group."""

    def __init__(self, data: Data) -> None:
        self._paths, self._epoch = data.files("W3"), 0

    def __iter__(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        files = [pq.ParquetFile(path, memory_map=True) for path in self._paths]
        groups = [(file, i) for file in files for i in range(file.num_row_groups)]
        self._epoch += 1
        order = np.random.default_rng(self._epoch).permutation(len(groups))
        worker = get_worker_info()
        for number in order[worker.id :: worker.num_workers] if worker else order:
            file, i = groups[number]
            yield from row_group_batches(file.read_row_group(i, use_threads=False))


def row_group_batches(table: Any, batch: int = 4096) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Full batches of one row group, its rows shuffled."""
    features, label = shuffled_rows(table)
    for at in range(0, len(label) - batch + 1, batch):
        yield features[at : at + batch], label[at : at + batch]


def shuffled_rows(table: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [rows, 20], int64 [rows]) of a table, in a random order."""
    features = torch.stack([torch.from_numpy(table[name].to_numpy()) for name in FEATURES], dim=1)
    order = torch.randperm(len(features))
    return features[order], torch.from_numpy(table["label"].to_numpy())[order]


def w3(data: Data, workers: int) -> Iterable[Any]:
    return DataLoader(RowGroups(data), None, **_options(workers))


class Rows(Dataset):
    """The whole table in memory: the fullest shuffle, at the price of the memory."""

    def __init__(self, data: Data) -> None:
        import pyarrow.parquet as pq

        tables = [pq.read_table(path) for path in data.files("W3")]
        self.features = torch.cat(
            [torch.stack([torch.from_numpy(t[name].to_numpy()) for name in FEATURES], dim=1) for t in tables]
        )
        self.label = torch.cat([torch.from_numpy(t["label"].to_numpy()) for t in tables])

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, picks: Sequence[int]) -> Any:
        rows = torch.as_tensor(picks)
        return self.features[rows], self.label[rows]


def w3_in_memory(data: Data, workers: int) -> Iterable[Any]:
    rows = Rows(data)
    sampler = BatchSampler(RandomSampler(rows), 4096, drop_last=True)
    return DataLoader(rows, None, sampler=sampler, **_options(workers))


class Records(Dataset):
    """Fixed-size records in one memory-mapped file of their own: one gather per batch."""

    def __init__(self, data: Data) -> None:
        self._path, self._n = records_file(data), data.sizes.record_bytes
        self.labels = torch.from_numpy(np.load(self._path.with_name("labels.npy")))
        self._records: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, picks: Sequence[int]) -> Any:
        if self._records is None:
            mapped = np.memmap(self._path, np.uint8, "c").reshape(-1, self._n)
            self._records = torch.from_numpy(np.asarray(mapped))
        rows = torch.tensor(picks)
        return self._records.index_select(0, rows), self.labels.index_select(0, rows)


def records_file(data: Data) -> Path:
    """All W4 records end to end in one file, written once."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        fields = TarFields(data.index("W4"), "bin")
        with open(folder / "records.bin", "wb") as file:
            for i in range(len(fields)):
                file.write(fields.read(i))
        np.save(folder / "labels.npy", fields.labels)

    return data.converted("torch-records", write) / "records.bin"


def prepare_w4(data: Data) -> None:
    records_file(data)


def w4(data: Data, workers: int) -> Iterable[Any]:
    return DataLoader(Records(data), 256, shuffle=True, collate_fn=_as_is, **_options(workers))


def w4_nodes(data: Data, workers: int) -> Iterable[Any]:
    records = Records(data)
    return _batched_nodes(records.__getitems__, range(len(records)), 256, workers)
