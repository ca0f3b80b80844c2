"""Samples that are the bytes of their columns, one after the other, with lengths before them.

Lengths are u32 each: of the columns without a fixed size (MDS), of all (LitData), or of none, where there is
a single column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import Block, Column, Columns, ColumnSpec, Shard, Spans
from sharding.errors import CorruptShardError
from sharding.formats.streaming.offset_table import words_at
from sharding.spans import Bytes, Ints

Heads = Literal["free", "all", "none"]
"""Whose lengths stand before a sample: of columns without a fixed size, of all, of none."""


class StoredColumn(Struct, frozen=True):
    """A column of a shard; a format says what its encodings are."""

    name: str
    encoding: str
    size: int | None
    """Bytes of each value; None: they differ."""
    items: str = ""
    """dtype of the elements, of arrays of one dimension; "": other values."""

    @property
    def is_rewritten(self) -> bool:
        """Return whether values are delivered in other bytes than they are stored in."""
        raise NotImplementedError

    def spec(self) -> ColumnSpec:
        """Return the kind of the column."""
        raise NotImplementedError

    def decode(self, buffer: Bytes, starts: Ints, lengths: Ints, block: Block) -> Column:
        """Return the values that lie in a block's bytes at these places, [n]."""
        raise NotImplementedError

    def num_items(self, nbytes: int) -> int:
        """Return how many elements a list has that is stored in so many bytes."""
        return nbytes // np.dtype(self.items).itemsize

    def corrupt(self, block: Block) -> Callable[[str], CorruptShardError]:
        """Return what makes the error of a value that is none."""
        return lambda reason: block.corrupt(f"column {self.name!r}: {reason}")


class SampleLayout(Struct, frozen=True):
    """The columns of a shard, in stored order."""

    columns: tuple[StoredColumn, ...]
    heads: Heads = "free"

    @property
    def num_free(self) -> int:
        """The number of columns without a fixed size."""
        return sum(column.size is None for column in self.columns)

    @property
    def num_heads(self) -> int:
        """The number of lengths before a sample."""
        return {"free": self.num_free, "all": len(self.columns), "none": 0}[self.heads]

    @property
    def least_bytes(self) -> int:
        """The bytes of a sample whose columns without a fixed size are empty."""
        return 4 * self.num_heads + sum(column.size or 0 for column in self.columns)

    def as_json(self) -> list[list[Any]]:
        """Return the fields of its columns."""
        return [[column.name, column.encoding, column.size, column.items] for column in self.columns]

    def schema(self, sizes: NDArray[Any]) -> dict[str, ColumnSpec]:
        """Return the columns' specs; `sizes`: of all samples, [n]."""
        schema = {column.name: column.spec() for column in self.columns}
        if self.num_free == 1 and len(sizes):
            only = next(column for column in self.columns if column.size is None)
            ends = [int(size) - self.least_bytes for size in (sizes.min(), sizes.max())]
            if only.items:
                ends = sorted(map(only.num_items, ends))
            if only.items or not only.is_rewritten:
                schema[only.name] = replace(schema[only.name], size_range=(ends[0], ends[1]))
        return schema

    def check_sizes(self, offsets: Ints, shard: Shard) -> None:
        """Raise `CorruptShardError` where a sample is too short for its columns; `offsets`: [n + 1]."""
        lacking = np.flatnonzero(np.diff(offsets) < self.least_bytes)
        if len(lacking):
            i = int(lacking[0])
            size = offsets[i + 1] - offsets[i]
            reason = f"sample {i} has {size} bytes, and its columns at least {self.least_bytes}"
            raise shard.corrupt(reason, int(offsets[i]))

    def wanted(self, block: Block, columns: Sequence[str] | None) -> list[StoredColumn]:
        """Return the columns of these names; raises `CorruptShardError` for one that is not there."""
        if columns is None:
            return [*self.columns]
        known = {column.name: column for column in self.columns}
        for name in columns:
            if name not in known:
                raise block.corrupt(f"no column {name!r}; the shard has {', '.join(known)}")
        return [known[name] for name in columns]

    def spans(self, starts: Ints, free: Ints) -> dict[str, tuple[Ints, Ints]]:
        """Return where the values of each column lie.

        Args:
            starts: of the samples, [n].
            free: lengths of the columns without a fixed size, [n, num_free].
        """
        begins, number, spans = starts + 4 * self.num_heads, 0, {}
        for column in self.columns:
            if column.size is None:
                lengths = free[:, number]
                number += 1
            else:
                lengths = np.full(len(starts), column.size, np.int64)
            spans[column.name] = begins, lengths
            begins = begins + lengths
        return spans

    def locate(self, block: Block, sizes: Ints, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """Return where values lie if the sizes of samples, [n], tell; see `Format.locate`."""
        selection = self.wanted(block, columns)
        if self.num_free > 1 or any(column.is_rewritten for column in selection):
            return None
        spans = self.spans(np.cumsum(sizes) - sizes, (sizes - self.least_bytes)[:, None][:, : self.num_free])
        empty = np.empty(0, np.uint8)
        return {column.name: Spans(empty, *spans[column.name]) for column in selection}

    def decode(
        self, block: Block, buffer: Bytes, starts: Ints, ends: Ints, columns: Sequence[str] | None
    ) -> Columns:
        """Return the columns of the samples that lie in `buffer` between these bytes, [n] each.

        Raises `CorruptShardError` for lengths that are not those of a sample, or an unknown column.
        """
        selection = self.wanted(block, columns)
        if (ends - starts < 4 * self.num_heads).any():
            raise block.corrupt("a sample is shorter than the lengths of its columns")
        if self.heads == "none":
            free, fits = (ends - starts)[:, None][:, : self.num_free], np.ones(len(starts), np.bool_)
        else:
            lengths, is_free = self._lengths(buffer, starts)
            free = lengths[:, is_free]
            fits = free.sum(axis=1) + self.least_bytes == ends - starts
            for number, column in enumerate(self.columns if self.heads == "all" else ()):
                fits &= is_free[number] | (lengths[:, number] == column.size)
        differs = np.flatnonzero(~fits)
        if len(differs):
            i = int(differs[0])
            reason = f"the columns of sample {block.first_in_shard + i} do not take the bytes that it has"
            raise block.shard.corrupt(reason, block.offset + int(starts[i]), stage="decode")
        spans = self.spans(starts, free)
        return {column.name: column.decode(buffer, *spans[column.name], block) for column in selection}

    def _lengths(self, buffer: Bytes, starts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The lengths before samples, [n, num_heads], and which are of columns without a fixed size."""
        is_free = np.array([column.size is None for column in self.columns], np.bool_)
        is_free = is_free if self.heads == "all" else np.ones(self.num_heads, np.bool_)
        if not self.num_heads:
            return np.zeros((len(starts), 0), np.int64), is_free
        return words_at(buffer, starts, self.num_heads), is_free
