"""The iterator of `DataLoader` with workers, processes or threads.

Beyond torch's look-ahead of `prefetch_factor` batches a worker, a worker that has fewer than that left to do
while the consumer waits for another one goes on with its own later batches, within a bound of batches and
bytes. (With none left to do it would stand still until the consumer has woken and sent it something.)
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from multiprocessing import util
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils import pin_memory as torch_pin

from dataflow.workers.choice import Decision, decide
from dataflow.workers.copies import copies
from dataflow.workers.fetching import FetchIterator, LaneOrder
from dataflow.workers.lane import BACK, END, ERROR, MARK, OPENED, RANDOM, RESET, SKIP, TASK, Job, has_state
from dataflow.workers.next_epoch import NextEpoch, predicted_indices
from dataflow.workers.processes import ProcessWorkers, start_workers
from dataflow.workers.progress import Progress
from dataflow.workers.resumed import Resumed
from dataflow.workers.settings import WorkerLoader
from dataflow.workers.threads import Finished, ItemThreads, LaneThreads, needs_lanes
from dataflow.workers.trial import observe
from prefetch.workers.death import WorkerDiedError
from prefetch.workers.pool import Answer

_log = logging.getLogger("dataflow")

_NOTICE_S = 300.0
"""Without a time-out, stacks are printed after waiting this long for one batch."""
_START_S = 120.0
"""Workers may take so long to start before that counts as a time-out."""
_AHEAD = 8
"""A waiting consumer lets workers run ahead, up to this many times torch's look-ahead."""
_AHEAD_BYTES = 96 << 20
"""And until so much is ready or in work: large batches outweigh soon what waiting for a late one costs."""

Crew = ProcessWorkers | ItemThreads | LaneThreads


class _Task:
    """A batch on its way."""

    __slots__ = ("answer", "lane", "number", "sampled")

    def __init__(self, number: int, lane: int, sampled: Any) -> None:
        self.number, self.lane, self.sampled = number, lane, sampled
        self.answer: Answer | Finished | None = None


class WorkerIterator(FetchIterator):
    """Batches from worker processes or threads. Used by one thread at a time."""

    def __init__(self, loader: WorkerLoader) -> None:
        resumed = loader._resumed
        super().__init__(loader)
        if loader.prefetch_factor is None or loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for workers")
        self._look_ahead = loader.prefetch_factor
        self._max_tasks = self._look_ahead * self._num_workers
        self._in_order = loader.in_order
        self._memory_limit = loader.memory_limit
        self._failed: BaseException | None = None
        self._generation = 0
        job = self._job(loader, resumed)
        self._announced = job.announce
        self._sampler_error: Exception | None = None
        self._crew: Crew = self._start(loader, job, resumed)
        loader._start = self._crew.start, self._crew.start_reason
        self._dumps = self._crew.dumps
        # Runs when the iterator dies, and at exit.
        self._closer = util.Finalize(self, self._crew.close, exitpriority=10)
        self._next_epoch: NextEpoch | None = None
        self._speculates = (
            self._persistent_workers
            and self._in_order
            and self._crew.isolated  # else the caller may change what workers see between epochs
            and not has_state(self._dataset)
            and not isinstance(self._dataset, IterDataPipe)
        )
        self._epochs = [self._sampler_epoch()]
        try:
            self._begin(resumed)
        except BaseException as error:
            self._fail(error)
            raise

    def _start(self, loader: WorkerLoader, job: Job, resumed: Resumed | None) -> Crew:
        if loader._choice.value == "auto":
            loader._choice = self._chosen(job)
        if loader._choice.value == "process":
            return ProcessWorkers(*start_workers(loader, job, pin=self._pin_memory))
        if not needs_lanes(job):
            # Nobody has said that the dataset may be used by several threads.
            datasets = copies(job.dataset, self._num_workers) if loader.workers == "auto" else None
            return ItemThreads(job, self._num_workers, self._progress.turn, datasets)
        lanes = resumed.lanes if resumed else {}
        fetched = {n: lane.batches - resumed.skips(n) for n, lane in lanes.items()} if resumed else {}
        return LaneThreads(job, self._num_workers, self._progress.turn, fetched)

    def _chosen(self, job: Job) -> Decision:
        first = list(itertools.islice(self._sampler_iter, 1))
        self._sampler_iter = itertools.chain(first, self._sampler_iter)
        if not first:
            return Decision("process", "there was no batch to try")
        seen = observe(job, first[0], self._timeout)
        return decide(seen, num_workers=self._num_workers, num_cores=len(os.sched_getaffinity(0)))

    def close(self) -> None:
        """End the workers; what was handed out stays valid. Idempotent."""
        self._failed = self._failed or RuntimeError("the loader was closed inside this loop")
        self._closer()

    @property
    def ends_with_epoch(self) -> bool:
        """Whether the next epoch needs other workers than these, though they are persistent.

        After a resume there may be fewer lanes than workers, or more; if nothing was kept on any of them,
        the next epoch has as many as workers.
        """
        kept = any(lane.is_kept for lane in self._progress.lanes.values())
        return self._failed is not None or (self._num_lanes != self._num_workers and not kept)

    def _fail(self, error: BaseException) -> None:
        """End the workers; from now on `next` raises this error."""
        if not isinstance(error, Exception):
            self._crew.close(hurry=True)  # Ctrl-C: nobody wants to wait
            error = RuntimeError(f"this loop was interrupted by {type(error).__name__}; begin a new one")
        self._failed = error
        self._closer()

    _shutdown_workers = close  # torch's name, which others call

    @property
    def crew(self) -> Crew:
        """Who fetches."""
        return self._crew

    @property
    def num_ahead(self) -> tuple[int, int]:
        """Batches in work or ready, and ready."""
        if self._failed is not None:
            return 0, 0
        return len(self._tasks), sum(task.answer is not None for task in self._tasks.values())

    @property
    def _workers(self) -> Any:
        return self._crew.processes

    def _begin(self, resumed: Resumed | None, given: NextEpoch | None = None) -> None:
        self._tasks: dict[int, _Task] = given.tasks if given else {}
        self._order = LaneOrder(max(1, self._num_lanes), resumed, len(self._tasks))
        self._sent = self._outstanding = len(self._tasks)
        self._next = 0
        self._held_bytes = sum(task.answer.total for task in self._tasks.values() if task.answer)
        self._unfinished = [0] * self._num_workers
        self._lane_tasks = [0] * self._order.count
        for task in self._tasks.values():
            self._lane_tasks[task.lane] += 1
            self._unfinished[task.lane % self._num_workers] += task.answer is None
        self._exhausted = self._ended = False
        self._sampler_error = None
        self._ahead = resumed.ahead if resumed else frozenset()
        self._next_number = resumed.batches if resumed else self._sent
        self._progress.lanes_begin(self._order)
        for number, task in list(self._tasks.items()):
            if task.answer is not None and task.answer.kind == END:
                del self._tasks[number]
                self._outstanding -= 1
                self._lane_tasks[task.lane] -= 1
                self._lane_end(task.lane, task.answer)
        self._opening = set(range(self._order.count)) if self._announced else set()
        for lane in range(self._order.count):
            for _ in range(resumed.skips(lane) if resumed else 0):
                self._send(lane, SKIP, -1, self._dumps(next(self._sampler_iter)))
            random = resumed.lanes[lane].random if resumed and lane in resumed.lanes else None
            if random is not None:
                self._send(lane, RANDOM, -1, self._dumps(random))
        self._fill(waiting=False)
        while self._opening:
            self._wait()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """The next epoch with the workers there are."""
        resumed = loader._take_resumed()
        assert resumed is None, "a loaded state needs new workers"
        self._raise_if_failed()
        self._progress = Progress.begin(loader, None, self._progress)
        loader._progress = self._progress
        super()._reset(loader, first_iter)
        self._resume_sampler(loader, None)
        self._epochs.append(self._sampler_epoch())
        self._discard_tasks(self._tasks)
        given, self._next_epoch = self._next_epoch, None
        if given is not None:
            real = list(itertools.islice(self._sampler_iter, len(given.indices)))
            if real == given.indices:
                self._generation += 1
                self._crew.begin_epoch(self._generation)
                self._begin(None, given)
                return
            self._sampler_iter = itertools.chain(real, self._sampler_iter)
            self._discard_tasks(given.tasks)
        self._generation += 2  # the one between was the guess
        self._crew.begin_epoch(self._generation)
        for worker in range(self._num_workers):
            kind = RESET if given is None else BACK
            self._post(worker, kind, worker, -1, self._dumps(self._shared_seed))
        self._begin(None)

    def _discard_tasks(self, tasks: dict[int, _Task]) -> None:
        for task in tasks.values():
            if task.answer is not None:
                self._crew.discard(task.answer)

    def _sampler_epoch(self) -> int:
        return int(getattr(getattr(self._index_sampler, "sampler", self._index_sampler), "epoch", 0))

    # ---- sending -------------------------------------------------------------------------------

    def _post(
        self, worker: int, kind: int, lane: int, task: int, index: Any, *, later: int = 0, number: int = -1
    ) -> None:
        self._crew.post(worker, (kind, self._generation + later, lane, task, index), number)

    def _send(self, lane: int, kind: int, task: int, index: Any, number: int = -1) -> None:
        self._post(lane % self._num_workers, kind, lane, task, index, number=number)

    def _fill(self, *, waiting: bool) -> None:
        """Give out work: torch's look-ahead; more when a worker has little to do while the consumer waits."""
        while not self._exhausted and self._sampler_error is None:
            if self._outstanding >= self._max_tasks and not (waiting and self._may_run_ahead()):
                return
            try:
                index = self._dumps(next(self._sampler_iter))
            except StopIteration:
                self._exhausted = True
                break
            except Exception as error:
                self._sampler_error = error  # raised in its place, behind the batches that come before it
                return
            lane = self._order.next() if self._in_order else self._free_lane()
            if lane is None:
                break
            number = self._number()
            self._tasks[self._sent] = _Task(number, lane, self._progress.sampled())
            self._unfinished[lane % self._num_workers] += 1
            self._lane_tasks[lane] += 1
            self._outstanding += 1
            self._send(lane, TASK, self._sent, index, number)
            self._sent += 1
        if self._speculates:
            self._fill_next_epoch()

    def _fill_next_epoch(self) -> None:
        """Workers that have nothing left to do in this epoch begin the next."""
        ahead = self._next_epoch
        if ahead is None:
            step = self._epochs[-1] - self._epochs[-2] if len(self._epochs) > 1 else 0
            iterable = self._dataset_kind == _DatasetKind.Iterable
            predicted = (
                iter(self._index_sampler)
                if iterable  # what its workers do depends on nothing here
                else predicted_indices(self._index_sampler, self._progress.chain, step)
            )
            if predicted is None:
                self._speculates = False
                return
            ahead = self._next_epoch = NextEpoch(predicted)
            for worker in range(self._num_workers):
                self._post(worker, RESET if iterable else MARK, worker, -1, self._dumps(None), later=1)
        while (
            self._outstanding + len(ahead.tasks) < self._max_tasks and self._held_bytes < self._memory_limit
        ):
            index = next(ahead.predicted, None)
            if index is None:
                return
            number = len(ahead.tasks)
            lane = number % self._order.count
            ahead.tasks[number] = _Task(number, lane, None)
            ahead.indices.append(index)
            self._unfinished[lane % self._num_workers] += 1
            worker = lane % self._num_workers
            self._post(worker, TASK, lane, number, self._dumps(index), later=1, number=number)

    def _number(self) -> int:
        """The number in the epoch of the batch that is sent now."""
        number = self._next_number
        self._next_number += 1
        while self._next_number in self._ahead:
            self._next_number += 1
        return number

    def _may_run_ahead(self) -> bool:
        unfinished = sum(self._unfinished)
        ahead_bytes = self._held_bytes + unfinished * self._handed_bytes
        if (
            not self._in_order
            or self._outstanding >= _AHEAD * self._max_tasks
            or ahead_bytes >= min(self._memory_limit, _AHEAD_BYTES)
        ):
            return False
        if self._crew.shares_work:
            return unfinished < self._max_tasks
        return any(
            count < self._look_ahead and any(self._order.active[worker :: self._num_workers])
            for worker, count in enumerate(self._unfinished)
        )

    def _free_lane(self) -> int | None:
        bound = self._max_tasks // max(1, sum(self._order.active))
        for _ in range(self._order.count):
            lane = self._order.next()
            if lane is None or self._lane_tasks[lane] < bound:
                return lane
        return None

    # ---- receiving -----------------------------------------------------------------------------

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _next_data(self) -> Any:
        if self._ended:
            raise StopIteration  # again, as any iterator: the workers may be gone
        self._raise_if_failed()
        try:
            task = self._next_task()
            answer = task.answer
            assert answer is not None
            self._lane_tasks[task.lane] -= 1
            self._outstanding -= 1
            self._held_bytes -= answer.total
            self._handed_bytes = answer.total
            data: Any = None
            state = random = failure = None
            try:
                data, state, random = self._crew.unpack(answer)
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
        number = None if self._in_order or self._dataset_kind == _DatasetKind.Iterable else task.number
        self._progress.delivered(task.lane, state, random, task.sampled, number)
        if failure is None and answer.kind == ERROR:
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
        self._take(self._crew.receive())
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
        """The next task to deliver, if its answer is here."""
        if not self._in_order:
            for number, task in self._tasks.items():
                if task.answer is not None:
                    return self._tasks.pop(number)
            return None
        while self._next < self._sent:
            there = self._tasks.get(self._next)
            if there is not None and there.answer is None:
                return None
            self._next += 1
            if there is not None:
                del self._tasks[self._next - 1]
                return there
        return None

    def _wait(self) -> None:
        began = time.perf_counter()
        limit = self._timeout if self._timeout > 0 else None
        while True:
            self._fill(waiting=True)
            self._raise_if_failed()  # what wakes us when another thread closes may have come before
            waited = time.perf_counter() - began
            try:
                answers = self._crew.wait(_NOTICE_S if limit is None else limit - waited)
            except WorkerDiedError as error:
                self._raise_if_failed()  # another thread has closed the loader
                self._fail(error)
                raise
            self._raise_if_failed()
            if answers:
                self._take(answers)
                return
            if limit is not None and not self._crew.started and time.perf_counter() - began < _START_S:
                limit += self._timeout  # it is for batches, not for starting processes
                continue
            stacks = self._crew.stacks()
            if limit is not None:
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout} seconds. The workers are doing:\n{stacks}"
                )
            _log.warning("no batch for %d s; what the workers are doing:\n%s", _NOTICE_S, stacks)

    def _take(self, answers: list[Answer] | list[Finished]) -> None:
        for answer in answers:
            if self._next_epoch is not None and answer.generation == self._generation + 1:
                self._unfinished[answer.worker] -= 1
                self._held_bytes += answer.total
                self._next_epoch.tasks[answer.task].answer = answer
                continue
            if answer.generation != self._generation:
                self._crew.discard(answer)  # of an epoch that was left
                continue
            if answer.kind == OPENED:
                self._opened(answer)
                continue
            self._unfinished[answer.worker] -= 1
            task = self._tasks.get(answer.task)
            if task is None:
                self._crew.discard(answer)
                continue
            if answer.kind == END:
                self._lane_end(task.lane, answer)
                continue
            task.answer = answer
            self._held_bytes += answer.total
            if not self._in_order:  # in order of arrival
                self._tasks[answer.task] = self._tasks.pop(answer.task)

    def _opened(self, answer: Answer | Finished) -> None:
        """A lane stands at its beginning, or could not get there."""
        error, state, _ = self._crew.unpack(answer)
        self._opening.discard(answer.task)
        if isinstance(error, ExceptionWrapper):
            self._opening.clear()
            self._fail(_exception_of(error))
            self._raise_if_failed()
        self._progress.lane_opened(answer.task, state)

    def _lane_end(self, lane: int, answer: Answer | Finished) -> None:
        """A lane's iterable has ended: forget its tasks."""
        _, state, random = self._crew.unpack(answer)
        self._progress.lane_ended(lane, state, random)
        self._order.end(lane)
        for number in [n for n, task in self._tasks.items() if task.lane == lane and task.answer is None]:
            del self._tasks[number]
            self._outstanding -= 1
            self._lane_tasks[lane] -= 1
        self._fill(waiting=False)


def _exception_of(error: ExceptionWrapper) -> Exception:
    try:
        error.reraise()
    except Exception as raised:
        return raised.with_traceback(None)
    raise AssertionError("nothing was raised")
