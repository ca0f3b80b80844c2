"""Which threads of a loader there are, and which are left; what runs where something dies."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

_ENDS_IN_S = 10.0


def our_threads(prefix: str | tuple[str, ...] = "dataflow") -> list[threading.Thread]:
    """Those that run now."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def threads_left(
    prefix: str | tuple[str, ...] = "dataflow", *, but: Collection[threading.Thread] = ()
) -> list[str]:
    """Names of the threads that do not end by themselves.

    Those of a loop that was dropped are ended by another thread, so that nothing runs where it was dropped.
    """
    deadline = time.monotonic() + _ENDS_IN_S
    while threads := [thread for thread in our_threads(prefix) if thread not in but]:
        if time.monotonic() > deadline:
            break
        for thread in threads:
            with suppress(RuntimeError):  # it is just being started, though it may have an identity
                thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(thread.name for thread in threads)


def python_calls(action: Callable[[], object]) -> list[str]:
    """The Python functions that run in this thread while a built-in function does."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def compute_until_interrupted() -> None:
    """What training code does behind a loop: it is no wait that a signal may come just before."""
    deadline = time.monotonic() + _ENDS_IN_S
    while time.monotonic() < deadline:
        pass


class Interrupting:
    """Sends SIGINT when the n-th instruction of a function's code is about to run."""

    def __init__(self, code: Any, at: int) -> None:
        self._code, self._left = code, at
        self.struck = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not self._code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.struck:
            self._left -= 1
            if self._left < 0:
                self.struck = True
                os.kill(os.getpid(), signal.SIGINT)
        return self


def interrupted_at_every_instruction(function: Callable[..., Any], action: Callable[[], None]) -> int:
    """Run an action again and again, each time with a Ctrl-C one instruction further into a function."""
    at = 0
    while True:
        strike = Interrupting(function.__code__, at)  # type: ignore[attr-defined]
        sys.settrace(strike)
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if not strike.struck:
            return at
        at += 1
