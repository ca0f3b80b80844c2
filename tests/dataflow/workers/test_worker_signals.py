"""Signals that are sent to all processes of a job are the training process's business; workers live on."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets_kit import make_ints_tar
from loader_kit import stream_of
from parameters_kit import in_full
from programs_kit import Script
from worker_kit import Does, Gate, ended, workers_of_this_process

from dataflow import DataLoader
from prefetch.workers.deaths import WorkerDiedError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
OF_JOBS = ["TERM", "HUP", "USR1", "USR2"]


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    assert workers_of_this_process() == []


def send(name: str, *pids: int) -> None:
    """As a launcher sends it: from another process."""
    subprocess.run(["sh", "-c", " ".join(["kill", f"-{name}", *map(str, pids)])], check=True, timeout=20)


def own_pid(index: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("method", ["fork", "forkserver", *in_full("spawn")])
@pytest.mark.parametrize("num_workers", [1, *in_full(2, 5)])
def test_workers_over_a_dataset_live_on(method: str, num_workers: int) -> None:
    with DataLoader(
        Does(own_pid, 200), None, num_workers=num_workers, multiprocessing_context=method
    ) as loader:
        loop = iter(loader)
        pids = {next(loop) for _ in range(num_workers)}
        for name in OF_JOBS:
            send(name, *pids)
        assert {*loop} == pids
        assert len(pids) == num_workers


def noted(sample: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid()}


@pytest.mark.here
@pytest.mark.parametrize("num_workers", [1, *in_full(2, 5)])
def test_builders_over_shards_live_on_and_so_does_what_forks_their_replacements(
    tmp_path: Path, num_workers: int
) -> None:
    dataset = make_ints_tar(tmp_path).open(transform=noted)
    with DataLoader(dataset, 2, num_workers=num_workers) as loader:
        list(loader)  # its session waits for the next loop
        pids = workers_of_this_process()
        assert len(pids) == num_workers + 1
        for name in OF_JOBS:
            send(name, *pids)
        for _ in range(20):
            assert {int(pid) for batch in loader for pid in batch["pid"]} <= {*pids}
        assert workers_of_this_process() == pids


def test_one_of_the_training_process_itself_ends_a_worker_at_once_with_code_0() -> None:
    with DataLoader(Does(own_pid, 1000), None, num_workers=1) as loader:
        loop = iter(loader)
        os.kill(next(loop), signal.SIGTERM)
        with pytest.raises(WorkerDiedError) as caught:
            list(loop)
        assert [code for _, _, code in caught.value.workers] == [0]


def test_a_handler_of_the_training_process_never_runs_in_a_worker() -> None:
    """Lightning's would put the job into the queue again."""
    ran = []
    before = signal.signal(signal.SIGUSR1, lambda *_: ran.append(os.getpid()))
    try:

        def raises(index: int) -> list[int]:
            signal.raise_signal(signal.SIGUSR1)
            return ran

        assert list(DataLoader(Does(raises), None, num_workers=1)) == [[]] * 8
    finally:
        signal.signal(signal.SIGUSR1, before)


def default_again(index: int) -> int:
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    return child.wait(20)


def forked_again(index: int) -> int:
    pid = os.fork()
    if not pid:
        signal.raise_signal(signal.SIGTERM)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("starts", [default_again, forked_again])
def test_what_a_worker_starts_can_be_ended_as_ever(starts: Any) -> None:
    assert list(DataLoader(Does(starts, 2), None, num_workers=1)) == [-signal.SIGTERM] * 2


def leave(worker: int, *, number: int) -> None:
    signal.signal(number, lambda *_: os._exit(40 + worker))


def test_handlers_of_worker_init_fn_are_heeded() -> None:
    init = functools.partial(leave, number=signal.SIGTERM)
    with DataLoader(Does(own_pid, 1000), None, num_workers=1, worker_init_fn=init) as loader:
        loop = iter(loader)
        send("TERM", next(loop))
        with pytest.raises(WorkerDiedError) as caught:
            list(loop)
        assert [code for _, _, code in caught.value.workers] == [40]


def arrive_and_wait(arrived: Gate, go_on: Gate, index: int) -> int:
    arrived.open()
    go_on.wait()
    return index


def test_stacks_are_told_though_worker_init_fn_handles_usr2(tmp_path: Path) -> None:
    arrived, go_on = Gate(tmp_path / "arrived"), Gate(tmp_path / "go on")
    dataset = Does(functools.partial(arrive_and_wait, arrived, go_on), 1)
    init = functools.partial(leave, number=signal.SIGUSR2)
    loader = DataLoader(dataset, None, num_workers=1, timeout=0.05, worker_init_fn=init)
    loop = iter(loader)
    arrived.wait()
    with pytest.raises(RuntimeError, match="arrive_and_wait"):
        next(loop)
    go_on.open()
    loader.close()
    arrived.close(), go_on.close()


JOB = """
import os, signal, sys
from dataflow import DataLoader
from worker_kit import Does, _gate_at
folder, method = sys.argv[1:]
arrived, go_on = _gate_at(folder + "/arrived"), _gate_at(folder + "/go on")
noted = []

def item(index):
    if index == 2:
        arrived.open()
        go_on.wait()
    return index

def main():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, lambda number, _: noted.append(number))
    print(list(DataLoader(Does(item), None, num_workers=2, multiprocessing_context=method)), len(noted))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["fork", *in_full("forkserver")])
def test_a_job_that_is_signalled_as_a_whole_ends_its_epoch(tmp_path: Path, method: str) -> None:
    """As `scancel --signal` and a terminal that closes do it: servers get the signal, too."""
    arrived, go_on = Gate(tmp_path / "arrived"), Gate(tmp_path / "go on")
    with Script(JOB, tmp_path, method, folder=tmp_path) as script:
        arrived.wait()
        for name in OF_JOBS:
            os.killpg(script.process.pid, getattr(signal, f"SIG{name}"))
        go_on.open()
        code, out, err = script.end()
    arrived.close(), go_on.close()
    assert (code, out) == (0, "[0, 1, 2, 3, 4, 5, 6, 7] 4\n"), err


ORPHANS = """
import os, signal, sys, threading
from dataflow import DataLoader
from worker_kit import Does, _gate_at
arrived = _gate_at(sys.argv[1] + "/arrived")
loops = []

def hang(index):
    arrived.open(os.getpid())
    while True:
        pass

def begin():
    loops.append(iter(DataLoader(Does(hang), None, num_workers=1)))

thread = threading.Thread(target=begin)
thread.start()
thread.join()
arrived.open(0)
signal.pause()
"""


def test_workers_that_a_thread_forked_outlive_it_and_end_with_the_process(tmp_path: Path) -> None:
    arrived = Gate(tmp_path / "arrived")
    with Script(ORPHANS, tmp_path, how="forked", folder=tmp_path) as script:
        pid = max(int(arrived.wait()) for _ in range(2))
        os.kill(pid, 0)  # it lives
        os.kill(script.process.pid, signal.SIGKILL)
        assert ended(pid)
    arrived.close()


def test_stopped_and_continued_workers_go_on(tmp_path: Path) -> None:
    with DataLoader(Does(own_pid, 100), None, num_workers=2) as loader:
        loop = iter(loader)
        pids = {next(loop) for _ in range(2)}
        send("STOP", *pids)
        threading.Timer(0.05, send, ("CONT", *pids)).start()
        assert {*loop} <= pids


def processes_of(loader: Any) -> list[Any]:
    """Builder processes of the session that waits for the next loop."""
    session = stream_of(loader).sessions.open[-1]
    return list(session.resources.engine._builders._processes.pool.processes)


@pytest.mark.here
def test_a_process_that_dies_again_and_again_is_an_accident_each_time(tmp_path: Path) -> None:
    dataset = make_ints_tar(tmp_path).open(columns=["cls"])
    loader = DataLoader(dataset, 2, num_workers=2, max_worker_restarts=2, worker_init_fn=dies)
    with loader, pytest.raises(WorkerDiedError, match="exit code 9"):
        list(loader)


def dies(worker: int) -> None:
    os._exit(9)


@pytest.mark.here
def test_deaths_of_one_accident_are_one_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = make_ints_tar(tmp_path).open(transform=noted)
    with DataLoader(dataset, 2, num_workers=3, max_worker_restarts=1) as loader:
        list(loader)
        first = [process.pid for process in processes_of(loader)]
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        total = sum(len(batch["pid"]) for _ in range(3) for batch in loader)
        assert total == 3 * len(dataset)
    assert len(first) == 3
    assert all("(1 of max_worker_restarts=1)" in record.getMessage() for record in caplog.records)


def test_the_message_names_the_signal_that_came() -> None:
    with DataLoader(Does(own_pid, 1000), None, num_workers=1) as loader:
        loop = iter(loader)
        os.kill(next(loop), signal.SIGBUS)
        with pytest.raises(WorkerDiedError) as caught:
            list(loop)
    assert re.search(r"killed by signal: Bus error", str(caught.value))
    assert "memory" not in str(caught.value)
