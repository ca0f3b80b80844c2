"""What a forked worker sees, what it does not keep, and what is left alone in it."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import make_ints_tar
from forked_kit import exit_code_in_child
from loader_kit import session_of
from programs_kit import run_script
from worker_kit import Does, workers_of_this_process

from dataflow import DataLoader, ShardedDataset
from prefetch.cache.claims import Claims
from prefetch.memory import arena
from prefetch.memory.arena import Arena
from prefetch.memory.lifetimes import Finalizer, close_private, open_private
from prefetch.workers import template as template_module
from prefetch.workers.deaths import WorkerDiedError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
setting = 0


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    assert workers_of_this_process() == []


def seen(_: int) -> int:
    return setting


def test_each_loop_over_a_dataset_sees_the_values_of_its_beginning() -> None:
    global setting
    loader, epochs = DataLoader(Does(seen, 3), None, num_workers=2), []
    for setting in (16, 24, 32):  # noqa: B007
        epochs.append([*loader])
    assert epochs == [[16] * 3, [24] * 3, [32] * 3]


def test_workers_have_the_hash_seed_and_the_objects_that_no_pickle_holds() -> None:
    lock = threading.Lock()

    def item(index: int) -> list[int]:
        return [hash("a path"), int(lock.locked())]

    assert [*DataLoader(Does(item, 2), None, num_workers=1)] == [[hash("a path"), 0]] * 2


# ---- over shards ------------------------------------------------------------------------------------------


def with_setting(sample: dict[str, Any]) -> dict[str, Any]:
    return {"setting": setting, "pid": os.getpid()}


def processes_of(loader: DataLoader) -> list[Any]:
    builders: Any = session_of(loader).resources.engine._builders
    return list(builders._processes.pool.processes)


def values(batches: Any) -> set[int]:
    return {int(value) for batch in batches for value in batch["setting"]}


@pytest.mark.here
def test_a_session_sees_the_values_of_its_first_batches_until_it_is_closed(tmp_path: Path) -> None:
    global setting
    setting = 16
    with DataLoader(make_ints_tar(tmp_path).open(transform=with_setting), 2, num_workers=2) as loader:
        assert values(loader) == {16}
        setting = 24
        assert values(loader) == {16}, "as persistent workers of torch"
        loader.close()
        assert values(loader) == {24}


@pytest.mark.here
def test_a_process_that_replaces_another_sees_the_same_and_has_its_number(tmp_path: Path) -> None:
    global setting
    setting, numbers = 1, tmp_path / "numbers"
    dataset = make_ints_tar(tmp_path).open(transform=with_setting)
    init = functools.partial(note_number, path=str(numbers))
    with DataLoader(dataset, 2, num_workers=2, worker_init_fn=init) as loader:
        pids = {int(pid) for batch in loader for pid in batch["pid"]}
        setting = 2
        gc.collect()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert values(itertools.chain(*(loader for _ in range(5)))) == {1}
    started = sorted(numbers.read_text().split())
    assert {*started} == {"0", "1"}
    assert len(started) == 2 + len(pids)


def note_number(worker: int, *, path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{worker}\n")


@pytest.mark.here
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["ended", "stands still"])
def test_without_the_process_that_forks_replacements_a_death_is_an_error_and_a_new_loop_has_new_ones(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "_ANSWER_S", 0.5 if number == signal.SIGSTOP else 60.0)
    dataset = make_ints_tar(tmp_path).open(transform=with_setting)
    with DataLoader(dataset, 2, num_workers=2) as loader:
        builders = {int(pid) for batch in loader for pid in batch["pid"]}
        template = ({*workers_of_this_process()} - {*(child.pid for child in processes_of(loader))}).pop()
        os.kill(template, number)
        assert values(loader) == {setting}, "its children live on"
        for pid in builders:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=f"{template}.*killed by signal: Killed") as caught:
            list(itertools.chain(*(loader for _ in range(5))))
        assert "begin a new loop" in caught.value.__notes__[0]
        assert ("stands still" in str(caught.value.__cause__)) == (number == signal.SIGSTOP)
        monkeypatch.undo()
        del caught
        assert values(loader) == {setting}


ALONE = """
import os, sys
from dataflow import DataLoader, ShardedDataset

threads = []

def count():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    threads.append(len(names) - names.count("jemalloc_bg_thd"))

os.register_at_fork(after_in_parent=count)  # OpenBLAS has ended its own by then
with DataLoader(ShardedDataset(sys.argv[1], transform=dict), 2, shuffle=True, num_workers=2) as loader:
    for _ in range(2):
        list(loader)
print(threads)
"""


@pytest.mark.here
def test_one_loader_alone_forks_before_any_thread_of_ours(tmp_path: Path) -> None:
    """Its builders and what forks those that replace them."""
    shards = make_ints_tar(tmp_path).open().catalog.urls[0]
    code, out, err = run_script(ALONE, shards, how="forked", folder=tmp_path)
    assert (code, out) == (0, "[1, 1, 1]\n"), err


# ---- what a child does not keep ---------------------------------------------------------------------------


def descriptors(_: int) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing
            continue
    return found


def test_a_worker_keeps_no_pipe_or_file_of_other_loops() -> None:
    first = iter(DataLoader(Does(descriptors), None, num_workers=2))
    next(first)
    pool = first.runners.pool
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in (pool._responses, pool._responses_writer, pool._stacks, pool._stacks_writer, pool._woken)
        if "eventfd" not in os.readlink(f"/proc/self/fd/{fd}")
    } | {os.readlink(f"/proc/self/fd/{tasks.fileno()}") for tasks in pool._tasks}
    [[*others]] = DataLoader(Does(descriptors, 1), None, num_workers=1)
    assert own & {*others} == set()
    del first


def test_a_child_keeps_no_claim_and_no_descriptor_that_is_private(tmp_path: Path) -> None:
    claims = Claims(str(tmp_path))
    claim = claims.take("one", patience_s=0)
    assert claim is not None
    private = open_private(lambda: os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR))

    def work() -> None:
        assert os.readlink(f"/proc/self/fd/{private}") == "/dev/null"
        assert not [path for path in descriptors(0) if path.startswith(str(tmp_path))]

    assert exit_code_in_child(work) == 0
    claim.release()
    claims.close()
    close_private(private)


class Owner:
    """Something that a finalizer is for."""


def test_nothing_of_the_parent_is_finalised_in_a_child() -> None:
    ran, owner = [], Owner()
    finalizer = Finalizer(owner, functools.partial(ran.append, True))

    def work() -> None:
        nonlocal owner
        owner = Owner()  # the other one dies here
        gc.collect()
        assert threading.active_count() == 1
        assert ran == []

    assert exit_code_in_child(work) == 0
    finalizer.detach()


def test_garbage_of_the_training_process_is_not_finalised_in_a_worker(tmp_path: Path) -> None:
    class Tells:
        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    def collect(index: int) -> int:
        gc.collect()
        return os.getpid()

    tells = Tells()
    tells.own = tells  # type: ignore[attr-defined]
    gc.disable()
    try:
        del tells
        [pid] = DataLoader(Does(collect, 1), None, num_workers=1)
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    assert pid != os.getpid()


HELD = """
import os, signal, threading
from multiprocessing import popen_fork
from dataflow import DataLoader, ShardedDataset
from worker_kit import Does

held, pipe = [], os.pipe

def pipe_and_fork():  # another thread forks while the ends of pipes are open that tell of a worker
    ends = pipe()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return ends

def fork():
    pid = os.fork()
    if not pid:
        signal.pause()
    held.append(pid)

def pid_of(index):
    return os.getpid()

popen_fork.os = type("os", (), {**vars(os), "pipe": staticmethod(pipe_and_fork)})
batches = iter(DataLoader(Does(pid_of, 1000), None, num_workers=1))
os.kill(next(batches), signal.SIGKILL)
try:
    list(batches)
except RuntimeError as error:
    print(type(error).__name__, len(held))
for pid in held:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_a_death_is_seen_though_a_child_of_another_thread_holds_the_pipe_that_tells_of_it(
    tmp_path: Path,
) -> None:
    code, out, err = run_script(HELD, how="forked", folder=tmp_path)
    assert (code, out) == (0, "WorkerDiedError 2\n"), err


# ---- memory -----------------------------------------------------------------------------------------------


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = (line.split()[0].split("-") for line in lines)
        return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_a_child_has_the_slots_that_somebody_may_view_and_no_others() -> None:
    arena = Arena(limit_bytes=1 << 30, hides=True)
    staged, delivered = arena.lease(1 << 20), arena.lease(1 << 20, lambda: None)
    free = arena.lease(2 << 20).ctypes.data
    delivered[:] = 7

    def work() -> None:
        assert (delivered == 7).all()
        assert not is_mapped(staged.ctypes.data)
        assert not is_mapped(free)

    assert exit_code_in_child(work) == 0
    staged[:] = 1
    again = arena.lease(2 << 20, lambda: None)
    assert again.ctypes.data == free
    again[:] = 9
    assert exit_code_in_child(lambda: np.testing.assert_array_equal(again, 9)) == 0


class Forks:
    """Notes what happens, in order, in place of Arrow's pool and around `os.fork`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, fork = list[str](), os.fork
        monkeypatch.setattr(pa, "default_memory_pool", lambda: self)
        monkeypatch.setattr(os, "fork", lambda: self.events.append("fork") or fork())

    def release_unused(self) -> None:
        self.events.append("release")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_arrow_keeps_is_given_back_before_each_fork(
    is_sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written again, pages that a child has, too, would be copied; builders have a template before them."""
    pq.write_table(pa.table({"n": range(8)}), tmp_path / "n.parquet")
    dataset = ShardedDataset(str(tmp_path), transform=dict) if is_sharded else [*range(8)]
    forks = Forks(monkeypatch)
    with DataLoader(dataset, 2, num_workers=2, workers="process") as loader:
        assert len([*loader]) == 4
    assert forks.events == ["release", "fork"] * (3 if is_sharded else 2)


def test_what_builders_of_this_process_may_give_to_the_user_is_seen_by_children() -> None:
    arena = Arena(limit_bytes=1 << 30)
    staged = arena.lease(1 << 20)
    staged[:] = 3
    assert exit_code_in_child(lambda: np.testing.assert_array_equal(staged, 3)) == 0


def test_a_fork_does_not_mind_an_arena_that_another_thread_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.RLock

    def forked_meanwhile() -> Any:
        arena._before_fork()
        return lock()

    monkeypatch.setattr(arena.threading, "RLock", forked_meanwhile)
    Arena(limit_bytes=1)


def test_an_arena_that_dies_in_a_child_unmaps_nothing_of_it() -> None:
    arenas = [Arena(limit_bytes=1 << 30)]
    address = arenas[0].lease(1 << 20).ctypes.data

    def work() -> None:
        import mmap

        others = [mmap.mmap(-1, 1 << 20) for _ in range(64)]  # one of them may come to lie there
        arenas.clear()
        gc.collect()
        for other in others:
            other[:] = bytes(1 << 20)

    assert address
    assert exit_code_in_child(work) == 0


# ---- warnings ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python warns from 3.12 on")
@pytest.mark.parametrize("is_ours", [True, False])
def test_python_may_warn_of_threads_that_are_not_ours(is_ours: bool) -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    if not is_ours:
        thread.start()
    try:
        if is_ours:
            assert len([*DataLoader(Does(seen), None, num_workers=1)]) == 8
        else:
            with pytest.warns(DeprecationWarning, match="multi-threaded"):
                [*DataLoader(Does(seen), None, num_workers=1)]
    finally:
        go_on.set()
        if not is_ours:
            thread.join()


def test_torchs_settings_are_those_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Does(lambda index: torch.ones(2).dtype, 1), None, num_workers=1)
    torch.set_default_dtype(torch.float64)
    try:
        assert [*loader] == [torch.float64]
    finally:
        torch.set_default_dtype(torch.float32)
