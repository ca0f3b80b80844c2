"""Worker processes for `DataLoader`: how they are started, given work, and what they respond with."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch

from dataflow.workers.fetching import WorkerLoader
from dataflow.workers.info import copied_random_state
from dataflow.workers.payload import PackedObject, dumps_by_value, pack, placed_offsets, unpack
from dataflow.workers.process_main import MESSAGE_HEAD, ProcessResponse, run
from dataflow.workers.worker import WorkerJob
from prefetch.memory.device import register_pinned
from prefetch.workers.fork_server import Modules, ServerNeeds, warm_up
from prefetch.workers.pool import WorkerPool
from prefetch.workers.shared_arena import Buffer, Header, SharedFile

_PRELOADED = ("torch", "numpy", run.__module__)
_IN_SERVER = {*sys.stdlib_module_names, "torch", "numpy", "cloudpickle", "dataflow", "prefetch", "sharding"}


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


def _start_context(context: Any) -> Any:
    """How worker processes start, by the argument of the loader; None: from our fork server."""
    if context is not None or multiprocessing.parent_process() is not None:
        return context  # a child process has inherited its method, not chosen it
    method = multiprocessing.get_start_method(allow_none=True)
    # The platform's default is nobody's choice: it is fixed as soon as anything is used that comes from it,
    # the lock of a progress bar for instance.
    if method in (None, multiprocessing.get_all_start_methods()[0]):
        return None
    return torch.multiprocessing.get_context(method)


def begin_to_start(loader: WorkerLoader) -> None:
    """Start what workers will come from, without waiting for it."""
    if _start_context(loader.multiprocessing_context) is None:
        parts = [loader.dataset, *getattr(loader.dataset, "__dict__", {}).values()]
        functions = [f for f in (loader.collate_fn, loader.worker_init_fn) if hasattr(f, "__module__")]
        modules = {type(part).__module__ for part in parts} | {f.__module__ for f in functions}
        warm_up(_server_needs(modules))


def _server_needs(modules: set[str]) -> ServerNeeds:
    return ServerNeeds(preload=_PRELOADED, modules=_importable(modules), unforkable=_unforkable())


def _unforkable() -> str:
    """Why what torch is set to now must not stay with all workers to come; "" where it may."""
    if torch.cuda.is_initialized():
        return "CUDA was in use in this process"
    stacks = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    if stacks or casts or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "the loader was made under torch.no_grad(), a default device or another mode of torch"
    return ""


def _importable(names: set[str]) -> Modules:
    """Which of these modules a fork server should import; what it has anyway is left out."""
    modules = set()
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if name.partition(".")[0] in _IN_SERVER or spec is None or not spec.origin:
            continue
        with contextlib.suppress(OSError):
            modules.add((name, os.stat(spec.origin).st_mtime_ns))
    return frozenset(modules)


def start_processes(loader: WorkerLoader, job: WorkerJob, *, pin: bool) -> ProcessRunners:
    """Worker processes for a job, which is serialised once for all of them."""
    context = _start_context(loader.multiprocessing_context)
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
            _write_job(file, packed)
        pool = WorkerPool(
            run,
            loader.num_workers,
            file,
            record_fields=len(ProcessResponse._fields),
            context=context,
            needs=_server_needs(packed.modules if packed else set()),
            inherited=inherited,
            passed=[fd for fd, _ in packed.shared] if packed else [],
            region_limit=loader.memory_limit if not pin else 1 << 60,
            stop_s=job.limits.stop_s,
        )
    except BaseException:
        file.close()
        raise
    return ProcessRunners(file, pool)


def _write_job(file: SharedFile, packed: PackedObject) -> None:
    """Put a job where all processes find it: `process_main` reads it."""
    head = np.array([*packed.layout, *(nbytes for _, nbytes in packed.shared)], np.int64)
    file.write_message(0, head.tobytes())
    for offset, address, nbytes, _ in packed.parts:
        file.write_memory(MESSAGE_HEAD + offset, address, nbytes)
    file.write_message(MESSAGE_HEAD + packed.meta_offset, packed.meta)
    file.write_message(MESSAGE_HEAD + packed.meta_offset + len(packed.meta), packed.spans)
