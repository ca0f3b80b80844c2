"""Blocks staged together: what all windows have in common, however their bytes come into reach.

A window's rows are numbered block by block. Its columns are staged for all rows at once: numbers in an array,
other values as addresses of where they lie. There are three windows: `ReadWindow` reads whole blocks,
`SparseWindow` only the values of the rows asked for (both in `dataflow.staging.reading`), and `MappedWindow`
maps files (`dataflow.staging.mapped`). `dataflow.staging.rows` chooses; nobody else knows which it is.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from dataflow.decode.values import DRAWS, Draws
from dataflow.staging.block_source import BlockSource
from dataflow.staging.columns import StagedArray, StagedSpans
from prefetch.addresses import address_of, memory_at
from prefetch.memory.arena import Arena
from prefetch.memory.open_files import OpenFile
from sharding.blocks import Block, Columns, Spans
from sharding.cached_property import cached_property
from sharding.errors import DataflowError, SampleError, ShardReadError
from sharding.order.permutations import uniform
from sharding.spans import Bytes, Ints
from sharding.urls import is_local

if TYPE_CHECKING:
    from prefetch.store.ranges import Awaited


RowFraction = Literal["all", "many", "few"]
"""The share of rows wanted of its blocks: all, many, so that it is read whole, or few of each."""


class NotLocatableError(DataflowError):
    """Single values were asked for where only whole blocks can be decoded."""


class WindowSamples:
    """The samples that the rows of a window are.

    Args:
        first_number: number of the source's first sample.
        blocks: [b] the blocks, in read order.
        rows_in_block: per block the rows of the block, ascending; None: all.
    """

    def __init__(
        self,
        first_number: int,
        blocks: Sequence[Block],
        rows_in_block: Sequence[Ints] | None = None,
    ) -> None:
        self._first_number, self.blocks = first_number, blocks
        self.row_in_block = np.concatenate(rows_in_block) if rows_in_block else None
        counts = map(len, rows_in_block) if rows_in_block else (block.num_samples for block in blocks)
        self.first_row = np.cumsum([0, *counts], dtype=np.int64)
        """First row of every block, and the number of rows, int64 [b + 1]."""
        self.num_rows = int(self.first_row[-1])

    def rows_of(self, ordinal: int) -> slice:
        """The rows of a block."""
        return slice(int(self.first_row[ordinal]), int(self.first_row[ordinal + 1]))

    def find(self, row: int) -> tuple[int, int]:
        """Ordinal of the block that holds a row, and the row in the block."""
        ordinal = int(np.searchsorted(self.first_row, row, side="right")) - 1
        if self.row_in_block is not None:
            return ordinal, int(self.row_in_block[row])
        return ordinal, row - int(self.first_row[ordinal])

    def number(self, row: int) -> int:
        """See `RowNumbers.number`."""
        ordinal, in_block = self.find(row)
        return self._first_number + self.blocks[ordinal].first_sample + in_block

    def ordinals(self, rows: Ints) -> Ints:
        """[n] the ordinal of the block that holds each of n rows."""
        return np.searchsorted(self.first_row, rows, side="right") - 1

    def numbers(self, rows: Ints) -> Ints:
        """See `RowNumbers.numbers`."""
        ordinal = self.ordinals(rows)
        in_block = rows - self.first_row[ordinal] if self.row_in_block is None else self.row_in_block[rows]
        return self.first_samples[ordinal] + in_block

    @cached_property
    def table(self) -> tuple[int, ...]:
        """Return the addresses of `first_row`, `first_samples` and `row_in_block`, and how many blocks."""
        return *map(address_of, (self.first_row, self.first_samples, self.row_in_block)), len(self.blocks)

    @cached_property
    def first_samples(self) -> Ints:
        """[b] the number of each block's first sample."""
        return np.array([block.first_sample for block in self.blocks], np.int64) + self._first_number


class FileParts(NamedTuple):
    """Values that lie in files which this process has open."""

    files: Sequence[OpenFile]
    numbers: Ints
    """[n] which of `files` has each value."""
    offsets: Ints
    """[n] bytes of the file before it."""


class RowNumbers(Protocol):
    """The samples that the rows of a window are, by number."""

    def number(self, row: int) -> int:
        """Number of a row in the dataset; no two sources of a mixture share one."""
        ...

    def numbers(self, rows: Ints) -> Ints:
        """Numbers of rows in the dataset, as `number`, int64 [n]."""
        ...


class StagedRows(ABC):
    """Staged columns by row, and which samples the rows are: all that building batches needs of a window.

    Args:
        source_number: which of a mixture's sources the samples are of.
        samples: which samples the rows are.
        source_epoch: epoch of its own that a mixture's source is in; None: the loader's.
    """

    mapped: ClassVar[bool] = False
    """True if values lie in mapped files."""
    _shards: Sequence[object] = ()
    """Mappings of files that hold values: they keep these alive."""

    def __init__(self, source_number: int, samples: RowNumbers, source_epoch: int | None = None) -> None:
        self.source_number, self.source_epoch = source_number, source_epoch
        self.samples = samples
        self.staged: dict[str, StagedArray | StagedSpans] = {}

    def array(self, column: str) -> StagedArray:
        """A column that was staged as an array."""
        staged = self.staged[column]
        assert isinstance(staged, StagedArray)
        return staged

    def spans(self, column: str) -> StagedSpans:
        """A column whose values stay where they were read."""
        staged = self.staged[column]
        assert isinstance(staged, StagedSpans)
        return staged

    def in_files(self, column: str, rows: Ints) -> FileParts | None:
        """Return where values of a column that stays in place lie in open files.

        None where they lie in memory.

        To be asked inside `FileGuards.loading`.
        """
        return None

    @property
    def may_load(self) -> bool:
        """Return whether values may be touched where they lie; else only the kernel may copy them."""
        return True

    def buffer_of(self, spans: StagedSpans, owners: Ints, column: str) -> tuple[Bytes, Ints]:
        """Memory that may be read and holds n values, and the start of each in it.

        `owners`: [n] the rows of the window that the values are of.
        """
        have = spans.lengths >= 0
        addresses = spans.addresses[have]
        if not len(addresses):
            return np.empty(0, np.uint8), np.zeros(len(owners), np.int64)
        base, end = int(addresses.min()), int((addresses + spans.lengths[have]).max())
        # Blocks lie apart in memory: the view spans them all, but only the values' own bytes are read.
        return memory_at(base, end - base, (spans.keep, self._shards)), spans.addresses - base

    @contextmanager
    def values_of(self, spans: StagedSpans, owners: Ints, column: str) -> Iterator[tuple[Bytes, Ints]]:
        """Do as `buffer_of`, for memory that may be read inside only."""
        yield self.buffer_of(spans, owners, column)

    @abstractmethod
    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """An error that names the shard, offset and key of a row, and the column if it is about one."""

    @abstractmethod
    def name_at_once(self, row: int) -> tuple[str, str]:
        """Key and shard of a row, without waiting for a remote store: then it is its number in the shard."""

    def truncated(self, row: int, column: str) -> ShardReadError:
        """The error of a row whose bytes are gone: its file was cut while the window was open."""
        where = self.sample_error(row, "its bytes are gone", column, stage="read")
        reason = f"truncated while it was read: {where.reason}"
        return ShardReadError(where.shard, reason, where.offset, where.key, stage="read")


class StagedWindow(StagedRows):
    """The blocks of one window for one rank. Implements `prefetch.work.StreamWindow`.

    Reads run on reader threads and touch disjoint rows, so they need no lock.

    Args:
        rows: [k] row of the window that each index (position minus the window's first) takes; -1 for
            indices of other ranks.
    """

    holds_blocks: ClassVar[bool] = False
    """True if the stored bytes of its blocks are in memory."""
    samples: WindowSamples
    nbytes: int
    """Bytes held from admission to close, at most."""

    def __init__(self, source: BlockSource, arena: Arena, samples: WindowSamples, rows: Ints) -> None:
        super().__init__(source.number, samples)
        self.source, self.arena, self.rows = source, arena, rows
        self.seed = self.epoch = 0
        """With the epoch and the sample, it decides what is read of a value that need not be read whole."""
        self.chunk_list: list[Any] = []
        self.in_batches: tuple[int, Ints] | None = None
        """The first batch that lies in it alone, and the rows of all such batches; once asked for."""
        self._names: tuple[int, Sequence[str] | None, Ints | None] | None = None
        """The result of `_names_of` for each block, by its ordinal."""
        self._awaited: Awaited = Future()

    # ---- the engine's window ------------------------------------------------------------------------

    def chunks(self) -> Sequence[Any]:
        """The chunks whose last window this is."""
        return self.chunk_list

    @abstractmethod
    def reads(self) -> Sequence[Callable[[], None]]:
        """Tasks that bring the window's bytes into reach and stage its columns."""

    def raise_priority(self) -> None:
        """The training code waits for its reads."""
        if self.source.pause is not None:
            self.source.pause.raise_priority()  # each time: the next pause may have begun
        if not self._awaited.done():
            self._awaited.set_result(None)
            if self.source.gate is not None:
                self.source.gate.raise_priority()

    def largest(self) -> str:
        """Return which of its blocks takes most, for messages."""
        block = max(self.samples.blocks, key=lambda b: b.length + b.nbytes, default=None)
        if block is None:
            return "it has no block"
        return f"its largest block: {block.length:,} bytes at offset {block.offset} of {block.shard.url}"

    def verify(self) -> None:
        """Called when the last batch that needs the window is built. Raises if its bytes may have changed."""
        return

    def close(self) -> None:
        """Drop every buffer of the window."""
        self.chunk_list = []  # chunks and windows refer to each other: let reference counts free both
        self.staged.clear()
        self.in_batches = None
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Drop the stored bytes of the window."""

    # ---- staging ------------------------------------------------------------------------------------

    def _stage(self, ordinal: int, columns: Columns) -> None:
        """Put the decoded columns of a block into their rows."""
        for output in self.source.outputs:
            sources = [
                columns[name] if name in columns else self._constant(ordinal, name) for name in output.sources
            ]
            self.staged[output.name].put(self.samples.rows_of(ordinal).start, sources)

    def _constant(self, ordinal: int, name: str) -> Spans:
        """A column that is no block's own: the shard's URL, or nothing, where the shard lacks it."""
        rows = self.samples.rows_of(ordinal)
        num_rows = rows.stop - rows.start
        value = self.samples.blocks[ordinal].shard.url.encode() if name == "__url__" else b""
        length = len(value) if name == "__url__" else -1
        return Spans(
            np.frombuffer(value, np.uint8), np.zeros(num_rows, np.int64), np.full(num_rows, length, np.int64)
        )

    def draws(self, rows: Ints) -> Draws:
        """[n, DRAWS] random numbers of the samples in n rows, each a function of (seed, epoch, sample)."""
        epoch = self.epoch if self.source_epoch is None else self.source_epoch
        return uniform(self.seed, epoch, self.samples.numbers(rows), DRAWS)

    def cut_clips(self, rows: Ints) -> None:
        """Cut what some rows need of other files. Reads; several threads may do it for different rows."""
        for output in self.source.clips if len(rows) else ():
            read_of = partial(self.source.reading, awaited=self._awaited)
            output.cut(self.spans(output.name), rows, read_of, self.source.file_indexes)

    def with_clips(self, rows: Ints) -> StagedWindow:
        """The window, and of some rows also what they need of other files, which it does not keep."""
        if not self.source.clips:
            return self
        other = copy.copy(self)
        other.staged = dict(self.staged)
        for output in self.source.clips:
            staged = self.spans(output.name)
            addresses, lengths = staged.addresses.copy(), staged.lengths.copy()
            other.staged[output.name] = replace(staged, addresses=addresses, lengths=lengths, keep=[])
        other.cut_clips(rows)
        return other

    # ---- telling where a row came from ----------------------------------------------------------------

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """See `StagedRows.sample_error`."""
        ordinal, in_block = self.samples.find(row)
        block = self.samples.blocks[ordinal]
        keys, offsets = self._names_of(ordinal)
        key = str(block.first_in_shard + in_block) if keys is None else keys[in_block]
        offset = None if offsets is None else int(offsets[in_block])
        reason = reason if column is None else f"column {column!r}: {reason}"
        return SampleError(block.shard.url, reason, offset, key, stage)

    def name_at_once(self, row: int) -> tuple[str, str]:
        """See `StagedRows.name_at_once`."""
        ordinal, in_block = self.samples.find(row)
        block = self.samples.blocks[ordinal]
        keys = self._names_of(ordinal)[0] if self.holds_blocks or is_local(block.shard.url) else None
        return str(block.first_in_shard + in_block) if keys is None else keys[in_block], block.shard.url

    def _names_of(self, ordinal: int) -> tuple[Sequence[str] | None, Ints | None]:
        """Keys of a block's samples, and their bytes; None: they have none, or these cannot be had.

        Those of the block asked for last are kept: where one sample is bad, others are, and a compressed
        shard is one block.
        """
        known = self._names
        if known is not None and known[0] == ordinal:
            return known[1:]
        block, codec = self.samples.blocks[ordinal], self.source.format
        keys, offsets = None, codec.sample_offsets(block, None)
        data = self._stored(ordinal) if codec.has_keys or offsets is None else None
        if data is not None:
            with suppress(DataflowError):  # of bytes that changed since they were staged
                keys = codec.keys(block, data) if codec.has_keys else None
                offsets = codec.sample_offsets(block, data) if offsets is None else offsets
        self._names = ordinal, keys, offsets
        return keys, offsets

    def _stored(self, ordinal: int) -> memoryview | None:
        """The stored bytes of a block, if they can be had: read anew, as a row is bad, maybe by its page."""
        from sharding.catalog.reading import read_block

        with suppress(DataflowError):
            return read_block(self.samples.blocks[ordinal], self.source.reader.read_into)
        return None
