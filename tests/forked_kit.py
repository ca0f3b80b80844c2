"""A child process that stops where a test wants it, to be killed there."""

from __future__ import annotations

import os
import signal
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
