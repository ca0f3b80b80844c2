"""Queues of the compiled core: jobs of plans against a plain loop, their order, their slots, their end."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from forked_kit import fork
from hypothesis import given, strategies as st
from msgspec import structs
from numpy.typing import NDArray
from plain_core import copied

from prefetch.core.copy_table import COLUMN_ALIGN, JobPlan, PlanColumn
from prefetch.core.kernels import kernels
from prefetch.core.queue import CopyQueue, JobAnswer, SubmittedPlan
from tests.prefetch.core.test_kernels import BASE, CONTENT, PAGE, columns, int64

TIMEOUT_S = 30
Open = Callable[[int], CopyQueue]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a queue with so many threads, and closes it in the end."""
    queues = []

    def open_queue(num_threads: int) -> CopyQueue:
        queues.append(kernels().open_queue(num_threads))
        return queues[-1]

    yield open_queue
    for queue in queues:
        queue.close()


def lend(queue: CopyQueue, nbytes: int, *, under: bool = False) -> int:
    """Lend a slot; gives its address."""
    slot = np.full(nbytes + 8, 0xA5, np.uint8)
    address = slot.ctypes.data
    queue.give(slot[: nbytes or 1], address, under=under)
    return address


def next_job(queue: CopyQueue, submitted: SubmittedPlan) -> tuple[NDArray[np.uint8], int]:
    """The slot of the next job and its rows with a status; slots are lent as they are needed."""
    while (answer := queue.work(submitted, TIMEOUT_S)) == JobAnswer.NEED_SLOT:
        lend(queue, submitted.plan.slot_bytes)
    assert answer == JobAnswer.READY
    _, slot, num_bad, _ = queue.taken(submitted)
    return slot, num_bad


def taken_back(queue: CopyQueue) -> int | None:
    """The address of a slot that came back."""
    lent = queue.take_back()
    return None if lent is None else lent[0]


def rows_column(starts: list[int], each: int = 8, **options: object) -> PlanColumn:
    return PlanColumn(name="x", index=int64(starts) + BASE, each=each, **options)  # type: ignore[arg-type]


def value(start: int, each: int = 8) -> bytes:
    return CONTENT[start : start + each].tobytes()


@given(data=st.data(), num_threads=st.sampled_from([0, 1, 3]))
def test_jobs_hold_what_the_plain_loop_copies(data: st.DataObject, num_threads: int) -> None:
    queue, plans, whole = kernels().open_queue(num_threads), [], []
    for number in range(data.draw(st.integers(1, 3))):
        num_rows = data.draw(st.sampled_from([1, 2, 7, 64, 65]))
        placed = [c for c in data.draw(st.lists(columns(num_rows), max_size=3)) if follows(c)]
        cuts = data.draw(st.sets(st.integers(1, num_rows), max_size=4)) | {num_rows}
        without_out = [structs.replace(column, out=None) for column in placed]
        plans.append(queue.submit(JobPlan(number=number, columns=without_out, ends=int64(sorted(cuts)))))
        whole.append([copied(column) for column in placed])
        for _ in range(data.draw(st.integers(0, 3))):
            lend(queue, plans[-1].plan.slot_bytes)
    for submitted, expected in zip(plans, whole, strict=True):
        first = 0
        for job, end in enumerate(submitted.plan.ends.tolist()):
            slot, num_bad = next_job(queue, submitted)
            assert num_bad == 0
            for number, column in enumerate(submitted.plan.columns):
                own = slot[submitted.plan.offsets[job, number] :][: out_bytes(column, first, end)]
                before = out_bytes(column, 0, first)
                assert own.tobytes() == expected[number][before:][: len(own)].tobytes()
            first = end
    assert queue.count()[1] == sum(len(submitted.plan.ends) for submitted in plans)
    queue.close()


def follows(column: PlanColumn) -> bool:
    """Whether values follow one another without gaps."""
    assert column.out is not None
    return column.nbytes == column.out.nbytes


def out_bytes(column: PlanColumn, first: int, last: int) -> int:
    return int(column.out_bytes(int64([first]), int64([last]))[0])


def test_columns_of_a_job_lie_apart_in_its_slot() -> None:
    plan = JobPlan(
        number=0,
        columns=[rows_column([0, 8, 16], 3), rows_column([0, 8, 16], 100)],
        ends=int64([2, 3]),
    )
    assert plan.offsets.tolist() == [
        [0, COLUMN_ALIGN, COLUMN_ALIGN + 256],
        [0, COLUMN_ALIGN, COLUMN_ALIGN + 128],
    ]
    assert plan.slot_bytes == COLUMN_ALIGN + 256


def test_the_first_plan_is_run_first_whatever_order_they_come_in(opened: Open) -> None:
    queue = opened(0)
    later = queue.submit(JobPlan(number=9, columns=[rows_column([8])], ends=int64([1])))
    sooner = queue.submit(JobPlan(number=4, columns=[rows_column([0])], ends=int64([1])))
    lend(queue, 64)
    assert next_job(queue, sooner)[0][:8].tobytes() == value(0)
    assert next_job(queue, later)[0][:8].tobytes() == value(8)


def test_a_job_without_a_slot_is_an_answer_and_no_wait(opened: Open) -> None:
    queue = opened(1)
    submitted = queue.submit(JobPlan(number=0, columns=[rows_column([0, 8])], ends=int64([1, 2])))
    assert queue.take(submitted) == JobAnswer.NOT_READY
    for start in (0, 8):
        assert queue.work(submitted, TIMEOUT_S) == JobAnswer.NEED_SLOT
        address = lend(queue, 64)
        assert queue.work(submitted, TIMEOUT_S) == JobAnswer.READY
        got, slot, num_bad, num_waiting = queue.taken(submitted)
        assert (got, slot[:8].tobytes(), num_bad, num_waiting) == (address, value(start), 0, start == 0)
        assert queue.num_lent == 0


@pytest.mark.parametrize(("num_jobs", "wake_at"), [(1, 8), (3, 8), (9, 3)])
def test_threads_that_sleep_are_woken_by_as_many_slots_as_they_have_jobs_for(
    num_jobs: int, wake_at: int
) -> None:
    """The test takes no job before all are over, so nobody but the threads makes them."""
    queue = kernels().open_queue(1, wake_at=wake_at)
    starts = [8 * job for job in range(num_jobs)]
    ends = np.arange(1, num_jobs + 1, dtype=np.int64)
    submitted = queue.submit(JobPlan(number=0, columns=[rows_column(starts)], ends=ends))
    for _ in range(num_jobs):
        lend(queue, 64)
    until_s = time.monotonic() + TIMEOUT_S
    while queue.count()[1] < num_jobs:
        assert time.monotonic() < until_s
        queue.drain()
    assert queue.take(submitted) == JobAnswer.READY
    queue.close()


def test_what_was_lent_last_is_used_first(opened: Open) -> None:
    queue = opened(0)
    submitted = queue.submit(JobPlan(number=0, columns=[rows_column([0, 8])], ends=int64([1, 2])))
    first, under, last = lend(queue, 64), lend(queue, 64, under=True), lend(queue, 64)
    for address in (last, first):
        assert queue.work(submitted, TIMEOUT_S) == JobAnswer.READY
        assert queue.taken(submitted)[0] == address
    assert (taken_back(queue), taken_back(queue), queue.num_lent) == (under, None, 0)


def test_slots_that_are_too_small_are_not_used_and_come_back(opened: Open) -> None:
    queue = opened(0)
    submitted = queue.submit(JobPlan(number=0, columns=[rows_column([0], 64)], ends=int64([1])))
    small = lend(queue, 63)
    assert queue.work(submitted, TIMEOUT_S) == JobAnswer.NEED_SLOT
    large = lend(queue, 64)
    assert taken_back(queue) == small
    assert taken_back(queue) is None
    assert queue.work(submitted, TIMEOUT_S) == JobAnswer.READY
    assert queue.taken(submitted)[0] == large


def test_slots_beyond_those_that_are_remembered_are_let_go(opened: Open) -> None:
    queue = opened(0)
    for _ in range(1100):
        lend(queue, 64)
    assert queue.num_lent == 1024


@pytest.mark.parametrize("num_threads", [0, 2])
def test_values_are_loaded_in_the_plans_generation_and_read_by_the_kernel_in_later_ones(
    opened: Open, tmp_path: Path, num_threads: int
) -> None:
    """A load from a page that is gone would end this process."""
    path, generation = tmp_path / "file", np.zeros(1, np.int64)
    path.write_bytes(value(0, 2 * PAGE))
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    base = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    column = PlanColumn(name="x", index=int64([0, PAGE, 8]) + base, each=8)
    queue, plans = opened(num_threads), []
    for number in range(2):
        plan = JobPlan(number=number, columns=[column], ends=int64([3]), generation=generation, planned_in=0)
        plans.append(queue.submit(plan))
    assert next_job(queue, plans[0])[1] == 0
    generation += 1
    queue.drain()
    os.truncate(path, PAGE)
    slot, num_bad = next_job(queue, plans[1])
    assert (num_bad, plans[1].status.tolist()) == (1, [0, 1, 0])
    assert slot.tobytes()[:8] + slot.tobytes()[16:24] == value(0) + value(8)


def test_whoever_waits_for_a_job_hears_that_the_queue_has_stopped(opened: Open) -> None:
    queue, answers = opened(1), list[int]()
    submitted = queue.submit(JobPlan(number=0, columns=[rows_column([0])], ends=int64([1])))
    queue.stop()
    consumer = threading.Thread(target=lambda: answers.append(queue.work(submitted, TIMEOUT_S)))
    consumer.start()
    consumer.join(TIMEOUT_S)
    assert answers == [JobAnswer.STOPPED]
    lend(queue, 64)
    assert queue.work(submitted, TIMEOUT_S) == JobAnswer.STOPPED


def test_a_closed_queue_keeps_nothing_and_answers(opened: Open) -> None:
    queue = opened(2)
    submitted = queue.submit(JobPlan(number=0, columns=[rows_column([0])], ends=int64([1])))
    lend(queue, 4)
    queue.close()
    queue.close()
    assert queue.num_lent == 0
    assert queue.take(submitted) == JobAnswer.NOT_READY
    assert queue.work(submitted, TIMEOUT_S) == JobAnswer.STOPPED


def test_closing_in_a_forked_child_waits_for_no_thread(opened: Open) -> None:
    queue = opened(2)
    child = fork()
    if child == 0:
        queue.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def copying_threads() -> set[str]:
    """Of this process, as the system knows them; those of other tests may be about to end."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text() == "dataflow-copy\n":
                found.add(task.name)
    return found


def test_threads_of_a_queue_take_no_signals_and_end_with_it() -> None:
    before = copying_threads()
    queue = kernels().open_queue(3)
    own = copying_threads() - before
    assert len(own) == queue.num_threads == 3
    for task in own:
        status = Path(f"/proc/self/task/{task}/status").read_text()
        blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")), 16)
        assert blocked & (1 << 1)  # SIGINT
    queue.close()
    assert not own & copying_threads()
