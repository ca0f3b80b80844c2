"""Datasets that do as they are told, gates between processes, and a look at what is left of them.

Workers import this module by name, so it holds what their datasets are made of.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
from programs_kit import WAIT_S, nursery_pids
from torch.utils.data import Dataset, IterableDataset

from prefetch.workers import starting


class Gate:
    """Lets processes wait for one another: who waits goes on once somebody has opened it for him.

    A named pipe, that its maker keeps open for reading and writing. Travels to other processes.
    """

    def __init__(self, path: Path | str, *, is_maker: bool = True) -> None:
        self.path, self._fd = str(path), None
        if is_maker:
            os.mkfifo(self.path)
            self._fd = os.open(self.path, os.O_RDWR)

    def __reduce__(self) -> Any:
        return _gate_at, (self.path,)

    def open(self, line: object = "") -> None:
        """Let one waiter go on, and tell it something."""
        fd = self._fd if self._fd is not None else os.open(self.path, os.O_WRONLY)
        os.write(fd, f"{line}\n".encode())
        if self._fd is None:
            os.close(fd)

    def wait(self) -> str:
        """What the one who opened has said. Not bounded in other processes than the maker's."""
        fd = self._fd if self._fd is not None else os.open(self.path, os.O_RDONLY)
        text = b""
        try:
            while not text.endswith(b"\n"):
                if self._fd is not None and not select.select([fd], [], [], WAIT_S)[0]:
                    raise TimeoutError(f"nobody has opened {self.path}")
                byte = os.read(fd, 1)
                if not byte:
                    raise EOFError("the maker of this gate has ended")
                text += byte
        finally:
            if self._fd is None:
                os.close(fd)
        return text.decode().strip()

    def close(self) -> None:
        """Of the maker."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _gate_at(path: str) -> Gate:
    return Gate(path, is_maker=False)


class Does(Dataset[Any]):
    """Item i is what `does(i)` returns."""

    def __init__(self, does: Callable[[int], Any], length: int = 8) -> None:
        self.does, self.length = does, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.does(index)


class Streams(IterableDataset[Any]):
    """What `stream()` yields."""

    def __init__(self, stream: Callable[[], Iterator[Any]]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return self.stream()


def ended(*pids: int) -> bool:
    """Wait until these processes have ended, whoever their parent is; False: they live on."""
    deadline = time.monotonic() + WAIT_S
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
        finally:
            os.close(fd)
    return True


def workers_of_this_process() -> list[int]:
    """Processes below this one, but for helpers that live as long as it does; zombies count."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            server = "forkserver import main" in command and child.ppid() == os.getpid()
            servers = [one._forkserver_pid for one in (starting._server, forkserver._forkserver)]
            helpers = (*nursery_pids(), *servers)
            if not server and child.pid not in helpers and "resource_tracker" not in command:
                found.append(child.pid)
    return found


def holdings() -> dict[str, Counter[Any]]:
    """What could leak: how often there is one of each."""
    exact = exact_holdings()
    return {
        "processes": Counter(exact["processes"]),
        "threads": Counter(name for name, _ in exact["threads"]),
        "descriptors": Counter(target.partition(":[")[0] for _, target in exact["descriptors"]),
        "maps of shared memory": Counter("map" for _ in exact["maps of shared memory"]),
    }


def exact_holdings() -> dict[str, list[Any]]:
    """The same, each told from others of its name."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return {
        "processes": workers_of_this_process(),
        "threads": [(thread.name, thread.ident) for thread in threading.enumerate()],
        "descriptors": sorted(files),
        "maps of shared memory": [line for line in maps if "memfd:dataflow" in line],
    }


_held_by_no_garbage: dict[str, list[Any]] = {}
"""What this process held when the garbage had last been collected."""


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if what happens inside leaves anything behind.

    Garbage is collected, 0.3 s in a process with so many tests, only if it may be what holds something: where
    exactly the same is held as when it was collected last, it is not.
    """
    global _held_by_no_garbage
    if exact_holdings() != _held_by_no_garbage:
        gc.collect()
        _held_by_no_garbage = exact_holdings()
    before = holdings()
    yield
    if exact_holdings() != _held_by_no_garbage:
        gc.collect()
        after = holdings()
        # What was there before may end meanwhile: a worker of an earlier loader, say.
        left = {name: held for name in before if (held := +(after[name] - before[name]))}
        assert not left, f"{left}, before: { {name: before[name] for name in left} }"
        _held_by_no_garbage = exact_holdings()
