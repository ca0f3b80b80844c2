"""A worker process fetches batches of a dataset and delivers them in shared memory.

It runs one or more workers (`dataflow.workers.worker`). There are as many workers as processes, unless a
state is resumed that was taken with another number of them: then the workers of the state go on, in the
processes there are, and take turns at the process's global random generators.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils import signal_handling, worker as torch_worker

from dataflow.workers.worker import Worker, WorkerJob, wrapped_error
from prefetch.ipc.generators import Draws, random_state, seed_all, set_random_state
from prefetch.ipc.pipe import PipeTransport, run_worker
from prefetch.ipc.protocol import WorkerMessage, WorkerRequest, WorkerResult
from prefetch.workers.shared_arena import Header
from prefetch.workers.worker_start import WorkerStart


def run(start: WorkerStart) -> None:
    """A worker process, from its start to its end."""
    handle = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]
    run_worker(start, lambda _, transport: FetchTask(transport).serve, handle=handle)


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


class FetchTask:
    """Fetches batches as requests say, for the workers that one process runs."""

    _job: WorkerJob

    def __init__(self, transport: PipeTransport) -> None:
        """Load the job and begin the first epoch, or tell the parent why that cannot be."""
        self._transport, start = transport, transport.start
        self._workers: dict[int, _ProcessWorker] = {}
        self._running: _ProcessWorker | None = None
        self._failed = False
        try:
            self._job = job = transport.read_job()
            for number in range(start.worker, job.num_copies, start.num_workers):
                dataset = copy.deepcopy(job.dataset) if self._workers else job.dataset
                self._workers[number] = _ProcessWorker(Worker(job, number, dataset))
                self._open_worker(number, job.shared_seed, 0)
        except Exception:
            self._failed = True
            number = start.worker
            self._respond(WorkerResult.OPENED, 0, number, number, (wrapped_error(number), None, None))

    def serve(self, request: WorkerRequest) -> None:
        """Do what the parent says."""
        if self._failed:
            return
        kind, task, content, generation, number, _ = request
        if kind == WorkerMessage.RANDOM:
            self._set_random(number, pickle.loads(content))
        elif kind == WorkerMessage.REMEMBER:
            for worker in self._workers.values():
                worker.marked = random_state() if worker is self._running else worker.random
        elif kind in (WorkerMessage.RESET, WorkerMessage.BACK):
            for each, worker in self._workers.items():
                if kind == WorkerMessage.BACK:
                    self._set_random(each, worker.marked)
                self._open_worker(each, pickle.loads(content), generation)
        elif generation >= self._transport.header.get(Header.GENERATION):
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
        worker = self._workers[number]
        if worker is not self._running:
            if self._running is not None:
                self._running.random = random_state()
            if worker.draws is not None:
                set_random_state(worker.random)
            else:
                seed_all(self._job.base_seed, number)
                worker.draws = Draws()
            self._running = worker
        torch_worker._worker_info = worker.worker.info
        assert worker.draws is not None
        return worker.draws

    def _set_random(self, number: int, state: Any) -> None:
        draws = self._switch_to(number)
        set_random_state(state)
        draws.since()  # that was no draw

    def _respond(self, kind: int, generation: int, number: int, task: int, value: tuple[Any, ...]) -> None:
        """Tell the parent: batch or error, state of the worker, state of the generators if it drew."""
        respond = self._transport.respond
        try:
            respond(kind, task, value, generation)
        except Exception:
            kind = WorkerResult.ERROR if kind == WorkerResult.BATCH else kind
            try:
                respond(kind, task, (wrapped_error(number), *value[1:]), generation)
            except Exception:
                respond(kind, task, (wrapped_error(number), None, None), generation)
