"""The loop of a worker: requests in order, questions in the middle of one, and its end."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

from prefetch.errors import EngineClosedError
from prefetch.ipc.protocol import RemoteError, WorkerLoop, WorkerMessage, WorkerRequest, WorkerResult

TASK, ANSWER = WorkerMessage.TASK, WorkerMessage.ANSWER


class Listed:
    """A transport that brings the requests of a list, and notes the responses."""

    def __init__(self, *requests: WorkerRequest) -> None:
        self._requests = deque(requests)
        self.responses: list[tuple[int, int, Any]] = []

    def receive(self) -> WorkerRequest | None:
        return self._requests.popleft() if self._requests else None

    def respond(self, kind: int, task: int, obj: Any, generation: int = 0) -> None:
        self.responses.append((kind, task, obj))


def test_what_comes_before_an_answer_is_served_behind_the_task_that_asked() -> None:
    come = [WorkerRequest(TASK, task) for task in range(3)]
    transport = Listed(*come, WorkerRequest(ANSWER, 0, "yes"), WorkerRequest(TASK, 3))
    loop, done = WorkerLoop(transport), list[Any]()

    def serve(request: WorkerRequest) -> None:
        done.append(request.task)
        if request.task == 0:
            done.append(loop.ask(0, "may I?"))

    loop.run(serve)
    assert done == [0, "yes", 1, 2, 3]
    assert transport.responses == [(WorkerResult.QUESTION, 0, "may I?")]


def test_an_answer_that_is_an_error_is_raised_where_it_was_asked() -> None:
    refused = RemoteError.of(KeyError("no"), "the training process")
    loop = WorkerLoop(Listed(WorkerRequest(ANSWER, 0, refused)))
    with pytest.raises(KeyError, match="no") as caught:
        loop.ask(0, "may I?")
    assert caught.value.__notes__[0].startswith("in the training process:\n")


def test_who_is_not_answered_any_more_ends() -> None:
    loop, ended = WorkerLoop(Listed(WorkerRequest(TASK, 0))), list[str]()

    def serve(request: WorkerRequest) -> None:
        try:
            loop.ask(request.task, "may I?")
        except EngineClosedError as error:
            ended.append(str(error))
            raise

    loop.run(serve)
    assert ended == ["the loader was closed while the batch was built"]


def test_the_loop_keeps_nothing_of_what_a_task_has_dropped() -> None:
    values = np.zeros(3)
    dies = weakref.ref(values)
    loop, lived = WorkerLoop(Listed(WorkerRequest(TASK, 0, values))), list[bool]()
    del values

    def serve(request: WorkerRequest) -> None:
        del request
        lived.append(dies() is not None)

    loop.run(serve)
    assert lived == [False]
