"""Builders that are processes: they take staged chunks, and give back batches in shared memory.

One thread hands out: it copies a chunk's values to where the processes see them (`shipped`), sends the chunk
to the process that has least to do, and takes what they respond. Each process has a chunk that it builds and
one that it builds next, so none waits for the way there and back. Between two responses of a chunk the
engine decides whether it goes on, as with threads.

A process that dies is replaced, and its chunks are built again: what it has handed over stays valid and is
passed over, and what was decided about bad samples stays decided. A chunk on which two processes have died
is the likely reason, so its error is raised, as is that of a loader whose processes die too often.
"""

from __future__ import annotations

import heapq
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dataflow.batch.builder import ChunkPlan
from dataflow.batch.columns import ChunkRows
from dataflow.batch.delivered import Delivered
from dataflow.processes.builder_main import (
    BuilderJob,
    BuilderMessage,
    BuilderResponse,
    BuilderResult,
    CrossedError,
    run,
)
from dataflow.processes.payload import MESSAGE_HEAD, PackedObject, pack, unpack, write_packed
from dataflow.processes.server import server_needs, start_context
from dataflow.processes.shipped import ShippedChunk, ship
from dataflow.staging.window import StagedWindow
from prefetch.engine.builders import Build, CopyStats
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import StageStats
from prefetch.errors import EngineClosedError
from prefetch.memory.device import register_pinned
from prefetch.memory.guards import FileGuards
from prefetch.work import Piece, Task
from prefetch.workers import fork_server
from prefetch.workers.pool import WorkerDiedError, WorkerPool
from prefetch.workers.shared_arena import Region, SharedFile
from sharding.errors import SampleError

_ASSIGNED = 2
"""Chunks that a process has at a time: one that it builds, one that it builds next."""
_MOST_DEATHS = 2
"""So many processes that died on a chunk are no accident."""

_log = logging.getLogger("dataflow")


def warm_up(*, is_needed: bool) -> None:
    """Start the server that builders come from, without waiting for it; see `fork_server.warm_up`."""
    if start_context(None) is None:
        fork_server.warm_up(server_needs(set(), run.__module__), is_needed=is_needed)


class ShippableChunk(Protocol):
    """What is shipped of a chunk."""

    plan: ChunkPlan
    rows: ChunkRows
    needs: Sequence[StagedWindow]

    def end(self) -> None:
        """All is built. Raises if the bytes of its windows may have changed."""
        ...


@dataclass(order=True)
class _QueuedBuild:
    """A build that waits for a process, most urgent first."""

    number: int
    build: Build[Delivered] = field(compare=False)


@dataclass(eq=False, kw_only=True)
class _Assigned:
    """A build that a process has, or that has lost its process."""

    build: Build[Delivered]
    shipped: ShippedChunk
    memory: NDArray[np.uint8] | None
    """Its values; None: it has none any more."""
    process: int | None = None
    """None: it has none."""
    is_active: bool = True
    """Whether it is built or waits for it; else the engine has laid it aside."""
    num_added: int = 0
    """Batches that were handed over."""
    answers: BuildAnswers = field(default_factory=lambda: BuildAnswers())
    deaths: list[WorkerDiedError] = field(default_factory=list)
    """Of the processes that were at it."""


class ProcessBuilders:
    """`Builders` that are processes of this machine.

    Args:
        job: what all chunks have in common.
        num_builders: processes.
        guards: keep mapped files at their length while their values are copied.
        decide: whether a bad sample is left out.
        give_back: hears of the bytes of batches that have died.
        max_restarts: how many processes are replaced that have died.
        on_start: hears once that all processes are ready for work, or why they are not.
        initializer: runs first in the thread that hands out.
    """

    def __init__(
        self,
        job: BuilderJob,
        num_builders: int,
        *,
        guards: FileGuards,
        decide: Callable[[SampleError], bool],
        give_back: Callable[[int], None],
        max_restarts: int = 0,
        on_start: Callable[[BaseException | None], None] | None = None,
        initializer: Task | None = None,
    ) -> None:
        self.num_builders = num_builders
        self._job, self._guards, self._decide, self._give_back = job, guards, decide, give_back
        self._lock = threading.Lock()  # guards the builds, the failure and the counts
        self._tasks: list[_QueuedBuild] = []
        self._resumed: list[_Assigned] = []
        """Builds that the engine lets go on, or that have lost their process."""
        self._assigned: dict[int, _Assigned] = {}
        """By number of the chunk."""
        self._failure: BaseException | None = None
        self._is_asked = threading.Event()
        """Set with each call, for the thread that has no processes to listen to any more."""
        self._busy_s, self._num_done = 0.0, 0
        self._max_restarts, self.num_restarts = max_restarts, 0
        self._on_start, self._num_starting = on_start, num_builders
        self._is_stopped = self._is_closed = False
        context = start_context(None)
        try:
            packed = pack(job, by_value=context is None, share=True)
        except Exception as error:
            raise ValueError(
                f"a function that builds batches cannot be sent to builder processes ({error}): make what it "
                'uses inside of it, or have threads build: workers="thread"'
            ) from error
        # Regions: of the builders, ours, from which they read, and of those that replace builders.
        self._regions = [*range(num_builders)]
        self.file = SharedFile(
            num_builders + 1 + max_restarts,
            MESSAGE_HEAD + packed.nbytes,
            register_pinned if job.is_pinned else None,
        )
        try:
            write_packed(self.file, packed)
            own = self.file.region_offset(num_builders)
            self._region = Region(self.file.fd, own, self.file.region_bytes, job.limit_bytes)
        except BaseException:
            self.file.close()
            raise
        self._pool: WorkerPool | None = None
        """Opened in the thread: where a fork server must start first, that takes a second or two."""
        self._thread = PriorityPool(1, "dataflow-hand-out", initializer=initializer)
        self._thread.submit(0, partial(self._run, packed, context))

    # ---- for the engine -----------------------------------------------------------------------------------

    def has(self, build: Build[Delivered]) -> bool:
        """Whether a chunk that was begun is built here."""
        return isinstance(build.progress, _Assigned)

    def build(self, build: Build[Delivered]) -> None:
        """See `Builders`."""
        with self._lock:
            if build.progress is None:
                heapq.heappush(self._tasks, _QueuedBuild(build.number, build))
            else:
                self._resumed.append(build.progress)
        self._wake()

    def _wake(self) -> None:
        self._is_asked.set()
        if self._pool is not None:
            self._pool.wake()

    @property
    def needs_consumer(self) -> bool:
        """See `Builders`."""
        return False

    def work(self) -> None:
        """See `Builders`."""

    def copy_stats(self) -> CopyStats:
        """See `Builders`."""
        return CopyStats()

    def places(self) -> list[str]:
        """See `Builders`."""
        with self._lock:
            busy = {assigned.process for assigned in self._assigned.values() if assigned.is_active}
            processes = [] if self._pool is None else self._pool.processes
        return [f"in builder process {n} (pid {processes[n].pid})" for n in busy if n is not None]

    def stats(self) -> StageStats:
        """See `Builders`."""
        with self._lock:
            return StageStats(self.num_builders, self._busy_s, self._num_done, len(self._tasks))

    @property
    def runs_here(self) -> bool:
        """See `Builders`."""
        return self._thread.runs_here

    def stop(self) -> None:
        """See `Builders`."""
        self._is_stopped = True
        self._wake()

    def close(self) -> object:
        """See `Builders`."""
        self.stop()
        self._thread.close()
        if not self._is_closed:
            self._is_closed = True
            for assigned in self._assigned.values():
                assigned.build.progress = None  # nobody would see that they only refer to each other
            for builds in (self._assigned, self._tasks, self._resumed):
                builds.clear()
            if self._pool is not None:
                self._pool.close()
            self.file.close()
        return None

    # ---- the thread that hands out ------------------------------------------------------------------------

    def _run(self, packed: PackedObject, context: BaseContext | None) -> None:
        try:
            self._pool = self._opened(packed, context)
        except Exception as error:
            self._fail(error)
        while not self._is_stopped:
            try:
                self._hand_out()
                self._listen()
            except Exception as error:  # nobody can tell what processes have
                self._fail(error)

    def _listen(self) -> None:
        """Take what processes say, or wait for the engine where there are none."""
        if self._failure is not None or self._pool is None:
            self._is_asked.wait()
            self._is_asked.clear()
            return
        try:
            responses = self._pool.wait(None)
        except WorkerDiedError as error:
            self._recover(self._pool, error)
            return
        for response in map(BuilderResponse._make, responses):
            self._take(response)

    def _opened(self, packed: PackedObject, context: BaseContext | None) -> WorkerPool:
        return WorkerPool(
            run,
            self.num_builders,
            self.file,
            record_fields=len(BuilderResponse._fields),
            context=context,
            needs=server_needs(packed.modules, run.__module__),
            passed=[fd for fd, _ in packed.shared],
            region_limit=self._job.limit_bytes // self.num_builders,
        )

    def _fail(self, error: BaseException) -> None:
        """End all builds, and those to come."""
        with self._lock:
            self._failure = error
            assigned = [*self._assigned.values()]
            self._assigned.clear()
            self._resumed.clear()
        for one in assigned:
            one.build.end(error)
        self._has_started(error)

    def _has_started(self, error: BaseException | None) -> None:
        on_start, self._on_start = self._on_start, None
        if on_start is not None:
            on_start(error)

    def _recover(self, pool: WorkerPool, error: WorkerDiedError) -> None:
        """Replace processes that have died, and have their chunks built again."""
        for process, _, _ in error.workers:
            self._lose(process, error)
            if self.num_restarts == self._max_restarts:
                self._fail(error)
                return
            self.num_restarts += 1
            _log.warning(
                "%s Its chunks are built again in another process (%d of max_worker_restarts=%d).",
                *(error, self.num_restarts, self._max_restarts),
            )
            self.file.abandon(self._regions[process])
            self._regions[process] = self.num_builders + self.num_restarts
            pool.replace(process, self._regions[process])

    def _lose(self, process: int, error: WorkerDiedError) -> None:
        """Take chunks from a process that has died; the most urgent one is what it was at."""
        with self._lock:
            lost = [one for _, one in sorted(self._assigned.items()) if one.process == process]
            for assigned in lost:
                assigned.process = None
                assigned.answers.begin_again()
        active = [assigned for assigned in lost if assigned.is_active]
        for assigned in active[:1]:
            assigned.deaths.append(error)
        for assigned in active:
            if len(assigned.deaths) == _MOST_DEATHS:
                before, last = assigned.deaths
                failure = WorkerDiedError(
                    last.workers, last.memory
                )  # one of its own: others may get notes, too
                failure.add_note(f"{_MOST_DEATHS} processes have died on the same batches; before: {before}")
                self._end(assigned, failure)
            elif assigned.num_added == assigned.build.chunk.num_batches:
                self._end(assigned, None)
            else:
                with self._lock:
                    self._resumed.append(assigned)

    def _hand_out(self) -> None:
        """Send what may go on, then new chunks while a process has room for one."""
        with self._lock:
            resumed, self._resumed = self._resumed, []
        for assigned in resumed:
            assigned.is_active = True
            if assigned.process is None:
                self._assign(assigned, self._least_busy()[0])
            else:
                self._send(assigned.process, BuilderMessage.GO_ON, assigned.build.number, None)
        while (found := self._next_task()) is not None:
            self._ship(*found)

    def _least_busy(self) -> tuple[int, int]:
        """The process that has least to do, and how many chunks it has. Under the lock, or in our thread."""
        loads = [0] * self.num_builders
        for assigned in self._assigned.values():
            if assigned.process is not None:
                loads[assigned.process] += assigned.is_active
        process = loads.index(min(loads))
        return process, loads[process]

    def _next_task(self) -> tuple[Build[Delivered], int] | None:
        """The most urgent build, and the process that has least to do."""
        with self._lock:
            if self._failure is not None:
                tasks, self._tasks = self._tasks, []
            else:
                tasks = []
                process, load = self._least_busy()
                if self._tasks and load < _ASSIGNED:
                    return heapq.heappop(self._tasks).build, process
        for task in tasks:
            assert self._failure is not None
            task.build.end(self._failure)
        return None

    def _ship(self, build: Build[Delivered], process: int) -> None:
        chunk = cast("ShippableChunk", build.chunk)
        try:
            if build.is_cancelled:
                raise EngineClosedError("the loader was closed while the batch was built")
            with self._guards.loading():
                shipped, memory = ship(chunk.plan, chunk.rows, self._job.outputs, self._region.arena)
        except BaseException as error:
            build.end(error)
            return
        assigned = build.progress = _Assigned(build=build, shipped=shipped, memory=memory)
        self._assign(assigned, process)

    def _assign(self, assigned: _Assigned, process: int) -> None:
        """Have a process build a chunk, but for the batches that another one has handed over."""
        build, memory = assigned.build, assigned.memory
        assert memory is not None
        with self._lock:
            assigned.process = process
            self._assigned[build.number] = assigned
        offset = self._region.offset_of(memory.__array_interface__["data"][0])
        content = assigned.shipped, assigned.num_added, offset, len(memory)
        self._send(process, BuilderMessage.BUILD, build.number, content)

    def _send(self, process: int, kind: int, number: int, content: Any) -> None:
        message = (kind, number, content, self.file.take_returned(self._regions[process]))
        assert self._pool is not None
        self._pool.send(process, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _take(self, response: BuilderResponse) -> None:
        """What a process says of a chunk."""
        process, number, nbytes = response.builder, response.chunk, 0
        with self._lock:
            assigned = self._assigned.get(number)
        is_charged = assigned is not None and response.kind == BuilderResult.BATCHES

        def view_at(offset: int, length: int) -> NDArray[np.uint8]:
            nonlocal nbytes
            nbytes += length
            region = self._regions[process]
            return self.file.view(region, offset, length, self._give_back if is_charged else None)

        buffer = view_at(response.offset, response.nbytes)
        obj = unpack(buffer, response.meta, response.meta_bytes, response.table, view_at)
        del buffer
        if response.kind == BuilderResult.READY:
            self._num_starting -= 1
            if obj is not None or not self._num_starting:
                self._has_started(None if obj is None else obj.restored())
        if assigned is None or assigned.process != process:
            return
        if response.kind == BuilderResult.QUESTION:
            answer = assigned.answers.to(obj, assigned.build, self._decide)
            self._send(process, BuilderMessage.ANSWER, number, answer)
        elif response.kind == BuilderResult.ERROR:
            self._end(assigned, obj.restored())
        else:
            self._add(assigned, obj, nbytes)

    def _add(self, assigned: _Assigned, obj: tuple[list[Any], int, bool, float], nbytes: int) -> None:
        batches, heap_bytes, is_last, busy_s = obj
        with self._lock:
            self._busy_s += busy_s
        assigned.num_added += len(batches)
        delivered = [Delivered(*batch) for batch in batches]
        del batches, obj
        assigned.build.add(Piece(delivered, slot_bytes=nbytes, heap_bytes=heap_bytes))
        del delivered
        if is_last:
            self._end(assigned, None)
        elif assigned.build.may_go_on():
            assert assigned.process is not None
            self._send(assigned.process, BuilderMessage.GO_ON, assigned.build.number, None)
        else:
            assigned.is_active = False

    def _end(self, assigned: _Assigned, error: BaseException | None) -> None:
        build, assigned.memory = assigned.build, None
        with self._lock:
            self._assigned.pop(build.number, None)
            self._num_done += 1
        if error is None:
            try:
                cast("ShippableChunk", build.chunk).end()
            except BaseException as caught:
                error = caught
        build.end(error)


class BuildAnswers:
    """What a builder elsewhere was answered about a chunk, in order. Used by one thread.

    One that builds the chunk anew asks the same questions, and nothing may be decided and counted twice.
    """

    def __init__(self) -> None:
        self._answers: list[Any] = []
        self._num_asked = 0

    def begin_again(self) -> None:
        """Another builder has the chunk."""
        self._num_asked = 0

    def to(
        self, question: tuple[Any, ...], build: Build[Delivered], decide: Callable[[SampleError], bool]
    ) -> Any:
        """The answer: what an error says, or whether a sample is left out, and its notes.

        What a function given as `on_error` raises ends this chunk alone.
        """
        if self._num_asked == len(self._answers):
            self._answers.append(_answer(question, build, decide))
        self._num_asked += 1
        return self._answers[self._num_asked - 1]


def _answer(question: tuple[Any, ...], build: Build[Delivered], decide: Callable[[SampleError], bool]) -> Any:
    kind, *arguments = question
    try:
        if kind == "error":
            return cast("ShippableChunk", build.chunk).rows.sample_error(*arguments)
        (crossed,) = arguments
        error = crossed.restored()
        num_notes = len(getattr(error, "__notes__", ()))
        return decide(error), getattr(error, "__notes__", [])[num_notes:]
    except Exception as raised:
        return CrossedError.of(raised, "the training process")
