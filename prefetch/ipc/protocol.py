"""Define the requests to workers and their responses, and the loop that each of them runs, wherever it is.

A worker receives a request, does what it says, and responds once, often or not at all. The caller knows the
task: to build a chunk, to fetch a batch. The transport knows how requests come and responses go: by pipes and
shared memory (`pipe`), or by calls of a Ray actor's methods. Requests are served one at a time, in order.
While one is, the task may ask the training process a question: what comes before the answer waits.
"""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from prefetch.errors import EngineClosedError


class WorkerMessage:
    """Kinds of requests.

    Build a chunk or fetch a batch. Of chunks: go on with one; an answer; make samples of one. Of batches:
    fetch one and drop it; set the generators; remember them; begin the next epoch; do so with those that
    were remembered.
    """

    TASK, GO_ON, ANSWER, PART, SKIP, RANDOM, REMEMBER, RESET, BACK = range(9)


class WorkerResult:
    """Kinds of responses.

    What was made of a task, or of a part of it; an error that ends it; the worker's iterable has no more; the
    worker is at its beginning; a question; a file that the training process has open cannot be read here;
    samples of a chunk.
    """

    BATCH, ERROR, END, OPENED, QUESTION, STALE, PART = range(7)


class WorkerRequest(NamedTuple):
    """A request to a worker."""

    kind: int
    task: int = -1
    """Number of the chunk or of the batch."""
    content: Any = None
    generation: int = 0
    """For batches: 1 more with an epoch that was guessed, 2 more with another."""
    worker: int = 0
    """For batches, the worker whose dataset it is; a process may run several."""
    number: int = -1
    """The number of the batch in its epoch."""


class Transport(Protocol):
    """A worker's way to the training process."""

    def receive(self) -> WorkerRequest | None:
        """Wait for the next request; None: there are no more."""
        ...

    def respond(self, kind: int, task: int, obj: Any, generation: int = 0) -> None:
        """Say something about a task. Raises what pickling raises."""
        ...


class WorkerLoop:
    """Does what a transport brings, one after the other, until it brings no more."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.respond = transport, transport.respond
        self._waiting: deque[WorkerRequest] = deque()
        """Requests that came before an answer."""

    def run(self, serve: Callable[[WorkerRequest], None]) -> None:
        """Have every request served. `serve` raises `EngineClosedError` to end, all else ends the process."""
        try:
            while self._has_next():
                serve(self._waiting.popleft())  # no name here keeps what it was sent
        except EngineClosedError:
            pass

    def _has_next(self) -> bool:
        """Return whether there is a request; waits for one."""
        if not self._waiting and (request := self._transport.receive()) is not None:
            self._waiting.append(request)
        return bool(self._waiting)

    def ask(self, task: int, question: Any) -> Any:
        """Ask the training process about the task that is being done, and return its answer.

        Raises what the answer says, and `EngineClosedError` if nobody answers any more.
        """
        self.respond(WorkerResult.QUESTION, task, question)
        while (request := self._transport.receive()) is not None:
            if request.kind != WorkerMessage.ANSWER:
                self._waiting.append(request)
                continue
            if isinstance(request.content, RemoteError):
                raise request.content.restored()
            return request.content
        raise EngineClosedError("the loader was closed while the batch was built")


class RemoteError(Struct, frozen=True):
    """An exception of another process, with what it was raised from."""

    error: BaseException
    cause: RemoteError | None
    context: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> RemoteError:
        """An exception of this process, to be sent; one that does not pickle is sent as its text."""
        from prefetch.ipc.payload import pack

        text = "".join(traceback.format_exception(error, chain=False))
        sendable = error
        try:
            pickle.loads(pack(error).meta)
        except Exception:
            sendable = RuntimeError(f"{type(error).__name__}: {error}")
        cause = None if error.__cause__ is None else cls.of(error.__cause__, where)
        return cls(sendable, cause, f"in {where}:\n{text}")

    def restored(self) -> BaseException:
        """The exception, whose traceback is a note."""
        self.error.__cause__ = None if self.cause is None else self.cause.restored()
        if self.cause is None:
            self.error.add_note(self.context)
        return self.error
