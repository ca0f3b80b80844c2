"""The loaders beside each other, each over the same dataset and number of workers, as its own guide advises.

All of them keep two batches a worker in flight, in order. `start` is the start method of processes, "default"
the loader's own; `persistent` keeps the workers over epochs, or whatever the loader has for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from benchmarks.handover.feeds import Feed, Fetch

ARENA_MARGIN = 1 << 16


@dataclass(frozen=True)
class How:
    """What a measurement asks of a loader."""

    workers: int = 2
    start: str = "default"
    persistent: bool = True


def _torch_options(feed: Feed, how: How) -> dict[str, Any]:
    return {
        "batch_size": feed.batch_size,
        "shuffle": False,
        "num_workers": how.workers,
        "collate_fn": feed.collate,
        "multiprocessing_context": None if how.start == "default" else how.start,
        "persistent_workers": how.persistent,
    }


def _in_process(feed: Feed, how: How) -> Iterable[Any]:
    """No workers: what building the batches costs where nothing is handed over."""
    from torch.utils.data import DataLoader

    return DataLoader(feed.dataset, feed.batch_size, shuffle=False, collate_fn=feed.collate)


def _torch(feed: Feed, how: How) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(feed.dataset, **_torch_options(feed, how))


def _torch_any_order(feed: Feed, how: How) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(feed.dataset, in_order=False, **_torch_options(feed, how))


def _stateful(feed: Feed, how: How) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(feed.dataset, **_torch_options(feed, how))


def _ours(feed: Feed, how: How) -> Iterable[Any]:
    from dataflow import DataLoader

    # The pause between two epochs is what is measured.
    return DataLoader(feed.dataset, prefetch_across_epochs=how.persistent, **_torch_options(feed, how))


def _ours_thread(feed: Feed, how: How) -> Iterable[Any]:
    from dataflow import DataLoader

    return DataLoader(feed.dataset, workers="thread", **_torch_options(feed, how))


def _nodes(feed: Feed, how: How, method: str) -> Iterable[Any]:
    """The recipe of its guide "Migrating to torchdata.nodes", with `__getitems__` where there is one."""
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper

    node = Batcher(SamplerWrapper(SequentialSampler(feed.dataset)), feed.batch_size, drop_last=False)
    context = None if how.start == "default" else how.start
    node = ParallelMapper(
        node, Fetch(feed), num_workers=how.workers, method=method, multiprocessing_context=context
    )
    return Loader(Prefetcher(node, prefetch_factor=2 * how.workers))


def _nodes_process(feed: Feed, how: How) -> Iterable[Any]:
    return _nodes(feed, how, "process")


def _nodes_thread(feed: Feed, how: How) -> Iterable[Any]:
    return _nodes(feed, how, "thread")


def _spdl(feed: Feed, how: How) -> Iterable[Any]:
    """SPDL's own replacement for torch's DataLoader; it starts its workers anew each epoch."""
    from spdl.dataloader import get_pytorch_dataloader

    options = _torch_options(feed, how)
    del options["persistent_workers"]  # not supported
    loader = get_pytorch_dataloader(feed.dataset, in_order=True, **options)
    return _Closing(loader, loader._shmem.unlink)  # SPDL leaves this to the end of the process


class _Closing:
    """A loader with what has to be done in the end."""

    def __init__(self, loader: Iterable[Any], close: Callable[[], None]) -> None:
        self._loader, self.close = loader, close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _spdl_stages(feed: Feed, how: How) -> Any:
    from spdl.pipeline import PipelineBuilder

    picks = BatchSampler(SequentialSampler(feed.dataset), feed.batch_size, drop_last=False)
    builder = PipelineBuilder().add_source(picks, continuous=how.persistent)
    builder = builder.pipe(Fetch(feed), concurrency=how.workers, output_order="input")
    return builder.add_sink(2 * how.workers)


class _SpdlThreads:
    """SPDL's "MT": stages on threads of this process, kept over epochs by a continuous source."""

    def __init__(self, feed: Feed, how: How) -> None:
        self._make = lambda: _spdl_stages(feed, how).build(num_threads=how.workers)
        self._kept: Any = self._make() if how.persistent else None

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from self._kept
            return
        pipeline = self._make()
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.stop()


def _spdl_subprocess(feed: Feed, how: How) -> Iterable[Any]:
    """SPDL's "MTP", which its guide recommends: all threads in one process, batches through its arena."""
    from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess

    in_flight = 2 * how.workers
    arena = SharedMemorySegmentPool(feed.batch_bytes + ARENA_MARGIN, count=in_flight + feed.held + 3)
    return run_pipeline_in_subprocess(
        _spdl_stages(feed, how).get_config(),
        num_threads=how.workers,
        buffer_size=in_flight,
        arena=arena,
        mp_context=None if how.start == "default" else how.start,
    )


class _Batches:
    """Finished batches as elements, as numpy arrays: per sample, Grain's own batching costs more."""

    def __init__(self, feed: Feed) -> None:
        self._fetch, self._size = Fetch(feed), feed.batch_size
        self._count = len(feed.dataset) // feed.batch_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        batch = self._fetch(range(i * self._size, (i + 1) * self._size))
        return _each(batch, torch.Tensor.numpy)


def _each(batch: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        return {name: convert(value) for name, value in batch.items()}
    return convert(batch)


class _Grain:
    """Spawned processes that put arrays into shared memory; over epochs by `repeat`, as its guide does.

    Arrays below 4 KiB are pickled instead (`min_shm_size`), which its documentation advises for small ones.
    """

    def __init__(self, feed: Feed, how: How) -> None:
        import grain

        dataset = grain.MapDataset.source(_Batches(feed))
        if how.persistent:
            dataset = dataset.repeat()
        in_memory = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        options = grain.experimental.DatasetOptions(min_shm_size=4096)
        read = grain.experimental.WithOptionsIterDataset(dataset.to_iter_dataset(in_memory), options)
        self._dataset = read.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=how.workers, per_worker_buffer_size=2)
        )

    def __iter__(self) -> Iterator[Any]:
        with contextlib.closing(iter(self._dataset)) as batches:
            for batch in batches:
                yield _each(batch, torch.from_numpy)


@dataclass(frozen=True)
class Loader:
    """One way of handing batches over."""

    make: Callable[[Feed, How], Iterable[Any]]
    package: str
    """Imported before anything is timed."""
    starts: tuple[str, ...] = ()
    """Start methods whose time to the first batch is measured."""
    turns: tuple[bool, ...] = ()
    """Whether workers are persistent in the epoch turns that are measured."""
    firsts: bool = False
    """Whether its first batch in a process is measured, by what the process does beside."""
    delays: bool = False
    """Whether the effect of delayed samples is measured."""
    rate: bool = True
    """Whether anything else is."""


OURS, OURS_THREAD, TORCH, IN_PROCESS = "ours", "ours-thread", "torch", "in-process"
LOADERS: Mapping[str, Loader] = {
    IN_PROCESS: Loader(_in_process, "torch.utils.data"),
    OURS: Loader(_ours, "dataflow.loader", ("default", "fork", "spawn"), (True, False), True, True),
    OURS_THREAD: Loader(_ours_thread, "dataflow.loader", ("default",), (True, False), delays=True),
    TORCH: Loader(_torch, "torch.utils.data", ("fork", "forkserver", "spawn"), (True, False), True, True),
    "torch-any-order": Loader(_torch_any_order, "torch.utils.data", delays=True, rate=False),
    "stateful": Loader(_stateful, "torchdata.stateful_dataloader", ("fork",), (True, False)),
    "nodes-process": Loader(_nodes_process, "torchdata.nodes", ("fork",), (False,)),
    "nodes-thread": Loader(_nodes_thread, "torchdata.nodes", ("default",), (False,)),
    "spdl": Loader(_spdl, "spdl.dataloader", ("fork",), (False,)),
    "spdl-thread": Loader(_SpdlThreads, "spdl.pipeline", ("default",), (True,)),
    "spdl-subprocess": Loader(_spdl_subprocess, "spdl.pipeline", ("fork",), (True,)),
    "grain": Loader(_Grain, "grain", ("spawn",), (True,)),
}
