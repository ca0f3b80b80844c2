"""Single samples of a dataset, built in the calling thread from the same windows and columns as batches are.

Values are read one by one where the format tells where they lie (tar, tokens); of blocks that can be decoded
as a whole only (Parquet, Arrow, JSON Lines), the last few stay.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from dataflow.batch.transforms import transformed_together
from dataflow.limits import told_of_memory
from dataflow.outputs.columns import ChunkColumns, ChunkRows, Randomness
from dataflow.staging.block_source import BlockSource
from dataflow.staging.rows import RowReader, WindowPart
from dataflow.staging.window import StagedRows
from prefetch.memory.arena import Arena
from prefetch.memory.interrupts import as_exception, must_go_on
from sharding.spans import Ints

S = TypeVar("S")
_ARENA_BYTES = 64 << 20
_KEPT_BLOCKS = 4


class RandomAccess:
    """Builds single samples. Thread-safe; a process that was forked opens everything anew."""

    def __init__(self) -> None:
        self._opened: _OpenSource | None = None
        self._warned = set[str]()

    def samples(self, dataset: Any, indices: Sequence[SupportsIndex]) -> list[Any]:
        """The samples of a `ShardedDataset` at some indices, transformed. Raises what reading raises."""
        from dataflow.batch.samples import samples_of

        numbers = np.fromiter(map(operator.index, indices), np.int64)  # a float would be rounded silently
        if not len(numbers):
            return []
        columns, batch = self._build(dataset, numbers)
        rows = samples_of(batch, dataset.outputs, len(numbers))
        values = [rows[index] for index in range(len(numbers))]
        if dataset.transform is None:
            return values
        return transformed(values, columns, dataset.transform, wants_rng=dataset.transform_wants_rng)

    def columns(self, dataset: Any, indices: Sequence[int]) -> Any:
        """The same samples as a batch has them. `TypeError` for what is no list of integers."""
        numbers = np.asarray(indices, None if len(indices) else np.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise TypeError(
                f"indices must be a list of integers, got {numbers.ndim}-D {numbers.dtype}; a mask goes to "
                "dataset.subset(mask)"
            )
        if not len(numbers):
            raise IndexError(f"no sample of {len(dataset)} is asked for: there are no columns of none")
        if dataset.transform is None:
            return self._build(dataset, numbers)[1]
        from dataflow.batch.samples import collated

        return collated(self.samples(dataset, numbers.tolist()))

    def _build(self, dataset: Any, samples: NDArray[np.integer]) -> tuple[ChunkColumns, dict[str, Any]]:
        """The columns of some samples, and what they are in a batch."""
        if dataset.balance is not None:
            raise TypeError(
                "only a dataflow.DataLoader balances classes: index what balanced() was called on"
            )
        total, randomness = len(dataset), Randomness(dataset.seed, dataset.epoch)
        if (outside := samples[(samples < -total) | (samples >= total)]).size:
            raise IndexError(f"sample index out of range: {outside[0]} in a dataset of {total}")
        blocks, rows = dataset.selection.locate(np.where(samples < 0, samples + total, samples))
        with told_of_memory("find samples in their blocks", "write shards with smaller blocks (row groups)"):
            opened = self._opened
            if opened is None or opened.pid != os.getpid():
                # Without a lock, which another thread may have held when this process was forked; threads
                # that come at the same time open one each.
                opened = self._opened = _OpenSource(dataset.source(is_awaited=True))
            parts = opened.parts(blocks, rows, randomness)
            columns = ChunkColumns(
                ChunkRows(len(rows), lambda: parts),
                opened.arena,
                randomness,
                may_load=True,
                closing=threading.Event(),
            )
            batch = {output.name: output.build(columns).whole(columns) for output in dataset.outputs}
        if columns.bad:
            raise columns.bad[min(columns.bad)]
        columns.warn_once(self._warned)
        return columns, batch


class _OpenSource:
    """A source as one process reads single samples of it. Thread-safe."""

    def __init__(self, source: BlockSource) -> None:
        self.pid, self.arena, self._source = os.getpid(), Arena(limit_bytes=_ARENA_BYTES), source
        self._reader = RowReader(self.arena, keep_blocks=_KEPT_BLOCKS)
        self._stagers = [match.stager(self.arena, keep_blocks=_KEPT_BLOCKS) for match in source.matches]

    def parts(self, blocks: Ints, rows: Ints, randomness: Randomness) -> list[WindowPart]:
        """Reads some samples, and what they have in other files and datasets; where they lie then."""
        used, ordinal = np.unique(blocks, return_inverse=True)
        opened = self._reader.open(
            self._source,
            used,
            ordinal,
            rows,
            np.arange(len(rows)),
            share="few",
            seed=randomness.seed,
            epoch=randomness.epoch,
        )
        for read in opened.reads():
            read()
        parts = []
        for part, window in zip(opened.parts, opened.windows, strict=True):
            whole = window.with_clips(part.rows)
            if self._stagers:
                whole = beside = self._stagers[0].joined(window, part.rows, self._stagers)
                beside.read_matches()
            parts.append(structs.replace(part, window=whole))
        return parts


def transformed(
    samples: list[dict[str, Any]], columns: ChunkColumns, transform: Callable[..., S], *, wants_rng: bool
) -> list[S]:
    """Return what a transform makes of samples that `RandomAccess.build` gave with their columns.

    Raises `SampleError` for one that it fails with.
    """
    from dataflow.batch.samples import transform_reason

    names, origins = [*samples[0]], columns.rows.find_all(np.arange(len(samples)))
    together, failure = transformed_together(samples, [(transform, wants_rng)] * len(samples))
    if failure is None and len(together) == len(samples):
        return [together[index] for index in range(len(samples))]

    def apply(sample: dict[str, Any], window: StagedRows, row: int) -> S:
        try:
            if wants_rng:
                return transform(sample, rng=columns.randomness.generator(window, row))
            return transform(sample)
        except BaseException as error:
            if must_go_on(error):
                raise
            reason = transform_reason(error, names)
            raise window.sample_error(row, reason, None, stage="transform") from error

    results = [apply(sample, *origin) for sample, origin in zip(samples, origins, strict=True)]
    if failure is not None:
        raise as_exception(failure)
    return results
