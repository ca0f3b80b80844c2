"""Ranks of an MPI program that mpi4py's runner has started; MPI ends all of them when one dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from importlib import import_module

from dataflow.executors.errors import EngineError
from dataflow.executors.starting import EngineRequest, cancelling

_START = "mpiexec -n 9 python -m mpi4py.futures -m dataflow.tools.cli index ... --on mpi"


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`. It has no options: `mpiexec` says how many ranks there are, and where."""
    request.allow()
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            f"no MPI library was found ({error}): load the cluster's module, or pip install mpich"
        ) from error
    size = MPI.COMM_WORLD.Get_size()
    # Without the runner each rank would run the whole program.
    if size < 2 or getattr(import_module("mpi4py.futures._core"), "SharedPool", None) is None:
        raise EngineError(f"this process is not the first of several that mpi4py started: {_START}")
    request.joins(f"{size - 1} ranks")
    with MPIPoolExecutor() as ranks, cancelling(partial(ranks.shutdown, wait=False, cancel_futures=True)):
        yield ranks
