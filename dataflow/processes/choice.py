"""Whether processes or threads do a piece of work: what is measured for it, and the decision.

**The decision** is a pure function of what was measured. Threads save the way between processes, but all of
them, and the training code, share one interpreter lock. So per batch three figures bound each kind, all in
seconds: the work itself, of which `num_workers` go on side by side; its processor time, of which there are
as many side by side as cores; and what happens under the lock, one at a time. A batch from a process costs
packing there, and unpacking here under the lock.

**How long the work holds the interpreter lock** Python does not tell. So a second thread runs beside the work
that wants nothing but the lock: it counts. The time in which it did not run is time in which the work held
the lock, however often it gave it up in between; but not more than the work's own processor time, since who
waits for storage holds nothing. On a machine whose cores are busy with other things, those keep the counter
from running, too. So it first counts while nobody else wants the lock: if it does not get a core then, the
result is an upper bound only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.processes.payload import PackedObject, pack, unpack

COMPARED_BYTES = 64 << 20
"""Of what is worked with, to see whether the work changes it."""
_CROSSING_S = 3e-5
"""What a batch from a process costs this one beside unpacking: the task, the pipes, being woken."""
_MARGIN = 1.1
"""Threads may be slower by this factor: their batches do not wait for a worker's next batch, and they take
no memory and no time to start."""
_LOCK_SHARE = 0.25
"""Of the time at full speed, threads may hold the interpreter lock so long; the rest is for training code,
which asks for it anew after each operation of torch."""
_ALONE_S = 0.005
_FREE = 0.9
"""Of the time, a thread runs at least so much on a machine that has a core for it."""


@dataclass(frozen=True)
class WorkerChoice:
    """Who fetches batches, and why."""

    value: str
    """"main", "process" or "thread"; "auto": not decided yet."""
    reason: str


@dataclass(eq=False)
class ChoiceMemory:
    """What was decided, for all sessions of a loader. Written by one session at a time."""

    choice: WorkerChoice | None = None
    """None: nothing yet."""
    must_be_processes: bool = False
    """Whether batches would differ where threads build them."""


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
    if num_cores > 1 and times.locked_s > max(_LOCK_SHARE * threads_s, take_s):
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


def queued_s() -> float:
    """Seconds that the calling thread has waited for a core; 0 where Linux does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as figures:
            return int(figures.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def crossing_s(batch: Any) -> tuple[float, float]:
    """Seconds to pack a batch into memory that is there, and to unpack it."""
    memory = np.zeros(pack(batch).nbytes, np.uint8)
    began = time.thread_time()
    packed = pack(batch)
    packed.copy_to(memory.ctypes.data)
    packed_at = time.thread_time()
    unpack(memory, *packed.layout)
    return packed_at - began, time.thread_time() - packed_at


def content_of(dataset: Any) -> bytes:
    """All that can be seen of a dataset from outside; of a large one, all but its arrays."""
    packed: PackedObject = pack(dataset)
    if packed.nbytes > COMPARED_BYTES:
        return bytes(packed.meta)
    content = np.zeros(packed.nbytes, np.uint8)
    packed.copy_to(content.ctypes.data)
    return content.tobytes()
