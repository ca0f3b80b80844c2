"""Let Ctrl-C wait until a block is done that must not be left in the middle.

A KeyboardInterrupt may be raised between any two instructions of the main thread: after a thread or a process
was started and before anybody has written down that it was.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class Uninterrupted:
    """A block that the first Ctrl-C does not break: it is raised behind it. A second one is raised at once.

    For short blocks. Outside the main thread, where nothing is raised, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._signal: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._remember)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._signal:
                self._handler(*self._signal)

    def _remember(self, *arguments: Any) -> None:
        if self._signal:
            self._handler(*arguments)
        self._signal = arguments
