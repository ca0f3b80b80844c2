"""Which executor runs the plans of this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prefetch.core.by_numpy import NumpyExecutor
from prefetch.core.compile import LIBRARY
from prefetch.core.compiled import CompiledExecutor
from prefetch.core.images import ImageForm, Resizer
from prefetch.core.plan import BuildPlan
from prefetch.core.queue import CopyQueue

VARIABLE = "DATAFLOW_EXECUTOR"
"""Environment variable: `compiled` or `numpy`; else the compiled one is taken where there is one."""
_log = logging.getLogger(__name__)


class OpenQueue(Protocol):
    """Makes a `CopyQueue`, with its arguments."""

    def __call__(self, num_threads: int, *, wake_at: int = 1) -> CopyQueue:
        """A queue of `num_threads` threads that wakes who waits when `wake_at` jobs are done."""
        ...


_Ints = NDArray[np.int64]
TokenTurnsCall = Callable[[_Ints, _Ints, _Ints, _Ints, _Ints, NDArray[np.uint16]], int]


class Executor(Protocol):
    """Runs plans, in the caller's thread. Thread-safe."""

    name: str

    @property
    def keyed_orders(self) -> Callable[[NDArray[np.int64], Sequence[int], NDArray[np.int64]], None] | None:
        """What `sharding.order.keyed.keyed_orders` does, without the interpreter lock; None: nothing does."""
        ...

    @property
    def token_turns(self) -> TokenTurnsCall | None:
        """What `sharding.mixture.token_turns.take_turns` does, without the lock; None: nothing does."""
        ...

    def run(self, plan: BuildPlan) -> NDArray[np.uint8]:
        """Make all copies, without the interpreter lock.

        Returns uint8 [rows]: 0, or 1 + the number of the first column whose value could not be read (255 for
        columns behind that). What is in `out` for such a value is arbitrary.
        """
        ...

    def bring(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Check mapped files, and wait for pages of them, without the interpreter lock.

        Args:
            ranges: int64 [n, 6], as `prefetch.core.pages` says.

        Returns int64 [n]: 0; -1 where the file is not what it was, or cannot be looked at; else the number of
        the error (`errno`) of what cannot be read.
        """
        ...

    def interleave(self, columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """Let columns of one shape and dtype become the last dimension of `out`, which is C-contiguous."""
        ...

    def resizer(self, form: ImageForm) -> Resizer:
        """What makes results of decoded images, the same by every executor."""
        ...

    @property
    def open_queue(self) -> OpenQueue | None:
        """Starts threads that run plans without the interpreter; None: it has none."""
        ...


@cache
def executor() -> Executor:
    """The executor of this process: the compiled one where it can be loaded.

    Raises `OSError` where it was asked for and cannot, `ValueError` for another name.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "compiled", "numpy"):
        raise ValueError(f"{VARIABLE} must be compiled or numpy, got {wanted!r}")
    if wanted == "numpy":
        return NumpyExecutor()
    try:
        return CompiledExecutor()
    except OSError as error:
        if wanted:
            raise
        reason = error if LIBRARY.exists() else "it was not built: install again where there is a C compiler"
        _log.warning("batches are built by slower code, without the compiled core: %s", reason)
        return NumpyExecutor()
