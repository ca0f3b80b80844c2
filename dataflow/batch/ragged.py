"""Columns whose values differ in length: ragged pairs of values and offsets, or padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dataflow.batch.columns import ChunkColumns, ChunkRows
from dataflow.batch.output import BuiltColumn, Output
from dataflow.ragged import Ragged
from prefetch.core.plan import PlanColumn
from prefetch.memory.arena import rounded_bytes


@dataclass(frozen=True)
class Pad:
    """Deliver a variable-length column as one tensor [batch, length] instead of a ragged pair."""

    value: float = 0
    """What fills the rest of a short row."""
    length: int | None = None
    """Elements a row; longer rows are cut. None: the longest row of the batch."""


@dataclass(frozen=True, kw_only=True)
class RaggedOutput(Output):
    """A `Ragged` a batch."""

    kind: ClassVar[str] = "ragged"
    is_view: ClassVar[bool] = True
    is_copied: ClassVar[bool] = True
    one_shape_cure: ClassVar[str] = "Pad()} pads them"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of the values, or of the pieces that length-aware batches take of them."""
        return rounded_bytes(int(self.row_sizes(rows).sum()))

    def row_sizes(self, rows: ChunkRows) -> NDArray[np.int64]:
        """Of the values, or of the pieces that length-aware batches take of them."""
        cut = rows.cut_of(self.name)
        if cut is not None:
            return cut.length * np.dtype(self.dtype).itemsize
        return rows.bytes_of(self.name)

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Values one after the other in one slot."""
        columns.note_missing(self.name)
        pieces, cut = columns.pieces(self.name), columns.rows.cut_of(self.name)
        if cut is not None:
            itemsize = np.dtype(self.source_dtype).itemsize
            have = pieces[1] // itemsize
            columns.note_lengths(self.name, cut.apply(pieces, itemsize), have)
        addresses, lengths = pieces
        ends = np.cumsum(lengths)
        copies = PlanColumn(
            name=self.name,
            index=addresses,
            lengths=lengths,
            places=ends - lengths,
            may_load=columns.may_load,
        )
        return BuiltColumn(copies=copies, views=partial(self._views, np.append(0, ends)))

    def _views(
        self, ends: NDArray[np.int64], memory: NDArray[np.uint8], first: int, sizes: Sequence[int]
    ) -> Iterator[Any]:
        """One value a batch; offsets count from the batch's own first element."""
        itemsize = np.dtype(self.source_dtype).itemsize
        elements = ends[first : first + sum(sizes) + 1] // itemsize
        elements -= elements[0]
        whole = torch.from_numpy(memory[: int(elements[-1]) * itemsize].view(self.source_dtype))
        row = 0
        for size in sizes:
            own = elements[row : row + size + 1]
            rows = whole[int(own[0]) : int(own[-1])]
            yield self._delivered(Ragged(rows, torch.from_numpy(own - own[0])))
            row += size

    def _delivered(self, rows: Ragged) -> Any:
        return rows


@dataclass(frozen=True, kw_only=True)
class PaddedOutput(RaggedOutput):
    """A tensor [batch, length] a batch."""

    kind: ClassVar[str] = "pad"
    is_view: ClassVar[bool] = False
    is_copied: ClassVar[bool] = False
    is_decoded: ClassVar[bool] = True
    one_shape_cure: ClassVar[str] = ""

    pad: Pad

    def description(self) -> str:
        """Kind, dtype and padding."""
        return f"{super().description()} {self.pad}"

    def _delivered(self, rows: Ragged) -> Any:
        return rows.padded(self.pad.value, self.pad.length)
