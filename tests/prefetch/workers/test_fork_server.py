"""Processes that a fork server is asked for, and what is known of them before it has forked them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from prefetch.workers.fork_server import Server, ServerNeeds, ServerProcess

TIMEOUT_S = 20


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of the test's own; one that was stopped must be let go on."""
    server = Server(ServerNeeds())
    server.ensure_running()
    yield server
    pid = server.let_go()
    assert pid is not None
    os.waitpid(pid, 0)


def asked_for(server: Server) -> ServerProcess:
    """A process that its server, stopped, has not forked."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    asked = ServerProcess(server, abs, -1, "a worker")
    asked.start()
    return asked


def let_go_on(server: Server) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("unforkable", ["", "a new process is asked for"])
def test_starting_leaves_the_environment_alone_as_another_thread_may_read_it(
    unforkable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[bytes] = []
    monkeypatch.setattr(os, "putenv", lambda name, value: changed.append(name))
    monkeypatch.setattr(os, "unsetenv", changed.append)
    server = Server(ServerNeeds(unforkable=unforkable))
    server.ensure_running()
    server.kill()
    assert changed == []


def test_a_process_is_asked_for_and_not_waited_for(server: Server) -> None:
    asked = asked_for(server)
    assert not asked.hear_fork()
    assert asked.exitcode is None
    asked.join(0)
    assert asked.is_alive()
    let_go_on(server)
    assert asked.pid not in (None, server.pid)
    assert asked.hear_fork()
    asked.join(TIMEOUT_S)
    assert asked.exitcode == 0


def test_all_threads_that_ask_for_its_pid_get_it_and_none_waits_for_its_end(server: Server) -> None:
    asked, pids = asked_for(server), []
    threads = [threading.Thread(target=lambda: pids.append(asked.pid)) for _ in range(4)]
    for thread in threads:
        thread.start()
    let_go_on(server)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert pids == [asked.pid] * 4
    asked.join(TIMEOUT_S)
    assert asked.exitcode == 0


def test_a_server_that_ends_before_it_forks_is_replaced_by_another(server: Server) -> None:
    asked, first = asked_for(server), server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    asked.join(TIMEOUT_S)
    assert asked.exitcode == 0
    assert asked.pid not in (None, first)
    assert server.pid not in (None, first)


def test_a_process_that_no_server_forks_has_ended(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, first = asked_for(server), server.pid
    assert first is not None
    with monkeypatch.context() as patched:
        patched.setattr(server, "connect_to_new_process", lambda _: (_ for _ in ()).throw(ConnectionError()))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ConnectionError):
            asked.join()
    assert (asked.pid, asked.exitcode) == (None, -signal.SIGKILL)
    server.ensure_running()
