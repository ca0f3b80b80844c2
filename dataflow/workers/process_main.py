"""What a worker process does: fetch batches of a dataset and hand them over in shared memory.

It runs one or more workers (`dataflow.workers.worker`). There are as many workers as processes, unless a
state is resumed that was taken with another number of them: then the workers of the state go on, in the
processes there are, and take turns at the process's global random generators.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import collate, signal_handling, worker as torch_worker

from dataflow.processes.batch_writer import BatchWriter
from dataflow.processes.generators import Draws, random_state, seed_all, set_random_state
from dataflow.processes.payload import read_packed
from dataflow.workers.worker import Worker, WorkerJob, WorkerMessage, WorkerResult, wrapped_error
from prefetch.workers.shared_arena import Header, Region
from prefetch.workers.worker_start import WorkerStart, begin


class ProcessResponse(NamedTuple):
    """What a process says about a task.

    Offsets count from the beginning of the shared file.
    """

    kind: int
    runner: int
    generation: int
    task: int
    offset: int
    nbytes: int
    meta: int
    meta_bytes: int
    table: int
    """Bytes behind the pickle that list its out-of-band buffers."""
    placed: int
    """Ranges of shared memory that it holds beside its own, listed at its end."""
    total: int
    """All bytes of shared memory that the response holds."""


def run(start: WorkerStart) -> None:
    """A worker process, from its start to its end."""
    try:
        begin(start)
        signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
        torch.set_num_threads(1)
        process = _WorkerProcess(start)
        process.open()
        process.serve()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent hears Ctrl-C itself, or has gone


def _load_job(start: WorkerStart) -> WorkerJob:
    if start.inherited is not None:
        inherited: WorkerJob = start.inherited
        return inherited
    job: WorkerJob = read_packed(start)
    torch.set_default_dtype(job.default_dtype)
    collate.default_collate_fn_map.update(job.collate_map)
    return job


@dataclass(eq=False)
class _ProcessWorker:
    """A worker, and the global generators as they are while it runs."""

    worker: Worker
    random: Any = None
    """Their state when another worker's turn came."""
    marked: Any = None
    """Their state to go back to if the next epoch, begun ahead, is not the one that was guessed."""
    draws: Draws | None = None
    """None: it has not had a turn."""


class _WorkerProcess:
    """The workers that one process runs, and what goes to the parent."""

    _job: WorkerJob

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._header = Header(start.memory.fd)
        self._region = Region(start.memory.fd, start.region_offset, start.region_bytes, start.region_limit)
        self._writer = BatchWriter(self._region)
        self._workers: dict[int, _ProcessWorker] = {}
        self._running: _ProcessWorker | None = None
        self._failed = False

    def open(self) -> None:
        """Load the job and begin the first epoch, or tell the parent why that cannot be."""
        start = self._start
        try:
            self._job = job = _load_job(start)
            for number in range(start.worker, job.num_copies, start.num_workers):
                dataset = copy.deepcopy(job.dataset) if self._workers else job.dataset
                self._workers[number] = _ProcessWorker(Worker(job, number, dataset))
                self._open_worker(number, job.shared_seed, 0)
        except Exception:
            self._failed = True
            number = start.worker
            self._respond(WorkerResult.OPENED, 0, number, number, (wrapped_error(number), None, None))

    def serve(self) -> None:
        """Do what the parent says until it says no more."""
        while True:
            try:
                message = self._start.tasks.recv_bytes()
            except (EOFError, OSError):
                return
            if not message:
                return
            *request, returned = pickle.loads(message)
            for offset in returned:
                self._region.take_back(offset)
            if self._header.get(Header.STOP):
                return
            if not self._failed:
                self._serve(*request)
            del message, request  # while it waits for more, nothing keeps the last batch

    def _serve(self, kind: int, generation: int, number: int, task: int, content: bytes) -> None:
        if kind == WorkerMessage.RANDOM:
            self._set_random(number, pickle.loads(content))
        elif kind == WorkerMessage.MARK:
            for own in self._workers.values():
                own.marked = random_state() if own is self._running else own.random
        elif kind in (WorkerMessage.RESET, WorkerMessage.BACK):
            for each, own in self._workers.items():
                if kind == WorkerMessage.BACK:
                    self._set_random(each, own.marked)
                self._open_worker(each, pickle.loads(content), generation)
        elif generation >= self._header.get(Header.GENERATION):
            self._fetch(kind, generation, number, task, content)

    def _fetch(self, kind: int, generation: int, number: int, task: int, content: bytes) -> None:
        draws, worker = self._switch_to(number), self._workers[number].worker
        try:
            response = worker.serve(kind, pickle.loads(content))
        except Exception:  # of the index: those of the dataset are responses
            response = WorkerResult.ERROR, wrapped_error(number), None
        if response is not None:
            kind, data, state = response
            random = draws.since() if worker.failure is None else None
            self._respond(kind, generation, number, task, (data, state, random))

    def _open_worker(self, number: int, shared_seed: int | None, generation: int) -> None:
        self._switch_to(number)
        worker = self._workers[number].worker
        state = worker.try_to_open(shared_seed)
        if self._job.announce:
            self._respond(WorkerResult.OPENED, generation, number, number, (worker.failure, state, None))

    def _switch_to(self, number: int) -> Draws:
        """Give the global generators, and `get_worker_info`, to a worker."""
        own = self._workers[number]
        if own is not self._running:
            if self._running is not None:
                self._running.random = random_state()
            if own.draws is not None:
                set_random_state(own.random)
            else:
                seed_all(self._job.base_seed, number)
                own.draws = Draws()
            self._running = own
        torch_worker._worker_info = own.worker.info
        assert own.draws is not None
        return own.draws

    def _set_random(self, number: int, state: Any) -> None:
        draws = self._switch_to(number)
        set_random_state(state)
        draws.since()  # that was no draw

    def _respond(self, kind: int, generation: int, number: int, task: int, value: tuple[Any, ...]) -> None:
        """Tell the parent: batch or error, state of the worker, state of the generators if it drew."""
        put = self._writer.put
        try:
            offset, packed = put(value)
        except Exception:
            kind = WorkerResult.ERROR if kind == WorkerResult.BATCH else kind
            try:
                offset, packed = put((wrapped_error(number), *value[1:]))
            except Exception:
                offset, packed = put((wrapped_error(number), None, None))
        self._start.respond(
            ProcessResponse(
                kind,
                self._start.worker,
                generation,
                task,
                offset,
                packed.nbytes,
                *packed.layout,
                len(packed.placed),
                packed.nbytes + sum(tensor.nbytes for tensor, _ in packed.placed),
            )
        )
