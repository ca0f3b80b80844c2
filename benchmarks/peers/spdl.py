"""SPDL pipelines: threads, and operations on whole batches where items are small, as its guide advises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from benchmarks.data import Data


class _Epochs:
    """Builds a pipeline per epoch: SPDL's pipelines run once."""

    def __init__(
        self, source: Callable[[], Iterable[Any]], build: Callable[[PipelineBuilder], PipelineBuilder]
    ):
        self._source, self._build = source, build

    def __iter__(self) -> Iterator[Any]:
        builder = self._build(PipelineBuilder().add_source(self._source())).add_sink(3)
        pipeline = builder.build(num_threads=4)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


def _batches_of(n: int, batch: int) -> Callable[[], Iterable[Any]]:
    return lambda: (p for p in torch.randperm(n).split(batch) if len(p) == batch)


def _per_batch(fetch: Callable[[Any], Any], workers: int) -> Callable[[PipelineBuilder], PipelineBuilder]:
    return lambda builder: builder.pipe(fetch, concurrency=max(1, workers))


def w1(data: Data, workers: int) -> Iterable[Any]:
    from benchmarks.peers.torch import Images, collate_images

    images = Images(data)

    def build(builder: PipelineBuilder) -> PipelineBuilder:
        builder = builder.pipe(images.__getitem__, concurrency=max(1, workers))
        return builder.aggregate(64, drop_last=True).pipe(collate_images)

    return _Epochs(lambda: torch.randperm(len(images)).tolist(), build)


def w1_raw(data: Data, workers: int) -> Iterable[Any]:
    """SPDL's own tar reader, one shard per task."""
    paths = data.files("W1-raw")

    def read(path: str) -> list[Any]:
        with open(path, "rb") as file:
            members = [content for _, content in spdl.io.iter_tarfile(file)]
        return [(members[i], int(bytes(members[i + 1]))) for i in range(0, len(members), 2)]

    def collate(samples: list[Any]) -> Any:
        values, labels = zip(*samples, strict=True)
        return [bytes(v) for v in values], torch.tensor(labels)

    def build(builder: PipelineBuilder) -> PipelineBuilder:
        builder = builder.pipe(read, concurrency=max(1, workers)).disaggregate()
        return builder.aggregate(64, drop_last=True).pipe(collate)

    return _Epochs(lambda: np.random.permutation(paths).tolist(), build)


def w2(data: Data, workers: int) -> Iterable[Any]:
    from benchmarks.peers.torch import Tokens

    tokens = Tokens(data)
    return _Epochs(_batches_of(len(tokens), 16), _per_batch(tokens.__getitems__, workers))


def w3(data: Data, workers: int) -> Iterable[Any]:
    """One task per row group, cut into batches inside it; rows are shuffled inside a row group only."""
    import pyarrow.parquet as pq

    from benchmarks.peers.torch import row_group_batches

    footers = {path: pq.read_metadata(path) for path in data.files("W3")}
    groups = [(path, i) for path, footer in footers.items() for i in range(footer.num_row_groups)]

    def read(group: tuple[str, int]) -> list[Any]:
        path, i = group
        with pq.ParquetFile(path, metadata=footers[path], memory_map=True) as file:
            return list(row_group_batches(file.read_row_group(i, use_threads=False)))

    def source() -> list[Any]:
        return [groups[i] for i in torch.randperm(len(groups)).tolist()]

    # One list per task crosses the event loop; disaggregating inside it would cost a hop per batch.
    return _Flat(_Epochs(source, _per_batch(read, workers)))


class _Flat:
    def __init__(self, lists: Iterable[list[Any]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[Any]:
        for items in self._lists:
            yield from items


def w4(data: Data, workers: int) -> Iterable[Any]:
    """From the plain tars, by SPDL's own tar reader."""
    paths = data.files("W4")

    def read(path: str) -> list[Any]:
        with open(path, "rb") as file:
            members = [bytes(content) for _, content in spdl.io.iter_tarfile(file)]
        values = np.stack([np.frombuffer(m, np.uint8) for m in members[::2]])
        order = np.random.permutation(len(values))
        values, labels = torch.from_numpy(values[order]), torch.tensor([int(m) for m in members[1::2]])[order]
        return list(zip(values.split(256), labels.split(256), strict=True))

    return _Flat(_Epochs(lambda: np.random.permutation(paths).tolist(), _per_batch(read, workers)))


class _Batched:
    """Makes whole batches in a worker process, so that only indices go there."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, picks: list[int]) -> Any:
        return torch.utils.data.default_collate([self._dataset[i] for i in picks])


def mapped_in_processes(dataset: Any, batch: int, workers: int) -> Iterable[Any]:
    """SPDL's "MP", which its guide advises for Python that holds the GIL.

    Batches are made in a region of worker processes, which a process between feeds; a continuous source keeps
    them over epochs. They reach the consumer through its arena, as in `handover_loaders`, which takes less
    CPU than torch's shared memory. A consumer may hold four.
    """
    from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess
    from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig
    from torch.utils.data import BatchSampler, RandomSampler

    picks = BatchSampler(RandomSampler(dataset), batch, drop_last=True)
    builder = PipelineBuilder().add_source(picks, continuous=True)
    builder = builder.to(ProcessPoolExecutorConfig(max_workers=workers)).pipe(_Batched(dataset))
    in_flight = 2 * workers
    config = builder.to(MAIN_PROCESS).add_sink(in_flight).get_config()
    batch_bytes = batch * (dataset[0][0].nbytes + 8) + (1 << 16)  # values, labels, what describes them
    arena = SharedMemorySegmentPool(batch_bytes, count=in_flight + 4)
    return run_pipeline_in_subprocess(config, num_threads=1, buffer_size=in_flight, arena=arena)
