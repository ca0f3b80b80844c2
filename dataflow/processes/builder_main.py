"""A builder builds chunks, and delivers batches a few at a time; and its process's main.

It knows nothing of shards: what it builds was sent (`serialized`). Two things it asks the training process,
and waits for the answer: what an error is to say of a sample, and whether that is left out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data._utils import worker as torch_worker

from dataflow.batch.at_work import row_at
from dataflow.batch.builder import BatchBuilder, BuildContext, BuildSettings
from dataflow.batch.delivered import Delivered
from dataflow.outputs.columns import ChunkRows
from dataflow.processes.parts import PartMaker, sharing_s
from dataflow.processes.serialized import SampleErrorOf, SerializedChunk, serialized_rows
from dataflow.staging.window import FileParts
from prefetch.engine.pool import context_of
from prefetch.errors import EngineClosedError
from prefetch.ipc.generators import seed_by_key
from prefetch.ipc.payload import unpack
from prefetch.ipc.pipe import PipeTransport, run_worker
from prefetch.ipc.protocol import (
    RemoteError,
    WorkerLoop,
    WorkerMessage,
    WorkerRequest,
    WorkerResult,
)
from prefetch.memory.arena import Arena, HeapKeeper
from prefetch.memory.guards import FileGuards
from prefetch.memory.open_files import OpenFiles, StaleFileError
from prefetch.work import PartialChunk
from prefetch.workers.shared_arena import mapped
from prefetch.workers.worker_start import WorkerStart
from sharding.errors import SampleError

_READ_IN_LIMIT = 8
"""Free memory for values that are read from files is kept up to this part of a process's limit."""


def run(start: WorkerStart) -> None:
    """A builder process, from its start to its end."""
    run_worker(start, _opened, _standing_at)


def _opened(loop: WorkerLoop, transport: PipeTransport) -> Callable[[WorkerRequest], None]:
    name = f"builder process {transport.start.worker} (pid {os.getpid()})"
    start = transport.start
    try:
        job: BuilderJob = transport.read_job()
        settings = job.settings
        info: Any = torch_worker.WorkerInfo  # which says that there is a dataset
        seed = settings.seed + start.worker
        torch_worker._worker_info = info(
            id=start.worker, num_workers=start.num_workers, seed=seed, dataset=None
        )
        if job.worker_init_fn is not None:
            job.worker_init_fn(start.worker)
        transport.writer.takes_parts = not settings.is_pinned
        transport.region.arena.is_flexible = True
        inputs, arena = _SharedInputs(transport.start), transport.region.arena
        task = BuildTask(name, loop, inputs, settings=settings, arena=arena)
    except Exception as error:
        loop.respond(WorkerResult.OPENED, -1, RemoteError.of(error, name))
        return lambda request: None  # nobody waits for what was sent before that was heard
    loop.respond(WorkerResult.OPENED, -1, None)
    return task.serve


class BuilderJob(NamedTuple):
    """All that builder processes of a session have in common."""

    settings: BuildSettings
    worker_init_fn: Callable[[int], Any] | None


@dataclass(eq=False)
class _Build:
    """A chunk that is being built."""

    parts: Iterator[PartialChunk[Delivered]]
    num_left: int
    """Batches that were not delivered."""
    num_skipped: int = 0
    """Number of the first ones to come, which another builder delivered before it died."""
    unasked_bytes: int = 0
    """Made since the training process last said that it may go on."""


class BuiltBatches(NamedTuple):
    """Batches of a chunk on their way to the training process, in order."""

    batches: list[tuple[Any, ...]]
    """The fields of each `Delivered`."""
    heap_bytes: int
    made_bytes: int
    flush_now: bool
    """See the field of `PartialChunk`."""
    is_last: bool
    """True if no others follow."""
    asks: bool
    """True if the builder waits to be told to go on."""
    cpu_s: float
    """Processor time of the process since it last delivered."""
    build_s: float
    """Seconds since then, or since it went on with the chunk."""
    sample_s: float | None = None
    """See `sharing_s`; None: nothing new is known of it."""


class ChunkInputs(Protocol):
    """The addresses of the values of the chunks' rows."""

    def rows(self, number: int, error_of: SampleErrorOf, chunk: Any, *where: Any) -> ChunkRows:
        """The rows of a chunk, as it was sent. `error_of` asks for the errors of its samples."""
        ...

    def samples(self, made: Any) -> dict[int, Any]:
        """Return the samples of a chunk that others made, by row."""
        ...

    def release(self, number: int, *, is_built: bool) -> None:
        """The rows of a chunk are needed no more. May raise, if it is built."""
        ...


class BuildTask:
    """Builds chunks as requests say, and asks where it must.

    Args:
        name: of the builder, in errors.
        loop: that serves the requests.
        inputs: of the chunks.
        settings: what all chunks have in common.
        arena: where batches are made.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        name: str,
        loop: WorkerLoop,
        inputs: ChunkInputs,
        *,
        settings: BuildSettings,
        arena: Arena,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name, self._loop, self._inputs = name, loop, inputs
        self._builds: dict[int, _Build] = {}
        self.chunk = -1
        """The one that is being built."""
        self._sample_s: float | None = None
        """See `BuiltBatches`, for the last batch."""
        seed_by_key(0)  # imports numpy's generators while the first chunk is not there yet
        self._context = BuildContext(
            settings=settings,
            on_bad=self._decide,
            arena=arena,
            guards=FileGuards(),
            on_return=lambda nbytes: lambda: None,
            closing=threading.Event(),
            heap=HeapKeeper(settings.limit_bytes // settings.num_builders),
            seed_globals=seed_by_key,
            now=now,
            on_samples=self._note_samples,
        )
        self._parts = PartMaker(self._context, inputs.rows)
        self._cpu_s = time.process_time()
        """Processor time of this process up to the last batches that were delivered."""
        self._resumed_s = now()
        """The time of that, or from when on it is at the chunk."""

    def serve(self, request: WorkerRequest) -> None:
        """Begin or go on with a chunk. Raises only `EngineClosedError`, when nobody wants it any more."""
        self.chunk, self._resumed_s = request.task, self._context.now()
        try:
            if request.kind == WorkerMessage.PART:
                part = self._parts.make(*request.content)
                self._loop.respond(WorkerResult.PART, self.chunk, part._replace(cpu_s=self._spent()[1]))
                return
            if request.kind == WorkerMessage.TASK:
                self._builds[self.chunk] = self._begin(*request.content)
            del request
            self._go_on(self._builds[self.chunk])
        except EngineClosedError:
            raise
        except StaleFileError as error:
            self._builds.pop(self.chunk, None)
            self._loop.respond(WorkerResult.STALE, self.chunk, str(error))
        except Exception as error:
            self._builds.pop(self.chunk, None)
            self._inputs.release(self.chunk, is_built=False)
            self._loop.respond(WorkerResult.ERROR, self.chunk, RemoteError.of(error, self._name))

    def _error_of(self, row: int, reason: str, column: str | None, stage: str) -> SampleError:
        error: SampleError = self._loop.ask(self.chunk, ("error", row, reason, column, stage))
        return error

    def _decide(self, error: SampleError) -> bool:
        is_left_out, notes = self._loop.ask(self.chunk, ("decide", RemoteError.of(error, self._name)))
        for note in notes:
            error.add_note(note)
        return bool(is_left_out)

    def _begin(self, chunk: Any, num_skipped: int, places: Any, *where: Any) -> _Build:
        self._parts.forget()
        rows = self._inputs.rows(self.chunk, self._error_of, chunk, *where)
        builder = BatchBuilder(self._context, chunk.plan, rows)
        for decode in builder.begin():
            decode()
        builder.made = self._inputs.samples(places) if places else {}
        return _Build(builder.finish(), len(chunk.plan.sizes) - num_skipped, num_skipped)

    def _note_samples(self, sample: Any, sample_s: float) -> None:
        """Note what samples of a batch took, if others may make such samples."""
        self._sample_s = sharing_s(sample, sample_s)

    def _spent(self) -> tuple[float, float]:
        """Return the seconds, and the processor time, since it last delivered or went on."""
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        resumed_s, self._resumed_s = self._resumed_s, self._context.now()
        return self._resumed_s - resumed_s, self._cpu_s - cpu_s

    def _go_on(self, build: _Build) -> None:
        """Make batches and hand them over, until the training process is to say whether to go on.

        Memory is all that it has a say in, so it is asked when as much is made as is charged at once. To wait
        for it where batches are delivered for the time they took would leave the core to the next chunk.
        """
        build.unasked_bytes = 0
        while self._flush(build):
            pass

    def _flush(self, build: _Build) -> bool:
        """Make the next batches; whether to make more of them without being told to."""
        part = _next_part(build)
        build.num_left -= len(part.batches)
        build.unasked_bytes += part.slot_bytes + part.heap_bytes
        asks = not part.flush_now or build.unasked_bytes >= self._context.settings.charge_bytes
        if not build.num_left:
            for _ in build.parts:
                pass
            self._builds.pop(self.chunk)
            self._inputs.release(self.chunk, is_built=True)
        (build_s, cpu_s), sample_s, self._sample_s = self._spent(), self._sample_s, None
        built = BuiltBatches(
            batches=[*part.batches],
            heap_bytes=part.heap_bytes,
            made_bytes=part.made_bytes + part.slot_bytes,
            flush_now=part.flush_now,
            is_last=not build.num_left,
            asks=asks,
            cpu_s=cpu_s,
            build_s=build_s,
            sample_s=sample_s,
        )
        try:
            self._loop.respond(WorkerResult.BATCH, self.chunk, built)
        except Exception as error:  # what pickling raises
            error.add_note('a process cannot hand over such a batch: with workers="thread" it is not sent')
            raise
        return not asks


def _next_part(build: _Build) -> PartialChunk[tuple[Any, ...]]:
    """The next batches that were not delivered, and what is charged for them."""
    slot_bytes = 0
    for part in build.parts:
        slot_bytes += part.slot_bytes
        batches = [tuple(delivered) for delivered in part.batches]
        new = batches[build.num_skipped :]
        build.num_skipped -= len(batches) - len(new)
        if new:
            return PartialChunk(new, slot_bytes, part.heap_bytes, part.flush_now, made_bytes=part.made_bytes)
    raise AssertionError("a chunk has fewer batches than planned")


def _standing_at(frame: FrameType | None) -> str:
    """Return where a builder process's stack stands, and the numbers of the chunk and of its row, if any.

    Which sample that is the training process knows.
    """
    context, position, task = context_of(frame), row_at(frame), frame
    while task is not None and task.f_code is not BuildTask.serve.__code__:
        task = task.f_back
    chunk = -1 if task is None else task.f_locals["self"].chunk
    return json.dumps([context, chunk, -1 if position is None else position[1]])


class _SharedInputs:
    """Implements `ChunkInputs`: values in memory of the training process, or in files that it has open.

    That memory is its region of the shared file, behind those of the first builders.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._offset = start.first_region + start.num_workers * start.region_bytes
        self._memory = mapped(start.memory.fd, start.region_bytes, self._offset)
        self._files = OpenFiles()
        self._read_values = Arena(limit_bytes=start.region_limit // _READ_IN_LIMIT)
        """For values that lie in files."""

    def rows(
        self, number: int, error_of: SampleErrorOf, chunk: SerializedChunk, offset: int, nbytes: int
    ) -> ChunkRows:
        """See `ChunkInputs`."""
        memory: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, nbytes, offset - self._offset)
        return serialized_rows(chunk, memory, error_of, self._read)

    def _read(self, parts: FileParts, nbytes: NDArray[np.int64]) -> NDArray[np.uint8]:
        values = self._read_values.lease(int(nbytes.sum()) or 1)
        self._files.read(parts.files, parts.numbers, parts.offsets, nbytes, values)
        return values

    def samples(self, made: Sequence[tuple[int, int, tuple[int, int, int]]]) -> dict[int, Any]:
        """See `ChunkInputs`: offset and bytes of each part, and how it is packed."""
        samples = dict[int, Any]()
        for offset, nbytes, layout in made:
            memory: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, nbytes, offset - self._offset)
            samples |= unpack(memory.copy(), *layout)  # functions of the user's may keep them
        return samples

    def release(self, number: int, *, is_built: bool) -> None:
        """See `ChunkInputs`."""
