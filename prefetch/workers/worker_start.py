"""Start a worker process: what it is given, and the first things it does with it.

Used in both processes: the pool makes a `WorkerStart` for each worker, which travels there with copies of
the descriptors it names, and the worker calls `begin` before anything else.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, reduction
from types import FrameType
from typing import Any, NamedTuple

from prefetch.memory.interrupts import WorkerInterrupts
from prefetch.workers.fork_server import end_with_parent, let_interrupt, release_server
from prefetch.workers.shared_arena import Header

ABOUT = "about: "
"""The beginning of what a worker has to say of itself behind its stacks."""
STACKS_SIGNAL = signal.SIGUSR2
"""A worker that gets it writes its stacks."""


class WorkerResponse(NamedTuple):
    """A response of a worker about a task; offsets count from the beginning of the shared file."""

    kind: int
    runner: int
    """The number of the process."""
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
    region_offset: int
    region_bytes: int
    region_limit: int
    tasks: connection.Connection
    responses: Descriptor
    stacks: Descriptor
    stdio: tuple[Descriptor, ...]
    environment: dict[str, str] | None
    inherited: Any
    """The objects that a forked worker takes from the parent as they are; None: the message in the shared
    file."""
    passed: tuple[Descriptor, ...]
    """Further descriptors that the target asked for."""
    watched: bool
    """The thread that starts this process lives as long as the parent: the kernel may watch it."""
    interruptible: bool
    """Ctrl-C interrupts the parent, so it may interrupt this process; else the parent has other plans."""

    def respond(self, response: WorkerResponse) -> None:
        """Tell the parent of something that is done. Raises BrokenPipeError when it has gone."""
        os.write(self.responses.fd, RECORD.pack(*response))


def stdio_descriptors() -> tuple[Descriptor, ...]:
    """Standard output and error of this process as they are now: a fork server has those of its start."""
    try:
        for fd in (1, 2):
            os.fstat(fd)
    except OSError:
        return ()
    return Descriptor(1), Descriptor(2)


def begin(start: WorkerStart, about: Callable[[FrameType | None], str] | None = None) -> None:
    """First thing in a worker: it ends with its parent, writes where it writes, and tells its stacks.

    Args:
        start: of this worker.
        about: told its frame when it is asked for its stacks, what it has to say of it: a line behind them,
            as soon as the interpreter runs.
    """
    if start.watched:
        end_with_parent()
    release_server()
    for fd, descriptor in zip((1, 2), start.stdio, strict=False):
        os.dup2(descriptor.fd, fd)
        os.close(descriptor.fd)
    if start.environment is not None:
        os.environ.clear()
        os.environ.update(start.environment)
    if about is not None:
        tell = about

        def answer(_: int, frame: FrameType | None) -> None:
            with suppress(OSError):  # nobody reads any more
                os.write(start.stacks.fd, f"{ABOUT}{tell(frame)}\n".encode())

        signal.signal(STACKS_SIGNAL, answer)
    faulthandler.register(STACKS_SIGNAL, file=start.stacks.fd, all_threads=True, chain=about is not None)
    header = Header(start.memory.fd)
    header.set(header.WORKERS + start.worker, 1)
    WorkerInterrupts(are_heard=start.interruptible)
    let_interrupt()
