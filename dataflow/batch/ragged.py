"""Columns whose values differ in length: ragged pairs of values and offsets, or padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    one_shape_cure: ClassVar[str] = "Pad()} pads them"

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Bytes of the values, or of the pieces that length-aware batches take of them."""
        cut = rows.cut_of(self.name)
        if cut is not None:
            return rounded_bytes(int(cut.length.sum()) * np.dtype(self.dtype).itemsize)
        lengths = (part.spans(self.name).lengths[part.rows] for part in rows.parts)
        return rounded_bytes(sum(int(np.maximum(own, 0).sum()) for own in lengths))

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
        out = columns.slot(int(ends[-1]) if len(ends) else 0)
        values = torch.from_numpy(out.view(self.source_dtype))
        copies = PlanColumn(
            name=self.name,
            index=addresses,
            lengths=lengths,
            places=ends - lengths,
            out=out,
            may_load=columns.may_load,
        )
        return BuiltColumn(split=partial(self._split, values, lengths), copies=copies)

    def _split(self, values: Tensor, lengths: NDArray[np.int64], sizes: Sequence[int]) -> Iterator[Any]:
        """One value a batch; offsets count from the batch's own first element."""
        ends = np.concatenate(([0], np.cumsum(lengths // values.element_size())))
        row = 0
        for size in sizes:
            own = ends[row : row + size + 1]
            rows = values[int(own[0]) : int(own[-1])]
            yield self._delivered(Ragged(rows, torch.from_numpy(own - own[0])))
            row += size

    def _delivered(self, rows: Ragged) -> Any:
        return rows


@dataclass(frozen=True, kw_only=True)
class PaddedOutput(RaggedOutput):
    """A tensor [batch, length] a batch."""

    kind: ClassVar[str] = "pad"
    is_view: ClassVar[bool] = False
    is_decoded: ClassVar[bool] = True
    one_shape_cure: ClassVar[str] = ""

    pad: Pad

    def description(self) -> str:
        """Kind, dtype and padding."""
        return f"{super().description()} {self.pad}"

    def _delivered(self, rows: Ragged) -> Any:
        return rows.padded(self.pad.value, self.pad.length)
