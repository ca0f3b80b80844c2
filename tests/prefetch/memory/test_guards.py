"""Guards: a file that is loaded from keeps its length, and who wants to cut it waits milliseconds."""

from __future__ import annotations

import fcntl
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from datasets_kit import make_tokens_bin
from forked_kit import fork, limited

from dataflow import DataLoader
from prefetch.memory.guards import FileGuard, FileGuards
from sharding.errors import DataflowError

TIMEOUT_S = 30.0


def granted(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(b"x")
    guards, descriptor = FileGuards(), os.open(probe, os.O_RDONLY)
    try:
        return guards.take(descriptor, guards) is not None
    finally:
        os.close(descriptor)
        guards.close()


@contextmanager
def watchdog_of_child() -> Iterator[None]:
    """The kernel ends a forked child that hangs, or leaves by an error."""
    signal.alarm(20)
    try:
        yield
    finally:
        os._exit(3)


def is_leased(path: Path) -> bool:
    """Whether somebody who wants to write has to wait."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return True
    return False


def leads_to(descriptor: str, path: Path) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    if not granted(tmp_path):
        pytest.skip("this filesystem grants no leases")
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    return path


class Watched(FileGuards):
    """Tells when a guard is wanted back."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = threading.Event()

    def let_go(self, guard: FileGuard) -> None:
        super().let_go(guard)
        self.wanted.set()


@pytest.fixture
def guards() -> Iterator[Watched]:
    guards = Watched()
    yield guards
    guards.close()


def take(guards: FileGuards, path: Path) -> FileGuard | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return guards.take(descriptor, guards)
    finally:
        os.close(descriptor)


def truncating(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import os; os.truncate({str(path)!r}, 10)"])


def listeners() -> int:
    return sum(thread.name == "dataflow-guards" for thread in threading.enumerate())


def test_who_cuts_a_file_waits_for_the_loads_that_have_begun(path: Path, guards: Watched) -> None:
    guard = take(guards, path)
    assert guard is not None
    with guards.loading():
        assert guard.held
        other = truncating(path)
        assert guards.wanted.wait(TIMEOUT_S)
        assert not guard.held
        with guards.loading():  # a later load does not prolong the wait
            pass
        assert path.stat().st_size == 10_000
        assert other.poll() is None
    assert other.wait(TIMEOUT_S) == 0
    assert path.stat().st_size == 10


def test_loads_that_begin_later_keep_nobody_waiting(path: Path, guards: Watched) -> None:
    assert take(guards, path)
    begun, end = threading.Event(), threading.Event()

    def load() -> None:
        with guards.loading():
            begun.set()
            end.wait(TIMEOUT_S)

    other = truncating(path)
    assert guards.wanted.wait(TIMEOUT_S)
    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(TIMEOUT_S)
    assert other.wait(TIMEOUT_S) == 0
    end.set()
    thread.join(TIMEOUT_S)


@pytest.mark.timeout(20)  # without the listener it takes 45 s
def test_the_process_that_holds_the_lease_may_write_the_file_itself(path: Path, guards: Watched) -> None:
    guard = take(guards, path)
    path.write_bytes(b"new")
    assert guard is not None
    assert not guard.held


def test_no_handler_of_the_program_sees_the_signal(path: Path, guards: Watched) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGSTKFLT, lambda number, frame: seen.append(number))
    try:
        assert take(guards, path)
        path.write_bytes(b"new")
        assert not seen
    finally:
        signal.signal(signal.SIGSTKFLT, before)


def restore_handlers() -> None:
    """As Lightning does when a training ends: the kernel forgets what is pending of ignored signals."""
    for number in (signal.SIGURG, signal.SIGIO, signal.SIGSTKFLT):
        signal.signal(number, signal.getsignal(number))


@contextmanager
def behind_this_thread(other: int) -> Iterator[None]:
    """Inside, a thread that is woken runs when this one waits, and not before."""
    cpus = os.sched_getaffinity(0)
    try:
        for thread in (0, other):
            os.sched_setaffinity(thread, {min(cpus)})
        os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def test_the_signal_is_not_lost_where_a_trainer_restores_handlers(path: Path) -> None:
    guards = FileGuards()
    assert take(guards, path)
    (listener,) = [thread for thread in threading.enumerate() if thread.name == "dataflow-guards"]
    with behind_this_thread(listener.native_id or 0):
        guards.close(join=False)
        restore_handlers()
    listener.join(TIMEOUT_S)
    assert not listener.is_alive()


def test_reading_renaming_and_deleting_wait_for_nobody_and_end_no_lease(path: Path, guards: Watched) -> None:
    guard = take(guards, path)
    assert guard is not None
    assert len(path.read_bytes()) == 10_000
    other = path.rename(path.with_name("other"))
    other.unlink()
    assert guard.held
    assert not guard.is_wanted


def test_a_file_that_somebody_writes_is_not_leased(path: Path, guards: Watched) -> None:
    with path.open("r+b"):
        assert take(guards, path) is None
    assert take(guards, path) is not None


def test_there_are_no_more_than_a_quarter_of_the_descriptors(path: Path) -> None:
    with limited(resource.RLIMIT_NOFILE, 8):
        guards = FileGuards()
    try:
        assert [take(guards, path) is not None for _ in range(3)] == [True, True, False]
    finally:
        guards.close()


def test_closing_ends_leases_thread_and_descriptors(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    guards = FileGuards()
    assert listeners() == 0
    guard = take(guards, path)
    assert take(guards, path) is not guard
    assert listeners() == 1
    guards.close()
    guards.close()
    assert listeners() == 0
    assert set(os.listdir("/proc/self/fd")) == before
    assert guard is not None
    assert not guard.held
    assert take(guards, path) is None
    writable = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # EWOULDBLOCK while there is a guard
    os.close(writable)


def test_a_forked_child_does_not_keep_a_lease_that_was_ended(path: Path) -> None:
    guards = FileGuards()
    assert take(guards, path)
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    guards.close()
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    os.close(writing)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_leaves_its_parents_leases_alone(path: Path) -> None:
    guards = FileGuards()
    ending, staying = take(guards, path), take(guards, path)
    assert ending
    assert staying
    with guards.loading():
        child = fork()
        if child == 0:
            with watchdog_of_child():
                descriptors = [name for name in os.listdir("/proc/self/fd") if leads_to(name, path)]
                ending.let_go()
                with guards.loading():
                    may_load = staying.held
                guards.close()
                os._exit(bool(descriptors or may_load or take(guards, path)))
    assert os.waitpid(child, 0)[1] == 0
    assert staying.held
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    guards.close()
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_a_child_forked_while_the_leases_are_locked_ends(path: Path) -> None:
    guards = FileGuards()
    guard = take(guards, path)
    assert guard
    held, over = threading.Event(), threading.Event()

    class Slow:
        """A descriptor that is looked at when it is copied, for long."""

        def __index__(self) -> int:
            held.set()
            over.wait(TIMEOUT_S)
            return -1

    def hold() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            guards.take(Slow(), guards)  # type: ignore[arg-type]

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(TIMEOUT_S)
    child = fork()
    if child == 0:
        with watchdog_of_child():
            guard.let_go()
            guards.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    over.set()
    holder.join(TIMEOUT_S)
    guards.close()


def test_batches_are_the_same_with_leases_and_without(path: Path) -> None:
    made = make_tokens_bin(path.parent)
    shards = sorted(path.parent.glob("*.bin"))
    with DataLoader(made.open(), 2, shuffle=True) as loader:
        leased = [batch["tokens"].tolist() for batch in loader]
        assert all(is_leased(shard) for shard in shards)
    with ExitStack() as written, DataLoader(made.open(), 2, shuffle=True) as loader:
        for shard in shards:
            written.enter_context(shard.open("r+b"))  # no leases then
        assert [batch["tokens"].tolist() for batch in loader] == leased
        assert not any(is_leased(shard) for shard in shards)


@pytest.mark.timeout(60)
def test_a_shard_cut_in_the_middle_of_a_loop_is_an_error_not_a_signal(path: Path) -> None:
    made = make_tokens_bin(path.parent)
    shard = next(path.parent.glob("*.bin"))
    with DataLoader(made.open(), 1, shuffle=False, depth=1) as loader:
        batches = iter(loader)
        next(batches)
        os.truncate(shard, 100)
        with pytest.raises(DataflowError, match=shard.name):
            list(itertools.chain(batches, *[loader] * 20))


def test_a_loader_leaves_no_lease_behind(path: Path) -> None:
    made = make_tokens_bin(path.parent)
    shard = next(path.parent.glob("*.bin"))
    with DataLoader(made.open(), 1) as loader:
        list(loader)
        with pytest.raises(BlockingIOError):
            os.open(shard, os.O_WRONLY | os.O_NONBLOCK)
    descriptor = os.open(shard, os.O_RDONLY)
    assert fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(descriptor)
    os.close(os.open(shard, os.O_WRONLY | os.O_NONBLOCK))
    assert listeners() == 0


def test_a_lease_whose_holder_has_died_makes_room_for_others(guards: Watched, path: Path) -> None:
    class Holder:
        pass

    guards.most = 2
    holders = [Holder() for _ in range(3)]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        taken = [guards.take(descriptor, holder) for holder in holders]
        assert [guard is not None for guard in taken] == [True, True, False]
        del holders[0]
        guard = guards.take(descriptor, holders[0])
        assert guard is not None
        assert guard.held
        assert [guard.held for guard in taken if guard] == [False, True]
    finally:
        os.close(descriptor)
