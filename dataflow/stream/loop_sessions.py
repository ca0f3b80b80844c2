"""The sessions that serve the loops over one loader.

Any number of loops may run at a time. Each has a session of its own, and all share the memory limit equally.
A session that holds more than its share when another loop begins is closed, and its loop goes on with a new
one from where it stands: what it holds is for batches that may be waited for only after the other loop's.
When the newest loop has all its batches, its session stays, as it reads the next epoch already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dataflow.stats import NO_SESSION, SessionStats
from dataflow.stream.loops import EpochLoop
from dataflow.stream.session import Session
from prefetch.memory.interrupts import Uninterrupted


class LoopSessions:
    """The sessions of one loader. Thread-safe.

    It does not refer to the loader, so that the end of the loader may end them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows; sessions are made under it, and closed outside
        self._past = NO_SESSION
        """Sums over the sessions that have ended: however many there were, one record is kept."""
        self._memory_limit = 0
        self._loops: list[EpochLoop] = []
        """The loops that run, in the order in which they began."""
        self._idle = EpochLoop(-1)
        """No loop, but where the session of the newest one waits until the next begins."""
        self._closing: list[Session] = []

    def __getstate__(self) -> SessionStats:
        """A copy has no sessions yet."""
        return self._past

    def __setstate__(self, past: SessionStats) -> None:
        self.__init__()  # type: ignore[misc]
        self._past = past

    def stats(self) -> SessionStats:
        """Sums over all sessions, and what the running (or last) one does: of several the newest."""
        with self._lock:
            total, sessions = self._past, self.open
        for session in sessions:
            total = session.stats().with_past(total)
        return total

    @property
    def open(self) -> list[Session]:
        """All that are not closed."""
        with self._lock:
            holders = (*self._loops, self._idle)
            return [*self._closing, *(loop.session for loop in holders if loop.session is not None)]

    @property
    def num_loops(self) -> int:
        """Loops that share the memory limit now."""
        return len(self._loops)

    def serve(self, loop: EpochLoop, memory_limit: int, make: Callable[[int], Session]) -> Session:
        """Begin to serve a loop from its plan's start on.

        Args:
            loop: one that has no session.
            memory_limit: bytes for all sessions together.
            make: a session that begins there, with a memory limit of its own.
        """
        with self._lock:
            self._memory_limit = memory_limit
            if loop not in self._loops:  # else its session was closed for holding too much
                self._loops.append(loop)
                loop.session, self._idle.session = self._idle.session, None
            plan = loop.plan
            assert plan is not None
            if loop.session is not None and not loop.session.is_at(plan.order.epoch, plan.start):
                self._end(loop)
            self._share_out()
        self._finish_closing()
        with Uninterrupted(), self._lock:
            if loop.session is None and not loop.closed:
                loop.session = make(self._share)
        if loop.session is None:
            raise RuntimeError("the loader was closed while a loop began")
        return loop.session

    def keep(self, loop: EpochLoop) -> None:
        """A loop has all its batches: its session serves the next one."""
        with self._lock:
            if loop not in self._loops:
                return
            self._end(self._idle)
            self._loops.remove(loop)
            self._idle.session, loop.session = loop.session, None
        self._finish_closing()
        self._forget(loop)

    def release(self, loop: EpochLoop, *, join: bool = True) -> None:
        """A loop is over: end its session. `join=False` does not wait for its threads. Idempotent."""
        with self._lock:
            if loop in self._loops:
                self._loops.remove(loop)
            session = loop.session
            if join:
                self._end(loop)
            loop.session = None
        if session is not None and not join:
            session.close(join=False)
            with self._lock:
                self._past = session.stats().with_past(self._past)
        self._finish_closing()
        self._forget(loop)

    def drop(self, loop: EpochLoop) -> None:
        """End the session of a loop that goes on with another plan."""
        with self._lock:
            self._end(loop)
        self._finish_closing()

    def drop_idle(self, epoch: int) -> None:
        """Close the session that waits for the next loop, unless it stands at the begin of this epoch."""
        with self._lock:
            if self._idle.session is not None and not self._idle.session.is_at(epoch, 0):
                self._end(self._idle)
        self._finish_closing()

    def close(self) -> None:
        """End all sessions and the loops that they serve. Idempotent."""
        with self._lock:
            loops, self._loops = self._loops, []
            for loop in loops:
                loop.closed = True
                self._end(loop)
            self._end(self._idle)
        self._finish_closing()
        for loop in loops:
            self._forget(loop)

    def _forget(self, loop: EpochLoop) -> None:
        """A loop has no session any more, and the others share what that had."""
        if loop.finalizer is not None:
            loop.finalizer.detach()
        with self._lock:
            self._share_out()

    def _end(self, loop: EpochLoop) -> None:
        """Have the session of a loop closed, if it has one. Under the lock."""
        if loop.session is not None:
            self._closing.append(loop.session)
            loop.session = None

    @property
    def _share(self) -> int:
        """Bytes that each session may hold."""
        return self._memory_limit // max(1, len(self._loops) + (self._idle.session is not None))

    def _share_out(self) -> None:
        """Tell the sessions their share; what holds more is to be closed. Under the lock."""
        share = self._share
        for loop in (*self._loops, self._idle):
            if loop.session is not None and not loop.session.resize(share):
                self._end(loop)

    def _finish_closing(self) -> None:
        """Close what is to be closed, or wait until another thread has done it."""
        while True:
            with self._lock:
                if not self._closing:
                    return
                session = self._closing[0]
            session.close()
            with self._lock:
                if session in self._closing:
                    self._closing.remove(session)
                    self._past = session.stats().with_past(self._past)
