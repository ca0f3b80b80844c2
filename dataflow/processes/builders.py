"""Builders that are processes: they take staged chunks, and give back batches in shared memory.

One thread hands out: it copies a chunk's values to where the processes see them (`shipped`), sends the chunk
to the process that has least to do, and takes what they respond. Each process has a chunk that it builds and
one that it builds next, so none waits for the way there and back. Between two responses of a chunk the
engine decides whether it goes on, as with threads. Whatever happens to a process, each build comes to its
end.
"""

from __future__ import annotations

import heapq
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from dataflow.processes.payload import MESSAGE_HEAD, pack, unpack, write_packed
from dataflow.processes.server import server_needs, start_context
from dataflow.processes.shipped import ship
from dataflow.staging.window import StagedWindow
from prefetch.engine.builders import Build, CopyStats
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import StageStats
from prefetch.errors import EngineClosedError
from prefetch.memory.device import register_pinned
from prefetch.memory.guards import FileGuards
from prefetch.work import Piece, Task
from prefetch.workers.pool import WorkerPool
from prefetch.workers.shared_arena import Region, SharedFile
from sharding.errors import SampleError

_ASSIGNED = 2
"""Chunks that a process has at a time: one that it builds, one that it builds next."""


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


@dataclass(eq=False)
class _Assigned:
    """A build that a process has."""

    build: Build[Delivered]
    process: int
    memory: NDArray[np.uint8] | None
    """Its values; None: it has none any more."""
    is_active: bool = True
    """Whether it is built or waits for it; else the engine has laid it aside."""


class ProcessBuilders:
    """`Builders` that are processes of this machine.

    Args:
        job: what all chunks have in common.
        num_builders: processes.
        guards: keep mapped files at their length while their values are copied.
        decide: whether a bad sample is left out.
        give_back: hears of the bytes of batches that have died.
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
        initializer: Task | None = None,
    ) -> None:
        self.num_builders = num_builders
        self._job, self._guards, self._decide, self._give_back = job, guards, decide, give_back
        self._lock = threading.Lock()  # guards the builds, the failure and the counts
        self._tasks: list[_QueuedBuild] = []
        self._resumed: list[_Assigned] = []
        """Builds that the engine lets go on."""
        self._assigned: dict[int, _Assigned] = {}
        """By number of the chunk."""
        self._failure: BaseException | None = None
        self._is_asked = threading.Event()
        """Set with each call, for the thread that has no processes to listen to any more."""
        self._busy_s, self._num_done = 0.0, 0
        self._is_stopped = self._is_closed = False
        context = start_context(None)
        try:
            packed = pack(job, by_value=context is None, share=True)
        except Exception as error:
            raise ValueError(
                f"a function that builds batches cannot be sent to builder processes ({error}): make what it "
                'uses inside of it, or have threads build: workers="thread"'
            ) from error
        # One region more than builders: ours, from which they read.
        self.file = SharedFile(
            num_builders + 1, MESSAGE_HEAD + packed.nbytes, register_pinned if job.is_pinned else None
        )
        try:
            write_packed(self.file, packed)
            own = self.file.region_offset(num_builders)
            self._region = Region(self.file.fd, own, self.file.region_bytes, job.limit_bytes)
            self._pool = WorkerPool(
                run,
                num_builders,
                self.file,
                record_fields=len(BuilderResponse._fields),
                context=context,
                needs=server_needs(packed.modules, run.__module__),
                passed=[fd for fd, _ in packed.shared],
                region_limit=job.limit_bytes // num_builders,
            )
        except BaseException:
            self.file.close()
            raise
        self._thread = PriorityPool(1, "dataflow-hand-out", initializer=initializer)
        self._thread.submit(0, self._run)

    # ---- for the engine -----------------------------------------------------------------------------------

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
        self._pool.wake()

    def copy_stats(self) -> CopyStats:
        """See `Builders`."""
        return CopyStats()

    def places(self) -> list[str]:
        """See `Builders`."""
        with self._lock:
            busy = {assigned.process for assigned in self._assigned.values() if assigned.is_active}
        return [f"in builder process {process} (pid {self._pool.processes[process].pid})" for process in busy]

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
            self._assigned.clear()
            self._pool.close()
            self.file.close()
        return None

    # ---- the thread that hands out ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self._hand_out()
                if self._failure is None:
                    for response in map(BuilderResponse._make, self._pool.wait(None)):
                        self._take(response)
                else:
                    self._is_asked.wait()
                    self._is_asked.clear()
            except Exception as error:  # a process has died; of the rest nobody can tell what they have
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End all builds, and those to come."""
        with self._lock:
            self._failure = error
            assigned = [*self._assigned.values()]
            self._assigned.clear()
        for one in assigned:
            one.build.end(error)

    def _hand_out(self) -> None:
        """Send what may go on, then new chunks while a process has room for one."""
        with self._lock:
            resumed, self._resumed = self._resumed, []
        for assigned in resumed:
            assigned.is_active = True
            self._send(assigned.process, BuilderMessage.GO_ON, assigned.build.number, None)
        while (found := self._next_task()) is not None:
            self._ship(*found)

    def _next_task(self) -> tuple[Build[Delivered], int] | None:
        """The most urgent build, and the process that has least to do."""
        with self._lock:
            if self._failure is not None:
                tasks, self._tasks = self._tasks, []
            else:
                tasks = []
                loads = [0] * self.num_builders
                for assigned in self._assigned.values():
                    loads[assigned.process] += assigned.is_active
                process = loads.index(min(loads))
                if self._tasks and loads[process] < _ASSIGNED:
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
        assigned = build.progress = _Assigned(build, process, memory)
        with self._lock:
            self._assigned[build.number] = assigned
        offset = self._region.offset_of(memory.__array_interface__["data"][0])
        self._send(process, BuilderMessage.BUILD, build.number, (shipped, 0, offset, len(memory)))

    def _send(self, process: int, kind: int, number: int, content: Any) -> None:
        message = (kind, number, content, self.file.take_returned(process))
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
            return self.file.view(process, offset, length, self._give_back if is_charged else None)

        buffer = view_at(response.offset, response.nbytes)
        obj = unpack(buffer, response.meta, response.meta_bytes, response.table, view_at)
        del buffer
        if assigned is None:
            return
        if response.kind == BuilderResult.QUESTION:
            answer = answer_to(obj, assigned.build, self._decide)
            self._send(process, BuilderMessage.ANSWER, number, answer)
        elif response.kind == BuilderResult.ERROR:
            self._end(assigned, obj.restored())
        else:
            self._add(assigned, obj, nbytes)

    def _add(self, assigned: _Assigned, obj: tuple[list[Any], int, bool, float], nbytes: int) -> None:
        batches, heap_bytes, is_last, busy_s = obj
        with self._lock:
            self._busy_s += busy_s
        delivered = [Delivered(*batch) for batch in batches]
        del batches, obj
        assigned.build.add(Piece(delivered, slot_bytes=nbytes, heap_bytes=heap_bytes))
        del delivered
        if is_last:
            self._end(assigned, None)
        elif assigned.build.may_go_on():
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


def answer_to(
    question: tuple[Any, ...], build: Build[Delivered], decide: Callable[[SampleError], bool]
) -> Any:
    """What a builder elsewhere wants to know of a chunk: what an error says, or whether a sample is left out.

    What a function given as `on_error` raises ends this chunk alone.
    """
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
