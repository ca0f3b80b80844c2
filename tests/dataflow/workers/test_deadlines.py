"""Nobody waits without a deadline for processes that do not start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from worker_kit import Does, workers_of_this_process

from dataflow import DataLoader
from prefetch.workers import starting


@pytest.fixture
def server_stands_still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fork server of this test's own that imports for ever: it is stopped as soon as it runs."""
    server: Any = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    server.ensure_running()
    os.kill(server._forkserver_pid, signal.SIGSTOP)
    monkeypatch.setattr(starting, "_FORKED_IN_S", 0.05)
    yield
    starting._kill(server)


HELD = threading.Lock()


def take_lock(_: int) -> None:
    HELD.acquire()


def test_a_worker_forked_under_a_lock_is_an_error_that_names_a_way_without_it() -> None:
    loader = DataLoader(Does(take_lock), num_workers=1, multiprocessing_context="fork", timeout=0.1)
    told = r"has answered nothing since it was forked: a thread of the training.*context=.forkserver."
    with HELD:
        batches = iter(loader)
        with pytest.raises(RuntimeError, match=f"(?s){told}"):
            next(batches)
        for worker in workers_of_this_process():
            os.kill(worker, signal.SIGKILL)


@pytest.mark.usefixtures("server_stands_still")
def test_a_server_that_forks_nothing_is_an_error_that_names_a_way_without_it() -> None:
    loader = DataLoader(torch.arange(8), 2, num_workers=2, multiprocessing_context="forkserver")
    with pytest.raises(
        RuntimeError, match=r"the fork server has forked no process in .* multiprocessing_context=.fork."
    ):
        next(iter(loader))
