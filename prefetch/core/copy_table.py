"""Build plans: what has to be copied from where to where, as a table that compiled code runs.

A plan holds addresses, lengths and operations, and nothing that has to be called: planning, windows, leases,
policies and errors stay with whoever makes it. Whoever runs it tells of each row whether its values could be
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.core.library import address_of


class Op(IntEnum):
    """The operation on a stored value."""

    COPY = 0
    WIDEN = 1
    """Turn stored integers into int64."""


WIDENED = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
"""The types that `Op.WIDEN` takes, in the order of `core_type` in core.h."""


class PlanColumn(Struct, frozen=True, kw_only=True, eq=False):
    """The copies of one column. The value of row r lies at `base + step * index[r]`.

    Whoever makes it keeps the memory of the values alive until the plan has run, and answers for the
    addresses. Arrays are C-contiguous.
    """

    name: str
    """The name of the column in errors."""
    index: NDArray[np.int64]
    """The number of the stored value that each row takes, [rows]."""
    out: NDArray[Any] | None = None
    """C-contiguous destination; None: it is not allocated yet, or goes where jobs have slots."""
    base: int = 0
    step: int = 1
    each: int = 0
    """Bytes of every stored value, where `lengths` is None."""
    lengths: NDArray[np.int64] | None = None
    """[rows] bytes of the stored values, >= 0; None: all are as long as `each`, and so are rows of `out`."""
    offsets: NDArray[np.int64] | None = None
    """[rows] byte of `out` where a value begins; wherever there are `lengths`."""
    widen: str = ""
    """dtype of the stored integers, one of `WIDENED`, that become int64; "": values stay as they are."""
    may_load: bool = True
    """True if the values may be touched; else a page may be gone, and only the kernel may read them."""

    def __post_init__(self) -> None:
        rows, out = len(self.index), self.out
        arrays = (out, self.index, self.lengths, self.offsets)
        is_fit = out is None or out.flags.writeable
        if not is_fit or not all(a is None or a.flags.c_contiguous for a in arrays):
            raise ValueError(f"column {self.name!r}: arrays must be C-contiguous, and out writable")
        if any(a is not None and a.dtype != np.int64 for a in arrays[1:]):  # C takes them as they are
            raise ValueError(f"column {self.name!r}: index, lengths and offsets must be int64")
        if self.lengths is None:
            if self.offsets is not None:
                raise ValueError(f"column {self.name!r}: offsets go with lengths")
            if self.widen and self.widen not in WIDENED:
                raise ValueError(f"column {self.name!r}: widen must be in {WIDENED}, not {self.widen!r}")
            fits = out is None or rows * self.row_bytes == out.nbytes
        else:
            if self.offsets is None or self.widen or not len(self.offsets) == len(self.lengths) == rows:
                raise ValueError(f"column {self.name!r}: lengths need offsets of all rows, and go unwidened")
            ends = self.offsets + self.lengths
            least = min(int(self.offsets.min(initial=0)), int(self.lengths.min(initial=0)))
            fits = least >= 0 and (out is None or int(ends.max(initial=0)) <= out.nbytes)
        if not fits:
            have = "nothing" if out is None else f"an `out` of {out.nbytes} bytes"
            raise ValueError(f"column {self.name!r}: its values do not fit {have}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `out`, where all are equally long."""
        return self.each * 8 // np.dtype(self.widen).itemsize if self.widen else self.each

    @property
    def nbytes(self) -> int:
        """Return the bytes of all values, where they follow one another."""
        return len(self.index) * self.row_bytes if self.lengths is None else int(self.lengths.sum())

    def out_bytes(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of `out` that the rows [first, last) take, where values follow one another."""
        if self.offsets is None or self.lengths is None:
            return (last - first) * self.row_bytes
        ends: NDArray[np.int64] = np.append(0, self.offsets + self.lengths)
        sizes: NDArray[np.int64] = ends[last] - ends[first]
        return sizes


def column_table(columns: Sequence[PlanColumn]) -> NDArray[np.int64]:
    """`core_column` of core.h for each: eleven numbers of 8 bytes."""
    return np.array([_entry(column) for column in columns], np.int64).reshape(len(columns), 11)


def _entry(column: PlanColumn) -> tuple[int, ...]:
    return (
        Op.WIDEN if column.widen else Op.COPY,
        WIDENED.index(column.widen) if column.widen else 0,
        column.may_load,
        column.base,
        column.step,
        address_of(column.index),
        column.each,
        0 if column.lengths is None else address_of(column.lengths),
        0 if column.out is None else address_of(column.out),
        column.row_bytes,
        0 if column.offsets is None else address_of(column.offsets),
    )


COLUMN_ALIGN = 64
"""The multiple at which each of the columns that share a slot begins."""


class JobPlan(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The copies of a chunk, to be made in jobs: consecutive rows of all columns, which fill one slot."""

    number: int
    """The number of the chunk, in stream order: jobs of smaller ones are run first."""
    columns: Sequence[PlanColumn]
    """Without `out`; their values follow one another."""
    ends: NDArray[np.int64]
    """[jobs] the row after the last of each job; the last one: of all rows."""
    generation: NDArray[np.int64] | None = None
    """[1] of what keeps files at their length; where it is not what it was when the plan was made, only the
    kernel reads, whatever columns say."""
    planned_in: int = 0
    """The generation when the plan was made."""
    keep: object = None
    """The memory that it copies from, if nobody else keeps that."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all jobs."""
        return int(self.ends[-1])

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that the largest job takes."""
        return int(self.offsets[:, -1].max())

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[jobs, columns + 1] where in the job's slot a column begins, and how much of it is used."""
        first = np.concatenate(([0], self.ends[:-1]))
        sizes = [column.out_bytes(first, self.ends) for column in self.columns]
        offsets = np.zeros((len(self.ends), len(sizes) + 1), np.int64)
        for number, nbytes in enumerate(sizes):
            offsets[:, number + 1] = offsets[:, number] + -(-nbytes // COLUMN_ALIGN) * COLUMN_ALIGN
        return offsets
