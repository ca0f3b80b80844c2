"""Which executor runs the plans of this process."""

from __future__ import annotations

import logging
import os
from functools import cache

from prefetch.core.by_numpy import NumpyExecutor
from prefetch.core.compile import LIBRARY
from prefetch.core.compiled import CompiledExecutor
from prefetch.core.plan import Executor

VARIABLE = "DATAFLOW_EXECUTOR"
"""Environment variable: `compiled` or `numpy`; else the compiled one is taken where there is one."""
_log = logging.getLogger(__name__)


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
