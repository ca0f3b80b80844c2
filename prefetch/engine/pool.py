"""A fixed set of threads that take the most urgent task first.

Tasks carry a deadline (the number of the batch that waits for them); the smallest runs first, ties in
the order of submission. A task must not raise: what can fail catches its own exceptions, because only
the submitter knows to whom a failure belongs. `close` drops what has not begun and joins the threads.

Threads are marked daemon only so that an interpreter that exits without closing the owner reaches the
owner's `weakref.finalize` (which runs at exit and joins them); Python would otherwise wait for them
before it runs any finaliser. They end before their owner does.

While threads of ours work beside training code, the interpreter is handed over quickly. A thread that comes
back from a call without the interpreter lock waits until its holder has run for a *switch interval*, 5 ms
unless told otherwise. Beside code that computes in Python, every copy or image that a thread finished would
wait that long: with a consumer that burns 20 ms a batch, image batches waited for were 54 % of the time at
5 ms and 3 % at 0.1 ms, at 1.13 times the throughput. A hand-over cost 20 to 40 us on the virtual machine
where it was measured, and only happens when a thread waits. The interval belongs to the whole process: it is
lowered when the first owner of threads starts and set back when the last one ends, unless somebody else has
changed it meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from prefetch.engine.stats import StageStats
from prefetch.memory.interrupts import HiddenThread, Monitor
from prefetch.work import Task

SWITCH_INTERVAL_S = 1e-4

_OURS = tuple(
    os.path.join(Path(__file__).resolve().parents[2], name, "")
    for name in ("dataflow", "prefetch", "sharding")
)


class PriorityPool:
    """`num_threads` threads over one heap of tasks. `submit` and `close` are thread-safe."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        initializer: Task | None = None,
        about: Callable[[FrameType], str] = lambda _: "",
    ) -> None:
        self._ready = Monitor()  # guards _heap and _closed
        self._heap: list[tuple[int, int, Task]] = []
        self._count = itertools.count()
        self._closed = False
        self._accounting = threading.Lock()  # guards the three
        self._busy_s, self._cpu_s, self._num_tasks = 0.0, 0.0, 0
        self._began: dict[int, tuple[float, float]] = {}
        """The begin of tasks that run, by thread: the time and the thread's processor time."""
        self._initializer, self._about = initializer, about
        self._threads = [
            HiddenThread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """A task begins in this thread."""
        with self._accounting:
            self._began[threading.get_ident()] = time.perf_counter(), time.thread_time()

    def account(self) -> None:
        """The task that began in this thread ends; called before others see its end."""
        with self._accounting:
            began_s, cpu_s = self._began.pop(threading.get_ident())
            self._busy_s += time.perf_counter() - began_s
            self._cpu_s += time.thread_time() - cpu_s
            self._num_tasks += 1

    def stats(self) -> StageStats:
        """The work so far, that of running tasks included."""
        with self._accounting:
            now_s = time.perf_counter()
            busy_s = self._busy_s + sum(now_s - began_s for began_s, _ in self._began.values())
            return StageStats(len(self._threads), busy_s, self._num_tasks, len(self._heap), cpu_s=self._cpu_s)

    def submit(self, deadline: int, task: Task) -> None:
        """Run `task` when no task with a smaller deadline waits. Ignored once closed."""
        with self._ready:
            if not self._closed:
                heapq.heappush(self._heap, (deadline, next(self._count), task))
                self._ready.notify()

    def run_next(self) -> None:
        """Run the most urgent task that waits in the calling thread, if there is one."""
        with self._ready:
            task = heapq.heappop(self._heap)[2] if self._heap else None
        if task is not None:
            task()

    @property
    def has_tasks(self) -> bool:
        """Return whether a task waits. Takes no lock."""
        return bool(self._heap)

    @property
    def idents(self) -> list[int]:
        """Return the identities of the threads, as `frames_of_threads` knows them."""
        return [thread.ident for thread in self._threads if thread.ident is not None]

    def contexts(self) -> list[str]:
        """Say where the code of each running task stands: in what it calls, the task itself aside.

        What `about` has to say of the innermost frame comes behind.
        """
        from prefetch.interpreter import frames_of_threads

        frames = frames_of_threads()
        known = [frame for ident in self.idents if (frame := frames.get(ident)) is not None]
        return [context + self._about(frame) for frame in known if (context := context_of(frame))]

    @property
    def runs_here(self) -> bool:
        """Return whether the caller is a task of this pool: a finaliser may run in any thread."""
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


def context_in(stacks: str) -> str:
    """Return as `context_of`, of `faulthandler`'s stacks: the first in which our code calls another's."""
    for stack in re.split(r"^(?:Current thread|Thread) ", stacks, flags=re.MULTILINE):
        called = ""
        for file, line, name in re.findall(r'^ *File "(.*)", line (\d+) in (.*)$', stack, re.MULTILINE):
            if file.startswith(_OURS):
                if called:
                    return called
                break
            called = f"in {name} ({file}, line {line})"
    return ""


def context_of(frame: FrameType | None) -> str:
    """The frame that our own code called, or its innermost; "": the thread waits for a task."""
    called = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        called, frame = frame, frame.f_back
    if frame is not None and frame.f_code is Monitor.wait.__code__:  # ours, too, but not who waits
        frame = frame.f_back
    if frame is None or called is None or frame.f_code is PriorityPool._run.__code__:
        return ""
    return f"in {called.f_code.co_qualname} ({called.f_code.co_filename}, line {called.f_lineno})"


_interval_lock = threading.RLock()  # a finaliser may end an engine here; guards what follows
_interval_users: set[int] = set()
"""Identities: whoever is interrupted may begin or end again."""
_usual_interval_s: float | None = None
"""The interval to set back; None while we have changed nothing."""


def lower_switch_interval(user: object) -> None:
    """One more owner of threads runs. Thread-safe, idempotent."""
    global _usual_interval_s
    with _interval_lock:
        if not _interval_users and sys.getswitchinterval() > SWITCH_INTERVAL_S:
            _usual_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        _interval_users.add(id(user))


def restore_switch_interval(user: object) -> None:
    """One owner of threads less; the last one sets the interval back. Thread-safe, idempotent."""
    global _usual_interval_s
    with _interval_lock:
        _interval_users.discard(id(user))
        if not _interval_users and _usual_interval_s is not None:
            if abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-9:
                sys.setswitchinterval(_usual_interval_s)
            _usual_interval_s = None


# A child is forked between two changes, never while a thread that it lacks holds the lock.
os.register_at_fork(
    before=_interval_lock.acquire,
    after_in_parent=_interval_lock.release,
    after_in_child=_interval_lock.release,
)
