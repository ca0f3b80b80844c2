"""Build plans: what has to be copied from where to where, as a table that any executor can run.

A plan holds addresses, lengths and operations, and nothing that has to be called: planning, windows, leases,
policies and errors stay with whoever makes it. Whoever runs it tells of each row whether its values could be
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Op(IntEnum):
    """What becomes of a stored value."""

    COPY = 0
    WIDEN = 1
    """Stored integers become int64."""


WIDENED = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
"""What `Op.WIDEN` takes, in the order of `core_type` in core.h."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanColumn:
    """The copies of one column. The value of row r lies at `base + step * index[r]`.

    Whoever makes it keeps the memory of the values alive until the plan has run, and answers for the
    addresses. Arrays are C-contiguous.
    """

    name: str
    """What errors call it."""
    index: NDArray[np.int64]
    """[rows]."""
    out: NDArray[Any]
    """C-contiguous destination."""
    base: int = 0
    step: int = 1
    each: int = 0
    """Bytes of every stored value, where `lengths` is None."""
    lengths: NDArray[np.int64] | None = None
    """[rows] bytes of the stored values, >= 0; None: all are as long as `each`, and so are rows of `out`."""
    places: NDArray[np.int64] | None = None
    """[rows] byte of `out` where a value begins; wherever there are `lengths`."""
    widen: str = ""
    """dtype of the stored integers, one of `WIDENED`, that become int64; "": values stay as they are."""
    may_load: bool = True
    """Whether the values may be touched; else a page may be gone, and only the kernel may read them."""

    def __post_init__(self) -> None:
        rows, nbytes = len(self.index), self.out.nbytes
        arrays = (self.out, self.index, self.lengths, self.places)
        if not self.out.flags.writeable or not all(a is None or a.flags.c_contiguous for a in arrays):
            raise ValueError(f"column {self.name!r}: arrays must be C-contiguous, and out writable")
        if any(a is not None and a.dtype != np.int64 for a in arrays[1:]):  # C takes them as they are
            raise ValueError(f"column {self.name!r}: index, lengths and places must be int64")
        if self.lengths is None:
            if self.places is not None:
                raise ValueError(f"column {self.name!r}: places go with lengths")
            if self.widen and self.widen not in WIDENED:
                raise ValueError(f"column {self.name!r}: widen must be in {WIDENED}, not {self.widen!r}")
            fits = rows * self.row_bytes == nbytes
        else:
            if self.places is None or self.widen or not len(self.places) == len(self.lengths) == rows:
                raise ValueError(f"column {self.name!r}: lengths need places for all rows, and go unwidened")
            ends = self.places + self.lengths
            least = min(int(self.places.min(initial=0)), int(self.lengths.min(initial=0)))
            fits = least >= 0 and int(ends.max(initial=0)) <= nbytes
        if not fits:
            raise ValueError(f"column {self.name!r}: its values do not fit an `out` of {nbytes} bytes")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `out`, where all are equally long."""
        return self.each * 8 // np.dtype(self.widen).itemsize if self.widen else self.each


@dataclass(frozen=True, kw_only=True, eq=False)
class BuildPlan:
    """The copies of a chunk, column by column."""

    num_rows: int
    columns: Sequence[PlanColumn]

    def __post_init__(self) -> None:
        for column in self.columns:
            if len(column.index) != self.num_rows:
                raise ValueError(f"column {column.name!r} has {len(column.index)} of {self.num_rows} rows")


class Executor(Protocol):
    """Runs plans, in the caller's thread. Thread-safe."""

    name: str

    def run(self, plan: BuildPlan) -> NDArray[np.uint8]:
        """Make all copies, without the interpreter lock.

        Returns uint8 [rows]: 0, or 1 + the number of the first column whose value could not be read (255 for
        columns behind that). What is in `out` for such a value is arbitrary.
        """
        ...

    def interleave(self, columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """Let columns of one shape and dtype become the last dimension of `out`, which is C-contiguous."""
        ...
