"""Nobody waits without a deadline for processes that do not start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

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


@pytest.mark.usefixtures("server_stands_still")
def test_a_server_that_forks_nothing_is_an_error_that_names_a_way_without_it() -> None:
    loader = DataLoader(torch.arange(8), 2, num_workers=2, multiprocessing_context="forkserver")
    with pytest.raises(RuntimeError, match=r"has forked no process in .* multiprocessing_context=.fork."):
        next(iter(loader))
