"""Single samples of a dataset, built in the calling thread from the same windows and columns as batches are.

Values are read one by one where the format tells where they lie (tar, tokens); of blocks that can be decoded
as a whole only (Parquet, Arrow, JSON Lines), the last few stay.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from dataflow.batch.transforms import transformed_together
from dataflow.outputs.columns import ChunkColumns, ChunkRows, Randomness
from dataflow.outputs.output import Output
from dataflow.staging.rows import RowReader, WindowPart
from dataflow.staging.source import Source
from dataflow.staging.window import StagedRows
from prefetch.memory.arena import Arena
from prefetch.memory.interrupts import as_exception, must_go_on

S = TypeVar("S")
_ARENA_BYTES = 64 << 20
_KEPT_BLOCKS = 4


class RandomAccess:
    """Builds single samples. Thread-safe; a process that was forked opens everything anew."""

    def __init__(self) -> None:
        self._opened: _OpenSource | None = None

    def build(
        self,
        open_source: Callable[[], Source],
        outputs: Sequence[Output],
        blocks: NDArray[np.int64],
        rows: NDArray[np.int64],
        randomness: Randomness,
    ) -> tuple[ChunkColumns, list[dict[str, Any]]]:
        """Some samples, and their columns, which have the errors of those that are bad.

        Args:
            open_source: what is read; called once a process.
            outputs: the columns that samples have.
            blocks: [n] the block of each sample.
            rows: [n] its row in the block.
            randomness: what random augmentation is a function of.

        Raises what reading raises.
        """
        from dataflow.batch.samples import samples_of

        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            # Without a lock, which another thread may have held when this process was forked; threads that
            # come at the same time open one each.
            opened = self._opened = _OpenSource(open_source())
        parts = opened.parts(blocks, rows, randomness)
        columns = ChunkColumns(
            ChunkRows(len(rows), lambda: parts),
            opened.arena,
            randomness,
            may_load=True,
            closing=threading.Event(),
        )
        batch = {output.name: output.build(columns).whole(columns) for output in outputs}
        samples = samples_of(batch, outputs, len(rows))
        return columns, [samples[at] for at in range(len(rows))]


class _OpenSource:
    """A source as one process reads single samples of it. Thread-safe."""

    def __init__(self, source: Source) -> None:
        from dataflow.staging.joined import MatchStager

        self.pid, self.arena, self._source = os.getpid(), Arena(limit_bytes=_ARENA_BYTES), source
        self._reader = RowReader(self.arena, keep_blocks=_KEPT_BLOCKS)
        self._stagers = [MatchStager(match, self.arena, keep_blocks=_KEPT_BLOCKS) for match in source.matches]

    def parts(
        self, blocks: NDArray[np.int64], rows: NDArray[np.int64], randomness: Randomness
    ) -> list[WindowPart]:
        """Reads some samples, and what they have in other files and datasets; where they lie then."""
        from dataflow.staging.joined import joined

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
                whole = beside = joined(window, part.rows, self._stagers)
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
        return [together[at] for at in range(len(samples))]

    def one(sample: dict[str, Any], window: StagedRows, row: int) -> S:
        try:
            if wants_rng:
                return transform(sample, rng=columns.randomness.generator(window, row))
            return transform(sample)
        except BaseException as error:
            if must_go_on(error):
                raise
            reason = transform_reason(error, names)
            raise window.sample_error(row, reason, None, stage="transform") from error

    made = [one(sample, *origin) for sample, origin in zip(samples, origins, strict=True)]
    if failure is not None:
        raise as_exception(failure)
    return made
