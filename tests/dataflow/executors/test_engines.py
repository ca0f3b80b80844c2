"""Tasks on an executor: few at a time, again where a worker died, and with an end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.executors import EngineError, TaskLostError, engine, run_all, starting
from dataflow.executors.versions import Versions
from sharding.errors import ShardReadError

pytestmark = pytest.mark.timeout(60)


def dies_once(path: str) -> int:
    """The id of the process that did it; the first is killed in the middle."""
    try:
        with open(path, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return os.getpid()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def waits(folder: str) -> None:
    Path(folder, "begun").write_text(str(os.getpid()))
    Path(folder, "never").read_text()


def fails(task: int) -> int:
    if task == 2:
        raise ShardReadError("x.tar", "no such file")
    return task


class UnpicklableError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raises_unpicklable(task: int) -> int:
    raise UnpicklableError("this", "that")


class Given(Executor):
    """Futures that the test ends; each is (future, what was to be called, with what)."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given.append((Future(), function, args))
        return self.given[-1][0]

    def finish(self) -> None:
        """End the oldest."""
        future, function, args = self.given.pop(0)
        future.set_result(function(*args))

    def die(self) -> None:
        self.given.pop(0)[0].set_exception(BrokenExecutor("killed"))


class Immediately(Given):
    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(function, *args)
        self.finish()
        return future


def test_a_process_that_is_killed_takes_only_its_task_along_which_another_does(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abcd"]
    for path in paths[1:]:
        Path(path).touch()
    with engine("processes", workers=2) as executor:
        done = dict(run_all(executor, dies_once, paths))
    assert done.keys() == {0, 1, 2, 3}
    assert int((tmp_path / "a").read_text()) not in done.values()
    for pid in done.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_few_tasks_are_submitted_and_taken_at_a_time() -> None:
    executor, taken = Given(), []

    def tasks() -> Iterator[int]:
        for task in range(10):
            taken.append(task)
            yield task

    results = run_all(executor, fails, (task for task in tasks() if task != 2), at_once=3, timeout_s=0.01)
    with pytest.raises(EngineError, match="none of 3 tasks was done in 0 s"):
        next(results)
    assert taken == [0, 1, 2, 3]


def test_a_result_makes_room_for_the_next_task() -> None:
    executor = Immediately()
    assert list(run_all(executor, fails, [5, 4, 3], at_once=1)) == [(0, 5), (1, 4), (2, 3)]


def test_a_task_whose_worker_dies_each_time_is_given_up() -> None:
    class Dying(Given):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(function, *args)
            self.die()
            return future

    with pytest.raises(TaskLostError, match="task 0 was tried 3 times, and its worker died each time"):
        list(run_all(Dying(), fails, [1], retries=2))


def test_what_a_task_raises_comes_as_it_was_with_the_process_and_cancels_the_others() -> None:
    executor = Given()
    results = run_all(executor, fails, [2, 3])
    submitted: list[Future[Any]] = []

    def submit(function: Any, /, *args: Any) -> Future[Any]:
        future = Given.submit(executor, function, *args)
        submitted.append(future)
        if len(submitted) == 2:
            executor.finish()
        return future

    executor.submit = submit  # type: ignore[method-assign]
    with pytest.raises(ShardReadError, match=r"x\.tar: no such file") as caught:
        next(results)
    assert f"process {os.getpid()}" in caught.value.__notes__[0]
    assert submitted[1].cancelled()


def test_an_exception_that_cannot_be_sent_comes_in_words() -> None:
    with pytest.raises(Exception, match="UnpicklableError: this and that"):
        list(run_all(Immediately(), raises_unpicklable, [0]))


def test_an_error_in_the_block_ends_processes_in_the_midst_of_their_tasks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "never")
    with suppress(KeyError), engine("processes", workers=1) as executor:
        running = executor.submit(waits, str(tmp_path))
        waiting = executor.submit(abs, 1)
        pid = int((tmp_path / "begun").read_text())
        raise KeyError
    assert isinstance(running.exception(), BrokenExecutor)
    assert waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_executor_that_is_closed_says_so() -> None:
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(EngineError, match="takes no more tasks"):
        list(run_all(executor, abs, [0]))


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("threads", {}, "engine must be one of processes, ray"),
        ("processes", {"cpus": "1"}, "processes has no option 'cpus': it has timeout"),
        ("processes", {"timeout": "soon"}, "timeout of an engine must be a number above 0, got 'soon'"),
        ("processes", {"timeout": "-1"}, "must be a number above 0, got '-1'"),
    ],
)
def test_unknown_engines_and_options_are_refused(name: str, options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text), engine(name, options=options):
        pass


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("ray", "ray"),
        ("dask", "distributed"),
        ("spark", "pyspark"),
        ("slurm", "submitit"),
        ("mpi", "mpi4py"),
    ],
)
def test_an_engine_that_is_not_installed_names_the_extra(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    text = re.escape(f"pip install 'dataflow-loader[{name}]'")
    with pytest.raises(ImportError, match=text), engine(name):
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Given:
    """An engine called "tested", whose futures the test ends."""
    given, module = Given(), ModuleType("dataflow.executors.tested")
    module.start = lambda request: nullcontext(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = starting._Engine(module="tested", package="json", example="head:1")
    monkeypatch.setitem(starting._ENGINES, "tested", kind)
    return given


def test_a_cluster_without_a_worker_is_an_error_after_its_time(cluster: Given) -> None:
    text = "no worker of tested took a task within 0 s: .*timeout"
    with pytest.raises(EngineError, match=text), engine("tested", options={"timeout": "0.01"}):
        pass


class Answering(Given):
    """One whose worker gives this answer, or raises it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        else:
            future.set_result(self._answer)
        return future


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Versions(python="3.9", dataflow="1", torch="2"), "runs python 3.9, this process python 3"),
        (
            ModuleNotFoundError("No module named 'dataflow'"),
            "No module named 'dataflow'.: install dataflow-loader",
        ),
        (RuntimeError("at org.apache\n" * 1000), r"\(RuntimeError: at org.{,520}\.\.\.\): install"),
    ],
)
def test_a_worker_that_is_not_as_this_process_is_refused(
    answer: Any, text: str, cluster: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "submit", Answering(answer).submit)
    with pytest.raises(EngineError, match=text), engine("tested"):
        pass


def test_what_an_engine_itself_raises_is_no_error_of_the_task() -> None:
    with pytest.raises(TaskLostError, match=r"gave up task 0 \(RuntimeError: node lost\)"):
        list(run_all(Answering(RuntimeError("node lost")), fails, [1]))
    with pytest.raises(EngineError, match="the engine cancelled a task"):
        list(run_all(Answering(CancelledError()), fails, [1]))


def test_a_cluster_that_runs_has_its_own_workers_and_one_that_does_not_is_named() -> None:
    said: list[str] = []
    request = starting.EngineRequest(name="dask", workers=None, options={}, say=said.append)
    request.joins("tcp://head:8786")
    assert said == ["dask: joined tcp://head:8786"]
    request = starting.EngineRequest(name="dask", workers=3, options={}, say=said.append)
    with pytest.raises(ValueError, match=r"leave out workers= \(--workers\)"):
        request.joins("tcp://head:8786")
    for address in ("tcp://127.0.0.1:1", "head", "tcp://127.0.0.1:port"):
        with pytest.raises(EngineError, match=f"no dask was found at {address} .*such as tcp://head:8786"):
            request.reach(address)
