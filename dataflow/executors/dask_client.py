"""Tasks of a Dask cluster, whose scheduler gives those of a worker that died to others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager

import dask
from distributed import Client, LocalCluster

from dataflow.executors.errors import EngineError
from dataflow.executors.starting import EngineRequest


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`. Options: the address of the scheduler; without one, workers start on this machine."""
    request.allow("address")
    address = request.options.get("address") or dask.config.get("scheduler-address", None)
    with ExitStack() as opened:
        if address:
            request.reach(address)
            request.joins(address)
        else:
            workers = request.workers or len(os.sched_getaffinity(0))
            address = opened.enter_context(
                LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
            )
            request.say(f"dask: no address was given, so {workers} workers of this machine were started")
        try:
            client = opened.enter_context(Client(address, timeout=request.timeout_s, set_as_default=False))
            client.wait_for_workers(1, timeout=request.timeout_s)
        except (OSError, TimeoutError) as error:
            raise EngineError(
                f"the Dask scheduler at {address} has no worker, or does not answer ({error}): start some by "
                f"dask worker {address}"
            ) from error
        yield client.get_executor()
