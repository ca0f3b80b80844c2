"""Worker threads: each takes its own tasks in order, and all put what they finish into one mailbox.

The counterpart of `workers.WorkerPool`, with the same way of waiting. Python cannot end a thread from
outside, so `close` waits for the tasks that run, and only for so long: a thread whose task hangs is left
to itself. It is a daemon, so it does not keep the interpreter from exiting.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from prefetch import switching
from prefetch.pool import PriorityPool, Task

_log = logging.getLogger("dataflow")

_STOP_S = 5.0
"""Time that running tasks have to end, together."""


class WorkerThreads:
    """`num_threads` threads with a queue each. Thread-safe, but for one receiver."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pools = [PriorityPool(1, f"{name}-{number}") for number in range(num_threads)]
        self._arrived = threading.Condition()  # guards _finished
        self._finished: list[Any] = []
        self._closing = threading.Lock()  # guards _closed
        self._closed = False
        switching.begin()

    def submit(self, thread: int, task: Task) -> None:
        """Let a thread run a task after those that it has. A task must not raise. Ignored once closed."""
        self._pools[thread].submit(0, task)

    def on_all(self, task: Callable[[int], None]) -> None:
        """Let each thread run `task(its number)`, and wait for all."""
        done = threading.Semaphore(0)

        def run(thread: int) -> None:
            task(thread)
            done.release()

        for thread in range(len(self._pools)):
            self.submit(thread, lambda thread=thread: run(thread))  # type: ignore[misc]
        for _ in self._pools:
            done.acquire()

    def put(self, finished: Any) -> None:
        """Tell the receiver of something that is done; called by tasks."""
        with self._arrived:
            self._finished.append(finished)
            self._arrived.notify()

    def receive(self) -> list[Any]:
        """What is done, without waiting."""
        if not self._finished:
            return []
        with self._arrived:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_s: float | None) -> list[Any]:
        """Wait for something to be done; [] when nothing was in time."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._finished, timeout_s)
            finished, self._finished = self._finished, []
        return finished

    def stacks(self) -> str:
        """What every thread is doing now."""
        frames = sys._current_frames()
        texts = []
        for number, pool in enumerate(self._pools):
            for ident in pool.idents:
                frame = frames.get(ident)
                said = "".join(traceback.format_stack(frame)) if frame else "it has ended"
                texts.append(f"worker thread {number}:\n{said.rstrip()}")
        return "\n".join(texts)

    def close(self) -> None:
        """Drop waiting tasks and end the threads after the running ones. Idempotent.

        A thread that does not end in time is reported and left alone.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        switching.end()
        for pool in self._pools:
            pool.stop()
        deadline = time.monotonic() + _STOP_S
        ended = [pool.close(max(0.0, deadline - time.monotonic())) for pool in self._pools]
        if not all(ended):
            _log.warning(
                "worker threads still work after %d s; they end with what they are doing:\n%s",
                _STOP_S,
                self.stacks(),
            )
