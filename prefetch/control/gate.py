"""Let as many reads of a store run as its in-flight control (`prefetch.control.inflight`) says.

Reader threads are the most that may run; a thread that may not read yet waits here, first come first served,
which is the order of urgency in which the pool gave out the work. Nothing polls: a read that ends wakes them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefetch.control.depth import Decision
from prefetch.control.inflight import Demand, Inflight
from prefetch.errors import ReaderClosedError


class ReadGate:
    """Admits reads of one store. Thread-safe.

    Args:
        control: how many bytes may be in flight; the gate's own.
        refusals: how many requests the store has refused so far, those that were tried again included.
        now: seconds on a clock that only goes forward.
    """

    def __init__(
        self,
        control: Inflight,
        *,
        refusals: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._control, self._refusals, self._now = control, refusals, now
        self._refused = 0
        self._admitting = threading.RLock()  # guards the control and everything below
        self._demand = Demand()
        # Whoever is first is told alone: all others would wake only to see that they are not.
        self._line: deque[threading.Condition] = deque()
        self._closed = False

    @contextmanager
    def read(self, nbytes: int) -> Iterator[None]:
        """A read of that many bytes, when it may begin.

        Raises:
            ReaderClosedError: the gate was closed while the read waited.
        """
        with self._admitting:
            waiter = threading.Condition(self._admitting)
            self._line.append(waiter)
            try:
                while not self._closed:
                    if self._line[0] is waiter and self._control.admits(self._now(), nbytes):
                        break
                    waiter.wait()
            finally:
                self._line.remove(waiter)
                self._call_next()
            if self._closed:
                raise ReaderClosedError("the loader was closed while a read waited to be admitted")
            sent = self._control.sent(self._now(), nbytes)
            if not self._line:
                self._control.drained(self._now())
        try:
            yield
        except BaseException:
            with self._admitting:
                self._control.failed(sent)
                self._call_next()
            raise
        with self._admitting:
            now = self._now()
            self._control.done(now, sent)
            if refused := self._new_refusals():
                self._control.refused(now, refused)
            self._call_next()

    def observe_use(self, nbytes: int, gap_s: float) -> None:
        """The training code took what `nbytes` were read for, after `gap_s` of work on what it had."""
        with self._admitting:
            self._set_demand(self._demand.observe(nbytes, gap_s))

    def raise_priority(self) -> None:
        """The training code waits for reads: what it used so far caps them no more."""
        with self._admitting:
            self._demand.waited()
            self._set_demand(None)

    def _new_refusals(self) -> int:
        """Refusals since it was asked before."""
        with self._admitting:
            before, self._refused = self._refused, self._refusals()
            return self._refused - before

    def _set_demand(self, bytes_per_s: float | None) -> bool:
        """Set what is used; whether that is worth telling."""
        before = self._control.decision.value
        is_news = self._control.demand(bytes_per_s)
        if self._control.decision.value > before:
            self._call_next()
        return is_news

    def _call_next(self) -> None:
        if self._line:
            self._line[0].notify()

    @property
    def decision(self) -> Decision:
        """Bytes that may be in flight now, and why."""
        with self._admitting:
            return self._control.decision

    def close(self) -> None:
        """Refuse the reads that wait and all to come. Those that run end by themselves. Idempotent."""
        with self._admitting:
            self._closed = True
            for waiter in self._line:
                waiter.notify()
