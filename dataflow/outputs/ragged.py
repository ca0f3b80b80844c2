"""Columns whose values differ in length: ragged pairs of values and offsets, or padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from dataflow.outputs.columns import ChunkColumns, ChunkRows
from dataflow.outputs.fixed import stored_array
from dataflow.outputs.output import BuiltColumn, Default, Output, split_ragged
from prefetch.core.copy_table import PlanColumn
from prefetch.memory.arena import rounded_bytes
from sharding.spans import Bytes, Ints


@dataclass(frozen=True)
class Pad:
    """Deliver a variable-length column as one tensor [batch, length] instead of a ragged pair.

    Args:
        value: the value that fills the rest of a short row.
        length: elements a row; longer rows are cut. None: the longest row of the batch.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet", decode={"tokens": Pad(length=16)})
        >>> with DataLoader(dataset, batch_size=4) as loader:
        ...     next(iter(loader))["tokens"].shape
        torch.Size([4, 16])
    """

    value: float = 0
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class RaggedOutput(Output):
    """A column that is delivered as a `Ragged` a batch."""

    kind: ClassVar[str] = "ragged"
    is_view: ClassVar[bool] = True
    is_copied: ClassVar[bool] = True
    one_shape_cure: ClassVar[str] = "Pad()} pads them"

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. Without a default a mask tells of empty rows."""
        if default is None and not has_mask:
            raise ValueError(
                f"column {self.name!r} is delivered as one tensor of values, which has no place for None: "
                "Optional(default=[]) makes an empty row of it, Optional(mask=True) tells where it is missing"
            )
        row = stored_array(self.name, () if default is None else default, self.source_dtype)
        if row.ndim != 1:
            raise ValueError(f"column {self.name!r} holds lists, so default= must be one; got {default!r}")
        return replace(self, default=Default(row))

    @property
    def missing_length(self) -> int | None:
        """Elements of a row whose value is missing; None: it is a bad one."""
        return None if self.default is None else len(self.default.value)

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of the values, or of the segments that length-aware batches take of them."""
        return rounded_bytes(int(self.row_sizes(rows).sum()))

    def row_sizes(self, rows: ChunkRows) -> Ints:
        """Return the bytes of the values, or of the segments that length-aware batches take of them."""
        cut = rows.cut_of(self.name)
        if cut is not None:
            return cut.length * np.dtype(self.dtype).itemsize
        return rows.bytes_of(self.name, 0 if self.default_array is None else self.default_array.nbytes)

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Values one after the other in one slot."""
        columns.note_missing(self.name, lambda: self.lacking)
        segments = columns.segments(self.name, self.default_array)
        cut = columns.rows.cut_of(self.name)
        if cut is not None:
            itemsize = np.dtype(self.source_dtype).itemsize
            have = segments[1] // itemsize
            columns.note_lengths(self.name, cut.apply(segments, itemsize), have)
        addresses, lengths = segments
        ends = np.cumsum(lengths)
        copies = PlanColumn(
            name=self.name,
            index=addresses,
            lengths=lengths,
            offsets=ends - lengths,
            may_load=columns.may_load,
        )
        return BuiltColumn(copies=copies, views=partial(self._views, np.append(0, ends)))

    def _views(self, ends: Ints, memory: Bytes, first: int, sizes: Sequence[int]) -> Iterator[Any]:
        """One value a batch."""
        itemsize = np.dtype(self.source_dtype).itemsize
        elements = ends[first : first + sum(sizes) + 1] // itemsize
        elements -= elements[0]
        values = memory[: int(elements[-1]) * itemsize].view(self.source_dtype)
        return split_ragged(values, elements, sizes)


@dataclass(frozen=True, kw_only=True)
class PaddedOutput(RaggedOutput):
    """A tensor [batch, length] a batch."""

    kind: ClassVar[str] = "pad"
    is_view: ClassVar[bool] = False
    is_copied: ClassVar[bool] = False
    one_shape_cure: ClassVar[str] = ""

    pad: Pad

    def description(self) -> str:
        """Return the kind, dtype and padding."""
        return f"{super().description()} {self.pad}"

    def _views(self, ends: Ints, memory: Bytes, first: int, sizes: Sequence[int]) -> Iterator[Any]:
        for rows in super()._views(ends, memory, first, sizes):
            yield rows.padded(self.pad.value, self.pad.length)
