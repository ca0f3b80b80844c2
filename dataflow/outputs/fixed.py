"""Columns whose rows all have one dtype and shape: one tensor [batch, *shape]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.values import LACKING, BadRows, stored_numbers
from dataflow.outputs.columns import ChunkColumns, ChunkRows
from dataflow.outputs.output import BuiltColumn, Default, Output, split_rows
from dataflow.staging.columns import StagedArray, StagedPresence
from prefetch.core.copy_table import PlanColumn
from prefetch.memory.arena import Arena, rounded_bytes
from sharding.blocks import Column, Masked, Spans
from sharding.cached_property import cached_property
from sharding.spans import Bytes

MASK_SUFFIX = "_mask"


@dataclass(frozen=True, kw_only=True)
class FixedOutput(Output):
    """The base of all columns of fixed-size rows."""

    is_view: ClassVar[bool] = True
    is_fixed: ClassVar[bool] = True

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one delivered row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def optional(self, default: Any, *, has_mask: bool) -> Self:
        """See `Output`. Without a default a mask tells of rows of 0, or of NaN where numbers are floats."""
        dtype = self.source_dtype
        unknown = math.nan if np.dtype(dtype).kind == "f" else 0
        return replace(self, default=default_row(self, default, unknown, dtype, has_mask=has_mask))

    def batch_bytes(self, rows: ChunkRows) -> int:
        """Return the bytes of the slot."""
        return rounded_bytes(rows.num_rows * self.row_bytes)

    def _views(self, memory: Bytes, first: int, sizes: Sequence[int]) -> list[Tensor]:
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
    """Turns byte strings into numbers; None: they are stored as numbers."""

    def takes(self, column: Column) -> bool:
        """Return whether a decoded column of a block is of the type that the schema promised."""
        if isinstance(column, Spans):
            return bool(column.dtype == ("uint8" if self.parse else self.source_dtype))
        shape = self.shape[:-1] if len(self.sources) > 1 else self.shape
        values = column.values if isinstance(column, Masked) else column
        return bool(values.dtype == self.source_dtype and values.shape[1:] == shape)

    def staged_bytes(self, num_rows: int) -> int:
        """Bytes of the window's array."""
        return rounded_bytes(num_rows * self.row_bytes)

    def stage(self, num_rows: int, arena: Arena) -> StagedArray:
        """The window's array, [num_rows, *shape]."""
        return StagedArray(self._array(num_rows, arena), parse=self.parse, fill=self.default_array)

    def _array(self, num_rows: int, arena: Arena) -> NDArray[Any]:
        nbytes = num_rows * self.row_bytes
        return arena.lease(nbytes or 1)[:nbytes].view(self.dtype).reshape(num_rows, *self.shape)

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Rows of the windows' arrays."""
        if columns.rows.cut is not None:
            self._note_lengths(columns)
        for part in columns.rows.parts:
            for index, reason in part.window.array(self.name).bad_among(part.rows):
                lacking = self.lacking if reason == LACKING else None
                columns.note_bad(part.chunk_row(index), self.name, lacking or reason)
        base, step, rows = columns.rows.array_rows(self.name)
        copies = PlanColumn(name=self.name, base=base, step=step, index=rows, each=self.row_bytes)
        return BuiltColumn(copies=copies, views=self._views)


@dataclass(frozen=True, kw_only=True)
class MaskOutput(ArrayOutput):
    """A mask of the values of another column that are there: bool [batch], [batch, n] of n stacked ones."""

    kind: ClassVar[str] = "mask"
    takes_bytes: ClassVar[bool] = False

    @property
    def suffix(self) -> str:
        """See `Output`."""
        return MASK_SUFFIX

    @property
    def lacking(self) -> None:
        """None: it tells of missing values."""
        return

    def takes(self, column: Column) -> bool:
        """Any: the other column looks at the type."""
        return True

    def stage(self, num_rows: int, arena: Arena) -> StagedArray:
        """The window's array, [num_rows, *shape]."""
        return StagedPresence(self._array(num_rows, arena))


@dataclass(frozen=True, kw_only=True)
class RowsOutput(FixedOutput):
    """Values of one length, gathered from where they were read; widened where `dtype` is wider."""

    kind: ClassVar[str] = "spans"
    is_copied: ClassVar[bool] = True

    def as_array(self) -> Output:
        """The output of the same tensors that other formats give it, which stores no addresses of them."""
        if self.dtype != self.source_dtype:
            return self
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        parse = partial(stored_numbers, dtype=self.dtype, shape=self.shape)
        return ArrayOutput(**{**settings, "parse": parse})

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Rows gathered from the stored bytes. Raises `SampleError` for a value of another length."""
        if columns.rows.cut is not None:
            self._note_lengths(columns)
        columns.note_missing(self.name, lambda: self.lacking)
        stored_bytes = math.prod(self.shape) * np.dtype(self.source_dtype).itemsize
        addresses = columns.addresses_of(self.name, stored_bytes, self.default_array)
        copies = PlanColumn(
            name=self.name,
            index=addresses,
            each=stored_bytes,
            # As wide already, uint64 keeps its bits: no token is that large.
            widen=self.source_dtype if stored_bytes < self.row_bytes else "",
            may_load=columns.may_load,
        )
        return BuiltColumn(copies=copies, views=self._views)


def default_row(output: Output, default: Any, unknown: float, dtype: str, *, has_mask: bool) -> Default:
    """Return what stands for a missing row of a tensor: the default, or `unknown` where a mask tells.

    Raises `ValueError` for a default that is no value of this type and the output's shape, or for none where
    nothing else tells.
    """
    if default is None:
        default = unknown
        if default == 0 and not has_mask:
            raise ValueError(
                f"column {output.name!r} is delivered as a tensor, which has no place for None: "
                "Optional(default=...) puts a value there, Optional(mask=True) tells where one is missing"
            )
    row = stored_array(output.name, default, dtype)
    try:
        row = np.ascontiguousarray(np.broadcast_to(row, output.shape))
    except ValueError:
        raise _misfit(output.name, default, f"of shape {list(output.shape)}") from None
    return Default(row.reshape(output.shape))


def stored_array(name: str, value: Any, dtype: str) -> NDArray[Any]:
    """A default as an array of the stored type; of bytes and text their bytes. `ValueError` if it is none."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    try:
        original = np.asarray(value)
        with np.errstate(over="raise"):  # of Python's numbers, numpy tells those that do not fit
            array = np.asarray(original.tolist(), dtype)
    except (TypeError, ValueError, ArithmeticError):
        raise _misfit(name, value, dtype) from None
    if array.dtype.kind != "f" and not np.array_equal(array, original):
        raise _misfit(name, value, dtype)
    return array


def _misfit(name: str, value: Any, what: str) -> ValueError:
    return ValueError(f"column {name!r}: default={value!r} is no value {what}, as all its values are")
