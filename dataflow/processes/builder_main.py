"""What a builder process does: it builds chunks, and hands batches over in shared memory, a few at a time.

It knows nothing of shards: what it builds has crossed (`shipped`). Two things it asks the training process,
and waits for the answer: what an error is to say of a sample, and whether that is left out.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils import collate

from dataflow.batch.at_work import row_at
from dataflow.batch.builder import BatchBuilder, BuildContext, Postprocessing
from dataflow.batch.delivered import Delivered
from dataflow.outputs.columns import ChunkRows
from dataflow.outputs.output import Output
from dataflow.processes.batch_writer import BatchWriter
from dataflow.processes.generators import seed_by_key
from dataflow.processes.payload import pack, read_packed
from dataflow.processes.shipped import ShippedChunk, shipped_rows
from dataflow.staging.window import FileParts
from prefetch.engine.pool import place_of
from prefetch.errors import EngineClosedError
from prefetch.memory.arena import Arena, HeapKeeper
from prefetch.memory.guards import FileGuards
from prefetch.memory.open_files import OpenFiles, StaleFileError
from prefetch.work import Piece
from prefetch.workers.shared_arena import Header, Region
from prefetch.workers.worker_start import WorkerStart, begin
from sharding.errors import SampleError

_READ_IN_LIMIT = 8
"""Free memory for values that are read from files is kept up to this part of a process's limit."""


class BuilderMessage:
    """Kinds of messages to a builder process: build a chunk, go on with one, an answer."""

    BUILD, GO_ON, ANSWER = range(3)


class BuilderResult:
    """Kinds of responses: batches, an error that ends a chunk, a question, the process's own beginning.

    And that it cannot read files of the training process, so that a chunk must be sent with its values.
    """

    BATCHES, ERROR, QUESTION, READY, STALE = range(5)


class BuilderResponse(NamedTuple):
    """What a builder process says. Offsets count from the beginning of the shared file."""

    kind: int
    builder: int
    chunk: int
    offset: int
    nbytes: int
    meta: int
    meta_bytes: int
    table: int
    placed: int
    """Ranges of shared memory that it holds beside its own, listed at its end."""


@dataclass(frozen=True, kw_only=True)
class BuilderJob:
    """What all chunks of a session have in common, as it crosses."""

    outputs: Sequence[Output]
    postprocessing: Postprocessing
    seed: int
    charge_bytes: int
    hand_over_s: float
    limit_bytes: int
    num_builders: int
    is_pinned: bool
    """Whether the training process page-locks what it views: whole slabs only, so batches are copied."""
    collate_map: Mapping[Any, Any]
    """What was registered with torch's `default_collate`."""
    default_dtype: torch.dtype


@dataclass(frozen=True)
class CrossedError:
    """An exception on its way to the training process, with what it was raised from."""

    error: BaseException
    cause: CrossedError | None
    place: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> CrossedError:
        """An exception in a process as it crosses; one that does not pickle crosses as its text."""
        text = "".join(traceback.format_exception(error, chain=False))
        sendable = error
        try:
            pickle.loads(pack(error).meta)
        except Exception:
            sendable = RuntimeError(f"{type(error).__name__}: {error}")
        cause = None if error.__cause__ is None else cls.of(error.__cause__, where)
        return cls(sendable, cause, f"in {where}:\n{text}")

    def restored(self) -> BaseException:
        """The exception, whose traceback is a note."""
        self.error.__cause__ = None if self.cause is None else self.cause.restored()
        if self.cause is None:
            self.error.add_note(self.place)
        return self.error


def run(start: WorkerStart) -> None:
    """A builder process, from its start to its end."""
    try:
        begin(start, _standing_at)
        torch.set_num_threads(1)
        _BuilderProcess(start).serve()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent hears Ctrl-C itself, or has gone


@dataclass(eq=False)
class _Build:
    """A chunk that is being built."""

    pieces: Iterator[Piece[Delivered]]
    num_left: int
    """Batches that were not handed over."""
    num_skipped: int = 0
    """Of those to come, the first ones, which another builder has handed over before it died."""
    unasked_bytes: int = 0
    """Made since the training process last said that it may go on."""


class BuiltBatches(NamedTuple):
    """Batches of a chunk on their way to the training process, in order."""

    batches: list[tuple[Any, ...]]
    """Fields of each `Delivered`."""
    heap_bytes: int
    made_bytes: int
    is_due: bool
    """As of a `Piece`."""
    is_last: bool
    """Whether no others follow."""
    asks: bool
    """Whether the builder waits to be told to go on."""
    cpu_s: float
    """Processor time of the process since it last handed over."""


class BuilderLoop(ABC):
    """Builds chunks one after another as messages say, and asks where it must; messages are the heir's.

    Args:
        name: of the builder, in errors.
        now: a clock, in seconds.
    """

    def __init__(self, name: str, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._name, self._now = name, now
        self._builds: dict[int, _Build] = {}
        self._waiting: deque[tuple[int, int, Any]] = deque()
        """Messages that came before an answer."""
        self._chunk = -1
        """The one that is being built."""
        self._cpu_s = 0.0
        """Processor time of this process up to the last batches that were handed over."""
        self._context: BuildContext | CrossedError = CrossedError(RuntimeError("not open"), None, name)

    def open(self, read_job: Callable[[], BuilderJob], arena: Arena) -> None:
        """Take what all chunks have in common; what fails there, each chunk is told."""
        try:
            self._context = self._opened(read_job(), arena)
        except Exception as error:
            self._context = CrossedError.of(error, self._name)
        self._cpu_s = time.process_time()

    def _opened(self, job: BuilderJob, arena: Arena) -> BuildContext:
        seed_by_key(0)  # imports numpy's generators while the first chunk is not there yet
        torch.set_default_dtype(job.default_dtype)
        collate.default_collate_fn_map.update(job.collate_map)
        return BuildContext(
            outputs=job.outputs,
            seed=job.seed,
            postprocessing=replace(job.postprocessing, on_bad=self._decide),
            arena=arena,
            guards=FileGuards(),
            on_return=lambda nbytes: lambda: None,
            closing=threading.Event(),
            heap=HeapKeeper(job.limit_bytes // job.num_builders),
            charge_bytes=job.charge_bytes,
            sample_bytes=job.limit_bytes,
            hand_over_s=job.hand_over_s,
            seed_globals=seed_by_key,
            now=self._now,
        )

    # ---- messages -----------------------------------------------------------------------------------------

    @abstractmethod
    def _receive(self) -> tuple[int, int, Any] | None:
        """Kind, chunk and content of the next message; None: there are no more."""

    @abstractmethod
    def _respond(self, kind: int, obj: Any) -> None:
        """Say something of the chunk that is being built."""

    @abstractmethod
    def _rows(self, chunk: Any, *place: Any) -> ChunkRows:
        """The rows of a chunk that has come, whose values lie at a place."""

    def _release(self, *, is_built: bool) -> None:  # noqa: B027  # nothing by default
        """The chunk that is being built needs its rows no more. May raise, if it is built."""

    def serve(self) -> None:
        """Do what the training process says until it says no more."""
        while (message := self._waiting.popleft() if self._waiting else self._receive()) is not None:
            kind, self._chunk, content = message
            del message
            try:
                if kind == BuilderMessage.BUILD:
                    self._builds[self._chunk] = self._begin(*content)
                del content
                self._go_on(self._builds[self._chunk])
            except EngineClosedError:
                return
            except StaleFileError as error:
                self._builds.pop(self._chunk, None)
                self._respond(BuilderResult.STALE, str(error))
            except Exception as error:
                self._builds.pop(self._chunk, None)
                self._release(is_built=False)
                self._respond(BuilderResult.ERROR, CrossedError.of(error, self._name))

    def _ask(self, *question: Any) -> Any:
        """What the training process says to a question about the chunk that is being built."""
        self._respond(BuilderResult.QUESTION, question)
        while (message := self._receive()) is not None:
            if message[0] == BuilderMessage.ANSWER:
                answer = message[2]
                if isinstance(answer, CrossedError):
                    raise answer.restored()
                return answer
            self._waiting.append(message)
        raise EngineClosedError("the loader was closed while the batch was built")

    def _error_of(self, row: int, reason: str, column: str | None, stage: str) -> SampleError:
        error: SampleError = self._ask("error", row, reason, column, stage)
        return error

    def _decide(self, error: SampleError) -> bool:
        is_left_out, notes = self._ask("decide", CrossedError.of(error, self._name))
        for note in notes:
            error.add_note(note)
        return bool(is_left_out)

    # ---- building -----------------------------------------------------------------------------------------

    def _begin(self, chunk: Any, num_skipped: int, *place: Any) -> _Build:
        if isinstance(self._context, CrossedError):
            raise self._context.restored()
        builder = BatchBuilder(self._context, chunk.plan, self._rows(chunk, *place))
        for decode in builder.begin():
            decode()
        return _Build(builder.finish(), len(chunk.plan.sizes) - num_skipped, num_skipped)

    def _go_on(self, build: _Build) -> None:
        """Make batches and hand them over, until the training process is to say whether to go on.

        Memory is all that it has a say in, so it is asked when as much is made as is charged at once. To wait
        for it where batches are handed over for the time they took would leave the core to the next chunk.
        """
        build.unasked_bytes = 0
        while self._hand_over(build):
            pass

    def _hand_over(self, build: _Build) -> bool:
        """Make the next batches; whether to make more of them without being told to."""
        assert isinstance(self._context, BuildContext)
        piece = _next_piece(build)
        build.num_left -= len(piece.batches)
        build.unasked_bytes += piece.slot_bytes + piece.heap_bytes
        asks = not piece.is_due or build.unasked_bytes >= self._context.charge_bytes
        if not build.num_left:
            for _ in build.pieces:
                pass
            self._builds.pop(self._chunk)
            self._release(is_built=True)
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        built = BuiltBatches(
            batches=[*piece.batches],
            heap_bytes=piece.heap_bytes,
            made_bytes=piece.made_bytes + piece.slot_bytes,
            is_due=piece.is_due,
            is_last=not build.num_left,
            asks=asks,
            cpu_s=self._cpu_s - cpu_s,
        )
        self._respond(BuilderResult.BATCHES, built)
        return not asks


def _next_piece(build: _Build) -> Piece[tuple[Any, ...]]:
    """The next batches that were not handed over, and what is charged for them."""
    slot_bytes = 0
    for piece in build.pieces:
        slot_bytes += piece.slot_bytes
        batches = [tuple(delivered) for delivered in piece.batches]
        new = batches[build.num_skipped :]
        build.num_skipped -= len(batches) - len(new)
        if new:
            return Piece(new, slot_bytes, piece.heap_bytes, piece.is_due, made_bytes=piece.made_bytes)
    raise AssertionError("a chunk has fewer batches than planned")


def _standing_at(frame: FrameType | None) -> str:
    """Of a stack of a builder process: the place, and the numbers of the chunk and of its row, if it has one.

    Which sample that is the training process knows.
    """
    place, at, loop = place_of(frame), row_at(frame), frame
    while loop is not None and loop.f_code is not BuilderLoop.serve.__code__:
        loop = loop.f_back
    chunk = -1 if loop is None else loop.f_locals["self"]._chunk
    return json.dumps([place, chunk, -1 if at is None else at[1]])


class _BuilderProcess(BuilderLoop):
    """The loop of a builder process: pipes for messages, a region of shared memory for batches."""

    def __init__(self, start: WorkerStart) -> None:
        super().__init__(f"builder process {start.worker} (pid {os.getpid()})")
        self._start = start
        self._header = Header(start.memory.fd)
        self._region = Region(start.memory.fd, start.region_offset, start.region_bytes, start.region_limit)
        self._inputs_offset = start.first_region + start.num_workers * start.region_bytes
        self._inputs = mmap.mmap(start.memory.fd, start.region_bytes, offset=self._inputs_offset)
        """The training process's own region, behind those of the first builders."""
        self._writer = BatchWriter(self._region)
        self._files = OpenFiles()
        self._read_values = Arena(limit_bytes=start.region_limit // _READ_IN_LIMIT)
        """For values that lie in files."""
        self.open(self._read_job, self._region.arena)

    def _read_job(self) -> BuilderJob:
        job: BuilderJob = self._start.inherited or read_packed(self._start)
        self._writer.takes_parts = not job.is_pinned
        return job

    def serve(self) -> None:
        """Say that it is there, or why it cannot build, and do as others do."""
        self._respond(BuilderResult.READY, self._context if isinstance(self._context, CrossedError) else None)
        super().serve()

    def _receive(self) -> tuple[int, int, Any] | None:
        try:
            data = self._start.tasks.recv_bytes()
        except (EOFError, OSError):
            return None
        if not data or self._header.get(Header.STOP):
            return None
        kind, chunk, content, returned = pickle.loads(data)
        for offset in returned:
            self._region.take_back(offset)
        return kind, chunk, content

    def _respond(self, kind: int, obj: Any) -> None:
        offset, packed = self._writer.put(obj)
        layout, placed = packed.layout, len(packed.placed)
        self._start.respond(
            BuilderResponse(kind, self._start.worker, self._chunk, offset, packed.nbytes, *layout, placed)
        )

    def _rows(self, chunk: ShippedChunk, *place: Any) -> ChunkRows:
        offset, nbytes = place
        memory: NDArray[np.uint8] = np.frombuffer(
            self._inputs, np.uint8, nbytes, offset - self._inputs_offset
        )
        return shipped_rows(chunk, memory, self._error_of, self._read)

    def _read(self, parts: FileParts, nbytes: NDArray[np.int64]) -> NDArray[np.uint8]:
        values = self._read_values.lease(int(nbytes.sum()) or 1)
        self._files.read(parts.files, parts.numbers, parts.offsets, nbytes, values)
        return values


def never(error: SampleError) -> bool:
    """Stands for the decision about bad samples while it crosses: only the training process takes it."""
    raise AssertionError(error)
