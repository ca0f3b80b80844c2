"""Copies of chunks: how many slots are lent, what they cost, and where they go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from forked_kit import fork

from prefetch.core.copy_table import JobPlan, PlanColumn
from prefetch.core.kernels import kernels
from prefetch.errors import EngineClosedError
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.copies import ChunkCopies, Copies

CONTENT = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
SLOT = rounded_bytes(1)


class NoWait:
    """A wait that nobody hears of."""

    due_s = float("inf")
    was_told = False

    def tell(self, *_: object) -> None:
        raise AssertionError("copies take no time")

    def end(self, waited_s: float) -> None:
        assert waited_s >= 0


@dataclass
class Ledger:
    """What was charged and given back."""

    charged: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)


@dataclass
class Bench:
    arena: Arena
    ledger: Ledger
    copies: Copies

    def submit(self, num_jobs: int, number: int = 0, each: int = 8) -> ChunkCopies:
        """A chunk of a row a job: row i holds the bytes from i on."""
        index = CONTENT.ctypes.data + np.arange(num_jobs, dtype=np.int64)
        self.copies.credits_for(num_jobs, each)
        column = PlanColumn(name="x", index=index, each=each)
        ends = np.arange(1, num_jobs + 1, dtype=np.int64)
        return self.copies.submit(JobPlan(number=number, columns=[column], ends=ends))


@pytest.fixture
def bench() -> Iterator[Bench]:
    arena, ledger, queue = Arena(limit_bytes=1 << 30), Ledger(), kernels().open_queue(0)
    made: Any = {"charge": ledger.charged.append, "give_back": ledger.back.append}
    copies = Copies(queue, arena, lambda _: NoWait(), job_bytes=8, batches_per_job=1, most_slots=3, **made)
    yield Bench(arena, ledger, copies)
    queue.close()
    assert arena.num_leased == 0


def test_jobs_come_in_order_whatever_was_lent(bench: Bench) -> None:
    chunk = bench.submit(20)
    for row in range(20):
        slot, num_bad = chunk.take()
        assert (slot[:8].tobytes(), num_bad) == (CONTENT[row : row + 8].tobytes(), 0)
        del slot


def test_no_more_slots_are_lent_than_may_lie_ready(bench: Bench) -> None:
    chunks = [bench.submit(2, 0), bench.submit(20, 1)]
    assert bench.copies.queue.num_lent == 3
    kept = [chunk.take()[0] for chunk in chunks for _ in range(2)]
    assert bench.copies.queue.num_lent == 3
    assert bench.arena.num_leased == 3 + len(kept)
    assert bench.copies.credits_for(20, 8) == 3 * SLOT
    assert bench.copies.credits_for(2, 8) == 2 * SLOT
    kept.clear()


def test_a_slot_is_charged_from_when_it_is_taken_until_its_last_view_dies(bench: Bench) -> None:
    chunk = bench.submit(5)
    assert (bench.ledger.charged, bench.ledger.back) == ([], [])
    slot, _ = chunk.take()
    assert bench.ledger.charged == [SLOT]
    view = slot[2:4]
    del slot
    bench.arena.reconcile()
    assert bench.ledger.back == []
    del view
    bench.arena.reconcile()
    assert bench.ledger.back == [SLOT]


def test_what_the_consumer_gave_back_is_used_next(bench: Bench) -> None:
    chunk = bench.submit(12)
    for _ in range(3):
        chunk.take()
    address = chunk.take()[0].ctypes.data
    chunk.take()  # the slot is lent when a job is taken
    assert chunk.take()[0].ctypes.data == address


def test_slots_that_no_job_needs_go_back(bench: Bench) -> None:
    chunk = bench.submit(4)
    kept = [chunk.take()[0] for _ in range(4)]
    assert (bench.copies.queue.num_lent, bench.arena.num_leased) == (0, 4)
    kept.clear()


def test_slots_grow_with_the_jobs_and_smaller_ones_go_back(bench: Bench) -> None:
    small, large = bench.submit(2, 0), bench.submit(8, 1, each=5000)
    assert bench.copies.credits_for(1, 8) == rounded_bytes(5000)
    assert [len(small.take()[0]) for _ in range(2)] == [rounded_bytes(5000)] * 2
    for row in range(8):
        assert large.take()[0][:5000].tobytes() == CONTENT[row : row + 5000].tobytes()
    assert bench.copies.queue.num_lent <= 3


def test_a_job_that_no_slot_was_credited_for_gets_one(bench: Bench) -> None:
    index = np.array([CONTENT.ctypes.data], np.int64)
    plan = JobPlan(
        number=0,
        columns=[PlanColumn(name="x", index=index, each=2 * SLOT)],
        ends=np.array([1], np.int64),
    )
    slot, _ = bench.copies.submit(plan).take()
    assert slot[: 2 * SLOT].tobytes() == CONTENT[: 2 * SLOT].tobytes()


def test_a_closed_queue_is_told_to_who_asks(bench: Bench) -> None:
    chunk = bench.submit(2)
    bench.copies.queue.stop()
    with pytest.raises(EngineClosedError, match="closed while a batch was awaited"):
        chunk.take()


def test_a_forked_child_is_told_to_make_its_own_loader(bench: Bench) -> None:
    chunk, child = bench.submit(2), fork()
    if child == 0:
        try:
            chunk.take()
        except RuntimeError as error:
            os._exit(7 if "do not survive a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
