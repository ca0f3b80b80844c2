"""An engine by its name: its package, its options, and whether a worker answers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from urllib.parse import urlsplit

from msgspec import Struct

from dataflow.executors.errors import EngineError, shown
from dataflow.executors.versions import Versions

_log = logging.getLogger("dataflow")
_ANSWER_S = 120.0
_CONNECT_S = 10.0


class EngineRequest(Struct, frozen=True, kw_only=True):
    """The engine that is asked for, and how."""

    name: str
    workers: int | None
    options: Mapping[str, str]
    say: Callable[[str], object]

    def allow(self, *names: str, prefix: str | None = None) -> None:
        """Raise `ValueError` for options that it does not have; those that begin with `prefix` it has."""
        names = (*names, "timeout")
        for option in self.options:
            if option not in names and not (prefix and option.startswith(prefix)):
                known = ", ".join([*names, *([f"{prefix}..."] if prefix else [])])
                raise ValueError(f"the engine {self.name} has no option {option!r}: it has {known}")

    def number(self, name: str, default: float) -> float:
        """Return the option as a number above 0."""
        text = self.options.get(name, default)
        with suppress(ValueError):
            if 0 < float(text) < float("inf"):
                return float(text)
        raise ValueError(f"the option {name} of an engine must be a number above 0, got {text!r}")

    @property
    def timeout_s(self) -> float:
        """Seconds that it may take until a worker answers."""
        return self.number("timeout", _ANSWER_S)

    def joins(self, address: str) -> None:
        """Say that a cluster that runs is used; raises `ValueError` if it should have so many workers."""
        if self.workers is not None:
            raise ValueError(
                f"the workers of {self.name} at {address} are those that run: leave out workers= (--workers)"
            )
        self.say(f"{self.name}: joined {address}")

    def reach(self, address: str) -> None:
        """Raise `EngineError` unless something listens at "host:port", with a protocol or without."""
        parts = urlsplit(address if "://" in address else f"//{address}")
        try:
            host, port = parts.hostname, parts.port
            if not host or port is None:
                raise ValueError("it has no port")
            socket.create_connection((host, port), min(_CONNECT_S, self.timeout_s)).close()
        except (OSError, ValueError) as error:
            raise EngineError(
                f"no {self.name} was found at {address} ({error}): see that it runs, that this machine may "
                f"connect, and that the address is right, such as {_ENGINES[self.name].example}"
            ) from None


class _Engine(Struct, frozen=True, kw_only=True):
    """The way an engine is started; `module`'s `start(request)` is a context manager. It names its extra."""

    module: str
    package: str = ""
    """The module that is imported of it; "": none."""
    example: str = ""
    """An address of it."""
    has_queue: bool = False
    """A worker may rightly take hours to come."""


_ENGINES = {
    "processes": _Engine(module="process_pool"),
    "ray": _Engine(module="ray_tasks", package="ray", example="head:6379"),
    "dask": _Engine(module="dask_client", package="distributed", example="tcp://head:8786"),
    "spark": _Engine(module="spark_jobs", package="pyspark", example="spark://head:7077"),
    "slurm": _Engine(module="slurm_jobs", package="submitit", has_queue=True),
    "mpi": _Engine(module="mpi_pool", package="mpi4py"),
}
ENGINES = tuple(_ENGINES)
"""Names of the engines."""


@contextmanager
def engine(
    name: str,
    *,
    workers: int | None = None,
    options: Mapping[str, str] = {},
    say: Callable[[str], object] = _log.info,
) -> Iterator[Executor]:
    """Start an engine, or join the one that runs; leaving the context ends what was started.

    An error or Ctrl-C in the block cancels the tasks that were submitted.

    Args:
        name: "processes", "ray", "dask", "spark", "slurm" or "mpi".
        workers: tasks at a time, of an engine that is started here; None: one for each CPU that this process
            may use, and 64 jobs of Slurm.
        options: what the engine is told, as the page "Engines" lists it: "address", "cpus", "partition" and
            others. "timeout" is the seconds that it may take until a worker answers, 120 by default.
        say: called with a line that tells what was joined or started.

    Raises:
        ValueError: there is no engine of this name, or no such option.
        ImportError: its package is not installed; the text names the extra.
        EngineError: it is not there, no worker answers, or workers have other versions.

    Examples:
        >>> with engine("processes", workers=1) as executor:
        ...     executor.submit(abs, -3).result()
        3
    """
    if name not in _ENGINES:
        raise ValueError(f"engine must be one of {', '.join(_ENGINES)}; got {name!r}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    chosen, request = _ENGINES[name], EngineRequest(name=name, workers=workers, options=options, say=say)
    timeout_s = request.timeout_s  # a wrong one is told before anything is started
    if chosen.package:
        try:
            import_module(chosen.package)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"the engine {name} needs another package: pip install 'dataflow-loader[{name}]'"
            ) from error
    start: Callable[[EngineRequest], AbstractContextManager[Executor]]
    start = import_module(f"dataflow.executors.{chosen.module}").start
    with start(request) as executor:
        if chosen.package and not chosen.has_queue:
            _ask(executor, name, timeout_s)
        yield executor


@contextmanager
def cancelling(cancel: Callable[[], object]) -> Iterator[None]:
    """Call it where the block ends by an error or Ctrl-C."""
    try:
        yield
    except BaseException:
        cancel()
        raise


def _ask(executor: Executor, name: str, timeout_s: float) -> None:
    """Raise `EngineError` unless a worker answers, and runs the versions that we do."""
    try:
        theirs = executor.submit(Versions.here).result(timeout_s)
    except TimeoutError:
        raise EngineError(
            f"no worker of {name} took a task within {timeout_s:.0f} s: see whether it has "
            "workers with room; the option timeout= (--engine-option timeout=600) gives it longer"
        ) from None
    except Exception as error:
        raise EngineError(
            f"a worker of {name} could not do a task ({shown(error)}): install "
            "dataflow-loader, and the same Python, on all of its machines"
        ) from error
    if difference := Versions.here().difference(theirs):
        raise EngineError(f"a worker of {name} is not as this process: {difference}")
