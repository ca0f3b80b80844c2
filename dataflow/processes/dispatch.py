"""The common part of builders outside of this process: one thread dispatches, and takes what comes back.

Each builder has a chunk that it builds and one that it builds next, so none waits for the way there and back.
Before a chunk is begun and where a builder asks, the engine decides whether there is room for what it makes
next, as with threads. A builder that dies costs
time only: its chunks are built again by others, which pass over the batches that were delivered and get the
same answers. A chunk on which two builders have died is the likely reason, so its error is raised. Whatever
happens, each build comes to its end, once.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from dataflow.batch.builder import ChunkPlan
from dataflow.batch.delivered import Delivered
from dataflow.outputs.columns import ChunkRows
from dataflow.processes.builder_main import BuiltBatches
from dataflow.staging.window import StagedWindow
from dataflow.torch_threads import one_torch_thread
from prefetch.engine.builders import Build, Builders
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import StageStats
from prefetch.errors import EngineClosedError
from prefetch.ipc.protocol import RemoteError, WorkerMessage, WorkerResult
from prefetch.work import PartialChunk, Task
from sharding.errors import SampleError

ASSIGNED = 2
"""Chunks that a builder has at a time: one that it builds, and one that it builds next. Until it is known
what batches weigh, it has one; also where they are large, as it hears with the next one what was freed."""
MOST_DEATHS = 2
"""Number of builders' deaths on a chunk that are no accident."""


class SerializableChunk(Protocol):
    """A chunk that can be sent to a builder elsewhere."""

    plan: ChunkPlan
    rows: ChunkRows
    needs: Sequence[StagedWindow]

    def end(self) -> None:
        """All is built. Raises if the bytes of its windows may have changed."""
        ...


class BuildAnswers:
    """The answers to a builder elsewhere about a chunk, in order. Used by one thread.

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
            return chunk_of(build).rows.sample_error(*arguments)
        (remote,) = arguments
        error = remote.restored()
        num_notes = len(getattr(error, "__notes__", ()))
        return decide(error), getattr(error, "__notes__", [])[num_notes:]
    except Exception as raised:
        return RemoteError.of(raised, "the training process")


def chunk_of(build: Build[Delivered]) -> SerializableChunk:
    """The chunk of a build, as one that is serialized."""
    return cast("SerializableChunk", build.chunk)


@dataclass(eq=False, kw_only=True)
class RemoteBuild:
    """A build for builders elsewhere, and what must outlive the one that has it."""

    build: Build[Delivered]
    builder: Any = None
    """The builder that has it; None: it waits for one."""
    is_active: bool = True
    """True if it is built or waits for it; else the engine has laid it aside."""
    num_added: int = 0
    """Batches that the engine has."""
    answers: BuildAnswers = field(default_factory=BuildAnswers)
    deaths: list[Any] = field(default_factory=list)
    """Number of builders that died on it."""

    @property
    def number(self) -> int:
        """The number by which builders know it."""
        return self.build.number

    @property
    def urgency(self) -> tuple[int, int]:
        """The place in the order of what waits for builders; no two have the same."""
        return self.build.number, 0


B = TypeVar("B", bound=RemoteBuild)


class BusyTimes:
    """The time that builders have been at work, as their chunks come and go. Guarded by its owner's lock.

    Measured where chunks are sent, not where they are built: what a builder is at counts before it says so.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._sum_s = now, 0.0
        self._since: dict[Any, float] = {}

    def are(self, busy: Set[Any]) -> None:
        """These are at work from now on, and no others."""
        if busy != self._since.keys():
            now_s = self._now()
            self._sum_s += sum(now_s - self._since.pop(builder) for builder in self._since.keys() - busy)
            self._since.update(dict.fromkeys(busy - self._since.keys(), now_s))

    def total_s(self) -> float:
        """Seconds of all together, up to now."""
        return self._sum_s + sum(self._now() - since_s for since_s in self._since.values())


class RemoteBuilders(Builders[Delivered], Generic[B]):
    """`Builders` outside of this process. An heir knows who they are, and the way there.

    Args:
        num_builders: of them.
        decide: whether a bad sample is left out.
        large_bytes: batches of so many bytes are not handed out ahead.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        num_builders: int,
        *,
        decide: Callable[[SampleError], bool],
        large_bytes: float = math.inf,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_builders, self._decide, self._large_bytes = num_builders, decide, large_bytes
        self._lock = threading.Lock()  # guards the builds, the failure and the counts
        self._tasks: list[tuple[tuple[int, int], B]] = []
        """Builds that wait for a builder, most urgent first."""
        self._resumed: list[B] = []
        """Builds that the engine lets go on."""
        self._assigned: dict[int, B] = {}
        """Builds that were begun, by number, in the order in which builders were sent them."""
        self._failure: BaseException | None = None
        self._cpu_s, self._num_done = 0.0, 0
        self._busy = BusyTimes(now)
        self._most_assigned, self._batch_bytes = 1, 0
        self._is_stopped = self._is_closed = False
        self._thread: PriorityPool

    def _start(self, run: Task) -> None:
        """Start the thread that dispatches: it runs `run`, then it ends."""
        self._thread = PriorityPool(1, "dataflow-hand-out", initializer=one_torch_thread)

        def run_to_the_end() -> None:
            try:
                run()
            finally:
                self._thread.stop()  # after a time-out nobody closes it

        self._thread.submit(0, run_to_the_end)

    # ---- of an heir ---------------------------------------------------------------------------------------

    @abstractmethod
    def _wake(self) -> None:
        """Let the thread look at builds and at whether to stop. Any thread."""

    @abstractmethod
    def _new(self, build: Build[Delivered]) -> B:
        """A build that nobody has begun."""

    @abstractmethod
    def _choose(self, remote: B, loads: Counter[Any]) -> Any:
        """Return who is to build it, given the chunks that each has; None: nobody can. Under the lock."""

    @abstractmethod
    def _content(self, remote: B) -> tuple[Any, ...]:
        """Return what a builder is sent of a chunk. What it raises ends the chunk."""

    @abstractmethod
    def _send(self, remote: B, kind: int, content: Any = None) -> None:
        """Send a message about a chunk to the builder that has it."""

    def _has_started(self, builder: Any) -> bool:
        """Return whether a builder that was sent a chunk can be at it. Under the lock."""
        return True

    @abstractmethod
    def _death_error(self, remote: B) -> Exception:
        """The error of a chunk on which too many builders have died."""

    # ---- for the engine -----------------------------------------------------------------------------------

    def build(self, build: Build[Delivered]) -> None:
        """See `Builders`."""
        with self._lock:
            if build.progress is None:
                remote = self._new(build)
                heapq.heappush(self._tasks, (remote.urgency, remote))
            else:
                self._resumed.append(build.progress)
        self._wake()

    def stats(self) -> StageStats:
        """See `Builders`."""
        with self._lock:
            busy_s = self._busy.total_s()
            return StageStats(self.num_builders, busy_s, self._num_done, len(self._tasks), cpu_s=self._cpu_s)

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
            for remote in self._assigned.values():
                remote.build.progress = None  # nobody would see that they only refer to each other
            for builds in (self._assigned, self._tasks, self._resumed):
                builds.clear()
            self._end_builders()
        return None

    @abstractmethod
    def _end_builders(self) -> None:
        """End all builders, and free what they need; the thread has ended."""

    # ---- the thread that dispatches ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send what may go on, then new chunks while a builder has room for one."""
        with self._lock:
            resumed, self._resumed = self._resumed, []
        for remote in resumed:
            self._set_active(remote, True)
            if remote.builder is None:
                self._queue(remote)
            else:
                self._send(remote, WorkerMessage.GO_ON)
        while (task := self._next_task()) is not None:
            remote, builder = task
            if self._goes_on(remote):
                self._begin(remote, builder)

    def _goes_on(self, remote: B) -> bool:
        """Return whether a builder is to be sent what was its turn; else it is laid aside."""
        if not (goes_on := remote.build.may_go_on()):
            self._set_active(remote, False)
        return goes_on

    def _begin(self, remote: B, builder: Any) -> None:
        """Send a chunk to a builder, but for the batches that were delivered."""
        try:
            if remote.build.is_cancelled:
                raise EngineClosedError("the loader was closed while the batch was built")
            content = self._content(remote)
        except BaseException as error:
            self._end(remote, error)
            return
        self._assign(remote, builder)
        self._send(remote, self._kind_of(remote), content)

    def _kind_of(self, remote: B) -> int:
        return WorkerMessage.TASK

    def _queue(self, remote: B) -> None:
        with self._lock:
            heapq.heappush(self._tasks, (remote.urgency, remote))

    def _next_task(self) -> tuple[B, Any] | None:
        """The most urgent build, and who is to build it."""
        with self._lock:
            failure, tasks = self._failure, self._tasks
            if failure is None:
                if not tasks:
                    return None
                active = (remote.builder for remote in self._assigned.values() if remote.is_active)
                loads = Counter(builder for builder in active if builder is not None)
                builder = self._choose(tasks[0][1], loads)
                has_room = builder is not None and loads[builder] < self._most_assigned
                return (heapq.heappop(tasks)[1], builder) if has_room else None
            self._tasks = []
        for _, remote in tasks:
            remote.build.end(failure)
        return None

    def _assign(self, remote: B, builder: Any) -> None:
        with self._lock:
            remote.builder, remote.build.progress = builder, remote.build.progress or remote
            self._assigned.pop(remote.number, None)
            self._assigned[remote.number] = remote
            self._note_busy()

    def _set_active(self, remote: B, is_active: bool) -> None:
        """Note whether a chunk is built, or laid aside; what a builder goes on with it does last."""
        with self._lock:
            remote.is_active = is_active
            if is_active and self._assigned.pop(remote.number, None) is not None:
                self._assigned[remote.number] = remote
            self._note_busy()

    def _note_busy(self) -> None:
        """Count the time of builders that are at work now. Under the lock."""
        builders = {
            item.builder for item in self._assigned.values() if item.is_active and item.builder is not None
        }
        self._busy.are({builder for builder in builders if self._has_started(builder)})

    def _fail(self, error: BaseException) -> None:
        """End all builds, and those to come."""
        with self._lock:
            self._failure = self._failure or error
            begun = [*self._assigned.values(), *(remote for _, remote in self._tasks)]
            builds = {remote.build.number: remote.build for remote in begun}
            for waiting in (self._assigned, self._tasks, self._resumed):
                waiting.clear()
            self._note_busy()
        for build in builds.values():
            build.end(error)

    def _take_response(self, remote: B, kind: int, obj: Any, slot_bytes: int = 0) -> None:
        """Take a builder's response about a chunk.

        `slot_bytes`: of its batches, if they are not charged yet.
        """
        if kind == WorkerResult.QUESTION:
            self._send(remote, WorkerMessage.ANSWER, remote.answers.to(obj, remote.build, self._decide))
        elif kind == WorkerResult.ERROR:
            self._end(remote, obj.restored())
        else:
            self._add(remote, obj, slot_bytes)

    def _add(self, remote: B, built: BuiltBatches, slot_bytes: int) -> None:
        with self._lock:
            self._cpu_s += built.cpu_s
            # It falls slowly: some small ones say little of the next.
            self._batch_bytes = max(slot_bytes, built.heap_bytes, self._batch_bytes * 63 // 64)
            self._most_assigned = ASSIGNED if self._batch_bytes < self._large_bytes else 1
        if built.is_last:
            try:
                chunk_of(remote.build).end()
            except BaseException as error:
                self._end(remote, error)
                return
        remote.num_added += len(built.batches)
        delivered = [Delivered(*batch) for batch in built.batches]
        built.batches.clear()  # whoever called may hold it, and must not keep what the consumer drops
        # Arrays of what was made on the builder's heap are in the slot: only the rest is made again here.
        heap_bytes = max(0, built.heap_bytes - slot_bytes)
        made_bytes, build_s = built.made_bytes, built.build_s
        remote.build.add(
            PartialChunk(
                delivered, slot_bytes, heap_bytes, built.flush_now, made_bytes=made_bytes, build_s=build_s
            )
        )
        del delivered
        if built.is_last:
            self._end(remote, None)
        elif not built.asks:
            return
        elif remote.build.may_go_on():
            self._send(remote, WorkerMessage.GO_ON)
        else:
            self._set_active(remote, False)

    def _builds_of(self, builder: Any) -> list[B]:
        """The builds that a builder has, in the order in which it was sent them."""
        with self._lock:
            return [remote for remote in self._assigned.values() if remote.builder == builder]

    def _lose(self, remote: B, death: Any) -> None:
        """A builder has died that had a chunk; `death`: if the chunk may be why, else None."""
        with self._lock:
            remote.builder = None
            self._note_busy()
        remote.answers.begin_again()
        if death is not None:
            remote.deaths.append(death)
        if len(remote.deaths) == MOST_DEATHS:
            self._end(remote, self._death_error(remote))
        elif remote.is_active:
            self._queue(remote)

    def _end(self, remote: B, error: BaseException | None) -> None:
        with self._lock:
            remote.builder = None
            self._assigned.pop(remote.number, None)
            self._num_done += 1
            self._note_busy()
        remote.build.end(error)
