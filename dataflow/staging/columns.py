"""The columns of a window: copied into one array, or addresses of values that stay where they were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.values import LACKING, BadRows
from prefetch.core.kernels import kernels
from prefetch.memory.arena import Arena
from sharding.blocks import ABSENT, MISSING, NULL_INSIDE, PATH_ONLY, Column, Masked, Shard, Spans
from sharding.cached_property import cached_property
from sharding.spans import Bytes, Ints

if TYPE_CHECKING:
    from dataflow.decode.rules import PartsRule, ReadBytes


Array = NDArray[Any]
ALIGN = 512
"""Bytes that the begins of blocks and values, which a window puts side by side, are multiples of."""
REASONS = {
    MISSING: LACKING,
    ABSENT: LACKING,
    NULL_INSIDE: "a list with a null inside, for which its type has no value: write floats, or fill it",
    PATH_ONLY: (
        "only the path of a file is stored, not its bytes; datasets puts them in by "
        "push_to_hub(embed_external_files=True) or save_to_disk, and ShardWriter writes what it is given"
    ),
}
"""Reasons why a value is bad, by the number in place of its length."""


@dataclass
class StagedArray:
    """A fixed-size column of a window."""

    values: Array
    """Values of all rows, [rows, *shape]."""
    _: KW_ONLY
    parse: Callable[[Spans], tuple[Array, BadRows]] | None = None
    """Turns byte strings into numbers; None: they are stored as numbers."""
    fill: Array | None = None
    """[*shape] what stands for a value that is missing; None: NaN of floats, else such a row is bad."""
    bad: dict[int, str] = field(default_factory=dict)
    """Rows whose value could not be parsed, with the reason."""
    _gaps: dict[int, NDArray[np.int8]] = field(default_factory=dict)
    """Blocks with bad rows for lack of a value: first row -> `Masked.lacks`."""

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage one block's values at rows from `first`; those of several columns become a last dimension."""
        out = self.values[first : first + len(columns[0])]
        if isinstance(columns[0], Spans):
            values, bad = self.parsed(columns[0])
            np.copyto(out, values)
            self.bad.update((first + row, reason) for row, reason in bad)
            return
        arrays = [c.values if isinstance(c, Masked) else np.asarray(c) for c in columns]
        if len(arrays) == 1:
            np.copyto(out, arrays[0])
        else:
            kernels().interleave(arrays, out)
        for index, column in enumerate(columns):
            if isinstance(column, Masked):
                self._put_gaps(first, column.lacks, ... if len(columns) == 1 else (..., index))

    def _put_gaps(self, first: int, lacks: NDArray[np.int8], part: Any) -> None:
        """Fill what a part of each row (all of it, or one of several columns) lacks, or note it."""
        is_missing = lacks == MISSING
        if self.fill is not None:
            is_missing |= lacks == ABSENT
            self.values[first : first + len(lacks)][part][is_missing] = self.fill[part]
        elif self.values.dtype.kind != "f":
            is_missing = np.zeros_like(is_missing)
        bad = np.where(is_missing, 0, lacks)
        if bad.any():
            self._gaps[first] = np.minimum(bad, self._gaps.get(first, 0))

    def parsed(self, column: Spans) -> tuple[Array, BadRows]:
        """The numbers that byte strings are, [n, *shape], and the rows that are none."""
        assert self.parse is not None
        have = np.flatnonzero(column.lengths >= 0)
        if self.fill is None or len(have) == len(column):
            return self.parse(column)
        values = np.empty((len(column), *self.values.shape[1:]), self.values.dtype)
        values[:] = self.fill
        values[have], bad = self.parse(Spans(column.buffer, column.starts[have], column.lengths[have]))
        return values, [(int(have[row]), reason) for row, reason in bad]

    def bad_among(self, rows: Ints) -> list[tuple[int, str]]:
        """Return which of some rows are bad, as indices into them, and why.

        Asked once the window is staged.
        """
        bad = []
        if self.bad:
            among = np.flatnonzero(np.isin(rows, list(self.bad))).tolist()
            bad = [(index, self.bad[int(rows[index])]) for index in among]
        if self._gaps:
            lacks = self._lacks[rows]
            bad += [(index, REASONS[int(lacks[index])]) for index in np.flatnonzero(lacks).tolist()]
        return bad

    @cached_property
    def _lacks(self) -> NDArray[np.int8]:
        lacks = np.zeros(len(self.values), np.int8)
        for first, block_lacks in self._gaps.items():
            lacks[first : first + len(block_lacks)] = block_lacks
        return lacks


class StagedPresence(StagedArray):
    """Flags of values of a column that are there, bool [rows], or [rows, columns] of several stacked ones."""

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage what one block has at rows from `first`."""
        out = self.values[first : first + len(columns[0])].reshape(-1, len(columns))
        for index, column in enumerate(columns):
            out[:, index] = _is_there(column)

    def parsed(self, column: Spans) -> tuple[Array, BadRows]:
        """Return which byte strings are there; nothing of them is read."""
        return _is_there(column), ()


def _is_there(column: Column) -> NDArray[np.bool_]:
    if isinstance(column, Spans):
        return column.lengths >= 0
    return column.lacks == 0 if isinstance(column, Masked) else np.ones(len(column), bool)


@dataclass
class StagedSpans:
    """A column of a window whose values stay where they were read."""

    addresses: Ints
    """[rows] first byte of each value."""
    lengths: Ints
    """[rows] bytes; what `Spans` has where there is no value."""
    keep: list[Any] = field(default_factory=list)
    """Objects that keep the memory alive."""
    is_cut: NDArray[np.bool_] | None = None
    """[rows] those of whose values only parts are read: `put_cut` stages them, and `put` leaves them out."""

    @cached_property
    def uniform_bytes(self) -> int:
        """The length of every value, where all are equally long; else -1. Asked once the window is staged."""
        first = int(self.lengths[0]) if len(self.lengths) else -1
        return first if (self.lengths == first).all() else -1

    @cached_property
    def has_missing(self) -> bool:
        """Return whether any row lacks the column; asked once the window is staged."""
        return bool((self.lengths < 0).any())

    def of(self, rows: Ints | slice) -> StagedSpans:
        """Return those of some rows, which may come again."""
        return StagedSpans(self.addresses[rows], self.lengths[rows], self.keep)

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage one block's values, of one column, at rows from `first`."""
        column = columns[0]
        rows = slice(first, first + len(column))
        self.keep.append(column)
        if isinstance(column, Spans):
            lengths, size = column.lengths, column.dtype.itemsize
            if size > 1:
                lengths = np.where(lengths < 0, lengths, lengths * size)
            which = slice(None) if self.is_cut is None else ~self.is_cut[rows]
            starts = column.starts * column.buffer.itemsize
            starts += column.buffer.__array_interface__["data"][0]  # `ctypes.data` takes longer
            self.addresses[rows][which] = starts[which]
            self.lengths[rows][which] = lengths[which]
        else:  # rows of a (possibly overlapping) array, each contiguous
            assert isinstance(column, np.ndarray)
            row_bytes = int(np.prod(column.shape[1:], dtype=np.int64)) * column.itemsize
            self.addresses[rows] = column.ctypes.data + np.arange(len(column)) * column.strides[0]
            self.lengths[rows] = row_bytes

    def put_cut(self, row: int, value: Bytes) -> None:
        """Stage what was cut of a value. Several threads may stage different rows."""
        self.keep.append(value)
        self.addresses[row], self.lengths[row] = value.ctypes.data, len(value)


_dtype = lru_cache(np.dtype)
"""A dtype by its name: to make one takes longer than to compare two."""


@dataclass(frozen=True, kw_only=True)
class StagedOutput:
    """An output column as staging sees it. Equal to another of the same types, whatever its sources."""

    stays_in_place: ClassVar[bool] = True
    """True if a window keeps addresses of values, not values."""
    takes_bytes: ClassVar[bool] = True
    """True if what is staged depends on the bytes of values, not on where they are alone."""

    name: str
    sources: tuple[str, ...] = field(compare=False)
    """Dataset columns it is made of: one, or several that are stacked on a last dimension."""
    column: str = ""
    """The column of batches that it is a part of; "": it has the name of it."""
    dtype: str = "uint8"
    """numpy dtype of one element as delivered."""
    source_dtype: str = "uint8"
    """numpy dtype of one element as stored."""
    shape: tuple[int, ...] = ()
    """Shape of one row, where all have the same."""

    @property
    def clip_bytes(self) -> int | None:
        """About how many bytes a value takes of other files, which it is cut out of; None: it is stored."""
        return None

    @property
    def parts_rule(self) -> PartsRule | None:
        """The rule for which parts of its values are read, where not all need be; None: values come whole."""
        return None

    def takes(self, column: Column) -> bool:
        """Return whether a decoded column of a block is of the type that the schema promised."""
        dtype = _dtype(self.source_dtype)
        if isinstance(column, Spans):
            return bool(column.dtype == dtype)
        values = column.values if isinstance(column, Masked) else column
        return bool(values.dtype == dtype and values.shape[1:] == self.shape)

    def staged_bytes(self, num_rows: int) -> int:
        """Bytes that a window of so many rows holds of it, beside the stored bytes."""
        return 16 * num_rows

    def stage(self, num_rows: int, arena: Arena) -> StagedArray | StagedSpans:
        """Return where a window of so many rows puts it, before anything is read."""
        return StagedSpans(np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64))

    def cut(
        self, staged: StagedSpans, rows: Ints, read_of: Callable[[Shard], ReadBytes], indexes: dict[str, Any]
    ) -> None:
        """Read what rows need of other files, where it has `clip_bytes`, and stage it as their values.

        `indexes`: what is kept of files meanwhile, by whatever names outputs give it.
        """
        raise NotImplementedError
