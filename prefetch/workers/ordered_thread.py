"""One thread that runs tasks in the order in which they were submitted.

For work whose order is its contract: collectives, which all ranks must start in the same order, and which
may block the thread that runs them. Every submitted task runs; `close` waits for them, but only so long.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from prefetch.interpreter import frames_of_threads

_CLOSE_S = 60.0


class OrderedThread:
    """The thread; it starts with the first task. One caller at a time."""

    def __init__(self, name: str, *, close_s: float = _CLOSE_S) -> None:
        self._name, self._close_s = name, close_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[object] | None = None

    def submit(self, task: Callable[[], object]) -> Future[object]:
        """Run a task after those submitted before it. `RuntimeError` once closed."""
        self._last = self._executor.submit(task)
        return self._last

    def close(self) -> None:
        """Let all submitted tasks end, then the thread. May be called twice.

        Raises:
            TimeoutError: they did not end in time; a note shows where the thread stands.
        """
        self._executor.shutdown(wait=False)
        if self._last is not None and wait([self._last], self._close_s).not_done:
            error = TimeoutError(f"the tasks of thread {self._name!r} did not end within {self._close_s:g} s")
            error.add_note(self._stack())
            raise error
        self._executor.shutdown(wait=True)

    def _stack(self) -> str:
        frames = frames_of_threads()
        ours = [t.ident for t in threading.enumerate() if t.name.startswith(self._name)]
        return "".join("".join(traceback.format_stack(frames[i])) for i in ours if i in frames)
