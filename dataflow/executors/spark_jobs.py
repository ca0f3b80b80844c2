"""Jobs of Spark, one for each call: Spark gives those of an executor that was lost to others."""

from __future__ import annotations

import os
import shutil
import sys
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
"""Jobs at a time, at least: a cluster may grow."""


class SparkEngine(ThreadPoolExecutor):
    """Calls as jobs of a `SparkContext`, each waited for by a thread."""

    def __init__(self, context: SparkContext) -> None:
        slots = max(_JOBS, context.defaultParallelism)
        super().__init__(slots, thread_name_prefix="dataflow-engine")
        self._context = context

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in an executor of Spark; see `Executor`."""
        return super().submit(self._call, cloudpickle.dumps(partial(function, *args, **kwargs)))

    def _call(self, call: bytes) -> Any:
        self._context.setJobGroup("dataflow", "tasks of dataflow", interruptOnCancel=True)
        return self._context.parallelize([call], 1).map(lambda each: cloudpickle.loads(each)()).collect()[0]

    def cancel(self) -> None:
        """End the calls that run, and those that wait."""
        self.shutdown(wait=False, cancel_futures=True)
        self._context.cancelJobGroup("dataflow")


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
        executor = opened.enter_context(SparkEngine(context))
        with cancelling(executor.cancel):
            yield executor
