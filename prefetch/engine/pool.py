"""A fixed set of threads that take the most urgent task first.

Tasks carry a deadline (the number of the batch that waits for them); the smallest runs first, ties in
the order of submission. A task must not raise: what can fail catches its own exceptions, because only
the submitter knows to whom a failure belongs. `close` drops what has not begun and joins the threads.

Threads are marked daemon only so that an interpreter that exits without closing the owner reaches the
owner's `weakref.finalize` (which runs at exit and joins them); Python would otherwise wait for them
before it runs any finaliser. They never outlive their owner.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from prefetch.memory.monitor import Monitor
from prefetch.work import Task

_OURS = tuple(
    os.path.join(Path(__file__).resolve().parents[2], name, "")
    for name in ("dataflow", "prefetch", "sharding")
)


class PriorityPool:
    """`num_threads` threads over one heap of tasks. `submit` and `close` are thread-safe."""

    def __init__(self, num_threads: int, name: str, *, initializer: Task | None = None) -> None:
        self._ready = Monitor()  # guards _heap and _closed
        self._heap: list[tuple[int, int, Task]] = []
        self._count = itertools.count()
        self._closed = False
        self._initializer = initializer
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        """Threads of the pool."""
        return len(self._threads)

    @property
    def num_queued(self) -> int:
        """Tasks that wait for a thread."""
        return len(self._heap)

    def submit(self, deadline: int, task: Task) -> None:
        """Run `task` when no task with a smaller deadline waits. Ignored once closed."""
        with self._ready:
            if not self._closed:
                heapq.heappush(self._heap, (deadline, next(self._count), task))
                self._ready.notify()

    @property
    def idents(self) -> list[int]:
        """Of the threads, as `sys._current_frames` knows them."""
        return [thread.ident for thread in self._threads if thread.ident is not None]

    def places(self) -> list[str]:
        """Where the code of each running task stands, in words: in what it calls, the task itself aside."""
        frames = sys._current_frames()
        found = (_place(frames.get(ident)) for ident in self.idents)
        return [place for place in found if place]

    @property
    def runs_here(self) -> bool:
        """Whether the caller is a task of this pool: a finaliser may run in any thread."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Drop waiting tasks; the threads end by themselves after the running ones. Idempotent."""
        with self._ready:
            self._closed = True
            self._heap.clear()
            self._ready.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Drop waiting tasks, wait for running ones. Idempotent.

        `timeout_s`: seconds to wait for each thread; False if one still runs.
        """
        self.stop()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:  # a finaliser may run in one of our own threads
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        if self._initializer:
            self._initializer()
        while True:
            with self._ready:
                while not self._heap and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                task = heapq.heappop(self._heap)[2]
            task()
            del task  # a finished task must not keep its buffers alive while the thread waits


def _place(frame: FrameType | None) -> str:
    """The frame that our own code called, or its innermost; "": the thread waits for a task."""
    called = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        called, frame = frame, frame.f_back
    if (
        frame is None
        or called is None
        or (frame.f_code is PriorityPool._run.__code__ and called is not frame)
    ):
        return ""
    return f"in {called.f_code.co_qualname} ({called.f_code.co_filename}, line {called.f_lineno})"
