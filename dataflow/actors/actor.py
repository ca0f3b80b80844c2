"""What an actor does: it builds chunks one after another, of values that have crossed or that it reads.

What crosses is as for processes (`dataflow.processes.shipped`); what an actor reads itself (`reading`) it
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

from dataflow.actors.cluster import Versions
from dataflow.actors.reading import BlockReader, ChunkReads, ReadCounts, ReadPlan
from dataflow.outputs.columns import ChunkRows
from dataflow.processes.builder_main import BuilderJob, BuilderLoop, BuilderMessage, CrossedError
from dataflow.processes.payload import PackedObject, pack, unpack
from dataflow.processes.shipped import shipped_rows
from prefetch.engine.pool import PriorityPool
from prefetch.memory.arena import Arena

Layout = tuple[int, int, int]
"""What `unpack` needs to know of a packed object."""


class ActorResponse(NamedTuple):
    """What an actor says of a chunk; what it means to hand over follows as an object of its own."""

    kind: int
    """A `BuilderResult`."""
    nbytes: int
    layout: Layout
    counts: ReadCounts = ReadCounts()


class ActorPlace(NamedTuple):
    """Where an actor runs, and what."""

    pid: int
    node: str
    versions: Versions


def packed_bytes(packed: PackedObject) -> NDArray[np.uint8]:
    """A packed object in one piece."""
    memory = np.empty(packed.nbytes, np.uint8)
    packed.copy_to(memory.ctypes.data)
    return memory


class _ActorLoop(BuilderLoop):
    """The loop of an actor: queues for messages, objects in Ray's store for batches."""

    def __init__(self, name: str, arena: Arena) -> None:
        super().__init__(name)
        self._arena = arena
        self._reading: dict[int, ChunkReads] = {}
        """By number of the chunk: those whose values are read here."""
        self.messages: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self.responses: dict[int, queue.SimpleQueue[Any]] = {}
        """By number of the chunk: where the call that waits for it looks."""

    def run(self, job: BuilderJob) -> None:
        """Build until the process ends."""
        torch.set_num_threads(1)
        self.open(lambda: job, self._arena)
        self.serve()

    def _receive(self) -> tuple[int, int, Any]:
        return self.messages.get()

    def _respond(self, kind: int, obj: Any) -> None:
        packed = pack(obj)
        response = ActorResponse(kind, packed.nbytes, packed.layout)
        self.responses.pop(self._chunk).put((response, packed_bytes(packed)))

    def _rows(self, chunk: Any, *place: Any) -> ChunkRows:
        (values,) = place
        if isinstance(values, Exception):
            raise values
        if isinstance(values, ChunkReads):
            self._reading[self._chunk] = values
            return values.rows()
        return shipped_rows(chunk, values, self._error_of)

    def _release(self, *, is_built: bool) -> None:
        reading = self._reading.pop(self._chunk, None)
        if reading is not None:
            reading.close(is_built=is_built)


def _begun(reader: BlockReader, chunk: ReadPlan) -> ChunkReads | Exception:
    """A chunk whose reads have begun, or why they cannot: that is told when it is built."""
    try:
        return reader.begin(chunk)
    except Exception as error:
        return error


_KEPT_BYTES = 256 << 20
"""Of slots that an actor keeps for the next chunk."""
_KEPT_SHARE = 4
"""An actor keeps decoded blocks for chunks to come, of so large a part of the loader's limit."""


class BuilderActor:
    """Builds chunks for one rank of one training process. Methods run in threads of Ray."""

    def __init__(self) -> None:
        self._loop: _ActorLoop | None = None
        self._pool: PriorityPool | None = None
        """The thread that builds."""
        self._reader: BlockReader | None = None
        self._ended = threading.Event()

    def place(self) -> ActorPlace:
        """Where it runs; before it is sent anything."""
        return ActorPlace(os.getpid(), platform.node(), Versions.here())

    def open(self, name: str, packed: NDArray[np.uint8], layout: Layout) -> CrossedError | None:
        """Take what all chunks have in common, and look whether its shards are there; gives what fails."""
        arena = Arena(limit_bytes=_KEPT_BYTES)
        try:
            job, datasets = unpack(packed.copy(), *layout)  # Ray's memory is read-only
            if datasets:
                self._reader = BlockReader(datasets, arena, job.limit_bytes // _KEPT_SHARE, seed=job.seed)
                self._reader.check(name)
        except Exception as error:
            return CrossedError.of(error, name)
        self._loop = _ActorLoop(name, arena)
        self._pool = PriorityPool(1, "dataflow-build")
        self._pool.submit(0, partial(self._loop.run, job))
        return None

    def handle(self, kind: int, number: int, content: Any, memory: Any) -> tuple[ActorResponse, Any]:
        """What there is to say to a message about a chunk.

        `memory`: with the stored values of the chunk; an argument of its own, which Ray's store takes.
        """
        assert self._loop is not None
        if memory is not None:
            content = (*content, memory)
        elif self._reader is not None and kind == BuilderMessage.BUILD:
            content = (*content, _begun(self._reader, content[0]))
        responses = self._loop.responses[number] = queue.SimpleQueue()
        self._loop.messages.put((kind, number, content))
        del content, memory  # the loop has them until the chunk is built
        response, packed = responses.get()
        if self._reader is not None:
            response = response._replace(counts=self._reader.take_counts())
        return response, packed

    def outlive(self) -> None:
        """Never return: the call fails when the actor dies."""
        self._ended.wait()
