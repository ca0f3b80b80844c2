"""Worker threads: each takes its own tasks in order, and all put what they finish into one mailbox.

The counterpart of `pool.WorkerPool`, with the same way of waiting. Python cannot end a thread from
outside, so `close` waits for the tasks that run, and only for so long: a thread whose task hangs is left
to itself. It is a daemon, so it does not keep the interpreter from exiting.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from prefetch.engine.pool import PriorityPool, lower_switch_interval, restore_switch_interval
from prefetch.interpreter import frames_of_threads
from prefetch.memory.interrupts import Uninterrupted
from prefetch.memory.lifetimes import Finalizer
from prefetch.work import Task
from prefetch.workers import STOP_S

_log = logging.getLogger("dataflow")

_CLOSED = object()
"""An item that wakes the receiver."""


def _stop(pools: list[PriorityPool], user: object) -> None:
    for pool in pools:
        pool.stop()
    restore_switch_interval(user)


class WorkerThreads:
    """`num_threads` threads with a queue each. Thread-safe, but for one receiver.

    `stop_s`: how long `close` waits for running tasks, together.
    """

    def __init__(self, num_threads: int, name: str, *, stop_s: float = STOP_S) -> None:
        self._stop_s = stop_s
        self._pools: list[PriorityPool] = []
        # Who is interrupted before he has told anybody of us drops us: the threads end all the same.
        self._interval_user = object()
        self._dropped = Finalizer(self, partial(_stop, self._pools, self._interval_user))
        with Uninterrupted():  # nobody would know of a thread that has begun and is not written down
            for number in range(num_threads):
                self._pools.append(PriorityPool(1, f"{name}-{number}"))
        self._finished: SimpleQueue[Any] = SimpleQueue()
        self._closing = threading.Lock()  # guards _closed; held until the threads have ended
        self._closed = False
        lower_switch_interval(self._interval_user)

    def submit(self, thread: int, task: Task) -> None:
        """Let a thread run a task after those that it has. A task must not raise. Ignored once closed."""
        self._pools[thread].submit(0, task)

    def on_all(self, task: Callable[[int], None]) -> None:
        """Let each thread run `task(its number)`, and wait for all."""
        ends = threading.Semaphore(0)

        def run(thread: int) -> None:
            task(thread)
            ends.release()

        for thread in range(len(self._pools)):
            self.submit(thread, lambda thread=thread: run(thread))  # type: ignore[misc]
        for _ in self._pools:
            ends.acquire()

    def put(self, finished: Any) -> None:
        """Tell the receiver of something that is done; called by tasks."""
        self._finished.put(finished)

    def receive(self) -> list[Any]:
        """Return what is done, without waiting."""
        return self._with_rest([])

    def wait(self, timeout_s: float | None) -> list[Any]:
        """Wait for something to be done; [] when nothing was in time, or the threads were closed."""
        try:
            return self._with_rest([self._finished.get(timeout=timeout_s)])
        except Empty:
            return []

    def _with_rest(self, finished: list[Any]) -> list[Any]:
        while not self._finished.empty():  # there is one receiver
            finished.append(self._finished.get())
        return [result for result in finished if result is not _CLOSED]

    def stacks(self) -> str:
        """Return the stack of every thread."""
        frames = frames_of_threads()
        texts = []
        for number, pool in enumerate(self._pools):
            for ident in pool.idents:
                frame = frames.get(ident)
                text = "".join(traceback.format_stack(frame)) if frame else "it has ended, or does not tell"
                texts.append(f"worker thread {number}:\n{text.rstrip()}")
        return "\n".join(texts)

    def close(self) -> None:
        """Drop waiting tasks, wake the receiver, and end the threads after the running ones. Idempotent.

        A thread that does not end in time is reported and left alone.
        """
        _stop(self._pools, self._interval_user)
        self._dropped.detach()
        self._finished.put(_CLOSED)
        with self._closing:
            if self._closed:
                return
            deadline = time.monotonic() + self._stop_s
            ended = [pool.close(max(0.0, deadline - time.monotonic())) for pool in self._pools]
            self._closed = True
        if not all(ended):
            _log.warning(
                "worker threads still work after %g s; they end with what they are doing:\n%s",
                self._stop_s,
                self.stacks(),
            )
