"""A chunk as it crosses to another process: its plan, and the stored values of its rows, one after the other.

Values that lie in files which the training process has open stay there: the other process reads them itself,
from the same open files (`prefetch.memory.open_files`). All others are copied into memory that both
processes map, by the same executor that makes batches, so the way there costs a copy and no interpreter lock.
On the other side they are the staged columns of one window a source, whose rows are the chunk's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from dataflow.batch.builder import ChunkPlan
from dataflow.outputs.columns import ChunkRows
from dataflow.staging.columns import StagedArray, StagedOutput, StagedSpans
from dataflow.staging.rows import WindowPart
from dataflow.staging.window import FileParts, StagedRows
from prefetch.core.copy_table import PlanColumn
from prefetch.core.kernels import kernels
from prefetch.memory.arena import Arena
from prefetch.memory.open_files import MOST_OPEN, OpenFile
from sharding.errors import SampleError

_ALIGN = 64


@dataclass(frozen=True, kw_only=True)
class SerializedColumn:
    """The values of a column, in the chunk's shared memory."""

    offset: int
    """The offset of the values in it."""
    nbytes: int
    shape: tuple[int, ...] | None = None
    """The shape of a row, where all are alike; None: `lengths` says."""
    dtype: str = "uint8"
    lengths: NDArray[np.int64] | int | None = None
    """[rows] bytes, or those of every row; -1 where the sample lacks it."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Row of the chunk -> why its value could not be parsed."""
    files: FileParts | None = None
    """The files that hold the values instead, one after the other as here."""


@dataclass(frozen=True, kw_only=True)
class SerializedSource:
    """The rows of a chunk that come from one source, in one of its epochs."""

    number: int
    epoch: int | None
    """The source's own epoch, in a mixture."""
    rows: NDArray[np.int64]
    """[n] of the chunk, ascending."""


@dataclass(frozen=True, kw_only=True)
class SerializedChunk:
    """The message by which another process builds a chunk, beside its memory and what all chunks share."""

    plan: ChunkPlan
    columns: Mapping[str, SerializedColumn]
    sources: Sequence[SerializedSource]
    numbers: NDArray[np.int64]
    """[rows] of the samples, which random numbers are drawn by."""


def serialize(
    plan: ChunkPlan, rows: ChunkRows, outputs: Sequence[StagedOutput], arena: Arena, *, by_file: bool = False
) -> tuple[SerializedChunk, NDArray[np.uint8]]:
    """A chunk whose windows are staged, and its memory: a lease of `arena`.

    `by_file`: whether the other process can read files that this one has open. Inside `FileGuards.loading`.
    Raises `ShardReadError` for a value whose bytes are gone.
    """
    in_files = {
        output.name: _in_files(rows, output.name) for output in outputs if by_file and output.stays_in_place
    }
    serialized = {
        name: SerializedColumn(offset=0, nbytes=0, lengths=rows.collected(_lengths(name)), files=files)
        for name, files in in_files.items()
        if files is not None
    }
    columns = {output.name: _staged(rows, output) for output in outputs if output.name not in serialized}
    sizes = [-(-plan_column.nbytes // _ALIGN) * _ALIGN for plan_column, _ in columns.values()]
    memory, used = arena.lease(sum(sizes) or 1), 0
    copies = []
    for (name, (plan_column, column)), nbytes in zip(columns.items(), sizes, strict=True):
        out = memory[used : used + plan_column.nbytes]
        copies.append(structs.replace(plan_column, out=out))
        serialized[name] = SerializedColumn(
            offset=used,
            nbytes=len(out),
            shape=column.values.shape[1:] if isinstance(column, StagedArray) else None,
            dtype=column.values.dtype.str if isinstance(column, StagedArray) else "uint8",
            lengths=None if isinstance(column, StagedArray) else _lengths_of(plan_column, column),
            bad=column.bad if isinstance(column, StagedArray) else {},
        )
        used += nbytes
    status = kernels().run(rows.num_rows, copies)
    if status.any():
        row = int(np.flatnonzero(status)[0])
        raise rows.truncated(row, copies[int(status[row]) - 1].name)
    numbers = np.empty(rows.num_rows, np.int64)
    for part in rows.parts:
        numbers[part.chunk_rows] = part.window.samples.numbers(part.rows)
    return SerializedChunk(plan=plan, columns=serialized, sources=_sources(rows), numbers=numbers), memory


def _lengths(column: str) -> Callable[[StagedRows], NDArray[np.int64]]:
    return lambda window: window.spans(column).lengths


def _in_files(rows: ChunkRows, column: str) -> FileParts | None:
    """Return where the values of a column lie in files, row by row of the chunk, if all of them do."""
    files: list[OpenFile] = []
    numbers, offsets = np.empty((2, rows.num_rows), np.int64)
    for part in rows.parts:
        located = part.window.in_files(column, part.rows)
        if located is None or len(files) + len(located.files) > MOST_OPEN:
            return None
        numbers[part.chunk_rows], offsets[part.chunk_rows] = located.numbers + len(files), located.offsets
        files += located.files
    return FileParts(files, numbers, offsets)


def _lengths_of(plan_column: PlanColumn, column: StagedSpans) -> NDArray[np.int64] | int:
    return plan_column.each if plan_column.lengths is None else column.lengths


def _staged(rows: ChunkRows, output: StagedOutput) -> tuple[PlanColumn, StagedArray | StagedSpans]:
    """Return how the chunk's rows of a column are copied, and what is known of them by row of the chunk."""
    name = output.name
    may_load = all(part.window.may_load for part in rows.parts)
    if output.stays_in_place:
        addresses = rows.collected(lambda window: window.spans(name).addresses)
        (each, *others) = {part.window.spans(name).uniform_bytes for part in rows.parts}
        if each >= 0 and not others:
            column = PlanColumn(name=name, index=addresses, each=each, may_load=may_load)
            return column, StagedSpans(addresses, addresses[:0])
        lengths = rows.collected(lambda window: window.spans(name).lengths)
        nbytes = np.maximum(lengths, 0)
        offsets = np.cumsum(nbytes) - nbytes
        column = PlanColumn(name=name, index=addresses, lengths=nbytes, offsets=offsets, may_load=may_load)
        return column, StagedSpans(addresses, lengths)
    bad: dict[int, str] = {}
    for part in rows.parts:
        among = part.window.array(name).bad_among(part.rows)
        bad.update((part.chunk_row(position), reason) for position, reason in among)
    values, (base, step, index) = rows.parts[0].window.array(name).values, rows.array_rows(name)
    each = int(np.prod(values.shape[1:], dtype=np.int64)) * values.itemsize
    column = PlanColumn(name=name, base=base, step=step, index=index, each=each)
    return column, StagedArray(values[:0], bad=bad)


def _sources(rows: ChunkRows) -> list[SerializedSource]:
    parts: dict[tuple[int, int | None], list[NDArray[np.int64]]] = {}
    every = np.arange(rows.num_rows)
    for part in rows.parts:
        key = part.window.source_number, part.window.source_epoch
        parts.setdefault(key, []).append(every[part.chunk_rows])
    return [
        SerializedSource(number=number, epoch=epoch, rows=np.sort(np.concatenate(chunk_rows)))
        for (number, epoch), chunk_rows in parts.items()
    ]


SampleErrorOf = Callable[[int, str, str | None, str], SampleError]
"""Row of the chunk, reason, column, stage -> the error, which names shard, offset and key."""


@dataclass(frozen=True, eq=False)
class _SerializedNumbers:
    """Implements `RowNumbers`: `of_rows` has the number of each row of the chunk."""

    of_rows: NDArray[np.int64]

    def number(self, row: int) -> int:
        """See `RowNumbers.number`."""
        return int(self.of_rows[row])

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `RowNumbers.numbers`."""
        return self.of_rows[rows]


class SerializedRows(StagedRows):
    """The values of a chunk's rows as they were sent.

    Another process is asked for the errors of its samples.
    """

    def __init__(
        self,
        source: SerializedSource,
        numbers: NDArray[np.int64],
        staged: dict[str, StagedArray | StagedSpans],
        error_of: SampleErrorOf,
    ) -> None:
        super().__init__(source.number, _SerializedNumbers(numbers), source.epoch)
        self.staged, self._error_of = staged, error_of

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """See `StagedRows.sample_error`."""
        return self._error_of(row, reason, column, stage)

    def name_at_once(self, row: int) -> tuple[str, str]:
        """See `StagedRows.name_at_once`."""
        error = self._error_of(row, "", None, "decode")
        return error.key or "", error.shard


def serialized_rows(
    chunk: SerializedChunk,
    memory: NDArray[np.uint8],
    error_of: SampleErrorOf,
    read: Callable[[FileParts, NDArray[np.int64]], NDArray[np.uint8]] | None = None,
) -> ChunkRows:
    """The rows of a chunk that was sent, of which `memory` has the values.

    `read`: brings values that lie in files, of so many bytes each, one after the other; needed where it was
    serialized with `by_file`.
    """
    staged: dict[str, StagedArray | StagedSpans] = {}
    num_rows = len(chunk.numbers)
    for name, column in chunk.columns.items():
        if column.lengths is None:
            assert column.shape is not None
            flat = memory[column.offset : column.offset + column.nbytes].view(column.dtype)
            staged[name] = StagedArray(flat.reshape(num_rows, *column.shape), bad=dict(column.bad))
            continue
        lengths = column.lengths
        if isinstance(lengths, int):
            lengths = np.full(num_rows, lengths)
        nbytes = np.maximum(lengths, 0)
        values = memory[column.offset :]
        if column.files is not None:
            assert read is not None
            values = read(column.files, nbytes)
        starts = np.cumsum(nbytes) - nbytes + values.__array_interface__["data"][0]
        staged[name] = StagedSpans(starts, lengths, [values])
    parts = []
    for source in chunk.sources:
        window = SerializedRows(source, chunk.numbers, staged, error_of)
        rows: slice | NDArray[np.int64] = source.rows
        if len(source.rows) == num_rows:
            rows = slice(0, num_rows)
        parts.append(WindowPart(window, source.rows, rows))
    return ChunkRows(num_rows, lambda: parts, chunk.plan.cut)
