"""The iterator of `DataLoader` with workers, processes or threads.

Beyond torch's look-ahead of `prefetch_factor` batches a worker, a worker that has fewer than that left to do
while the consumer waits for another one goes on with its own later batches, within a bound of batches and
bytes, where the sampler is one that may be read early. (With none left to do it would stand still until the
consumer has woken and sent it something.) With `prefetch_across_epochs=True`, persistent workers that have
nothing left to do begin the next epoch, as far as `samplers` can predict it.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import pin_memory as torch_pin

from dataflow.workers.fetching import FetchIterator, RoundRobin, WorkerLoader
from dataflow.workers.processes import ProcessRunners, start_processes
from dataflow.workers.samplers import num_readable, predicted_indices, sampler_epoch
from dataflow.workers.threads import BatchThreads, ItemThreads, ThreadResponse, needs_own_datasets
from dataflow.workers.worker import WorkerJob, has_state
from prefetch.ipc.protocol import WorkerMessage, WorkerRequest, WorkerResult
from prefetch.memory.lifetimes import InlineFinalizer
from prefetch.workers.deaths import WorkerDiedError
from prefetch.workers.worker_start import WorkerResponse

_log = logging.getLogger("dataflow")

Runners = ProcessRunners | ItemThreads | BatchThreads
"""The processes or threads that run the workers."""
Response = WorkerResponse | ThreadResponse


@dataclass(slots=True)
class _Task:
    """A batch on its way."""

    number: int
    """Number of the batch, in the epoch."""
    worker: int
    sampled: Any
    response: Response | None = None


@dataclass
class NextEpoch:
    """The part of the next epoch that persistent workers were given before anybody asked for it."""

    predicted: Iterator[Any]
    indices: list[Any] = field(default_factory=list)
    """The indices that were given out of that."""
    tasks: dict[int, _Task] = field(default_factory=dict)


class WorkerIterator(FetchIterator):
    """Batches from worker processes or threads. Used by one thread at a time."""

    _begins_sampler_twice = True

    def __init__(self, loader: WorkerLoader) -> None:
        super().__init__(loader)
        if loader.prefetch_factor is None or loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for workers")
        self._look_ahead = loader.prefetch_factor
        self._max_tasks = self._look_ahead * self._num_workers
        self._in_order = loader.in_order
        self._memory_limit = loader.memory_limit
        self._limits = loader.worker_limits
        self._failure: BaseException | None = None
        self.generation = 0
        """Generation of messages and responses: 1 more with an epoch that was guessed, 2 more with
        another."""
        job = self._job(loader)
        self._announced = job.announce
        self.runners: Runners = self._start(loader, job)
        """The workers that fetch."""
        loader._drop_in.start = self.runners.start, self.runners.start_reason
        self._dumps = self.runners.dumps
        self._closer = InlineFinalizer(self, self.runners.close)
        self.next_epoch: NextEpoch | None = None
        """Work that was given out for the epoch after this one."""
        self._speculates = (
            loader.prefetch_across_epochs
            and self._persistent_workers
            and self._in_order
            and self.runners.isolated  # else workers share what the caller changes between epochs
            and not has_state(self._dataset)
            and not isinstance(self._dataset, IterDataPipe)
        )
        self._epochs = [sampler_epoch(self._index_sampler) or 0]
        try:
            self._begin()
        except BaseException as error:
            self._fail(error)
            raise
        self._resumed = None

    def _start(self, loader: WorkerLoader, job: WorkerJob) -> Runners:
        if loader.workers == "process":
            return start_processes(loader, job, pin=self._pin_memory)
        if not needs_own_datasets(job):
            return ItemThreads(job)
        fetched = {n: self._resumed_worker(n).batches - self._num_skipped(n) for n in job.states}
        return BatchThreads(job, fetched)

    def close(self) -> None:
        """End the workers; what was handed out stays valid. Idempotent."""
        self._failure = self._failure or RuntimeError("the loader was closed inside this loop")
        self._closer()

    @property
    def ends_with_epoch(self) -> bool:
        """Return whether the next epoch needs other workers than these, though they are persistent.

        After a resume there may be fewer workers than runners, or more; if none of them has a state, the
        next epoch has as many workers as runners.
        """
        stateful = any(worker.has_state for worker in self._progress.workers.values())
        others = self._progress.num_workers != self._num_workers
        return self._failure is not None or (others and not stateful)

    def _fail(self, error: BaseException) -> None:
        """End the workers; from now on `next` raises this error."""
        if not isinstance(error, Exception):
            self.runners.close(stop_s=0)  # Ctrl-C: nobody wants to wait
            error = RuntimeError(f"this loop was interrupted by {type(error).__name__}; begin a new one")
        self._failure = error
        self._closer()

    _shutdown_workers = close  # torch's name, which others call

    @property
    def num_ahead(self) -> tuple[int, int]:
        """Batches in work or ready, and ready."""
        if self._failure is not None:
            return 0, 0
        return len(self._tasks), sum(task.response is not None for task in self._tasks.values())

    @property
    def _workers(self) -> Any:
        return self.runners.processes

    def _begin(self, guess: NextEpoch | None = None) -> None:
        """Begin an epoch. `guess`: what runners have of it."""
        self._tasks: dict[int, _Task] = guess.tasks if guess else {}
        self._turns = RoundRobin(max(1, self._progress.num_workers), self._progress, len(self._tasks))
        self._sent = len(self._tasks)
        responses = [task.response for task in self._tasks.values()]
        self._held_bytes = sum(response.total for response in responses if response)
        self._unfinished = [0] * self._num_workers
        for task in self._tasks.values():
            self._unfinished[task.worker % self._num_workers] += task.response is None
        self._exhausted = self._ended = False
        self._sampler_error: Exception | None = None
        self._ahead = frozenset(self._progress.ahead)
        self._readable = math.inf if self._iterable else num_readable(self._index_sampler)
        self._next_number = self._progress.batches + self._sent
        """The number in the epoch of the batch that is sent next."""
        self._progress.begin_workers(self._turns.count)
        for number, task in list(self._tasks.items()):
            if task.response is not None and task.response.kind == WorkerResult.END:
                del self._tasks[number]
                self._end_worker(task.worker, task.response)
        self._opening = set(range(self._turns.count)) if self._announced else set()
        for worker in range(self._turns.count):
            for _ in range(self._num_skipped(worker)):
                self._post(worker, WorkerMessage.SKIP, self._dumps(next(self._sampler_iter)))
            random = self._resumed_worker(worker).random
            if random is not None:
                self._post(worker, WorkerMessage.RANDOM, self._dumps(random))
        self._fill(waiting=False)
        while self._opening:
            self._wait()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """The next epoch with the workers there are."""
        assert loader._drop_in.progress.loaded is None, "a loaded state needs new workers"
        self._raise_if_failed()
        self._progress = loader._drop_in.progress = self._progress.begun_with_same_workers(loader)
        self._progress.sampler.begin(self._index_sampler)
        super()._reset(loader, first_iter)
        self._begin_sampler(loader)
        self._epochs.append(sampler_epoch(self._index_sampler) or 0)
        self._discard_tasks(self._tasks)
        guess, self.next_epoch = self.next_epoch, None
        if guess is not None:
            indices = list(itertools.islice(self._sampler_iter, len(guess.indices)))
            if indices == guess.indices:
                self.generation += 1
                self.runners.begin_epoch(self.generation)
                self._begin(guess)
                return
            self._sampler_iter = itertools.chain(indices, self._sampler_iter)
            self._discard_tasks(guess.tasks)
        self.generation += 2  # the one between was the guess
        self.runners.begin_epoch(self.generation)
        kind = WorkerMessage.RESET if guess is None else WorkerMessage.BACK
        for runner in range(self._num_workers):
            self._post(runner, kind, self._dumps(self._shared_seed))
        self._begin()

    def _discard_tasks(self, tasks: dict[int, _Task]) -> None:
        for task in tasks.values():
            if task.response is not None:
                self.runners.discard(task.response)

    # ---- sending -------------------------------------------------------------------------------

    def _post(
        self, worker: int, kind: int, content: Any, *, task: int = -1, number: int = -1, later: int = 0
    ) -> None:
        request = WorkerRequest(kind, task, content, self.generation + later, worker, number)
        self.runners.send(worker % self._num_workers, request)

    def _fill(self, *, waiting: bool) -> None:
        """Give out work: torch's look-ahead; more when a runner has little to do while the consumer waits."""
        while not self._exhausted and self._sampler_error is None:
            if len(self._tasks) >= self._max_tasks and not (waiting and self._may_run_ahead()):
                return
            try:
                index = self._dumps(next(self._sampler_iter))
            except StopIteration:
                self._exhausted = True
                break
            except Exception as error:
                self._sampler_error = error  # raised in its place, behind the batches that come before it
                return
            worker = self._turns.next() if self._in_order else self._free_worker()
            if worker is None:
                break
            number = self._next_number
            self._next_number += 1
            while self._next_number in self._ahead:
                self._next_number += 1
            self._tasks[self._sent] = _Task(number, worker, self._progress.sampler.sampled())
            self._unfinished[worker % self._num_workers] += 1
            self._post(worker, WorkerMessage.TASK, index, task=self._sent, number=number)
            self._sent += 1
        if self._speculates:
            self._fill_next_epoch()

    def _fill_next_epoch(self) -> None:
        """Runners that have nothing left to do in this epoch begin the next."""
        ahead = self.next_epoch
        if ahead is None:
            step = self._epochs[-1] - self._epochs[-2] if len(self._epochs) > 1 else 0
            predicted = (
                iter(self._index_sampler)
                if self._iterable  # what its workers do depends on nothing here
                else predicted_indices(self._index_sampler, self._progress.chain, step)
            )
            if predicted is None:
                self._speculates = False
                return
            ahead = self.next_epoch = NextEpoch(predicted)
            kind = WorkerMessage.RESET if self._iterable else WorkerMessage.REMEMBER
            for runner in range(self._num_workers):
                self._post(runner, kind, self._dumps(None), later=1)
        while len(self._tasks) + len(ahead.tasks) < self._max_tasks and self._held_bytes < self._memory_limit:
            index = next(ahead.predicted, None)
            if index is None:
                return
            number = len(ahead.tasks)
            worker = number % self._turns.count
            ahead.tasks[number] = _Task(number, worker, None)
            ahead.indices.append(index)
            self._unfinished[worker % self._num_workers] += 1
            content = self._dumps(index)
            self._post(worker, WorkerMessage.TASK, content, task=number, number=number, later=1)

    def _may_run_ahead(self) -> bool:
        unfinished = sum(self._unfinished)
        # Batches in work will be about as large as the last one.
        ahead_bytes = self._held_bytes + unfinished * self._delivered_bytes
        if (
            not self._in_order
            or self._next_number >= self._readable
            or len(self._tasks) >= self._limits.ahead * self._max_tasks
            or ahead_bytes >= min(self._memory_limit, self._limits.ahead_bytes)
        ):
            return False
        if self.runners.shares_work:
            return unfinished < self._max_tasks
        return any(
            count < self._look_ahead and any(self._turns.active[runner :: self._num_workers])
            for runner, count in enumerate(self._unfinished)
        )

    def _free_worker(self) -> int | None:
        """Without an order: the next worker that has less than its share of what is under way."""
        bound = self._max_tasks // max(1, sum(self._turns.active))
        num_tasks = Counter(task.worker for task in self._tasks.values())
        for _ in range(self._turns.count):
            worker = self._turns.next()
            if worker is None or num_tasks[worker] < bound:
                return worker
        return None

    # ---- receiving -----------------------------------------------------------------------------

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _next_data(self) -> Any:
        if self._ended:
            raise StopIteration  # again, as any iterator: the workers may be gone
        self._raise_if_failed()
        try:
            task = self._next_task()
            response = task.response
            assert response is not None
            self._held_bytes -= response.total
            self._delivered_bytes = response.total
            data: Any = None
            state = random = failure = None
            try:
                data, state, random = self.runners.unpack(response)
            except Exception as error:
                error.add_note("raised in the main process, while it rebuilt a batch from a worker")
                failure = error
            self._fill(waiting=False)
        except BaseException as error:
            if util.is_exiting() and threading.current_thread().daemon:
                threading.Event().wait()  # the program ends, and nobody wants to hear what becomes of this
            if not isinstance(error, Exception):
                self._fail(error)
            raise
        number = None if self._in_order or self._iterable else task.number
        self._progress.delivered(task.worker, state, random, task.sampled, number)
        if failure is None and response.kind == WorkerResult.ERROR:
            failure = _exception_of(data)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # no cycle with this frame: the workers end when the iterator dies
        if self._pin_memory:
            data = torch_pin.pin_memory(data, self._pin_memory_device)
        return data

    def _next_task(self) -> _Task:
        """Wait for the next batch. `StopIteration` after the last."""
        self._take(self.runners.receive())
        while True:
            task = self._ready()
            if task is not None:
                return task
            if self._tasks:
                self._wait()
                continue
            self._fill(waiting=False)
            if self._tasks:
                continue
            if self._sampler_error is not None:
                error, self._sampler_error = self._sampler_error, None
                try:
                    raise error
                finally:
                    del error
            self._ended = True
            self._progress.end()
            if not self._persistent_workers:
                self._closer()
            raise StopIteration

    def _ready(self) -> _Task | None:
        """The next task to deliver, if its response is here."""
        for number, task in self._tasks.items():
            if task.response is not None:
                return self._tasks.pop(number)
            if self._in_order:
                break
        return None

    def _wait(self) -> None:
        began = time.perf_counter()
        limit = self._timeout if self._timeout > 0 else None
        while True:
            self._fill(waiting=True)
            self._raise_if_failed()  # what wakes us when another thread closes may have come before
            waited = time.perf_counter() - began
            try:
                responses = self.runners.wait(self._limits.notice_s if limit is None else limit - waited)
            except WorkerDiedError as error:
                self._raise_if_failed()  # another thread has closed the loader
                self._fail(error)
                raise
            self._raise_if_failed()
            if responses:
                self._take(responses)
                return
            waited = time.perf_counter() - began
            if limit is not None and not self.runners.started and waited < self._limits.start_s:
                limit += self._timeout  # it is for batches, not for starting processes
                continue
            stacks = self.runners.stacks()
            if limit is not None:
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout} seconds. The workers are doing:\n{stacks}"
                )
            _log.warning("no batch for %d s; what the workers are doing:\n%s", self._limits.notice_s, stacks)

    def _take(self, responses: Sequence[Response]) -> None:
        for response in responses:
            if self.next_epoch is not None and response.generation == self.generation + 1:
                self._unfinished[response.runner] -= 1
                self._held_bytes += response.total
                self.next_epoch.tasks[response.task].response = response
                continue
            if response.generation != self.generation:
                self.runners.discard(response)  # of an epoch that was left
                continue
            if response.kind == WorkerResult.OPENED:
                self._opened(response)
                continue
            self._unfinished[response.runner] -= 1
            task = self._tasks.get(response.task)
            if task is None:
                self.runners.discard(response)
                continue
            if response.kind == WorkerResult.END:
                self._end_worker(task.worker, response)
                continue
            task.response = response
            self._held_bytes += response.total
            if not self._in_order:  # in order of arrival
                self._tasks[response.task] = self._tasks.pop(response.task)

    def _opened(self, response: Response) -> None:
        """A worker stands at its beginning, or could not get there."""
        error, state, _ = self.runners.unpack(response)
        self._opening.discard(response.task)
        if isinstance(error, ExceptionWrapper):
            self._opening.clear()
            self._fail(_exception_of(error))
            self._raise_if_failed()
        self._progress.worker_opened(response.task, state)

    def _end_worker(self, worker: int, response: Response) -> None:
        """A worker's iterable has ended: forget its tasks."""
        _, state, random = self.runners.unpack(response)
        self._progress.worker_ended(worker, state, random)
        self._turns.end(worker)
        for number in [
            n for n, task in self._tasks.items() if task.worker == worker and task.response is None
        ]:
            del self._tasks[number]
        self._fill(waiting=False)


def _exception_of(error: ExceptionWrapper) -> Exception:
    try:
        error.reraise()
    except Exception as raised:
        return raised.with_traceback(None)
    raise AssertionError("nothing was raised")
