"""A fork server of our own: one process without threads that has imported what its workers need.

Workers forked from it start in milliseconds and inherit nothing of the parent's locks, clients and CUDA
context. While the parent has one thread and no GPU open, the server is forked from it (`forked_server`).
Otherwise it is a new process, which needs 1 to 2 s to import torch, and does not import the parent's main
module. It ignores Ctrl-C from its first moment on, as its workers do until they are ready for it. It ends
with the process it belongs to, however that ends: then nobody holds the writing end of its pipe any more,
and its workers are sent SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import (
    connection,
    forkserver,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import set_spawning_popen
from typing import Any, cast

from prefetch.memory.interrupts import Uninterrupted
from prefetch.workers.forked_server import fork_server

_PR_SET_PDEATHSIG = 1
_LEAST_PRIORITY = 19
_FORKED_IN_S = 60.0
"""The time for which the id of a process is waited for."""


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits, here and in processes that are started meanwhile (there until `let_interrupt`)."""
    # Blocked in this thread, it comes to another one, and is raised here all the same, maybe before the mask
    # is set back: no Ctrl-C would ever come again.
    with Uninterrupted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork inside: interrupts are held, and Python (3.12 and later) does not warn of our threads."""
    with interrupts_held(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield


def let_interrupt() -> None:
    """Let Ctrl-C reach this process again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


Modules = frozenset[tuple[str, int]]
"""Names of modules, each with the time its file was changed."""


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """The needs of workers, which the fork server that they come from must meet."""

    preload: tuple[str, ...] = ()
    """Modules that all workers of this kind use."""
    modules: Modules = frozenset()
    """The modules of what they work on. A forked server leaves it to the workers to import what it lacks."""
    unforkable: str = ""
    """Why the server must not be forked from this process, as far as the caller knows; "": it may."""


class _PreloadNames(list[str]):
    """Names of modules, which a server that is a new process searches for where this process would.

    The standard library's ignores our `sys.path` (before Python 3.12), and each worker would import a
    dataset's module anew, with all that it imports. The server's command holds these names as `repr` gives
    them. Not a variable of the environment: this may be any thread, and to set one while another thread looks
    for one, as torch's autograd does, ends the process.
    """

    def __repr__(self) -> str:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        return f"(__import__('sys').path.__setitem__(slice(None), {path!r}), {super().__repr__()})[1]"


class Server(forkserver.ForkServer):
    """A process with modules imported, from which workers are forked; started when first needed."""

    def __init__(self, needs: ServerNeeds) -> None:
        super().__init__()
        self.preload, self.modules = needs.preload, needs.modules
        self.num_users = 0
        self.not_forked = needs.unforkable
        """Why it was not forked from this process; "": it was."""
        self.has_forked = False
        """True if it was heard of: it has imported what it imports, and forks."""
        self._specs: dict[str, Any] = {}
        """The specs of the modules that a forked server has."""
        self._begun = False
        self._set_preload()

    def _set_preload(self) -> None:
        names = sorted(name for name, _ in self.modules)
        self.set_forkserver_preload(_PreloadNames([fork_server.__module__, *self.preload, *names]))

    @property
    def pid(self) -> int | None:
        """Return the id of the process, while it belongs to this one."""
        pid: int | None = cast(Any, self)._forkserver_pid
        return pid

    def ensure_running(self, *, may_spawn: bool = True) -> None:
        """Start it if it does not run, without waiting for it; `may_spawn`: as a new process if need be."""
        with Uninterrupted():
            _start_tracker()
        with interrupts_held():
            if not self._begun and not self.not_forked:
                self._fork()
            self._begun = True
            if self.not_forked and not may_spawn:
                return
            try:
                super().ensure_running()
            except ChildProcessError:  # it has ended, and somebody else has waited for it
                self.replace()
                super().ensure_running()

    def _fork(self) -> None:
        # Before: to look at what is shared with a fork copies its page.
        specs = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
        forked, server = fork_server(self.preload), cast(Any, self)
        if isinstance(forked, str):
            self.not_forked = forked
            return
        server._forkserver_address, server._forkserver_alive_fd = forked.address, forked.alive
        server._forkserver_pid, self._specs = forked.pid, specs

    def provides(self, needs: ServerNeeds) -> bool:
        """Return whether workers from here get these modules as they are, and need not import them first.

        A forked server has what was imported here; loading a module again gives it another spec.
        """
        if self.not_forked:
            return needs.modules <= self.modules and set(needs.preload) <= set(self.preload)
        specs = {name: getattr(sys.modules.get(name), "__spec__", None) for name, _ in needs.modules}
        return all(self._specs.get(name, spec) is spec for name, spec in specs.items())

    def let_go(self) -> int | None:
        """Forget the process, which ends when nobody else holds on to it; its id."""
        server: Any = self
        alive, pid = server._forkserver_alive_fd, self.pid
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
        if alive is not None:
            os.close(alive)
        return pid

    def replace(self) -> None:
        """The process has ended: it was killed, or a module could not be imported there. Have another."""
        self.kill()
        self.modules, self.not_forked = frozenset(), self.not_forked or "the forked one has ended"
        self._set_preload()

    def kill(self) -> None:
        """End the process, whatever it is doing, and all that come from it."""
        pid = self.let_go()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # it is dead


def _start_tracker() -> None:
    """Start Python's resource tracker, which lets interrupts through once it runs.

    It is another interpreter, and starts beside the workers; nobody waits for it, so it takes what is left.
    """
    tracker: Any = resource_tracker._resource_tracker
    before = tracker._pid
    resource_tracker.ensure_running()
    if tracker._pid not in (None, before):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, tracker._pid, _LEAST_PRIORITY)


_lock = threading.RLock()  # guards what follows; a finaliser may come back here
_current: Server | None = None
_servers: list[Server] = []
"""The current one, and those whose workers are not done."""
_ending: list[int] = []
"""Processes of former servers that will end, to be waited for."""


def server_pids() -> list[int]:
    """Processes of the servers that run, and of those that were told to end."""
    return [*(server.pid for server in list(_servers) if server.pid is not None), *_ending]


def warm_up(needs: ServerNeeds, *, is_needed: bool = True) -> Server:
    """Start the fork server, without waiting for it, with these modules imported.

    One that runs already is kept if it has them; otherwise the next workers come from a new one.
    `is_needed=False`: only if it can be forked now, which takes milliseconds.
    """
    global _current
    with _lock:
        if _current is None:
            _current = Server(needs)
            _servers.append(_current)
        elif not _current.provides(needs):
            names = {name for name, _ in needs.modules}
            others = {(name, changed) for name, changed in _current.modules if name not in names}
            preload = tuple(dict.fromkeys((*_current.preload, *needs.preload)))
            _current = Server(replace(needs, preload=preload, modules=needs.modules | others))
            _servers.append(_current)
            _end_unused()
        _current.ensure_running(may_spawn=is_needed)
        return _current


def begin_to_use(needs: ServerNeeds) -> Server:
    """The fork server with what is needed. It lives until `stop_using`."""
    with _lock:
        server = warm_up(needs)
        server.num_users += 1
        return server


def stop_using(server: Server, *, stands_still: bool = False) -> None:
    """All workers that were taken from this server since `begin_to_use` have ended.

    `stands_still`: some of them it has not forked, in all the time that they were waited for. What it imports
    may never end; another one leaves that to the workers.
    """
    with _lock:
        server.num_users -= 1
        if stands_still and not server.num_users and not server.has_forked:
            server.replace()
        _end_unused()


def _end_those_that_start() -> None:
    """A server that is still importing has no worker, and would notice the end of this process only later."""
    for server in _servers:
        if not server.has_forked:
            server.kill()


# Behind the finalisers of open loaders: a server may have forked, and nobody have heard of it yet.
util.Finalize(None, _end_those_that_start, exitpriority=0)


def _end_unused() -> None:
    for server in list(_servers):
        if server is not _current and not server.num_users:
            _servers.remove(server)
            pid = server.let_go()
            if pid is not None:
                _ending.append(pid)
    _ending[:] = [pid for pid in _ending if not _has_ended(pid)]


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _after_fork() -> None:
    """The servers are the parent's, and must not live on for our sake; nor is its tracker a child of ours.

    Python 3.13.5 waits for the tracker at the end of any process, and complains that it is no child.
    """
    global _lock, _current
    tracker: Any = resource_tracker._resource_tracker
    tracker._pid = None
    _lock = threading.RLock()
    for server in _servers:
        server.let_go()
    _servers.clear()
    _ending.clear()
    _current = None


os.register_at_fork(after_in_child=_after_fork)


class ServerProcess(process.BaseProcess):
    """A process from a fork server of ours. `start` asks for it, and does not wait until it is forked."""

    _start_method = None  # what it starts in turn is decided there

    def __init__(self, server: Server, target: Callable[..., object], argument: object, name: str) -> None:
        super().__init__(target=target, args=(argument,), name=name)
        self._server: Server | None = server

    @property
    def sentinel(self) -> int:
        """Return the sentinel of `BaseProcess`; until `hear_fork` it may tell that the process was forked."""
        return cast(_Popen, cast(Any, self)._popen).sentinel

    def hear_fork(self) -> bool:
        """Return whether the process is known to be forked, without waiting. Replaces a server that ended."""
        return cast(_Popen, cast(Any, self)._popen).wait_for_fork(0)

    @property
    def known_pid(self) -> int | None:
        """Its id, without waiting; None: it is not known to be forked."""
        self.hear_fork()
        return cast(_Popen, cast(Any, self)._popen)._pid

    def give_up(self) -> bool:
        """Nobody waits for the fork any more; whether it was still waited for."""
        return cast(_Popen, cast(Any, self)._popen).give_up()

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802  (the standard library's name)
        return _Popen(process_obj)


class _Popen(popen_forkserver.Popen):
    """The standard library's, but from our server, without importing the main module or waiting for the fork.

    What it passes must stay open until it is known to be forked: another server may have to be asked.
    """

    sentinel: int
    _pid: int | None = None
    _asked: tuple[Server, bytes] | None = None
    """The server that is to fork the process, and the process's description, until it has."""

    def __init__(self, process_obj: Any) -> None:
        self._hearing = threading.RLock()  # one thread hears of the fork; a finaliser may come back here
        super().__init__(process_obj)

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        """Return the id; wait until it is forked, for a minute at most. None: it is not."""
        self.wait_for_fork(_FORKED_IN_S)
        return self._pid

    def _launch(self, process_obj: Any) -> None:
        server: Server = process_obj._server
        process_obj._server = None  # it stays here
        description = description_of(process_obj, self)
        try:
            self._ask(server, description)
        except (ConnectionError, EOFError, ChildProcessError):
            pass  # a Ctrl-C in what follows is told alone, not with this
        else:
            return
        server.replace()
        self._ask(server, description)

    def _ask(self, server: Server, description: bytes) -> None:
        try:
            # Asked and not told what for, a worker would say so with a traceback, and a server that is not
            # asked by who has called end with one.
            with Uninterrupted():
                self.sentinel, writer = server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
                own_ends = os.dup(writer), self.sentinel
                self.finalizer = util.Finalize(self, util.close_fds, own_ends)  # type: ignore[attr-defined]
                _make_room(writer, description)  # who is to read it may not be there for long
                with open(writer, "wb", closefd=True) as file:
                    file.write(description)
                self._asked = server, description
        except BaseException:
            self.close()
            raise

    def wait_for_fork(self, timeout: float | None) -> bool:
        """Return whether the process is known to be forked, in so many seconds; None: wait until it is."""
        with self._hearing:
            while self._asked is not None:
                if not connection.wait([self.sentinel], timeout):
                    return False
                self._hear()
            return True

    def give_up(self) -> bool:
        """See `ServerProcess`."""
        with self._hearing:
            if self._asked is None:
                return False
            self._asked, self.returncode = None, -signal.SIGKILL
            return True

    def _send_signal(self, sig: int) -> None:
        if self.wait_for_fork(0):  # else there is nobody yet to send it to
            super()._send_signal(sig)  # type: ignore[misc]

    def _hear(self) -> None:
        """Read what the server says. If it has ended instead of forking, another one is asked."""
        with Uninterrupted():  # what was read and not noted would be missing for ever
            if self._asked is None:
                return  # a finaliser was here, and what comes next tells of the end of the process
            server, description = self._asked
            try:
                self._pid = forkserver.read_signed(self.sentinel)
            except (ConnectionError, EOFError):
                self._ask_another(server, description)
            else:
                self._asked, server.has_forked = None, True

    def _ask_another(self, server: Server, description: bytes) -> None:
        self.close()
        self._asked, self.returncode = None, -signal.SIGKILL  # in case that nobody can be asked
        server.replace()
        self._ask(server, description)
        self.returncode = None

    def wait(self, timeout: float | None = None) -> int | None:
        return super().wait(timeout) if self.wait_for_fork(timeout) else None

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            timeout = 0 if flag == os.WNOHANG else None
            if not self.wait_for_fork(timeout) or not connection.wait([self.sentinel], timeout):
                return None
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = -signal.SIGKILL  # the server has ended, and its workers with it
        return self.returncode


def description_of(process_obj: Any, popen: Any) -> bytes:
    """Return what a fork server is told of a process to be forked, which does not run the main module."""
    preparation = spawn.get_preparation_data(process_obj.name)
    for name in ("init_main_from_name", "init_main_from_path", "start_method"):
        preparation.pop(name, None)
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        set_spawning_popen(None)
    return buffer.getvalue()


def _make_room(pipe: int, content: bytes) -> None:
    """Let a pipe hold all of this, if it may."""
    with contextlib.suppress(OSError):
        if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < len(content):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, len(content))


def release_server() -> None:
    """In a worker: a fork server must not live on for our sake when the process it belongs to has ended."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
