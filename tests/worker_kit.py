"""Datasets that do as they are told, gates between processes, and a look at what is left of them.

Workers import this module by name, so it holds what their datasets are made of.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import Dataset, IterableDataset

from prefetch.workers.fork_server import server_pids

HERE = Path(__file__).parent
WAIT_S = 60.0
"""Nothing here waits longer; a machine that is busy with other things may need some of it."""


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
            if not server and child.pid not in server_pids() and "resource_tracker" not in command:
                found.append(child.pid)
    return found


def holdings() -> dict[str, Any]:
    """What could leak."""
    maps = Path("/proc/self/maps").read_text()
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0])
    return {
        "processes": workers_of_this_process(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(files),
        "maps of shared memory": maps.count("memfd:dataflow"),
    }


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if what happens inside leaves anything behind."""
    gc.collect()
    before = holdings()
    yield
    gc.collect()
    after = holdings()
    left = {name: after[name] for name in before if after[name] != before[name]}
    assert not left, f"{left}, before: { {name: before[name] for name in left} }"


class Script:
    """A Python program of its own process group; ends with the `with` block at the latest."""

    def __init__(self, text: str, *args: object, how: str = "file", folder: Path | None = None) -> None:
        paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-X", "faulthandler"]
        if how == "-c":
            command += ["-c", text]
        else:
            assert folder is not None
            (folder / "script_main.py").write_text(text)
            command += ["-m", "script_main"] if how == "-m" else [str(folder / "script_main.py")]
            paths.insert(0, str(folder))
        self.process = subprocess.Popen(
            [*command, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, output, errors."""
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err


ANOTHER_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
"""At the beginning of a script: its fork server is not forked from it."""


def run_script(
    text: str, *args: object, how: str = "file", folder: Path | None = None
) -> tuple[int, str, str]:
    """Run a program to its end: exit code, output, errors."""
    with Script(text, *args, how=how, folder=folder) as script:
        return script.end()
