"""The executor without compiled code: the kernel copies, numpy widens.

Neither numpy nor torch gathers spans of different lengths. The kernel does: `process_vm_readv(2)` on our own
process copies up to 1,024 spans a system call, without the interpreter lock. It also reads pages of a mapped
file that are not there, or no longer, without harm: the call ends short instead of killing the process. Where
it is missing or forbidden (some containers filter it), `memmove` copies what may be touched, span by span.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetch.addresses import memory_at
from prefetch.core.images import ImageForm, Resizer, resize_by_numpy
from prefetch.core.pages import bring_range
from prefetch.core.plan import BuildPlan, PlanColumn

_GROUP = 1024
_TILE_BYTES = 1 << 20
"""Columns become rows by tiles of this size, which stay in the cache."""


def _copy_by_kernel(spans: NDArray[np.int64], out: int, nbytes: int, readv: Any) -> int:
    """Copy spans ([n, 2] address and bytes), one after the other, to an address; gives the bytes copied."""
    local = np.array([out, nbytes], np.int64)
    return int(readv(os.getpid(), local.ctypes.data, 1, spans.ctypes.data, len(spans), 0))


def _usable(library: Any) -> Any:
    """The call, if the system lets this process use it on itself; else None."""
    readv = getattr(library, "process_vm_readv", None)
    if readv is None:
        return None
    word, address = ctypes.c_ulong, ctypes.c_void_p
    readv.argtypes, readv.restype = (ctypes.c_int, address, word, address, word, word), ctypes.c_ssize_t
    probe, out = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    copied = _copy_by_kernel(np.array([[probe.ctypes.data, 8]]), out.ctypes.data, 8, readv)
    return readv if copied == 8 and (out == probe).all() else None


process_vm_readv = _usable(ctypes.CDLL(None))
"""The system call; None where the C library lacks it, or this process may not use it."""


def copies_by_kernel() -> bool:
    """Whether values that must not be touched can be read at all."""
    return process_vm_readv is not None


def _take(column: PlanColumn) -> None:
    """Copy rows of an array: numpy's own gather is many times as fast for rows of a few bytes."""
    each = column.each
    assert column.out is not None
    first, last = int(column.index.min()), int(column.index.max())
    rows = memory_at(column.base + first * each, (last + 1 - first) * each).reshape(-1, each)
    out = column.out.reshape(-1).view(np.uint8).reshape(-1, each)
    np.take(rows, column.index - first, axis=0, out=out, mode="clip")


class NumpyExecutor:
    """Runs plans where no compiled code is. Slower.

    Args:
        readv: copies as `process_vm_readv`; None: nothing does.
    """

    name = "numpy"
    keyed_orders = None
    """See `Executor`: numpy's own is as good."""
    token_turns = None
    """See `Executor`: each turn depends on the one before, so it is a loop in Python."""
    open_queue = None
    """See `Executor`: threads of Python would wait for each other."""

    def __init__(self, readv: Any = process_vm_readv) -> None:
        self._readv = readv

    def run(self, plan: BuildPlan) -> NDArray[np.uint8]:
        """See `Executor`."""
        status = np.zeros(plan.num_rows, np.uint8)
        for number, column in enumerate(plan.columns, 1):
            if column.may_load and not column.widen and column.each == column.step and plan.num_rows:
                _take(column)
                continue
            for first in range(0, plan.num_rows, _GROUP):
                part = status[first : first + _GROUP]
                lost = self._copy(column, first, first + len(part))
                part[lost & (part == 0)] = min(number, 255)
        return status

    def _copy(self, column: PlanColumn, first: int, last: int) -> NDArray[np.bool_]:
        """Copy rows [first, last) of a column; gives which could not be read."""
        rows, each = slice(first, last), column.each
        assert column.out is not None
        if column.out.nbytes == 0:
            return np.zeros(last - first, np.bool_)
        spans = np.empty((last - first, 2), np.int64)
        spans[:, 0] = column.index[rows] * column.step + column.base
        spans[:, 1] = each if column.lengths is None else column.lengths[rows]
        out = column.out.reshape(-1).view(np.uint8)
        if column.widen:
            scratch = np.empty((last - first) * each, np.uint8)
            lost = self._read(spans, np.arange(last - first) * each, scratch, may_load=column.may_load)
            wide = out.view(np.int64).reshape(-1, each // np.dtype(column.widen).itemsize)
            np.copyto(wide[rows], scratch.view(column.widen).reshape(wide[rows].shape))
            return lost
        places = np.arange(first, last) * each if column.places is None else column.places[rows]
        return self._read(spans, places, out, may_load=column.may_load)

    def _read(
        self, spans: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[np.uint8], *, may_load: bool
    ) -> NDArray[np.bool_]:
        lost, base = np.zeros(len(spans), np.bool_), out.ctypes.data
        ends = places + spans[:, 1]
        nbytes = int(spans[:, 1].sum())
        if nbytes == 0:
            return lost
        follow = self._readv is not None and (places[1:] == ends[:-1]).all()
        if follow and _copy_by_kernel(spans, base + int(places[0]), nbytes, self._readv) == nbytes:
            return lost
        for row, ((address, left), place) in enumerate(zip(spans.tolist(), places.tolist(), strict=True)):
            target = base + place
            while left and self._readv is not None:  # a call may move less than it was asked for
                copied = _copy_by_kernel(np.array([[address, left]]), target, left, self._readv)
                if copied <= 0:
                    break
                address, target, left = address + copied, target + copied, left - copied
            if left and may_load:
                ctypes.memmove(target, address, left)
            lost[row] = left > 0 and not may_load
        return lost

    def bring(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Executor`."""
        return np.array([bring_range(*entry) for entry in ranges.tolist()], np.int64)

    def interleave(self, columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """See `Executor`."""
        # By tiles that stay in the cache: gathering the columns of a tile first and transposing it is twice
        # as fast as writing each column strided.
        num_rows = len(columns[0])
        tile_rows = max(1, _TILE_BYTES // max(1, out[:1].nbytes))
        for start in range(0, num_rows, tile_rows):
            rows = slice(start, start + tile_rows)
            np.copyto(out[rows], np.moveaxis(np.stack([column[rows] for column in columns]), 0, -1))

    def resizer(self, form: ImageForm) -> Resizer:
        """See `Executor`."""
        return partial(resize_by_numpy, form)
