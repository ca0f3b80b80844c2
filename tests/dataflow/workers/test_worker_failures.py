"""Workers that die, hang or raise: what is said, what goes on, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from forked_kit import mortal_fork_server
from parameters_kit import in_full, in_pairs
from programs_kit import Script
from torch.utils.data import default_collate
from worker_kit import Does, Gate, Streams, ended, workers_of_this_process

from dataflow import DataLoader
from dataflow.workers.worker import WorkerLimits
from prefetch.workers import STOP_S
from prefetch.workers.deaths import WorkerDiedError, memory_note, oom_kills, own_cgroup

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Callable[[str], Gate]]:
    made: dict[str, Gate] = {}

    def get(name: str) -> Gate:
        if name not in made:
            made[name] = Gate(tmp_path / name)
        return made[name]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    if workers_of_this_process():
        gc.collect()  # pytest keeps what was raised, and that the frames it came through
    assert workers_of_this_process() == []


def pids_of(iterator: Any) -> list[int]:
    return [process.pid for process in iterator.runners.processes]


def values(loader: DataLoader) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def same(index: int) -> int:
    return index


# ---- death ----------------------------------------------------------------------------------------------


def die(how: Callable[[], Any], index: int) -> int:
    if index == 2:
        how()
    return index


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def computed(size: int) -> Callable[[int], torch.Tensor]:
    return lambda _: torch.ones(size, requires_grad=True) * 2


@pytest.mark.parametrize("size", [4, 1 << 14], ids=["small", "stacked in place"])
def test_a_tensor_with_a_history_is_told_how_to_get_out_of_a_process(size: int) -> None:
    with pytest.raises(RuntimeError, match=r"requires_grad and was computed(.|\n)*tensor\.detach\(\)"):
        next(iter(DataLoader(Does(computed(size), 4), 2, num_workers=1)))


class Panic(BaseException):
    """As what libraries in Rust raise where they panic."""


def panic(_: int) -> Any:
    raise Panic("index out of bounds")


def test_a_panic_of_a_library_is_an_error_of_the_batch_and_the_worker_lives_on() -> None:
    iterator = iter(DataLoader(Does(panic, 2), None, num_workers=1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
            next(iterator)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (killed, r"killed by signal: Killed\."),
        (segfault, r"killed by signal: Segmentation fault"),
        (functools.partial(os._exit, 3), r"exit code 3\. Its output may tell why"),
        (functools.partial(sys.exit, 4), r"exit code 4"),
    ],
    ids=["SIGKILL", "SIGSEGV", "os._exit", "sys.exit"],
)
def test_a_worker_that_dies_is_named_with_the_reason(how: Callable[[], Any], said: str) -> None:
    dataset = Does(functools.partial(die, how))
    loader = DataLoader(dataset, None, num_workers=2)
    iterator = iter(loader)
    pid = pids_of(iterator)[0]
    assert next(iterator) == 0  # what it had answered is delivered
    with pytest.raises(RuntimeError, match=rf"worker \(pid {pid}\) (is|exited) .*{said}") as caught:
        list(iterator)
    assert caught.value.workers[0][:2] == (0, pid)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"pid {pid}"):
            next(iterator)
    dataset.does = same
    assert values(loader) == list(range(8))


def test_a_worker_that_was_killed_while_it_was_idle_ends_the_next_epoch() -> None:
    with DataLoader(Does(same), None, num_workers=2, persistent_workers=True) as loader:
        iterator = iter(loader)
        assert list(iterator) == list(range(8))
        pids = pids_of(iterator)
        os.kill(pids[1], signal.SIGKILL)
        assert ended(pids[1])
        with pytest.raises(WorkerDiedError, match=f"pid {pids[1]}"):
            values(loader)
        assert ended(*pids)
        assert values(loader) == list(range(8))  # with new workers
        assert values(loader) == list(range(8))


def arrive_and_wait(arrived: Gate, go_on: Gate, index: int) -> int:
    arrived.open(os.getpid())
    go_on.wait()
    return index


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_killed_while_all_fetch(gate: Callable[[str], Gate], victim: int) -> None:
    """The one that the consumer waits for, or another one."""
    arrived, go_on = gate("arrived"), gate("go on")
    loader = DataLoader(Does(functools.partial(arrive_and_wait, arrived, go_on)), None, num_workers=2)
    loader.worker_limits = WorkerLimits(stop_s=0.0)  # who is busy when the loop ends is ended at once
    iterator = iter(loader)
    assert {int(arrived.wait()), int(arrived.wait())} == set(pids_of(iterator))
    os.kill(pids_of(iterator)[victim], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"pid {pids_of(iterator)[victim]}.*Killed"):
        next(iterator)


def test_a_single_worker_that_dies_while_the_consumer_waits_is_no_time_out(
    gate: Callable[[str], Gate],
) -> None:
    """Its end closes the pipe of answers before the fork server tells of it."""
    arrived = gate("arrived")
    loader = DataLoader(
        Does(functools.partial(arrive_and_wait, arrived, gate("never"))), None, num_workers=1, timeout=60
    )
    for _ in range(8):
        iterator = iter(loader)
        killer = threading.Thread(target=lambda: os.kill(int(arrived.wait()), signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerDiedError):
            next(iterator)
        killer.join()


def test_when_the_fork_server_is_killed_its_workers_end_and_the_next_loop_has_another(
    gate: Callable[[str], Gate],
) -> None:
    arrived, never = gate("arrived"), gate("never")
    dataset = Does(functools.partial(arrive_and_wait, arrived, never))
    loader = DataLoader(dataset, None, num_workers=2, multiprocessing_context="forkserver")
    with mortal_fork_server():
        iterator = iter(loader)
        pids = pids_of(iterator)
        arrived.wait(), arrived.wait()
        os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="Killed"):
            next(iterator)
        assert ended(*pids)
        dataset.does = same
        assert values(loader) == list(range(8))


def test_the_memory_of_the_cgroup_is_told(tmp_path: Path) -> None:
    group = tmp_path / "jobs" / "17"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nhigh 2\nmax 31\noom 4\noom_kill 3\n")
    (group / "memory.current").write_text("1073000000\n")
    (group / "memory.max").write_text("1073741824\n")
    told = tmp_path / "cgroup"
    told.write_text("1:name=systemd:/\n0::/jobs/17\n")
    assert own_cgroup(tmp_path, told) == group
    assert oom_kills(group) == 3
    said = memory_note(1, group)
    assert "the kernel has killed 2 processes for it" in said
    assert "uses 1073000000 bytes now, of at most 1073741824" in said
    assert memory_note(3, group) == "", "it was killed by somebody else"
    told.write_text("0::/hidden/from/this/container\n")
    assert own_cgroup(tmp_path, told) == tmp_path
    assert own_cgroup(tmp_path, tmp_path / "none") == tmp_path


def test_a_killed_worker_has_a_word_about_memory_only_where_the_kernel_has() -> None:
    assert "memory" not in str(WorkerDiedError([(0, 17, -signal.SIGKILL)]))
    assert str(WorkerDiedError([(0, 17, -signal.SIGKILL)], "as it was then")).endswith("as it was then")


# ---- hanging --------------------------------------------------------------------------------------------


def wait_for_the_disk(arrived: Gate, go_on: Gate, index: int) -> int:
    return arrive_and_wait(arrived, go_on, index)


def test_a_time_out_tells_what_every_worker_is_doing(gate: Callable[[str], Gate]) -> None:
    arrived, go_on = gate("arrived"), gate("go on")
    dataset = Does(functools.partial(wait_for_the_disk, arrived, go_on), 3)
    loader = DataLoader(dataset, None, num_workers=3, timeout=0.05)
    iterator = iter(loader)
    for _ in range(3):
        arrived.wait()
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.05 seconds") as caught:
        next(iterator)
    said = re.split(r"worker \d \(pid (\d+)\):\n", str(caught.value))
    assert list(map(int, said[1::2])) == pids_of(iterator)
    assert all("wait_for_the_disk" in stacks for stacks in said[2::2])
    for _ in range(3):
        go_on.open()
    assert late(iterator) == [0, 1, 2]  # a time-out is no end


def late(iterator: Any) -> list[Any]:
    """All that comes, however long it takes: a time-out ends only the wait."""
    batches: list[Any] = []
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise


def test_without_a_time_out_there_is_a_notice_now_and_then(gate: Callable[[str], Gate]) -> None:
    assert DataLoader.worker_limits.notice_s == 300
    arrived, go_on = gate("arrived"), gate("go on")
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            if len(heard) == 2:
                go_on.open()

    listener = Listener()
    logging.getLogger("dataflow").addHandler(listener)
    try:
        loader = DataLoader(
            Does(functools.partial(wait_for_the_disk, arrived, go_on), 1), None, num_workers=1
        )
        loader.worker_limits = WorkerLimits(notice_s=0.0)
        iterator = iter(loader)
        arrived.wait()
        assert list(iterator) == [0]
    finally:
        logging.getLogger("dataflow").removeHandler(listener)
    assert len(heard) >= 2
    assert all("wait_for_the_disk" in text and "no batch for" in text for text in heard[:2])


@pytest.mark.full
def test_a_worker_that_has_not_started_is_not_asked_for_its_stacks(gate: Callable[[str], Gate]) -> None:
    """The signal would end it."""
    never = gate("never")
    dataset = Does(same)
    dataset.slow = Slow(never)  # type: ignore[attr-defined]
    loader = DataLoader(dataset, None, num_workers=1, multiprocessing_context="spawn")
    iterator = iter(loader)
    pool = iterator.runners.pool
    if not pool.started:
        assert "it has not started yet" in pool.stacks()
    never.open()
    assert list(iterator) == list(range(8))


class Slow:
    """Is not rebuilt before its gate opens."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.gate.wait()


def test_an_index_that_no_pipe_holds_does_not_keep_the_loop_from_timing_out(
    gate: Callable[[str], Gate],
) -> None:
    """The parent never blocks in writing to a worker that does not read."""
    arrived, go_on = gate("arrived"), gate("go on")
    huge = [[0] * 300_000, [1] * 300_000, [2] * 300_000]  # 600 KB each as a message
    dataset = Does(functools.partial(first_of, arrived, go_on))
    loader = DataLoader(dataset, None, sampler=huge, num_workers=1, prefetch_factor=3, timeout=0.05)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    for _ in range(3):
        go_on.open()
    assert late(iterator) == [0, 1, 2]


def first_of(arrived: Gate, go_on: Gate, index: list[int]) -> int:
    return arrive_and_wait(arrived, go_on, index[0])


# ---- exceptions -----------------------------------------------------------------------------------------


def outcomes(iterator: Iterator[Any]) -> list[Any]:
    """What each `next` gave or raised, up to the end."""
    found: list[Any] = []
    while len(found) < 100:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
    raise AssertionError("no end")


class NeedsTwoError(Exception):
    def __init__(self, shard: str, offset: int) -> None:
        super().__init__(shard, offset)


def local_error() -> type[Exception]:
    class HereOnlyError(Exception):
        pass

    return HereOnlyError


def raises(make: Callable[[], BaseException], index: int) -> int:
    if index % 4 == 1:
        raise make()
    return index


@pytest.mark.parametrize(
    ("case", "in_order"),
    in_pairs(
        [
            (functools.partial(ValueError, "bad pixel"), ValueError, "bad pixel"),
            (functools.partial(KeyError, "label"), KeyError, "label"),
            (
                functools.partial(UnicodeDecodeError, "utf8", b"\xff", 0, 1, "odd"),
                RuntimeError,
                "UnicodeDecodeE",
            ),
            (functools.partial(NeedsTwoError, "a.tar", 512), RuntimeError, "NeedsTwoError"),
            (functools.partial(OSError, 5, "I/O error"), OSError, "I/O error"),
            (lambda: local_error()("by value"), Exception, "HereOnlyError"),
        ],
        [True, False],
    ),
)
def test_an_error_of_an_item_has_its_type_and_traceback_and_the_loop_goes_on(
    case: tuple[Callable[[], BaseException], type[Exception], str], in_order: bool
) -> None:
    make, kind, said = case
    loader = DataLoader(Does(functools.partial(raises, make), 6), None, num_workers=2, in_order=in_order)
    found = outcomes(iter(loader))
    errors = [one for one in found if isinstance(one, Exception)]
    assert sorted(one for one in found if not isinstance(one, Exception)) == [0, 2, 3, 4]
    assert [isinstance(one, kind) for one in errors] == [True, True]
    if in_order:
        assert [isinstance(one, Exception) for one in found] == [False, True, False, False, False, True]
    for error in errors:
        assert said in str(error)
        assert "in raises" in str(error)  # the worker's traceback
        assert not in_order or "in DataLoader worker process 1" in str(error)


def test_an_error_does_not_keep_the_workers_of_a_dropped_iterator() -> None:
    """They end with the iterator, not when the garbage collector comes round."""
    loader = DataLoader(Does(functools.partial(raises, ValueError)), None, num_workers=1)
    gc.collect()
    gc.disable()
    try:
        iterator = iter(loader)
        pids = pids_of(iterator)
        assert next(iterator) == 0
        with contextlib.suppress(ValueError):
            next(iterator)
        del iterator
        assert ended(*pids)
        assert workers_of_this_process() == []
    finally:
        gc.enable()


def collate_or_not(batch: list[int]) -> Any:
    if 2 in batch:
        raise ArithmeticError("cannot collate")
    return batch


def test_errors_of_collate_fn() -> None:
    loader = DataLoader(Does(same), 2, num_workers=2, collate_fn=collate_or_not)
    found = outcomes(iter(loader))
    assert [type(one) for one in found] == [list, ArithmeticError, list, list]
    assert "in collate_or_not" in str(found[1])


def init_or_not(worker: int) -> None:
    if worker == 1:
        raise LookupError("no device for this worker")


def test_errors_of_worker_init_fn_come_for_every_batch_of_that_worker() -> None:
    with DataLoader(
        Does(same), None, num_workers=2, worker_init_fn=init_or_not, persistent_workers=True
    ) as loader:
        for _ in range(2):  # persistent workers try again
            found = outcomes(iter(loader))
            assert [one for one in found if isinstance(one, int)] == [0, 2, 4, 6]
            assert [type(one) for one in found[1::2]] == [LookupError] * 4
            assert all("no device for this worker" in str(one) for one in found[1::2])


class Indices:
    """An iterable whose third element is an error; it can go on after that, or not."""

    def __init__(self, *, goes_on: bool, batches: bool) -> None:
        self.goes_on, self.batches = goes_on, batches

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return _GoesOn(self.batches) if self.goes_on else self._once()

    def _once(self) -> Iterator[Any]:
        for index in range(6):
            if index == 3:
                raise ConnectionError("the index server is away")
            yield [index] if self.batches else index


class _GoesOn:
    def __init__(self, batches: bool) -> None:
        self.batches, self.at = batches, -1

    def __iter__(self) -> _GoesOn:
        return self

    def __next__(self) -> Any:
        self.at += 1
        if self.at == 3:
            raise ConnectionError("the index server is away")
        if self.at == 6:
            raise StopIteration
        return [self.at] if self.batches else self.at


@pytest.mark.parametrize(
    ("num_workers", "batches", "goes_on"), in_pairs([0, 2], [False, True], [False, True])
)
def test_errors_of_samplers_come_in_their_place(num_workers: int, batches: bool, goes_on: bool) -> None:
    indices: Any = Indices(goes_on=goes_on, batches=batches)
    given: Any = {"batch_sampler": indices} if batches else {"sampler": indices, "batch_size": None}
    loader = DataLoader(Does(same), num_workers=num_workers, **given)
    found = outcomes(iter(loader))
    assert type(found[3]) is ConnectionError
    assert [int(one) for one in found if not isinstance(one, Exception)] == (
        [0, 1, 2, 4, 5] if goes_on else [0, 1, 2]
    )


def test_an_index_that_cannot_be_sent_is_an_error_in_its_place() -> None:
    loader = DataLoader(Does(repr), None, sampler=[1, threading.Lock(), 3], num_workers=2)
    found = outcomes(iter(loader))
    assert [found[0], found[2]] == ["1", "3"]
    assert isinstance(found[1], TypeError)


class OnlyInThisProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            raise PermissionError("not here")
        self.__dict__.update(state)


def test_an_index_that_the_worker_cannot_rebuild_is_an_error_of_its_batch() -> None:
    loader = DataLoader(Does(repr), None, sampler=[1, OnlyInThisProcess(os.getpid()), 3], num_workers=1)
    found = outcomes(iter(loader))
    assert [found[0], found[2]] == ["1", "3"]
    assert isinstance(found[1], PermissionError)


def broken_stream() -> Iterator[int]:
    raise ConnectionError("no stream")
    yield 1


def breaking_stream() -> Iterator[int]:
    yield 1
    raise ConnectionError("the stream broke")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_iterables(num_workers: int) -> None:
    lanes = max(1, num_workers)
    found = outcomes(iter(DataLoader(Streams(broken_stream), None, num_workers=num_workers)))
    assert [type(one) for one in found] == [ConnectionError] * lanes
    found = outcomes(iter(DataLoader(Streams(breaking_stream), None, num_workers=num_workers)))
    assert [type(one) for one in found] == [int] * lanes + [ConnectionError] * lanes


class NoIterator(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise ConnectionError("cannot begin")


def test_an_error_of_iter_comes_at_every_batch_of_that_worker() -> None:
    iterator = iter(DataLoader(NoIterator(), None, num_workers=2))
    for _ in range(4):
        with pytest.raises(ConnectionError, match="cannot begin"):
            next(iterator)


def sometimes(index: int) -> Any:
    return threading.Lock() if index == 1 else index


def test_a_batch_that_cannot_be_pickled() -> None:
    found = outcomes(iter(DataLoader(Does(sometimes, 4), None, num_workers=2)))
    assert [one for one in found if isinstance(one, int)] == [0, 2, 3]
    assert isinstance(found[1], TypeError)
    assert "lock" in str(found[1])


class Refuses:
    """Cannot be rebuilt anywhere."""

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be rebuilt")


def refusing_batch(batch: list[Any]) -> Any:
    return [Refuses() if int(batch[0][0]) % 2 else 0, default_collate(batch)]


def row(index: int) -> torch.Tensor:
    return torch.full((32 << 10,), index, dtype=torch.int64)


def test_a_batch_that_cannot_be_rebuilt_is_an_error_and_its_memory_comes_back() -> None:
    loader = DataLoader(Does(row, 100), 1, num_workers=1, collate_fn=refusing_batch)
    iterator = iter(loader)
    most = 0
    for index in range(100):
        if index % 2:
            with pytest.raises(ValueError, match="cannot be rebuilt") as caught:
                next(iterator)
            assert "main process" in caught.value.__notes__[0]
            del caught
        else:
            assert int(next(iterator)[1][0, 5]) == index
        most = max(most, iterator.runners.shared_bytes)
    assert most < 10 << 20  # 100 batches of 256 KiB have passed
    with pytest.raises(StopIteration):
        next(iterator)


class NotInAWorker:
    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("this dataset is for one process")


@pytest.mark.parametrize("stateful", [False, True])
def test_a_dataset_that_cannot_be_rebuilt_in_the_worker(stateful: bool) -> None:
    dataset = Does(same)
    dataset.part = NotInAWorker()  # type: ignore[attr-defined]
    if stateful:
        dataset.state_dict = dict  # type: ignore[attr-defined]
        dataset.load_state_dict = print  # type: ignore[attr-defined]
    loader = DataLoader(dataset, None, num_workers=2, multiprocessing_context="forkserver")
    with pytest.raises(ValueError, match="this dataset is for one process"):
        next(iter(loader))


def large(index: int) -> np.ndarray:
    return np.zeros(200 << 20 if index == 1 else 8, np.uint8)


def test_a_batch_that_does_not_fit_shared_memory_says_what_to_do() -> None:
    loader = DataLoader(Does(large, 4), None, num_workers=2)
    loader.worker_limits = WorkerLimits(region_bytes=64 << 20)
    found = outcomes(iter(loader))
    assert isinstance(found[1], MemoryError)
    assert "lower batch_size or prefetch_factor" in str(found[1])
    assert [len(found[i]) for i in (0, 2, 3)] == [8, 8, 8]


def test_batches_of_an_epoch_that_was_left_are_not_looked_at_and_give_their_memory_back(
    gate: Callable[[str], Gate],
) -> None:
    """Of 20 epochs with persistent workers only the first batch is taken."""
    with DataLoader(
        Does(row, 8), 1, num_workers=1, prefetch_factor=4, collate_fn=refusing_batch, persistent_workers=True
    ) as loader:
        for _ in range(20):
            iterator = iter(loader)
            assert int(next(iterator)[1][0, 5]) == 0
        assert iterator.runners.shared_bytes < 10 << 20
        assert len(outcomes(iter(loader))) == 8


# ---- Ctrl-C and the death of the parent -----------------------------------------------------------------

INTERRUPTED = """
import os, sys
import psutil
from dataflow import DataLoader
from worker_kit import Does, _gate_at

folder, where = sys.argv[1:]
arrived, never = _gate_at(folder + "/arrived"), _gate_at(folder + "/never")

def item(index):
    if index > 1:
        arrived.open(os.getpid())
        never.wait()
    return index

iterator = iter(DataLoader(Does(item), None, num_workers=2))
pids = [process.pid for process in iterator.runners.processes]
arrived.open(psutil.Process(pids[0]).ppid())
print(next(iterator), next(iterator), flush=True)
_gate_at(folder + "/printed").open()
if where == "next":
    next(iterator)
else:
    never.wait()
"""


def tracebacks(err: str) -> int:
    """How many errors `err` shows: an interrupt while Python's import handles one shows both, as one."""
    return err.count("Traceback") - err.count("During handling of the above exception")


@pytest.mark.parametrize("where", ["next", "step"])
def test_ctrl_c_ends_everything_quickly_and_quietly(
    gate: Callable[[str], Gate], tmp_path: Path, where: str
) -> None:
    arrived = gate("arrived")
    gate("never")
    printed = gate("printed")
    with Script(INTERRUPTED, tmp_path, where, how="forked", folder=tmp_path) as script:
        pids = [int(arrived.wait()) for _ in range(3)]  # the fork server and two workers in a batch
        printed.wait()
        began = time.monotonic()
        os.killpg(script.process.pid, signal.SIGINT)
        code, out, err = script.end()
        took = time.monotonic() - began
    assert ended(*pids)
    assert took < STOP_S  # nobody was waited for
    assert (code, out) == (-signal.SIGINT, "0 1\n"), err
    assert tracebacks(err) == 1, err
    assert err.rstrip().endswith("KeyboardInterrupt"), err


STARTING = """
import sys
from dataflow import DataLoader
from worker_kit import Does, _gate_at

loader = DataLoader(Does(abs), None, num_workers=2)
_gate_at(sys.argv[1] + "/arrived").open()
while True:
    list(loader)
"""


def test_ctrl_c_while_workers_start_is_quiet_too(gate: Callable[[str], Gate], tmp_path: Path) -> None:
    arrived = gate("arrived")
    with Script(STARTING, tmp_path, how="forked", folder=tmp_path) as script:
        arrived.wait()
        os.killpg(script.process.pid, signal.SIGINT)
        code, _, err = script.end()
    assert code == -signal.SIGINT
    assert tracebacks(err) == 1, err
    assert "dataflow-worker" not in err


GRACEFUL = """
import os, signal, sys
from dataflow import DataLoader
from worker_kit import Does, _gate_at

folder = sys.argv[1]
arrived, go_on = _gate_at(folder + "/arrived"), _gate_at(folder + "/go on")

def item(index):
    if index == 2:
        arrived.open(os.getpid())
        go_on.wait()
    return index

stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(go_on.open()))
print(list(DataLoader(Does(item), None, num_workers=2)), len(stop))
"""


def test_a_program_that_handles_ctrl_c_itself_keeps_its_workers(
    gate: Callable[[str], Gate], tmp_path: Path
) -> None:
    """It may want to finish the epoch, or to save a state."""
    arrived = gate("arrived")
    gate("go on")
    with Script(GRACEFUL, tmp_path, how="forked", folder=tmp_path) as script:
        arrived.wait()
        os.killpg(script.process.pid, signal.SIGINT)
        code, out, err = script.end()
    assert (code, out) == (0, "[0, 1, 2, 3, 4, 5, 6, 7] 1\n"), err


def test_a_loop_that_was_interrupted_in_next_cannot_go_on_and_says_so(gate: Callable[[str], Gate]) -> None:
    arrived, never = gate("arrived"), gate("never")
    dataset = Does(functools.partial(arrive_and_wait, arrived, never))
    with DataLoader(dataset, None, num_workers=1, persistent_workers=True) as loader:
        iterator = iter(loader)
        pids = pids_of(iterator)
        main, is_waiting, wait = threading.main_thread().ident, threading.Event(), iterator.runners.wait
        assert main is not None

        def tell_and_wait(timeout_s: float | None) -> Any:
            is_waiting.set()
            return wait(timeout_s)

        def interrupt() -> None:
            arrived.wait()
            assert is_waiting.wait(60)
            signal.pthread_kill(main, signal.SIGINT)

        iterator.runners.wait = tell_and_wait

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        thread.join()
        assert ended(*pids)
        with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt; begin a new one"):
            next(iterator)
        dataset.does = same
        assert values(loader) == list(range(8))


KILLED = """
import os, signal, sys
import psutil
from dataflow import DataLoader
from forked_kit import fork
from worker_kit import Does, _gate_at

folder, method = sys.argv[1:]
arrived = _gate_at(folder + "/arrived")

def item(index):
    arrived.open(os.getpid())
    if index == 1:
        while True:
            signal.pause()
    return index

def main():
    iterators = [
        iter(DataLoader(Does(item, 2), None, num_workers=2, multiprocessing_context=method))
        for _ in range(2)
    ]
    if method != "forkserver" and fork() == 0:  # a child that lives on, with copies of all descriptors
        _gate_at(folder + "/bystander").open(os.getpid())
        signal.pause()
    processes = [process for iterator in iterators for process in iterator.runners.processes]
    servers = {psutil.Process(process.pid).ppid() for process in processes} - {os.getpid()}
    arrived.open(min(servers, default=os.getpid()))
    next(iterators[0])
    arrived.open(os.getpid())
    signal.pause()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["fork", *in_full("forkserver", "spawn")])
def test_when_the_parent_is_killed_idle_and_hanging_workers_end_and_the_fork_server_too(
    gate: Callable[[str], Gate], tmp_path: Path, method: str
) -> None:
    """Two loaders, each with a worker that waits for work and one that hangs."""
    arrived = gate("arrived")
    gate("bystander")
    with Script(KILLED, tmp_path, method, how="forked", folder=tmp_path) as script:
        pids = {int(arrived.wait()) for _ in range(6)}
        assert len(pids) == (6 if method == "forkserver" else 5)
        os.kill(script.process.pid, signal.SIGKILL)
        assert ended(*pids)
        if method != "forkserver":  # the standard library's server waits for such children
            os.kill(int(gate("bystander").wait()), signal.SIGKILL)  # it was alive all the time
