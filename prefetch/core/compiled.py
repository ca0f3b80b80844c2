"""The compiled executor: `libcore.so`, by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetch.core.compile import LIBRARY
from prefetch.core.plan import WIDENED, BuildPlan, Op, PlanColumn

VERSION = 1
"""Of the contract in core.h."""
_WIDTHS = (1, 2, 4, 8)


class CompiledExecutor:
    """Runs plans by a library that `core.h` describes. `OSError` where it cannot be loaded."""

    name = "compiled"

    def __init__(self, path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "core_version"):
            raise OSError(f"{path} is no library of ours: run python -m prefetch.core.compile")
        for name, arguments in {"core_run": "piiip", "core_interleave": "piiip", "core_version": ""}.items():
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in arguments]
            function.restype = None if name == "core_interleave" else ctypes.c_int64
        found = library.core_version()
        if found != VERSION:
            raise OSError(
                f"{path} is of version {found} of its contract, not {VERSION}: "
                "run python -m prefetch.core.compile"
            )
        self._run, self._interleave = library.core_run, library.core_interleave

    def run(self, plan: BuildPlan) -> NDArray[np.uint8]:
        """See `Executor`."""
        table = np.array([_entry(column) for column in plan.columns], np.int64)
        status = np.empty(plan.num_rows, np.uint8)
        self._run(_address(table), len(table), 0, plan.num_rows, _address(status))
        return status

    def interleave(self, columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """See `Executor`."""
        width = out.itemsize
        if width not in _WIDTHS or any(column.dtype != out.dtype for column in columns):
            np.stack(columns, axis=-1, out=out)
            return
        arrays = [np.require(column, requirements=["C", "A"]) for column in columns]
        addresses = np.array([_address(array) for array in arrays], np.int64)
        self._interleave(_address(addresses), len(arrays), arrays[0].size, width, _address(out))


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _entry(column: PlanColumn) -> tuple[int, ...]:
    """`core_column` of core.h: eleven numbers of 8 bytes."""
    return (
        Op.WIDEN if column.widen else Op.COPY,
        WIDENED.index(column.widen) if column.widen else 0,
        column.may_load,
        column.base,
        column.step,
        _address(column.index),
        column.each,
        0 if column.lengths is None else _address(column.lengths),
        _address(column.out),
        column.row_bytes,
        0 if column.places is None else _address(column.places),
    )
