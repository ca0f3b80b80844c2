"""Worker threads fetch the items of batches, each by whichever thread is free.

Over a map-style dataset every thread is told of every batch and takes the next item that nobody has taken,
of the first batch that has one; whoever finishes the last item of a batch collates it. So a slow item
holds up one thread and not the items beside it. What must be asked for in one piece (`__getitems__`,
`batch_size=None`) counts as one item.

Iterable datasets, and those with a state of their own, are served as by worker processes (see
`process_main`): worker k has a copy of the dataset and belongs to one thread.
"""

from __future__ import annotations

import mmap
import operator
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data import MapDataPipe, Subset, _DatasetKind, default_collate, default_convert

from dataflow.torch_threads import one_torch_thread, setting_kept
from dataflow.workers.info import Generators, become, install, uninstall
from dataflow.workers.worker import (
    Worker,
    WorkerJob,
    array_bytes,
    has_state,
    worker_info,
    wrapped_error,
)
from prefetch.interpreter import taken_by_one
from prefetch.ipc.payload import pack, unpack
from prefetch.ipc.protocol import WorkerMessage, WorkerRequest, WorkerResult
from prefetch.memory.arena import trim_heap
from prefetch.workers.shared_arena import create_file, read_message
from prefetch.workers.threads import WorkerThreads

_KEY = "lane"
"""Part of what seeds the generators of a worker's batches: another would draw other values after a resume."""
_FREE_BYTES = 32 << 20
"""Freed memory that the C library may keep when threads end: what they used lies in heaps of their own."""


class ThreadResponse(NamedTuple):
    """A task that is done; what `WorkerResponse` is for processes."""

    kind: int
    runner: int
    generation: int
    task: int
    total: int
    """Bytes of arrays and tensors."""
    value: tuple[Any, Any, Any]
    """Batch or error, state of the worker, nothing."""


class ThreadRunners(WorkerThreads):
    """Threads that fetch batches, to `WorkerIterator` what `ProcessRunners` is."""

    isolated = False
    """False: the threads see what the caller changes in the dataset."""
    processes: Sequence[Any] = ()
    pids: tuple[int, ...] = ()
    started = True
    shared_bytes = 0
    start = start_reason = ""

    @staticmethod
    def dumps(index: Any) -> Any:
        """Nothing has to be sent anywhere."""
        return index

    def __init__(self, job: WorkerJob, *, copied: bool) -> None:
        super().__init__(job.num_runners, "dataflow-worker", stop_s=job.limits.stop_s)
        self._job, self._turn = job, job.turn
        self.isolated = copied and job.collate_fn in (default_collate, default_convert)
        """True if nothing that the training code changes reaches them."""
        self._generation = 0
        install()
        try:
            with setting_kept():
                self.on_all(lambda _: one_torch_thread())
        except BaseException:  # Ctrl-C
            self.close()
            raise

    def unpack(self, response: Any) -> Any:
        """Return what a finished task brings."""
        return response.value

    def discard(self, response: Any) -> None:
        """Drop a finished task that nobody wants."""

    def begin_epoch(self, generation: int) -> None:
        """Pass over tasks of earlier generations; those of the next may be here already."""
        self._generation = generation
        self._turn += 1

    def close(self, *, stop_s: float | None = None) -> None:
        """End the threads, after the items they work on; nothing can end those sooner. Idempotent."""
        if self._generation < sys.maxsize:
            self._generation = sys.maxsize
            try:
                super().close()
            finally:  # interrupted: they end all the same
                uninstall()
            trim_heap(_FREE_BYTES)

    def _turn_of(self, generation: int) -> int:
        return self._turn + (generation > self._generation)

    def _put(self, kind: int, runner: int, generation: int, task: int, data: Any, state: Any = None) -> None:
        total = array_bytes(data) if kind == WorkerResult.BATCH else 0
        self.put(ThreadResponse(kind, runner, generation, task, total, (data, state, None)))


# ---- item by item -------------------------------------------------------------------------------------


class _Batch:
    """A batch in work. `key` is that of its random numbers."""

    def __init__(
        self, indices: Sequence[Any], *, runner: int, generation: int, task: int, key: tuple[int, int]
    ) -> None:
        self.indices, self.key = indices, key
        self.runner, self.generation, self.task = runner, generation, task
        count = len(indices)
        self.items: list[Any] = [None] * count
        self.positions = [*reversed(range(count))]
        """Left to fetch, the last one first."""
        self._lock = threading.Lock()  # guards _left, failed_at and error
        self._left = self.failed_at = count
        self.error: ExceptionWrapper | None = None

    def fail(self, position: int, error: ExceptionWrapper) -> None:
        """An item could not be fetched: of several the first counts, as in a loop over them."""
        with self._lock:
            if position < self.failed_at:
                self.failed_at, self.error = position, error

    def add(self, count: int) -> bool:
        """Count so many more items that are there; return whether they all are."""
        with self._lock:
            self._left -= count
            return self._left == 0


class _ItemFetcher:
    """One thread's view: its `WorkerInfo`, its generators."""

    def __init__(self, job: WorkerJob, number: int) -> None:
        self._job, self._number, dataset = job, number, job.dataset
        self.error = partial(wrapped_error, number, in_thread=True)
        self.rng = Generators()
        self._info = worker_info(job, number, dataset, self.rng)
        self.failure: ExceptionWrapper | None = None
        """The error of `worker_init_fn`."""
        self.get: Any = partial(operator.getitem, dataset) if by_item(job) else job.fetcher(dataset).fetch

    def begin(self) -> None:
        """First thing in the thread."""
        become(self._info)
        self.rng.begin(self._job.base_seed, "worker", self._number)
        try:
            if self._job.init_fn is not None:
                self._job.init_fn(self._number)
        except BaseException:
            self.failure = self.error()

    def collate(self, batch: _Batch) -> tuple[int, Any]:
        """The batch of items that are all there, or the first error."""
        items, batch.items = batch.items, []  # busy threads still have the batch in their queues
        if batch.error is not None:
            return WorkerResult.ERROR, batch.error
        if not by_item(self._job):
            return WorkerResult.BATCH, items[0]
        self.rng.go_to(-1)
        try:
            return WorkerResult.BATCH, self._job.collate_fn(items)
        except BaseException:
            return WorkerResult.ERROR, self.error()


def by_item(job: WorkerJob) -> bool:
    """Return whether the items of a batch can be asked for one by one."""
    dataset = job.dataset
    while type(dataset) is Subset:  # its `__getitems__` is a loop, unless there is one below
        dataset = dataset.dataset
    return job.auto_collation and not getattr(dataset, "__getitems__", None)


class ItemThreads(ThreadRunners):
    """Threads over a map-style dataset, which all use."""

    shares_work = True

    def __init__(self, job: WorkerJob) -> None:
        super().__init__(job, copied=False)
        self._fetchers = [_ItemFetcher(job, number) for number in range(job.num_runners)]
        for number, fetcher in enumerate(self._fetchers):
            self.submit(number, fetcher.begin)

    def send(self, runner: int, request: WorkerRequest) -> None:
        """Hand out a request, whose content is an index."""
        kind, task, index, generation, _, number = request
        if kind == WorkerMessage.TASK:
            indices = list(index) if by_item(self._job) else [index]
            key = self._turn_of(generation), number
            batch = _Batch(indices or [index], runner=runner, generation=generation, task=task, key=key)
            for thread, fetcher in enumerate(self._fetchers):
                self.submit(thread, partial(self._help, fetcher, batch))

    def _help(self, fetcher: _ItemFetcher, batch: _Batch) -> None:
        """Take items of a batch until none is left to take."""
        get, rng, count = fetcher.get, fetcher.rng, 0
        rng.begin(self._job.base_seed, *batch.key)
        if fetcher.failure is not None:
            batch.fail(-1, fetcher.failure)
        for position in taken_by_one(batch.positions):
            if batch.generation < self._generation:
                return
            if position <= batch.failed_at:
                rng.go_to(position)
                try:
                    batch.items[position] = get(batch.indices[position])
                except BaseException:
                    batch.fail(position, fetcher.error())
            count += 1
        # Items that others still fetch are theirs to count: whoever counts the last one collates.
        if count and batch.add(count):
            kind, data = fetcher.collate(batch)
            self._put(kind, batch.runner, batch.generation, batch.task, data)


# ---- worker by worker ---------------------------------------------------------------------------------


def needs_own_datasets(job: WorkerJob) -> bool:
    """Return whether it matters who fetches what: each worker then has a dataset of its own."""
    iterable = job.kind == _DatasetKind.Iterable
    return iterable or has_state(job.dataset) or isinstance(job.dataset, MapDataPipe)


@dataclass
class _ThreadWorker:
    """A worker, its generators, and what those are seeded by: the epoch and the batches fetched in it."""

    worker: Worker
    rng: Generators
    turn: int
    fetched: int


class BatchThreads(ThreadRunners):
    """Threads that fetch whole batches, each for one or more workers with a dataset of their own.

    `fetched` tells how many batches of a worker were fetched before, where that is not none.
    """

    shares_work = False

    def __init__(self, job: WorkerJob, fetched: dict[int, int]) -> None:
        datasets = _dataset_copies(job)
        super().__init__(job, copied=datasets[0] is not job.dataset)
        self._workers = []
        for number, dataset in enumerate(datasets):
            rng = Generators()
            worker = Worker(job, number, dataset, rng)
            self._workers.append(_ThreadWorker(worker, rng, job.turn, fetched.get(number, 0)))
            first = partial(self._open, number, job.shared_seed, 0, job.turn)
            self.submit(number % job.num_runners, first)

    def send(self, runner: int, request: WorkerRequest) -> None:
        """Hand out a request, whose content is an index."""
        kind, task, index, generation, worker, _ = request
        if kind in (WorkerMessage.RESET, WorkerMessage.BACK):
            turn = self._turn_of(generation)
            for reset in range(runner, len(self._workers), self._job.num_runners):
                self.submit(runner, partial(self._open, reset, index, generation, turn))
        elif kind in (WorkerMessage.TASK, WorkerMessage.SKIP):
            self.submit(runner, partial(self._serve, kind, generation, worker, task, index))

    def _open(self, number: int, shared_seed: Any, generation: int, turn: int) -> None:
        worker = self._workers[number]
        become(worker.worker.info)
        if turn != worker.turn:
            worker.turn, worker.fetched = turn, 0
        worker.rng.begin(self._job.base_seed, turn, _KEY, number)
        state = worker.worker.try_to_open(shared_seed)
        if self._job.announce:
            runner = number % self._job.num_runners
            self._put(WorkerResult.OPENED, runner, generation, number, worker.worker.failure, state)

    def _serve(self, kind: int, generation: int, number: int, task: int, index: Any) -> None:
        if generation < self._generation:
            return
        worker = self._workers[number]
        become(worker.worker.info)
        worker.rng.begin(self._job.base_seed, worker.turn, _KEY, number, worker.fetched)
        worker.fetched += 1
        response = worker.worker.serve(kind, index)
        if response is not None:
            kind, data, state = response
            self._put(kind, number % self._job.num_runners, generation, task, data, state)


def _copies(obj: Any, count: int) -> list[Any]:
    """`count` copies. Their arrays and tensors share memory until they are written to.

    Raises whatever pickling raises.
    """
    packed = pack(obj)
    fd = create_file(packed.nbytes)
    try:
        with mmap.mmap(fd, packed.nbytes) as memory:
            view = np.frombuffer(memory, np.uint8)
            packed.copy_to(view.ctypes.data)
            del view  # else the mapping could not be closed
        return [unpack(read_message(fd, 0, packed.nbytes), *packed.layout) for _ in range(count)]
    finally:
        os.close(fd)


def _dataset_copies(job: WorkerJob) -> list[Any]:
    try:
        return _copies(job.dataset, job.num_copies)
    except Exception as error:
        if job.num_copies == 1:
            return [job.dataset]
        raise RuntimeError(
            f"each of {job.num_copies} threads needs a copy of this dataset, and it cannot be copied: "
            f'{error}. Make it picklable, use num_workers=1, or worker processes (without workers="thread")'
        ) from error
