"""Worker processes start as multiprocessing says, which is a fork of this process on most Pythons.

Where nobody chose and the default is a server (Python 3.14), processes come from one of our own, which has
imported what they need. The main module is not imported there, and objects go by value: a script needs no
guard against being run again.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import (
    connection,
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    reduction,
    spawn,
    util,
)
from multiprocessing.context import BaseContext, set_spawning_popen
from typing import Any

from prefetch.memory.interrupts import Uninterrupted
from prefetch.workers.signals import signals_held

_SHIELD = "prefetch.workers.server_shield"
_ASKED = 3
"""Servers that are tried, one after another."""
_FORKED_IN_S = 60.0
"""A server imports torch first."""
_OF_ALL = "torch", "numpy.random"
"""Modules that all workers import."""


class ByValueContext(context.ForkServerContext):
    """The way of starting that nobody chose: from our own server."""

    @staticmethod
    def Process(*args: Any, **kwargs: Any) -> ServerProcess:  # type: ignore[override]  # noqa: N802
        """Make a process, see `multiprocessing.Process`."""
        return ServerProcess(*args, **kwargs)


def start_context(chosen: Any = None) -> BaseContext:
    """Return how worker processes start, by what the caller was given: None, or a context."""
    if chosen is not None:
        context: BaseContext = multiprocessing.get_context(chosen) if isinstance(chosen, str) else chosen
        return context
    method = multiprocessing.get_start_method(allow_none=True)
    # The default is fixed as soon as anything is used that comes from it, the lock of a progress bar for
    # instance: that is nobody's choice.
    default = multiprocessing.get_all_start_methods()[0]
    if method in (None, default) and default != "fork":
        return ByValueContext()
    started: BaseContext = multiprocessing.get_context(method or default)
    return started


def start_reason(chosen: Any, context: BaseContext) -> tuple[str, str]:
    """Return how processes start, in words, and why so."""
    if chosen is not None:
        return str(context.get_start_method()), "multiprocessing_context asked for it"
    if isinstance(context, ByValueContext):
        return "fork server", "nobody chose another; objects go by value"
    default = multiprocessing.get_all_start_methods()[0]
    method = str(context.get_start_method())
    return method, "the default of this Python" if method == default else "set_start_method chose it"


def is_fork(context: BaseContext) -> bool:
    """Return whether processes are forked from this one."""
    return context.get_start_method() == "fork"


def new_process(context: BaseContext, target: Callable[..., object], start: Any, name: str) -> Any:
    """A process that is to be started by `signals_held`, or `forking`."""
    if type(context) is type(multiprocessing.get_context("forkserver")):
        return ChosenServerProcess(target=target, args=(start,), name=name)
    if type(context) is type(multiprocessing.get_context("fork")):
        return WatchedProcess(target=target, args=(start,), name=name)
    return context.Process(target=target, args=(start,), name=name)  # type: ignore[attr-defined]


class WatchedProcess(context.ForkProcess):
    """A forked process that is seen to end: a pipe is not, while a child of another thread holds its end."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  (the standard library's name)
        return _WatchedPopen(process_obj)


class _WatchedPopen(popen_fork.Popen):
    sentinel: int
    pid: int

    def _launch(self, process_obj: Any) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        self._watch: Any = bool
        with suppress(OSError):  # an old kernel
            self.sentinel = os.pidfd_open(self.pid)
            self._watch = util.Finalize(self, os.close, (self.sentinel,))

    def close(self) -> None:
        super().close()
        self._watch()


# ---- servers ----------------------------------------------------------------------------------------------

_server = forkserver.ForkServer()
"""Ours."""


def warm_up(modules: Collection[str]) -> None:
    """Start our server, if it does not run, without waiting for it; `modules`: what it imports, too."""
    names = {name for name in modules if name and getattr(sys.modules.get(name), "__spec__", None)}
    with signals_held():
        _shielded(_server, [*_OF_ALL, *sorted(names - {"__main__", "builtins"})])
        _server.ensure_running()


def _shielded(server: Any, preload: Collection[str]) -> None:
    """Have a server that is not running yet import what keeps signals from it, and `preload`."""
    names = [name for name in preload if name != _SHIELD]
    server.set_forkserver_preload([_SHIELD, *names])


class _ServerPopen(popen_forkserver.Popen):
    """The standard library's; asks again where its server has just died."""

    def _launch(self, process_obj: Any) -> None:
        preparation, server = spawn.get_preparation_data(process_obj._name), process_obj.server()
        if server is _server:
            for name in ("init_main_from_name", "init_main_from_path", "start_method"):
                preparation.pop(name, None)
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        for _ in range(_ASKED):
            try:
                self._ask(server, buffer)
                return
            except (ConnectionError, EOFError) as error:
                _kill(server)  # it was killed, and its process is not known to have ended yet
                killed = error
                if server is _server:
                    _shielded(server, _OF_ALL)  # a module may have ended it: a worker imports that itself
        raise RuntimeError(
            f"the fork server was killed {_ASKED} times as it was asked for a worker"
        ) from killed

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and connection.wait([self.sentinel], None if flag == 0 else 0):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = -signal.SIGKILL  # the server has ended, and its workers with it
        return self.returncode

    def _ask(self, server: forkserver.ForkServer, description: io.BytesIO) -> None:
        # Asked and not told what for, a worker would say so with a traceback.
        with Uninterrupted():
            self.sentinel, writer = server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
            ends = os.dup(writer), self.sentinel
            self.finalizer = util.Finalize(self, util.close_fds, ends)  # type: ignore[attr-defined]
            with open(writer, "wb", closefd=True) as file:
                file.write(description.getbuffer())
        if not connection.wait([self.sentinel], _FORKED_IN_S):
            raise RuntimeError(
                f"the fork server has forked no process in {_FORKED_IN_S:.0f} s: it imports, or stands "
                'still; multiprocessing_context="fork" does without it'
            )
        self.pid = forkserver.read_signed(self.sentinel)


def _kill(server: Any) -> None:
    pid, alive = server._forkserver_pid, server._forkserver_alive_fd
    server._forkserver_address = server._forkserver_pid = server._forkserver_alive_fd = None
    if alive is not None:
        os.close(alive)
    if pid is not None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class ServerProcess(context.ForkServerProcess):
    """A process from our own server."""

    is_shielded = False
    """True if it keeps the server's handlers of signals until it has its own."""

    @staticmethod
    def server() -> forkserver.ForkServer:
        """The server that forks it."""
        return _server

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  (the standard library's name)
        return _ServerPopen(process_obj)


class ChosenServerProcess(ServerProcess):
    """A process from the server that `multiprocessing` has for all."""

    @staticmethod
    def server() -> forkserver.ForkServer:
        """The server that forks it."""
        server: Any = forkserver._forkserver
        if server._forkserver_pid is None:
            _shielded(server, server._preload_modules)
        return server  # type: ignore[no-any-return]


def release_server() -> None:
    """In a worker: a fork server must not live on for our sake when the process it belongs to has ended."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None and server._forkserver_pid is None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _after_fork() -> None:
    """The server is the parent's, and must not live on for our sake."""
    server: Any = _server
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()


os.register_at_fork(after_in_child=_after_fork)
