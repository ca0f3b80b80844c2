"""Tasks on any `concurrent.futures.Executor`: few at a time, and again where their worker died.

A task is called again after its worker died, perhaps when its work was done, and on some engines while
another worker still does it. So tasks must be such as may be done twice: files are written under a temporary
name and renamed.
"""

from __future__ import annotations

import os
import pickle
import platform
import traceback
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TypeVar

from dataflow.executors.errors import EngineError, TaskLostError, shown
from sharding.errors import DataflowError

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 1024
_RETRIES = 3
_QUIET_S = 24 * 3600.0


def run_all(
    executor: Executor,
    function: Callable[[T], R],
    tasks: Iterable[T],
    *,
    at_once: int = _AT_ONCE,
    retries: int = _RETRIES,
    timeout_s: float = _QUIET_S,
) -> Generator[tuple[int, R], None, None]:
    """Yield (number of the task, what the function returned) as tasks are done, in any order.

    Closing the iterator, an error, and Ctrl-C cancel the tasks that have not begun.

    Args:
        executor: whose workers can import the module of the function.
        function: of a module; called with each task in a worker. It may be called twice with one.
        tasks: values that can be pickled. Taken one by one, as there is room for them.
        at_once: tasks that were submitted and are not done, at most.
        retries: further attempts at a task whose worker died.
        timeout_s: seconds without any task done after which it is given up.

    Raises:
        TaskLostError: a task's worker died at each attempt.
        EngineError: nothing was done for `timeout_s`, or the executor takes no more tasks.
        Exception: what the function raised, with a note that says where.

    Examples:
        >>> with engine("processes", workers=2) as executor:
        ...     sorted(run_all(executor, abs, [-3, 4]))
        [(0, 3), (1, 4)]
    """
    waiting: dict[Future[tuple[R | None, Exception | None]], tuple[int, T, int]] = {}
    done: SimpleQueue[Future[tuple[R | None, Exception | None]]] = SimpleQueue()
    call, numbered = partial(_outcome, function), enumerate(tasks)

    def submit(number: int, task: T, count: int = 1) -> None:
        try:
            future = executor.submit(call, task)
        except (BrokenExecutor, RuntimeError) as error:
            raise EngineError(
                f"the executor takes no more tasks ({error or type(error).__name__}). One of "
                "`dataflow.engines.engine` goes on when a worker dies, `ProcessPoolExecutor` does not"
            ) from error
        waiting[future] = number, task, count
        future.add_done_callback(done.put)

    try:
        while True:
            for number, task in islice(numbered, at_once - len(waiting)):
                submit(number, task)
            if not waiting:
                return
            try:
                future = done.get(timeout=timeout_s)
            except Empty:
                raise EngineError(
                    f"none of {len(waiting)} tasks was done in {timeout_s:,.0f} s: see whether the engine "
                    "has workers, and what they do"
                ) from None
            number, task, count = waiting.pop(future)
            try:
                result, error = future.result()
            except BrokenExecutor as death:
                if count > retries:
                    raise TaskLostError(
                        f"task {number} was tried {count} times, and its worker died each time "
                        f"({shown(death)}): the system may have killed it for memory"
                    ) from death
                submit(number, task, count + 1)
                continue
            except CancelledError as cancelled:
                raise EngineError(
                    "the engine cancelled a task: it ended, or cannot be reached"
                ) from cancelled
            except Exception as lost:  # what the function raised is in `error`
                raise TaskLostError(f"the engine gave up task {number} ({shown(lost)})") from lost
            if error is not None:
                raise error
            yield number, result  # type: ignore[misc]
    finally:
        for future in waiting:
            future.cancel()


def _outcome(function: Callable[[T], R], task: T) -> tuple[R | None, Exception | None]:
    """Return what the function returned, or raised: engines differ in what they make of an exception."""
    try:
        return function(task), None
    except Exception as error:
        error.add_note(
            f"it was raised by process {os.getpid()} on {platform.node()}:\n{traceback.format_exc().rstrip()}"
        )
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return None, error.with_traceback(None)
        except Exception:  # it cannot be sent as what it is
            pass
        sent = DataflowError(f"{type(error).__name__}: {error}")
        sent.__notes__ = list(error.__notes__)
        return None, sent
