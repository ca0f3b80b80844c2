"""The process that `DirectProcesses` starts: for each case it forks some that read.

It has no threads (numerical libraries are told to have none), so that its children can do all that it could;
they have one for each of their reads in flight. It speaks over one connection: it is given the shards, and
then a case at a time, and replies with the ids of its children when they begin, and with what they read.
While they read it watches that connection, whose end ends them and itself; and if it is killed, the kernel
kills them. Ctrl-C is for the process at the other end, and blocked here.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from dataflow.tools.bench.direct import DirectReader
from dataflow.tools.bench.reads import Block, BlockOrder, Case, CaseRequest, CaseTimes, run_case
from prefetch.workers.signals import end_with_parent
from sharding.blocks import Shard
from sharding.errors import DataflowError

_AHEAD = 1 << 17
"""Blocks of a random order that are known before the clock starts, to all readers together."""
_LEAST_AHEAD = 1 << 10
_fork = multiprocessing.get_context("fork")


def random_share(order: BlockOrder, number: int, readers: int, *, at_once: int) -> Iterator[Block]:
    """Return what one of several readers takes of a random order: each `readers`-th position.

    `at_once` are made together, the first of them now: it takes time, which is not to lie between two reads.
    """
    step = readers * at_once
    parts = (order.blocks(range(at, at + step, readers)) for at in itertools.count(number, step))
    return itertools.chain(next(parts), itertools.chain.from_iterable(parts))


def shared_counter() -> memoryview:
    """A number, 0, that processes share which are forked from this one."""
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")


def sequential_share(
    order: BlockOrder, lock: AbstractContextManager[Any], counter: memoryview
) -> Iterator[Block]:
    """Yield what one of several readers takes of their common stream: what comes next when it asks.

    Args:
        order: of the blocks.
        lock: guards the counter among all readers.
        counter: [1] the position that comes next, in memory that they share.
    """
    while True:
        with lock:
            position = counter[0]
            counter[0] = position + 1
        yield order.in_line(position)


def serve(parent: Connection) -> None:
    """Answer until the connection ends, or with an error."""
    try:
        shards = parent.recv()
        try:
            with DirectReader(shards) as direct:
                gc.freeze()  # memory that is shared with children stays so
                while True:
                    parent.send(_read(parent.recv(), shards, direct, parent))
        except DataflowError as error:
            parent.send(error)
    except (EOFError, ConnectionError):
        pass


def _read(
    request: CaseRequest, shards: Sequence[Shard], direct: DirectReader, parent: Connection
) -> CaseTimes:
    case = request.case
    order = BlockOrder(shards, case.block_bytes, case.pattern)
    lock, counter = _fork.Lock(), shared_counter()
    line, go = os.pipe()
    running: dict[Connection, BaseProcess] = {}

    def share(number: int) -> Iterator[Block]:
        if case.pattern == "random":
            at_once = max(_LEAST_AHEAD, _AHEAD // case.concurrency)
            return random_share(order, number, case.concurrency, at_once=at_once)
        return sequential_share(order, lock, counter)

    def child(numbers: range, replies: Connection) -> None:
        end_with_parent(os.getppid())
        parent.close()
        os.close(go)

        def line_up() -> None:
            replies.send(None)
            os.read(line, 1)  # until nobody holds the other end

        replies.send(part_of_case(case, numbers, share, direct, request.seconds, line_up))

    try:
        for first in range(request.processes):
            numbers = range(first, case.concurrency, request.processes)
            process, ours = _started(child, numbers)
            running[ours] = process
        _replies(running, parent)
        os.close(go)
        parent.send([process.pid for process in running.values()])
        return CaseTimes.together(_replies(running, parent))
    finally:
        os.close(line)
        for process in running.values():
            process.kill()
        for ours, process in running.items():
            process.join()
            ours.close()


def _started(child: Callable[[range, Connection], None], numbers: range) -> tuple[BaseProcess, Connection]:
    """A process, and what it replies with."""
    try:
        ours, theirs = _fork.Pipe(duplex=False)
        with theirs:
            process = _fork.Process(target=child, args=(numbers, theirs))
            process.start()
    except OSError as error:
        raise DataflowError(f"cannot start a process that reads: {error}") from error
    return process, ours


def part_of_case(
    case: Case,
    numbers: range,
    share: Callable[[int], Iterator[Block]],
    direct: DirectReader,
    seconds: float,
    line_up: Callable[[], None],
) -> CaseTimes | DataflowError:
    """Return what the readers of these numbers do, in a process of their own."""
    part = replace(case, concurrency=len(numbers))
    with ThreadPoolExecutor(len(numbers)) as pool:
        try:
            return run_case(
                part,
                lambda at: share(numbers[at]),
                direct.read_into,
                pool,
                seconds=seconds,
                whole_blocks=True,
                line_up=line_up,
            )
        except DataflowError as error:
            return error


def _replies(running: dict[Connection, BaseProcess], parent: Connection) -> list[Any]:
    """Return one reply of each process."""
    replies: dict[Connection, Any] = {}
    while len(replies) < len(running):
        ready: list[Any] = wait([parent, *(ours for ours in running if ours not in replies)])
        for one in ready:
            if one is parent:  # it says nothing meanwhile: it has gone, or wants no answer any more
                raise EOFError
            try:
                replies[one] = one.recv()
            except EOFError:
                running[one].join()
                code = running[one].exitcode
                raise DataflowError(f"a process that read was ended (exit code {code})") from None
            if isinstance(replies[one], DataflowError):
                raise replies[one]
    return [replies[ours] for ours in running]


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each child needs two
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)
