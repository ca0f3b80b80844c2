"""Run tasks when objects die, and close in forked children what they must not keep alive.

What runs where an object dies (`__del__`, the end of a generator, the callback of a weak reference) runs in
the middle of whatever the thread does there, and its exceptions are printed and dropped. In the main thread
one of these may be the KeyboardInterrupt of a Ctrl-C: then the loop goes on as if nobody had pressed it. It
is raised between instructions of Python code only. So no Python code runs there: the callback is a method of
the reference itself that starts a thread, and everything up to that thread is C. Where the code behind counts
on what was done (workers that have ended), it is done in place, and a Ctrl-C meanwhile is sent again.

A child made by `os.fork` shares every open descriptor, so a lock or a socket would outlive the process that
it stands for: those that tell others by their closing that this process is gone are closed in children
(`only_ours`). Children made by starting a program do not inherit them in the first place.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from operator import methodcaller
from typing import Any, Protocol, TypeVar

from prefetch.memory.interrupts import HiddenThread
from prefetch.weak_registry import WeakRegistry
from prefetch.work import Task


class WeakCallback(weakref.ref[Any]):
    """A weak reference that makes a call when its object has died; none before `call` is set.

    `call` must be written in C. The reference must be kept by somebody else than its object.
    """

    __slots__ = ("call",)
    call: Callable[[], object]

    def __new__(cls, owner: Any) -> WeakCallback:
        """Make a reference to `owner`."""
        callback = super().__new__(cls, owner, methodcaller("call"))
        callback.call = bool
        return callback


class Finalizer:
    """Runs a task once its owner has died, and at the program's end at the latest.

    The task runs in a thread of its own, at the end in the main thread, and must not refer to the owner. It
    may run twice: at the end another thread may be at it.
    """

    def __init__(self, owner: object, task: Task) -> None:
        self._task = task
        # That registry keeps the callback, too: one that went in a cycle with its owner would tell nobody.
        self._at_exit = util.Finalize(None, self._run, exitpriority=10)
        self._callback: WeakCallback | None = WeakCallback(owner)
        self._callback.call = partial(start_new_thread, self.fire, ())
        only_ours(self)

    def fire(self) -> None:
        """Run the task now, without waiting for it."""
        # A thread that `threading` does not know would be given a name there for ever by the task's locks.
        HiddenThread(target=self._run, name="dataflow-close", daemon=True).start()

    def detach(self) -> None:
        """Do not run the task. Idempotent."""
        self._callback = None
        self._at_exit.cancel()

    close = detach
    """In a forked child, which must not finalise what is its parent's."""

    def _run(self) -> None:
        self._task()
        self.detach()


class InlineFinalizer(util.Finalize):
    """Runs a task where its owner dies, before the code there goes on; when it is called; or at exit.

    A Ctrl-C that strikes in the task when the owner dies is raised in the code that goes on.
    """

    def __init__(self, owner: object, task: Task) -> None:
        super().__init__(owner, task, exitpriority=10)
        # One that came just before is raised where the next Python code begins; nothing can catch it there:
        # the newer of two references is called first, and the other one sees that it got nowhere.
        self._began = False
        self._first: weakref.ref[Any] | None = weakref.ref(owner, self._begin)

    def _begin(self, _: object) -> None:
        self._began = True

    def __call__(self, wr: object = None, *arguments: Any, **keywords: Any) -> Any:
        """Run the task, unless it has run. `wr`: the reference to an owner that has died."""
        interrupted = wr is not None and self._first is not None and not self._began
        self._first = None  # what has run leaves nothing to run where the owner dies
        try:
            return super().__call__(wr, *arguments, **keywords)
        except KeyboardInterrupt:
            if wr is None:
                raise
            interrupted = True
        finally:
            if interrupted:
                # A thread gets its turn when this one has worked for a while: by then it is behind the task.
                # A signal, unlike `interrupt_main`, mostly wakes a thread that waits for a lock.
                start_new_thread(signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGINT))


class Closable(Protocol):
    """An owner of an open descriptor."""

    def close(self) -> None:
        """Close this process's copy; others' copies stay as they are."""
        ...


_opening = threading.RLock()  # held over a fork: what is opened meanwhile would be nobody's there
_private = set[int]()


def open_private(opened: Callable[[], int]) -> int:
    """Open a descriptor that no forked child keeps: that of a lock, or of a connection."""
    with _opening:
        descriptor = opened()
        _private.add(descriptor)
        return descriptor


def close_private(descriptor: int) -> None:
    """Close such a descriptor."""
    with _opening:
        forget_private(descriptor)
        os.close(descriptor)


def forget_private(descriptor: int) -> None:
    """Somebody else closes it."""
    _private.discard(descriptor)


C = TypeVar("C", bound=Closable)
_ours: WeakRegistry[Closable] = WeakRegistry()


def only_ours(owner: C) -> C:
    """Close it in every child that this process forks from now on. Gives it back."""
    _ours.add(owner)
    return owner


def _in_child() -> None:
    _opening.release()
    for owner in _ours:
        owner.close()
    if _private:  # others take their places: objects here still know, and may close, their numbers
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in _private:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_in_child)
