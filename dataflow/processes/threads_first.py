"""Builders that are threads until processes have started, where those come from a server and take seconds.

No batch waits for a process. When threads have built the first chunk, and there is more to do than they are
at, processes start; chunks go to them from when all are ready. What threads have begun stays with them, and
nothing moves back. An epoch that is over before that was built by threads. They run no function of the
user's: one that looks at what changes would see one thing here, and another there.

Until processes are ready, few chunks are built at a time: the first batch would wait for the other chunks,
and the processes for all that was begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from dataflow.batch.delivered import Delivered
from dataflow.processes.builders import ProcessBuilders
from dataflow.torch_threads import one_torch_thread
from prefetch.engine.builders import Build, Builders, ThreadBuilders
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import StageStats
from prefetch.work import Chunk, PartialChunk

_MOST_BEGUN = 2
"""Chunks that threads are at, until processes are ready."""

OpenProcesses = Callable[[Callable[[BaseException | None], None]], ProcessBuilders]
"""Opens processes; it is given what hears that they are ready for work, or why they are not."""


class ThreadsFirstBuilders(Builders[Delivered]):
    """`Builders` that are threads at first, then processes.

    Args:
        threads: that begin.
        open_processes: see `OpenProcesses`.
        num_processes: that will build.
        reason: why they are better.
    """

    def __init__(
        self,
        threads: ThreadBuilders[Delivered],
        open_processes: OpenProcesses,
        *,
        num_processes: int,
        reason: str,
    ) -> None:
        self._threads, self._open_processes = threads, open_processes
        self.num_builders, self._num_processes, self._reason = threads.num_builders, num_processes, reason
        who = "1 process has" if num_processes == 1 else f"{num_processes} processes have"
        self.choice = "thread", f"until {who} started: {reason}"
        """The builders of what is new, and why."""
        self._lock = threading.RLock()  # guards what follows
        self._is_decided = False
        """True if that stays so."""
        self._num_running = 0
        """Chunks that threads are at, until then."""
        self._waiting: list[Build[Delivered]] = []
        """Builds that nobody is at, until then."""
        self._has_built = False
        """True if threads have built a chunk."""
        self._is_starting = self._are_ready = self._is_stopped = False
        self._processes: ProcessBuilders | None = None
        self._starter = PriorityPool(1, "dataflow-start", initializer=one_torch_thread)
        """Nobody waits while processes are opened."""

    # ---- builds -------------------------------------------------------------------------------------------

    def build(self, build: Build[Delivered]) -> None:
        """See `Builders`."""
        with self._lock:
            self._waiting.append(build)
            self._build_waiting()

    def _build_waiting(self) -> None:
        """Have built what waits, as far as it may be. Under the lock."""
        if self._is_decided:
            waiting, self._waiting = self._waiting, []
            for build in waiting:
                self._builders_of(build).build(build)
            return
        while self._waiting and self._num_running < _MOST_BEGUN:
            build = min(self._waiting, key=lambda build: build.number)
            self._waiting.remove(build)
            self._num_running += 1
            self._threads.build(_WatchedBuild(build, self))
        if self._waiting and self._has_built and not self._is_starting:
            self._is_starting = True
            self._starter.submit(0, self._start)

    def _builders_of(self, build: Build[Delivered]) -> Builders[Delivered]:
        """Return who builds a chunk: a suspended one stays with whom it is."""
        processes = self._processes
        if processes is None or not self._are_ready:
            return self._threads
        return processes if build.progress is None or processes.has(build) else self._threads

    def has_left(self, *, is_built: bool) -> None:
        """Threads are no longer at a chunk; `is_built`: they have built all of it."""
        with self._lock:
            self._num_running -= 1
            self._has_built = self._has_built or is_built
            self._build_waiting()

    # ---- the start of processes ---------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            processes = self._open_processes(
                lambda error: self._starter.submit(0, partial(self._have_started, error))
            )
        except Exception as error:
            self._have_started(error)
            return
        with self._lock:
            self._processes = processes
            if self._is_stopped:
                processes.stop()

    def _have_started(self, error: BaseException | None) -> None:
        """Processes are ready for work, or will not be."""
        if error is None:
            self._decide("process", self._reason)
            return
        self._decide("thread", f"processes could not be started: {error} ({self._reason})")
        if self._processes is not None:
            self._processes.stop()

    def _decide(self, workers: str, reason: str) -> None:
        with self._lock:
            if self._is_decided:
                return
            self.choice, self._is_decided = (workers, reason), True
            if workers == "process":
                self.num_builders, self._are_ready = self._num_processes, True
            self._starter.stop()
            self._build_waiting()

    # ---- as other builders --------------------------------------------------------------------------------

    def contexts(self) -> list[str]:
        """See `Builders`."""
        return [*self._threads.contexts(), *(self._processes.contexts() if self._processes else ())]

    def stats(self) -> StageStats:
        """See `Builders`."""
        stats = self._threads.stats()
        if self._processes is None or not self._are_ready:
            return stats
        return self._processes.stats().with_past(stats)

    @property
    def runs_here(self) -> bool:
        """See `Builders`."""
        here = self._threads.runs_here or self._starter.runs_here
        return here or (self._processes is not None and self._processes.runs_here)

    def stop(self) -> None:
        """See `Builders`."""
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()
            self._starter.stop()
            if self._processes is not None:
                self._processes.stop()
        self._threads.stop()

    def close(self) -> object:
        """See `Builders`."""
        self.stop()
        self._threads.close()
        self._starter.close()
        if self._processes is not None:
            self._processes.close()
        return None


class _WatchedBuild:
    """A build that threads are at, until they leave it."""

    def __init__(self, build: Build[Delivered], owner: ThreadsFirstBuilders) -> None:
        self._build, self._owner = build, owner
        self.chunk: Chunk[Delivered] = build.chunk
        self.number = build.number

    @property
    def progress(self) -> Any:
        """See `Build`."""
        return self._build.progress

    @progress.setter
    def progress(self, progress: Any) -> None:
        self._build.progress = progress

    @property
    def is_cancelled(self) -> bool:
        """See `Build`."""
        return self._build.is_cancelled

    def may_go_on(self) -> bool:
        """See `Build`."""
        if self._build.may_go_on():
            return True
        self._owner.has_left(is_built=False)
        return False

    def add(self, part: PartialChunk[Delivered]) -> None:
        """See `Build`."""
        self._build.add(part)

    def end(self, error: BaseException | None = None) -> None:
        """See `Build`."""
        self._build.end(error)
        self._owner.has_left(is_built=error is None)
