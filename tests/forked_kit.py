"""Forked children: one that stops where a test wants it, to be killed there; one that answers and ends."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Child:
    """A forked process; `reached` waits until it called `stop`."""

    def __init__(self, pid: int, ready: int) -> None:
        self.pid, self._ready = pid, ready

    def reached(self) -> None:
        assert os.read(self._ready, 1) == b"!", "the child ended before it stopped"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0


@contextmanager
def forked(work: Callable[[Callable[[], None]], object]) -> Iterator[Child]:
    """Run `work(stop)` in a fork of this process; `stop()` does not return. It is killed at the end."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)

        def stop() -> None:
            os.write(told, b"!")
            signal.pause()

        with suppress(BaseException):
            work(stop)
        os._exit(1)
    os.close(told)
    child = Child(pid, ready)
    try:
        yield child
    finally:
        os.close(ready)
        if child.pid:
            child.kill()


def exit_code_in_child(work: Callable[[], None]) -> int:
    """0 if `work` returns in a fork of this process, 1 if it raises, -14 if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads and fork
        pid = os.fork()
    if not pid:
        signal.alarm(60)
        code = 1
        with suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
