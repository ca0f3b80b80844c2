"""The way over pipes and shared memory: a worker process's end of it, and that of the training process.

Requests come through the process's own pipe, each with the offsets of what the training process has dropped.
What is made is put into the process's region of the shared file, where the training process views it. What
all processes have in common, their *job*, is in the file once.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import BaseContext
from types import FrameType
from typing import Any

import torch

from prefetch.ipc.batch_writer import BatchWriter, TorchSettings
from prefetch.ipc.payload import (
    MESSAGE_HEAD,
    Copied,
    PackedObject,
    pack,
    placed_offsets,
    read_packed,
    unpack,
    write_packed,
)
from prefetch.ipc.protocol import WorkerLoop, WorkerRequest
from prefetch.memory.device import register_pinned
from prefetch.memory.mapped_files import MappedFiles
from prefetch.workers import REGION_BYTES, STOP_S
from prefetch.workers.pool import WorkerPool
from prefetch.workers.shared_arena import Buffer, Header, Region, SharedFile
from prefetch.workers.starting import ByValueContext, is_fork, warm_up
from prefetch.workers.worker_start import WorkerResponse, WorkerStart, begin

# ---- in a worker process ----------------------------------------------------------------------------------


class PipeTransport:
    """Implements `Transport` in a process that a `WorkerPool` has started."""

    def __init__(self, start: WorkerStart) -> None:
        self.start, self.header = start, Header(start.memory.fd)
        where = start.memory.fd, start.region_offset, start.region_bytes, start.region_limit
        self.region = Region(*where, is_locked=start.is_locked)
        self.writer = BatchWriter(self.region)

    def read_job(self) -> Any:
        """The job; torch is set as it was where that was made. Once."""
        settings, job = self.start.inherited or read_packed(self.start)
        settings.apply()
        return job

    def receive(self) -> WorkerRequest | None:
        """See `Transport`."""
        try:
            message = self.start.tasks.recv_bytes()
        except (EOFError, OSError):
            return None
        if not message or self.header.get(Header.STOP):
            return None
        *request, returned = pickle.loads(message)
        for offset in returned:
            self.region.take_back(offset)
        return WorkerRequest(*request)

    def respond(self, kind: int, task: int, obj: Any, generation: int = 0) -> None:
        """See `Transport`."""
        offset, packed = self.writer.put(obj)
        total, placed, worker = packed.nbytes + packed.placed_bytes, len(packed.placed), self.start.worker
        where = offset, packed.nbytes, *packed.layout, placed, total
        self.start.respond(WorkerResponse(kind, worker, self.start.region, generation, task, *where))


def run_worker(
    start: WorkerStart,
    opened: Callable[[WorkerLoop, PipeTransport], Callable[[WorkerRequest], None]],
    about: Callable[[FrameType | None], str] | None = None,
    handle: Callable[[], object] = bool,
) -> None:
    """A worker process, from its start to its end.

    Args:
        start: of the process.
        opened: reads the job and gives what serves requests.
        about: see `worker_start.begin`.
        handle: see there.
    """
    try:
        begin(start, about, handle)
        torch.set_num_threads(1)
        transport = PipeTransport(start)
        loop = WorkerLoop(transport)
        loop.run(opened(loop, transport))
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent hears Ctrl-C itself, or has gone


# ---- in the training process ------------------------------------------------------------------------------


def packed_job(job: Any, context: BaseContext) -> PackedObject | None:
    """A job for processes that start so, without its mapped files; None: they are forked, and have it.

    Raises what pickling raises.
    """
    if is_fork(context):
        return None
    files = MappedFiles()
    try:
        packed = pack(
            (TorchSettings.here(), job),
            place=files.place,
            by_value=isinstance(context, ByValueContext),
            share=True,
        )
    except BaseException:
        files.close()
        raise
    packed.shared += [(fd, 0) for fd in reversed(files.fds)]
    packed.table, packed.files = pickle.dumps(files.table), files
    return packed


def _pinned_copy(data: memoryview) -> Buffer:
    """Copy bytes to memory that torch has page-locked, and keeps for the next who asks."""
    block: Buffer = torch.empty(len(data), dtype=torch.uint8, pin_memory=True).numpy()
    block[:] = data
    return block


class WorkerProcesses:
    """Processes, and the file that they and this process map. Used by one thread, but for `close`.

    They start without being waited for.

    Args:
        target: what each runs; calls `run_worker`.
        num_workers: processes.
        job: what they find in the file.
        inherited: the job of processes that are forked from this one, which have it as it is.
        context: how they start.
        num_spare: regions of the file beside theirs: one for this process, others for who replaces them.
        pins: whether what is viewed of the file is page-locked for CUDA.
        region_bytes: address space of a region.
        region_limit: bytes of free slabs that a process keeps.
        stop_s: time that processes have to end by themselves, together.
    """

    def __init__(
        self,
        target: Callable[[WorkerStart], None],
        num_workers: int,
        job: PackedObject | None,
        *,
        context: BaseContext,
        inherited: Any = None,
        num_spare: int = 0,
        pins: bool = False,
        region_bytes: int = REGION_BYTES,
        region_limit: int,
        stop_s: float = STOP_S,
    ) -> None:
        self.file = SharedFile(
            num_workers + num_spare,
            MESSAGE_HEAD + job.nbytes if job else 0,
            register_pinned if pins else None,
            region_bytes=region_bytes,
        )
        self._job_files = job.files if job else None
        self._copied: Copied = _pinned_copy if pins else bytearray
        try:
            if job is not None:
                write_packed(self.file, job)
                if isinstance(context, ByValueContext):
                    warm_up({*job.modules, target.__module__})
            self.pool = WorkerPool(
                target,
                num_workers,
                self.file,
                context=context,
                inherited=None if job else (TorchSettings.here(), inherited),
                passed=[fd for fd, _ in job.shared] if job else [],
                region_limit=region_limit,
                is_locked=pins,
                replaces=num_spare > 1,
                stop_s=stop_s,
            )
        except BaseException:
            self._close_files()
            raise

    def unpack(self, response: WorkerResponse, on_end: Callable[[int], None] | None = None) -> Any:
        """Return what a response brings, viewed where it lies.

        `on_end` hears of the bytes of each part, `response.total` together, when its last view has died.
        Without it, small parts are copied, lest one that is kept keeps them all.
        """
        region, viewed = self.pool.regions[response.runner], Counter[int]()

        def view_at(offset: int, nbytes: int) -> Buffer:
            viewed[offset] += 1
            return self.file.view(region, offset, nbytes, on_end)

        buffer = self.file.view(region, response.offset, response.nbytes, on_end)
        where, copied = (response.meta, response.meta_bytes, response.table), self._copied
        try:
            return unpack(buffer, *where, view_at, copied=copied if on_end is None else None)
        except BaseException:
            # What is in use comes back when its views die; the rest nobody will ever view.
            rest = Counter(placed_offsets(buffer, response.placed)) - viewed
            for offset in rest.elements():
                self.file.give_back(region, offset)
            raise

    def discard(self, response: Any) -> None:
        """Give the memory of a response back without looking at it: its objects may have opinions."""
        region = self.pool.regions[response.runner]
        buffer = self.file.view(region, response.offset, response.nbytes)
        for offset in placed_offsets(buffer, response.placed):
            self.file.give_back(region, offset)

    def close(self, *, stop_s: float | None = None) -> None:
        """End them, as `WorkerPool.close`. What is still used keeps its memory. Idempotent."""
        try:
            self.pool.close(stop_s=stop_s)
        finally:
            self._close_files()

    def _close_files(self) -> None:
        self.file.close()
        if self._job_files is not None:
            self._job_files.close()
