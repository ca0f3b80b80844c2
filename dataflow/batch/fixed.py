"""Columns whose rows all have one dtype and shape: one tensor [batch, *shape]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.columns import ChunkColumns, ChunkRows
from dataflow.batch.output import BuiltColumn, Output, split_rows
from dataflow.decode.values import BadRows
from dataflow.staging.columns import StagedArray
from prefetch.core.plan import PlanColumn
from prefetch.memory.arena import Arena, rounded_bytes
from sharding.blocks import Column, Spans
from sharding.cached_property import cached_property


@dataclass(frozen=True, kw_only=True)
class FixedOutput(Output):
    """What all columns of fixed-size rows have in common."""

    is_view: ClassVar[bool] = True

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one delivered row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def list_length(self) -> int | None:
        """Elements of each row, where rows are lists."""
        return self.shape[0] if len(self.shape) == 1 else None

    def description(self) -> str:
        """Kind, dtype and shape."""
        return f"{super().description()} {list(self.shape)}"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of the slot."""
        return rounded_bytes(rows.num_rows * self.row_bytes)

    def _views(self, memory: NDArray[np.uint8], first: int, sizes: Sequence[int]) -> list[Tensor]:
        """One tensor a batch, of rows that lie in memory one after the other."""
        return split_rows(np.ndarray((sum(sizes), *self.shape), self.dtype, memory), sizes)

    def _note_lengths(self, columns: ChunkColumns) -> None:
        """Note the rows for which the plan of length-aware batches says another length."""
        cut = columns.rows.cut_of(self.name)
        if cut is not None:
            have = np.full(columns.rows.num_rows, self.shape[0])
            columns.note_lengths(self.name, np.flatnonzero(cut.whole != have), have)


@dataclass(frozen=True, kw_only=True)
class ArrayOutput(FixedOutput):
    """Numbers that are copied, or parsed, into one array of the window when it is staged."""

    kind: ClassVar[str] = "array"
    is_copied: ClassVar[bool] = True
    stays_in_place: ClassVar[bool] = False

    parse: Callable[[Spans], tuple[NDArray[Any], BadRows]] | None = field(default=None, compare=False)
    """How byte strings become numbers; None: they are stored as numbers."""

    def takes(self, column: Column) -> bool:
        """Whether a decoded column of a block is of the type that the schema promised."""
        if isinstance(column, Spans):
            return bool(column.buffer.dtype == ("uint8" if self.parse else self.source_dtype))
        shape = self.shape[:-1] if len(self.sources) > 1 else self.shape
        return self.parse is None and bool(column.dtype == self.source_dtype and column.shape[1:] == shape)

    def staged_bytes(self, num_rows: int) -> int:
        """Bytes of the window's array."""
        return rounded_bytes(num_rows * self.row_bytes)

    def stage(self, num_rows: int, arena: Arena) -> StagedArray:
        """The window's array, [num_rows, *shape]."""
        nbytes = num_rows * self.row_bytes
        flat = arena.lease(nbytes or 1)[:nbytes].view(self.dtype)
        return StagedArray(flat.reshape(num_rows, *self.shape), self.parse)

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Rows of the windows' arrays."""
        self._note_lengths(columns)
        for part in columns.rows.parts:
            staged = part.window.staged[self.name]
            assert isinstance(staged, StagedArray)
            if staged.bad:
                for index in np.flatnonzero(np.isin(part.rows, list(staged.bad))).tolist():
                    columns.note_bad(part.chunk_row(index), self.name, staged.bad[int(part.rows[index])])
        base, step, rows = columns.rows.array_rows(self.name)
        copies = PlanColumn(name=self.name, base=base, step=step, index=rows, each=self.row_bytes)
        return BuiltColumn(copies=copies, views=self._views)


@dataclass(frozen=True, kw_only=True)
class RowsOutput(FixedOutput):
    """Values of one length, gathered from where they were read; widened where `dtype` is wider."""

    kind: ClassVar[str] = "spans"
    is_copied: ClassVar[bool] = True

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Rows gathered from the stored bytes. Raises `SampleError` for a value of another length."""
        self._note_lengths(columns)
        columns.note_missing(self.name)
        stored_bytes = math.prod(self.shape) * np.dtype(self.source_dtype).itemsize
        addresses = columns.addresses_of(self.name, stored_bytes)
        copies = PlanColumn(
            name=self.name,
            index=addresses,
            each=stored_bytes,
            # As wide already, uint64 keeps its bits: no token is that large.
            widen=self.source_dtype if stored_bytes < self.row_bytes else "",
            may_load=columns.may_load,
        )
        return BuiltColumn(copies=copies, views=self._views)
