"""Columns whose samples have any number of byte strings each, and the objects that are made of them.

They are stored as lists in one piece (`sharding.byte_lists`), or as several columns, of which a sample may
lack some: its list then has the others. The items of a chunk are numbered through in the order of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.outputs.columns import ChunkColumns, ChunkRows, StoredValue, WindowPart
from dataflow.outputs.output import BuiltColumn, Output, split_list
from dataflow.staging.columns import REASONS, StagedOutput, StagedSpans
from prefetch.errors import MemoryLimitError
from prefetch.memory.interrupts import must_go_on
from sharding.blocks import MISSING, Column
from sharding.byte_lists import ByteLists, list_counts, list_items
from sharding.errors import SampleError

_FIRST = np.zeros(1, np.int64)


@dataclass(frozen=True, kw_only=True)
class PartItems:
    """The items of the rows of a part, one after the other, [items] each."""

    part: WindowPart
    row: NDArray[np.int64]
    """Index of its row in the part."""
    number: NDArray[np.int64]
    """Which of its sample's items it is."""
    places: StagedSpans
    """Where it lies."""
    target: NDArray[np.int64]
    """Its place among the items of the chunk; ascends."""


@dataclass(frozen=True, kw_only=True)
class ListOutput(Output):
    """What all columns of lists of byte strings have in common."""

    is_decoded: ClassVar[bool] = True
    missing_cure: ClassVar[str] = "Optional(...)"

    is_joined: bool = False
    """Whether each source holds one item of a list; else there is one source, of lists in one piece."""

    @property
    def staged(self) -> tuple[StagedOutput, ...]:
        """Itself, or one a source."""
        if not self.is_joined:
            return (self,)
        return tuple(
            StagedOutput(name=f"{self.name}[{source}]", sources=(source,), column=self.name)
            for source in self.sources
        )

    @property
    def required(self) -> tuple[str, ...]:
        """None of several sources: a sample has those items that it has."""
        return () if self.is_joined else self.sources

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. A missing list is an empty one."""
        return self._without_default(default, "an empty list")

    def takes(self, column: Column) -> bool:
        """Whether a decoded column is of lists: the bytes of others would be taken for numbers of bytes."""
        return isinstance(column, ByteLists)

    def counts(self, rows: ChunkRows) -> NDArray[np.int64]:
        """How many items each row of the chunk has, int64 [rows]."""
        counts = np.zeros(rows.num_rows, np.int64)
        for part in rows.parts:
            if self.is_joined:
                counts[part.chunk_rows] = (self._lengths(part) >= 0).sum(axis=1)
                continue
            buffer, starts, have = self._lists(part)
            of_part = np.zeros(len(part.rows), np.int64)
            of_part[have] = list_counts(buffer, starts)
            counts[part.chunk_rows] = of_part
        return counts

    def items(self, part: WindowPart, offsets: NDArray[np.int64]) -> PartItems:
        """The items of a part; `offsets`: of the rows among the items of the chunk, int64 [rows + 1]."""
        if self.is_joined:
            lengths = self._lengths(part)
            row, source = np.nonzero(lengths >= 0)
            addresses = np.stack([part.spans(each.name).addresses[part.rows] for each in self.staged], axis=1)
            places = StagedSpans(addresses[row, source], lengths[row, source])
            number = np.cumsum(lengths >= 0, axis=1)[row, source] - 1
        else:
            buffer, list_starts, have = self._lists(part)
            counts, starts, item_lengths = list_items(buffer, list_starts)
            places = StagedSpans(starts + buffer.__array_interface__["data"][0], item_lengths, [buffer])
            row = np.repeat(have, counts)
            number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        chunk_rows = np.arange(len(offsets) - 1)[part.chunk_rows]
        target = offsets[chunk_rows[row]] + number
        return PartItems(part=part, row=row, number=number, places=places, target=target)

    def stored_items(self, columns: ChunkColumns) -> list[list[StoredValue]]:
        """The stored bytes of every row's items, one list a row; none where its list is missing."""
        stored = [columns.stored_values(each.name) for each in self.staged]
        if self.is_joined:
            return [[value for value in row if value is not None] for row in zip(*stored, strict=True)]
        return [[] if value is None else _items(value) for value in stored[0]]

    def note_missing(self, columns: ChunkColumns) -> None:
        """Note the rows that lack their list, or of an item of which only the path is stored."""
        if not self.is_joined:
            columns.note_missing(self.name, self.lacking)
            return
        for part in columns.rows.parts:
            lengths = self._lengths(part)
            for row, source in np.argwhere(lengths < MISSING).tolist():
                reason = f"{self.sources[source]}: {REASONS[int(lengths[row, source])]}"
                columns.note_bad(part.chunk_row(row), self.name, reason)

    def each(
        self,
        columns: ChunkColumns,
        items: Sequence[StoredValue],
        decode: Callable[[int, NDArray[np.uint8], int], Any],
    ) -> list[Any]:
        """What `decode` makes of number, bytes and row of a sample's items; None where one is bad, noted."""

        def named(number: int, data: NDArray[np.uint8], row: int) -> Any:
            try:
                return decode(number, data, row)
            except BaseException as error:
                if must_go_on(error):
                    raise
                raise of_item(error, number) from error

        return [columns.decoded(self.name, item, partial(named, number)) for number, item in enumerate(items)]

    def _lengths(self, part: WindowPart) -> NDArray[np.int64]:
        """Of the items of several sources, int64 [rows, sources]."""
        return np.stack([part.spans(each.name).lengths[part.rows] for each in self.staged], axis=1)

    def _lists(self, part: WindowPart) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Memory that holds the lists of a part, where each begins, and which rows of the part have one."""
        spans = part.spans(self.name)
        have = np.flatnonzero(spans.lengths[part.rows] >= 0)
        buffer, starts = part.window.buffer_of(spans, part.rows[have], self.name)
        return buffer, starts, have


@dataclass(frozen=True, kw_only=True)
class ObjectListOutput(ListOutput):
    """A list of lists of objects a batch."""

    kind: ClassVar[str] = "lists of objects"

    convert: Callable[[bytes], Any]
    """The bytes of one item -> a Python object."""

    def description(self) -> str:
        """Kind, dtype and function."""
        return f"{super().description()} {getattr(self.convert, '__name__', '')}".rstrip()

    def batch_bytes(self, rows: ChunkRows) -> int:
        """0: objects live outside the arena."""
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Objects made one by one, when their batch is asked for."""
        stored = self.stored_items(columns)

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for batch in split_list(stored, sizes):
                yield [self.each(columns, items, self._object) for items in batch]

        self.note_missing(columns)
        return BuiltColumn(split=values, each=lambda row: self.each(columns, stored[row], self._object))

    def _object(self, number: int, data: NDArray[np.uint8], row: int) -> Any:
        return self.convert(data.tobytes())


def bytes_tensor(data: bytes) -> Tensor:
    """A byte string as uint8 [n]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def of_item(error: BaseException, number: int) -> Exception:
    """The error of one item of a sample."""
    if isinstance(error, MemoryLimitError):  # it is the sample that is too large
        return error
    reason = error.reason if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
    named = SampleError("", f"item {number}: {reason}", stage="decode")
    named.__cause__ = error.__cause__ if isinstance(error, SampleError) else error
    return named


def _items(value: StoredValue) -> list[StoredValue]:
    data, row = value
    _, starts, lengths = list_items(data, _FIRST)
    items = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [(data[start : start + length], row) for start, length in items]
