"""Calls of clients that block (synchronous filesystems of fsspec), which whoever waits may give up.

Python cannot interrupt a thread in a call, so each call has a thread of its own, and one that is given up is
abandoned: it goes on until the client returns, writes into no memory of ours, and does not keep the process
from ending. At most `MOST_ABANDONED` may hang in a process at a time. Starting a thread takes 0.1 ms, a call
of such a client more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prefetch.errors import ReaderClosedError
from prefetch.memory.interrupts import HiddenThread

MOST_ABANDONED = 32


class AbandonedCallsError(Exception):
    """No more calls of clients are begun, as too many hang."""

    def __str__(self) -> str:
        return f"{MOST_ABANDONED} calls of storage clients hang in this process; no more are begun"


class BlockingCall:
    """One call, made in a thread of its own. `run` it once.

    Args:
        function: the call; its result is dropped where nobody waits any more.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._lock = threading.Lock()  # guards the two below
        self._has_ended = self._is_abandoned = False
        self._may_go_on = threading.Event()
        self._cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, timeout_s: float | None) -> Any:
        """Run the function, and return its result.

        Raises:
            TimeoutError: it takes longer than `timeout_s`; None: it may take any time.
            ReaderClosedError: `cancel` was called meanwhile.
            AbandonedCallsError: too many others hang.
            What the function raises.
        """
        if len(abandoned) >= MOST_ABANDONED:
            raise AbandonedCallsError
        HiddenThread(target=self._call, name="dataflow-client", daemon=True).start()
        try:
            self._may_go_on.wait(timeout_s)
        finally:  # also where a Ctrl-C ends the wait
            with self._lock:
                self._is_abandoned = not self._has_ended
                if self._is_abandoned:
                    abandoned.add(self)
        if self._is_abandoned:
            if self._cancelled:
                raise ReaderClosedError("the loader was closed while a shard was being read")
            raise TimeoutError(f"the client did not return in {timeout_s:g} s")
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads here
        return self._result

    def cancel(self) -> None:
        """Wait no longer. Any thread."""
        self._cancelled = True
        self._may_go_on.set()

    def _call(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._has_ended = True
            if self._is_abandoned:
                self._result = self._error = None
                abandoned.discard(self)
        self._may_go_on.set()


abandoned: set[BlockingCall] = set()
"""The calls that hang. Each adds and removes itself, in one step with and without the interpreter lock."""
