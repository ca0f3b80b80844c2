"""Jobs of Slurm by submitit, one for each call."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import submitit
from submitit.core.utils import UncompletedJobError

from dataflow.executors.errors import EngineError, shown
from dataflow.executors.starting import EngineRequest, cancelling

_NAMES = {
    "cpus": "cpus_per_task",
    "memory_gb": "mem_gb",
    "minutes": "timeout_min",
    "partition": "slurm_partition",
}
_MINUTES = 60
_JOBS = 64
_LOOK_S = 1.0
"""Seconds between two looks for a job's result: Slurm tells nobody when it is there."""


class SlurmEngine(ThreadPoolExecutor):
    """Calls as jobs, each waited for by a thread."""

    def __init__(self, jobs: submitit.AutoExecutor, workers: int) -> None:
        super().__init__(workers, thread_name_prefix="dataflow-engine")
        self._jobs = jobs
        self._lock, self._ended, self._running = threading.Lock(), threading.Event(), set[Any]()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in a job; see `Executor`."""
        return super().submit(self._call, partial(function, *args, **kwargs))

    def _call(self, call: Callable[[], Any]) -> Any:
        with self._lock:
            job = self._jobs.submit(call)
            self._running.add(job)
        while not job.done():
            if self._ended.wait(_LOOK_S):
                raise CancelledError
        self._running.discard(job)
        try:
            return job.result()
        except UncompletedJobError as error:
            raise BrokenExecutor(str(error)) from error

    def cancel(self) -> None:
        """Cancel the jobs that run, and those that wait."""
        self._ended.set()
        self.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for job in self._running:
                job.cancel(check=False)


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`. Options: those of submitit, a folder that all nodes see, and cluster=local."""
    request.allow("cluster", "folder", *_NAMES, prefix="slurm_")
    cluster = request.options.get("cluster", "slurm")
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise EngineError(
            "Slurm's command sbatch was not found: run this where jobs are submitted, or try it on this "
            "machine with the option cluster=local"
        )
    texts = {name: text for name, text in request.options.items() if name in _NAMES or "slurm_" in name}
    values: dict[str, int | str] = {"timeout_min": _MINUTES}
    values |= {_NAMES.get(name, name): int(text) if text.isdigit() else text for name, text in texts.items()}
    workers = request.workers or _JOBS
    # The folder is this user's alone: tasks may hold the keys of a store.
    with TemporaryDirectory(prefix=".dataflow-jobs-", dir=request.options.get("folder", ".")) as folder:
        jobs = submitit.AutoExecutor(folder, cluster=cluster)
        try:
            jobs.update_parameters(name="dataflow", **values)
        except Exception as error:  # of an option that it does not have, a NameError
            raise ValueError(f"submitit refused an option ({shown(error)})") from error
        request.say(f"{cluster}: {workers} jobs at a time, {values['timeout_min']} minutes each")
        executor = SlurmEngine(jobs, workers)
        with executor, cancelling(executor.cancel):
            yield executor
