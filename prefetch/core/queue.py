"""Threads of compiled code that make copies job by job.

A plan is submitted once and its jobs are taken in order. Whoever takes them lends the memory that they go to,
and works himself instead of waiting. What runs here knows nothing of windows, credits or samples.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from prefetch.core.copy_table import JobPlan, column_table
from sharding.core.library import address_of


class JobAnswer(IntEnum):
    """The answer about a job that is asked for; `core_answer` of core.h."""

    READY = 0
    NOT_READY = 1
    """Somebody is at work on it, or nobody yet."""
    NEED_SLOT = 2
    """Nobody is at work on it, for want of a slot."""
    STOPPED = 3


_PLAN_WORDS, _JOB_WORDS = 16, 3
"""The sizes of the structs in core.h, in words."""


class SubmittedPlan(Struct, kw_only=True, eq=False):
    """A plan whose jobs may be taken."""

    plan: JobPlan
    status: NDArray[np.uint8]
    """[rows] as `Executor.run` gives it, of the jobs that were taken."""
    memory: NDArray[np.int64]
    """The memory of the queue."""
    address: int
    tables: Sequence[NDArray[np.int64]]
    """The tables that the threads read."""
    num_taken: int = 0
    """Jobs, from the first on."""


class CopyQueue:
    """Threads that run the jobs of plans, those of the first plan first. Thread-safe, but for taking.

    It lives until it is closed, whoever drops it: its threads work in its memory.

    Args:
        library: the compiled core.
        holding: the same, called without letting go of the interpreter.
        wake_at: slots that are there when threads that had none are woken.
        num_threads: of them, at most; where the system has none, who takes jobs does all the work.
    """

    def __init__(self, library: Any, holding: Any, num_threads: int, wake_at: int) -> None:
        self._library, self._holding = library, holding
        self._pid, self._closing = os.getpid(), threading.Lock()
        self._memory = np.zeros(library.core_queue_bytes(), np.uint8)
        self._queue = address_of(self._memory)
        self._plans: set[SubmittedPlan] = set()
        """The plans that threads may be at work on."""
        self._lent: dict[int, NDArray[np.uint8]] = {}
        """The slots that jobs have, by address."""
        self._answer = (ctypes.c_int64 * 3)()
        self._take, self._give = holding.core_take, holding.core_give
        self._self = ctypes.py_object(self)
        ctypes.pythonapi.Py_IncRef(self._self)  # also at the end of the interpreter, which drops all others
        self.num_threads: int = library.core_open(self._queue, num_threads, wake_at)

    def submit(self, plan: JobPlan) -> SubmittedPlan:
        """Have a plan run. What it refers to is kept until its last job is taken, or until `close`."""
        table, offsets = column_table(plan.columns), plan.offsets
        num_jobs, status = len(plan.ends), np.empty(plan.num_rows, np.uint8)
        memory = np.zeros(_PLAN_WORDS + _JOB_WORDS * num_jobs, np.int64)
        generation = 0 if plan.generation is None else address_of(plan.generation)
        columns, ends, starts = address_of(table), address_of(plan.ends), address_of(offsets)
        entry = (columns, len(table), num_jobs, plan.number, ends, starts, plan.slot_bytes, generation)
        memory[:10] = *entry, plan.planned_in, address_of(status)
        submitted = SubmittedPlan(
            plan=plan, status=status, memory=memory, address=address_of(memory), tables=(table, offsets)
        )
        self._plans.add(submitted)
        self._holding.core_submit(self._queue, submitted.address)
        return submitted

    @property
    def num_lent(self) -> int:
        """Slots that are there for jobs, or hold jobs that were not taken."""
        return len(self._lent)

    def give(self, slot: NDArray[np.uint8], address: int, *, under: bool = False) -> None:
        """Lend memory at an address for one job, the next; `under`: for when there is no other."""
        self._lent[address] = slot
        if not self._give(self._queue, address, len(slot), under):
            del self._lent[address]  # there are a thousand

    def take_back(self) -> tuple[int, NDArray[np.uint8]] | None:
        """Address and memory of what was lent, that no job has used and none will; None: there is none."""
        address: int | None = self._holding.core_take_back(self._queue)
        return None if address is None else (address, self._lent.pop(address))

    def take(self, submitted: SubmittedPlan) -> int:
        """Ask for the next job of a plan, without waiting; a `JobAnswer`. One thread at a time takes.

        Of a job that is READY, `taken` tells more.
        """
        answer: int = self._take(self._queue, submitted.address, self._answer)
        return answer

    def work(self, submitted: SubmittedPlan, timeout_s: float) -> int:
        """Take as `take` does, but copy until the job is over or needs a slot, or wait for who copies."""
        wait_ns = int(timeout_s * 1e9)
        answer: int = self._library.core_work(self._queue, submitted.address, wait_ns, self._answer)
        return answer

    def taken(self, submitted: SubmittedPlan) -> tuple[int, NDArray[np.uint8], int, int]:
        """Return, once, of the job that was READY: address and slot, rows with a status, jobs that wait.

        The slot is the caller's again; the jobs are those of all plans.
        """
        submitted.num_taken += 1
        if submitted.num_taken == len(submitted.plan.ends):
            self._plans.discard(submitted)
        address, num_bad, num_waiting = self._answer
        return address, self._lent.pop(address), num_bad, num_waiting

    def drain(self) -> None:
        """Wait until the jobs that run now are over: copies of a slot each."""
        self._library.core_drain(self._queue)

    def count(self) -> tuple[float, int]:
        """Seconds that the threads have worked, and jobs that are over."""
        counts = (ctypes.c_int64 * 2)()
        self._holding.core_count(self._queue, counts)
        return counts[0] / 1e9, counts[1]

    def stop(self) -> None:
        """Begin no more jobs; whoever asks for one is told. Does not wait. Idempotent."""
        self._holding.core_stop(self._queue)

    def close(self) -> None:
        """Stop, wait for the jobs that run, and let go of plans and slots. Idempotent."""
        if self._pid != os.getpid() or not self._closing.acquire(blocking=False):
            return  # of several that close at a time one does; nobody lets go of the lock again
        self._library.core_close(self._queue)
        self._plans.clear()
        self._lent.clear()
        ctypes.pythonapi.Py_DecRef(self._self)
        del self._self
