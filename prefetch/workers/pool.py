"""Worker processes that take tasks from one pipe each and answer through one pipe they all share.

Answers are fixed-size records, shorter than `PIPE_BUF`: the kernel writes each as a whole, so workers need
no lock, the parent reads many with one call, and a worker that is killed cannot leave half a record or a
held lock behind. What a record describes lies in the shared file (see `shared_arena`). Messages to a
worker never block the parent: what a pipe does not hold yet waits here.

Processes come from our own fork server (see `fork_server`) unless the caller names a start method. The
parent's main module is not imported there, its objects travel by value; so a script needs no
`if __name__ == "__main__"`.

Workers end with the parent, however it ends: its ends of the pipes close, since processes forked from it
close theirs at once; and where the kernel can watch the process that started them, it kills even
those that hang.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import resource
import select
import signal
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, process, reduction
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from prefetch.workers.death import WorkerDiedError
from prefetch.workers.fork_server import (
    Modules,
    Server,
    ServerProcess,
    begin_to_use,
    end_with_parent,
    interrupts_held,
    let_interrupt,
    release_server,
    stop_using,
)
from prefetch.workers.shared_arena import Header, SharedFile

STACKS_SIGNAL = signal.SIGUSR2
_ANSWER_S = 2.0
"""A worker begins to write its stacks within this time."""
_QUIET_S = 0.25
"""Stacks have arrived when nothing more came for this long."""
_STOP_S = 5.0
"""Time that workers have to end by themselves, together."""
_KILL_S = 2.0
_PIPE_BYTES = 1 << 20
_LONGEST_S = 1e6
"""`poll` takes no longer times."""


class Answer(NamedTuple):
    """What a worker says about a task.

    Offsets count from the beginning of the shared file.
    """

    kind: int
    worker: int
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
    """All bytes of shared memory that the answer holds."""


_ANSWER = struct.Struct("<iiqqqqqqqqq")
_FRAME = struct.Struct("!i")
"""What `Connection.recv_bytes` expects before a message: its length."""


class Descriptor:
    """A file descriptor that is passed on to a process while it starts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(dup: Any) -> Descriptor:
    return Descriptor(dup.detach())


@dataclass(frozen=True)
class WorkerStart:
    """All that a worker is given at its start."""

    worker: int
    num_workers: int
    memory: Descriptor
    message_offset: int
    message_bytes: int
    region_offset: int
    region_bytes: int
    region_limit: int
    tasks: connection.Connection
    answers: Descriptor
    stacks: Descriptor
    stdio: tuple[Descriptor, ...]
    environment: dict[str, str] | None
    inherited: Any
    """What a forked worker takes from the parent as it is; None: the message in the shared file."""
    passed: tuple[Descriptor, ...]
    """Further descriptors that the target asked for."""
    watched: bool
    """The thread that starts this process lives as long as the parent: the kernel may watch it."""
    interruptible: bool
    """Ctrl-C interrupts the parent, so it may interrupt this process; else the parent has other plans."""

    def answer(self, answer: Answer) -> None:
        """Tell the parent. Raises BrokenPipeError when it has gone."""
        os.write(self.answers.fd, _ANSWER.pack(*answer))


class WorkerPool:
    """Processes with their pipes; `close` ends them all.

    Args:
        target: called in each process with a `WorkerStart`; importable by name.
        file: the shared file.
        context: how processes start; None: from our fork server.
        inherited: handed to forked workers as it is.
        passed: descriptors that every worker gets a copy of.
        region_limit: bytes of free slabs that a worker keeps.
        modules: what the processes will import, for our fork server to have imported already.
        unforkable: why our fork server must not be forked from this process, as far as the caller knows.

    Used by one thread, except that `close` may run in another or in a finaliser. In a forked child all
    methods but `close` raise RuntimeError.

    Raises:
        RuntimeError: the limit on file descriptors leaves too few. Nothing was started.
    """

    def __init__(
        self,
        target: Callable[[WorkerStart], None],
        num_workers: int,
        file: SharedFile,
        *,
        context: BaseContext | None,
        inherited: Any = None,
        passed: Sequence[int] = (),
        region_limit: int,
        modules: Modules = frozenset(),
        unforkable: str = "",
    ) -> None:
        require_descriptors(num_workers)
        self.num_workers, self.context = num_workers, context
        self._file = file
        self._owner = os.getpid()
        self.isolated = inherited is None and not passed
        """Whether what this process does with its objects cannot be seen by the workers."""
        self._closing = threading.RLock()  # held until all have ended; a finaliser may run meanwhile
        self._using = threading.RLock()  # guards the pipes' parent ends while they are in use
        self._closed = False
        self.processes: list[process.BaseProcess] = []
        self._tasks: list[connection.Connection] = []
        self._waiting: list[deque[memoryview]] = [deque() for _ in range(num_workers)]
        self._poll = select.poll()
        self._server = begin_to_use(modules, unforkable) if context is None else None
        self.start, self.start_reason = _start_of(self._server, context)
        self._answers, writer = os.pipe()
        self._stacks, stacks_writer = os.pipe()
        _pools.add(self)
        try:
            for fd in (writer, stacks_writer):
                _enlarge(fd)
            for fd in (self._answers, self._stacks, stacks_writer):  # stacks nobody reads are dropped
                os.set_blocking(fd, False)
            for worker in range(num_workers):
                self._start(worker, target, writer, stacks_writer, context, inherited, passed, region_limit)
        except BaseException:
            self.close(stop_s=0)
            raise
        finally:
            os.close(writer)
            os.close(stacks_writer)
        self._poll.register(self._answers, select.POLLIN)
        self._sentinels = {made.sentinel: worker for worker, made in enumerate(self.processes)}
        for sentinel in self._sentinels:
            self._poll.register(sentinel, select.POLLIN)
        self._blocked: dict[int, int] = {}
        """Workers whose pipe is full, by the descriptor of our end of it."""

    def _start(
        self,
        worker: int,
        target: Callable[[WorkerStart], None],
        answers: int,
        stacks: int,
        context: BaseContext | None,
        inherited: Any,
        passed: Sequence[int],
        region_limit: int,
    ) -> None:
        file = self._file
        start, length = file.region_span(worker)
        reader, tasks = multiprocessing.Pipe(duplex=False)
        self._tasks.append(tasks)
        os.set_blocking(tasks.fileno(), False)
        method = context.get_start_method() if context else None
        given = WorkerStart(
            worker,
            self.num_workers,
            Descriptor(file.fd),
            file.message_offset,
            file.message_bytes,
            start,
            length,
            region_limit,
            reader,
            Descriptor(answers),
            Descriptor(stacks),
            () if context else _stdio(),
            None if context else dict(os.environ),
            inherited,
            tuple(map(Descriptor, passed)),
            method in (None, "forkserver") or threading.current_thread() is threading.main_thread(),
            signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        )
        made: process.BaseProcess
        name = f"dataflow-worker-{worker}"
        if self._server is not None:
            made = ServerProcess(self._server, target, given, name)
        else:
            made = context.Process(target=target, args=(given,), name=name)  # type: ignore[union-attr]
        with reader, interrupts_held() if method == "fork" else contextlib.nullcontext():
            made.start()
        self.processes.append(made)
        # We end it ourselves. A forked child of ours that exits must neither wait for it nor end it.
        process._children.discard(made)  # type: ignore[attr-defined]

    def _require_open(self) -> None:
        if self._closed:
            if self._owner != os.getpid():
                raise RuntimeError(
                    f"the workers of this iterator belong to process {self._owner}; in a process forked "
                    "from it, begin a new loop"
                )
            raise RuntimeError("the loader was closed inside this loop")

    def send(self, worker: int, message: bytes) -> None:
        """Give a message to a worker; it waits until the worker is free.

        What a dead worker will never read is dropped: `wait` tells of its death.
        """
        with self._using:
            self._require_open()
            self._waiting[worker].append(memoryview(_FRAME.pack(len(message)) + message))
            self._flush(worker)

    def _flush(self, worker: int) -> None:
        """Write what the pipe takes; under the lock."""
        waiting, fd = self._waiting[worker], self._tasks[worker].fileno()
        while waiting:
            try:
                rest = waiting[0][os.write(fd, waiting[0]) :]
            except BlockingIOError:
                if _enlarge(fd):
                    continue
                self._blocked[fd] = worker
                self._poll.register(fd, select.POLLOUT)
                return
            except BrokenPipeError:
                waiting.clear()
                break
            if rest:
                waiting[0] = rest
            else:
                waiting.popleft()
        if self._blocked.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def receive(self) -> list[Answer]:
        """The answers that are there, without waiting."""
        with self._using:
            self._require_open()
            for worker in list(self._blocked.values()):
                self._flush(worker)
            try:
                data = os.read(self._answers, _ANSWER.size * 1024)
            except BlockingIOError:
                return []
            return [Answer._make(record) for record in _ANSWER.iter_unpack(data)]

    def wait(self, timeout_s: float | None) -> list[Answer]:
        """Wait for answers; [] when none came in time.

        Raises:
            WorkerDiedError: a worker has ended, and all that it had answered was received.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._using:
            while True:
                left = _LONGEST_S if deadline is None else deadline - time.monotonic()
                ready = dict(self._poll.poll(1000 * min(max(0.0, left), _LONGEST_S)))
                if answers := self.receive():
                    return answers
                dead = [worker for fd, worker in self._sentinels.items() if fd in ready]
                if dead:
                    raise WorkerDiedError([(w, self.processes[w].pid or 0, self._exit_code(w)) for w in dead])
                if ready.get(self._answers, 0) & select.POLLHUP:  # all have ended; we shall hear of it
                    self._poll.unregister(self._answers)
                if not ready and left <= 0:
                    return []

    def _exit_code(self, worker: int) -> int | None:
        made = self.processes[worker]
        made.join(_KILL_S)
        return made.exitcode

    @property
    def started(self) -> bool:
        """Whether every worker runs."""
        first = Header.WORKERS
        return bool(self._file.header.words[first : first + self.num_workers].all())

    def stacks(self) -> str:
        """What every worker is doing now: the stacks of all its threads."""
        texts = []
        with self._using:
            self._require_open()
            self._read_stacks(0)  # what somebody else's signal has brought
            for worker, made in enumerate(self.processes):
                header = self._file.header
                if not header.get(header.WORKERS + worker):
                    said = "it has not started yet"  # and the signal would end it
                elif made.exitcode is not None:
                    said = f"it has ended with exit code {made.exitcode}"
                else:
                    os.kill(made.pid or 0, STACKS_SIGNAL)
                    said = self._read_stacks(_ANSWER_S).strip() or "it does not answer"
                texts.append(f"worker {worker} (pid {made.pid}):\n{said}")
        return "\n".join(texts)

    def _read_stacks(self, first_s: float) -> str:
        text, patience_s = b"", first_s
        while select.select([self._stacks], [], [], patience_s)[0]:
            more = os.read(self._stacks, 1 << 16)
            if not more:
                break
            text += more
            patience_s = _QUIET_S
        return text.decode(errors="replace")

    def close(self, *, stop_s: float | None = None) -> None:
        """End all workers: by request, then by signal.

        Idempotent, thread-safe: whoever comes second waits, too. Does nothing in a forked child.

        Args:
            stop_s: time that they have to finish what they are doing; None: some seconds.
        """
        if self._owner != os.getpid():
            return  # a thread of the parent may have held the lock at the fork
        with self._closing:
            if not self._closed:
                self._closed = True
                self._end(_STOP_S if stop_s is None else stop_s)

    def wait_for_end(self) -> None:
        """If a thread is closing it, wait until that is done."""
        if self._closed and self._owner == os.getpid():
            with self._closing:
                pass

    def _end(self, stop_s: float) -> None:
        self._file.header.set(self._file.header.STOP, 1)
        try:
            for tasks in self._tasks:
                with contextlib.suppress(OSError):  # full: the worker looks at STOP after its next message
                    os.write(tasks.fileno(), _FRAME.pack(0))  # where another process may hold this end
                tasks.close()
            self._join(stop_s, None)
            self._join(_KILL_S, process.BaseProcess.terminate)
        finally:  # interrupted: at once
            self._join(_KILL_S, process.BaseProcess.kill)
            # A thread that waits for answers has been woken by the end of the workers.
            if self._using.acquire(timeout=_KILL_S):
                self._close_ends()
                self._using.release()

    def _join(self, seconds: float, first: Callable[[process.BaseProcess], None] | None) -> None:
        alive = [made for made in self.processes if made.exitcode is None]
        if first:
            for made in alive:
                first(made)
        deadline = time.monotonic() + seconds
        for made in alive:
            made.join(max(0.0, deadline - time.monotonic()))

    def _close_ends(self) -> None:
        if self._server is not None:
            stop_using(self._server)
        os.close(self._answers)
        os.close(self._stacks)
        for made in self.processes:
            if made.exitcode is not None:
                made._popen.close()  # type: ignore[attr-defined]

    def leave_to_parent(self) -> None:
        """In a forked child: close our copies of the parent's ends, lest workers think that it lives."""
        if not self._closed:
            self._closed = True
            for tasks in self._tasks:
                tasks.close()
            os.close(self._answers)
            os.close(self._stacks)


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _wait_for_ends() -> None:
    """A daemon thread that closes a pool when the program ends would be stopped in the middle of it."""
    for pool in list(_pools):
        pool.wait_for_end()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _start_of(server: Server | None, context: BaseContext | None) -> tuple[str, str]:
    """How processes start, and why so."""
    if server is None:
        assert context is not None
        return str(context.get_start_method()), "it was asked for, or the dataset cannot be sent"
    if server.not_forked:
        return "fork server", f"it was not forked from this process: {server.not_forked}"
    return "forked server", "when the first loader was made, this process had one thread and no GPU open"


def require_descriptors(num_workers: int) -> None:
    """Raise RuntimeError if the process may not open what so many workers need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = sum(int(fd) < most for fd in os.listdir("/proc/self/fd"))
    except OSError:
        return
    needed = 3 * num_workers + 16
    if most != resource.RLIM_INFINITY and used + needed > most:
        raise RuntimeError(
            f"{num_workers} workers need {needed} file descriptors, and {used} of at most {most} are open in "
            "this process; raise the limit (ulimit -n) or lower num_workers"
        )


def _enlarge(pipe: int) -> bool:
    """Let a pipe hold more, if it may; whether it holds more now."""
    try:
        import fcntl

        if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < _PIPE_BYTES:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            return True
    except (OSError, AttributeError):  # as much as this user may have, or another system
        pass
    return False


def _stdio() -> tuple[Descriptor, ...]:
    """Our standard output and error as they are now: the fork server has those of its start."""
    found = []
    for fd in (1, 2):
        try:
            os.fstat(fd)
        except OSError:
            return ()
        found.append(Descriptor(fd))
    return tuple(found)


def begin(start: WorkerStart) -> None:
    """First thing in a worker: it ends with its parent, writes where it writes, and tells its stacks."""
    if start.watched:
        end_with_parent()
    release_server()
    for fd, given in zip((1, 2), start.stdio, strict=False):
        os.dup2(given.fd, fd)
        os.close(given.fd)
    if start.environment is not None:
        os.environ.clear()
        os.environ.update(start.environment)
    faulthandler.register(STACKS_SIGNAL, file=start.stacks.fd, all_threads=True, chain=False)
    header = Header(start.memory.fd)
    header.set(header.WORKERS + start.worker, 1)
    signal.signal(signal.SIGINT, _interrupted if start.interruptible else signal.SIG_IGN)
    let_interrupt()


def _interrupted(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would strike while we end
    raise KeyboardInterrupt
