"""A fork server that is forked from this process: there in milliseconds, with all that is imported here.

A fork copies one thread, and the locks that all others hold; a GPU's context is of no use in the copy. So it
is done only while this process has one thread and no GPU open. OpenBLAS's threads, which importing numpy
starts, do not count: OpenBLAS itself ends them before a fork. Nor does the one of jemalloc, which importing
pyarrow starts: jemalloc takes all its locks before a fork, and the copy has them free and no such thread.
Hence the number of threads is bounded before the fork, and counted right behind it: any that is there besides
these was there before, and the copy is killed before it has done anything.

The copy keeps the memory of the moment (shared until somebody writes to it) and no descriptor: sockets and
pipes would look open to those at their other ends, and locks of files held. Regular files are opened anew.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import os
import select
import shutil
import signal
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, process, util

_MOST_BYTES = 1 << 30
"""A fork copies page tables, 2 ms per 100 MB or more, and what is freed here stays with the copy."""
_ENDS_IN_S = 0.2
"""Seconds from the end of a process's descriptors to its own."""
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband/")
_JEMALLOC_THREAD = "jemalloc_bg_thd\n"


@dataclass(frozen=True, kw_only=True)
class ForkFacts:
    """The facts that decide whether this process may be forked."""

    threads: int
    """The number of threads, those of libraries included."""
    python_threads: int
    blas_threads: int
    """The most that OpenBLAS may have beside the main thread; it ends them before a fork."""
    devices: Collection[str]
    """Open files of GPUs and the like."""
    held_bytes: int
    """Anonymous and shared memory in use."""


def refusal(facts: ForkFacts) -> str:
    """Why a process must not be forked; "" where it may be."""
    if facts.python_threads > 1 or facts.threads > 1 + facts.blas_threads:
        return f"this process had {facts.threads} threads"
    if facts.devices:
        return f"this process used {min(facts.devices)}"
    if facts.held_bytes > _MOST_BYTES:
        return f"this process held {facts.held_bytes:,} bytes, more than {_MOST_BYTES:,}"
    return ""


def fork_facts() -> ForkFacts:
    """Return the facts of this process now."""
    with open("/proc/self/maps") as lines:
        libraries = {line.split()[-1] for line in lines if "openblas" in line}
    with open("/proc/self/status") as lines:
        sizes = dict(line.split(":", 1) for line in lines)
    return ForkFacts(
        threads=num_threads(),
        python_threads=threading.active_count() + (threading.current_thread() is not threading.main_thread()),
        blas_threads=len(libraries) * ((os.cpu_count() or 1) - 1),
        devices={path for path in map(_path, _descriptors()) if path.startswith(_GPU_DEVICES)},
        held_bytes=sum(1024 * int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")),
    )


def num_threads() -> int:
    """Threads of this process, those of libraries included, but for jemalloc's."""
    return sum(not _is_jemalloc(task) for task in os.listdir("/proc/self/task"))


def _is_jemalloc(task: str) -> bool:
    try:
        with open(f"/proc/self/task/{task}/comm") as name:
            return name.read() == _JEMALLOC_THREAD
    except OSError:  # it has ended
        return False


@dataclass(frozen=True)
class ForkedServer:
    """A server that was forked from this process, as `multiprocessing` finds it."""

    address: str
    alive: int
    """A descriptor: it ends when nobody holds this one any more."""
    pid: int


def fork_server(preload: Sequence[str]) -> ForkedServer | str:
    """Fork one, to be called with interrupts held; or why there is none.

    `preload`: modules that it imports, beside what this process does meanwhile.
    """
    if "authkey_r" in inspect.signature(forkserver.main).parameters:
        return "fork servers of this Python (3.14 or later) ask for a key, which is not supported"
    try:
        if reason := refusal(fork_facts()):
            return reason
        # One that is there already may be a parent's of this process.
        is_new = process.current_process()._config.get("tempdir") is None  # type: ignore[attr-defined]
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            os.chmod(address, 0o600)
            listener.listen()
            reader, alive = os.pipe()
            try:
                folder = os.path.dirname(address) if is_new else ""
                pid = _forked(listener.fileno(), reader, preload, folder)
            except OSError:
                os.close(alive)
                raise
            finally:
                os.close(reader)
    except (OSError, LookupError) as error:  # /proc is not Linux's, or there is no room for another process
        return f"this process cannot be forked: {error}"
    if (threads := num_threads()) > 1:
        os.close(alive)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"this process had {threads} threads"
    return ForkedServer(address, alive, pid)


def _forked(listener: int, alive: int, preload: Sequence[str], folder: str) -> int:
    """Fork a server; `folder` is this process's own, and goes with it."""
    parent = os.getpid()
    util._flush_std_streams()  # type: ignore[attr-defined]  # or the copy would write what is buffered again
    offsets = _offsets()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, that counts as we do
        pid = os.fork()
    if pid:
        return pid
    try:
        _serve(listener, alive, preload, offsets)
    except BaseException as error:  # SystemExit: nobody holds the other end of `alive`
        # Killed, perhaps in the middle of asking for a worker: at its end it would have removed this itself.
        if is_over := _has_ended(parent):
            shutil.rmtree(folder or os.devnull, ignore_errors=True)
        # Who was interrupted between calling and asking is about to end, or asks another server.
        if is_over or isinstance(error, (SystemExit, EOFError)):
            os._exit(0)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)  # never back into the caller's frames


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, or is about to: descriptors are closed a moment before."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], _ENDS_IN_S)[0])
    finally:
        os.close(descriptor)


def _serve(listener: int, alive: int, preload: Sequence[str], offsets: Mapping[int, int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    _replace_descriptors({0, 1, 2, listener, alive}, offsets)
    atexit._clear()  # Python 3.13 and later runs what is left at the end of each worker
    for name in preload:  # not by `main`, which would come behind `freeze`
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what is dead here must not be finalised, and pages that are not looked at stay shared
    forkserver.main(listener, alive, [])


def _replace_descriptors(own: Collection[int], offsets: Mapping[int, int]) -> None:
    """Put others in the place of all but our `own`: objects here still know, and may close, their numbers.

    `offsets`: where each file was read or written, before this process was forked.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in _descriptors():
        if fd in own or fd == null:
            continue
        with contextlib.suppress(OSError):  # it was that of the listing, or may not be opened again
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_nlink:
                copy = _reopen(fd, offsets[fd])
                os.dup2(copy, fd, inheritable=False)
                os.close(copy)
            elif not stat.S_ISCHR(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _reopen(fd: int, offset: int) -> int:
    """The same file with an offset of its own, so that reading here moves nobody else's; writers append."""
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    copy = os.open(f"/proc/self/fd/{fd}", mode | (os.O_APPEND if mode != os.O_RDONLY else 0))
    os.lseek(copy, offset, os.SEEK_SET)
    return copy


def _offsets() -> dict[int, int]:
    """Return where each open file is read or written next: a forked process shares that with its parent."""
    offsets = {}
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it was that of the listing
            if stat.S_ISREG(os.fstat(fd).st_mode):
                offsets[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return offsets


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _path(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
