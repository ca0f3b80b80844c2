"""A lock and the wait for a change of what it guards, left in order by a Ctrl-C at any moment.

`with` over a `threading.Condition` runs Python code to take the lock: a KeyboardInterrupt that is raised
between the taking and the block leaves it taken for ever, and all threads that need it hang. A lock whose
methods are C is taken and entered in one instruction (up to Python 3.13). The standard wait has such a place,
too, between giving the lock up and the block that takes it again.
"""

from __future__ import annotations

import threading
from _thread import RLock, allocate_lock
from collections import deque
from typing import TYPE_CHECKING


class Monitor(RLock):  # type: ignore[misc]  # typeshed calls it final; CPython does not
    """A re-entrant lock; `wait`, `notify` and `notify_all` as of `threading.Condition`."""

    if TYPE_CHECKING:  # what typeshed does not tell of

        def _release_save(self) -> tuple[int, int]: ...
        def _acquire_restore(self, saved: tuple[int, int]) -> None: ...
        def _is_owned(self) -> bool: ...

    def __init__(self) -> None:
        super().__init__()
        self._waiters: deque[threading.Lock] = deque()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Give the lock up until notified; False: nobody did in time."""
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
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
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return notified

    def notify(self) -> None:
        """Wake one of those that wait. Under the lock."""
        while self._waiters:
            try:
                self._waiters[0].release()
            except RuntimeError:  # it was woken, and a Ctrl-C came before it was taken out
                self._waiters.popleft()
                continue
            self._waiters.popleft()
            return

    def notify_all(self) -> None:
        """Wake all that wait. Under the lock."""
        while self._waiters:
            self.notify()
