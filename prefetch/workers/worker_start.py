"""Start a worker process: what it is given, and the first things it does with it.

Used in both processes: the pool makes a `WorkerStart` for each worker, which travels there with copies of
the descriptors it names, and the worker calls `begin` before anything else.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import resource
import signal
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, reduction
from types import FrameType
from typing import Any, NamedTuple

import cloudpickle

from prefetch.memory.arena import keep_heap
from prefetch.memory.interrupts import WorkerInterrupts
from prefetch.workers.shared_arena import Header
from prefetch.workers.signals import STACKS_SIGNAL, end_with_parent, let_signals, shield, tell_frames
from prefetch.workers.starting import release_server

ABOUT = "about: "
"""The beginning of what a worker has to say of itself behind its stacks."""


NATIVE = "native:\n"
"""The beginning of its native frames, between both."""


class WorkerResponse(NamedTuple):
    """A response of a worker about a task; offsets count from the beginning of the shared file."""

    kind: int
    runner: int
    """The number of the process."""
    region: int
    """The number of its region: a process that was replaced has another."""
    generation: int
    task: int
    offset: int
    nbytes: int
    meta: int
    meta_bytes: int
    table: int
    """Bytes behind the pickle that list its out-of-band buffers."""
    placed: int
    """Ranges of shared memory that it holds beside its own, listed at its end."""
    total: int
    """All bytes of shared memory that the response holds."""


RECORD = struct.Struct(f"<{len(WorkerResponse._fields)}q")
"""The format of a response: shorter than `PIPE_BUF`, so the kernel writes it as a whole."""


class Descriptor:
    """A file descriptor that is passed on to a process while it starts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """All that a worker is given at its start."""

    worker: int
    num_workers: int
    memory: Descriptor
    message_offset: int
    message_bytes: int
    first_region: int
    """The offset of the first of all regions in the shared file."""
    region: int
    """The number of the process's own; no other process ever has it."""
    region_bytes: int
    region_limit: int
    is_locked: bool
    tasks: connection.Connection
    responses: Descriptor
    stacks: Descriptor
    settings: ProcessSettings | None
    """None: the process was forked from the training process, and is as that is."""
    inherited: Any
    """The objects that a forked worker takes from the parent as they are; None: the message in the shared
    file."""
    passed: tuple[Descriptor, ...]
    """Further descriptors that the target asked for."""
    training: int
    """The id of the training process."""
    parent: int
    """The id of the process that forks it; 0: a server."""
    interruptible: bool
    """Ctrl-C interrupts the parent, so it may interrupt this process; else the parent has other plans."""
    collects: bool
    """Garbage is collected in the training process, and so here."""

    @property
    def region_offset(self) -> int:
        """The offset of the process's region in the shared file."""
        return self.first_region + self.region * self.region_bytes

    def respond(self, response: WorkerResponse) -> None:
        """Tell the parent of something that is done. Raises BrokenPipeError when it has gone."""
        os.write(self.responses.fd, RECORD.pack(*response))


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """The settings of the training process that a new process, or one from a server, lacks.

    `sys.path`, arguments and folder are passed on by `multiprocessing`.
    """

    stdio: tuple[Descriptor, ...]
    """Standard output and error as they are now: a server has those of its start. (): they are closed."""
    environment: dict[str, str] | None
    """None: that of the server."""
    affinity: set[int]
    nice: int
    limits: dict[int, tuple[int, int]]
    warning_filters: bytes
    """By value, as the main module may have a category of its own."""
    log_levels: dict[str, int]

    @classmethod
    def here(cls, *, by_value: bool) -> ProcessSettings:
        """Read the settings of this process."""
        loggers = logging.root.manager.loggerDict
        levels = {name: log.level for name, log in loggers.items() if isinstance(log, logging.Logger)}
        limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
        return cls(
            stdio=_stdio(),
            environment=dict(os.environ) if by_value else None,
            affinity=os.sched_getaffinity(0),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            limits={limit: resource.getrlimit(limit) for limit in limits},
            warning_filters=cloudpickle.dumps([*warnings.filters]),
            log_levels={"": logging.root.level, **{name: level for name, level in levels.items() if level}},
        )

    def apply(self) -> None:
        """Set them here, as far as the system lets this process."""
        for fd, descriptor in zip((1, 2), self.stdio, strict=False):
            os.dup2(descriptor.fd, fd)
            os.close(descriptor.fd)
        if self.environment is not None:
            os.environ.clear()
            os.environ.update(self.environment)
        with suppress(OSError):
            os.sched_setaffinity(0, self.affinity)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        for limit, amounts in self.limits.items():
            with suppress(OSError, ValueError):
                resource.setrlimit(limit, amounts)
        warnings.filters[:] = pickle.loads(self.warning_filters)  # type: ignore[index]
        with warnings.catch_warnings():  # which lets Python know
            pass
        for name, level in self.log_levels.items():
            logging.getLogger(name).setLevel(level)


def _stdio() -> tuple[Descriptor, ...]:
    try:
        for fd in (1, 2):
            os.fstat(fd)
    except OSError:
        return ()
    return Descriptor(1), Descriptor(2)


_is_forked = False


def is_forked() -> bool:
    """Return whether this process is a worker that was forked from the training process."""
    return _is_forked


def begin(
    start: WorkerStart,
    about: Callable[[FrameType | None], str] | None = None,
    handle: Callable[[], object] = bool,
) -> None:
    """First thing in a worker: it ends with its parent, is set as that is, and tells its stacks.

    Args:
        start: of this worker.
        about: told its frame when it is asked for its stacks, what it has to say of it: a line behind them,
            as soon as the interpreter runs.
        handle: sets handlers of other signals than those of jobs.
    """
    keep_heap()
    gc.freeze()  # what is dead here is not ours to finalise; pages that nobody looks at stay shared
    if start.collects:
        gc.enable()
    end_with_parent(start.parent)
    handle()
    shield(start.training)
    global _is_forked
    _is_forked = start.settings is None
    if start.settings is not None:
        start.settings.apply()
        release_server()
    if about is not None:
        tell = about

        def answer(_: int, frame: FrameType | None) -> None:
            with suppress(OSError):  # nobody reads any more
                os.write(start.stacks.fd, f"{ABOUT}{tell(frame)}\n".encode())

        signal.signal(STACKS_SIGNAL, answer)
    tell_frames(start.stacks.fd)
    faulthandler.register(STACKS_SIGNAL, file=start.stacks.fd, all_threads=True, chain=True)
    header = Header(start.memory.fd)
    header.set(header.WORKERS + start.worker, 1)
    WorkerInterrupts(are_heard=start.interruptible)
    let_signals()
