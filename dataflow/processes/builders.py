"""Builders that are processes: they take staged chunks, and give back batches in shared memory.

The thread that dispatches (`dispatch`) copies a chunk's values to where the processes see them, or says in
which open files they lie (`serialized`), sends the chunk to the process that has least to do, and takes what
they respond. A process that dies is replaced by one that works in a region of its own; the pages of the dead
one's go with its last batch.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.batch.at_work import sample_text
from dataflow.batch.builder import BuildContext
from dataflow.batch.delivered import Delivered
from dataflow.outputs.output import staged_outputs
from dataflow.processes.builder_main import BuilderJob, BuiltBatches, run
from dataflow.processes.dispatch import MOST_DEATHS, RemoteBuild, RemoteBuilders, chunk_of
from dataflow.processes.parts import MadePart, Sharing
from dataflow.processes.serialized import SerializedChunk, serialize
from prefetch.engine.builders import Build
from prefetch.engine.pool import context_in
from prefetch.ipc.pipe import WorkerProcesses, packed_job
from prefetch.ipc.protocol import WorkerMessage, WorkerRequest, WorkerResult
from prefetch.workers.deaths import WorkerDiedError
from prefetch.workers.shared_arena import Region
from prefetch.workers.starting import start_context
from prefetch.workers.worker_start import ABOUT, NATIVE, WorkerResponse

_INPUTS_IN_LIMIT = 8
"""Free memory for chunks' values is kept up to this part of the limit: those of all processes take less."""
_LARGE_IN_LIMIT = 8
"""The divisor of a process's part of the limit: larger batches are not handed out ahead."""
_ONE_ACCIDENT_S = 2.0
"""Deaths of several processes within this time are counted as one."""
_log = logging.getLogger("dataflow")


@dataclass(eq=False, kw_only=True)
class _ProcessBuild(RemoteBuild):
    """A build for processes, or a part of one; `builder` is a process's number."""

    serialized: SerializedChunk | None = None
    memory: NDArray[np.uint8] | None = None
    """Its values, from when it is serialized until it ends."""
    leases: list[NDArray[np.uint8]] = field(default_factory=list)
    """Memory that processes may still read: values, and samples that were made."""
    places: list[tuple[int, int, tuple[int, int, int]]] = field(default_factory=list)
    """The place of samples that were made: offset, bytes, layout."""
    num_parts: int = 0
    """Parts that are not made."""
    parts_s: float = 0.0
    """Seconds that the others took."""
    whole: _ProcessBuild | None = None
    """The build that this is a part of; None: it is one."""
    rows: range = range(0)
    """The rows of the part."""
    part: int = 0
    """The number of the part, negative; 0: it is none."""

    @property
    def number(self) -> int:
        """See `RemoteBuild`."""
        return self.part or self.build.number

    @property
    def urgency(self) -> tuple[int, int]:
        """See `RemoteBuild`."""
        return self.build.number, self.rows.start


class ProcessBuilders(RemoteBuilders[_ProcessBuild]):
    """`Builders` that are processes of this machine.

    Args:
        context: of the builders of this process; `num_builders` of its settings: the processes.
        give_back: hears of the bytes of batches that have died.
        max_restarts: how many times processes are replaced that have died.
        start: how they start; None: as multiprocessing says.
        worker_init_fn: called in each with its number, before its first chunk.
        now: a clock, in seconds.
        on_start: hears once that all processes are ready for work, or why they are not.

    Raises `ValueError` for functions that cannot be sent.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        give_back: Callable[[int], None],
        max_restarts: int = 0,
        start: BaseContext | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        on_start: Callable[[BaseException | None], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        settings, num_builders = context.settings, context.settings.num_builders
        large_bytes = settings.limit_bytes // (_LARGE_IN_LIMIT * num_builders)
        super().__init__(num_builders, decide=context.on_bad, large_bytes=large_bytes)
        self._context, self._give_back = context, give_back
        self._is_asked = threading.Event()
        """Set with each call, for the thread that listens to no processes any more."""
        self._max_restarts, self.num_restarts, self._now = max_restarts, 0, now
        self._accident_s, self._struck = -math.inf, set[int]()
        """The beginning of the last accident, and the processes that died of it."""
        self._on_start, self._num_starting = on_start, num_builders
        self._started: set[int] = set()
        """Processes that have said that they are there."""
        self._sharing, self._part = Sharing(), -1
        """The number that the last part got."""
        self._reads_files = True
        """True if processes read what lies in files that are open here; not once one of them could not."""
        job = BuilderJob(settings, worker_init_fn)
        starts = start_context(start)
        try:
            packed = packed_job(job, starts)
        except Exception as error:
            raise ValueError(
                f"a function that builds batches cannot be sent to builder processes ({error}): make what it "
                'uses inside of it, or have threads build: workers="thread"'
            ) from error
        self._processes = WorkerProcesses(
            run,
            num_builders,
            packed,
            context=starts,
            inherited=job,
            num_spare=1 + num_builders * (1 + max_restarts) if max_restarts else 1,
            pins=settings.is_pinned,
            region_limit=settings.limit_bytes // num_builders,
        )
        self.file = self._processes.file
        try:
            offset, limit = self.file.region_offset(num_builders), settings.limit_bytes // _INPUTS_IN_LIMIT
            self._region = Region(self.file.fd, offset, self.file.region_bytes, limit)
            """Ours, behind those of the first processes: they read chunks' values from it."""
        except BaseException:
            self._processes.close(stop_s=0)
            raise
        self._start(self._run)

    # ---- for the engine -----------------------------------------------------------------------------------

    def has(self, build: Build[Delivered]) -> bool:
        """Return whether a chunk that was begun is built here."""
        return isinstance(build.progress, _ProcessBuild)

    def contexts(self) -> list[str]:
        """See `Builders`."""
        with self._lock:
            builds = dict(sorted(self._assigned.items()))
        busy = dict.fromkeys(
            remote.builder for remote in builds.values() if remote.is_active and remote.builder is not None
        )
        return [
            f"in builder process {n} (pid {pid}){'' if index else self._standing(n, builds)}"
            for index, (n, pid) in enumerate((n, self._processes.pool.processes[n].pid) for n in busy)
        ]

    def _standing(self, process: int, builds: Mapping[int, _ProcessBuild]) -> str:
        """Function, line and sample that a process is at, in words; "" where it does not say so in time."""
        _, is_told, answer = self._processes.pool.about(process).rpartition(ABOUT)
        if not is_told:  # it runs code that lets no other run
            context, native = context_in(answer.partition(NATIVE)[0]), answer.partition(NATIVE)[2]
            if cure := self._processes.pool.standstill(process):
                native, cure = native.replace("\n", ", "), cure.strip()
                return f", {context}: {cure} Native frames: {native}"
            return f", {context}" if context else ""
        context, chunk, row = json.loads(answer.partition("\n")[0])  # stacks of the next answer may follow
        remote = builds.get(chunk)
        sample = "" if remote is None or row < 0 else sample_text(chunk_of(remote.build).rows, row)
        return f", {context}{sample}" if context else sample

    def _wake(self) -> None:
        self._is_asked.set()
        self._processes.pool.wake()

    def _end_builders(self) -> None:
        if self._on_start is not None:  # others build meanwhile: nobody waits
            self._processes.close(stop_s=0)
        else:
            self._processes.close()
        self._on_start = None

    # ---- the thread that dispatches ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self._dispatch()
                self._listen()
            except Exception as error:  # nobody can tell what processes have
                self._fail(error)
        self._end_builders()  # here, too: after a time-out nobody waits for us

    def _listen(self) -> None:
        """Take what processes say, or wait for the engine where nobody will listen to them any more."""
        if self._failure is not None:
            self._is_asked.wait()
            self._is_asked.clear()
            return
        try:
            responses = self._processes.pool.wait(None)
        except WorkerDiedError as error:
            self._recover(error)
            return
        for response in responses:
            self._take(response)

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._all_started(error)

    def _has_started(self, builder: Any) -> bool:
        return builder in self._started

    def _all_started(self, error: BaseException | None) -> None:
        on_start, self._on_start = self._on_start, None
        if on_start is not None:
            on_start(error)

    def _new(self, build: Build[Delivered]) -> _ProcessBuild:
        return _ProcessBuild(build=build)

    def _choose(self, remote: _ProcessBuild, loads: Counter[Any]) -> int:
        return min(range(self.num_builders), key=loads.__getitem__)

    def _goes_on(self, remote: _ProcessBuild) -> bool:
        """See `RemoteBuilders`. What goes to several processes is taken apart instead."""
        if remote.whole is not None:
            return True  # its build does
        if not super()._goes_on(remote):
            return False
        chunk = chunk_of(remote.build)
        is_one = remote.build.progress is None and len(chunk.plan.sizes) == 1
        parts = self._sharing.parts(chunk.rows.num_rows, self.num_builders) if is_one else []
        if not parts:
            return True
        remote.build.progress, remote.num_parts = remote, len(parts)
        with self._lock:
            self._assigned[remote.number] = remote
        for rows in parts:
            self._part -= 1
            self._queue(_ProcessBuild(build=remote.build, whole=remote, rows=rows, part=self._part))
        return False

    def _kind_of(self, remote: _ProcessBuild) -> int:
        return WorkerMessage.TASK if remote.whole is None else WorkerMessage.PART

    def _content(self, part: _ProcessBuild) -> tuple[Any, ...]:
        whole = part.whole or part
        if whole.memory is None:  # else a process has had it, and died
            chunk = chunk_of(whole.build)
            with self._context.guards.loading():
                whole.serialized, whole.memory = serialize(
                    chunk.plan,
                    chunk.rows,
                    staged_outputs(self._context.settings.outputs),
                    self._region.arena,
                    by_file=self._reads_files,
                )
            whole.leases.append(whole.memory)
        where = self._offset_of(whole.memory), len(whole.memory)
        if part is not whole:
            return whole.number, whole.serialized, part.rows, *where
        return whole.serialized, whole.num_added, whole.places, *where

    def _offset_of(self, memory: NDArray[np.uint8]) -> int:
        return self._region.offset_of(memory.__array_interface__["data"][0])

    def _send(self, remote: _ProcessBuild, kind: int, content: Any = None) -> None:
        self._processes.pool.send(remote.builder, WorkerRequest(kind, remote.number, content))

    def _take(self, response: WorkerResponse) -> None:
        """Take a process's message about itself, or about a chunk."""
        process, kind = response.runner, response.kind
        with self._lock:
            remote = self._assigned.get(response.task)
        is_charged = remote is not None and kind == WorkerResult.BATCH
        obj = self._processes.unpack(response, self._give_back if is_charged else None)
        if kind == WorkerResult.OPENED:
            self._num_starting -= 1
            with self._lock:
                self._started.add(process)
                self._note_busy()
            if obj is not None:
                self._fail(obj.restored())
            elif not self._num_starting:
                self._all_started(None)
        elif remote is not None and remote.builder == process and kind == WorkerResult.STALE:
            _log.info(
                "builder process %d cannot read files of this one (%s): it is sent values", process, obj
            )
            self._reads_files = False
            whole = remote.whole or remote
            whole.serialized = whole.memory = None
            self._lose(remote, None)
        elif remote is not None and remote.builder == process and kind == WorkerResult.PART:
            self._take_part(remote, obj)
        elif remote is not None and remote.builder == process:
            self._take_response(remote, kind, obj, response.total)

    def _take_part(self, part: _ProcessBuild, result: MadePart) -> None:
        """Keep what was made of a part; with the last, a process makes the batch."""
        self._sharing.note(result.sample_s)
        whole = part.whole
        assert whole is not None
        with self._lock:
            self._cpu_s += result.cpu_s
            self._assigned.pop(part.number)
            self._note_busy()
        whole.num_parts -= 1
        whole.parts_s += result.build_s
        if result.memory is not None:
            copy = self._region.arena.lease(nbytes := len(result.memory))
            copy[:nbytes] = result.memory
            whole.leases.append(copy)
            whole.places.append((self._offset_of(copy), nbytes, result.layout))
        if not whole.num_parts:
            self._queue(whole)

    def _add(self, whole: _ProcessBuild, built: BuiltBatches, slot_bytes: int) -> None:
        """See `RemoteBuilders`. What its parts took belongs to the batch."""
        if built.sample_s is not None:
            self._sharing.note(built.sample_s)
        part_s, whole.parts_s = whole.parts_s, 0.0
        made_bytes = built.made_bytes + sum(nbytes for _, nbytes, _ in whole.places)
        super()._add(whole, built._replace(build_s=built.build_s + part_s, made_bytes=made_bytes), slot_bytes)

    def _end(self, remote: _ProcessBuild, error: BaseException | None) -> None:
        whole = remote.whole or remote
        if whole.num_parts:  # nobody waits for them any more
            with self._lock:
                self._tasks = [task for task in self._tasks if task[1].whole is not whole]
                heapq.heapify(self._tasks)
                for part in [part for part in self._assigned.values() if part.whole is whole]:
                    del self._assigned[part.number]
        whole.serialized = whole.memory = None
        whole.leases.clear()
        super()._end(whole, error)

    # ---- deaths -------------------------------------------------------------------------------------------

    def _recover(self, error: WorkerDiedError) -> None:
        """Replace processes that have died, and have their chunks built again."""
        for process, _, _ in error.workers:
            with self._lock:
                self._started.discard(process)
            builds = self._builds_of(process)
            culprit = next((remote for remote in builds if remote.is_active), None)  # what it was at
            for remote in builds:
                self._lose(remote, error if remote is culprit else None)
        # A signal to all processes, or two that the kernel kills for memory, are one accident.
        died, now = {process for process, _, _ in error.workers}, self._now()
        is_new = now - self._accident_s > _ONE_ACCIDENT_S or bool(died & self._struck)
        if is_new:
            self._accident_s, self._struck = now, set()
        self._struck |= died
        if is_new and self.num_restarts == self._max_restarts:
            self._fail(error)
            return
        self.num_restarts += is_new
        _log.warning(
            "%s Its chunks are built again in another process (%d of max_worker_restarts=%d).",
            *(error, self.num_restarts, self._max_restarts),
        )
        for process, _, _ in error.workers:
            self._processes.pool.replace(process)

    def _death_error(self, remote: _ProcessBuild) -> WorkerDiedError:
        before, last = remote.deaths
        error = WorkerDiedError(last.workers, last.memory)  # another chunk may have the same one
        error.add_note(f"{MOST_DEATHS} processes have died on the same batches; before: {before}")
        return error
