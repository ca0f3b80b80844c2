"""Builders that are processes: they take staged chunks, and give back batches in shared memory.

The thread that hands out (`hand_out`) copies a chunk's values to where the processes see them (`shipped`),
sends the chunk to the process that has least to do, and takes what they respond. A process that dies is
replaced by one that works in a region of its own; the pages of the dead one's go with its last batch.
"""

from __future__ import annotations

import json
import logging
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.batch.at_work import sample_text
from dataflow.batch.delivered import Delivered
from dataflow.outputs.output import staged_outputs
from dataflow.processes.builder_main import BuilderJob, BuilderMessage, BuilderResponse, BuilderResult, run
from dataflow.processes.hand_out import MOST_DEATHS, RemoteBuild, RemoteBuilders, chunk_of
from dataflow.processes.payload import MESSAGE_HEAD, PackedObject, pack, unpack, write_packed
from dataflow.processes.server import BUILDER_MAIN, server_needs, start_context
from dataflow.processes.shipped import ShippedChunk, ship
from prefetch.engine.builders import Build
from prefetch.engine.pool import place_in
from prefetch.errors import EngineClosedError
from prefetch.memory.device import register_pinned
from prefetch.memory.guards import FileGuards
from prefetch.work import Task
from prefetch.workers.pool import WorkerDiedError, WorkerPool
from prefetch.workers.shared_arena import Region, SharedFile
from prefetch.workers.worker_start import ABOUT
from sharding.errors import SampleError

_INPUTS_IN_LIMIT = 8
"""Free memory for chunks' values is kept up to this part of the limit: those of all processes take less."""
_log = logging.getLogger("dataflow")


@dataclass(eq=False, kw_only=True)
class _ProcessBuild(RemoteBuild):
    """A build for processes; `builder` is a process's number."""

    shipped: ShippedChunk | None = None
    memory: NDArray[np.uint8] | None = None
    """Its values, from when it is shipped until it ends."""


class ProcessBuilders(RemoteBuilders[_ProcessBuild]):
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

    Raises `ValueError` for functions that cannot be sent.
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
        super().__init__(num_builders, decide=decide)
        self._job, self._guards, self._give_back = job, guards, give_back
        self._is_asked = threading.Event()
        """Set with each call, for the thread that has no processes to listen to."""
        self._max_restarts, self.num_restarts = max_restarts, 0
        self._on_start, self._num_starting = on_start, num_builders
        self._started: set[int] = set()
        """Processes that have said that they are there."""
        self._reads_files = True
        """Whether processes read what lies in files that are open here; not once one of them could not."""
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
            self._region = Region(
                self.file.fd, own, self.file.region_bytes, job.limit_bytes // _INPUTS_IN_LIMIT
            )
        except BaseException:
            self.file.close()
            raise
        self._pool: WorkerPool | None = None
        """Opened in the thread: where a fork server must start first, that takes a second or two."""
        self._start(partial(self._run, packed, context), initializer)

    # ---- for the engine -----------------------------------------------------------------------------------

    def has(self, build: Build[Delivered]) -> bool:
        """Whether a chunk that was begun is built here."""
        return isinstance(build.progress, _ProcessBuild)

    def places(self) -> list[str]:
        """See `Builders`."""
        with self._lock:
            builds = dict(sorted(self._assigned.items()))
        busy = dict.fromkeys(
            one.builder for one in builds.values() if one.is_active and one.builder is not None
        )
        if self._pool is None:
            return []
        pids = {n: self._pool.known_pid(n) for n in busy}
        return [
            f"in builder process {n} (pid {pid}){'' if at else self._standing(n, builds)}"
            if pid
            else f"in builder process {n}, which has not started: the server that it comes from is importing"
            for at, (n, pid) in enumerate(pids.items())
        ]

    def _standing(self, process: int, builds: Mapping[int, _ProcessBuild]) -> str:
        """Function, line and sample that a process is at, in words; "" where it does not say so in time."""
        assert self._pool is not None
        _, is_told, told = self._pool.about(process).rpartition(ABOUT)
        if not is_told:  # it runs code that lets no other run
            place = place_in(told)
            return f", {place}" if place else ""
        place, chunk, row = json.loads(told)
        one = builds.get(chunk)
        sample = "" if one is None or row < 0 else sample_text(chunk_of(one.build).rows, row)
        return f", {place}{sample}" if place else sample

    def _wake(self) -> None:
        self._is_asked.set()
        if self._pool is not None:
            self._pool.wake()

    def _end_builders(self) -> None:
        if self._pool is not None and self._on_start is not None:  # others build meanwhile: nobody waits
            self._pool.close(stop_s=0, is_early=True)
        elif self._pool is not None:
            self._pool.close()
        self._on_start = None
        self.file.close()

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
        self._end_builders()  # here, too: after a time-out nobody waits for us

    def _opened(self, packed: PackedObject, context: BaseContext | None) -> WorkerPool:
        return WorkerPool(
            run,
            self.num_builders,
            self.file,
            record_fields=len(BuilderResponse._fields),
            context=context,
            needs=server_needs(packed.modules, BUILDER_MAIN),
            passed=[fd for fd, _ in packed.shared],
            region_limit=self._job.limit_bytes // self.num_builders,
        )

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

    def _choose(self, one: _ProcessBuild, loads: Counter[Any]) -> int:
        return min(range(self.num_builders), key=loads.__getitem__)

    def _begin(self, one: _ProcessBuild, builder: int) -> None:
        chunk = chunk_of(one.build)
        try:
            if one.build.is_cancelled:
                raise EngineClosedError("the loader was closed while the batch was built")
            if one.memory is None:  # else a process has had it, and died
                with self._guards.loading():
                    one.shipped, one.memory = ship(
                        chunk.plan,
                        chunk.rows,
                        staged_outputs(self._job.outputs),
                        self._region.arena,
                        by_file=self._reads_files,
                    )
        except BaseException as error:
            self._end(one, error)
            return
        self._assign(one, builder)
        offset = self._region.offset_of(one.memory.__array_interface__["data"][0])
        self._send(one, BuilderMessage.BUILD, (one.shipped, one.num_added, offset, len(one.memory)))

    def _send(self, one: _ProcessBuild, kind: int, content: Any = None) -> None:
        process: int = one.builder
        message = kind, one.build.number, content, self.file.take_returned(self._regions[process])
        assert self._pool is not None
        self._pool.send(process, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _take(self, response: BuilderResponse) -> None:
        """What a process says of itself, or of a chunk."""
        process, nbytes = response.builder, 0
        with self._lock:
            one = self._assigned.get(response.chunk)
        is_charged = one is not None and response.kind == BuilderResult.BATCHES

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
            with self._lock:
                self._started.add(process)
                self._note_busy()
            if obj is not None or not self._num_starting:
                self._all_started(None if obj is None else obj.restored())
        elif one is not None and one.builder == process and response.kind == BuilderResult.STALE:
            _log.info(
                "builder process %d cannot read files of this one (%s): it is sent values", process, obj
            )
            self._reads_files = False
            one.shipped = one.memory = None
            self._lose(one, None)
        elif one is not None and one.builder == process:
            self._take_response(one, response.kind, obj, nbytes)

    def _end(self, one: _ProcessBuild, error: BaseException | None) -> None:
        one.shipped = one.memory = None
        super()._end(one, error)

    # ---- deaths -------------------------------------------------------------------------------------------

    def _recover(self, pool: WorkerPool, error: WorkerDiedError) -> None:
        """Replace processes that have died, and have their chunks built again."""
        for process, _, _ in error.workers:
            with self._lock:
                self._started.discard(process)
            self._lose_all(process, error)
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

    def _lose_all(self, process: int, error: WorkerDiedError) -> None:
        """Take chunks from a process that has died; the most urgent one is what it was at."""
        with self._lock:
            builds = [one for _, one in sorted(self._assigned.items()) if one.builder == process]
        culprit = next((one for one in builds if one.is_active), None)
        for one in builds:
            self._lose(one, error if one is culprit else None)

    def _death_error(self, one: _ProcessBuild) -> WorkerDiedError:
        before, last = one.deaths
        error = WorkerDiedError(last.workers, last.memory)  # another chunk may have the same one
        error.add_note(f"{MOST_DEATHS} processes have died on the same batches; before: {before}")
        return error
