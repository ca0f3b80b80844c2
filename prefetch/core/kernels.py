"""The compiled kernels: `libcore.so`, called by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetch.core.copy_table import PlanColumn, column_table
from prefetch.core.queue import CopyQueue
from sharding.cached_property import cached_property
from sharding.core.compile import LIBRARY
from sharding.core.library import address_of, loaded

_WIDTHS = (1, 2, 4, 8)


class Kernels:
    """The functions of `core.h`, in the caller's thread and without the interpreter lock. Thread-safe.

    Raises `ImportError` where the library is missing, or is not of this version.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        self._library = loaded(ctypes.CDLL, path)
        self._holding = loaded(ctypes.PyDLL, path)
        """For calls that do not wait: to let the interpreter go for them may cost a switch."""

    @cached_property
    def copies_by_kernel(self) -> bool:
        """Return whether untouchable values can be read: containers may forbid `process_vm_readv`."""
        probe, out = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
        index = np.array([address_of(probe)])
        column = PlanColumn(name="probe", index=index, each=8, out=out, may_load=False)
        return not self.run(1, [column]).any()

    def run(self, num_rows: int, columns: Sequence[PlanColumn]) -> NDArray[np.uint8]:
        """Make all copies of columns of so many rows.

        Returns uint8 [rows]: 0, or 1 + the number of the first column whose value could not be read (255 for
        columns behind that). What is in `out` for such a value is arbitrary.
        """
        for column in columns:
            if len(column.index) != num_rows:
                raise ValueError(f"column {column.name!r} has {len(column.index)} of {num_rows} rows")
        table, status = column_table(columns), np.empty(num_rows, np.uint8)
        self._library.core_run(address_of(table), len(table), 0, num_rows, address_of(status))
        return status

    def open_queue(self, num_threads: int, *, wake_at: int = 1) -> CopyQueue:
        """A queue of `num_threads` threads that wakes who waits when `wake_at` jobs are done."""
        return CopyQueue(self._library, self._holding, num_threads, wake_at)

    def bring(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Check mapped files, and wait for pages of them.

        Args:
            ranges: int64 [n, 6], as `prefetch.core.pages` says.

        Returns int64 [n]: 0; -1 where the file is not what it was, or cannot be looked at; else the number of
        the error (`errno`) of what cannot be read.
        """
        status = np.empty(len(ranges), np.int64)
        self._library.core_bring(address_of(ranges), len(ranges), address_of(status))
        return status

    def read(self, parts: NDArray[np.int64]) -> int:
        """Read parts of open files: descriptor, offset, bytes and address of each, int64 [n, 4].

        Returns how many came whole before the first that did not: its file is shorter, or cannot be read.
        """
        whole: int = self._library.core_read(address_of(parts), len(parts))
        return whole

    def seeded_permutations(
        self, sizes: NDArray[np.int64], keys: Sequence[int], out: NDArray[np.int64]
    ) -> None:
        """Mix as `sharding.order.permutations.seeded_permutations` does."""
        numbers = np.array(keys, np.uint64)
        if len(numbers) != len(sizes) or int(sizes.sum()) != len(out):
            raise ValueError(f"{len(numbers)} keys and {len(out)} numbers for sizes {sizes.tolist()}")
        if self._library.core_seeded_permutations(
            address_of(sizes), address_of(numbers), len(numbers), address_of(out)
        ):
            raise MemoryError(f"no memory to order {len(out):,} samples")

    def token_draws(
        self,
        shares: NDArray[np.int64],
        owed: NDArray[np.int64],
        lengths: NDArray[np.int64],
        upcoming: NDArray[np.int64],
        end: NDArray[np.int64],
        out: NDArray[np.uint16],
    ) -> int:
        """Draw as `sharding.mixture.token_schedule.DrawSources` says."""
        tables = map(address_of, (shares, owed, lengths, upcoming, end))
        return int(self._library.core_token_draws(*tables, len(shares), address_of(out), len(out)))

    def interleave(self, columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """Let columns of one shape and dtype become the last dimension of `out`, which is C-contiguous."""
        width = out.itemsize
        if width not in _WIDTHS or any(column.dtype != out.dtype for column in columns):
            np.stack(columns, axis=-1, out=out)
            return
        arrays = [np.require(column, requirements=["C", "A"]) for column in columns]
        addresses = np.array([address_of(array) for array in arrays], np.int64)
        self._library.core_interleave(
            address_of(addresses), len(arrays), arrays[0].size, width, address_of(out)
        )


@cache
def kernels() -> Kernels:
    """The kernels of this process. Raises as `Kernels`."""
    return Kernels()
