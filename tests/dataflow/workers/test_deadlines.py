"""Nobody waits without a deadline for processes that do not start."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets_kit import make_ints_tar
from threads_kit import threads_left

from dataflow import DataLoader, StallError
from dataflow.processes.builders import ProcessBuilders
from dataflow.workers.fetching import WorkerLoader
from dataflow.workers.worker import WorkerLimits
from prefetch.ipc.pipe import WorkerProcesses
from prefetch.workers import fork_server, pool


@pytest.fixture
def server_stands_still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fork server of this test's own that imports for ever: it is stopped as soon as it runs."""
    monkeypatch.setattr(fork_server, "_current", None)
    monkeypatch.setattr(fork_server, "_servers", [])
    monkeypatch.setattr(fork_server, "fork_server", lambda preload: "it is tested so")
    ensure_running = fork_server.Server.ensure_running

    def stopped(server: fork_server.Server, *, may_spawn: bool = True) -> None:
        ensure_running(server, may_spawn=may_spawn)
        if server.pid is not None:
            os.kill(server.pid, signal.SIGSTOP)

    monkeypatch.setattr(fork_server.Server, "ensure_running", stopped)
    monkeypatch.setattr(pool, "_KILL_S", 0.05)
    monkeypatch.setitem(WorkerProcesses.__init__.__kwdefaults__, "stop_s", 0.05)
    monkeypatch.setattr(WorkerLoader, "worker_limits", WorkerLimits(start_s=0.2, stop_s=0.05), raising=True)
    yield
    for server in fork_server._servers:
        server.kill()


@pytest.mark.usefixtures("server_stands_still")
def test_the_time_out_of_a_map_style_loader_holds_while_the_fork_server_imports() -> None:
    loader = DataLoader(torch.arange(8), 2, num_workers=2, timeout=0.1)
    batches = iter(loader)
    assert loader.stats().worker_pids == ()
    with pytest.raises(RuntimeError, match=r"timed out after 0.1 seconds(.|\n)*server that it comes from"):
        next(batches)
    assert loader.stats().worker_pids == ()
    began = time.monotonic()
    loader.close()
    del batches
    assert time.monotonic() - began < 5
    assert not fork_server.server_pids(), "it was ended: what it imports may never end"


@pytest.mark.here
@pytest.mark.usefixtures("server_stands_still")
def test_that_of_a_loader_over_shards_holds_too(tmp_path: Path) -> None:
    dataset = make_ints_tar(tmp_path).open(transform=dict)
    stalled = pytest.raises(StallError, match="has not started: the server that it comes from")
    with DataLoader(dataset, 4, num_workers=2, timeout=0.5) as loader, stalled:
        next(iter(loader))
    assert threads_left("dataflow-hand-out") == [], "nobody waits for it, and it ends"
    assert not fork_server.server_pids()


@pytest.mark.here
@pytest.mark.usefixtures("server_stands_still")
def test_closing_waits_for_no_process_while_threads_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WorkerProcesses.__init__.__kwdefaults__, "stop_s", 60)
    run, are_asked_for = ProcessBuilders._run, threading.Event()

    def told(own: ProcessBuilders) -> None:
        are_asked_for.set()
        run(own)

    monkeypatch.setattr(ProcessBuilders, "_run", told)
    loader = DataLoader(make_ints_tar(tmp_path).open(transform=dict), 2)
    assert sum(len(batch["cls"]) for batch in loader) == len(loader.dataset)
    assert are_asked_for.wait(20)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5
    assert threads_left("dataflow-hand-out") == []
    assert fork_server.server_pids(), "it may only be slow: nobody has waited for it"


def test_who_asks_for_the_id_of_a_process_waits_for_a_bounded_time() -> None:
    assert fork_server._FORKED_IN_S <= 60
