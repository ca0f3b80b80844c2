"""`workers="auto"`: whether worker processes or worker threads fetch the batches, decided by a trial.

**The decision** is a pure function of what was measured. Threads save the way between processes, but all of
them, and the training code, share one interpreter lock. So per batch three figures bound each kind, all in
seconds: the work itself, of which `num_workers` go on side by side; its processor time, of which there are
as many side by side as cores; and what happens under the lock, one at a time. A batch from a process costs
packing there, and unpacking here under the lock.

**The trial** fetches the items of the first batch in a thread, from a copy of the dataset, and drops them.
The batch is delivered later, by whoever is chosen. Values may differ in threads where a fetch depends on
anything that worker processes have for themselves: the global random generators, `get_worker_info`, the
state of their dataset. Each of these is looked at, before and after; where one is used, there is nothing to
measure, and processes it is.

**How long the work holds the interpreter lock** Python does not tell. So a second thread runs beside the work
that wants nothing but the lock: it counts. The time in which it did not run is time in which the work held
the lock, however often it gave it up in between; but not more than the work's own processor time, since who
waits for storage holds nothing. On a machine whose cores are busy with other things, those keep the counter
from running, too. So it first counts while nobody else wants the lock: if it does not get a core then, the
result is an upper bound only.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dataflow.processes.payload import PackedObject, copies_of, pack, unpack
from dataflow.torch_threads import one_torch_thread, setting_kept
from dataflow.workers.info import (
    Draws,
    Generators,
    become,
    install,
    random_state,
    set_random_state,
    uninstall,
    was_asked,
)
from dataflow.workers.threads import by_item, needs_own_datasets
from dataflow.workers.worker import WorkerJob, worker_info
from prefetch.workers.threads import WorkerThreads

_CROSSING_S = 3e-5
"""What a batch from a process costs this one beside unpacking: the task, the pipes, being woken."""
_MARGIN = 1.1
"""Threads may be slower by this factor: their batches do not wait for a worker's next batch, and they take
no memory and no time to start."""
_LOCK_SHARE = 0.5
"""Of the time at full speed, threads may hold the interpreter lock so long; the rest is for training code."""
_PASS_S = 0.05
"""Items are fetched twice, for so long or until the batch is there."""
_SLOW_S = 0.5
"""An item that takes longer is not tried again."""
_COMPARED_BYTES = 64 << 20
"""Of a dataset, to see whether a fetch changes it."""
_ALONE_S = 0.005
_FREE = 0.9
"""Of the time, a thread runs at least so much on a machine that has a core for it."""


@dataclass(frozen=True)
class WorkerChoice:
    """Who fetches batches, and why."""

    value: str
    """"main", "process" or "thread"; "auto": not decided yet."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrialTimes:
    """What fetching one batch took on a trial, in one thread with nothing beside it."""

    work_s: float
    """From beginning to end. Far above `cpu_s`: it waits for storage."""
    cpu_s: float
    """Processor time."""
    locked_s: float
    """Time under the interpreter lock. 0: threads never wait for each other. At `work_s`: several threads are
    no faster than one."""
    locked_is_bound: bool
    """The machine was busy with other things: `locked_s` is an upper bound."""
    pack_s: float
    """What a worker process would need beside, to hand the batch over."""
    unpack_s: float
    """What this process would need to take it."""


def decide(times: TrialTimes | str, *, num_workers: int, num_cores: int) -> WorkerChoice:
    """Choose "process" or "thread".

    Args:
        times: what was measured, or what keeps the values from being the same in threads.
        num_workers: of either.
        num_cores: that this process may use.
    """
    if isinstance(times, str):
        return WorkerChoice("process", times)
    side_by_side, cores = num_workers, min(num_workers, num_cores)
    take_s = times.unpack_s + _CROSSING_S
    threads_s = max(times.work_s / side_by_side, times.cpu_s / cores, times.locked_s)
    processes_s = max(
        (times.work_s + times.pack_s) / side_by_side, (times.cpu_s + times.pack_s) / cores, take_s
    )
    figures = (
        f"{_ms(threads_s)} a batch with threads, {_ms(processes_s)} with processes; the interpreter lock is "
        f"held for {_ms(times.locked_s)} of a batch in threads, {_ms(take_s)} to take one from a process"
    )
    if times.locked_is_bound:
        figures += ". The cores were busy with other things: the lock may be held for less"
    if threads_s > _MARGIN * processes_s:
        return WorkerChoice("process", f"faster: {figures}")
    if times.locked_s > max(_LOCK_SHARE * threads_s, take_s):
        return WorkerChoice("process", f"threads would keep the lock from the training code: {figures}")
    return WorkerChoice("thread", f"as fast, and nothing has to cross between processes: {figures}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


class LockCounter:
    """Runs in one thread, beside work in another. Used once.

    Without `run`, `locked_s` waits for ever, until `cancel`.
    """

    def __init__(self) -> None:
        self.is_bound = False
        """Other processes were in the way: the work holds the lock for at most as long as was measured."""
        self._called, self._running, self._ended = (threading.Event() for _ in range(3))
        self._stop = False
        self._withheld_s = 0.0

    def run(self) -> None:
        """When there is work, count alone for a moment, then until it is done."""
        self._called.wait()
        if self._stop:
            return
        ran_s, began = time.thread_time(), time.perf_counter()
        while time.perf_counter() - began < _ALONE_S:
            pass
        self.is_bound = time.thread_time() - ran_s < _FREE * (time.perf_counter() - began)
        ran_s, began = time.thread_time(), time.perf_counter()
        self._running.set()
        while not self._stop:
            pass
        passed_s = time.perf_counter() - began
        self._withheld_s = max(0.0, passed_s - (time.thread_time() - ran_s))
        self._ended.set()

    def locked_s(self, work: Callable[[], object]) -> float:
        """Do the work, in another thread than `run`; seconds in which it held the lock."""
        self._called.set()
        self._running.wait()
        ran_s = time.thread_time()
        try:
            work()
        finally:
            ran_s = time.thread_time() - ran_s
            self._stop = True
        self._ended.wait()
        return min(self._withheld_s, ran_s)

    def cancel(self) -> None:
        """Let nobody wait for the other."""
        self._stop = True
        for event in (self._called, self._running, self._ended):
            event.set()


def observe(job: WorkerJob, index: Any, timeout_s: float) -> TrialTimes | str:
    """Fetch a batch on trial.

    Args:
        job: what to fetch.
        index: of the batch.
        timeout_s: how long that may take; 0: for ever.

    Returns: what was measured, or the reason why values may not be the same in threads.

    Raises:
        RuntimeError: it took too long.
    """
    if needs_own_datasets(job):
        return "an iterable dataset, or one with a state, is dealt out among the workers"
    if job.init_fn is not None:
        return "worker_init_fn is meant for processes"
    try:
        packed = pack(job.dataset)
        if len(packed.meta) > _COMPARED_BYTES:
            return (
                f"the dataset holds {len(packed.meta):,} bytes of Python objects, too many to compare; with "
                'workers="thread" all threads use the one dataset'
            )
        (dataset,) = copies_of(packed, 1)
    except Exception as error:
        return f"the dataset cannot be copied: {error}"
    state, draws = random_state(), Draws()
    threads, counter = WorkerThreads(2, "dataflow-trial"), LockCounter()
    install()
    try:
        with setting_kept():
            threads.on_all(lambda _: one_torch_thread())
        threads.submit(1, counter.run)
        threads.submit(0, lambda: threads.put(_tried(counter, job, index, dataset)))
        results = threads.wait(timeout_s or None)
        if not results:
            raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds:\n{threads.stacks()}")
        times: TrialTimes | str = results[0]
    finally:
        counter.cancel()
        threads.close()
        uninstall()
    if draws.since() is not None:
        set_random_state(state)
        return "a fetch draws from the global random generators, which all threads would share"
    return times


def _tried(counter: LockCounter, job: WorkerJob, index: Any, dataset: Any) -> TrialTimes | str:
    become(worker_info(job, 0, dataset, Generators()))
    try:
        before = _content(dataset)
        times = _measured(counter, job, index, dataset)
        if was_asked():
            return "the dataset or collate_fn asks get_worker_info() which worker it is in"
        if _content(dataset) != before:
            return "a fetch changes the dataset, so items may depend on who has fetched before"
        return times
    except BaseException as error:
        return f"a trial in a thread failed: {type(error).__name__}: {error}"


def _measured(counter: LockCounter, job: WorkerJob, index: Any, dataset: Any) -> TrialTimes | str:
    units: list[Any] = [index]
    get: Callable[[Any], Any] = job.fetcher(dataset).fetch
    collate: Callable[[list[Any]], Any] = operator.itemgetter(0)
    if by_item(job):
        units, get, collate = list(index), partial(operator.getitem, dataset), job.collate_fn
    began = time.perf_counter()
    get(units[0])  # opens files, fills caches
    if (passed_s := time.perf_counter() - began) > _SLOW_S:
        return f"a fetch takes {passed_s:.1f} s, too long to try it in several ways"
    began, ran_s, items = time.perf_counter(), time.thread_time(), []
    for unit in units:
        items.append(get(unit))
        if time.perf_counter() - began > _PASS_S:
            break
    batch = collate(items)
    work_s, cpu_s = time.perf_counter() - began, time.thread_time() - ran_s
    second: list[Any] = []
    locked_s = counter.locked_s(lambda: second.append(collate([get(unit) for unit in units[: len(items)]])))
    if shares_memory(batch, second[0]):
        return "the dataset hands out its own memory, which the training code could change"
    pack_s, unpack_s = _crossing(batch)
    scale = len(units) / len(items)
    return TrialTimes(
        work_s=scale * work_s,
        cpu_s=scale * cpu_s,
        locked_s=scale * locked_s,
        locked_is_bound=counter.is_bound,
        pack_s=scale * pack_s,
        unpack_s=scale * unpack_s,
    )


def _crossing(batch: Any) -> tuple[float, float]:
    """Seconds to pack a batch into memory that is there, and to unpack it."""
    memory = np.zeros(pack(batch).nbytes, np.uint8)
    began = time.thread_time()
    packed = pack(batch)
    packed.copy_to(memory.ctypes.data)
    packed_at = time.thread_time()
    unpack(memory, *packed.layout)
    return packed_at - began, time.thread_time() - packed_at


def _content(dataset: Any) -> bytes:
    """All that can be seen of a dataset from outside; of a large one, all but its arrays."""
    packed: PackedObject = pack(dataset)
    if packed.nbytes > _COMPARED_BYTES:
        return bytes(packed.meta)
    content = np.zeros(packed.nbytes, np.uint8)
    packed.copy_to(content.ctypes.data)
    return content.tobytes()


def shares_memory(one: Any, other: Any) -> bool:
    """Whether two results of fetching the same hold an array's memory, or a changeable object, in common."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.numel() > 0 and one.data_ptr() == other.data_ptr()
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.may_share_memory(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one is other or any(shares_memory(one[key], other[key]) for key in one if key in other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        same = one is other and isinstance(one, list)
        return same or any(map(shares_memory, one, other))
    return one is other and not isinstance(one, _UNCHANGEABLE)


_UNCHANGEABLE = (str, bytes, int, float, complex, bool, type(None), frozenset, type, range, np.generic)
