"""Signals in worker processes: those that are sent to a whole job are the training process's business.

Slurm, terminals and launchers send SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 to all processes of a job. The
training process notes them, ends its window and saves; so its workers must live on. They handle these signals
with C code that does nothing, but for a SIGTERM from the training process itself, which ends them at once. A
handler goes where a program is started, unlike a signal that is ignored or blocked; children that a worker
forks give it up. From before the fork until it stands, signals are blocked.

Workers end with their parent, however that ends. A fork server of the standard library, whose other children
signals must reach, has `shield_server`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process, util
from typing import Any

import numpy as np

from prefetch.memory.interrupts import HiddenThread, Uninterrupted
from sharding.core.library import address_of, library

STACKS_SIGNAL = signal.SIGRTMIN + 9
"""A worker that gets it writes its stacks. Nobody else sends it, or handles it."""
_PARENT_SIGNAL = signal.SIGRTMIN + 10
"""The kernel sends it when a parent's thread ends."""
_OF_JOBS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that are sent to all processes of a job."""
_BLOCKED = {signal.SIGINT, *_OF_JOBS, STACKS_SIGNAL, _PARENT_SIGNAL}
_numbers = np.array([*_OF_JOBS, _PARENT_SIGNAL], np.int64)
_is_shielded = _is_server = False
_hushed: Any = None
"""The filters of warnings before a fork, while it is made."""
_server = 0
"""The fork server that this process is, or was forked from; 0: none of ours."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals wait, here and in processes that are started meanwhile (there until `let_signals`)."""
    # Blocked in this thread, a Ctrl-C comes to another one, and is raised here all the same, maybe before the
    # mask is set back: no Ctrl-C would ever come again.
    with Uninterrupted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_signals() -> None:
    """Let signals reach this process again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


@contextmanager
def forking() -> Iterator[None]:
    """Fork inside: signals are held, and no garbage of this process is finalised in its child.

    The child freezes what it has (`begin` of `worker_start`), and collects again. Python 3.12 and later warns
    of threads, and is let to where one of them is not ours.
    """
    global _hushed
    if arrow := sys.modules.get("pyarrow"):  # a page that it keeps unused would be copied when next written
        arrow.default_memory_pool().release_unused()
    collects, hushed = gc.isenabled(), warnings.catch_warnings()
    with signals_held(), hushed:
        if all(_is_ours(thread) for thread in threading.enumerate()):
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        gc.disable()
        _hushed = hushed
        try:
            yield
        finally:
            _hushed = None
            if collects:
                gc.enable()


def _is_ours(thread: threading.Thread) -> bool:
    known = threading.main_thread(), threading.current_thread()
    return thread in known or isinstance(thread, HiddenThread)


def shield(training: int) -> None:
    """Handle the signals of jobs, in a worker process whose signals are held.

    Handlers that came with a fork are the training process's, and never run here.

    Args:
        training: the id of the training process.
    """
    global _is_shielded
    _is_shielded = True
    for number in signal.valid_signals():
        if number != signal.SIGINT and callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in _OF_JOBS:  # one that is ignored, too: `signal.getsignal` tells what a new handler replaces
        signal.signal(number, signal.SIG_DFL)
    if error := library().core_shield(address_of(_numbers), len(_OF_JOBS), training):
        raise OSError(error, "cannot handle signals")


def end_with_parent(parent: int = 0) -> None:
    """Let this process end when the one that forked it has ended, whichever of its threads that was.

    `parent`: its id; 0: the fork server's, if there is one. Where that has died meanwhile, who is the parent
    now is none, and another process may have been started for the same tasks.
    """
    parent = parent or _server or os.getppid()
    if error := library().core_end_with_parent(int(_PARENT_SIGNAL), parent):
        raise OSError(error, "cannot watch the parent")


def tell_frames(descriptor: int = -1) -> None:
    """Write native frames to a descriptor when stacks are asked for; none: prepare for that before a fork."""
    if error := library().core_tell_frames(int(STACKS_SIGNAL), descriptor):
        raise OSError(error, "cannot handle signals")


def shield_server() -> None:
    """In a fork server of the standard library: it lives on, and so do the workers that come from it.

    Other processes that come from it are as they would be without us, when they run what they are to.
    """
    global _is_server, _server
    _is_server, _server = True, os.getpid()
    shield(os.getppid())
    util.register_after_fork(_numbers, _after_start)
    let_signals()


def _after_start(_: Any) -> None:
    """A process has come from the server, and knows what it is to run."""
    global _is_server
    _is_server = False
    if not getattr(process.current_process(), "is_shielded", False):
        _unshield()


def _unshield() -> None:
    """In a process that one of ours has forked: signals do what they do by default, and warnings, too."""
    global _is_shielded, _hushed
    if _hushed is not None:
        _hushed.__exit__(None, None, None)
        _hushed = None
    if _is_shielded and not _is_server:
        _is_shielded = False
        library().core_unshield(address_of(_numbers), len(_numbers))


os.register_at_fork(after_in_child=_unshield)
