"""Local reads around the page cache, by `preadv` into aligned memory: what the device does, as fio asks it.

Descriptors are opened once, as a loader of few large shards would; of very many shards, once a read.

Cases are read by threads of several processes, which do not hand one interpreter's lock around. In one
process that lock is the limit of small reads: at 4 KiB, 16 in flight, half of what fio gets. With two
processes a core it is not, and more gained nothing (docs/notes/control.md). They cannot be forked
here, where threads run: one process without threads is started, which forks them for each case
(`dataflow.tools.bench.reader_process`), and ends with the object that started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dataflow.tools.bench.reads import Case, CaseRequest, CaseTimes
from prefetch.workers.signals import signals_held
from sharding.blocks import Shard
from sharding.catalog.storage import failure_text
from sharding.errors import DataflowError, ShardReadError
from sharding.urls import local_path

_KEPT_OPEN = 256
_START_S = 60.0
_LATE_S = 60.0
_END_S = 5.0
_PER_CORE = 2
_NO_THREADS = {f"{name}_NUM_THREADS": "1" for name in ("MKL", "OMP", "OPENBLAS")}


class DirectReader:
    """Reads local shards with `O_DIRECT`. Thread-safe; a context manager, which owns the descriptors.

    Args:
        shards: what is read.
        open_file: as `os.open`.

    Raises:
        ShardReadError: a shard is missing or forbidden, or its filesystem has no direct reads.
    """

    def __init__(self, shards: Sequence[Shard], open_file: Callable[[str, int], int] = os.open) -> None:
        self._open_file = open_file
        self._opened = ExitStack()
        self._descriptors: dict[str, int] = {}
        with self._opened:
            for shard in shards[:_KEPT_OPEN]:
                descriptor = self._open(shard)
                self._opened.callback(os.close, descriptor)
                self._descriptors[shard.url] = descriptor
            self._opened = self._opened.pop_all()

    def read_into(self, shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out`, [n] aligned as are n and `offset`, from the shard; its end may be short of that."""
        descriptor = self._descriptors.get(shard.url)
        try:
            if descriptor is None:
                got = self._read_once(shard, offset, out)
            else:
                got = os.preadv(descriptor, [out.data], offset)
        except ShardReadError:
            raise
        except OSError as error:
            raise ShardReadError(shard.url, failure_text(error), offset, stage="read") from error
        if got < len(out) and got < shard.size - offset:
            reason = f"wanted {out.nbytes} bytes, got {got}"
            raise ShardReadError(shard.url, reason, offset, stage="read")

    def _read_once(self, shard: Shard, offset: int, out: NDArray[np.uint8]) -> int:
        descriptor = self._open(shard)
        try:
            return os.preadv(descriptor, [out.data], offset)
        finally:
            os.close(descriptor)

    def _open(self, shard: Shard) -> int:
        try:
            return self._open_file(local_path(shard.url), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except PermissionError as error:
            raise ShardReadError(shard.url, failure_text(error), stage="read") from error
        except OSError as error:
            reason = f"cannot be read around the page cache ({error}); use --read buffered"
            raise ShardReadError(shard.url, reason, stage="read") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


class DirectProcesses:
    """Reads local shards with `O_DIRECT`. For one thread; a context manager, which owns the processes.

    Args:
        shards: what is read.
        cores: those that the readers may use.
        late_s: how long after its time a case may end.
        end_s: how long the processes may take to end.
    """

    def __init__(
        self, shards: Sequence[Shard], cores: int, *, late_s: float = _LATE_S, end_s: float = _END_S
    ) -> None:
        self._most, self._late_s, self._end_s = _PER_CORE * cores, late_s, end_s
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs, signals_held({signal.SIGINT}):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dataflow.tools.bench.reader_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_NO_THREADS, "PYTHONPATH": path},
            )
        self.pid = self._process.pid
        """The id of the process that starts readers."""
        self._send(shards)

    def run(
        self, case: Case, seconds: float, reading: Callable[[list[int]], None] = lambda pids: None
    ) -> CaseTimes:
        """Read for some seconds; reads in flight at the end are finished and count.

        Args:
            case: what is asked.
            seconds: when to stop asking.
            reading: hears of the ids of the processes that read, once they do.

        Raises:
            ShardReadError: the first that a read raised; all readers have ended.
            DataflowError: reads hang, or a process was ended from without or could not be started.
        """
        self._send(CaseRequest(case, seconds, min(case.concurrency, self._most)))
        reading(self._answer(_START_S))
        times: CaseTimes = self._answer(seconds + self._late_s)
        return times

    def _send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `_answer` says so
            self._connection.send(message)

    def _answer(self, within_s: float) -> Any:
        if not self._connection.poll(within_s):
            raise DataflowError(
                f"no answer from the processes that read within {within_s:g} s: the device hangs, or this "
                "machine has no time for them"
            )
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise DataflowError(f"process {self.pid}, which starts readers, was ended") from None
        if isinstance(answer, DataflowError):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()  # which ends it
        try:
            self._process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(self._end_s)
