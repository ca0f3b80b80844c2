"""The columns of a window: copied into one array, or addresses of values that stay where they were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.episodes import EpisodeVideos
from dataflow.decode.media import MediaRule
from dataflow.decode.values import BadRows
from dataflow.decode.video import Video
from prefetch.core.executor import executor
from prefetch.memory.arena import Arena
from sharding.blocks import Column, Spans
from sharding.cached_property import cached_property

Array = NDArray[Any]
ALIGN = 512
"""Where a window puts blocks and values side by side, each begins at a multiple of this."""


@dataclass
class StagedArray:
    """A fixed-size column of a window."""

    values: Array
    """[rows, *shape]."""
    parse: Callable[[Spans], tuple[Array, BadRows]] | None = None
    """How byte strings become numbers; None: they are stored as numbers."""
    bad: dict[int, str] = field(default_factory=dict)
    """Rows whose value could not be parsed, with the reason."""

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage one block's values at rows from `first`; those of several columns become a last dimension."""
        if len(columns) == 1:
            values, bad = self._numbers(columns[0])
            np.copyto(self.values[first : first + len(values)], values)
            self.bad.update((first + row, reason) for row, reason in bad)
            return
        arrays = [np.asarray(column) for column in columns]
        executor().interleave(arrays, self.values[first : first + len(arrays[0])])

    def _numbers(self, column: Column) -> tuple[Array, BadRows]:
        if isinstance(column, Spans):
            assert self.parse is not None
            return self.parse(column)
        return column, ()


@dataclass
class StagedSpans:
    """A column of a window whose values stay where they were read."""

    addresses: NDArray[np.int64]
    """[rows] first byte of each value."""
    lengths: NDArray[np.int64]
    """[rows] bytes; -1 where the sample lacks the column."""
    keep: list[Any] = field(default_factory=list)
    """What keeps the memory alive."""
    is_cut: NDArray[np.bool_] | None = None
    """[rows] those of whose values only parts are read: `put_cut` stages them, and `put` leaves them out."""

    @cached_property
    def uniform_bytes(self) -> int:
        """The length of every value, where all are equally long; else -1. Asked once the window is staged."""
        first = int(self.lengths[0]) if len(self.lengths) else -1
        return first if (self.lengths == first).all() else -1

    @cached_property
    def has_missing(self) -> bool:
        """Whether any row lacks the column; asked once the window is staged."""
        return bool((self.lengths < 0).any())

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage one block's values, of one column, at rows from `first`."""
        column = columns[0]
        rows = slice(first, first + len(column))
        self.keep.append(column)
        if isinstance(column, Spans):
            item = column.buffer.itemsize
            which: NDArray[np.bool_] | slice = slice(None) if self.is_cut is None else ~self.is_cut[rows]
            self.addresses[rows][which] = (column.buffer.ctypes.data + column.starts * item)[which]
            self.lengths[rows][which] = np.where(column.lengths < 0, -1, column.lengths * item)[which]
        else:  # rows of a (possibly overlapping) array, each contiguous
            row_bytes = int(np.prod(column.shape[1:], dtype=np.int64)) * column.itemsize
            self.addresses[rows] = column.ctypes.data + np.arange(len(column)) * column.strides[0]
            self.lengths[rows] = row_bytes

    def put_cut(self, row: int, value: NDArray[np.uint8]) -> None:
        """Stage what was cut of a value. Several threads may stage different rows."""
        self.keep.append(value)
        self.addresses[row], self.lengths[row] = value.ctypes.data, len(value)


@dataclass
class StagedMoments(StagedSpans):
    """A column of clips of other files, which are cut for rows that are asked for, once moments are known."""

    moments: tuple[NDArray[np.int64], NDArray[np.float64]] = field(kw_only=True)
    """[rows] episode, and seconds in it."""

    def put(self, first: int, columns: Sequence[Column]) -> None:
        """Stage the moments of one block's rows."""
        for own, column in zip(self.moments, columns, strict=True):
            values = np.asarray(column)
            own[first : first + len(values)] = values.reshape(len(values))


@dataclass(frozen=True, kw_only=True)
class StagedOutput:
    """An output column as staging sees it. Equal to another of the same types, whatever its sources."""

    stays_in_place: ClassVar[bool] = True
    """Whether a window keeps addresses of values, not values."""

    @property
    def videos(self) -> tuple[Video, EpisodeVideos] | None:
        """Which files its values are cut out of, by episode and time, its sources. None: they are stored."""
        return None

    @property
    def parts_rule(self) -> MediaRule | None:
        """Which parts of its values are read, where not all of them need be; None: values come whole."""
        return None

    name: str
    sources: tuple[str, ...] = field(compare=False)
    """Dataset columns it is made of: one, or several that are stacked on a last dimension."""
    dtype: str = "uint8"
    """numpy dtype of one element as delivered."""
    source_dtype: str = "uint8"
    """numpy dtype of one element as stored."""
    shape: tuple[int, ...] = ()
    """Shape of one row, where all have the same."""

    def takes(self, column: Column) -> bool:
        """Whether a decoded column of a block is of the type that the schema promised."""
        if isinstance(column, Spans):
            return bool(column.buffer.dtype == self.source_dtype)
        return bool(column.dtype == self.source_dtype and column.shape[1:] == self.shape)

    def staged_bytes(self, num_rows: int) -> int:
        """Bytes that a window of so many rows holds of it, beside the stored bytes."""
        return 16 * num_rows

    def stage(self, num_rows: int, arena: Arena) -> StagedArray | StagedSpans:
        """Where a window of so many rows puts it, before anything is read."""
        return StagedSpans(np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64))
