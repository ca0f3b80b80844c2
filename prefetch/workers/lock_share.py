"""How long a piece of work holds the interpreter lock.

Python does not tell. So a second thread runs beside the work that wants nothing but the lock: it counts. The
time in which it did not run is time in which the work held the lock, however often it gave it up in
between; but not more than the work's own processor time, since who waits for storage holds nothing.
On a machine whose cores are busy with other things, those keep the counter from running, too. So it first
counts while nobody else wants the lock: if it does not get a core then, the result is an upper bound only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_ALONE_S = 0.005
_FREE = 0.9
"""Of the time, a thread runs at least so much on a machine that has a core for it."""


class Counter:
    """Runs in one thread, beside work in another. Used once.

    Without `run`, `locked_s` waits for ever, until `cancel`.
    """

    def __init__(self) -> None:
        self.is_bound = False
        """Other processes were in the way: the work holds the lock for at most as long as was measured."""
        self._wanted, self._running, self._ended = (threading.Event() for _ in range(3))
        self._stop = False
        self._kept_s = 0.0

    def run(self) -> None:
        """When there is work, count alone for a moment, then until it is done."""
        self._wanted.wait()
        if self._stop:
            return
        ran_s, began = time.thread_time(), time.perf_counter()
        while time.perf_counter() - began < _ALONE_S:
            pass
        self.is_bound = time.thread_time() - ran_s < _FREE * (time.perf_counter() - began)
        ran_s, began = time.thread_time(), time.perf_counter()
        self._running.set()
        while not self._stop:
            pass
        passed_s = time.perf_counter() - began
        self._kept_s = max(0.0, passed_s - (time.thread_time() - ran_s))
        self._ended.set()

    def locked_s(self, work: Callable[[], object]) -> float:
        """Do the work, in another thread than `run`; seconds in which it held the lock."""
        self._wanted.set()
        self._running.wait()
        ran_s = time.thread_time()
        try:
            work()
        finally:
            ran_s = time.thread_time() - ran_s
            self._stop = True
        self._ended.wait()
        return min(self._kept_s, ran_s)

    def cancel(self) -> None:
        """Let nobody wait for the other."""
        self._stop = True
        for event in (self._wanted, self._running, self._ended):
            event.set()
