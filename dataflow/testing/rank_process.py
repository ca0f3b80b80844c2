"""One rank of `run_ranks`: the code that runs in its process.

Invariant: a rank speaks to its parent over one pipe, in order "started", then one of "returned" and
"raised", and then keeps its process group (and so its sockets) open until the parent lets it go: a rank
that is done early must not look like a lost peer to the others. Signals tell the rest: SIGUSR1 writes the
stacks of all threads to a file and ends the process (`chain=True` runs the signal's default action after
the dump, so the parent knows that the dump is whole once the process is gone).
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """The work of a rank. Picklable."""

    call: bytes
    """Pickled (function, args, kwargs); unpickled only after the environment is set."""
    environ: Mapping[str, str]
    """The whole environment, as torchrun would set it."""
    backend: str | None
    """Backend to initialise `torch.distributed` with; None leaves that to the function."""
    stacks: str
    """File for the stacks of all threads."""
    prepare: Callable[[], object] | None = None
    """Called first of all, before the function's module is imported."""
    host: str | None = None
    """Host name to pretend; None: the machine's."""
    output: str | None = None
    """File that stdout and stderr go to; None: where the parent's go."""


@dataclass(frozen=True)
class Raised:
    """An exception of a rank, made fit for travel."""

    error: bytes | None
    """The pickled exception; None where it cannot be pickled and back."""
    summary: str
    """The error's type and message."""
    traceback: str


def run_rank(task: RankTask, pipe: Connection, alive: Connection) -> None:
    """Main function of a rank's process. Nothing is sent over `alive`; it is open while the parent lives."""
    os.setsid()  # a group of its own: what it starts can be stopped with it
    _end_with_parent(alive)
    # multiprocessing hands its own start method on; under torchrun, DataLoader workers would be forked.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(task.environ)
    if task.output is not None:
        _print_to(task.output)
    if task.host is not None:
        _pretend_host(task.host)
    with open(task.stacks, "wb") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, chain=True)
        pipe.send(("started", None))
        pipe.send(_outcome(task))
        _wait_for_parent(pipe)
        _leave_group()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _outcome(task: RankTask) -> tuple[str, bytes | Raised]:
    try:
        if task.prepare:
            task.prepare()
        function, args, kwargs = pickle.loads(task.call)
        _join_group(task)
        return "returned", pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # also SystemExit, and pytest's Skipped and Failed
        return "raised", _raised(error)


def _join_group(task: RankTask) -> None:
    import torch

    torch.set_num_threads(int(task.environ["OMP_NUM_THREADS"]))
    if task.backend is not None:
        torch.distributed.init_process_group(task.backend)


def _print_to(path: str) -> None:
    """Also for what C code and child processes print; line by line, as the rank may be killed."""
    with open(path, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _pretend_host(name: str) -> None:
    """Give Python code here another host name; only root may name the host, so the kernel's stays."""
    platform.node = socket.gethostname = lambda: name


def _leave_group() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        # A DDP that a trainer holds in a circle must not be the last to let go of gloo: it would wait for
        # gloo's threads with the interpreter lock held, which they want.
        gc.collect()
        torch.distributed.destroy_process_group()


def _wait_for_parent(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        sys.exit(1)


def _raised(error: BaseException) -> Raised:
    text = "".join(traceback.format_exception(error.with_traceback(_own_part(error.__traceback__))))
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an error whose __init__ wants more than its args fails only here
    except Exception:
        return Raised(None, summary, text)
    return Raised(data, summary, text)


def _own_part(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without this module's frames, unless nothing else is left."""
    part = tb
    while part is not None and part.tb_frame.f_code.co_filename == __file__:
        part = part.tb_next
    return part or tb


def _end_with_parent(alive: Connection) -> None:
    """Have the kernel end this process when the parent's end of a pipe closes, even if by SIGKILL.

    The default action of SIGIO is to end the process. Not prctl(PR_SET_PDEATHSIG): the parent in its sense
    may be a fork server, which lives as long as its children do.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if alive.poll():  # it was gone before
        sys.exit(1)
