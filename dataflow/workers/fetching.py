"""Iterators of `DataLoader` over any map-style or iterable dataset: their base, and the one without workers.

They follow `torch.utils.data.DataLoader` in what can be observed: the order of batches, what worker k
fetches, the seeds, the errors. Batch b belongs to worker b mod n (of the workers that have not ended), so
random augmentation gives the values that it gives with torch. `dataflow.workers.iterator` has the iterator
with workers.
"""

from __future__ import annotations

import copy
import functools
import pickle
import time
import weakref
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.utils.data import DataLoader as TorchDataLoader, IterDataPipe, MapDataPipe, _DatasetKind
from torch.utils.data._utils import pin_memory as torch_pin, worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from dataflow.workers.worker import (
    Worker,
    WorkerJob,
    WorkerLimits,
    array_bytes,
    has_state,
)
from prefetch.weak_registry import WeakRegistry

if TYPE_CHECKING:
    from dataflow.progress.observer import LoaderObserver, LoopObserver
    from dataflow.stats import WorkerStats
    from dataflow.workers.state import EpochProgress, WorkerProgress


class WorkerLoader(TorchDataLoader[Any]):
    """Torch's loader with the settings and the position of ours, as iterators see it.

    `DataLoader` derives from this class, so that nothing here imports it.
    """

    workers: str
    """The workers' kind: "process" or "thread"."""
    memory_limit: int
    """Limit in bytes."""
    snapshot_every_n_steps: int
    prefetch_across_epochs: bool
    """True if persistent workers may begin the next epoch before anybody asks for it."""
    worker_limits = WorkerLimits()
    _drop_in: DropInState

    def check_worker_number_rationality(self) -> None:
        """Warn of more processes than cores, as torch does. More threads than cores are usual for reading."""
        if self.workers != "thread":
            super().check_worker_number_rationality()


class DeliveryMeter:
    """The batches that were delivered, and what that took, over all iterators of a loader."""

    def __init__(self) -> None:
        self.batches = self.bytes = 0
        self.starved_s = self.first_batch_s = 0.0
        self._began: float | None = None
        self._until = self._between_s = 0.0
        """The time of the last batch or end; seconds between loops."""

    def begins(self, since: float) -> None:
        """Count the wait for an iterator. What a loop that was left did after its last batch is not known."""
        if self._began is None:
            self._began = self._until = since
        self._between_s += max(0.0, since - self._until)
        self.waited(since)

    def waited(self, since: float) -> None:
        """Count a wait of the training code."""
        self._until = now = time.perf_counter()
        self.starved_s += now - since

    def delivered(self, since: float, nbytes: int) -> None:
        """Count a wait of the training code, and the batch that ended it."""
        self.waited(since)
        self.batches += 1
        self.bytes += nbytes
        if self.batches == 1:
            self.first_batch_s = self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds in loops, up to the last batch or end."""
        return 0.0 if self._began is None else self._until - self._began - self._between_s


class DropInState:
    """The state that loops over one loader share.

    A copy begins an own epoch, or where a loaded state says.
    """

    def __init__(self, num_workers: int, workers: str) -> None:
        from dataflow.workers.state import EpochProgress

        self.workers = num_workers, workers
        """Number of the workers and their kind."""
        self.start = ("", "")
        """The start method of the workers of the loop begun last, and the reason."""
        self.meter = DeliveryMeter()
        """The meter of all iterators."""
        self.progress = EpochProgress()
        """The progress of the loop begun last, or a loaded state where the next loop goes on."""
        self.latest: weakref.ref[Any] | None = None
        """The iterator that was begun last."""
        self.iterators: WeakRegistry[Any] = WeakRegistry()
        """The iterators that have workers."""
        self.times_closed = 0
        self.observer: LoaderObserver | None = None
        """Is told of each loop; None: nobody watches them."""
        self._epoch_at_load: int | None = None
        """The sampler's epoch when a state was loaded."""

    def load(self, progress: EpochProgress, loader: WorkerLoader) -> None:
        """Let the next loop go on where a state says."""
        from dataflow.workers.samplers import sampler_epoch

        self.progress, self._epoch_at_load = progress, sampler_epoch(loader._index_sampler)
        progress.restore_between(loader)

    def set_epoch(self, epoch: int, loader: WorkerLoader) -> None:
        """Let the next loop run this epoch: a loaded position in it is kept, one in another epoch is left."""
        if epoch != self._loaded_epoch:
            if self._loaded_epoch is not None:
                self.progress = self.progress.left(loader)
            self.progress.named = epoch

    def progress_for(self, loader: WorkerLoader) -> EpochProgress:
        """Return where a loop that begins now goes on, or what it comes after.

        A sampler whose epoch was set since the state was loaded says the same as `set_epoch` of the loader.
        """
        from dataflow.workers.samplers import sampler_epoch

        epoch = sampler_epoch(loader._index_sampler)
        if epoch is not None and self._loaded_epoch is not None and epoch != self._epoch_at_load:
            self.set_epoch(epoch, loader)
        return self.progress

    @property
    def _loaded_epoch(self) -> int | None:
        """The epoch of a loaded position inside one: what the sampler counts, else what loops count."""
        progress = self.progress
        if progress.loaded is None or progress.complete:
            return None
        return int(progress.sampler.tokens.get("epoch", progress.epoch))

    @property
    def has_counts(self) -> bool:
        """Return whether `stats()` has counted something."""
        return self.meter.batches > 0

    @property
    def loop_length(self) -> int | None:
        """Batches of the loop begun last; None: not known."""
        iterator = self.latest() if self.latest else None
        return None if iterator is None else iterator.length

    def stats(self) -> WorkerStats:
        """Return a snapshot of the counts; cheap."""
        from dataflow.stats import WorkerStats

        meter, (num_workers, workers) = self.meter, self.workers
        iterator = self.latest() if self.latest else None
        runners = iterator.runners if iterator is not None else None
        ahead, ready = iterator.num_ahead if iterator is not None else (0, 0)
        return WorkerStats(
            batches=meter.batches,
            delivered_bytes=meter.bytes,
            elapsed_s=meter.elapsed_s,
            starved_s=meter.starved_s,
            first_batch_s=meter.first_batch_s,
            num_workers=num_workers,
            workers=workers if num_workers else "main",
            workers_reason=f"workers={workers!r}" if num_workers else "num_workers=0",
            ahead_batches=ahead,
            ready_batches=ready,
            shared_bytes=runners.shared_bytes if runners else 0,
            worker_pids=runners.pids if runners else (),
            start=self.start[0],
            start_reason=self.start[1],
        )

    def __getstate__(self) -> dict[str, Any]:
        from dataflow.workers.state import EpochProgress

        progress = self.progress
        if progress.loaded is None:
            progress = EpochProgress(chain=progress.chain, epoch=progress.following - 1)
        fresh = {"meter": DeliveryMeter(), "progress": progress, "observer": None}
        fresh |= {"latest": None, "iterators": None}
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, iterators=WeakRegistry())


class FetchIterator(_BaseDataLoaderIter):
    """The base of iterators with and without workers: the sampler's position and what a state needs."""

    _begins_sampler_twice = False
    """True if a sampler that draws in `iter` draws twice, as with torch's iterator with workers when it is
    made."""

    def __init__(self, loader: WorkerLoader) -> None:
        from dataflow.workers.samplers import from_chain

        before = loader._drop_in.progress_for(loader)
        resumed = before if before.loaded is not None else None
        self._resumed = resumed
        """The loaded state that this goes on from, until it has begun."""
        self._progress = loader._drop_in.progress = before.begun(loader)
        sampler, chain = self._progress.sampler, self._progress.chain
        once = bool(resumed and resumed.complete and resumed.persistent and self._begins_sampler_twice)
        sampler.begin(loader._index_sampler)
        with from_chain(None if once or (resumed and not resumed.complete) else chain):
            super().__init__(loader)  # begins the sampler, and draws the seed of workers
            if self._begins_sampler_twice and not once:
                sampler.begin(loader._index_sampler)
                self._sampler_iter = iter(self._index_sampler)
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        self._loops = loader._drop_in  # of which the page tells as long as a loop runs
        self._meter = self._loops.meter
        self.observer: LoopObserver | None = None
        """Is told of the batches of the loop."""
        self._delivered_bytes = 0
        self._base_seed = self._progress.seeded(loader, int(self._base_seed), resumed)
        if once:  # as workers do that begin another epoch
            with from_chain(chain):
                self._sampler_iter = sampler.begun_again(self._index_sampler)
        self._begin_sampler(loader)

    def _begin_sampler(self, loader: WorkerLoader) -> None:
        self._sampler_iter = self._progress.sampler_iterator(loader, self._sampler_iter)
        self._num_yielded = self._progress.batches

    def _resumed_worker(self, worker: int) -> WorkerProgress:
        """Return where a worker goes on; at the beginning if nothing was loaded."""
        from dataflow.workers.state import WorkerProgress

        workers = self._resumed.workers if self._resumed is not None else {}
        return workers.get(worker, WorkerProgress())

    def _num_skipped(self, worker: int) -> int:
        """Batches that a worker must fetch again and drop: those delivered since it told its state."""
        return self._resumed_worker(worker).since if self._iterable else 0

    def _job(self, loader: WorkerLoader) -> WorkerJob:
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        workers = self._resumed.workers if self._resumed is not None else {}
        return WorkerJob(
            kind=self._dataset_kind,
            dataset=self._dataset,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            init_fn=init_fn,
            base_seed=int(self._base_seed),
            num_workers=self._progress.num_workers,
            shared_seed=self._shared_seed,
            state_every=loader.snapshot_every_n_steps if self._iterable or has_state(self._dataset) else 0,
            announce=has_state(self._dataset),
            states={number: worker.state for number, worker in workers.items()},
            num_runners=self._num_workers,
            turn=self._progress.turn,
            limits=loader.worker_limits,
        )

    @property
    def num_ahead(self) -> tuple[int, int]:
        """Batches in work or ready, and ready."""
        return 0, 0

    @property
    def length(self) -> int | None:
        """Batches of an epoch; None: not known."""
        if self._iterable:
            return None
        try:
            return len(self._index_sampler)
        except TypeError:
            return None

    def __next__(self) -> Any:
        began, observer = time.perf_counter(), self.observer
        try:
            if self._IterableDataset_len_called is not None or torch._C._autograd._profiler_enabled():
                data: Any = super().__next__()
            else:
                data = self._next_data()
                self._num_yielded += 1
        except BaseException as error:
            self._meter.waited(began)
            if observer is not None:
                observer.end(began, None if isinstance(error, StopIteration) else error)
            raise
        self._meter.delivered(began, self._delivered_bytes)
        if observer is not None:
            observer.batch(began)
        return data


class MainIterator(FetchIterator):
    """`num_workers=0`: batches are fetched when they are asked for."""

    runners = None
    """No runners: this process alone fetches."""

    def __init__(self, loader: WorkerLoader) -> None:
        super().__init__(loader)
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            torch.utils.data.graph_settings.apply_sharding(self._dataset, self._world_size, self._rank)
        job = self._job(loader)
        job.init_fn = None
        self._own_workers = [
            Worker(
                job,
                number,
                self._dataset if job.num_copies == 1 else pickle.loads(cloudpickle.dumps(self._dataset)),
            )
            for number in range(job.num_copies)
        ]
        self._turns = RoundRobin(job.num_copies, self._progress)
        for number, worker in enumerate(self._own_workers):
            self._become(worker.info)
            worker.open(None)
            for _ in range(self._num_skipped(number)):
                worker.skip(next(self._sampler_iter))
            self._become(None)
        self._progress.begin_workers(job.num_copies)
        workers = self._own_workers if job.state_every else []
        self._progress.look = lambda: [copy.deepcopy(worker.snapshot()) for worker in workers]
        self._resumed = None

    def _become(self, info: Any) -> None:
        if self._progress.num_workers:
            torch_worker._worker_info = info

    def _next_data(self) -> Any:
        index = self._next_index_or_end()
        while True:
            number = self._turns.next()
            if number is None:
                self._progress.end()
                raise StopIteration
            worker = self._own_workers[number]
            self._become(worker.info)
            try:
                data = worker.fetch(index)
                break
            except StopIteration:
                self._turns.end(number)
            except BaseException:
                self._progress.delivered(number)
                raise
            finally:
                self._become(None)
        self._progress.delivered(number)
        self._delivered_bytes = array_bytes(data)
        if self._pin_memory:
            data = torch_pin.pin_memory(data, self._pin_memory_device)
        return data

    def _next_index_or_end(self) -> Any:
        try:
            return next(self._sampler_iter)
        except StopIteration:
            self._progress.end()
            raise


class RoundRobin:
    """Says whose turn it is: workers one after another, without those that have ended."""

    def __init__(self, count: int, progress: EpochProgress, num_sent: int = 0) -> None:
        self.count = count
        self.active = [True] * count
        first = progress.next_worker if progress.workers else progress.batches
        self._turn = (first + num_sent) % count

    def next(self) -> int | None:
        """The next worker; None when all have ended."""
        for _ in range(self.count):
            worker, self._turn = self._turn, (self._turn + 1) % self.count
            if self.active[worker]:
                return worker
        return None

    def end(self, worker: int) -> None:
        """A worker has no more."""
        self.active[worker] = False
