"""A worker: one copy of a dataset, and the position in it.

Worker k of n has its own copy of the dataset, its own `get_worker_info()`, its own random state, and takes
every n-th batch. Who runs it differs: a process (`process_main`), a thread (`threads`), or the training
process itself (`fetching`). In code that knows both, a *runner* is such a process or thread: usually it runs
one worker, but the workers of a resumed state go on with the runners there are.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from prefetch.ipc.protocol import WorkerMessage, WorkerResult
from prefetch.memory.interrupts import PROGRAM_ENDS
from prefetch.workers import REGION_BYTES, STOP_S


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """Bounds of workers that no argument of `DataLoader` sets."""

    notice_s: float = 300.0
    """Without a time-out, stacks are logged after waiting this long for one batch."""
    start_s: float = 20.0
    """Workers may take so long to start before that counts as a time-out."""
    stop_s: float = STOP_S
    """Time that workers have to end by themselves, together."""
    ahead: int = 8
    """A waiting consumer lets workers run ahead, up to this many times torch's look-ahead."""
    ahead_bytes: int = 96 << 20
    """And until so many are ready or in work: large batches soon outweigh waiting for a late one."""
    object_bytes: int = 256 << 20
    """Python objects of a dataset above this size are worth a word: each worker process has its own."""
    region_bytes: int = REGION_BYTES
    """Address space that the batches of one worker process may take."""


@dataclass(kw_only=True)
class WorkerJob:
    """The facts that all workers of a loader need to know."""

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    init_fn: Callable[[int], Any] | None
    base_seed: int
    num_workers: int
    """Number that `get_worker_info().num_workers` tells; 0: fetching as if there were no workers."""
    shared_seed: int | None = None
    state_every: int = 0
    """Ship the state of the dataset with every so many batches; 0: never."""
    announce: bool = False
    """Tell when a worker is open, with its state or what went wrong."""
    states: Mapping[int, WorkerState] = field(default_factory=dict)
    """Positions from which the workers of a resumed epoch go on."""
    num_runners: int = 1
    turn: int = 0
    """Epochs that were begun with this base seed before."""
    limits: WorkerLimits = field(default_factory=WorkerLimits)

    @property
    def num_copies(self) -> int:
        """Datasets, one a worker, that of the training process included."""
        return max(1, self.num_workers)

    def fetcher(self, dataset: Any) -> Any:
        """Torch's, that makes a batch of an index."""
        return _DatasetKind.create_fetcher(
            self.kind, dataset, self.auto_collation, self.collate_fn, self.drop_last
        )


@dataclass
class WorkerState:
    """The position of a worker, for a dataset or an iterator that tells its own state."""

    dataset: Any = None
    iterator: Any = None
    ended: bool = False
    """The iterable was exhausted while its last batch was made."""


def has_state(thing: Any) -> bool:
    """Return whether a dataset, iterator or sampler follows the `state_dict` protocol."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def worker_info(job: WorkerJob, number: int, dataset: Any, rng: Any = None) -> Any:
    """Return what `get_worker_info()` answers in a worker; `rng`: generators of one in a thread."""
    more = {} if rng is None else {"rng": rng, "worker_method": "thread"}
    return torch_worker.WorkerInfo(
        id=number, num_workers=job.num_workers, seed=job.base_seed + number, dataset=dataset, **more
    )


def wrapped_error(number: int, *, in_thread: bool = False) -> ExceptionWrapper:
    """The exception that a worker handles, on its way to the training code.

    What a library in another language raises where it panics is no `Exception`, and its class no process
    knows by name: it comes as a `RuntimeError` that tells it.
    """
    where = f"in DataLoader worker {'thread' if in_thread else 'process'} {number}"
    kind, error, trace = sys.exc_info()
    if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
        return ExceptionWrapper(where=where)
    assert kind is not None
    assert error is not None
    return ExceptionWrapper((RuntimeError, RuntimeError(f"{kind.__name__}: {error}"), trace), where)


class Worker:
    """One worker's dataset and the position in it. `rng`: generators of one that runs in a thread."""

    def __init__(self, job: WorkerJob, number: int, dataset: Any, rng: Any = None) -> None:
        self._job, self._number = job, number
        self._dataset: Any = dataset
        self._fetcher: Any = None
        self._shared_rng = torch.Generator()
        self._since_state = 0
        self._ended = self._initialised = False
        self._in_thread = rng is not None
        self.info = worker_info(job, number, dataset, rng) if job.num_workers else None
        self._resumed_state = job.states.get(number)
        self.failure: ExceptionWrapper | None = None
        """Why it could not be opened."""

    def open(self, shared_seed: int | None) -> None:
        """Begin an epoch of the dataset."""
        self._ended, self._since_state = False, 0
        if isinstance(self._dataset, torch.utils.data.IterDataPipe) and shared_seed is not None:
            self._shared_rng.manual_seed(shared_seed)
            graph = torch.utils.data.graph_settings
            self._dataset = graph.apply_random_seed(self._dataset, self._shared_rng)
        if not self._initialised and self._job.init_fn is not None:
            self._job.init_fn(self._number)
        self._initialised = True
        state, self._resumed_state = self._resumed_state, None
        if state is not None and state.dataset is not None:
            self._dataset.load_state_dict(state.dataset)
        self._fetcher = self._job.fetcher(self._dataset)
        if state is not None:
            self._ended = state.ended
            if state.iterator is not None and has_state(self._iterator):
                self._iterator.load_state_dict(state.iterator)

    def try_to_open(self, shared_seed: int | None) -> WorkerState | None:
        """Begin an epoch, or keep what went wrong as `failure`; the state where it is to be told."""
        self.failure = None
        try:
            self.open(shared_seed)
            return self.snapshot() if self._job.announce and self._job.state_every else None
        except BaseException as error:
            if not self._catches(error):
                raise
            self.failure = wrapped_error(self._number, in_thread=self._in_thread)
            return None

    def _catches(self, error: BaseException) -> bool:
        """In a process, `sys.exit()` ends it; a thread that ends would leave the others waiting."""
        return self._in_thread or not isinstance(error, (*PROGRAM_ENDS, GeneratorExit))

    @property
    def _iterator(self) -> Any:
        return getattr(self._fetcher, "dataset_iter", None)

    def skip(self, index: Any) -> None:
        """Fetch a batch that was delivered before, and drop it, with the error that it may have been."""
        with contextlib.suppress(Exception):
            if self.failure is None:
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

    def serve(self, kind: int, index: Any) -> tuple[int, Any, WorkerState | None] | None:
        """The next batch as kind of response, batch or error, and the state if it is its turn.

        None: it was fetched to be dropped.
        """
        if kind == WorkerMessage.SKIP:
            self.skip(index)
            return None
        if self.failure is not None:
            return WorkerResult.ERROR, self.failure, None
        try:
            try:
                data = self.fetch(index)
            except StopIteration:
                if self._job.kind != _DatasetKind.Iterable:
                    raise
                return WorkerResult.END, None, self.snapshot() if self._job.state_every else None
            self._since_state += 1
            if not self._job.state_every or self._since_state < self._job.state_every:
                return WorkerResult.BATCH, data, None
            self._since_state = 0
            return WorkerResult.BATCH, data, self.snapshot()
        except BaseException as error:
            if not self._catches(error):
                raise
            return WorkerResult.ERROR, wrapped_error(self._number, in_thread=self._in_thread), None

    def snapshot(self) -> WorkerState | None:
        """Return where the worker stands now; None if neither dataset nor iterator tells."""
        iterator = self._iterator
        ended = bool(getattr(self._fetcher, "ended", False))
        # An iterable that is its own iterator would be told twice, and loaded twice.
        itself = iterator is self._dataset
        dataset = self._dataset.state_dict() if has_state(self._dataset) and not itself else None
        if has_state(iterator):
            state = WorkerState(dataset, iterator.state_dict(), ended)
        elif dataset is not None:
            state = WorkerState(dataset, ended=ended)
        else:
            return None
        # In this process the dataset goes on, and the state must not; else pickling copies it.
        return copy.deepcopy(state) if self._in_thread else state


_MOST_VISITED = 1000


def array_bytes(obj: Any) -> int:
    """Bytes of the tensors and arrays in nested containers; of a thousand objects at most. Never raises."""
    total, limit, parts = 0, _MOST_VISITED, [obj]
    while parts and limit:
        limit, part = limit - 1, parts.pop()
        try:
            if isinstance(part, torch.Tensor | np.ndarray):
                total += part.nbytes
            elif isinstance(part, Mapping):
                parts.extend(part.values())
            elif isinstance(part, list | tuple):
                parts.extend(part[:limit])
        except Exception:  # sparse tensors have no `nbytes`; mappings may be anybody's
            pass
    return total
