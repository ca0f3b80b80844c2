"""Worker processes that take tasks from one pipe each and answer through one pipe they all share.

Answers are fixed-size records, shorter than `PIPE_BUF`: the kernel writes each as a whole, so workers need
no lock, the parent reads many with one call, and a worker that is killed cannot leave half a record or a
held lock behind. What a record describes lies in the shared file (see `shared_arena`).

Processes come from a fork server of our own unless the caller names a start method: it has torch
imported and no threads, so a worker starts in milliseconds and inherits nothing of the parent's locks,
clients and CUDA context. It does not import the parent's main module, whose objects travel by value;
so a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, popen_forkserver, process, reduction, spawn, util
from multiprocessing.context import BaseContext, set_spawning_popen
from typing import Any, NamedTuple

from prefetch.shared_arena import Header, SharedFile

STACKS_SIGNAL = signal.SIGUSR2
_QUIET_S = 0.25
"""Stacks have arrived when none came for this long."""
_STOP_S = 5.0
"""Time that workers have to end by themselves, together."""
_KILL_S = 2.0
_PIPE_BYTES = 1 << 20
_PRELOADED = ["torch", "numpy", "dataflow.worker_process"]


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
    total: int
    """All bytes of shared memory that the answer holds."""


_ANSWER = struct.Struct("<iiqqqqqqqq")


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
    parent_ends: tuple[connection.Connection, ...]
    """Ends of pipes that a forked worker must close: it would keep itself alive when the parent dies."""

    def answer(self, answer: Answer) -> None:
        """Tell the parent. Raises BrokenPipeError when it has gone."""
        os.write(self.answers.fd, _ANSWER.pack(*answer))


Modules = frozenset[tuple[str, int]]
"""Names of modules, each with the time its file was changed."""


class _Server(forkserver.ForkServer):
    """A process with modules imported, from which workers are forked; started when first needed."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self.modules = modules
        self.owner = os.getpid()
        self.set_forkserver_preload([*_PRELOADED, *sorted(name for name, _ in modules)])

    def retire(self) -> None:
        """End it with its last worker."""
        if self._forkserver_alive_fd is not None:  # type: ignore[has-type]
            os.close(self._forkserver_alive_fd)  # type: ignore[has-type]
            self._forkserver_alive_fd = None
            _retired.append(self._forkserver_pid)  # type: ignore[attr-defined]


_server: _Server | None = None
_server_lock = threading.Lock()  # guards _server and _retired
_retired: list[int] = []
"""Servers that will end, to be waited for."""


def warm_up(modules: Modules = frozenset()) -> None:
    """Start the fork server, without waiting for it, with these modules imported besides torch.

    One that runs already is kept if it has them; otherwise the next workers come from a new one.
    """
    global _server
    with _server_lock:
        _retired[:] = [pid for pid in _retired if not _has_ended(pid)]
        if _server is None or _server.owner != os.getpid():  # a forked child starts its own
            _server = _Server(modules)
        elif not modules <= _server.modules:
            names = {name for name, _ in modules}
            kept = {(name, changed) for name, changed in _server.modules if name not in names}
            _server.retire()
            _server = _Server(modules | kept)
        _server.ensure_running()


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


class _ServerPopen(popen_forkserver.Popen):
    """The standard library's, but from our server and without importing the main module."""

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        assert _server is not None
        self.sentinel, writer = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parent_writer = os.dup(writer)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_writer, self.sentinel))  # type: ignore[attr-defined]
        with open(writer, "wb", closefd=True) as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _ServerProcess(process.BaseProcess):
    _start_method = "forkserver"

    @staticmethod
    def _Popen(process_obj: Any) -> _ServerPopen:  # noqa: N802  (the standard library's name)
        return _ServerPopen(process_obj)


class WorkerPool:
    """Processes with their pipes; `close` ends them all.

    Args:
        target: called in each process with a `WorkerStart`; importable by name.
        file: the shared file.
        context: how processes start; None: from our fork server.
        inherited: handed to forked workers as it is.
        region_limit: bytes of free slabs that a worker keeps.
        modules: what the processes will import, for our fork server to have imported already.

    Used by one thread, except that `close` may run in a finaliser.
    """

    def __init__(
        self,
        target: Callable[[WorkerStart], None],
        num_workers: int,
        file: SharedFile,
        *,
        context: BaseContext | None,
        inherited: Any = None,
        region_limit: int,
        modules: Modules = frozenset(),
    ) -> None:
        self.num_workers = num_workers
        self._file = file
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self.processes: list[process.BaseProcess] = []
        self._tasks: list[connection.Connection] = []
        if context is None:
            warm_up(modules)
        forked = context is not None and context.get_start_method() == "fork"
        self._answers, writer = os.pipe()
        self._stacks, stacks_writer = os.pipe()
        try:
            with contextlib.suppress(OSError, AttributeError):
                import fcntl

                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            os.set_blocking(self._answers, False)
            os.set_blocking(self._stacks, False)
            for worker in range(num_workers):
                start, length = file.region_span(worker)
                reader, tasks = multiprocessing.Pipe(duplex=False)
                self._tasks.append(tasks)
                given = WorkerStart(
                    worker,
                    num_workers,
                    Descriptor(file.fd),
                    file.message_offset,
                    file.message_bytes,
                    start,
                    length,
                    region_limit,
                    reader,
                    Descriptor(writer),
                    Descriptor(stacks_writer),
                    () if context else _stdio(),
                    None if context else dict(os.environ),
                    inherited,
                    tuple(self._tasks) if forked else (),
                )
                make: Any = _ServerProcess if context is None else context.Process  # type: ignore[attr-defined]
                made = make(target=target, args=(given,), name=f"dataflow-worker-{worker}")
                made.start()
                self.processes.append(made)
                reader.close()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(writer)
            os.close(stacks_writer)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._sentinels = {made.sentinel: worker for worker, made in enumerate(self.processes)}
        for sentinel in self._sentinels:
            self._poll.register(sentinel, select.POLLIN)

    def send(self, worker: int, message: bytes) -> None:
        """Give a message to a worker; it waits in the pipe until the worker is free.

        What a dead worker will never read is dropped: `wait` tells of its death.
        """
        with contextlib.suppress(BrokenPipeError):
            self._tasks[worker].send_bytes(message)

    def receive(self) -> list[Answer]:
        """The answers that are there, without waiting."""
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
        ready = self._poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))
        answers = self.receive()
        if not answers:
            dead = [self._sentinels[fd] for fd, _ in ready if fd in self._sentinels]
            if dead:
                raise WorkerDiedError([(w, self.processes[w].pid or 0, self._exit_code(w)) for w in dead])
        return answers

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
        for worker, made in enumerate(self.processes):
            text = b""
            header = self._file.header
            if not header.get(header.WORKERS + worker):
                said = "it has not started yet"  # and the signal would end it
            elif made.exitcode is not None:
                said = f"it has ended with exit code {made.exitcode}"
            else:
                os.kill(made.pid or 0, STACKS_SIGNAL)
                while select.select([self._stacks], [], [], _QUIET_S)[0]:
                    more = os.read(self._stacks, 1 << 16)
                    if not more:
                        break
                    text += more
                said = text.decode(errors="replace").strip() or "it does not answer"
            texts.append(f"worker {worker} (pid {made.pid}):\n{said}")
        return "\n".join(texts)

    def close(self) -> None:
        """End all workers: by request, then by signal.

        Idempotent, thread-safe; does nothing in a forked child.
        """
        if self._owner != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._file.header.set(self._file.header.STOP, 1)
        for tasks in self._tasks:
            with contextlib.suppress(OSError):  # full: the worker looks at STOP after its next message
                os.set_blocking(tasks.fileno(), False)
                tasks.send_bytes(b"")  # another process may hold this end: closing it alone would not tell
            with contextlib.suppress(OSError):
                tasks.close()
        self._join(_STOP_S, None)
        self._join(_KILL_S, process.BaseProcess.terminate)
        self._join(_KILL_S, process.BaseProcess.kill)
        os.close(self._answers)
        os.close(self._stacks)

    def _join(self, seconds: float, first: Callable[[process.BaseProcess], None] | None) -> None:
        alive = [made for made in self.processes if made.exitcode is None]
        if first:
            for made in alive:
                first(made)
        deadline = time.monotonic() + seconds
        for made in alive:
            made.join(max(0.0, deadline - time.monotonic()))


class WorkerDiedError(RuntimeError):
    """Worker processes ended that should not have.

    Attributes:
        workers: (number, process id, exit code) of each; a negative exit code is a signal's number.
    """

    def __init__(self, workers: Sequence[tuple[int, int, int | None]]) -> None:
        super().__init__(workers)
        self.workers = list(workers)

    def __str__(self) -> str:
        pids = ", ".join(str(pid) for _, pid, _ in self.workers)
        parts = [f"DataLoader worker (pid(s) {pids}) exited unexpectedly."]
        for _, pid, code in self.workers:
            if code is not None and code < 0:
                name = signal.strsignal(-code) or f"signal {-code}"
                parts.append(f"DataLoader worker (pid {pid}) is killed by signal: {name}.")
                if -code == signal.SIGKILL:
                    parts.append(_memory_said())
            elif code is not None:
                parts.append(
                    f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. Its output "
                    "may tell why; num_workers=0 runs the same code in this process."
                )
        return " ".join(filter(None, parts))


def _memory_said() -> str:
    """What the cgroup says about memory, as far as it says anything."""
    facts = {}
    for name in ("memory.events", "memory.current", "memory.max"):
        with contextlib.suppress(OSError), open(f"/sys/fs/cgroup/{name}") as file:
            facts[name] = file.read().split()
    events = facts.get("memory.events", [])
    counts = dict(zip(events[::2], events[1::2], strict=False))
    if not counts:
        return "SIGKILL often means that the machine ran out of memory."
    current, limit = " ".join(facts.get("memory.current", "?")), " ".join(facts.get("memory.max", "?"))
    return (
        f"SIGKILL often means out of memory: this cgroup counts {counts.get('oom_kill', '?')} processes "
        f"killed for memory; it uses {current} bytes now, of at most {limit}."
    )


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
    """First thing in a worker: its output goes where the parent's goes, and it answers with its stacks."""
    for end in start.parent_ends:
        end.close()
    for fd, given in zip((1, 2), start.stdio, strict=False):
        os.dup2(given.fd, fd)
        os.close(given.fd)
    if start.environment is not None:
        os.environ.clear()
        os.environ.update(start.environment)
    faulthandler.register(STACKS_SIGNAL, file=start.stacks.fd, all_threads=True, chain=False)
    header = Header(start.memory.fd)
    header.set(header.WORKERS + start.worker, 1)
