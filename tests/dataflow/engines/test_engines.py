"""Tasks on an executor: few at a time, again where a worker died, and with an end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dataflow.engines import EngineError, TaskLostError, engine, run_all
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
        ("threads", {}, "engine must be one of processes"),
        ("processes", {"cpus": "1"}, "the engine processes has no option 'cpus': it has timeout"),
    ],
)
def test_unknown_engines_and_options_are_refused(name: str, options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text), engine(name, options=options):
        pass
