"""Worker processes for `DataLoader`: how they are started, given work, and what their answers are made of."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from dataflow.workers.lane import Job
from dataflow.workers.payload import Buffer, dumps_by_value, pack, placed_offsets, unpack
from dataflow.workers.process_main import run
from dataflow.workers.random_state import copied_random_state
from dataflow.workers.settings import WorkerLoader
from prefetch.memory.device import register_pinned
from prefetch.workers.fork_server import Modules, warm_up
from prefetch.workers.pool import WorkerPool
from prefetch.workers.shared_arena import Header, SharedFile

_OBJECT_BYTES = 256 << 20
"""Python objects of a dataset above this size are worth a word: each worker has its own."""
_MESSAGE_HEAD = 4096
_IN_SERVER = {*sys.stdlib_module_names, "torch", "numpy", "cloudpickle", "dataflow", "prefetch", "sharding"}


class ProcessWorkers:
    """Worker processes and the file that their batches lie in."""

    kind = "process"
    shares_work = False
    """A task is for one worker."""

    def __init__(self, file: SharedFile, pool: WorkerPool) -> None:
        self._file, self._pool = file, pool
        self.receive, self.wait, self.stacks = pool.receive, pool.wait, pool.stacks
        self.dumps = dumps_by_value if pool.context is None else pickle.dumps
        self.start, self.start_reason = pool.start, pool.start_reason

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """One a worker."""
        return self._pool.processes

    @property
    def started(self) -> bool:
        """Whether all can take work."""
        return self._pool.started

    @property
    def isolated(self) -> bool:
        """Whether nothing that this process changes reaches them."""
        return self._pool.isolated

    @property
    def shared_bytes(self) -> int:
        """Memory that the file takes now."""
        return self._file.held_bytes

    def post(self, worker: int, message: tuple[Any, ...], number: int) -> None:
        """Send (kind, generation, lane, task, index as `dumps` gives it)."""
        self._pool.send(worker, pickle.dumps((*message, self._file.take_returned(worker))))

    def begin_epoch(self, generation: int) -> None:
        """Let workers pass over tasks of earlier generations."""
        self._file.header.set(Header.GENERATION, generation)

    def unpack(self, answer: Any) -> Any:
        """What an answer brings; see `worker_process`."""
        borrowed: list[int] = []

        def borrow(offset: int, nbytes: int) -> Buffer:
            borrowed.append(offset)
            return self._file.borrow(answer.worker, offset, nbytes)

        buffer = self._file.borrow(answer.worker, answer.offset, answer.nbytes)
        try:
            data, state, random = unpack(buffer, answer.meta, answer.meta_bytes, answer.table, borrow)
            # These are kept for long, and must not keep the memory of the batch they came with.
            return data, copy.deepcopy(state), random and copied_random_state(random)
        except BaseException:
            rest = Counter(placed_offsets(buffer, answer.placed)) - Counter(borrowed)
            for offset in rest.elements():
                self._file.give_back(answer.worker, offset)
            raise

    def discard(self, answer: Any) -> None:
        """Give the memory of an answer back without looking at it: its objects may have opinions."""
        buffer = self._file.borrow(answer.worker, answer.offset, answer.nbytes)
        for offset in placed_offsets(buffer, answer.placed):
            self._file.give_back(answer.worker, offset)

    def close(self, *, hurry: bool = False) -> None:
        """End them. Batches that are still used keep their memory. Idempotent.

        `hurry`: do not let them finish what they are doing.
        """
        try:
            self._pool.close(stop_s=0 if hurry else None)
        finally:
            self._file.close()


def _start_context(given: Any) -> Any:
    """How worker processes start; None: from our fork server."""
    if given is not None or multiprocessing.parent_process() is not None:
        return given  # a child process has inherited its method, not chosen it
    chosen = multiprocessing.get_start_method(allow_none=True)
    # The platform's default is nobody's choice: it is fixed as soon as anything is used that comes from it,
    # the lock of a progress bar for instance.
    if chosen in (None, multiprocessing.get_all_start_methods()[0]):
        return None
    return torch.multiprocessing.get_context(chosen)


def begin_to_start(loader: WorkerLoader) -> None:
    """Start what workers will come from, without waiting for it."""
    if _start_context(loader.multiprocessing_context) is None:
        parts = [loader.dataset, *getattr(loader.dataset, "__dict__", {}).values()]
        functions = [f for f in (loader.collate_fn, loader.worker_init_fn) if hasattr(f, "__module__")]
        modules = {type(part).__module__ for part in parts} | {f.__module__ for f in functions}
        warm_up(_importable(modules), _unforkable())


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
    found = set()
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if name.partition(".")[0] in _IN_SERVER or spec is None or not spec.origin:
            continue
        with contextlib.suppress(OSError):
            found.add((name, os.stat(spec.origin).st_mtime_ns))
    return frozenset(found)


def start_workers(loader: WorkerLoader, job: Job, *, pin: bool) -> tuple[SharedFile, WorkerPool]:
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
    if packed is not None and len(packed.meta) > _OBJECT_BYTES:
        warnings.warn(
            f"the dataset holds {len(packed.meta):,} bytes of Python objects, which every worker holds again "
            f"({loader.num_workers} workers). Arrays and tensors are shared: keep the data in those, or in "
            "Arrow or a file that is mapped.",
            stacklevel=4,
        )
    nbytes = _MESSAGE_HEAD + packed.nbytes if packed else 0
    file = SharedFile(loader.num_workers, nbytes, register_pinned if pin else None)
    try:
        if packed is not None:
            sizes = [nbytes for _, nbytes in packed.shared]
            head = np.array([packed.meta_offset, len(packed.meta), len(packed.spans), *sizes], np.int64)
            file.write_message(0, head.tobytes())
            for offset, address, length, _ in packed.parts:
                file.write_memory(_MESSAGE_HEAD + offset, address, length)
            file.write_message(_MESSAGE_HEAD + packed.meta_offset, packed.meta)
            file.write_message(_MESSAGE_HEAD + packed.meta_offset + len(packed.meta), packed.spans)
        pool = WorkerPool(
            run,
            loader.num_workers,
            file,
            context=context,
            inherited=inherited,
            modules=_importable(packed.modules) if packed else frozenset(),
            passed=[fd for fd, _ in packed.shared] if packed else [],
            unforkable=_unforkable(),
            region_limit=loader.memory_limit if not pin else 1 << 60,
        )
    except BaseException:
        file.close()
        raise
    return file, pool
