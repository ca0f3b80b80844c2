"""Builders that begin as threads, and become processes where a trial says that these are better.

The first batches wait for no trial. When threads have been busy for a while, what they are at is finished,
and the next two chunks are built by one thread alone: one is timed, and one has a counter of the interpreter
lock beside it (`dataflow.processes.choice`). They are delivered like any other. If processes are better, they
start while threads build on, and chunks go to them from when all of them are ready. They stay: a transform
that draws from the global generators is never moved to threads, and nothing oscillates.

Until that is known, or processes are there, few chunks are built at a time: if the work holds the interpreter
lock, more of them only share its time, so the first batch would wait for the other chunks, and the trial and
the processes for all that was begun.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.batch.delivered import Delivered
from dataflow.processes.builders import ProcessBuilders
from dataflow.processes.choice import (
    ChoiceMemory,
    LockCounter,
    TrialTimes,
    WorkerChoice,
    content_of,
    crossing_s,
    decide,
    queued_s,
)
from dataflow.processes.generators import Draws
from dataflow.torch_threads import one_torch_thread
from prefetch.engine.builders import Build, Builders, ThreadBuilders
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import StageStats
from prefetch.work import Chunk, Piece, Task

TRIAL_AFTER_S = 0.5
"""Builders have been busy for so long before a trial: what is over sooner needs no processes."""
_LEAST_SHARE = 0.1
"""And for such a share of the time: what is less keeps nobody waiting, wherever it is done."""
_MOST_BEGUN = 2
"""Chunks that threads are at, until it is settled who builds."""

OpenProcesses = Callable[[Callable[[BaseException | None], None]], ProcessBuilders]
"""Opens processes; it is given what hears that they are ready for work, or why they are not."""


class _Stage(Enum):
    """How far the choice is: no trial yet, threads end what they are at, a trial, processes start, made."""

    BEFORE, DRAINING, RUNNING, STARTING, SETTLED = auto(), auto(), auto(), auto(), auto()


class AutoBuilders(Builders[Delivered]):
    """`Builders` that are threads, and processes from when a trial has said so.

    Args:
        threads: that begin.
        open_processes: see `OpenProcesses`.
        functions: the user's; their pickled form tells whether they change.
        num_processes: that there would be.
        num_cores: that this rank may use.
        memory: of the loader.
        charge_bytes: of batches that may be made before they are charged.
    """

    def __init__(
        self,
        threads: ThreadBuilders[Delivered],
        open_processes: OpenProcesses,
        functions: Any,
        *,
        num_processes: int,
        num_cores: int,
        memory: ChoiceMemory,
        charge_bytes: int = 1 << 20,
    ) -> None:
        self._charge_bytes = charge_bytes
        self._threads, self._open_processes, self.functions = threads, open_processes, functions
        self._num_processes, self._num_cores, self._memory = num_processes, num_cores, memory
        self.num_builders = threads.num_builders
        self._lock = threading.RLock()  # guards what follows
        self._stage, self._began_s = _Stage.BEFORE, time.perf_counter()
        self._num_running = 0
        """Builds that threads are at, until it is settled who builds."""
        self._waiting: list[Build[Delivered]] = []
        """Builds that nobody is at, until then."""
        self._pool = PriorityPool(1, "dataflow-trial", initializer=one_torch_thread)
        """For the counter beside a trial, and for the start of processes."""
        self._counter: LockCounter | None = None
        self._times: TrialTimes | None = None
        """Of the first chunk of a trial, but for the time under the lock."""
        self._processes: ProcessBuilders | None = None
        self._are_ready = self._is_stopped = False
        self.choice = memory.choice or WorkerChoice("thread", "threads build until a trial decides")
        if memory.choice is not None:
            self._follow(memory.choice)

    # ---- builds -------------------------------------------------------------------------------------------

    def build(self, build: Build[Delivered]) -> None:
        """See `Builders`."""
        with self._lock:
            self._waiting.append(build)
            self._build_waiting()

    def _builders_of(self, build: Build[Delivered]) -> Builders[Delivered]:
        """Who builds a chunk: what was laid aside stays where it is."""
        if self._processes is not None:
            is_theirs = self._are_ready if build.progress is None else self._processes.has(build)
            if is_theirs:
                return self._processes
        return self._threads

    def _run(self, build: Build[Delivered], chunk: Any = None) -> None:
        self._num_running += 1
        self._threads.build(_WatchedBuild(build, chunk or build.chunk, self))

    def has_left(self) -> None:
        """Threads are no longer at a build."""
        with self._lock:
            self._num_running -= 1
            if self._stage is _Stage.RUNNING:  # its chunk failed, or was laid aside before it was measured
                self._stage = _Stage.DRAINING
            self._build_waiting()

    def _build_waiting(self) -> None:
        """Have built what waits, as far as the stage allows. Under the lock."""
        if self._stage is _Stage.SETTLED:
            waiting, self._waiting = self._waiting, []
            for build in waiting:
                self._builders_of(build).build(build)
            return
        if self._stage is _Stage.BEFORE:
            elapsed_s = time.perf_counter() - self._began_s
            if self._threads.stats().busy_s >= max(TRIAL_AFTER_S, _LEAST_SHARE * elapsed_s):
                self._stage = _Stage.DRAINING
        if self._stage is _Stage.DRAINING:
            self._try_next()
        elif self._stage in (_Stage.BEFORE, _Stage.STARTING):
            while self._waiting and self._num_running < _MOST_BEGUN:
                self._run(self._taken(self._waiting))

    def _taken(self, builds: Sequence[Build[Delivered]]) -> Build[Delivered]:
        """The most urgent of some that wait, which waits no more."""
        build = min(builds, key=lambda build: build.number)
        self._waiting.remove(build)
        return build

    def _try_next(self) -> None:
        """Begin the trial if threads are at nothing else. Under the lock."""
        if self._num_running or not self._waiting:
            return
        new = [build for build in self._waiting if build.progress is None]
        if not new:
            self._run(self._taken(self._waiting))
            return
        build = self._taken(new)
        self._stage = _Stage.RUNNING
        tried = _TriedChunk(build.chunk, self, counts=self._times is not None, most_bytes=self._charge_bytes)
        self._run(build, tried)

    # ---- the trial ----------------------------------------------------------------------------------------

    def locked_s(self, work: Task) -> float:
        """Do the work in this thread; seconds in which it held the interpreter lock."""
        counter = LockCounter()
        with self._lock:
            if self._is_stopped:
                counter.cancel()
            self._counter = counter
            self._pool.submit(0, counter.run)
        return counter.locked_s(work)

    def go_on(self, result: TrialTimes | WorkerChoice) -> None:
        """A chunk of the trial was measured, or nothing needs to be."""
        if isinstance(result, TrialTimes):
            with self._lock:
                times, self._times = self._times, result
            if times is None:
                return
            assert self._counter is not None
            locked_s, is_bound = result.locked_s, self._counter.is_bound
            times = replace(times, locked_s=min(locked_s, times.cpu_s), locked_is_bound=is_bound)
            choice = decide(times, num_workers=self._num_processes, num_cores=self._num_cores)
        else:
            choice = result
        with self._lock:
            self._memory.choice = choice
            self._memory.must_be_processes = choice.value == "process" and choice is result
            self._follow(choice)
            self._build_waiting()

    def _follow(self, choice: WorkerChoice) -> None:
        if choice.value == "process":
            text = f"until {self._num_processes} processes have started: {choice.reason}"
            self._stage, self.choice = _Stage.STARTING, WorkerChoice("thread", text)
            self._pool.submit(0, self._open)
        else:
            self._stage, self.choice = _Stage.SETTLED, choice

    def _open(self) -> None:
        try:
            processes = self._open_processes(self._has_started)
        except Exception as error:
            self._has_started(error)
            return
        with self._lock:
            self._processes = processes
            if self._is_stopped:
                processes.stop()

    def _has_started(self, error: BaseException | None) -> None:
        """Processes are ready for work, or will not be."""
        with self._lock:
            choice = self._memory.choice
            assert choice is not None
            if error is not None:
                text = f"processes would be better ({choice.reason}), but could not be started: {error}"
                choice = self._memory.choice = WorkerChoice("thread", text)
            else:
                self.num_builders = self._num_processes
            self._are_ready, self.choice = error is None, choice
            self._stage = _Stage.SETTLED
            self._build_waiting()

    # ---- as other builders --------------------------------------------------------------------------------

    def places(self) -> list[str]:
        """See `Builders`."""
        return [*self._threads.places(), *(self._processes.places() if self._processes else ())]

    def stats(self) -> StageStats:
        """See `Builders`."""
        stats = self._threads.stats()
        if self._processes is None:
            return stats
        return self._processes.stats().with_past(stats)

    @property
    def runs_here(self) -> bool:
        """See `Builders`."""
        here = self._threads.runs_here or self._pool.runs_here
        return here or (self._processes is not None and self._processes.runs_here)

    def stop(self) -> None:
        """See `Builders`."""
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()
            if self._counter is not None:
                self._counter.cancel()
            self._pool.stop()
            if self._processes is not None:
                self._processes.stop()
        self._threads.stop()

    def close(self) -> object:
        """See `Builders`."""
        self.stop()
        self._threads.close()
        self._pool.close()
        if self._processes is not None:
            self._processes.close()
        return None


class _WatchedBuild:
    """A build that threads are at, until they leave it."""

    def __init__(self, build: Build[Delivered], chunk: Any, owner: AutoBuilders) -> None:
        self._build, self.chunk, self._owner, self.number = build, chunk, owner, build.number

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
        self._owner.has_left()
        return False

    def add(self, piece: Piece[Delivered]) -> None:
        """See `Build`."""
        self._build.add(piece)

    def end(self, error: BaseException | None = None) -> None:
        """See `Build`."""
        self._build.end(error)
        self._owner.has_left()


class _TriedChunk:
    """A chunk that is measured while one thread builds it: its decoding, and its first batches.

    Args:
        chunk: of the engine's.
        owner: hears of what was measured.
        counts: whether the time under the lock is, or all the rest.
        most_bytes: of batches that are measured together: they are charged only then.
    """

    def __init__(
        self, chunk: Chunk[Delivered], owner: AutoBuilders, *, counts: bool, most_bytes: int
    ) -> None:
        self._chunk, self._owner, self._counts, self._most_bytes = chunk, owner, counts, most_bytes
        self._costs = np.zeros(3)
        """Seconds of a batch: of work with a core at hand, of the processor, under the lock."""

    def begin(self) -> Sequence[Task]:
        """See `Chunk`."""
        parts = self._chunk.begin()
        if parts:
            self._costs += self._cost(lambda: [part() for part in parts]) / self._chunk.num_batches
        return ()

    def _cost(self, work: Callable[[], Any]) -> NDArray[np.float64]:
        if self._counts:
            return np.array([0.0, 0.0, self._owner.locked_s(work)])
        began_s, ran_s = time.perf_counter() - queued_s(), time.thread_time()
        work()
        return np.array([time.perf_counter() - queued_s() - began_s, time.thread_time() - ran_s, 0.0])

    def finish(self) -> Iterator[Piece[Delivered]]:
        """See `Chunk`. What is measured comes together, even if that takes long, unless it is large."""
        pieces, new = self._chunk.finish(), deque[Piece[Delivered]]()

        def take() -> None:
            taken_bytes = 0
            while not new or not new[-1].batches or (new[-1].is_due and taken_bytes < self._most_bytes):
                new.append(next(pieces))
                taken_bytes += new[-1].slot_bytes + new[-1].heap_bytes

        before, draws = self._content(), Draws()
        try:
            self._costs += self._cost(take) / sum(len(piece.batches) for piece in new)
        except Exception:
            yield from new
            raise
        has_drawn = draws.since() is not None
        self._owner.go_on(self._result(new[-1], has_drawn, before))
        while new:
            yield new.popleft()
        yield from pieces

    def _content(self) -> bytes | Exception:
        try:
            return content_of(self._owner.functions)
        except Exception as error:
            return error

    def _result(
        self, piece: Piece[Delivered], has_drawn: bool, before: bytes | Exception
    ) -> TrialTimes | WorkerChoice:
        if isinstance(before, Exception):
            return WorkerChoice("thread", f"functions of yours cannot be sent to processes: {before}")
        if self._content() != before:
            return WorkerChoice("thread", "a function of yours changes what it holds, which processes lack")
        if has_drawn:
            text = "what was drawn from the global generators repeats only in processes, which seed them"
            return WorkerChoice("process", f"{text} sample by sample")
        try:
            batch = next(iter(piece.batches)).batch
            pack_s, unpack_s = crossing_s(batch)
        except Exception as error:
            return WorkerChoice("thread", f"batches cannot be sent from processes: {error}")
        work_s, cpu_s, locked_s = self._costs.tolist()
        return TrialTimes(
            work_s=work_s,
            cpu_s=cpu_s,
            locked_s=locked_s,
            locked_is_bound=False,
            pack_s=pack_s,
            unpack_s=unpack_s,
        )
