"""The windows and chunks of an epoch, one after another in the caller's thread: no engine, no credits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow import DataLoader, Mixture, ShardedDataset
from dataflow.batch.builder import BuildContext, BuildSettings
from dataflow.batch.chunk import BatchChunk
from dataflow.planning.length_aware import make_planner
from dataflow.planning.plan import StreamPlan
from dataflow.staging.stager import Stager
from dataflow.staging.window import StagedWindow
from dataflow.stream.stream import Stream
from prefetch.memory.arena import Arena, HeapKeeper
from prefetch.memory.guards import FileGuards
from sharding.order.epoch_order import Windows

_MEMORY = 1 << 28


class _NotedStager(Stager):
    """Notes which windows it stages."""

    numbers: list[int]

    def stage(self, units: Windows, number: int, indices: NDArray[np.int64] | None) -> StagedWindow:
        self.numbers.append(number)
        return super().stage(units, number, indices)


@dataclass(frozen=True)
class BuiltChunk:
    """What a chunk had credits for, and what it kept of them."""

    nbytes: int
    leased_bytes: int


class HandDrivenEpoch:
    """The first epoch of one rank alone. To be used in a `with` block.

    Args:
        loader: over datasets, with `batching=`; says what is delivered, and in which order.
        batches_per_chunk: at most.
        window_limit_bytes: a memory limit, as windows of a full shuffle are sized by it.
    """

    def __init__(
        self, loader: DataLoader, *, batches_per_chunk: int = 8, window_limit_bytes: int = _MEMORY
    ) -> None:
        dataset, batching = loader.dataset, loader.batching
        assert isinstance(dataset, ShardedDataset | Mixture)
        assert batching is not None
        plan = StreamPlan(
            dataset=dataset,
            shuffle=loader.shuffle,
            seed=loader.seed,
            batch_size=loader.batch_size or 1,
            rank=0,
            world_size=1,
            tail="uneven",
            planner=make_planner(batching, dataset, _MEMORY),
        )
        self._guards, self._arena = FileGuards(), Arena(limit_bytes=_MEMORY)
        opened = [source.source(0, self._guards) for source in dataset.sources]
        self._sources = [replace(source, number=number) for number, source in enumerate(opened)]
        self._stager = _NotedStager(self._sources, self._arena, num_readers=1, limit_bytes=window_limit_bytes)
        self.staged_windows = self._stager.numbers = []
        """Their numbers, in the order in which they were staged."""
        settings = BuildSettings(
            outputs=dataset.outputs,
            seed=loader.seed,
            transforms=[(None, False)] * len(opened),
            batching=batching,
            charge_bytes=1 << 20,
        )
        context = BuildContext(
            settings=settings,
            on_bad=lambda error: False,
            arena=self._arena,
            guards=self._guards,
            on_return=lambda nbytes: lambda: None,
            closing=threading.Event(),
            heap=HeapKeeper(_MEMORY),
        )
        self._num_batches = plan.epoch(0).num_batches
        self._stream = Stream(plan, self._stager, context, batches_per_chunk=batches_per_chunk)

    def windows(self) -> Iterator[StagedWindow]:
        """Up to the last of the epoch; nothing of them is read."""
        windows, left = self._stream.windows(0), self._num_batches
        while left:
            window = next(windows)
            left -= sum(chunk.num_batches for chunk in window.chunks())
            yield window

    def build(self) -> Iterator[BuiltChunk]:
        """Read the windows, build their chunks and drop the batches."""
        for window in self.windows():
            for read in window.reads():
                read()
            for chunk in window.chunks():
                yield _built(chunk)
                for done in chunk.closes:
                    done.close()

    def __enter__(self) -> HandDrivenEpoch:
        return self

    def __exit__(self, *_: Any) -> None:
        for source in self._sources:
            source.reader.close()
        self._guards.close()
        self._arena.close()


def _built(chunk: BatchChunk) -> BuiltChunk:
    nbytes = chunk.nbytes
    for decode in chunk.begin():
        decode()
    for _ in chunk.finish():
        pass
    return BuiltChunk(nbytes, chunk.leased_bytes)
