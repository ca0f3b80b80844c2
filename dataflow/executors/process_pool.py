"""Processes of this machine: one for each task at a time, from our own server (`prefetch.workers.starting`).

A script needs no guard against being run again: calls bring along what they need of the main module
(cloudpickle), and no process imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import cloudpickle

from dataflow.executors.starting import EngineRequest
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


class ProcessEngine(Executor):
    """Calls in processes. One that dies takes only its own call along, and is replaced."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._context = _Context()
        self.pools = set[ProcessPoolExecutor]()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in a process that is free, or in the next that is; see `Executor`."""
        future: Future[Any] = Future()
        self._calls.put((future, cloudpickle.dumps(partial(function, *args, **kwargs))))
        return future

    def serve(self) -> None:
        """Have calls done until `end`, one at a time; in a thread for each process."""
        while True:
            # One process each: an executor of several fails all calls when one of them dies.
            with ProcessPoolExecutor(1, self._context) as pool:
                self.pools.add(pool)
                if self._serve(pool):
                    return

    def _serve(self, pool: ProcessPoolExecutor) -> bool:
        """Return whether calls have ended, and not the process."""
        for future, call in iter(self._calls.get, None):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(pool.submit(_called, call).result())
                except BaseException as error:
                    future.set_exception(error)
                    if isinstance(error, BrokenExecutor):
                        self.pools.discard(pool)
                        return False
        return True

    def end(self, workers: int, *, kill: bool) -> None:
        """Take no more calls in so many threads, and wait for none of those that run if `kill`."""
        if kill:
            with suppress(Empty):
                while True:
                    self._calls.get_nowait()[0].cancel()
        for _ in range(workers):
            self._calls.put(None)
        for pool in list(self.pools) if kill else ():
            for process in list((pool._processes or {}).values()):
                process.kill()


def _called(call: bytes) -> Any:
    return cloudpickle.loads(call)()


def warm_up(modules: set[str]) -> None:
    """Start what processes come from, with modules that calls need, without waiting for it."""
    starting.warm_up({*modules, __name__})


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`."""
    request.allow()
    count = request.workers or len(os.sched_getaffinity(0))
    calls, ends_well = ProcessEngine(), False
    with ThreadPoolExecutor(count, thread_name_prefix="dataflow-engine") as threads:
        try:
            for _ in range(count):
                threads.submit(calls.serve)
            yield calls
            ends_well = True
        finally:
            calls.end(count, kill=not ends_well)
