"""An actor builds chunks one after another, of values that were sent to it or that it reads.

What crosses is as for processes (`dataflow.processes.serialized`); what an actor reads itself (`reading`) it
begins to read when the chunk is announced, while it builds the one before.

One thread builds, in the loop that builder processes have. Each method call brings a message and waits for
what the loop says to it, so several calls are under way: of chunks that are built or wait, and one that ends
with the actor only, by which the training process hears of its death at once.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dataflow.actors.reading import BlockReader, ChunkReads, ReadCounts, ReadPlan
from dataflow.batch.builder import BuildSettings
from dataflow.executors.versions import Versions
from dataflow.outputs.columns import ChunkRows
from dataflow.processes.builder_main import BuildTask
from dataflow.processes.serialized import SampleErrorOf, serialized_rows
from prefetch.engine.pool import PriorityPool
from prefetch.ipc.payload import PackedObject, pack, unpack
from prefetch.ipc.protocol import RemoteError, WorkerLoop, WorkerMessage, WorkerRequest
from prefetch.memory.arena import Arena, keep_heap

Layout = tuple[int, int, int]
"""The layout of a packed object, as `unpack` takes it."""


class ActorResponse(NamedTuple):
    """An actor's message about a chunk; the batches that it delivers follow as an object of their own."""

    kind: int
    """The kind of response, a `WorkerResult`."""
    nbytes: int
    layout: Layout
    counts: ReadCounts = ReadCounts()


class ActorInfo(NamedTuple):
    """The process and node that an actor runs in, and its versions."""

    pid: int
    node: str
    versions: Versions


def packed_bytes(packed: PackedObject) -> NDArray[np.uint8]:
    """A packed object in one piece."""
    memory = np.empty(packed.nbytes, np.uint8)
    packed.copy_to(memory.ctypes.data)
    return memory


class _CallTransport:
    """Implements `Transport` by calls of a method. Ray's store has what is responded."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[WorkerRequest] = queue.SimpleQueue()
        self._responses: dict[int, queue.SimpleQueue[tuple[ActorResponse, Any]]] = {}
        """By number of the chunk: where the call that waits for it looks."""

    def send(self, request: WorkerRequest) -> queue.SimpleQueue[tuple[ActorResponse, Any]]:
        """Give the task a request; gives where the response will be."""
        responses = self._responses[request.task] = queue.SimpleQueue()
        self._requests.put(request)
        return responses

    def receive(self) -> WorkerRequest:
        """See `Transport`."""
        return self._requests.get()

    def respond(self, kind: int, task: int, obj: Any, generation: int = 0) -> None:
        """See `Transport`."""
        packed = pack(obj)
        response = ActorResponse(kind, packed.nbytes, packed.layout)
        self._responses.pop(task).put((response, packed_bytes(packed)))


class _ActorInputs:
    """Implements `ChunkInputs`: values that Ray has brought, or that are read here."""

    def __init__(self) -> None:
        self._reading: dict[int, ChunkReads] = {}
        """By number of the chunk: those whose values are read here."""

    def rows(self, number: int, error_of: SampleErrorOf, chunk: Any, *where: Any) -> ChunkRows:
        """See `ChunkInputs`."""
        (values,) = where
        if isinstance(values, Exception):
            raise values
        if isinstance(values, ChunkReads):
            self._reading[number] = values
            return values.rows()
        return serialized_rows(chunk, values, error_of)

    def samples(self, content: Any) -> dict[int, Any]:
        """See `ChunkInputs`: each actor makes those of its own batches."""
        return {}

    def release(self, number: int, *, is_built: bool) -> None:
        """See `ChunkInputs`."""
        reading = self._reading.pop(number, None)
        if reading is not None:
            reading.close(is_built=is_built)


def _build(name: str, transport: _CallTransport, settings: BuildSettings, arena: Arena) -> None:
    """Build until the process ends."""
    torch.set_num_threads(1)
    loop = WorkerLoop(transport)
    loop.run(BuildTask(name, loop, _ActorInputs(), settings=settings, arena=arena).serve)


def _begun(reader: BlockReader, chunk: ReadPlan) -> ChunkReads | Exception:
    """A chunk whose reads have begun, or why they cannot: that is told when it is built."""
    try:
        return reader.begin(chunk)
    except Exception as error:
        return error


_KEPT_BYTES = 256 << 20
"""Bytes of slots that an actor keeps for the next chunk."""
_KEPT_SHARE = 4
"""An actor keeps decoded blocks for chunks to come, of so large a part of the loader's limit."""


class BuilderActor:
    """Builds chunks for one rank of one training process. Methods run in threads of Ray."""

    def __init__(self) -> None:
        self._transport = _CallTransport()
        self._pool: PriorityPool | None = None
        """The one thread that builds."""
        self._reader: BlockReader | None = None
        self._ended = threading.Event()

    def info(self) -> ActorInfo:
        """Return where it runs; before it is sent anything."""
        return ActorInfo(os.getpid(), platform.node(), Versions.here())

    def open(self, name: str, packed: NDArray[np.uint8], layout: Layout) -> RemoteError | None:
        """Take what all chunks have in common, and look whether its shards are there; gives what fails."""
        keep_heap()
        arena = Arena(limit_bytes=_KEPT_BYTES)
        try:
            in_torch, settings, datasets = unpack(packed.copy(), *layout)  # Ray's memory is read-only
            in_torch.apply()
            if datasets:
                kept_bytes = settings.limit_bytes // _KEPT_SHARE
                self._reader = BlockReader(datasets, arena, kept_bytes, seed=settings.seed)
                self._reader.check(name)
        except Exception as error:
            return RemoteError.of(error, name)
        self._pool = PriorityPool(1, "dataflow-build")
        self._pool.submit(0, partial(_build, name, self._transport, settings, arena))
        return None

    def handle(self, kind: int, number: int, content: Any, memory: Any) -> tuple[ActorResponse, Any]:
        """Return what there is to say to a message about a chunk.

        `memory`: with the stored values of the chunk; an argument of its own, which Ray's store takes.
        """
        if memory is not None:
            content = (*content, memory)
        elif self._reader is not None and kind == WorkerMessage.TASK:
            content = (*content, _begun(self._reader, content[0]))
        responses = self._transport.send(WorkerRequest(kind, number, content))
        del content, memory  # the task has them until the chunk is built
        response, packed = responses.get()
        if self._reader is not None:
            response = response._replace(counts=self._reader.take_counts())
        return response, packed

    def heartbeat(self) -> None:
        """Never return: the call fails when the actor dies."""
        self._ended.wait()
