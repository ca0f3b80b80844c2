"""Guards of mapped files: while we hold one, nobody cuts the file or opens it for writing.

A load from a mapped page behind the end of a truncated file is SIGBUS, which ends the process. Linux has a
means against it, `fcntl(F_SETLEASE)`: who wants to truncate a leased file or open it for writing is made to
wait until the holder lets go, `/proc/sys/fs/lease-break-time` seconds (45) at most. Renaming and deleting do
not wait: they harm no mapping. A guard is such a lease. So mapped pages of a guarded file may be loaded from
directly, which spares the kernel's copy; of others only the kernel may copy (`prefetch.core`).

One thread waits for the signal that the kernel sends to it alone when somebody else waits: SIGSTKFLT, blocked
in that thread, so that no handler of the program ever sees it. It lets the lease go as soon as the loads that
may touch the file have ended: milliseconds. From then on the file is copied from by the kernel.

A child made by `os.fork` shares the open file, and with it the lease: it must not end what its parent holds.
It closes its descriptors at once and has no leases.

Granted are leases on local filesystems to the owner of the file (or with CAP_LEASE), while nobody has it
open for writing. Everywhere else there is none, and nothing is lost but time. Thread-safe.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from prefetch.memory.interrupts import HiddenThread
from prefetch.memory.lifetimes import only_ours

_F_SETOWN_EX: Final = 15
_F_OWNER_TID: Final = 0
_MOST: Final = 4096
_SIGNAL: Final = getattr(signal, "SIGSTKFLT", signal.SIGURG)
"""Used by nobody, and not ignored by default: where a handler is set to ignore a signal, also by restoring it
as Lightning does with all, the kernel forgets those that wait to be heard. Real-time signals may turn into
SIGIO, which others use."""


class FileGuard:
    """One file's. `held` turns False for ever when it must be given up."""

    __slots__ = ("__weakref__", "_guards", "descriptor", "held", "holder")

    def __init__(self, guards: FileGuards, descriptor: int, holder: object) -> None:
        self._guards, self.held = guards, True
        self.descriptor = descriptor
        """The descriptor of the open file; -1 once the guard has ended."""
        self.holder = weakref.ref(holder)
        """The object that loads from the file; when it has died, the guard is of no use."""

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody waits for its end."""
        return fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def let_go(self) -> None:
        """End the guard. Idempotent."""
        self._guards.let_go(self)

    def end(self) -> None:
        """Tell the kernel, in all processes that share the open file: closing alone leaves a child's copy."""
        with suppress(OSError):  # the kernel has ended it itself
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        self.close()

    def close(self) -> None:
        """Close this process's copy, in a forked child. Its parent's guard stays."""
        self.held = False
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class FileGuards:
    """The guards of one loader, with the thread that lets them go. `close` ends both."""

    def __init__(self) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = min(_MOST, soft // 4) if soft > 0 else _MOST
        """The number of guards at a time, at most."""
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards what follows
        self._held: set[FileGuard] = set()
        self._loading: set[object] = set()
        self._given_up: list[tuple[FileGuard, set[object]]] = []
        """Leases that end when the loads that may touch their files have ended."""
        self.generation = np.zeros(1, np.int64)
        """A new one begins when a guard is given up: loads outside `loading` are for the one they are of."""
        self.drain_loads: Callable[[], None] | None = None
        """Waits until such loads of the generations before have ended; they take milliseconds."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, descriptor: int, holder: object) -> FileGuard | None:
        """A guard on an open file (a duplicate of the descriptor is kept), or None where there is none.

        `holder` is what will load from it. A guard may last longer, until there are too many or `close`.
        """
        if not self._is_ours:
            return None
        with self._lock:
            if len(self._held) >= self.most:
                for unused in [guard for guard in self._held if guard.holder() is None]:
                    self.let_go(unused)
            if self._closed or len(self._held) >= self.most:
                return None
            owner = self._listener()
            duplicate = os.dup(descriptor)
            try:
                fcntl.fcntl(duplicate, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, owner))
                fcntl.fcntl(duplicate, fcntl.F_SETSIG, _SIGNAL)
                fcntl.fcntl(duplicate, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError:
                os.close(duplicate)
                return None
            guard = only_ours(FileGuard(self, duplicate, holder))
            self._held.add(guard)
            return guard

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, files whose guard is `held` when it is looked at keep their length."""
        if not self._is_ours:
            yield
            return
        token = object()
        with self._lock:
            self._loading.add(token)
        try:
            yield
        finally:
            with self._lock:
                self._loading.discard(token)
                if self._given_up:
                    self._end_unused(token)

    def let_go(self, guard: FileGuard) -> None:
        """End a guard as soon as no load may touch its file."""
        if not self._is_ours:
            return
        with self._lock:
            if guard not in self._held:
                return
            self._held.discard(guard)
            guard.held = False
            self.generation += 1
            if self.drain_loads is not None and guard.holder() is not None:
                self.drain_loads()
            self._given_up.append((guard, set(self._loading)))
            self._end_unused(None)

    def _end_unused(self, token: object) -> None:
        left = []
        for guard, loads in self._given_up:
            loads.discard(token)
            if loads:
                left.append((guard, loads))
            else:
                guard.end()
        self._given_up = left

    @property
    def _is_ours(self) -> bool:
        """Return whether this is no forked child, where a missing thread may hold the lock for ever."""
        return self._pid == os.getpid()

    def _listener(self) -> int:
        """The thread that waits for the kernel's word; its number."""
        if self._thread is None:
            # A daemon only for programs that exit without closing their loader.
            self._thread = HiddenThread(target=self._listen, name="dataflow-guards", daemon=True)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})  # the thread inherits it
                self._thread.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        number = self._thread.native_id
        assert number is not None
        return number

    def _listen(self) -> None:
        while True:
            signal.sigwait({_SIGNAL})
            with self._lock:
                if self._closed:
                    return
                for guard in [guard for guard in self._held if guard.is_wanted]:
                    self.let_go(guard)

    def close(self, *, join: bool = True) -> None:
        """End all guards and the thread, which a finaliser must not wait for (`join=False`). Idempotent."""
        if not self._is_ours:
            return
        with self._lock:
            self._closed = True
            for guard in list(self._held):
                self.let_go(guard)
            thread, self._thread = self._thread, None
            if thread is not None and thread.is_alive() and thread.ident is not None:
                signal.pthread_kill(thread.ident, _SIGNAL)  # it cannot end before the lock is given up
        if thread is not None and join:
            thread.join()
