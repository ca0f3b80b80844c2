"""Direct reads by several processes: what each takes, what is told, and that they end, whatever happens."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataflow.tools.bench import reader_process
from dataflow.tools.bench.direct import DirectProcesses, DirectReader
from dataflow.tools.bench.reader_process import random_share, sequential_share
from dataflow.tools.bench.reads import BlockOrder, Case
from sharding.blocks import Shard
from sharding.errors import DataflowError, ShardReadError

SHARDS = [Shard("a", 10_000, ""), Shard("empty", 0, ""), Shard("b", 2_500, ""), Shard("c", 300, "")]
LONG_S = 100.0
"""A case that only something else can end."""
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def shard(tmp_path):
    """Of 1 MiB and a bit, on a filesystem with direct reads."""
    path = tmp_path / "a.bin"
    path.write_bytes(bytes((1 << 20) + 100))
    made = Shard(str(path), path.stat().st_size, "")
    try:
        with DirectReader([made]):
            return made
    except ShardReadError as error:
        pytest.skip(str(error))


@pytest.fixture
def ended():
    """Waits for processes that are not ours; called with their ids while they run, it gives the wait."""
    with ExitStack() as opened:

        def watch(pids):
            poll = select.poll()
            left = set()
            for pid in pids:
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                left.add(descriptor)

            def wait():
                while left:
                    ready = poll.poll(10_000)
                    assert ready, "processes that read are left behind"
                    for descriptor, _ in ready:
                        poll.unregister(descriptor)
                        left.discard(descriptor)

            return wait

        yield watch


# ---- who reads what -------------------------------------------------------------------------------------


@given(st.integers(100, 3000), st.integers(1, 20), st.integers(1, 10))
def test_readers_of_a_random_order_take_each_block_once_a_pass(block_bytes, readers, at_once):
    order = BlockOrder(SHARDS, block_bytes, "random")
    shares = [random_share(order, number, readers, at_once=at_once) for number in range(readers)]
    taken = [next(shares[place % readers]) for place in range(2 * len(order))]
    assert taken == [order[place] for place in range(2 * len(order))]


def test_the_first_blocks_of_a_random_share_are_made_before_they_are_asked_for():
    class Noted(BlockOrder):
        made = 0

        def blocks(self, wanted):
            self.made += 1
            return super().blocks(wanted)

    order = Noted([Shard("a", 1 << 20, "")], 1, "random")
    before = order.made
    share = random_share(order, 3, 4, at_once=50)
    assert order.made == before + 1
    for _ in range(50):
        next(share)
    assert order.made == before + 1
    next(share)
    assert order.made == before + 2


@given(st.integers(1, 3000))
def test_a_block_found_by_arithmetic_is_that_of_the_sequential_order(block_bytes):
    order = BlockOrder(SHARDS, block_bytes, "sequential")
    places = range(2 * len(order))
    assert [order.in_line(place) for place in places] == [order[place] for place in places]


def test_sequential_readers_take_whatever_comes_next():
    order, counter = BlockOrder(SHARDS, 1000, "sequential"), memoryview(bytearray(8)).cast("q")
    shares = [sequential_share(order, threading.Lock(), counter) for _ in range(2)]
    asked = [0, 0, 1, 0, 1, 1, 1, 0]
    assert [next(shares[reader]) for reader in asked] == [order[place] for place in range(len(asked))]


SHARED_STREAM = """
import multiprocessing
from dataflow.tools.bench.reader_process import sequential_share, shared_counter
from dataflow.tools.bench.reads import BlockOrder
from sharding.blocks import Shard

fork = multiprocessing.get_context("fork")
order, lock, counter = BlockOrder([Shard("a", 1 << 30, "")], 1, "sequential"), fork.Lock(), shared_counter()
line = fork.Barrier(2)

def take(answers):
    share = sequential_share(order, lock, counter)
    line.wait(20)
    answers.send([next(share)[1] for _ in range(20_000)])

pipes = [fork.Pipe(False) for _ in range(2)]
for _, writer in pipes:
    fork.Process(target=take, args=(writer,)).start()
taken = [reader.recv() for reader, _ in pipes]
print(sorted(taken[0] + taken[1]) == list(range(40_000)), all(part == sorted(part) for part in taken))
"""


def test_processes_share_one_sequential_stream():
    done = subprocess.run([sys.executable, "-c", SHARED_STREAM], capture_output=True, text=True, timeout=25)
    assert (done.stdout, done.stderr) == ("True True\n", "")


class Noting:
    """A reader that notes where it is asked to read."""

    def __init__(self):
        self.offsets = []

    def read_into(self, shard, offset, out):
        self.offsets.append(offset)


def test_a_process_takes_the_shares_of_its_readers():
    noting, lined_up = Noting(), []
    found = reader_process.part_of_case(
        Case("random", 4096, 6),
        range(1, 6, 2),
        lambda number: iter([(SHARDS[0], 10 * number, 4096), (SHARDS[0], 10 * number + 1, 100)]),
        noting,
        LONG_S,
        lambda: lined_up.append(list(noting.offsets)),
    )
    assert sorted(noting.offsets) == [10, 11, 30, 31, 50, 51]
    assert sorted(found.nbytes) == [100] * 3 + [4096] * 3
    assert lined_up == [[]]


# ---- what is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["random", "sequential"])
def test_reads_of_all_processes_are_told_on_one_clock(shard, pattern):
    seen = []
    with DirectProcesses([shard], cores=1) as processes:
        found = processes.run(Case(pattern, 64 << 10, 3), 0.02, seen.extend)
        assert len(os.listdir(f"/proc/{processes.pid}/task")) == 1  # it may fork
        again = processes.run(Case(pattern, 4096, 1), 0.02)
    assert len(seen) == 2
    assert set(found.nbytes) == {64 << 10}
    assert set(again.nbytes) == {4096}
    assert (found.ended_s > found.began_s).all()
    # Three at a time, and no more.
    edges = np.concatenate(
        [
            np.stack([found.began_s, np.ones_like(found.began_s)], 1),
            np.stack([found.ended_s, -np.ones_like(found.began_s)], 1),
        ]
    )
    at_a_time = np.cumsum(edges[np.lexsort((edges[:, 1], edges[:, 0]))][:, 1])
    assert at_a_time.max() <= 3
    assert 0.02 <= found.seconds < 5
    assert found.cpu_s > 0
    assert found.device_bytes is None or found.device_bytes >= 0
    for pid in [processes.pid, *seen]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_nobody_reads_before_all_can(shard):
    now = []
    with DirectProcesses([shard], cores=8) as processes:
        processes.run(Case("random", 4096, 1), 0.0)  # it has started
        asked = time.perf_counter()
        found = processes.run(Case("random", 4096, 16), 0.0, lambda pids: now.append(time.perf_counter()))
    assert len(found.nbytes) == 16
    assert found.began_s.min() - asked > (now[0] - asked) / 3  # the first of 16 was there much earlier


# ---- how it ends ----------------------------------------------------------------------------------------


def test_a_read_that_fails_ends_all_and_names_its_place(shard, ended):
    waits = []

    def shrink(pids):
        waits.append(ended(pids))
        os.truncate(shard.url, 512 << 10)

    with DirectProcesses([shard], cores=2) as processes:
        with pytest.raises(ShardReadError, match="wanted 4096 bytes, got 0") as raised:
            processes.run(Case("random", 4096, 6), LONG_S, shrink)
        waits[0]()
    assert raised.value.shard == shard.url
    assert raised.value.offset >= 512 << 10
    assert raised.value.stage == "read"


def test_a_shard_that_is_gone_is_named(shard):
    os.unlink(shard.url)
    with DirectProcesses([shard], cores=1) as processes, pytest.raises(ShardReadError) as raised:
        processes.run(Case("random", 4096, 1), LONG_S)
    assert raised.value.shard == shard.url


def test_a_reader_that_is_killed_is_an_error(shard, ended):
    waits = []

    def kill(pids):
        waits.append(ended(pids))
        os.kill(pids[1], signal.SIGKILL)

    with DirectProcesses([shard], cores=1) as processes:
        with pytest.raises(DataflowError, match=r"a process that read was ended \(exit code -9\)"):
            processes.run(Case("sequential", 4096, 2), LONG_S, kill)
        waits[0]()


def test_readers_end_with_the_process_that_started_them(shard, ended):
    waits = []
    with DirectProcesses([shard], cores=1) as processes:

        def kill(pids):
            waits.append(ended(pids))
            os.kill(processes.pid, signal.SIGKILL)

        with pytest.raises(DataflowError, match="which starts readers, was ended"):
            processes.run(Case("random", 4096, 2), LONG_S, kill)
        waits[0]()


def test_a_case_that_does_not_end_is_given_up(shard, ended):
    waits = []

    with DirectProcesses([shard], cores=1, late_s=0.05, end_s=0.05) as processes:

        def hang(pids):
            waits.append(ended([processes.pid, *pids]))
            os.kill(processes.pid, signal.SIGSTOP)

        with pytest.raises(DataflowError, match=r"no answer from the processes that read within 0\.06 s"):
            processes.run(Case("random", 4096, 2), 0.01, hang)
    waits[0]()


READS_LONG = """
import sys
from dataflow.tools.bench.direct import DirectProcesses
from dataflow.tools.bench.reads import Case
from sharding.blocks import Shard

with DirectProcesses([Shard(sys.argv[1], 1 << 20, "")], cores=1) as processes:
    processes.run(Case("random", 4096, 3), 100.0, lambda pids: print(processes.pid, *pids, flush=True))
"""


@pytest.mark.parametrize(
    "stop",
    [lambda pid: os.kill(pid, signal.SIGKILL), lambda pid: os.killpg(pid, signal.SIGINT)],
    ids=["the parent is killed", "Ctrl-C"],
)
def test_nothing_is_left_behind(shard, ended, stop):
    command = [sys.executable, "-c", READS_LONG, shard.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as parent:
        try:
            wait = ended(map(int, parent.stdout.readline().split()))
            stop(parent.pid)
            _, said = parent.communicate(timeout=15)
            wait()
        finally:
            parent.kill()
    assert said == "" or said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("Traceback") <= 1  # the parent's, if anybody's
