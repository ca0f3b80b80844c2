"""Processes of this machine: one for each task at a time, from the fork server that builders come from, too.

A script needs no guard against being run again: calls bring along what they need of the main module
(cloudpickle), and no process imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import context
from queue import Empty, SimpleQueue
from typing import Any

import cloudpickle

from dataflow.engines.starting import EngineRequest
from prefetch.ipc.server import server_needs
from prefetch.workers import fork_server
from prefetch.workers.fork_server import Server, ServerProcess


def _context_of(server: Server) -> Any:
    """The way a `ProcessPoolExecutor` starts processes: from our server, without the main module."""
    made: Any = context.ForkServerContext()
    made.Process = lambda *, target, args: ServerProcess(server, _run, (target, args), "dataflow-engine")
    return made


def _run(task: tuple[Callable[..., object], tuple[Any, ...]]) -> None:
    """In a new process: it ends when the one that started it has ended, however that was."""
    fork_server.release_server()
    fork_server.end_with_parent()
    target, args = task
    target(*args)


class ProcessEngine(Executor):
    """Calls in processes. One that dies takes only its own call along, and is replaced."""

    def __init__(self, server: Server) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._context = _context_of(server)
        self.pools = set[ProcessPoolExecutor]()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in a process that is free, or in the next that is; see `Executor`."""
        future: Future[Any] = Future()
        self._calls.put((future, cloudpickle.dumps((function, args, kwargs))))
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
            for one in list((pool._processes or {}).values()):
                one.kill()


def _called(call: bytes) -> Any:
    function, args, kwargs = cloudpickle.loads(call)
    return function(*args, **kwargs)


def warm_up(modules: set[str], preload: Iterable[str]) -> None:
    """Start what processes come from, if this process can be forked: while it has one thread.

    Args:
        modules: of the functions that will be called.
        preload: other modules that all calls need.
    """
    fork_server.warm_up(server_needs(modules, __name__, preload=tuple(preload)), is_needed=False)


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`."""
    request.allow()
    count = request.workers or len(os.sched_getaffinity(0))
    server, ends_well = fork_server.begin_to_use(server_needs(set(), __name__, preload=())), False
    calls = ProcessEngine(server)
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="dataflow-engine") as threads:
            try:
                for _ in range(count):
                    threads.submit(calls.serve)
                yield calls
                ends_well = True
            finally:
                calls.end(count, kill=not ends_well)
    finally:
        fork_server.stop_using(server)
