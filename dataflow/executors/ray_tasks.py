"""Tasks of a Ray cluster: Ray finds room for them, and tries again those whose worker or node died."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

from dataflow.executors.errors import EngineError
from dataflow.executors.starting import EngineRequest, cancelling


class RayEngine(Executor):
    """Calls as tasks of Ray, spread over the nodes."""

    def __init__(self, cpus: float) -> None:
        self._task = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD")(_call)
        self._refs = dict[Future[Any], Any]()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it on the cluster; see `Executor`."""
        ref = self._task.remote(function, args, kwargs)
        future: Future[Any] = ref.future()
        self._refs[future] = ref
        future.add_done_callback(lambda done: self._refs.pop(done, None))
        return future

    def cancel(self) -> None:
        """End the calls that run, and those that wait."""
        for ref in list(self._refs.values()):
            ray.cancel(ref, force=True)


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`. Options: the address, and the cpus of a task."""
    request.allow("address", "cpus")
    address = request.options.get("address") or os.environ.get("RAY_ADDRESS", "auto")
    with ExitStack() as opened:
        if not ray.is_initialized():
            opened.callback(ray.shutdown)
            if address not in ("auto", "local"):
                request.reach(address)
            quiet: Any = {"log_to_driver": False, "logging_level": logging.WARNING}
            try:
                if address != "local":
                    ray.init(address, **quiet)
            except ConnectionError as error:
                if address != "auto":
                    raise EngineError(f"the Ray cluster at {address} does not answer: {error}") from error
                address = "local"
            except RuntimeError as error:  # Ray compares its own version and Python's
                raise EngineError(f"the Ray cluster at {address} cannot be used: {error}") from error
            if address == "local":
                ray.init(address, num_cpus=request.workers, include_dashboard=False, **quiet)
        if address == "local":
            request.say("ray: no cluster was found, so one of this machine was started")
        else:
            request.joins(ray.get_runtime_context().gcs_address if address == "auto" else address)
        executor = RayEngine(request.number("cpus", 1.0))
        with cancelling(executor.cancel):
            yield executor
