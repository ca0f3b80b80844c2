"""Given a source, blocks and rows: which window. The one place that chooses how bytes come into reach.

Values of local files that lie in the stored bytes are mapped. Where few rows of many blocks are wanted, or
only parts of long values, just these are read, if the format can tell where they lie. All else is read in
whole blocks. What is built of the rows does not show which it was.

`open_rows` gives one window, as the stream needs it. A `RowReader` also shares blocks that can be decoded as
a whole only among all who need them, so its rows may lie in several windows. `read_rows` gives columns as
they are decoded, to those who build no batches.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataflow.staging.block_source import BlockSource
from dataflow.staging.mapped import MappedWindow
from dataflow.staging.window import NotLocatableError, RowFraction, StagedRows, StagedWindow
from prefetch.memory.arena import Arena
from prefetch.store.ranges import read_located
from prefetch.work import Task
from sharding.blocks import Block, Column, Columns, Masked, Spans
from sharding.spans import Ints

if TYPE_CHECKING:
    from dataflow.staging.reading import ReadWindow
    from sharding.catalog.table import Catalog
    from sharding.order.selection import Selection


_MOST_MAPPED = 1 << 13
"""Shards of a window that is mapped: the system allows 65,530 mappings, and several windows are open."""
_NO_ROWS = np.zeros(0, np.int64)
_GAP_BYTES = 64 << 10
"""The bytes that one more request is worth."""


def open_rows(
    source: BlockSource, arena: Arena, blocks: Ints, rows: Ints, *, share: RowFraction, num_readers: int = 1
) -> StagedWindow:
    """A window that holds some rows of some blocks. Nothing is read before its `reads` are called.

    Args:
        source: what is read, and with what.
        arena: where values lie that are not mapped.
        blocks: [b] numbers of the blocks, in read order.
        rows: [k] the rows asked for, counting the samples of all blocks through; -1 for none.
        share: how many of the blocks' rows these are.
        num_readers: threads that will read.

    `rows` of the window are those of it that were asked for, [k]: its numbering is its own.
    """
    with suppress(NotLocatableError):  # as of shards of which some are compressed
        shards = source.catalog.blocks.shard
        if source.maps and (len(blocks) <= _MOST_MAPPED or len(np.unique(shards[blocks])) <= _MOST_MAPPED):
            return MappedWindow(source, arena, blocks, rows, share=share, num_readers=num_readers)
        if share == "few" or source.parts:
            from dataflow.staging.reading import SparseWindow

            return SparseWindow(source, arena, blocks, rows)
    from dataflow.staging.reading import ReadWindow

    return ReadWindow(source, arena, blocks, rows, num_readers=num_readers)


def counted_through(
    source: BlockSource, blocks: Ints, ordinal: NDArray[np.integer], row: Ints
) -> tuple[Ints, Ints]:
    """Rows of blocks as `open_rows` takes them.

    Args:
        source: of the blocks.
        blocks: [b] their numbers, in read order.
        ordinal: [n] which of `blocks` holds each row.
        row: [n] the row in it.

    Returns the blocks that hold any, in the same order, and [n] the rows, counting samples of these through.
    """
    is_used = np.zeros(len(blocks), np.bool_)
    is_used[ordinal] = True
    counts = np.where(is_used, source.catalog.blocks.num_samples[blocks], 0)
    rows = (np.cumsum(counts) - counts)[ordinal]
    rows += row
    return blocks[is_used], rows


class BlockRows(NamedTuple):
    """The samples at some positions that lie in one block."""

    block: Block
    at: Ints
    """[n] which of the positions they are, ascending."""
    columns: Columns
    """Their values, [n]."""


def read_rows(
    source: BlockSource,
    selection: Selection,
    positions: Ints,
    columns: Sequence[str],
    *,
    is_checked: bool = False,
) -> Iterator[BlockRows]:
    """Yield columns of the samples at some positions, each block once, in the order of blocks.

    Args:
        source: what is read, and with what.
        selection: the samples that positions count.
        positions: [n] in any order; one may come again.
        columns: names of stored columns, or "__key__" where samples have keys.
        is_checked: whether blocks that have checksums are held to them: they are read whole then.

    Raises as reading and decoding do.
    """
    for block, indices, rows in by_block(source.catalog, selection, positions):
        yield BlockRows(block, indices, read_columns(source, block, columns, rows, is_checked=is_checked))


def by_block(catalog: Catalog, selection: Selection, positions: Ints) -> Iterator[tuple[Block, Ints, Ints]]:
    """Yield each block that holds samples at some positions, [n] which of these they are, [n] their rows."""
    blocks, rows = selection.locate(positions)
    order = np.argsort(blocks, kind="stable")
    numbers, first = np.unique(blocks[order], return_index=True)
    for number, indices in zip(numbers.tolist(), np.split(order, first[1:]), strict=False):
        yield catalog.block(number), indices, rows[indices]


def read_columns(
    source: BlockSource,
    block: Block,
    columns: Sequence[str],
    rows: Ints | None = None,
    *,
    is_checked: bool = False,
    gap_bytes: int = _GAP_BYTES,
) -> Columns:
    """Columns of some rows of a block, [n] in their order; None: of all. See `read_rows`.

    Values are read by themselves where the format tells where they lie, and they lie so many bytes apart.
    """
    if rows is not None and len(rows) == block.num_samples and not (np.diff(rows) != 1).any():
        rows = None  # all of them, in their order
    if is_checked and block.checksum is not None:
        decoded = source.reader_of(columns).decode(block, source.read_block(block))
    else:
        spans = source.format.locate(block, columns)
        if spans:
            selection = slice(None) if rows is None else rows
            sizes = sum(int(np.maximum(column.lengths[selection], 0).sum()) for column in spans.values())
            count = block.num_samples if rows is None else len(rows)
            if gap_bytes * count + sizes < block.length:
                return read_located(block, spans, source.catalog.schema, source.read_into, rows)
        reader = source.reader_of(columns)
        decoded = reader.decode(block, reader.read(block, source.read_into))
    return decoded if rows is None else {name: _taken(column, rows) for name, column in decoded.items()}


def _taken(column: Column, rows: Any) -> Column:
    if isinstance(column, Spans):
        return Spans(column.buffer, column.starts[rows], column.lengths[rows], column.element)
    return Masked(column.values[rows], column.lacks[rows]) if isinstance(column, Masked) else column[rows]


class WindowPart(Struct, frozen=True):
    """The rows of a chunk that come from one window."""

    window: StagedRows
    rows: Ints
    """[n] rows of the window."""
    chunk_rows: slice | Ints
    """The rows of the chunk that they fill, ascending; a slice where they follow one another."""

    def chunk_row(self, index: int) -> int:
        """The row of the chunk that `rows[index]` fills."""
        if isinstance(self.chunk_rows, slice):
            return int(self.chunk_rows.start) + index
        return int(self.chunk_rows[index])


class OpenRows(Struct, eq=False, kw_only=True):
    """Rows that were asked for, in one window or in several."""

    parts: Sequence[WindowPart]
    """Window by window."""
    windows: Sequence[StagedWindow]
    """The windows of the parts."""
    reads: Callable[[], Sequence[Task]]
    """Tasks that bring the windows into reach."""
    nbytes: int
    """Bytes that they hold, of those that nobody else has credits for."""
    is_alone: bool
    """True if the windows serve nobody else."""

    def close(self) -> None:
        """Let go of the windows. Idempotent."""
        if self.is_alone:
            for window in self.windows:
                window.close()
        self.parts, self.windows, self.reads = (), (), tuple


class _SharedBlock:
    """A block that several need. Whoever needs it first reads it."""

    def __init__(self, window: ReadWindow) -> None:
        self.window = window
        self._reading = threading.Lock()  # held while it is read
        self._is_read = False

    def read(self) -> None:
        """Read it, or wait until another thread has."""
        with self._reading:
            if not self._is_read:
                for task in self.window.reads():
                    task()
                self._is_read = True


class RowReader:
    """Opens rows of sources, in whatever windows. Thread-safe.

    Blocks that can be decoded as a whole only are read once for all who need them meanwhile.

    Args:
        arena: where values lie that are not mapped.
        num_readers: threads that will read a window.
        keep_bytes: of the whole blocks asked for last, how much stays for rows to come; infinity: all of it.
        keep_blocks: so many of them stay, however large they are.
    """

    def __init__(
        self, arena: Arena, *, num_readers: int = 1, keep_bytes: float = 0, keep_blocks: int = 0
    ) -> None:
        self._arena, self._num_readers = arena, num_readers
        self._keep_bytes, self._keep_blocks = keep_bytes, keep_blocks
        self._lock = threading.Lock()  # guards what follows
        self._used: WeakValueDictionary[tuple[int, int | None, int], _SharedBlock] = WeakValueDictionary()
        """By source, epoch and number: those that somebody has."""
        self._kept_blocks: OrderedDict[tuple[int, int | None, int], _SharedBlock] = OrderedDict()
        self._kept_bytes = 0

    def open(
        self,
        source: BlockSource,
        blocks: Ints,
        ordinal: NDArray[np.integer],
        row: Ints,
        chunk_rows: Ints,
        *,
        share: RowFraction,
        is_checked: bool = False,
        seed: int = 0,
        epoch: int = 0,
        source_epoch: int | None = None,
    ) -> OpenRows:
        """Some rows of some blocks; nothing is read yet.

        Args:
            source: what is read, and with what.
            blocks: [b] numbers of the blocks, each of which holds some of the rows.
            ordinal: [n] which of `blocks` holds each row.
            row: [n] the row in it.
            chunk_rows: [n] ascending; the rows of what is built that they fill.
            share: as for `open_rows`.
            is_checked: whether blocks that have checksums are held to them: they are read whole then.
            seed: decides, with `epoch`, which parts of values are read, where parts will do.
            epoch: the loader's.
            source_epoch: as `StagedRows` has it.
        """
        if (is_checked and source.catalog.checksums is not None) or not source.locates(blocks):
            shared = [self._shared(source, source_epoch, number) for number in blocks.tolist()]
            windows = [block.window for block in shared]
            ends = np.cumsum(np.bincount(ordinal, minlength=len(blocks)))
            owned = np.split(np.argsort(ordinal, kind="stable"), ends[:-1])
            parts = [
                WindowPart(window, row[indices], chunk_rows[indices])
                for window, indices in zip(windows, owned, strict=True)
            ]
            # Where all of them stay, they have credits of their own.
            nbytes = 0 if math.isinf(self._keep_bytes) else sum(window.nbytes for window in windows)
            reads = [block.read for block in shared]
            return OpenRows(parts=parts, windows=windows, reads=lambda: reads, nbytes=nbytes, is_alone=False)
        block_rows = counted_through(source, blocks, ordinal, row)
        window = open_rows(source, self._arena, *block_rows, share=share, num_readers=self._num_readers)
        window.seed, window.epoch, window.source_epoch = seed, epoch, source_epoch
        part = WindowPart(window, window.rows, chunk_rows)
        return OpenRows(
            parts=[part], windows=[window], reads=window.reads, nbytes=window.nbytes, is_alone=True
        )

    def _shared(self, source: BlockSource, source_epoch: int | None, number: int) -> _SharedBlock:
        from dataflow.staging.reading import ReadWindow

        key = source.number, source_epoch, number
        with self._lock:
            block = self._used.get(key)
            if block is None:
                # Whoever touches values of several windows at once takes them for memory like any other.
                window = ReadWindow(source, self._arena, np.array([number]), _NO_ROWS, keeps_mapped=False)
                window.source_epoch = source_epoch
                block = self._used[key] = _SharedBlock(window)
            if self._kept_blocks.pop(key, None) is None:
                self._kept_bytes += block.window.nbytes
            self._kept_blocks[key] = block
            while self._kept_bytes > self._keep_bytes and len(self._kept_blocks) > self._keep_blocks:
                self._kept_bytes -= self._kept_blocks.popitem(last=False)[1].window.nbytes
        return block
