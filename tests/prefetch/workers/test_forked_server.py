"""The fork server that is forked from this process: when it is, what it keeps, and what it does not."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from parameters_kit import others_in_full
from prefetch.workers.fork_server import interrupts_held
from prefetch.workers.forked_server import ForkFacts, refusal
from programs_kit import ANOTHER_THREAD, run_script

QUIET = ForkFacts(threads=1, python_threads=1, blas_threads=0, devices=(), held_bytes=1 << 28)

BEGIN = """
import os, sys
import psutil
from dataflow import DataLoader
from worker_kit import Does

def children():
    return [c for c in psutil.Process().children() if "resource_tracker" not in " ".join(c.cmdline())]

def same(index):
    return index

def loaded(**arguments):
    return DataLoader(Does(same), None, num_workers=2, **arguments)

def start_of(loader):
    assert list(loader) == list(range(8))
    return loader.stats().start
"""


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (QUIET, ""),
        (replace(QUIET, threads=2), "this process had 2 threads"),
        (replace(QUIET, threads=4, blas_threads=3), ""),
        (replace(QUIET, threads=5, blas_threads=3), "this process had 5 threads"),
        (replace(QUIET, threads=2, python_threads=2, blas_threads=3), "this process had 2 threads"),
        (replace(QUIET, devices=["/dev/nvidiactl", "/dev/nvidia0"]), "this process used /dev/nvidia0"),
        (replace(QUIET, held_bytes=2 << 30), "this process held 2,147,483,648 bytes, more than"),
    ],
)
def test_a_process_is_forked_only_while_nothing_else_runs_in_it(facts: ForkFacts, reason: str) -> None:
    found = refusal(facts)
    assert found == reason or (reason and found.startswith(reason))


def test_a_process_with_one_thread_is_forked_when_the_first_loader_is_made_and_not_before(
    tmp_path: Path,
) -> None:
    text = """
loader_class = DataLoader
assert children() == []
loader = loaded()
server, = children()
assert server.cmdline() == psutil.Process().cmdline()
assert start_of(loader) == "forked server"
iterator = iter(loader)
assert {psutil.Process(process.pid).ppid() for process in iterator.runners.processes} == {server.pid}
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert start_of(loaded()) == "forked server"  # it is there already
assert children() == [server]
print("fine")
"""
    assert run_script(BEGIN + text, folder=tmp_path) == (0, "fine\n", "")


OTHERS = {
    "a thread of Python": (ANOTHER_THREAD, "threads"),
    "threads of a library": (
        "import torch; torch.set_num_threads(6); torch.ones(1 << 20).add_(1)",
        "threads",
    ),
    "threads that a first look takes for those of OpenBLAS": (
        "import torch; torch.set_num_threads(6); torch.ones(1 << 20).add_(1); os.cpu_count = lambda: 64",
        "threads",
    ),
    "no gradients": ("import torch; torch.set_grad_enabled(False)", "torch.no_grad()"),
    "a default device": ('import torch; torch.set_default_device("cpu")', "a default device"),
}


@pytest.mark.parametrize("other", others_in_full(OTHERS, "threads of a library"))
def test_a_process_that_is_not_by_itself_gets_a_server_of_its_own(tmp_path: Path, other: str) -> None:
    text, reason = OTHERS[other]
    text = f"""{text}
loader = loaded()
server, = children()
assert server.cmdline() != psutil.Process().cmdline()
assert start_of(loader) == "fork server"
print(loader.stats().start_reason)
"""
    code, out, err = run_script(BEGIN + text, how="forked", folder=tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith("it was not forked from this process: ")
    assert reason in out


def test_other_ways_of_starting_are_told(tmp_path: Path) -> None:
    text = """
print(start_of(loaded(multiprocessing_context="fork")))
print([start_of(loaded(workers="thread")), DataLoader(Does(same)).stats().start])
"""
    assert run_script(BEGIN + text, how="forked", folder=tmp_path) == (0, "fork\n['', '']\n", "")


def test_the_server_holds_no_file_of_this_process(tmp_path: Path) -> None:
    """A pipe's other end sees it closed, and a lock goes with its file, though the server lives on."""
    text = """
import fcntl, socket
reader, writer = os.pipe()
one, other = socket.socketpair()
locked = open("locked", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
loader = loaded()
assert start_of(loader) == "forked server"
os.close(writer), one.close(), locked.close()
assert os.read(reader, 1) == b""
assert other.recv(1) == b""
with open("locked") as again:
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
assert start_of(loader) == "forked server"
print("fine")
"""
    folder = f"os.chdir({str(tmp_path)!r})\n"
    assert run_script(BEGIN + folder + text, how="forked", folder=tmp_path) == (0, "fine\n", "")


def test_a_file_that_a_module_has_open_is_read_in_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("abcdefgh")
    (tmp_path / "held.py").write_text(
        f"file = open({str(tmp_path / 'data')!r}, buffering=1)\n"
        "file.seek(2)\n"
        "def read(index):\n    return file.read(1)\n"
    )
    text = """
import held
from prefetch.workers import forked_server
serve, (moved, tell) = forked_server._serve, os.pipe()
forked_server._serve = lambda *arguments: (os.read(moved, 1), serve(*arguments))
loader = DataLoader(Does(held.read, 3), None, num_workers=1)
held.file.seek(6)
os.write(tell, b"x")
assert list(loader) == ["c", "d", "e"]
assert loader.stats().start == "forked server"
assert held.file.read() == "gh"
print("fine")
"""
    assert run_script(BEGIN + text, how="forked", folder=tmp_path) == (0, "fine\n", "")


def test_what_this_process_would_write_and_do_at_its_end_is_done_once(tmp_path: Path) -> None:
    """Buffered text, functions for the exit, handlers of signals."""
    text = """
import atexit, signal
atexit.register(print, "the end")
signal.signal(signal.SIGTERM, lambda *_: print("a signal", flush=True))
signal.signal(signal.SIGCHLD, lambda *_: None)
log = open("log", "w")
log.write("buffered ")
sys.stdout.write("once ")
loader = loaded()
server, = children()
assert start_of(loader) == "forked server"
server.terminate()
assert server.wait() == -signal.SIGTERM
log.close()
assert open("log").read() == "buffered "
assert start_of(loader) == "fork server"  # another one, with a word about it
print(loader.stats().start_reason)
"""
    folder = f"os.chdir({str(tmp_path)!r})\n"
    out = "once it was not forked from this process: the forked one has ended\nthe end\n"
    assert run_script(BEGIN + folder + text, how="forked", folder=tmp_path) == (0, out, "")


def test_modules_that_came_or_changed_since_are_those_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "changing.py").write_text("def value(index):\n    return 'old'\n")
    (tmp_path / "later.py").write_text("def value(index):\n    return 'later'\n")
    text = """
import importlib, pathlib
import changing

def values(function):
    loader = DataLoader(Does(function, 2), None, num_workers=1)
    return [*loader, loader.stats().start]

assert values(changing.value) == ["old", "old", "forked server"]
path = pathlib.Path(changing.__file__)
path.write_text("def value(index):\\n    return 'newer'\\n")
assert values(changing.value) == ["old", "old", "forked server"]  # as here
importlib.reload(changing)
assert values(changing.value) == ["newer", "newer", "forked server"]
import later
assert values(later.value) == ["later", "later", "forked server"]
print("fine")
"""
    assert run_script(BEGIN + text, how="forked", folder=tmp_path) == (0, "fine\n", "")


def test_a_ctrl_c_that_another_thread_takes_while_a_process_starts_is_raised_behind_that() -> None:
    order, held = [], threading.Event()
    taker = threading.Thread(target=lambda: held.wait(10) and signal.raise_signal(signal.SIGINT))
    taker.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with interrupts_held():
            held.set()
            taker.join()
            order.append("process started")
        order.append("never")
    assert order == ["process started"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_the_server_ends_with_this_process(tmp_path: Path, end: str) -> None:
    text = f"""
loader = loaded(persistent_workers=True)
assert start_of(loader) == "forked server"
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
{end}
"""
    from worker_kit import ended

    code, out, _ = run_script(BEGIN + text, how="forked", folder=tmp_path)
    assert code in (0, -9)
    assert len(out.split()) == 4  # server, tracker of resources, two workers
    assert ended(*map(int, out.split()))
