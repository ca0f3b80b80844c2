"""Columns of byte strings that are decoded: one a sample, or any number of them; of one shape, or of any.

Values of one shape are decoded straight into their places in the slot, in parts that run in parallel. All
others are made when their batch is asked for. What differs between images, clips and objects is how a value
is decoded: `images`, `media` and `objects` say that.

Of lists, each sample has any number of items. They are stored in one piece (`sharding.byte_lists`), or as
several columns, of which a sample may lack some: its list then has the others. The values of a chunk are
numbered through in the order of its rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataflow.outputs.columns import ChunkColumns, ChunkRows, StoredValue
from dataflow.outputs.fixed import default_row
from dataflow.outputs.output import BuiltColumn, Output, split_list, split_ragged, split_rows
from dataflow.staging.columns import REASONS, StagedOutput, StagedSpans
from dataflow.staging.rows import WindowPart
from prefetch.errors import MemoryLimitError
from prefetch.memory.arena import rounded_bytes
from prefetch.memory.interrupts import must_go_on
from sharding.blocks import MISSING, Column
from sharding.errors import SampleError
from sharding.spans import Bytes, Ints

if TYPE_CHECKING:
    from dataflow.decode.values import Draws


Failures = Sequence[tuple[int, Exception]]
"""Index and error of each value that could not be decoded."""
NoteWarning = Callable[[int, str], None]
"""Is told what is odd about the value of an index, which is delivered all the same."""


class PartValues(Struct, frozen=True, kw_only=True):
    """The values of the rows of a part, one after the other, [values] each."""

    part: WindowPart
    row: Ints
    """Index of its row in the part."""
    number: Ints
    """Index of the value among its sample's."""
    spans: StagedSpans
    """The spans of the values."""
    target: Ints
    """Its place among the values of the chunk; ascends."""


@dataclass(frozen=True, kw_only=True)
class DecodedOutput(Output):
    """A tensor [batch, *shape] of values of one shape, a `Ragged` of lists of these; else a list a batch."""

    is_decoded: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, str, str, str]]
    """Names in messages for values of one shape, of any shape, lists of the former, and of the latter."""
    is_stacked: bool = False
    """True if values of a batch, which are all of one shape, become one tensor."""
    instead: ClassVar[str] = ""
    """The words for an item of a list in place of a missing value."""

    is_list: bool = False
    """True if samples have any number of values each."""
    is_joined: bool = False
    """True if each source holds one item of a list; else there is one source, of lists in one piece."""
    mean_items: int = field(default=1, compare=False)
    """Values of a sample, about."""

    @property
    def kind(self) -> str:
        """See `Output`."""
        return self.kinds[2 * self.is_list + (not self.is_sized)]

    @property
    def is_sized(self) -> bool:
        """Return whether all values have one shape."""
        return False

    @property
    def is_random(self) -> bool:
        """Return whether decoding needs draws."""
        return False

    def decode_few(
        self,
        columns: ChunkColumns,
        encoded: Sequence[Bytes],
        out: Sequence[NDArray[Any]],
        draws: Draws | None,
        remark: NoteWarning,
    ) -> Failures:
        """Decode values of one shape, each into its place in `out`: 0 where that fails."""
        raise NotImplementedError

    def decode(self, columns: ChunkColumns, data: Bytes, row: int, number: int = 0) -> Any:
        """Decode one value of a row of the chunk; `number`: which of its sample's it is."""
        raise NotImplementedError

    # ---- what it is ---------------------------------------------------------------------------------------

    @property
    def is_view(self) -> bool:
        """See `Output`."""
        return self.is_sized

    @property
    def is_fixed(self) -> bool:
        """See `Output`."""
        return self.is_sized and not self.is_list

    @property
    def missing_cure(self) -> str:
        """See `Output`."""
        return "Optional(...)" if self.is_list else "Optional(default=...)"

    @property
    def value_bytes(self) -> int:
        """Bytes of a value; 0 where they differ."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.is_sized else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of a row; of lists about: by it is decided how far ahead batches are made."""
        return self.mean_items * self.value_bytes

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. A missing list is an empty one, other values without a shape are `instead`."""
        if self.is_list:
            return self._without_default(default, "an empty list")
        if not self.is_sized:
            return self._without_default(default, self.instead)
        return replace(self, default=default_row(self, default, 0, self.dtype, has_mask=has_mask))

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

    def takes(self, column: Column) -> bool:
        """See `StagedOutput`; of lists: the bytes of others would be taken for numbers of bytes."""
        from sharding.byte_lists import ByteLists

        return isinstance(column, ByteLists) if self.is_list else super().takes(column)

    # ---- a chunk ------------------------------------------------------------------------------------------

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of all values; 0 where they differ: they live outside the arena, or in slots of a batch."""
        return rounded_bytes(self._num_values(rows) * self.value_bytes) if self.is_sized else 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Values of one shape in parts of a few, whichever samples they belong to; others batch by batch."""
        if self.is_joined:
            self._note_missing_items(columns)
        else:
            columns.note_missing(self.name, lambda: self.lacking)
        return self._build_sized(columns) if self.is_sized else self.build_free(columns)

    def build_free(self, columns: ChunkColumns) -> BuiltColumn:
        """Values made one by one, when their batch is asked for."""
        stored, decode = self.stored(columns), partial(self.decode, columns)

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for batch in split_list(stored, sizes):
                items = (self.made(columns, value, decode) for value in batch)  # no list that stays here
                yield self.stack(columns, batch, [*items]) if self.is_stacked else [*items]

        each = None if self.is_stacked else lambda row: self.made(columns, stored[row], decode)
        return BuiltColumn(split=values, each=each)

    def stack(self, columns: ChunkColumns, stored: Sequence[Any], values: list[Any]) -> Any:
        """Return the values of a batch as one, where `is_stacked`; `stored`: what each was made of."""
        raise NotImplementedError

    def stored(self, columns: ChunkColumns) -> list[Any]:
        """The stored bytes of every row's value, None where it is missing; of lists one list a row."""
        if self.is_joined:
            sources = [columns.stored_values(each.name) for each in self.staged]
            return [[value for value in row if value is not None] for row in zip(*sources, strict=True)]
        stored = columns.stored_values(self.name)
        return [[] if value is None else _items(value) for value in stored] if self.is_list else stored

    def made(self, columns: ChunkColumns, stored: Any, decode: Callable[..., Any]) -> Any:
        """Return what `decode` makes of bytes, row and number of a stored value, or of each of a list.

        None where it is bad, which is noted; the default where it is missing.
        """
        if stored is None:  # a copy, because transforms change what they are given
            return None if self.default is None else copy.deepcopy(self.default.value)
        if not self.is_list:
            return columns.decoded(self.name, stored, decode)

        def named(number: int, data: Bytes, row: int) -> Any:
            try:
                return decode(data, row, number)
            except BaseException as error:
                if must_go_on(error):
                    raise
                raise _of_item(error, number) from error

        return [
            columns.decoded(self.name, item, partial(named, number)) for number, item in enumerate(stored)
        ]

    def draws(self, columns: ChunkColumns, row: int, number: int) -> Draws | None:
        """The random numbers of a value of a row of the chunk."""
        if not self.is_random:
            return None
        window, window_row = columns.rows.find(row)
        return columns.randomness.draws(window, np.array([window_row]), np.array([number]))

    def part_size(self, num_values: int) -> int:
        """Values of one shape that one task decodes."""
        return 1

    def _build_sized(self, columns: ChunkColumns) -> BuiltColumn:
        rows = columns.rows
        offsets = (
            np.append(0, np.cumsum(self._counts(rows))) if self.is_list else np.arange(rows.num_rows + 1)
        )
        total = int(offsets[-1])
        out = columns.slot(total * self.value_bytes).view(self.dtype).reshape(total, *self.shape)
        most, tasks = self.part_size(total), list[Callable[[], None]]()
        for part in rows.parts:
            values = self._listed(part, offsets) if self.is_list else self._single(part, out)
            for start in range(0, len(values.row), most):
                few = slice(start, start + most)
                piece = PartValues(
                    part=part,
                    row=values.row[few],
                    number=values.number[few],
                    spans=values.spans.of(few),
                    target=values.target[few],
                )
                tasks.append(partial(self._fill, columns, piece, out))
        split = partial(split_ragged, out, offsets) if self.is_list else partial(split_rows, out)
        return BuiltColumn(split=split, decodes=tasks)

    def _fill(self, columns: ChunkColumns, values: PartValues, out: NDArray[Any]) -> None:
        """Decode a few values of a part into their places, and note those that cannot be."""
        part, owners = values.part, values.part.rows[values.row]
        draws = columns.randomness.draws(part.window, owners, values.number) if self.is_random else None

        def row(index: int) -> int:
            return part.chunk_row(int(values.row[index]))

        def remark(index: int, text: str) -> None:
            columns.remark(row(index), self.name, text)

        with part.window.values_of(values.spans, owners, self.name) as (buffer, starts):
            ends = starts + values.spans.lengths
            encoded = [buffer[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
            targets = [out[index] for index in values.target.tolist()]
            failures = self.decode_few(columns, encoded, targets, draws, remark)
        for index, error in failures:
            named = _of_item(error, int(values.number[index])) if self.is_list else error
            columns.note_bad(row(index), self.name, named)

    def _single(self, part: WindowPart, out: NDArray[Any]) -> PartValues:
        """The values of a part of which each row has one; where it is missing `out` gets the default."""
        spans = part.window.spans(self.name)
        there = spans.lengths[part.rows] >= 0
        have, target = np.flatnonzero(there), np.arange(len(out))[part.chunk_rows]
        if self.default is not None and len(have) < len(there):
            out[target[~there]] = self.default.value
        return PartValues(
            part=part,
            row=have,
            number=np.zeros(len(have), np.int64),
            spans=spans.of(part.rows[have]),
            target=target[have],
        )

    # ---- lists --------------------------------------------------------------------------------------------

    def _num_values(self, rows: ChunkRows) -> int:
        return int(self._counts(rows).sum()) if self.is_list else rows.num_rows

    def _counts(self, rows: ChunkRows) -> Ints:
        """Return how many items each row of the chunk has, int64 [rows]."""
        from sharding.byte_lists import list_counts

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

    def _listed(self, part: WindowPart, offsets: Ints) -> PartValues:
        """The items of a part; `offsets`: of the rows among the items of the chunk, int64 [rows + 1]."""
        from sharding.byte_lists import list_items

        if self.is_joined:
            lengths = self._lengths(part)
            row, source = np.nonzero(lengths >= 0)
            columns = [part.window.spans(each.name).addresses[part.rows] for each in self.staged]
            spans = StagedSpans(np.stack(columns, axis=1)[row, source], lengths[row, source])
            number = np.cumsum(lengths >= 0, axis=1)[row, source] - 1
        else:
            buffer, list_starts, have = self._lists(part)
            counts, starts, item_lengths = list_items(buffer, list_starts)
            spans = StagedSpans(starts + buffer.__array_interface__["data"][0], item_lengths, [buffer])
            row = np.repeat(have, counts)
            number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        target = offsets[np.arange(len(offsets) - 1)[part.chunk_rows][row]] + number
        return PartValues(part=part, row=row, number=number, spans=spans, target=target)

    def _note_missing_items(self, columns: ChunkColumns) -> None:
        """Note the rows that lack an item of which only the path is stored."""
        for part in columns.rows.parts:
            lengths = self._lengths(part)
            for row, source in np.argwhere(lengths < MISSING).tolist():
                reason = f"{self.sources[source]}: {REASONS[int(lengths[row, source])]}"
                columns.note_bad(part.chunk_row(row), self.name, reason)

    def _lengths(self, part: WindowPart) -> Ints:
        """Return the lengths of the items of several sources, int64 [rows, sources]."""
        return np.stack([part.window.spans(each.name).lengths[part.rows] for each in self.staged], axis=1)

    def _lists(self, part: WindowPart) -> tuple[Bytes, Ints, Ints]:
        """Memory that holds the lists of a part, where each begins, and which rows of the part have one."""
        spans = part.window.spans(self.name)
        have = np.flatnonzero(spans.lengths[part.rows] >= 0)
        owners = part.rows[have]
        buffer, starts = part.window.buffer_of(spans.of(owners), owners, self.name)
        return buffer, starts, have


def _of_item(error: BaseException, number: int) -> Exception:
    """The error of one item of a sample."""
    if isinstance(error, MemoryLimitError):  # it is the sample that is too large
        return error
    reason = error.reason if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
    named = SampleError("", f"item {number}: {reason}", stage="decode")
    named.__cause__ = error.__cause__ if isinstance(error, SampleError) else error
    return named


def _items(value: StoredValue) -> list[StoredValue]:
    from sharding.byte_lists import list_items

    data, row = value
    _, starts, lengths = list_items(data, np.zeros(1, np.int64))
    items = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [(data[start : start + length], row) for start, length in items]
