"""Worker processes that take tasks from one pipe each and respond through one pipe they all share.

Responses are records of integers, shorter than `PIPE_BUF`: the kernel writes each as a whole, so workers
need no lock, the parent reads many with one call, and a worker that is killed cannot leave half a record or
a held lock behind. What a record describes lies in the shared file (see `shared_arena`). Messages to a
worker never block the parent: what a pipe does not hold yet waits here.

Processes start as `multiprocessing` says (see `starting`); signals that are sent to the whole job do nothing
there (`signals`). Where they are forked and may be replaced, a `template` is forked before them.

Workers end with the parent, however it ends: its ends of the pipes close, since processes forked from it
close theirs at once; and the kernel tells even those that hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import resource
import select
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, process, util
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from prefetch.memory.lifetimes import only_ours
from prefetch.workers import STOP_S
from prefetch.workers.deaths import WorkerDiedError, memory_note, oom_kills
from prefetch.workers.shared_arena import Header, SharedFile
from prefetch.workers.signals import STACKS_SIGNAL, forking, signals_held, tell_frames
from prefetch.workers.starting import ByValueContext, is_fork, new_process
from prefetch.workers.template import Template, TemplateProcess
from prefetch.workers.worker_start import (
    ABOUT,
    NATIVE,
    RECORD,
    Descriptor,
    ProcessSettings,
    WorkerResponse,
    WorkerStart,
)

_KILL_S = 2.0
_STACKS_S = 2.0
"""A worker begins to write its stacks within this time."""
_ANSWER_S = 0.1, 0.5
"""The training thread waits no longer for what a worker says of where it stands, and asks once more."""
_QUIET_S = 0.25
"""Stacks have arrived when nothing more came for this long."""
_PIPE_BYTES = 1 << 20
_LONGEST_S = 1e6
"""`poll` takes no longer times."""
_FUTEX = {"202", "98"}
"""The number of that call, of x86-64 and of others."""
_RECORDS = 1024
"""The number of responses that are read at once."""
_FRAME = struct.Struct("!i")
"""The head that `Connection.recv_bytes` expects before a message: its length."""


class WorkerPool:
    """Processes with their pipes; `close` ends them all.

    Args:
        target: called in each process with a `WorkerStart`; importable by name.
        file: the shared file.
        context: how processes start.
        inherited: handed to forked workers as it is.
        passed: descriptors that every worker gets a copy of; open as long as workers may be replaced.
        region_limit: bytes of free slabs that a worker keeps.
        is_locked: whether they are page-locked where this process views them.
        replaces: whether workers may be replaced.
        stop_s: time that workers have to end by themselves, together.

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
        context: BaseContext,
        inherited: Any = None,
        passed: Sequence[int] = (),
        region_limit: int,
        is_locked: bool = False,
        replaces: bool = False,
        stop_s: float = STOP_S,
    ) -> None:
        require_descriptors(num_workers)
        self.num_workers, self.context = num_workers, context
        self._file, self._stop_s = file, stop_s
        self.regions = [*range(num_workers)]
        """The region of the file that each worker has."""
        self._spare_regions = itertools.count(num_workers + 1)
        """Behind the first ones comes this process's own, if it has one."""
        self._owner = os.getpid()
        self._closing = threading.RLock()  # held until all have ended; a finaliser may run meanwhile
        self._using = threading.RLock()  # guards the pipes' parent ends while they are in use
        self._asking = threading.Lock()  # guards that of the stacks, also while another thread waits
        self._waking = threading.RLock()  # held while a wait is ended from elsewhere, and as ends are closed
        self._closed = False
        self.processes: list[process.BaseProcess] = []
        self._tasks: list[connection.Connection] = []
        """Our end of each process's pipe."""
        self._sentinels: dict[int, int] = {}
        """The worker of each descriptor."""
        self._waiting: list[deque[memoryview]] = [deque() for _ in range(num_workers)]
        self._poll = select.poll()
        self._template: Template | None = None
        tell_frames()
        self._oom_kills = oom_kills()
        self._responses, self._responses_writer = os.pipe()
        self._stacks, self._stacks_writer = os.pipe()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._own_ends = self._responses, self._stacks, self._woken
        only_ours(self)
        # After all that may close it: a daemon thread at that would be stopped in the middle of it.
        self._at_exit = util.Finalize(None, self.close, exitpriority=0)
        try:
            for fd in (self._responses_writer, self._stacks_writer):
                _enlarge(fd)
            for fd in (self._responses, self._stacks, self._stacks_writer):  # stacks nobody reads are dropped
                os.set_blocking(fd, False)
            self._target = target
            self._common = {
                **self._start_arguments(),
                "region_limit": region_limit,
                "is_locked": is_locked,
                "inherited": inherited,
                "passed": tuple(map(Descriptor, passed)),
            }
            if replaces and is_fork(context):
                with _forked_by(self):
                    self._template = Template(context, self._run_worker)
            for worker in range(num_workers):
                self._start(worker)
        except BaseException:
            self.close(stop_s=0)
            raise
        self._poll.register(self._responses, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._answered = set[int]()
        """Workers that have done something."""
        self._blocked: dict[int, int] = {}
        """Workers whose pipe is full, by the descriptor of our end of it."""

    def _start_arguments(self) -> dict[str, Any]:
        """Fields of `WorkerStart` that are the same for all workers, those that come later included."""
        file, forks, by_value = self._file, is_fork(self.context), isinstance(self.context, ByValueContext)
        return {
            "num_workers": self.num_workers,
            "memory": Descriptor(file.fd),
            "message_offset": file.message_offset,
            "message_bytes": file.message_bytes,
            "first_region": file.region_offset(0),
            "region_bytes": file.region_bytes,
            "responses": Descriptor(self._responses_writer),
            "stacks": Descriptor(self._stacks_writer),
            "settings": None if forks else ProcessSettings.here(by_value=by_value),
            "training": self._owner,
            "parent": self._owner if forks else 0,
            "collects": gc.isenabled(),
            "interruptible": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        }

    def _start(self, worker: int) -> None:
        reader, tasks = multiprocessing.Pipe(duplex=False)
        self._tasks[worker : worker + 1] = [tasks]
        os.set_blocking(tasks.fileno(), False)
        with reader:
            child = self._forked(worker, reader)
        self.processes[worker : worker + 1] = [child]
        self._sentinels[child.sentinel] = worker
        self._poll.register(child.sentinel, select.POLLIN)
        # We end it ourselves. A forked child of ours that exits must neither wait for it nor end it.
        process._children.discard(child)  # type: ignore[attr-defined]

    def _forked(self, worker: int, tasks: connection.Connection) -> Any:
        region = self.regions[worker]
        if self._template is not None and region >= self.num_workers:
            child: Any = TemplateProcess(self._template, worker, region, tasks.fileno())
            try:
                child.start()
            except ConnectionError as error:
                died = WorkerDiedError([(worker, self._template.pid, self._template.exit_code())])
                died.add_note("all workers of a session are forked from that process; begin a new loop")
                raise died from error
            return child
        start = WorkerStart(worker=worker, region=region, tasks=tasks, **self._common)
        child = new_process(self.context, self._target, start, f"dataflow-worker-{worker}")
        child.is_shielded = True
        with _forked_by(self), forking() if is_fork(self.context) else signals_held():
            child.start()
        return child

    def _run_worker(self, worker: int, region: int, tasks: int) -> None:
        """In a process that a template has forked."""
        common = {**self._common, "parent": os.getppid()}
        reader = connection.Connection(tasks, writable=False)
        self._target(WorkerStart(worker=worker, region=region, tasks=reader, **common))

    def replace(self, worker: int) -> None:
        """Start a process in the place of one that has died, which works in another region of the file.

        What was sent to the dead one and not answered is lost; what it made stays until its last view dies.
        """
        with self._using:
            self._require_open()
            dead, tasks = self.processes[worker], self._tasks[worker]
            dead.kill()  # its server has ended: it may live for a moment, and write
            dead.join(_KILL_S)
            self._file.abandon(self.regions[worker])
            self.regions[worker] = next(self._spare_regions)
            self._poll.unregister(dead.sentinel)
            del self._sentinels[dead.sentinel]
            if self._blocked.pop(tasks.fileno(), None) is not None:
                self._poll.unregister(tasks.fileno())
            self._waiting[worker].clear()
            tasks.close()
            if dead.exitcode is not None:
                dead._popen.close()  # type: ignore[attr-defined]
            self._file.header.set(Header.WORKERS + worker, 0)
            self._answered.discard(worker)
            self._start(worker)

    def _require_open(self) -> None:
        if self._closed:
            if self._owner != os.getpid():
                raise RuntimeError(
                    f"the workers of this iterator belong to process {self._owner}; in a process forked "
                    "from it, begin a new loop"
                )
            raise RuntimeError("the loader was closed inside this loop")

    def send(self, worker: int, request: Sequence[Any]) -> None:
        """Give a worker a request, and the offsets of what has died of its region; it waits until it is free.

        What a dead worker will never read is dropped: `wait` tells of its death.
        """
        with self._using:
            self._require_open()
            returned = self._file.take_returned(self.regions[worker])
            message = pickle.dumps((*request, returned), pickle.HIGHEST_PROTOCOL)
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

    def receive(self) -> list[WorkerResponse]:
        """The responses that are there, without waiting."""
        with self._using:
            self._require_open()
            for worker in list(self._blocked.values()):
                self._flush(worker)
            try:
                data = os.read(self._responses, _RECORDS * RECORD.size)
            except BlockingIOError:
                return []
            records = map(WorkerResponse._make, RECORD.iter_unpack(data))
            responses = [record for record in records if self.regions[record.runner] == record.region]
            self._answered.update(response.runner for response in responses)
            return responses

    def wake(self) -> None:
        """Let a wait end, or the next one; any thread may."""
        if self._closed:  # as in a forked child, where nobody would release the lock
            return
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    def wait(self, timeout_s: float | None) -> list[WorkerResponse]:
        """Wait for responses; [] when none came in time, or `wake` was called.

        Raises:
            WorkerDiedError: a worker has ended, and all its responses were received.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._using:
            while True:
                rest_s = _LONGEST_S if deadline is None else deadline - time.monotonic()
                ready = dict(self._poll.poll(1000 * min(max(0.0, rest_s), _LONGEST_S)))
                if responses := self.receive():
                    return responses
                if self._woken in ready:
                    os.eventfd_read(self._woken)
                    return []
                dead = [worker for fd, worker in self._sentinels.items() if fd in ready]
                if dead:
                    children = [(number, self.processes[number]) for number in dead]
                    for _, child in children:
                        child.join(_KILL_S)
                    ended = [(number, child.pid or 0, child.exitcode) for number, child in children]
                    raise WorkerDiedError(ended, memory_note(self._oom_kills))
                if not ready and rest_s <= 0:
                    return []

    @property
    def started(self) -> bool:
        """Return whether every worker runs."""
        first = Header.WORKERS
        return bool(self._file.header.words[first : first + self.num_workers].all())

    def stacks(self) -> str:
        """Return the stacks of all threads of every worker."""
        texts = []
        with self._using:
            self._require_open()
            self._read_stacks(0)  # what somebody else's signal has brought
            for worker, child in enumerate(self.processes):
                header, pid = self._file.header, child.pid
                if not header.get(header.WORKERS + worker):
                    text = "it has not started yet"  # and the signal would end it
                elif child.exitcode is not None:
                    text = f"it has ended with exit code {child.exitcode}"
                else:
                    os.kill(pid or 0, STACKS_SIGNAL)
                    text = self._read_stacks(_STACKS_S).strip() or "it does not answer"
                    # Native frames only where a process may stand still for being forked.
                    cure = self.standstill(worker)
                    text = f"{text}{cure}" if cure else text.split(NATIVE)[0].strip()
                texts.append(f"worker {worker} (pid {pid}):\n{text}")
        return "\n".join(texts)

    def standstill(self, worker: int) -> str:
        """Say what may hold up a process that has answered nothing since it was forked; "": nothing does."""
        if worker in self._answered or not is_fork(self.context):
            return ""
        try:
            call = Path(f"/proc/{self.processes[worker].pid}/syscall").read_text().split()[0]
        except OSError:
            return ""
        if call not in _FUTEX:
            return ""
        return (
            "\nIt waits for a lock and has answered nothing since it was forked: a thread of the training "
            'process that it has not got may have held that lock. multiprocessing_context="forkserver" '
            "copies no thread's locks."
        )

    def about(self, worker: int) -> str:
        """Its stacks, and what a worker says of them, if it can within `_ANSWER_S`. Any thread."""
        pid, words = self.processes[worker].pid, self._file.header.words
        if pid is None or not words[Header.WORKERS + worker]:
            return ""
        text = b""
        with self._asking:
            while not self._closed and select.select([self._stacks], [], [], 0)[0]:
                os.read(self._stacks, 1 << 16)  # the answer to a question before
            for wait_s in _ANSWER_S:  # a signal right before a call that blocks is seen when another comes
                if self._closed or ABOUT.encode() in text:
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACKS_SIGNAL)
                while ABOUT.encode() not in text or not text.endswith(b"\n"):
                    if not select.select([self._stacks], [], [], wait_s)[0]:
                        break
                    text += os.read(self._stacks, 1 << 16)
        return text.decode(errors="replace")

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

        Idempotent, thread-safe: whoever comes second waits, too. In a forked child only copies are closed.

        Args:
            stop_s: time that they have to finish what they are doing; None: that of the pool.
        """
        if self._owner != os.getpid():
            self._close_parents_ends()
            return  # a thread of the parent may have held the lock at the fork
        with self._closing:
            if not self._closed:
                self._closed = True
                try:
                    self._end(self._stop_s if stop_s is None else stop_s)
                finally:
                    self._at_exit.cancel()

    def _end(self, stop_s: float) -> None:
        self._file.header.set(self._file.header.STOP, 1)
        try:
            for tasks in self._tasks:
                with contextlib.suppress(OSError):  # full: the worker looks at STOP after its next message
                    os.write(tasks.fileno(), _FRAME.pack(0))  # where another process may hold this end
                tasks.close()
            for worker, child in enumerate(self.processes):  # it imports, and hears nothing of this
                if not self._file.header.get(Header.WORKERS + worker):
                    child.kill()
            self._join(stop_s, None)
            self._join(_KILL_S, process.BaseProcess.terminate)
        finally:  # interrupted: at once
            self._join(_KILL_S, process.BaseProcess.kill)
            # A thread that waits for responses has been woken by the end of the workers.
            if self._using.acquire(timeout=_KILL_S):
                self._close_ends()
                self._using.release()

    def _join(self, seconds: float, first: Callable[[process.BaseProcess], None] | None) -> None:
        alive = [child for child in self.processes if child.exitcode is None]
        if first:
            for child in alive:
                first(child)
        deadline = time.monotonic() + seconds
        for child in alive:
            child.join(max(0.0, deadline - time.monotonic()))

    def _close_ends(self) -> None:
        with self._asking, self._waking:  # for both times of `_ANSWER_S` at most
            for fd in (*self._own_ends, self._responses_writer, self._stacks_writer):
                os.close(fd)
        for child in self.processes:
            if child.exitcode is not None:
                child._popen.close()  # type: ignore[attr-defined]
        if self._template is not None:
            self._template.close()

    def _close_parents_ends(self) -> None:
        """In a forked child: close our copies of the parent's ends, lest workers think that it lives.

        The other ends are those of a worker that was forked, if it is one of this pool.
        """
        self._at_exit.cancel()
        if not self._closed:
            self._closed = True
            for tasks in self._tasks:
                tasks.close()
            for fd in self._own_ends:
                os.close(fd)
            if getattr(_forking, "pool", None) is not self:
                os.close(self._responses_writer)
                os.close(self._stacks_writer)


_forking = threading.local()


@contextlib.contextmanager
def _forked_by(pool: WorkerPool) -> Iterator[None]:
    """Inside, this thread forks workers of a pool."""
    _forking.pool = pool
    try:
        yield
    finally:
        _forking.pool = None


def require_descriptors(num_workers: int) -> None:
    """Raise RuntimeError if the process may not open what so many workers need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = sum(int(fd) < most for fd in os.listdir("/proc/self/fd"))
    except OSError:
        return
    needed = 4 * num_workers + 16
    if most != resource.RLIM_INFINITY and used + needed > most:
        raise RuntimeError(
            f"{num_workers} workers need {needed} file descriptors, and {used} of at most {most} are open in "
            "this process; raise the limit (ulimit -n) or lower num_workers"
        )


def _enlarge(pipe: int) -> bool:
    """Let a pipe hold more, if it may; whether it holds more now."""
    with contextlib.suppress(OSError):  # as much as this user may have
        if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < _PIPE_BYTES:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            return True
    return False
