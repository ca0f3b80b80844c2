"""`workers="auto"` over datasets that are not sharded: the trial that `dataflow.processes.choice` decides by.

**The trial** fetches the items of the first batch in a thread, from a copy of the dataset, and drops them.
The batch is delivered later, by whoever is chosen. Values may differ in threads where a fetch depends on
anything that worker processes have for themselves: the global random generators, `get_worker_info`, the
state of their dataset. Each of these is looked at, before and after; where one is used, there is nothing to
measure, and processes it is.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dataflow.processes.choice import COMPARED_BYTES, LockCounter, TrialTimes, content_of, crossing_s
from dataflow.processes.generators import Draws, random_state, set_random_state
from dataflow.processes.payload import copies_of, pack
from dataflow.torch_threads import one_torch_thread, setting_kept
from dataflow.workers.info import Generators, become, install, uninstall, was_asked
from dataflow.workers.threads import by_item, needs_own_datasets
from dataflow.workers.worker import WorkerJob, worker_info
from prefetch.workers.threads import WorkerThreads

_PASS_S = 0.05
"""Items are fetched twice, for so long or until the batch is there."""
_SLOW_S = 0.5
"""An item that takes longer is not tried again."""


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
        if len(packed.meta) > COMPARED_BYTES:
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
        before = content_of(dataset)
        times = _measured(counter, job, index, dataset)
        if was_asked():
            return "the dataset or collate_fn asks get_worker_info() which worker it is in"
        if content_of(dataset) != before:
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
    pack_s, unpack_s = crossing_s(batch)
    scale = len(units) / len(items)
    return TrialTimes(
        work_s=scale * work_s,
        cpu_s=scale * cpu_s,
        locked_s=scale * locked_s,
        locked_is_bound=counter.is_bound,
        pack_s=scale * pack_s,
        unpack_s=scale * unpack_s,
    )


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
