"""Worker processes for `DataLoader`: how they are started, given work, and what they respond with."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from typing import Any

import torch

from dataflow.processes.generators import copied_random_state
from dataflow.processes.payload import (
    MESSAGE_HEAD,
    dumps_by_value,
    pack,
    placed_offsets,
    unpack,
    write_packed,
)
from dataflow.processes.server import server_needs, start_context
from dataflow.workers.fetching import WorkerLoader
from dataflow.workers.process_main import ProcessResponse, run
from dataflow.workers.worker import WorkerJob
from prefetch.memory.device import register_pinned
from prefetch.workers.fork_server import warm_up
from prefetch.workers.pool import WorkerPool
from prefetch.workers.shared_arena import Buffer, Header, SharedFile


class ProcessRunners:
    """Worker processes and the file that their batches lie in."""

    shares_work = False
    """A task is for one process."""

    def __init__(self, file: SharedFile, pool: WorkerPool) -> None:
        self.file, self.pool = file, pool
        self.stacks, self.processes = pool.stacks, pool.processes
        self.isolated = pool.isolated
        """Whether nothing that this process changes reaches them."""
        self.dumps = dumps_by_value if pool.context is None else pickle.dumps
        self.start, self.start_reason = pool.start, pool.start_reason

    @property
    def started(self) -> bool:
        """Whether all can take work."""
        return self.pool.started

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run, as far as they are known."""
        pids = map(self.pool.known_pid, range(self.pool.num_workers))
        alive = [process.is_alive() for process in self.processes]
        return tuple(pid for pid, runs in zip(pids, alive, strict=True) if pid is not None and runs)

    @property
    def shared_bytes(self) -> int:
        """Memory that the file takes now."""
        return self.file.held_bytes

    def post(self, runner: int, message: tuple[Any, ...], number: int) -> None:
        """Send (kind, generation, worker, task, index as `dumps` gives it)."""
        self.pool.send(runner, pickle.dumps((*message, self.file.take_returned(runner))))

    def receive(self) -> list[ProcessResponse]:
        """The responses that are there, without waiting."""
        return list(map(ProcessResponse._make, self.pool.receive()))

    def wait(self, timeout_s: float | None) -> list[ProcessResponse]:
        """Wait for responses, as `WorkerPool.wait`."""
        return list(map(ProcessResponse._make, self.pool.wait(timeout_s)))

    def begin_epoch(self, generation: int) -> None:
        """Let workers pass over tasks of earlier generations."""
        self.file.header.set(Header.GENERATION, generation)

    def unpack(self, response: Any) -> Any:
        """What a response brings: batch or error, state of the worker, state of its global generators."""
        runner, file = response.runner, self.file
        offsets: list[int] = []

        def view_at(offset: int, nbytes: int) -> Buffer:
            offsets.append(offset)
            return file.view(runner, offset, nbytes)

        buffer = file.view(runner, response.offset, response.nbytes)
        try:
            data, state, random = unpack(buffer, response.meta, response.meta_bytes, response.table, view_at)
            # These are kept for long, and must not keep the memory of the batch they came with.
            return data, copy.deepcopy(state), random and copied_random_state(random)
        except BaseException:
            # What is in use comes back when its views die; the rest nobody will ever view.
            rest = Counter(placed_offsets(buffer, response.placed)) - Counter(offsets)
            for offset in rest.elements():
                file.give_back(runner, offset)
            raise

    def discard(self, response: Any) -> None:
        """Give the memory of a response back without looking at it: its objects may have opinions."""
        buffer = self.file.view(response.runner, response.offset, response.nbytes)
        for offset in placed_offsets(buffer, response.placed):
            self.file.give_back(response.runner, offset)

    def close(self, *, hurry: bool = False) -> None:
        """End them. Batches that are still used keep their memory. Idempotent.

        `hurry`: do not let them finish what they are doing.
        """
        try:
            self.pool.close(stop_s=0 if hurry else None)
        finally:
            self.file.close()


def begin_to_start(loader: WorkerLoader) -> None:
    """Start what workers will come from, without waiting for it."""
    if start_context(loader.multiprocessing_context) is None:
        parts = [loader.dataset, *getattr(loader.dataset, "__dict__", {}).values()]
        functions = [f for f in (loader.collate_fn, loader.worker_init_fn) if hasattr(f, "__module__")]
        modules = {type(part).__module__ for part in parts} | {f.__module__ for f in functions}
        warm_up(server_needs(modules, run.__module__))


def start_processes(loader: WorkerLoader, job: WorkerJob, *, pin: bool) -> ProcessRunners:
    """Worker processes for a job, which is serialised once for all of them."""
    context = start_context(loader.multiprocessing_context)
    packed, inherited = None, None
    if context is not None and context.get_start_method() == "fork":
        inherited = job
    else:
        try:
            packed = pack(job, by_value=context is None, share=True)
        except Exception as error:
            inherited = job
            if context is None:
                warnings.warn(
                    "the dataset, or a function given to the loader, cannot be sent to worker processes "
                    f"({error}); they are forked from this process instead, with its locks and clients "
                    "as they are, and copy the pages of its objects as they touch them. Make it picklable, "
                    'or ask for this: DataLoader(..., multiprocessing_context="fork").',
                    stacklevel=4,
                )
                context = torch.multiprocessing.get_context("fork")
            elif isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                warnings.warn(
                    "Got pickle error when attempting to start a worker Process. This might be because the "
                    f"worker Process arguments are not picklable: {error}. Without "
                    "multiprocessing_context= and multiprocessing.set_start_method they need not be.",
                    stacklevel=4,
                )
                raise
    if packed is not None and len(packed.meta) > job.limits.object_bytes:
        warnings.warn(
            f"the dataset holds {len(packed.meta):,} bytes of Python objects, which every worker holds again "
            f"({loader.num_workers} workers). Arrays and tensors are shared: keep the data in those, or in "
            "Arrow or a file that is mapped.",
            stacklevel=4,
        )
    file = SharedFile(
        loader.num_workers,
        MESSAGE_HEAD + packed.nbytes if packed else 0,
        register_pinned if pin else None,
        region_bytes=job.limits.region_bytes,
    )
    try:
        if packed is not None:
            write_packed(file, packed)
        pool = WorkerPool(
            run,
            loader.num_workers,
            file,
            record_fields=len(ProcessResponse._fields),
            context=context,
            needs=server_needs(packed.modules if packed else set(), run.__module__),
            inherited=inherited,
            passed=[fd for fd, _ in packed.shared] if packed else [],
            region_limit=loader.memory_limit if not pin else 1 << 60,
            stop_s=job.limits.stop_s,
        )
    except BaseException:
        file.close()
        raise
    return ProcessRunners(file, pool)
