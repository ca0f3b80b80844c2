"""Worker processes for `DataLoader`: how they are started, given work, and what they respond with."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dataflow.workers.fetching import WorkerLoader
from dataflow.workers.process_main import run
from dataflow.workers.worker import WorkerJob
from prefetch.ipc.payload import dumps_by_value
from prefetch.ipc.pipe import WorkerProcesses, packed_job
from prefetch.ipc.server import server_needs, start_context
from prefetch.workers.fork_server import warm_up
from prefetch.workers.shared_arena import Header


class ProcessRunners:
    """Worker processes and the file that their batches lie in."""

    shares_work = False
    """A task is for one process."""

    def __init__(self, workers: WorkerProcesses) -> None:
        self._workers, self.file, self.pool = workers, workers.file, workers.pool
        pool, self.discard = self.pool, workers.discard
        self.send, self.receive, self.wait, self.stacks = pool.send, pool.receive, pool.wait, pool.stacks
        self.processes = pool.processes
        self.isolated = pool.isolated
        """True if nothing that this process changes reaches them."""
        self.dumps: Callable[[Any], bytes] = dumps_by_value if pool.context is None else pickle.dumps
        self.start, self.start_reason = pool.start, pool.start_reason

    @property
    def started(self) -> bool:
        """Return whether all can take work."""
        return self.pool.started

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that run, as far as they are known."""
        pids = map(self.pool.known_pid, range(self.pool.num_workers))
        alive = [process.is_alive() for process in self.processes]
        return tuple(pid for pid, runs in zip(pids, alive, strict=True) if pid is not None and runs)

    @property
    def shared_bytes(self) -> int:
        """Memory that the file takes now."""
        return self.file.held_bytes

    def begin_epoch(self, generation: int) -> None:
        """Let workers pass over tasks of earlier generations."""
        self.file.header.set(Header.GENERATION, generation)

    def unpack(self, response: Any) -> Any:
        """Return what a response brings: batch or error, the worker's state, its global generators' state."""
        data, state, random = self._workers.unpack(response)
        return data, copy.deepcopy(state), random  # a state may have objects in common with the data

    def close(self, *, immediately: bool = False) -> None:
        """See `WorkerProcesses`. `immediately`: do not let them finish what they are doing."""
        self._workers.close(stop_s=0 if immediately else None)


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
            packed = packed_job(job, context)
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
    workers = WorkerProcesses(
        run,
        loader.num_workers,
        packed,
        context=context,
        inherited=inherited,
        pins=pin,
        region_bytes=job.limits.region_bytes,
        region_limit=loader.memory_limit if not pin else 1 << 60,
        stop_s=job.limits.stop_s,
    )
    return ProcessRunners(workers)
