"""A template: a process that is forked before the first workers, and forks those that replace others.

It has one thread and does nothing else, so its copies hold no lock of another thread, and see what the first
workers saw. It ends with the training process.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, popen_fork, process, util
from multiprocessing.context import BaseContext
from typing import Any

from prefetch.memory.lifetimes import only_ours
from prefetch.workers.signals import end_with_parent, forking, let_signals, shield

_ORDER = struct.Struct("qq")
"""Worker and region, with the descriptor of its tasks: fork it. -1 and an id: how has that one ended?"""
_ANSWER = struct.Struct("q")
_END_S = 2.0
_ANSWER_S = 60.0
"""It has nothing else to do, but may have much memory to copy the tables of."""

RunWorker = Callable[[int, int, int], object]
"""Runs a worker in its process, by its number, that of its region, and the descriptor of its tasks."""


class Template:
    """The process, for the one that had it forked. `close` ends it.

    Args:
        context: forks.
        run: what its copies do.
    """

    def __init__(self, context: BaseContext, run: RunWorker) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = only_ours(ours)
        self._asking = threading.Lock()
        ours.settimeout(_ANSWER_S)
        self._process: Any = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, context, run, os.getpid(), gc.isenabled()), name="dataflow-template"
        )
        try:
            with theirs, forking():
                self._process.start()
        except BaseException:
            ours.close()
            raise
        process._children.discard(self._process)  # type: ignore[attr-defined]

    @property
    def pid(self) -> int:
        """The id of the process."""
        return int(self._process.pid)

    def ask(self, first: int, second: int, *descriptors: int) -> tuple[int, list[int]]:
        """Give an order, and return the answer with its descriptors. `ConnectionError`: it has ended."""
        with self._asking:
            try:
                socket.send_fds(self._channel, [_ORDER.pack(first, second)], descriptors)
                answer, received, _, _ = socket.recv_fds(self._channel, _ANSWER.size, 1)
            except TimeoutError as error:  # a late answer would be taken for that to the next order
                self._process.kill()
                raise ConnectionResetError("the process that workers are forked from stands still") from error
        if not answer:
            raise ConnectionResetError("the process that workers are forked from has ended")
        return _ANSWER.unpack(answer)[0], received

    def exit_code(self) -> int | None:
        """Return how it ended, or None."""
        self._process.join(_END_S)
        code: int | None = self._process.exitcode
        return code

    def close(self) -> None:
        """Let it end; the workers that it has forked have ended. Idempotent."""
        if self._channel.fileno() >= 0:
            self._channel.close()
            self._process.join(_END_S)
            if self._process.exitcode is None:  # it was stopped
                self._process.kill()
                self._process.join(_END_S)


class TemplateProcess(process.BaseProcess):
    """A worker from a template."""

    _start_method = "fork"

    def __init__(self, template: Template, worker: int, region: int, tasks: int) -> None:
        super().__init__(name=f"dataflow-worker-{worker}")
        self.template, self.order = template, (worker, region, tasks)

    @staticmethod
    def _Popen(process_obj: Any) -> _TemplatePopen:  # noqa: N802  (the standard library's name)
        return _TemplatePopen(process_obj)


class _TemplatePopen(popen_fork.Popen):
    """The standard library's, for a process that is another one's child."""

    sentinel: int
    pid: int

    def _launch(self, process_obj: TemplateProcess) -> None:
        self._template = process_obj.template
        self.pid, [self.sentinel] = self._template.ask(*process_obj.order)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and connection.wait([self.sentinel], None if flag == 0 else 0):
            try:
                self.returncode = self._template.ask(-1, self.pid)[0]
            except OSError:  # it ended before it could tell
                self.returncode = -signal.SIGKILL
        return self.returncode


def _serve(channel: socket.socket, context: Any, run: RunWorker, training: int, collects: bool) -> None:
    """The process."""
    gc.freeze()
    end_with_parent(training)
    shield(training)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its copies handle it in their way
    let_signals()
    forked: dict[int, Any] = {}
    if collects:
        gc.enable()
    while True:
        order, descriptors, _, _ = socket.recv_fds(channel, _ORDER.size, 1)
        if not order:
            return
        first, second = _ORDER.unpack(order)
        if first < 0:
            ended = forked.pop(second)
            ended.join()
            channel.send(_ANSWER.pack(ended.exitcode))
            continue
        [tasks] = descriptors
        child = context.Process(
            target=_run, args=(channel, run, first, second, tasks), name=f"dataflow-worker-{first}"
        )
        with forking():
            child.start()
        process._children.discard(child)  # type: ignore[attr-defined]  # else another's start hears of its end
        forked[child.pid] = child
        os.close(tasks)
        with suppress(BrokenPipeError):
            socket.send_fds(channel, [_ANSWER.pack(child.pid)], [child.sentinel])


def _run(channel: socket.socket, run: RunWorker, worker: int, region: int, tasks: int) -> None:
    channel.close()
    run(worker, region, tasks)
