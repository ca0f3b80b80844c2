"""Iterators of `DataLoader` over any map-style or iterable dataset: their base, and the one without workers.

They follow `torch.utils.data.DataLoader` in what can be observed: the order of batches, what worker k
fetches, the seeds, the errors. Batch b belongs to lane b mod n (of the lanes that have not ended), so
random augmentation gives the values that it gives with torch. `dataflow.workers.iterator` has the iterator
with workers.
"""

from __future__ import annotations

import copy
import functools
import pickle
import time
from typing import Any

import cloudpickle
import torch
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind
from torch.utils.data._utils import pin_memory as torch_pin, worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from dataflow.workers.lane import Job, Lane, has_state
from dataflow.workers.payload import array_bytes
from dataflow.workers.process_main import collate_map_changes
from dataflow.workers.progress import Progress
from dataflow.workers.resumed import Resumed
from dataflow.workers.settings import WorkerLoader


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


class FetchIterator(_BaseDataLoaderIter):
    """What iterators with and without workers share: the sampler's place and what a state needs."""

    def __init__(self, loader: WorkerLoader) -> None:
        resumed = loader._take_resumed()
        self._progress = Progress.begin(loader, resumed)
        loader._progress = self._progress
        super().__init__(loader)
        self._tally = loader._tally
        self._handed_bytes = 0
        self._num_lanes = resumed.lanes_for(self._num_workers) if resumed else self._num_workers
        self._base_seed = self._progress.seeded(loader, int(self._base_seed), self._num_lanes, resumed)
        self._resume_sampler(loader, resumed)

    def _resume_sampler(self, loader: WorkerLoader, resumed: Resumed | None) -> None:
        iterable = self._dataset_kind == _DatasetKind.Iterable
        skip = resumed.batches if resumed and not iterable else 0
        self._sampler_iter = self._progress.sampler_iterator(loader, resumed, skip)
        self._num_yielded = resumed.batches if resumed else 0

    def _job(self, loader: WorkerLoader, resumed: Resumed | None) -> Job:
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


class MainIterator(FetchIterator):
    """`num_workers=0`: batches are fetched when they are asked for."""

    @property
    def crew(self) -> None:
        """Who fetches: this process alone."""
        return None

    def __init__(self, loader: WorkerLoader) -> None:
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
