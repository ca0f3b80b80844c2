"""Processes of this machine: one for each task at a time, from our own server (`prefetch.workers.starting`).

A script needs no guard against being run again: calls bring along what they need of the main module
(cloudpickle), and no process imports it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle

from dataflow.engines.starting import EngineRequest, cancelling
from prefetch.workers import starting
from prefetch.workers.signals import end_with_parent


class _Context(starting.ByValueContext):
    """The way a `ProcessPoolExecutor` starts processes."""

    @staticmethod
    def Process(*, target: Callable[..., object], args: tuple[Any, ...]) -> Any:  # type: ignore[override]  # noqa: N802
        """Make a process that does this; it ends when the one that started it has ended."""
        return starting.ServerProcess(target=_run, args=(target, args), name="dataflow-engine")


def _run(target: Callable[..., object], args: tuple[Any, ...]) -> None:
    starting.release_server()
    end_with_parent(os.getppid())
    target(*args)


class ProcessEngine(ThreadPoolExecutor):
    """Calls in processes, each waited for by a thread that has one."""

    def __init__(self, count: int) -> None:
        super().__init__(count, thread_name_prefix="dataflow-engine")
        self._context, self._of_thread = _Context(), threading.local()
        self._pools, self._ends = set[ProcessPoolExecutor](), ExitStack()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in a process that is free, or in the next that is; see `Executor`."""
        return super().submit(self._call, cloudpickle.dumps((function, args, kwargs)))

    def _call(self, call: bytes) -> Any:
        """Do it in this thread's process: one that dies takes only its own call along, and is replaced."""
        pool = getattr(self._of_thread, "pool", None)
        if pool is None:
            # One process each: an executor of several fails all calls when one of them dies.
            pool = self._of_thread.pool = self._ends.enter_context(ProcessPoolExecutor(1, self._context))
            self._pools.add(pool)
        try:
            return pool.submit(_called, call).result()
        except BrokenExecutor:
            self._of_thread.pool = None
            self._pools.discard(pool)
            pool.shutdown()
            raise

    def cancel(self) -> None:
        """End the calls that run, and those that wait."""
        self.shutdown(wait=False, cancel_futures=True)
        for pool in list(self._pools):
            for process in list((pool._processes or {}).values()):
                process.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, too, if it waits; see `Executor`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            self._ends.close()


def _called(call: bytes) -> Any:
    function, args, kwargs = cloudpickle.loads(call)
    return function(*args, **kwargs)


def warm_up(modules: set[str], preload: Iterable[str]) -> None:
    """Start what processes come from, without waiting for it.

    Args:
        modules: of the functions that will be called.
        preload: other modules that all calls need.
    """
    starting.warm_up({*modules, *preload, __name__})


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`."""
    request.allow()
    executor = ProcessEngine(request.workers or len(os.sched_getaffinity(0)))
    with executor, cancelling(executor.cancel):
        yield executor
