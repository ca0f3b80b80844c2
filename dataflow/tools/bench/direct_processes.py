"""Direct local reads by threads of several processes, which do not hand one interpreter's lock around.

In one process that lock is the limit of small reads: at 4 KiB, 16 in flight, half of what fio gets. With two
processes a core it is not, and more gained nothing (docs/benchmarking.md). They cannot be forked here,
where threads run: one process without threads is started, which forks them for each case
(`dataflow.tools.bench.reader_process`), and ends with this object.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from dataflow.tools.bench.reader_process import Asked
from dataflow.tools.bench.reads import Case, Reads
from prefetch.workers.fork_server import interrupts_held
from sharding.blocks import Shard
from sharding.errors import DataflowError

_START_S = 60.0
_LATE_S = 60.0
_END_S = 5.0
_PER_CORE = 2
_NO_THREADS = {f"{name}_NUM_THREADS": "1" for name in ("MKL", "OMP", "OPENBLAS")}


class DirectProcesses:
    """Reads local shards with `O_DIRECT`. For one thread; a context manager, which owns the processes.

    Args:
        shards: what is read.
        cores: those that the readers may use.
        late_s: how long after its time a case may end.
    """

    def __init__(self, shards: Sequence[Shard], cores: int, *, late_s: float = _LATE_S) -> None:
        self._most, self._late_s = _PER_CORE * cores, late_s
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs, interrupts_held():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dataflow.tools.bench.reader_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_NO_THREADS, "PYTHONPATH": path},
            )
        self.pid = self._process.pid
        """Of the process that starts readers."""
        self._send(shards)

    def run(
        self, case: Case, seconds: float, reading: Callable[[list[int]], None] = lambda pids: None
    ) -> Reads:
        """Read for some seconds; reads in flight at the end are finished and count.

        Args:
            case: what is asked.
            seconds: when to stop asking.
            reading: hears of the ids of the processes that read, once they do.

        Raises:
            ShardReadError: the first that a read raised; all readers have ended.
            DataflowError: reads hang, or a process was ended from without or could not be started.
        """
        self._send(Asked(case, seconds, min(case.concurrency, self._most)))
        reading(self._answer(_START_S))
        found: Reads = self._answer(seconds + self._late_s)
        return found

    def _send(self, said: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `_answer` says so
            self._connection.send(said)

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
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
