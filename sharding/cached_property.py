"""`functools.cached_property` of Python 3.12 and later, for 3.11 too: no lock while a value is computed.

Until 3.11 the standard one holds a lock for all objects of a class. Threads then wait for each other over
unrelated objects, and a process forked while a thread held it waits for ever.

Only storing a value is one thread's at a time. The first use of an object's `__dict__` makes it of values
that the object holds itself; in Python 3.11 that may begin a garbage collection, which may let another thread
run (`gc.callbacks`, a finaliser). If that one used the `__dict__` of the same object, there would be two of
the same values, each of which frees them: a crash at some later time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)
_storing = threading.RLock()
"""Taken again by what a garbage collection runs in the thread that holds it."""


def _in_child() -> None:
    """The thread that held it may not be there."""
    global _storing
    _storing = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


class cached_property(Generic[T_co]):  # noqa: N801 - used as the standard one is
    """A value that is computed when it is first asked for, and kept in the object's `__dict__`.

    Threads that ask at once may each compute it; one of the (equal) values stays.
    """

    def __init__(self, compute: Callable[[Any], T_co]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, holder: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, holder: object, owner: type | None = None) -> T_co: ...

    def __get__(self, holder: object | None, owner: type | None = None) -> Self | T_co:
        if holder is None:
            return self
        value = self._compute(holder)
        with _storing:
            holder.__dict__[self._name] = value
        return value
