"""Worker processes for `DataLoader`: how they are started, given work, and what they respond with."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import torch

from dataflow.workers.fetching import WorkerLoader
from dataflow.workers.process_main import run
from dataflow.workers.worker import WorkerJob
from prefetch.ipc.forked_classes import dumps_to_fork
from prefetch.ipc.payload import PackedObject, dumps_by_value, pack
from prefetch.ipc.pipe import WorkerProcesses, packed_job
from prefetch.workers.shared_arena import Header
from prefetch.workers.starting import ByValueContext, is_fork, start_context, start_reason, warm_up


class ProcessRunners(WorkerProcesses):
    """Worker processes and the file that their batches lie in."""

    shares_work = False
    """A task is for one process."""

    def __init__(
        self,
        loader: WorkerLoader,
        job: WorkerJob,
        packed: PackedObject | None,
        context: BaseContext,
        *,
        pin: bool,
    ) -> None:
        super().__init__(
            run,
            loader.num_workers,
            packed,
            context=context,
            inherited=job if packed is None else None,
            pins=pin,
            region_bytes=job.limits.region_bytes,
            region_limit=loader.memory_limit,
            stop_s=job.limits.stop_s,
        )
        pool = self.pool
        self.send, self.receive, self.wait, self.stacks = pool.send, pool.receive, pool.wait, pool.stacks
        self.processes = pool.processes
        self.isolated = loader.prefetch_across_epochs and _is_isolated(job)
        """True if nothing that this process changes reaches them."""
        self.dumps: Callable[[Any], bytes] = pickle.dumps
        if isinstance(context, ByValueContext):
            self.dumps = dumps_by_value
        elif is_fork(context):
            self.dumps = dumps_to_fork
        self.start, self.start_reason = start_reason(loader.multiprocessing_context, context)

    @property
    def started(self) -> bool:
        """Return whether all can take work."""
        return self.pool.started

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that run."""
        return tuple(child.pid for child in self.processes if child.pid is not None and child.is_alive())

    @property
    def shared_bytes(self) -> int:
        """Memory that the file takes now."""
        return self.file.held_bytes

    def begin_epoch(self, generation: int) -> None:
        """Let workers pass over tasks of earlier generations."""
        self.file.header.set(Header.GENERATION, generation)

    def unpack(self, response: Any, on_end: Callable[[int], None] | None = None) -> Any:
        """Return what a response brings: batch or error, the worker's state, its global generators' state."""
        data, state, random = super().unpack(response, on_end)
        return data, copy.deepcopy(state), random  # a state may have objects in common with the data


def begin_to_start(loader: WorkerLoader) -> None:
    """Start the server that workers will come from, if they come from ours, without waiting for it."""
    if isinstance(start_context(loader.multiprocessing_context), ByValueContext):
        parts = [loader.dataset, *getattr(loader.dataset, "__dict__", {}).values()]
        functions = [f for f in (loader.collate_fn, loader.worker_init_fn) if hasattr(f, "__module__")]
        warm_up(
            {run.__module__, *(type(part).__module__ for part in parts), *(f.__module__ for f in functions)}
        )


def start_processes(loader: WorkerLoader, job: WorkerJob, *, pin: bool) -> ProcessRunners:
    """Worker processes for a job, which is serialised once for all that are not forked."""
    chosen = loader.multiprocessing_context
    context = start_context(chosen)
    try:
        packed = packed_job(job, context)
    except Exception as error:
        if isinstance(context, ByValueContext):
            warnings.warn(
                "the dataset, or a function given to the loader, cannot be sent to worker processes "
                f"({error}); they are forked from this process instead, with its locks and clients as they "
                'are. Make it picklable, or ask for this: DataLoader(..., multiprocessing_context="fork").',
                stacklevel=4,
            )
            context, packed = torch.multiprocessing.get_context("fork"), None
        elif isinstance(error, TypeError | AttributeError | pickle.PicklingError):
            warnings.warn(
                "Got pickle error when attempting to start a worker Process. This might be because the "
                f"worker Process arguments are not picklable: {error}. Processes that are forked "
                '(multiprocessing_context="fork") get them as they are.',
                stacklevel=4,
            )
            raise
        else:  # what only a process that starts may take along, such as a value in shared memory
            packed = None
    if packed is not None and len(packed.meta) > job.limits.object_bytes:
        warnings.warn(
            f"the dataset holds {len(packed.meta):,} bytes of Python objects, which every worker holds again "
            f"({loader.num_workers} workers). Arrays and tensors are shared: keep the data in those, or in "
            "Arrow or a file that is mapped.",
            stacklevel=4,
        )
    return ProcessRunners(loader, job, packed, context, pin=pin)


def _is_isolated(job: WorkerJob) -> bool:
    """Return whether processes that have a copy of this see nothing that becomes of it here."""
    try:
        return not pack(job, share=True).shared
    except Exception:  # such as a value in shared memory, which only a process that starts may take along
        return False
