"""Copies of chunks, made job by job by threads of the compiled core, into slots of the arena.

Chunks that are copies alone are not built by builders: these only plan them. Their jobs go to a queue of
threads that never take the interpreter lock (`prefetch.core.queue`), and the consumer makes those that nobody
has begun when it asks for them. A job's slot is as large as a batch or a few: the one that the consumer gave
back last is used next, while it is in the processor's cache. What lies ready is bounded by the number of
slots, for which chunks have credits until their last job is taken; what the consumer has is charged besides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefetch.core.copy_table import JobPlan
from prefetch.core.queue import CopyQueue, JobAnswer, SubmittedPlan
from prefetch.errors import EngineClosedError
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.work import Wait

_LOOK_S = 0.25
"""A wait for a copy ends this often, for a Ctrl-C and for notices: copies take milliseconds."""


class _Credit:
    """The credit that comes back when a job's slot dies: nothing, before the job was taken."""

    __slots__ = ("give_back", "nbytes")

    def __init__(self, give_back: Callable[[int], None]) -> None:
        self.give_back, self.nbytes = give_back, 0

    def __call__(self) -> None:
        self.give_back(self.nbytes)


class Copies:
    """The jobs of one engine. Jobs are for one consumer thread; all else is thread-safe.

    Args:
        queue: makes the copies.
        arena: where slots are taken.
        new_wait: a wait of the consumer, told when it began.
        charge: takes credits for what the consumer has.
        give_back: hears of the credits of what it has dropped; reentrant, in any thread.
        job_bytes: of a usual job.
        batches_per_job: that lie in one slot.
        most_slots: for jobs that lie ready, and those to come.
    """

    def __init__(
        self,
        queue: CopyQueue,
        arena: Arena,
        new_wait: Callable[[float], Wait],
        *,
        charge: Callable[[int], None],
        give_back: Callable[[int], None],
        job_bytes: int,
        batches_per_job: int,
        most_slots: int,
    ) -> None:
        self.queue, self._arena, self.new_wait = queue, arena, new_wait
        self._charge, self._give_back = charge, give_back
        self._slot_bytes, self.most_slots = rounded_bytes(job_bytes), most_slots
        self._credits: dict[int, _Credit] = {}
        self.pid, self.batches_per_job = os.getpid(), batches_per_job
        self.starved_s = 0.0
        """Seconds that the consumer has waited for copies, or made them."""
        self.num_taken = 0
        """The number of jobs that the consumer took."""
        self.taken_bytes = 0
        """The bytes of their slots."""

    def credits_for(self, num_jobs: int, nbytes: int) -> int:
        """Credits of so many jobs, each of at most `nbytes`, as many as lie ready at a time.

        Called under the engine's lock. Slots hold as much from now on: all are alike, or few would fit.
        """
        self._slot_bytes = max(self._slot_bytes, rounded_bytes(nbytes))
        return min(num_jobs, self.most_slots) * self._slot_bytes

    def submit(self, plan: JobPlan) -> ChunkCopies:
        """Begin with the copies of a chunk."""
        submitted = self.queue.submit(plan)
        self.reclaim()
        for _ in range(min(len(plan.ends), self.most_slots - self.queue.num_lent)):
            self.lend(under=True)
        return ChunkCopies(self, submitted)

    def lend(self, least_bytes: int = 0, *, under: bool = False) -> None:
        """Lend a slot more, of at least so many bytes."""
        credit = _Credit(self._give_back)
        memory, address = self._arena.lease_at(max(self._slot_bytes, least_bytes), credit)
        self._credits[address] = credit
        self.queue.give(memory, address, under=under)

    @property
    def ready_batches(self) -> int:
        """About how many are made and not taken."""
        return self.batches_per_job * (self.queue.count()[1] - self.num_taken)

    def reclaim(self) -> None:
        """Let go of the slots that no job needs."""
        while (lent := self.queue.take_back()) is not None:
            # While the slot is alive: the next one at its address has another credit.
            self._credits.pop(lent[0], None)

    def charge(self, address: int, nbytes: int) -> None:
        """A slot is the consumer's, until it dies."""
        self._charge(nbytes)
        self._credits.pop(address).nbytes = nbytes
        self.num_taken += 1
        self.taken_bytes += nbytes


class ChunkCopies:
    """The jobs of one chunk, in order."""

    def __init__(self, copies: Copies, submitted: SubmittedPlan) -> None:
        self._copies, self._submitted = copies, submitted
        self.plan, self.batches_per_job = submitted.plan, copies.batches_per_job
        self.offsets: list[list[int]] = self.plan.offsets.tolist()
        """[jobs][columns + 1] where in a job's slot a column begins."""
        self.status = submitted.status
        """[rows] of the jobs that were taken: 0, or 1 + the first column whose value could not be read."""

    def take(self) -> tuple[NDArray[np.uint8], int]:
        """The next job: its slot, which is the caller's, and how many of its rows have a status.

        Raises `EngineClosedError`, `StallError` after the time-out, `RuntimeError` in a forked child.
        """
        copies = self._copies
        if copies.pid != os.getpid():
            raise RuntimeError("a loader's threads do not survive a fork; make the loader in the child")
        if copies.queue.take(self._submitted) != JobAnswer.READY:
            self._wait()
        address, slot, num_bad, num_waiting = copies.queue.taken(self._submitted)
        copies.charge(address, len(slot))
        if not num_waiting:
            copies.reclaim()
        elif copies.queue.num_lent < copies.most_slots:
            copies.lend()  # on top: what was given back last is warm
        return slot, num_bad

    def _wait(self) -> None:
        copies, began_s = self._copies, time.perf_counter()
        wait = copies.new_wait(began_s)
        while True:
            got = copies.queue.work(self._submitted, _LOOK_S)
            now_s = time.perf_counter()
            if got == JobAnswer.READY:
                copies.starved_s += now_s - began_s
                if wait.was_told:
                    wait.end(now_s - began_s)
                return
            if got == JobAnswer.STOPPED:
                raise EngineClosedError("the loader was closed while a batch was awaited")
            if got == JobAnswer.NEED_SLOT:
                copies.lend(self.plan.slot_bytes)
            elif now_s >= wait.due_s:
                wait.tell(now_s, "", "values are copied from where they lie", copies.queue.count)
