"""Who lives how long: workers, iterators, batches and what they are made of, however a loop ends."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parameters_kit import in_full
from programs_kit import run_script
from worker_kit import Does, ended, nothing_left, workers_of_this_process

from dataflow import DataLoader

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
TIMES = 5
PROGRAMS = 2
"""Fewer: the interpreter's end with torch in it takes a second on a busy machine."""


def same(index: int) -> int:
    return index


def row(index: int) -> torch.Tensor:
    """1 MiB; two of them are collated in shared memory."""
    return torch.full((1 << 17,), index, dtype=torch.int64)


def pids_of(iterator: Any) -> list[int]:
    return [process.pid for process in iterator.runners.processes]


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    if workers_of_this_process():
        gc.collect()
    assert workers_of_this_process() == []


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What a process has only once is there."""
    list(DataLoader(Does(same), num_workers=1))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Whatever ends now ends by reference counting."""
    gc.disable()
    yield
    gc.enable()


# ---- loops that end early, in one process ---------------------------------------------------------------


def leave_at_once(loader: DataLoader) -> None:
    iter(loader)


def leave_after_one(loader: DataLoader) -> None:
    for _ in loader:
        break


def leave_by_an_exception(loader: DataLoader) -> None:
    def train() -> None:
        for batch in loader:
            raise ZeroDivisionError(batch)

    with contextlib.suppress(ZeroDivisionError):
        train()


def leave_a_generator(loader: DataLoader) -> None:
    def batches() -> Iterator[Any]:
        yield from loader

    next(batches())


def finish(loader: DataLoader) -> None:
    assert len(list(loader)) == 8


def close_inside(loader: DataLoader) -> None:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(RuntimeError, match="closed inside this loop"):
        next(iterator)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "leave", [leave_at_once, leave_after_one, leave_a_generator, leave_by_an_exception, finish, close_inside]
)
def test_many_loops_leave_nothing_behind(leave: Callable[[DataLoader], None]) -> None:
    loader = DataLoader(Does(same), num_workers=1)
    with nothing_left():
        for _ in range(TIMES):
            leave(loader)


@pytest.mark.usefixtures("no_collector")
def test_many_epochs_of_persistent_workers_left_early_leave_nothing_behind() -> None:
    with nothing_left():
        with DataLoader(Does(row), 2, num_workers=2, persistent_workers=True) as loader:
            for _ in range(TIMES):
                iterator = iter(loader)
                pids = pids_of(iterator)
                assert int(next(iterator)[1, 5]) == 1
            held = os.fstat(iterator.runners.file.fd).st_blocks * 512
            del iterator
        assert ended(*pids)
    assert held < 64 << 20  # 4 batches of 2 MiB are under way at most, and some of the next epoch


@pytest.mark.usefixtures("no_collector")
def test_persistent_workers_end_with_their_loader() -> None:
    loader = DataLoader(Does(same), None, num_workers=2, persistent_workers=True)
    assert list(loader) == list(range(8))
    pids = loader.stats().worker_pids
    assert len(workers_of_this_process()) == 2
    del loader
    assert ended(*pids)
    assert workers_of_this_process() == []


def test_a_failed_start_leaves_nothing_behind() -> None:
    def fail() -> None:
        with pytest.raises(Exception, match="cannot be loaded here"):
            next(iter(DataLoader(Unloadable(), num_workers=2, multiprocessing_context="forkserver")))

    fail()  # multiprocessing's server stays
    with nothing_left():
        fail()


class Unloadable(Does):
    def __init__(self) -> None:
        super().__init__(same)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be loaded here")


# ---- several loops at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_two_iterators_of_one_loader(persistent: bool) -> None:
    """With persistent workers they are one iterator that begins again, as with torch."""
    with DataLoader(Does(same), None, num_workers=2, persistent_workers=persistent) as loader:
        one = iter(loader)
        assert [next(one), next(one)] == [0, 1]
        other = iter(loader)
        assert (other is one) == persistent
        assert [next(other), next(other), next(other)] == [0, 1, 2]
        if not persistent:
            assert list(one) == list(range(2, 8))
        assert list(other) == list(range(3, 8))


def test_a_loop_inside_a_loop_over_the_same_loader() -> None:
    loader = DataLoader(Does(same, 3), None, num_workers=1)
    assert [(a, b) for a in loader for b in loader] == [(a, b) for a in range(3) for b in range(3)]


def test_a_loader_can_be_iterated_in_another_thread_than_it_was_made_in() -> None:
    loader = DataLoader(Does(same), None, num_workers=2)
    with nothing_left(), ThreadPoolExecutor(1) as thread:
        assert thread.submit(list, loader).result(60) == list(range(8))
        iterator = thread.submit(iter, loader).result(60)
        assert list(iterator) == list(range(8))
        iterator = iter(loader)
        assert thread.submit(next, iterator).result(60) == 0
        thread.submit(iterator.close).result(60)
        del iterator
        thread.shutdown()


def test_two_threads_may_loop_over_loaders_of_their_own() -> None:
    with nothing_left(), ThreadPoolExecutor(2) as threads:
        loaders = [DataLoader(Does(row), 2, num_workers=1) for _ in range(2)]

        def sums(loader: DataLoader) -> list[int]:
            return [int(batch[:, 7].sum()) for _ in range(2) for batch in loader]

        found = list(threads.map(sums, loaders, timeout=100))
        threads.shutdown()
        assert found == [[1, 5, 9, 13] * 2] * 2


def test_a_loop_that_waits_in_one_thread_can_be_closed_in_another(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    with nothing_left(), ThreadPoolExecutor(1) as thread:
        loader = DataLoader(Does(functools.partial(wait_at, tmp_path / "never")), num_workers=1)
        iterator = iter(loader)
        waiting = thread.submit(next, iterator)
        # Waits for the worker: one that is not forked yet hears no signal, and ends by itself, but later.
        writer = os.open(tmp_path / "never", os.O_WRONLY)
        iterator.runners.pool.close(stop_s=0)
        with pytest.raises(RuntimeError, match=r"closed inside this loop|exited unexpectedly"):
            waiting.result(60)
        os.close(writer)
        del iterator, waiting
        thread.shutdown()


def wait_at(path: Path, index: int) -> int:
    return len(path.read_bytes())


# ---- loaders inside of workers --------------------------------------------------------------------------


def inner(context: str | None, index: int) -> list[int]:
    loader = DataLoader(
        Does(functools.partial(times, index)), 2, num_workers=1, multiprocessing_context=context
    )
    return [int(batch[1, 5]) for batch in loader]


def times(factor: int, index: int) -> torch.Tensor:
    return row(index) * factor


@pytest.mark.parametrize("context", [None, "fork", *in_full("spawn")])
def test_a_dataset_may_use_a_loader_with_workers_of_its_own(context: str | None) -> None:
    """Workers of workers: none is a daemon, and a forked one does not write into its parent's memory."""
    with nothing_left():
        loader = DataLoader(Does(functools.partial(inner, context), 2), None, num_workers=1)
        assert list(loader) == [[0, 0, 0, 0], [1, 3, 5, 7]]


def collated_beside_torchs(index: int) -> torch.Tensor:
    """Torch's own loader in our worker, forked from it."""
    theirs = torch.utils.data.DataLoader(
        Does(functools.partial(times, index)), 2, num_workers=2, multiprocessing_context="fork"
    )
    own = torch.utils.data.default_collate([row(index), row(index)])
    return torch.cat([own[:, :3], *(batch[:, :3] for batch in theirs)])


def test_torchs_loader_inside_of_a_worker_keeps_its_hands_off_our_memory() -> None:
    loader = DataLoader(Does(collated_beside_torchs, 2), None, num_workers=1)
    for index, batch in enumerate(loader):
        assert batch[:, 2].tolist() == [index, index, *(k * index for k in range(8))]


def test_workers_of_workers_end_when_the_loop_is_left() -> None:
    loader = DataLoader(Does(keeps_a_loader, 8), None, num_workers=1)
    iterator = iter(loader)
    inner_pids = next(iterator)
    assert len(inner_pids) == 2
    del iterator
    assert ended(*inner_pids)


_kept: list[Any] = []


def keeps_a_loader(index: int) -> tuple[int, ...]:
    loader = DataLoader(Does(same), None, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]  # each of a process, which is there then
    _kept.append(loader)
    return loader.stats().worker_pids


# ---- batches that outlive the loop ----------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["drop", "close", "finish"])
def test_batches_stay_valid_when_their_loop_has_gone_and_give_their_memory_back_one_by_one(how: str) -> None:
    with nothing_left():
        loader = DataLoader(Does(row, 40), 2, num_workers=2)
        iterator = iter(loader)
        held = [next(iterator) for _ in range(20 if how == "finish" else 12)]
        file = os.dup(iterator.runners.file.fd)
        if how == "finish":
            assert next(iterator, None) is None
        elif how == "close":
            loader.close()
        del iterator
        assert workers_of_this_process() == []
        for index, batch in enumerate(held):
            assert torch.equal(batch, torch.stack([row(2 * index), row(2 * index + 1)]))

        def shared() -> int:
            return os.fstat(file).st_blocks * 512

        for left in range(len(held) - 1, 0, -1):
            held.pop(0)
            assert shared() <= (left * 2 + 1) << 20
        view = held[0][1, 7:9]
        held.clear()
        assert view.tolist() == [2 * index + 1] * 2  # one view keeps its batch
        assert shared() > 0
        del view, batch
        assert shared() == 0
        os.close(file)


@pytest.mark.usefixtures("no_collector")
def test_states_that_came_with_a_batch_do_not_keep_its_memory() -> None:
    with nothing_left():
        loader = DataLoader(Does(drawn), 2, num_workers=1)
        assert len(list(loader)) == 4
        assert loader.state_dict()["complete"]


def drawn(index: int) -> torch.Tensor:
    return row(index) + torch.randint(9, ()) + random.randint(0, 9) + np.random.randint(9)


def test_batches_that_are_kept_are_never_written_to_again() -> None:
    loader = DataLoader(Does(row, 64), 2, num_workers=2, memory_limit="8MB")
    kept = list(loader)
    assert [batch[:, 9].tolist() for batch in kept] == [[2 * i, 2 * i + 1] for i in range(32)]


# ---- copies of a loader ---------------------------------------------------------------------------------


def plain(loader: DataLoader) -> DataLoader:
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, plain])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_copy_of_a_loader_has_loops_of_its_own(
    copied: Callable[[DataLoader], DataLoader], options: dict[str, Any]
) -> None:
    with DataLoader(Does(same, 4), None, **options) as loader:
        assert list(copied(loader)) == [0, 1, 2, 3]
        iterator = iter(loader)
        assert next(iterator) == 0
        with copied(loader) as other:
            assert list(other) == [0, 1, 2, 3]
            assert list(other) == [0, 1, 2, 3]
        assert list(iterator) == [1, 2, 3]
        with copied(loader) as other:
            assert list(other) == [0, 1, 2, 3]
            assert other.state_dict()["complete"]
        iterator = iter(loader)
        next(iterator)
        loader.load_state_dict(loader.state_dict())
        with copied(loader) as other:  # a state that was loaded, and not yet used, goes along
            assert list(other) == [1, 2, 3]
        assert list(loader) == [1, 2, 3]


def test_iterators_refuse_to_be_copied() -> None:
    iterator = iter(DataLoader(Does(same), num_workers=1))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError):
            copied(iterator)


# ---- processes forked while a loader runs ---------------------------------------------------------------

FORKED = """
import gc, os, sys
import torch
from dataflow import DataLoader
from forked_kit import fork
from worker_kit import Does, ended

def row(index):
    return torch.full((1 << 14,), index, dtype=torch.int64)

finished = list(DataLoader(Does(row), 2, num_workers=1))
running = DataLoader(Does(row, 1000), 2, num_workers=2)
iterator = iter(running)
held = [next(iterator) for _ in range(4)]
pids = [process.pid for process in iterator.runners.processes]

rounds, what = int(sys.argv[1]), sys.argv[2]
gc.freeze()
for round in range(rounds):
    child = fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0, "the child has failed"
    at = 4 + round
    assert next(iterator)[1, 5] == 2 * at + 1
if child == 0:
    assert finished[1][1, 5] == 3 and held[1][1, 5] == 3
    if what == "use":
        try:
            next(iterator)
        except RuntimeError as error:
            assert "begin a new loop" in str(error), error
        else:
            raise AssertionError("a forked process may not take its parent's batches")
        iterator.close()
        running.close()
        own = [int(batch[1, 5]) for batch in DataLoader(Does(row), 2, num_workers=1)]
        assert own == [1, 3, 5, 7], own
    elif what == "drop":
        del finished, held, iterator, running
    # and ends as any program does
else:
    for index in range(4):
        assert finished[index][1, 5] == held[index][1, 5] == 2 * index + 1, "somebody took our pages"
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    print("fine")
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("what", "rounds"), [("nothing", PROGRAMS), ("drop", PROGRAMS), ("use", 2)])
def test_processes_forked_in_the_middle_of_a_loop_do_it_no_harm(
    tmp_path: Path, what: str, rounds: int
) -> None:
    """They exit as programs do, with all the finalisers; nobody's workers or batches suffer."""
    code, out, err = run_script(FORKED, rounds, what, how="forked", folder=tmp_path)
    assert (code, out, err) == (0, "fine\n", "")


# ---- the end of the program -----------------------------------------------------------------------------

ENDS = """
import ctypes, gc, os, select, sys, threading
import torch
from dataflow import DataLoader
from forked_kit import fork
from worker_kit import Does

def row(index):
    return torch.full((1 << 14,), index, dtype=torch.int64)

rounds, method, case, expected = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
context = None if method == "default" else method
gc.freeze()  # the children need not look through torch at their end
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: whoever is orphaned becomes our child
for _ in range(rounds):
    child = fork()
    if child == 0:
        break
    watched = os.pidfd_open(child)
    assert select.select([watched], [], [], 60)[0], "the program hangs"
    os.close(watched)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == expected, code
    soon = context is None or case == "os exit"
    try:  # whoever the program has left behind ends; a worker must have ended, if the program could see to it
        while True:
            left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | (0 if soon else os.WNOHANG))
            assert left is not None, "a worker lives on"
            os.waitpid(left.si_pid, 0)
    except ChildProcessError:
        pass
if child != 0:
    print("fine")
    sys.exit()

loader = DataLoader(Does(row, 64), 2, num_workers=2, multiprocessing_context=context)
"""

CASES = {
    "alive": ("iterator = iter(loader); first = next(iterator)", 0),
    "begun": ("iterator = iter(loader)", 0),
    "generator": ("def batches():\n    yield from loader\ngenerator = batches(); next(generator)", 0),
    "held": ("held = list(loader)", 0),
    "persistent": (
        "loader = DataLoader(Does(row), 2, num_workers=2, persistent_workers=True,"
        " multiprocessing_context=context)\nlist(loader)",
        0,
    ),
    "thread": ("threading.Thread(target=lambda: [list(loader) for _ in range(2)]).start()", 0),
    "daemon": (  # before 3.14, a thread that frees a tensor while Python ends aborts: it keeps its batches
        "begun, kept = threading.Event(), []\n"
        "def loop():\n    for batch in loader:\n        kept.append(batch)\n        begun.set()\n"
        "threading.Thread(target=loop, daemon=True).start(); begun.wait(60)",
        0,
    ),
    "exit": ("for batch in loader:\n    sys.exit(7)", 7),
    "os exit": ("for batch in loader:\n    os._exit(5)", 5),
    "error": ("sys.stderr = None\nfor batch in loader:\n    raise ValueError('in the loop')", 1),
    "cycle": ("class Holder: pass\nholder = Holder(); holder.me = holder; holder.it = iter(loader)", 0),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES)
def test_a_program_may_end_at_any_moment(tmp_path: Path, case: str) -> None:
    """With forked workers; the programs themselves being forked from one that has torch."""
    text, expected = CASES[case]
    code, out, err = run_script(
        ENDS + text + "\n", PROGRAMS, "fork", case, expected, how="forked", folder=tmp_path
    )
    assert (code, out, err) == (0, "fine\n", "")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", ["alive", "daemon", "exit", "os exit"])
def test_a_program_with_a_fork_server_may_end_at_any_moment(tmp_path: Path, case: str) -> None:
    """Once each, for a server takes seconds to start; it ends soon after the program, without being asked."""
    text, expected = CASES[case]
    code, out, err = run_script(
        ENDS + text + "\n", 1, "default", case, expected, how="forked", folder=tmp_path
    )
    assert (code, out, err) == (0, "fine\n", "")


CLOSES = """
import os, sys, threading
from multiprocessing import util
from multiprocessing.context import ForkContext, ForkProcess
from dataflow import DataLoader
from prefetch.workers.pool import WorkerPool
from worker_kit import Does

begun, exits = threading.Event(), threading.Event()

def hold():
    begun.set()
    exits.wait(60)

class WatchedProcess(ForkProcess):
    def join(self, timeout=None):
        hold()
        super().join(timeout)
        os.write(1, b"ended")

class WatchedContext(ForkContext):
    Process = WatchedProcess

def busy(index):
    return index if index < 4 else sum(range(4_000_000))

if sys.argv[1] == "begins":
    close = WorkerPool.close

    def hold_and_close(pool, **options):
        if pool._owner == os.getpid():  # else this is a worker, which closes its copies
            hold()
        close(pool, **options)

    WorkerPool.close = hold_and_close
iterator = iter(DataLoader(Does(busy, 64), 2, num_workers=1, multiprocessing_context=WatchedContext()))
next(iterator)
util.Finalize(None, exits.set, exitpriority=5)  # among the last things that Python does at its end
threading.Thread(target=iterator.close, daemon=True).start()
begun.wait(60)
"""


@pytest.mark.parametrize("at", ["begins", "joins"])
def test_a_program_ends_after_the_workers_that_a_daemon_thread_is_ending(tmp_path: Path, at: str) -> None:
    assert run_script(CLOSES, at, how="forked", folder=tmp_path) == (0, "ended", "")


def test_threads_have_no_part_in_it() -> None:
    before = threading.active_count()
    iterator = iter(DataLoader(Does(same), num_workers=2))
    next(iterator)
    assert threading.active_count() == before
