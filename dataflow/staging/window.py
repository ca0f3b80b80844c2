"""Blocks staged together: read, decoded per block, addressable row by row.

A window's rows are numbered block by block. Formats whose values lie in the stored bytes (`Format.locate`)
are read into one contiguous region of the arena and keep only addresses; a batch of fixed-size
rows is then one gather over absolute offsets, whichever shards its samples come from. Other formats are
decoded per block into one array a column. `sparse` windows read only the values of the rows asked for:
random access and `Shuffle("full")` use them.

Reads run on the reader threads, one task a block, and touch disjoint rows, so they need no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.staging.columns import ALIGN, StagedArray, StagedSpans
from dataflow.staging.source import Source
from prefetch.memory.addresses import memory_at
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.iovec import copy_spans
from prefetch.store.ranges import MOST_BYTES, coalesce
from prefetch.store.reader import Awaited
from sharding.blocks import Block, Columns, Spans
from sharding.errors import CorruptShardError, DataflowError, SampleError, ShardReadError


class NotLocatableError(DataflowError):
    """A sparse window was asked for where only whole blocks can be decoded."""


class StagedWindow:
    """The blocks of one window for one rank. Implements `prefetch.work.Window`.

    Args:
        blocks: [b] the blocks to stage, in read order.
        rows: [k] row of the window that each slot (position minus the window's first) takes; -1 for
            slots of other ranks.
        sparse: per block the rows of the block to read, ascending; None reads whole blocks.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        blocks: Sequence[Block],
        rows: NDArray[np.int64],
        *,
        sparse: Sequence[NDArray[np.int64]] | None = None,
        num_readers: int = 1,
    ) -> None:
        self.source, self.arena, self.rows = source, arena, rows
        self.blocks = blocks
        self._sparse = sparse
        self._row_in_block = np.concatenate(sparse) if sparse else np.zeros(0, np.int64)
        self._staged_outputs = source.outputs
        counts = [len(s) for s in sparse] if sparse is not None else [b.num_samples for b in self.blocks]
        self.first_row = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self.num_rows = int(self.first_row[-1])
        self._spans = [self._locate(i) for i in range(len(self.blocks))] if sparse is not None else []
        self._in_region = bool(self.blocks) and (sparse is not None or all(map(source.locates, self.blocks)))
        self._sizes = self._region_sizes()
        self.nbytes = self._bound(num_readers)
        self.mapped = False
        """Whether values lie in mapped files."""
        self.epoch = 0
        self.source_epoch: int | None = None
        """Epoch of its own that a mixture's source is in; None: the loader's."""
        self.chunk_list: list[Any] = []
        self.in_batches: tuple[int, NDArray[np.int64]] | None = None
        """Its rows in the order of the batches that lie in it alone, once known, and the first of these."""
        self.region: NDArray[np.uint8] | None = None
        self.staged: dict[str, StagedArray | StagedSpans] = {}
        self._data: list[memoryview | None] = [None] * len(self.blocks)
        self._awaited: Awaited = Future()

    # ---- geometry, before anything is read ----------------------------------------------------------

    def _locate(self, ordinal: int) -> dict[str, Spans]:
        spans = self.source.format.locate(self.blocks[ordinal], self.source.columns)
        if spans is None:
            raise NotLocatableError(f"format {self.source.format.name} cannot tell where values lie")
        assert self._sparse is not None
        rows = self._sparse[ordinal]
        return {name: Spans(s.buffer, s.starts[rows], s.lengths[rows]) for name, s in spans.items()}

    def _region_sizes(self) -> NDArray[np.int64]:
        """Bytes each block takes in the region."""
        if self._sparse is not None:
            sizes = [int(_aligned(self._joined(i)[1]).sum()) for i in range(len(self.blocks))]
        else:
            sizes = [block.length for block in self.blocks]
        return np.asarray(_aligned(np.array(sizes, np.int64)))

    def _bound(self, num_readers: int) -> int:
        """Bytes held from admission to close, at most."""
        columns = sum(output.staged_bytes(self.num_rows) for output in self.source.outputs)
        if self._in_region:
            return rounded_bytes(int(self._sizes.sum())) + columns
        largest = sorted(((b.length + b.nbytes) for b in self.blocks), reverse=True)
        kept = 0
        if any(output.stays_in_place for output in self.source.outputs):
            kept = sum(b.length + b.nbytes for b in self.blocks)
        return max(kept, sum(largest[:num_readers])) + columns

    # ---- the engine's window ------------------------------------------------------------------------

    def chunks(self) -> Sequence[Any]:
        """The chunks whose last window this is."""
        return self.chunk_list

    def reads(self) -> Sequence[Callable[[], None]]:
        """One task a request: a block, or neighbours of one shard, which together are one range."""
        self._prepare()
        starts = np.cumsum(self._sizes) - self._sizes
        return [
            lambda run=run: self._read(run, int(starts[run[0]]))  # type: ignore[misc]
            for run in self._runs()
        ]

    def _runs(self) -> list[range]:
        """The blocks of each request."""
        runs: list[range] = []
        joins = self.region is not None and self._sparse is None and self._may_join
        for i, block in enumerate(self.blocks):
            if runs and joins and block.checksum is None:
                run, before = runs[-1], self.blocks[i - 1]
                neighbours = before.shard.url == block.shard.url
                neighbours = neighbours and before.offset + before.length == block.offset
                # Side by side in the region, too: not where one is filled up to the next boundary.
                whole = before.length == self._sizes[i - 1] and before.checksum is None
                if neighbours and whole and self._sizes[run[0] : i + 1].sum() <= MOST_BYTES:
                    runs[-1] = range(run.start, i + 1)
                    continue
            runs.append(range(i, i + 1))
        return runs

    @property
    def _may_join(self) -> bool:
        """Whether one request may bring several blocks or values: a cache keeps each for itself."""
        return self.source.cache is None

    def _prepare(self) -> None:
        if self._in_region:
            self.region = self.arena.lease(int(self._sizes.sum()) or 1)
        for output in self.source.outputs:
            self.staged[output.name] = output.stage(self.num_rows, self.arena)

    def _read(self, run: range, at: int) -> None:
        if self._sparse is not None:
            self._stage(run[0], self._read_sparse(run[0], at))
            return
        blocks = self.blocks[run.start : run.stop]
        length = sum(block.length for block in blocks)
        data = self.arena.lease(length) if self.region is None else self.region[at : at + length]
        first = blocks[0]
        self.source.read_into(first.shard, first.offset, data, checksum=first.checksum, awaited=self._awaited)
        for ordinal, block in zip(run, blocks, strict=True):
            begin = block.offset - first.offset
            self._decode(ordinal, block, data[begin : begin + block.length])

    def _decode(self, ordinal: int, block: Block, data: NDArray[np.uint8]) -> None:
        self._data[ordinal] = data.data
        wanted = None if self.source.all_columns else self.source.columns
        columns = self.source.format.decode(block, data.data, wanted)
        for output in self._staged_outputs:
            for name in output.sources:
                if name in columns and not output.takes(columns[name]):
                    reason = f"column {name!r} is not what the catalog says; index the shards again"
                    raise CorruptShardError(block.shard.url, reason, block.offset, stage="decode")
        self.source.traffic.add(block.length, block.nbytes)
        self._stage(ordinal, columns)
        if self.region is None and not any(isinstance(s, StagedSpans) for s in self.staged.values()):
            self._data[ordinal] = None

    def _joined(self, ordinal: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The ranges of a block that are asked for, and which holds each located value, column by column."""
        spans = list(self._spans[ordinal].values())
        starts = np.concatenate([s.starts for s in spans] or [np.zeros(0, np.int64)])
        lengths = np.concatenate([s.lengths for s in spans] or [np.zeros(0, np.int64)])
        most_bytes = MOST_BYTES if self._may_join else 0
        return coalesce(starts, np.maximum(lengths, 0), most_bytes=most_bytes)

    def _read_sparse(self, ordinal: int, at: int) -> Columns:
        """Read only the located values, those that lie near each other in one request."""
        block = self.blocks[ordinal]
        assert self.region is not None
        firsts, lengths, joined_of = self._joined(ordinal)
        places = at + np.cumsum(_aligned(lengths)) - _aligned(lengths)
        for first, length, place in zip(firsts.tolist(), lengths.tolist(), places.tolist(), strict=True):
            view = self.region[place : place + length]
            self.source.read_into(block.shard, block.offset + first, view, awaited=self._awaited)
        columns: Columns = {}
        done = 0
        for name, spans in self._spans[ordinal].items():
            joined = joined_of[done : done + len(spans)]
            done += len(spans)
            moved = spans.starts + (places - firsts)[joined] if len(firsts) else spans.starts
            starts = np.where(spans.lengths > 0, moved, at)
            columns[name] = Spans(self.region, starts, spans.lengths)
            wanted = int(np.maximum(spans.lengths, 0).sum())
            self.source.traffic.add(0, wanted)
        self.source.traffic.add(int(lengths.sum()), 0)
        return columns

    def _stage(self, ordinal: int, columns: Columns) -> None:
        first = int(self.first_row[ordinal])
        for output in self._staged_outputs:
            if output.sources[0] == "__url__":
                columns["__url__"] = self._urls(ordinal)
            sources = [columns[name] if name in columns else self._absent(ordinal) for name in output.sources]
            self.staged[output.name].put(first, sources)

    def _urls(self, ordinal: int) -> Spans:
        url = np.frombuffer(self.blocks[ordinal].shard.url.encode(), np.uint8)
        n = int(self.first_row[ordinal + 1] - self.first_row[ordinal])
        return Spans(url, np.zeros(n, np.int64), np.full(n, len(url), np.int64))

    def _absent(self, ordinal: int) -> Spans:
        """A column that this block's shard lacks altogether."""
        n = int(self.first_row[ordinal + 1] - self.first_row[ordinal])
        return Spans(np.zeros(0, np.uint8), np.zeros(n, np.int64), np.full(n, -1, np.int64))

    @property
    def may_load(self) -> bool:
        """Whether values may be touched where they lie; else only the kernel may copy them."""
        return True

    def hurry(self) -> None:
        """The training code waits for its reads."""
        if self.source.hold is not None:
            self.source.hold.hurry()  # each time: the next hold may have begun
        if not self._awaited.done():
            self._awaited.set_result(None)
            if self.source.gate is not None:
                self.source.gate.hurry()

    def close(self) -> None:
        """Drop every buffer."""
        self.chunk_list = []  # chunks and windows refer to each other: let reference counts free both
        self.staged.clear()
        self.in_batches = None
        self._data = [None] * len(self.blocks)
        self.region = None

    # ---- for the builder --------------------------------------------------------------------------------

    def copy_values(
        self, spans: StagedSpans, rows: NDArray[np.int64], out: NDArray[np.uint8], column: str
    ) -> None:
        """Copy the values of rows of a column, none missing, one after the other into `out`."""
        copy_spans(spans.addresses[rows], spans.lengths[rows], out)

    def buffer_of(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Memory that may be read and holds the rows' values, and the start of each in it."""
        have = rows[spans.lengths[rows] >= 0]
        addresses, lengths = spans.addresses[have], spans.lengths[have]
        if not len(have):
            return np.empty(0, np.uint8), np.zeros(len(rows), np.int64)
        base, end = int(addresses.min()), int((addresses + lengths).max())
        # Blocks lie apart in memory: the view spans them all, but only the rows' own bytes are read.
        return memory_at(base, end - base), spans.addresses[rows] - base

    def fetch(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """A copy of the values of rows, and the start of each in it; missing ones take no room."""
        lengths = np.maximum(spans.lengths[rows], 0)
        ends = np.cumsum(lengths)
        nbytes = int(ends[-1]) if len(ends) else 0
        # A slab of the arena, not fresh memory: first touches cost more than the copy.
        buffer = self.arena.lease(nbytes or 1)[:nbytes]
        have = rows[spans.lengths[rows] >= 0]
        self.copy_values(spans, have, buffer, column)
        return buffer, ends - lengths

    def truncated(self, row: int, column: str) -> ShardReadError:
        """The error of a row whose bytes are gone: its file was cut while the window was open."""
        where = self.sample_error(row, "its bytes are gone", column, stage="read")
        reason = f"truncated while it was read: {where.reason}"
        return ShardReadError(where.shard, reason, where.offset, where.key, stage="read")

    def verify(self) -> None:
        """Called when the last batch that needs the window is built. Raises if its bytes may have changed."""

    # ---- telling where a row came from ----------------------------------------------------------------

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """An error that names the shard, offset and key of a row, and the column if it is about one."""
        ordinal = int(np.searchsorted(self.first_row, row, side="right")) - 1
        block = self.blocks[ordinal]
        in_block = row - int(self.first_row[ordinal])
        if self._sparse is not None:
            in_block = int(self._row_in_block[row])
        key = self._key(ordinal, in_block)
        reason = reason if column is None else f"column {column!r}: {reason}"
        return SampleError(block.shard.url, reason, block.offset, key, stage)

    def _key(self, ordinal: int, in_block: int) -> str:
        block, data = self.blocks[ordinal], self._data[ordinal]
        if self.source.format.has_keys and data is not None:
            return self.source.format.keys(block, data)[in_block]
        return str(block.first_in_shard + in_block)

    def sample_number(self, row: int) -> int:
        """Number in the dataset of a row of the window; no two sources of a mixture share one."""
        ordinal = int(np.searchsorted(self.first_row, row, side="right")) - 1
        in_block = row - int(self.first_row[ordinal])
        if self._sparse is not None:
            in_block = int(self._row_in_block[row])
        return self.source.first_number + self.blocks[ordinal].first_sample + in_block

    def sample_numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers in the dataset of rows of the window, as `sample_number`, int64 [n]."""
        ordinal = np.searchsorted(self.first_row, rows, side="right") - 1
        in_block = rows - self.first_row[ordinal]
        first = np.array([b.first_sample for b in self.blocks], np.int64) + self.source.first_number
        if self._sparse is None:
            return first[ordinal] + in_block
        return first[ordinal] + self._row_in_block[rows]


def _aligned(nbytes: Any) -> Any:
    return -(-nbytes // ALIGN) * ALIGN
