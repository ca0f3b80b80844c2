"""Jobs of Spark, each of some calls: Spark gives those of an executor that was lost to others."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import cloudpickle
from pyspark import SparkConf, SparkContext

from dataflow.executors.errors import EngineError
from dataflow.executors.starting import EngineRequest, cancelling

_JOBS = 64
"""Jobs at a time, at most: each has a thread here."""


class SparkEngine(Executor):
    """Calls as jobs of a `SparkContext`: a job takes as many as wait, up to its share of the slots."""

    def __init__(self, context: SparkContext, threads: ThreadPoolExecutor) -> None:
        self._context, self._threads = context, threads
        self._waiting, self._lock = deque[tuple[Future[Any], bytes]](), threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in an executor of Spark; see `Executor`."""
        future: Future[Any] = Future()
        self._waiting.append((future, cloudpickle.dumps(partial(function, *args, **kwargs))))
        self._threads.submit(self._run)
        return future

    def _run(self) -> None:
        with self._lock:
            count = min(len(self._waiting), -(-self._context.defaultParallelism // _JOBS))
            taken = [self._waiting.popleft() for _ in range(count)]
        taken = [(future, call) for future, call in taken if future.set_running_or_notify_cancel()]
        if not taken:
            return
        try:
            self._context.setJobGroup("dataflow", "tasks of dataflow", interruptOnCancel=True)
            results = self._context.parallelize([call for _, call in taken], len(taken)).map(_call).collect()
            for (future, _), result in zip(taken, results, strict=True):
                future.set_result(result)
        except Exception as error:
            for future, _ in taken:
                future.set_exception(error)

    def cancel(self) -> None:
        """End the calls that run, and those that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._context.cancelJobGroup("dataflow")


def _call(call: bytes) -> Any:
    return cloudpickle.loads(call)()


@contextmanager
def start(request: EngineRequest) -> Iterator[Executor]:
    """See `engine`. Options: the address of the master, and what begins with "spark."."""
    request.allow("address", prefix="spark.")
    if not (shutil.which("java") or os.path.exists(f"{os.environ.get('JAVA_HOME')}/bin/java")):
        raise EngineError("Spark needs Java, which was not found: install Java 17, or set JAVA_HOME")
    conf = SparkConf().setAppName("dataflow")
    conf.setAll([(name, text) for name, text in request.options.items() if name.startswith("spark.")])
    # A cluster's call is tried four times; one in this process must be told.
    master = request.options.get("address") or conf.get("spark.master", f"local[{request.workers or '*'},4]")
    if master.startswith("spark://"):
        request.reach(master.partition(",")[0])
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with ExitStack() as opened:
        is_ours = SparkContext._active_spark_context is None
        context = SparkContext.getOrCreate(conf.setMaster(master))
        if is_ours:
            opened.callback(context.stop)
            context.setLogLevel("ERROR")
        if master.startswith("local"):
            request.say(f"spark: {master}, started here")
        else:
            request.joins(context.master)
        with ThreadPoolExecutor(_JOBS, thread_name_prefix="dataflow-engine") as threads:
            executor = SparkEngine(context, threads)
            with cancelling(executor.cancel):
                yield executor
