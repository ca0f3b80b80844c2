"""Iterators of `DataLoader` over any map-style or iterable dataset: in this process, or in workers.

They follow `torch.utils.data.DataLoader` in what can be observed: the order of batches, what worker k
fetches, the seeds, the errors. Batch b belongs to lane b mod n (of the lanes that have not ended), so
random augmentation gives the values that it gives with torch. Beyond torch's look-ahead of
`prefetch_factor` batches a worker, a worker that has nothing left to do while the consumer waits for
another one goes on with its own later batches, within a bound of batches and bytes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind
from torch.utils.data._utils import pin_memory as torch_pin
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from dataflow.copies import copies
from dataflow.loader_state import Progress, Resumed
from dataflow.next_epoch import NextEpoch, predicted_indices
from dataflow.payload import Buffer, array_bytes, dumps_by_value, pack, placed_offsets, unpack
from dataflow.thread_workers import Finished, ItemThreads, LaneThreads, needs_lanes
from dataflow.worker_choice import Decision, decide
from dataflow.worker_process import (
    BACK,
    END,
    ERROR,
    MARK,
    OPENED,
    RANDOM,
    RESET,
    SKIP,
    TASK,
    Job,
    Lane,
    collate_map_changes,
    copied_random_state,
    has_state,
    run,
)
from dataflow.worker_trial import observe
from prefetch.device import register_pinned
from prefetch.fork_server import Modules, warm_up
from prefetch.shared_arena import Header, SharedFile
from prefetch.worker_death import WorkerDiedError
from prefetch.workers import Answer, WorkerPool

if TYPE_CHECKING:
    from dataflow.loader import DataLoader

_log = logging.getLogger("dataflow")

_NOTICE_S = 300.0
"""Without a time-out, stacks are printed after waiting this long for one batch."""
_START_S = 120.0
"""Workers may take so long to start before that counts as a time-out."""
_AHEAD = 8
"""A waiting consumer lets idle workers run ahead, up to this many times torch's look-ahead."""
_OBJECT_BYTES = 256 << 20
"""Python objects of a dataset above this size are worth a word: each worker has its own."""
_MESSAGE_HEAD = 4096
_IN_SERVER = {*sys.stdlib_module_names, "torch", "numpy", "cloudpickle", "dataflow", "prefetch", "sharding"}


class Tally:
    """What was handed out, and what that took, over all iterators of a loader."""

    def __init__(self) -> None:
        self.batches = self.bytes = 0
        self.starved_s = self.first_batch_s = 0.0
        self._began: float | None = None

    def waited(self, since: float) -> None:
        """The training code has waited for an iterator."""
        if self._began is None:
            self._began = since
        self.starved_s += time.perf_counter() - since

    def handed_out(self, since: float, nbytes: int) -> None:
        """The training code has waited for a batch."""
        self.waited(since)
        self.batches += 1
        self.bytes += nbytes
        if self.batches == 1 and self._began is not None:
            self.first_batch_s = time.perf_counter() - self._began

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first iterator was asked for."""
        return 0.0 if self._began is None else time.perf_counter() - self._began


class _Iterator(_BaseDataLoaderIter):
    """What both kinds share: the sampler's place and what a state needs."""

    def __init__(self, loader: DataLoader) -> None:
        resumed = loader._take_resumed()
        self._progress = Progress.begin(loader, resumed)
        loader._progress = self._progress
        super().__init__(loader)
        self._tally = loader._tally
        self._handed_bytes = 0
        self._num_lanes = resumed.num_lanes if resumed and resumed.lanes else self._num_workers
        self._base_seed = self._progress.seeded(loader, int(self._base_seed), self._num_lanes, resumed)
        self._resume_sampler(loader, resumed)

    def _resume_sampler(self, loader: DataLoader, resumed: Resumed | None) -> None:
        iterable = self._dataset_kind == _DatasetKind.Iterable
        skip = resumed.batches if resumed and not iterable else 0
        self._sampler_iter = self._progress.sampler_iterator(loader, resumed, skip)
        self._num_yielded = resumed.batches if resumed else 0

    def _job(self, loader: DataLoader, resumed: Resumed | None) -> Job:
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        iterable = self._dataset_kind == _DatasetKind.Iterable
        return Job(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
            init_fn,
            int(self._base_seed),
            self._num_lanes,
            self._shared_seed,
            collate_map_changes(),
            torch.get_default_dtype(),
            loader.snapshot_every_n_steps if iterable or has_state(self._dataset) else 0,
            has_state(self._dataset),
            {number: lane.state for number, lane in resumed.lanes.items()} if resumed else {},
        )

    @property
    def crew(self) -> Crew | None:
        """Who fetches; None: this process."""
        return None

    @property
    def num_ahead(self) -> tuple[int, int]:
        """Batches in work or ready, and ready."""
        return 0, 0

    def __next__(self) -> Any:
        began = time.perf_counter()
        if self._IterableDataset_len_called is not None or torch._C._autograd._profiler_enabled():
            data: Any = super().__next__()
        else:
            data = self._next_data()
            self._num_yielded += 1
        self._tally.handed_out(began, self._handed_bytes)
        return data


class MainIterator(_Iterator):
    """`num_workers=0`: batches are fetched when they are asked for."""

    def __init__(self, loader: DataLoader) -> None:
        resumed = loader._resumed
        super().__init__(loader)
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            torch.utils.data.graph_settings.apply_sharding(self._dataset, self._world_size, self._rank)
        job = self._job(loader, resumed)
        job.init_fn = None
        self._every = job.state_every
        count = max(1, self._num_lanes)
        states = job.resumed
        self._lanes = [
            Lane(
                job,
                n,
                self._dataset if count == 1 else pickle.loads(cloudpickle.dumps(self._dataset)),
                states.get(n),
            )
            for n in range(count)
        ]
        self._order = LaneOrder(count, resumed)
        for number, lane in enumerate(self._lanes):
            self._enter(lane)
            lane.open(None)
            for _ in range(resumed.skips(number) if resumed else 0):
                lane.skip(next(self._sampler_iter))
            self._leave()
        self._progress.lanes_begin(self._order)
        self._progress.live = True
        if self._every:
            self._progress.look = lambda lanes=self._lanes: [copy.deepcopy(lane.snapshot()) for lane in lanes]

    def _enter(self, lane: Lane) -> None:
        if lane.info is not None:
            torch_worker._worker_info = lane.info

    def _leave(self) -> None:
        if self._num_lanes:
            torch_worker._worker_info = None

    def _next_data(self) -> Any:
        index = self._next_index_or_end()
        while True:
            number = self._order.next()
            if number is None:
                self._progress.end()
                raise StopIteration
            lane = self._lanes[number]
            self._enter(lane)
            try:
                data = lane.fetch(index)
                break
            except StopIteration:
                self._order.end(number)
            except BaseException:
                self._progress.delivered(number)
                raise
            finally:
                self._leave()
        self._progress.delivered(number)
        self._handed_bytes = array_bytes(data)
        if self._pin_memory:
            data = torch_pin.pin_memory(data, self._pin_memory_device)
        return data

    def _next_index_or_end(self) -> Any:
        try:
            return next(self._sampler_iter)
        except StopIteration:
            self._progress.end()
            raise


class LaneOrder:
    """Whose turn it is: lanes one after another, without those that have ended."""

    def __init__(self, count: int, resumed: Resumed | None, given: int = 0) -> None:
        self.count = count
        self.active = [True] * count
        self._at = given
        if resumed:
            self._at = resumed.next_lane if resumed.lanes else resumed.batches
        self._at %= count

    def next(self) -> int | None:
        """The next lane; None when all have ended."""
        for _ in range(self.count):
            lane, self._at = self._at, (self._at + 1) % self.count
            if self.active[lane]:
                return lane
        return None

    def end(self, lane: int) -> None:
        """A lane has no more."""
        self.active[lane] = False


class _Task:
    """A batch on its way."""

    __slots__ = ("answer", "lane", "number", "sampled")

    def __init__(self, number: int, lane: int, sampled: Any) -> None:
        self.number, self.lane, self.sampled = number, lane, sampled
        self.answer: Answer | Finished | None = None


class WorkerIterator(_Iterator):
    """Batches from worker processes or threads. Used by one thread at a time."""

    def __init__(self, loader: DataLoader) -> None:
        resumed = loader._resumed
        super().__init__(loader)
        if loader.prefetch_factor is None or loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for workers")
        self._max_tasks = loader.prefetch_factor * self._num_workers
        self._in_order = loader.in_order
        self._memory_limit = loader.memory_limit
        self._failed: BaseException | None = None
        self._generation = 0
        job = self._job(loader, resumed)
        self._announced = job.announce
        self._sampler_error: Exception | None = None
        self._crew: Crew = self._start(loader, job, resumed)
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

    def _start(self, loader: DataLoader, job: Job, resumed: Resumed | None) -> Crew:
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
    def failed(self) -> bool:
        """Whether nothing more can come from these workers."""
        return self._failed is not None

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
        self._exhausted, self._sampler_error = False, None
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
        """Give out work: torch's look-ahead; more when a worker is idle while the consumer waits."""
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
        if (
            not self._in_order
            or self._outstanding >= _AHEAD * self._max_tasks
            or self._held_bytes >= self._memory_limit
        ):
            return False
        if self._crew.shares_work:
            return sum(self._unfinished) < self._max_tasks
        return any(
            not count and any(self._order.active[worker :: self._num_workers])
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
            waited = time.perf_counter() - began
            try:
                answers = self._crew.wait(_NOTICE_S if limit is None else limit - waited)
            except WorkerDiedError as error:
                self._fail(error)
                raise
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


class ProcessWorkers:
    """Worker processes and the file that their batches lie in."""

    kind = "process"
    shares_work = False
    """A task is for one worker."""

    def __init__(self, file: SharedFile, pool: WorkerPool) -> None:
        self._file, self._pool = file, pool
        self.receive, self.wait, self.stacks = pool.receive, pool.wait, pool.stacks
        self.dumps = dumps_by_value if pool.context is None else pickle.dumps

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


Crew = ProcessWorkers | ItemThreads | LaneThreads


def _exception_of(error: ExceptionWrapper) -> Exception:
    try:
        error.reraise()
    except Exception as raised:
        return raised.with_traceback(None)
    raise AssertionError("nothing was raised")


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


def begin_to_start(loader: DataLoader) -> None:
    """Start what workers will come from, without waiting for it."""
    if _start_context(loader.multiprocessing_context) is None:
        parts = [loader.dataset, *getattr(loader.dataset, "__dict__", {}).values()]
        functions = [f for f in (loader.collate_fn, loader.worker_init_fn) if hasattr(f, "__module__")]
        warm_up(_importable({type(part).__module__ for part in parts} | {f.__module__ for f in functions}))


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


def start_workers(loader: DataLoader, job: Job, *, pin: bool) -> tuple[SharedFile, WorkerPool]:
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
            region_limit=loader.memory_limit if not pin else 1 << 60,
        )
    except BaseException:
        file.close()
        raise
    return file, pool
