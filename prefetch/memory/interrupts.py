"""Left in order by a Ctrl-C at any moment: a lock with a wait, threads, blocks that must not be cut short.

A KeyboardInterrupt may be raised between any two instructions of the main thread: after a thread or a process
was started and before anybody has written down that it was, or after a lock was taken and before the block
that gives it back was entered.

`with` over a `threading.Condition` runs Python code to take the lock: interrupted between the taking and the
block, it leaves the lock taken for ever, and all threads that need it hang. A lock whose methods are C is
taken and entered in one instruction (up to Python 3.13). The standard wait has such a gap, too, between
giving the lock up and the block that takes it again.
"""

from __future__ import annotations

import signal
import threading
from _thread import RLock, allocate_lock
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


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


class WorkerInterrupts:
    """The handling of a Ctrl-C in a worker process: it is raised once. A second one would strike its end.

    Args:
        are_heard: whether it does anything.
    """

    here: WorkerInterrupts | None = None
    """The interrupts of this process; None: it is no worker."""

    def __init__(self, *, are_heard: bool) -> None:
        self.has_come = False
        WorkerInterrupts.here = self
        signal.signal(signal.SIGINT, self._raise if are_heard else signal.SIG_IGN)

    def _raise(self, *_: object) -> None:
        self.has_come = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt


PROGRAM_ENDS = KeyboardInterrupt, SystemExit
"""The exceptions that end the program: no policy about bad samples may pass over one that a user's function
raises."""


def must_go_on(error: BaseException) -> bool:
    """Return whether a user's function raised a Ctrl-C, or ended a generator, and no error of its own.

    A Ctrl-C is raised in the main thread only, and worker processes know of it. Anything else, such as what a
    library in another language raises where it panics, is an error like any.
    """
    if isinstance(error, KeyboardInterrupt):
        in_main, worker = threading.current_thread() is threading.main_thread(), WorkerInterrupts.here
        return in_main and (worker is None or worker.has_come)
    return isinstance(error, GeneratorExit)


def as_exception(error: BaseException) -> Exception:
    """An error that loops and other processes take for one: itself, or one that it is the cause of."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class HiddenThread(threading.Thread):
    """A thread that `threading` does not list, so that its object dies without running Python code.

    `threading` lists the objects of all threads in a `WeakSet`, for its own tests. Its callback runs where
    the last reference to an ended thread goes, and a Ctrl-C that strikes there is printed and dropped.
    """

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool | None = None) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        getattr(threading, "_dangling", set()).discard(self)


class Monitor(RLock):  # type: ignore[misc]  # typeshed calls it final; CPython does not
    """A re-entrant lock; `wait`, `notify` and `notify_all` as of `threading.Condition`."""

    if TYPE_CHECKING:  # what typeshed does not tell of

        def _release_save(self) -> tuple[int, int]: ...
        def _acquire_restore(self, saved: tuple[int, int]) -> None: ...
        def _is_owned(self) -> bool: ...

    def __init__(self) -> None:
        super().__init__()
        self._waiters: deque[tuple[threading.Lock, list[bool]]] = deque()
        """The lock of each that waits, and whether it was told: one item, once it was."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Give the lock up until notified; False: nobody did in time."""
        waiter = allocate_lock()
        waiter.acquire()
        entry: tuple[threading.Lock, list[bool]] = (waiter, [])
        self._waiters.append(entry)
        saved, notified = None, False
        try:
            saved = self._release_save()
            notified = waiter.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            self._acquire_restore(saved)
        except BaseException:
            if not self._is_owned():
                self._acquire_restore(saved or (1, threading.get_ident()))
            raise
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)
        return notified

    def without(self, work: Callable[[], object]) -> None:
        """Give the lock up while `work` is done."""
        saved = None
        try:
            saved = self._release_save()
            work()
        finally:
            if not self._is_owned():
                self._acquire_restore(saved or (1, threading.get_ident()))

    def notify(self) -> None:
        """Wake one of those that wait. Under the lock."""
        while self._waiters:
            waiter, notices = self._waiters[0]
            was_told = bool(notices)  # and a Ctrl-C came before it was taken out: it may not have been woken
            notices.append(True)
            if waiter.locked():
                waiter.release()
            self._waiters.popleft()
            if not was_told:
                return

    def notify_all(self) -> None:
        """Wake all that wait. Under the lock."""
        while self._waiters:
            self.notify()
