"""The columns of a window: copied into one array, or addresses of values that stay where they were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dataflow.decode.values import BadRows
from prefetch.memory.arena import Arena
from prefetch.memory.spans import memory_at
from sharding.blocks import Column, Spans
from sharding.cached_property import cached_property

Array = NDArray[Any]
ALIGN = 512
"""Where a window puts blocks and values side by side, each begins at a multiple of this."""
_TILE_BYTES = 1 << 20
"""Columns become rows by tiles of this size: they stay in the L2 cache, and take the GIL seldom."""


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
        # By tiles that stay in the cache: gathering the columns of a tile first and
        # transposing it is twice as fast as writing each column strided.
        arrays = [np.asarray(column) for column in columns]
        num_rows = len(arrays[0])
        tile_rows = max(1, _TILE_BYTES // max(1, self.values[:1].nbytes))
        tile = np.empty((len(arrays), min(tile_rows, num_rows), *arrays[0].shape[1:]), arrays[0].dtype)
        for start in range(0, num_rows, tile_rows):
            stop = min(start + tile_rows, num_rows)
            part = np.stack([array[start:stop] for array in arrays], out=tile[:, : stop - start])
            np.copyto(self.values[first + start : first + stop], np.moveaxis(part, 0, -1))

    def _numbers(self, column: Column) -> tuple[Array, BadRows]:
        if isinstance(column, Spans):
            assert self.parse is not None
            return self.parse(column)
        return column, ()


def lowest_bit(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


class Grid(NamedTuple):
    """Where equally long values lie: at `base + step * places`."""

    base: int
    step: int
    """Bytes, a power of two."""
    places: NDArray[np.int64]
    """[rows]."""
    view: torch.Tensor
    """uint8 [places, bytes of a value]: rows that start `step` bytes apart and may overlap.

    It spans everything between the values; only the values themselves may be touched."""

    @classmethod
    def of(cls, base: int, step: int, places: NDArray[np.int64], row_bytes: int) -> Grid:
        """A grid over memory that others keep alive."""
        num = int(places.max()) + 1
        memory = torch.from_numpy(memory_at(base, (num - 1) * step + row_bytes))
        return cls(base, step, places, memory.as_strided((num, row_bytes), (step, 1)))


@dataclass
class StagedSpans:
    """A column of a window whose values stay where they were read."""

    addresses: NDArray[np.int64]
    """[rows] first byte of each value."""
    lengths: NDArray[np.int64]
    """[rows] bytes; -1 where the sample lacks the column."""
    keep: list[Any] = field(default_factory=list)
    """What keeps the memory alive."""

    @cached_property
    def uniform_bytes(self) -> int:
        """The length of every value, where all are equally long; else -1. Asked once the window is staged."""
        first = int(self.lengths[0]) if len(self.lengths) else -1
        return first if (self.lengths == first).all() else -1

    @cached_property
    def grid(self) -> Grid:
        """Equally long values as rows of one strided view of memory. Only where loads are allowed."""
        base = int(self.addresses.min())
        offsets = self.addresses - base
        step = lowest_bit(int(np.bitwise_or.reduce(offsets)) | ALIGN)
        return Grid.of(base, step, offsets // step, self.uniform_bytes)

    @cached_property
    def pieces(self) -> NDArray[np.int64]:
        """[rows, 2] address and length of each value, missing ones empty: what the kernel's copy takes."""
        both = np.empty((len(self.addresses), 2), np.int64)
        both[:, 0] = self.addresses
        np.maximum(self.lengths, 0, out=both[:, 1])
        return both

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
            self.addresses[rows] = column.buffer.ctypes.data + column.starts * item
            self.lengths[rows] = np.where(column.lengths < 0, -1, column.lengths * item)
        else:  # rows of a (possibly overlapping) array, each contiguous
            row_bytes = int(np.prod(column.shape[1:], dtype=np.int64)) * column.itemsize
            self.addresses[rows] = column.ctypes.data + np.arange(len(column)) * column.strides[0]
            self.lengths[rows] = row_bytes


@dataclass(frozen=True, kw_only=True)
class StagedOutput:
    """An output column as staging sees it. Equal to another of the same types, whatever its sources."""

    stays_in_place: ClassVar[bool] = True
    """Whether a window keeps addresses of values, not values."""

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
