"""A lane: one copy of a dataset, and the place in it; what PyTorch calls a worker.

Lane k of n has its own copy of the dataset, its own `get_worker_info()`, its own random state, and takes
every n-th batch. Who serves it differs: a worker process (`worker_process`), a thread (`thread_workers`), or
the training process itself (`fetching`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

BATCH, ERROR, END, OPENED = range(4)
"""Kinds of answers. END: the lane's iterable has no more. OPENED: the lane stands at its beginning."""

TASK, SKIP, RANDOM, MARK, RESET, BACK = range(6)
"""Kinds of messages to a worker: fetch a batch; fetch one and drop it; set the generators; remember them;
begin the next epoch; do so with the generators that were remembered."""


@dataclass
class Job:
    """What all workers of a loader need to know."""

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    init_fn: Callable[[int], Any] | None
    base_seed: int
    num_lanes: int
    """As `get_worker_info().num_workers` tells; 0: fetching as if there were no workers."""
    shared_seed: int | None = None
    collate_map: Mapping[Any, Any] = field(default_factory=dict)
    """What the parent has registered with torch's `default_collate`."""
    default_dtype: torch.dtype = torch.float32
    state_every: int = 0
    """Ship the state of the dataset with every so many batches; 0: never."""
    announce: bool = False
    """Tell when a lane is open, with its state or what went wrong."""
    resumed: Mapping[int, LaneState] = field(default_factory=dict)


@dataclass
class LaneState:
    """Where a lane stands, for a dataset or an iterator that tells its own state."""

    dataset: Any = None
    iterator: Any = None
    ended: bool = False
    """The iterable was exhausted while its last batch was made."""


def has_state(thing: Any) -> bool:
    """Whether a dataset, iterator or sampler follows the `state_dict` protocol."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class Lane:
    """One lane's dataset and the place in it."""

    def __init__(self, job: Job, number: int, dataset: Any, state: LaneState | None) -> None:
        self._job, self._number = job, number
        self._dataset: Any = dataset
        self._fetcher: Any = None
        self._shared_rng = torch.Generator()
        self._since_state = 0
        self._ended = self._initialised = False
        self.where = f"in DataLoader worker process {number}"
        self.info: Any = None
        if job.num_lanes:
            self.info = torch_worker.WorkerInfo(
                id=number, num_workers=job.num_lanes, seed=job.base_seed + number, dataset=dataset
            )
        self._resumed = state

    def open(self, shared_seed: int | None) -> None:
        """Begin an epoch."""
        self._ended, self._since_state = False, 0
        if isinstance(self._dataset, torch.utils.data.IterDataPipe) and shared_seed is not None:
            self._shared_rng.manual_seed(shared_seed)
            graph = torch.utils.data.graph_settings
            self._dataset = graph.apply_random_seed(self._dataset, self._shared_rng)
        if not self._initialised and self._job.init_fn is not None:
            self._job.init_fn(self._number)
        self._initialised = True
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.dataset is not None:
            self._dataset.load_state_dict(resumed.dataset)
        job = self._job
        self._fetcher = _DatasetKind.create_fetcher(
            job.kind, self._dataset, job.auto_collation, job.collate_fn, job.drop_last
        )
        if resumed is not None:
            self._resume(resumed)

    def _resume(self, state: LaneState) -> None:
        iterator: Any = getattr(self._fetcher, "dataset_iter", None)
        self._ended = state.ended
        if state.iterator is not None and has_state(iterator):
            iterator.load_state_dict(state.iterator)

    def skip(self, index: Any) -> None:
        """Fetch a batch that was delivered before, and drop it, with the error that it may have been."""
        with contextlib.suppress(Exception):
            self._fetcher.fetch(index)

    def fetch(self, index: Any) -> Any:
        """The next batch. `StopIteration` at the end of an iterable."""
        if self._ended:
            raise StopIteration
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self._ended = self._job.kind == _DatasetKind.Iterable
            raise

    def answer(self, index: Any) -> tuple[int, Any, LaneState | None]:
        """The next batch as kind of answer, batch or error, and the state if it is its turn."""
        try:
            try:
                data = self.fetch(index)
            except StopIteration:
                if self._job.kind != _DatasetKind.Iterable:
                    raise
                return END, None, self.snapshot() if self._job.state_every else None
            return BATCH, data, self.state()
        except Exception:
            return ERROR, ExceptionWrapper(where=self.where), None

    def state(self) -> LaneState | None:
        """Where the lane stands after the batch just fetched; None when it is not its turn to tell."""
        self._since_state += 1
        if not self._job.state_every or self._since_state < self._job.state_every:
            return None
        self._since_state = 0
        return self.snapshot()

    def snapshot(self) -> LaneState | None:
        """Where the lane stands now; None if neither dataset nor iterator tells."""
        iterator: Any = getattr(self._fetcher, "dataset_iter", None)
        ended = bool(getattr(self._fetcher, "ended", False))
        if iterator is self._dataset and has_state(iterator):
            return LaneState(iterator=iterator.state_dict(), ended=ended)
        dataset = self._dataset.state_dict() if has_state(self._dataset) else None
        if has_state(iterator):
            return LaneState(dataset, iterator.state_dict(), ended)
        return LaneState(dataset, ended=ended) if dataset is not None else None
