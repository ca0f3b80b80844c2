"""Forked children: one that stops where a test wants it, to be killed there; one that answers and ends.

The server that ranks of tests are forked from, and such ranks: they take a tenth of starting Python. And
faults that come from the system: limits (`limited`), and in children, as long as they live, calls that fail
(`on_file_events`) and modes of files that hold for root too (`without_privileges`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import connection, forkserver
from typing import Any, TypeVar

from dataflow.testing import ranks, run_ranks


class Child:
    """A forked process; `reached` waits until it called `stop`."""

    def __init__(self, pid: int, ready: int, going: int) -> None:
        self.pid, self._ready, self._going = pid, ready, going

    def reached(self) -> None:
        assert os.read(self._ready, 1) == b"!", "the child ended before it stopped"

    def go_on(self) -> int:
        """Let it go on to its end: 0 if its work returns, 1 if it raises, -14 if it hangs."""
        os.write(self._going, b"!")
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0


def fork() -> int:
    """`os.fork`, without the warning of Python 3.12 and later that this process has threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@contextmanager
def forked(work: Callable[[Callable[[], None]], object]) -> Iterator[Child]:
    """Run `work(stop)` in a fork of this process; `stop()` returns when it may go on. Killed at the end."""
    (ready, told), (goes, going) = os.pipe(), os.pipe()
    pid = fork()
    if not pid:
        signal.alarm(60)

        def stop() -> None:
            os.write(told, b"!")
            os.read(goes, 1)

        code = 1
        with suppress(BaseException):
            work(stop)
            code = 0
        os._exit(code)
    os.close(told)
    os.close(goes)
    child = Child(pid, ready, going)
    try:
        yield child
    finally:
        os.close(ready)
        os.close(going)
        if child.pid:
            child.kill()


def exit_code_in_child(work: Callable[[], None]) -> int:
    """0 if `work` returns in a fork of this process, 1 if it raises, -14 if it hangs."""
    pid = fork()
    if not pid:
        signal.alarm(60)
        code = 1
        with suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def limited(kind: int, amount: int) -> Iterator[None]:
    """Inside, the kernel gives this process no more of something, as `resource.RLIMIT_FSIZE`."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def on_file_events(action: Callable[[str, tuple[Any, ...]], object]) -> None:
    """Call `action(event, arguments)` before each file is opened, locked, renamed or removed by this process.

    An exception that it raises is the call's. What it does to files itself is not told.
    """
    acting = threading.local()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "fcntl.flock", "os.rename", "os.remove") or hasattr(acting, "now"):
            return
        acting.now = True
        try:
            action(event, arguments)
        finally:
            del acting.now

    sys.addaudithook(hook)


def without_privileges() -> None:
    """Let the modes of files hold for this process, also where it is root's."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3; this thread
    assert ctypes.CDLL(None).capset(header, none) == 0


def fork_servers() -> None:
    """Let ranks come from a copy of this process as it is now, with all test modules imported.

    To be called before any test. A server that is a new process takes 4 s of a core. The thread of
    pytest-xdist only waits for a message.
    """
    if "authkey_r" in inspect.signature(forkserver.main).parameters:  # Python 3.14
        return
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        reader, alive = os.pipe()
        pid = fork()
        if not pid:
            os.close(alive)
            _serve(listener.fileno(), reader)
        os.close(reader)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid


def _serve(listener: int, alive: int) -> None:
    try:
        warnings.resetwarnings()  # those of pytest are errors
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):  # else locks and pipes would outlive the process of tests
            if int(name) not in {0, 1, 2, listener, alive, null}:
                with suppress(OSError):
                    os.dup2(null, int(name), inheritable=False)
        atexit._clear()
        gc.freeze()
        for module in ranks._PRELOADED:
            with suppress(ImportError):
                importlib.import_module(module)
        forkserver.main(listener, alive, [])
    except SystemExit:
        os._exit(0)
    finally:
        os._exit(1)


@contextmanager
def mortal_fork_server() -> Iterator[None]:
    """Inside, the fork server may be killed: behind it, another copy of this process takes its place."""
    try:
        yield
    finally:
        server: Any = forkserver._forkserver
        server._stop()
        fork_servers()


@contextmanager
def fresh_fork_server() -> Iterator[None]:
    """Inside, ranks come from a new process, as those of a program do, and not from a copy of this one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    names = ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")
    ours = {name: getattr(server, name) for name in names}
    vars(server).update(dict.fromkeys(names))
    try:
        yield
    finally:
        server._stop()
        vars(server).update(ours)


# ---- ranks -----------------------------------------------------------------------------------------------

# What most test modules import takes each rank up to 0.3 s of a core, unless the fork server has it.
ranks._PRELOADED.extend(
    [
        *("hypothesis", "psutil", "pyarrow.parquet", "PIL.Image"),
        *("dataflow.loader", "dataflow.stream.loader", "dataflow.mixture", "dataflow.grad.schedule"),
    ]
)
fast_ranks = functools.partial(run_ranks, start_method="forkserver")
OLD_TORCH = find_spec("torch") is not None and tuple(map(int, version("torch").split(".")[:2])) < (2, 13)
F = TypeVar("F", bound=Callable[[], Any])


class RankSet:
    """Runs its functions one after the other in one set of ranks, once, when a result is first asked for."""

    def __init__(self, world_size: int, timeout_s: float = 110.0) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self._functions: list[Callable[[], Any]] = []
        self._results: dict[str, list[Any]] = {}

    def add(self, function: F) -> F:
        """Run the function, too; a decorator."""
        self._functions.append(function)
        return function

    def results(self, function: Callable[[], Any]) -> list[Any]:
        """What the function returned on each rank."""
        if not self._results:
            ranks = fast_ranks(in_turn, self.world_size, args=(self._functions,), timeout_s=self.timeout_s)
            names = [each.__name__ for each in self._functions]
            self._results = {name: [rank[at] for rank in ranks] for at, name in enumerate(names)}
        return self._results[function.__name__]


def in_turn(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each function returns, in one rank."""
    return [function() for function in functions]
