"""What worker threads do: fetch the items of batches, each by whichever thread is free.

Over a map-style dataset every thread is told of every batch and takes the next item that nobody has taken,
of the first batch that has one; whoever finishes the last item of a batch collates it. So a slow item
holds up one thread and not the items beside it. What must be asked for in one piece (`__getitems__`,
`batch_size=None`) counts as one item.

Iterable datasets, and those with a state of their own, are served in lanes as by worker processes (see
`worker_process`): lane k has a copy of the dataset and belongs to one thread.
"""

from __future__ import annotations

import copy
import operator
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import MapDataPipe, Subset, _DatasetKind, default_collate, default_convert

from dataflow.torch_threads import one_torch_thread, setting_kept
from dataflow.workers.copies import copies
from dataflow.workers.info import Generators, become, install, thread_info, uninstall
from dataflow.workers.lane import BACK, BATCH, ERROR, OPENED, RESET, SKIP, TASK, Job, Lane, has_state
from dataflow.workers.payload import array_bytes
from prefetch.memory.heap import trim_heap
from prefetch.workers.threads import WorkerThreads

_FREE_BYTES = 32 << 20
"""Freed memory that the C library may keep when threads end: what they used lies in heaps of their own."""


@dataclass(frozen=True)
class Finished:
    """A task that is done; what `prefetch.workers.pool.Answer` is for processes."""

    kind: int
    worker: int
    generation: int
    task: int
    total: int
    """Bytes of arrays and tensors."""
    value: tuple[Any, Any, Any]
    """Batch or error, state of the lane, nothing."""


class ThreadWorkers:
    """Threads that fetch batches, to `WorkerIterator` what `ProcessWorkers` is.

    `turn` is the number of epochs that were begun before with the same seed.
    """

    kind = "thread"
    isolated = False
    """What the caller changes in the dataset, the threads see."""
    processes: Sequence[Any] = ()
    started = True
    shared_bytes = 0
    start = start_reason = ""

    @staticmethod
    def dumps(index: Any) -> Any:
        """Nothing has to be sent anywhere."""
        return index

    def __init__(self, job: Job, num_workers: int, turn: int, *, copied: bool) -> None:
        self._job, self._num_workers, self._turn = job, num_workers, turn
        self.isolated = copied and job.collate_fn in (default_collate, default_convert)
        """Whether nothing that the training code changes reaches them."""
        self._generation = 0
        self._threads = WorkerThreads(num_workers, "dataflow-worker")
        self.receive, self.wait, self.stacks = self._threads.receive, self._threads.wait, self._threads.stacks
        install()
        with setting_kept():
            self._threads.on_all(lambda _: one_torch_thread())

    def unpack(self, answer: Any) -> Any:
        """What a finished task brings."""
        return answer.value

    def discard(self, answer: Any) -> None:
        """A finished task that nobody wants."""

    def begin_epoch(self, generation: int) -> None:
        """Pass over tasks of earlier generations; those of the next may be here already."""
        self._generation = generation
        self._turn += 1

    def close(self, *, hurry: bool = False) -> None:
        """End the threads, after the items they work on; nothing can hurry those. Idempotent."""
        if self._generation < sys.maxsize:
            self._generation = sys.maxsize
            self._threads.close()
            uninstall()
            trim_heap(_FREE_BYTES)

    def _turn_of(self, generation: int) -> int:
        return self._turn + (generation > self._generation)

    def _put(self, kind: int, worker: int, task: int, value: tuple[Any, Any, Any], generation: int) -> None:
        total = array_bytes(value[0]) if kind == BATCH else 0
        self._threads.put(Finished(kind, worker, generation, task, total, value))


# ---- item by item -------------------------------------------------------------------------------------


class _Batch:
    """A batch in work."""

    def __init__(self, units: Sequence[Any], worker: int, generation: int, task: int, key: Any) -> None:
        self.units, self.worker, self.generation, self.task, self.key = units, worker, generation, task, key
        self.items: list[Any] = [None] * len(units)
        self.takes = iter(range(len(units)))  # `next` is one step of the interpreter: no lock
        self._lock = threading.Lock()  # guards _left, failed_at and error
        self._left = len(units)
        self.failed_at = len(units)
        self.error: ExceptionWrapper | None = None

    def fail(self, place: int, error: ExceptionWrapper) -> None:
        """An item could not be fetched: of several the first counts, as in a loop over them."""
        with self._lock:
            if place < self.failed_at:
                self.failed_at, self.error = place, error

    def done(self, count: int) -> bool:
        """So many more items are there; whether they all are."""
        with self._lock:
            self._left -= count
            return self._left == 0


class _Hand:
    """One thread's view: its dataset, its `WorkerInfo`, its generators."""

    def __init__(self, job: Job, number: int, dataset: Any) -> None:
        self._job, self._number, self._dataset = job, number, dataset
        self.rng = Generators()
        self._info = thread_info(job, number, dataset, self.rng)
        self.broken: ExceptionWrapper | None = None
        self.get: Any = partial(operator.getitem, dataset)
        if not by_item(job):
            fetcher = _DatasetKind.create_fetcher(
                job.kind, dataset, job.auto_collation, job.collate_fn, job.drop_last
            )
            self.get = fetcher.fetch

    def begin(self) -> None:
        """First thing in the thread."""
        become(self._info)
        self.rng.begin(self._job.base_seed, "worker", self._number)
        try:
            if self._job.init_fn is not None:
                self._job.init_fn(self._number)
        except BaseException:
            self.broken = self.error()

    def error(self) -> ExceptionWrapper:
        """The exception being handled."""
        return ExceptionWrapper(where=f"in DataLoader worker thread {self._number}")

    def collate(self, batch: _Batch) -> tuple[int, Any]:
        """The batch of items that are all there, or the first error."""
        items, batch.items = batch.items, []  # busy threads still have the batch in their queues
        if batch.error is not None:
            return ERROR, batch.error
        if not by_item(self._job):
            return BATCH, items[0]
        self.rng.go_to(-1)
        try:
            return BATCH, self._job.collate_fn(items)
        except BaseException:
            return ERROR, self.error()


def by_item(job: Job) -> bool:
    """Whether the items of a batch can be asked for one by one."""
    dataset = job.dataset
    while type(dataset) is Subset:  # its `__getitems__` is a loop, unless there is one below
        dataset = dataset.dataset
    return job.auto_collation and not getattr(dataset, "__getitems__", None)


class ItemThreads(ThreadWorkers):
    """Threads over a map-style dataset, which all use, or one each of `datasets`."""

    shares_work = True

    def __init__(self, job: Job, num_workers: int, turn: int, datasets: Sequence[Any] | None = None) -> None:
        super().__init__(job, num_workers, turn, copied=datasets is not None)
        self._hands = [
            _Hand(job, number, datasets[number] if datasets else job.dataset) for number in range(num_workers)
        ]
        for number, hand in enumerate(self._hands):
            self._threads.submit(number, hand.begin)

    def post(self, worker: int, message: tuple[Any, ...], number: int) -> None:
        """Hand out (kind, generation, lane, task, index); `number` is the batch's in the epoch."""
        kind, generation, _, task, index = message
        if kind == TASK:
            units = list(index) if by_item(self._job) else [index]
            key = self._turn_of(generation), number
            batch = _Batch(units or [index], worker, generation, task, key)
            for thread, hand in enumerate(self._hands):
                self._threads.submit(thread, partial(self._help, hand, batch))

    def _help(self, hand: _Hand, batch: _Batch) -> None:
        """Take items of a batch until none is left to take."""
        get, rng, count = hand.get, hand.rng, 0
        rng.begin(self._job.base_seed, *batch.key)
        if hand.broken is not None:
            batch.fail(-1, hand.broken)
        for place in batch.takes:
            if batch.generation < self._generation:
                return
            if place <= batch.failed_at:
                rng.go_to(place)
                try:
                    batch.items[place] = get(batch.units[place])
                except BaseException:
                    batch.fail(place, hand.error())
            count += 1
        if count and batch.done(count):
            kind, data = hand.collate(batch)
            self._put(kind, batch.worker, batch.task, (data, None, None), batch.generation)


# ---- lane by lane -------------------------------------------------------------------------------------


def needs_lanes(job: Job) -> bool:
    """Whether it matters who fetches what: each lane then has a dataset of its own."""
    iterable = job.kind == _DatasetKind.Iterable
    return iterable or has_state(job.dataset) or isinstance(job.dataset, MapDataPipe)


class LaneThreads(ThreadWorkers):
    """Threads with one or more lanes each.

    `fetched` tells how many batches of a lane were fetched before, where that is not none.
    """

    shares_work = False

    def __init__(self, job: Job, num_workers: int, turn: int, fetched: dict[int, int]) -> None:
        datasets = _lane_datasets(job)
        super().__init__(job, num_workers, turn, copied=datasets[0] is not job.dataset)
        self._fetched = [fetched.get(number, 0) for number in range(len(datasets))]
        self._turns = [turn] * len(datasets)
        self._rngs = [Generators() for _ in datasets]
        self._broken: dict[int, ExceptionWrapper] = {}
        self._lanes = []
        for number, dataset in enumerate(datasets):
            lane = Lane(job, number, dataset, job.resumed.get(number))
            lane.where = f"in DataLoader worker thread {number}"
            if job.num_lanes:
                lane.info = thread_info(job, number, dataset, self._rngs[number])
            self._lanes.append(lane)
            self._threads.submit(number % num_workers, partial(self._open, number, job.shared_seed, 0, turn))

    def post(self, worker: int, message: tuple[Any, ...], number: int) -> None:
        """Hand out (kind, generation, lane, task, index)."""
        kind, generation, lane, task, index = message
        if kind in (RESET, BACK):
            turn = self._turn_of(generation)
            for reset in range(worker, len(self._lanes), self._num_workers):
                self._threads.submit(worker, partial(self._open, reset, index, generation, turn))
        elif kind in (TASK, SKIP):
            self._threads.submit(worker, partial(self._serve, kind, generation, lane, task, index))

    def _open(self, number: int, shared_seed: Any, generation: int, turn: int) -> None:
        lane = self._lanes[number]
        become(lane.info)
        if turn != self._turns[number]:
            self._turns[number], self._fetched[number] = turn, 0
        self._broken.pop(number, None)
        self._rngs[number].begin(self._job.base_seed, turn, "lane", number)
        try:
            lane.open(shared_seed)
        except BaseException:
            self._broken[number] = ExceptionWrapper(where=lane.where)
        if self._job.announce:
            error = self._broken.get(number)
            state = lane.snapshot() if error is None and self._job.state_every else None
            value = error, copy.deepcopy(state), None
            self._put(OPENED, number % self._num_workers, number, value, generation)

    def _serve(self, kind: int, generation: int, number: int, task: int, index: Any) -> None:
        if generation < self._generation:
            return
        lane, worker = self._lanes[number], number % self._num_workers
        become(lane.info)
        if number in self._broken:
            if kind == TASK:
                self._put(ERROR, worker, task, (self._broken[number], None, None), generation)
            return
        key = self._turns[number], "lane", number, self._fetched[number]
        self._rngs[number].begin(self._job.base_seed, *key)
        self._fetched[number] += 1
        if kind == SKIP:
            lane.skip(index)
            return
        try:
            answer, data, state = lane.answer(index)
            value = data, copy.deepcopy(state), None  # the dataset goes on, the state must not
        except BaseException:
            answer, value = ERROR, (ExceptionWrapper(where=lane.where), None, None)
        self._put(answer, worker, task, value, generation)


def _lane_datasets(job: Job) -> list[Any]:
    count = max(1, job.num_lanes)
    try:
        return copies(job.dataset, count)
    except Exception as error:
        if count == 1:
            return [job.dataset]
        raise RuntimeError(
            f"each of {count} threads needs a copy of this dataset, and it cannot be copied: {error}. "
            'Make it picklable, use num_workers=1, or worker processes (without workers="thread")'
        ) from error
