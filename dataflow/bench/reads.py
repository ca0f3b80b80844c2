"""One case of a storage benchmark: blocks of one size, in one order, so many in flight, for some seconds.

"In flight" is the number of threads, each with one read at a time: fio's queue depth with one job. Sequential
means one stream in the order of the shards, whichever thread asks; random takes the blocks in a keyed order,
each once before any comes again. Every read's beginning and end are kept; all figures are made from them.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataflow.bench.direct import aligned_buffer
from sharding.blocks import Shard
from sharding.keyed import feistel

Pattern = Literal["sequential", "random"]
ReadInto = Callable[[Shard, int, NDArray[np.uint8]], None]
_AT_ONCE = 4096


@dataclass(frozen=True)
class Case:
    """What is asked of the store."""

    pattern: Pattern
    block_bytes: int
    concurrency: int


class BlockOrder:
    """Which block comes when: place -> (shard, offset, bytes). Thread-safe.

    Blocks are whole ones, aligned in their shard; a shard that is smaller than a block is one block.
    """

    def __init__(self, shards: Sequence[Shard], block_bytes: int, pattern: Pattern, seed: int = 0) -> None:
        self._shards = [shard for shard in shards if shard.size]
        self._block_bytes, self._pattern, self._seed = block_bytes, pattern, seed
        counts = [max(1, shard.size // block_bytes) for shard in self._shards]
        self._ends = list(itertools.accumulate(counts))
        self._numbers = lru_cache(maxsize=64)(self._made)

    def __len__(self) -> int:
        """Blocks of one pass."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> tuple[Shard, int, int]:
        """The block at a place; places beyond the first pass begin another one, in the same order."""
        number = place % len(self)
        if self._pattern == "random":
            number = self._numbers(number // _AT_ONCE)[number % _AT_ONCE]
        at = bisect_right(self._ends, number)
        shard = self._shards[at]
        offset = (number - (self._ends[at - 1] if at else 0)) * self._block_bytes
        return shard, offset, min(self._block_bytes, shard.size - offset)

    def _made(self, part: int) -> list[int]:
        first = part * _AT_ONCE
        places = np.arange(first, min(first + _AT_ONCE, len(self)), dtype=np.uint64)
        numbers: list[int] = feistel(places, len(self), self._seed).tolist()
        return numbers


@dataclass(frozen=True, eq=False)
class Reads:
    """What was measured. Times are seconds since the first read began."""

    began_s: NDArray[np.float64]
    """[n]"""
    ended_s: NDArray[np.float64]
    """[n]"""
    nbytes: NDArray[np.int64]
    """[n]"""
    cpu_s: float
    """Processor time of this process, all threads, user and system."""
    exhausted: bool
    """Whether it ended because every block was read once."""

    @property
    def seconds(self) -> float:
        """From the beginning of the first read to the end of the last."""
        return float(self.ended_s.max()) if len(self.ended_s) else 0.0

    @property
    def total_bytes(self) -> int:
        """Of all reads."""
        return int(self.nbytes.sum())

    def mb_per_s_over_time(self, parts: int) -> list[float]:
        """[parts] MB/s in equal parts of the time; a read's bytes count evenly from beginning to end."""
        edges = np.linspace(0, self.seconds, parts + 1)
        duration = np.maximum(self.ended_s - self.began_s, 1e-9)
        done = [(np.clip((edge - self.began_s) / duration, 0, 1) * self.nbytes).sum() for edge in edges]
        rates: list[float] = (np.diff(done) / 1e6 / max(self.seconds / parts, 1e-9)).tolist()
        return rates


def run_case(
    case: Case,
    order: BlockOrder,
    read: ReadInto,
    pool: Executor,
    *,
    seconds: float,
    once: bool,
    warm_up: bool = False,
    whole_blocks: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Reads:
    """Read for some seconds; reads in flight at the end are finished and count.

    Args:
        case: what is asked.
        order: of `case.block_bytes` and `case.pattern`.
        read: fills memory from a shard.
        pool: has at least `case.concurrency` threads, all idle.
        seconds: when to stop asking.
        once: stop when every block was read once, too.
        warm_up: let each thread read one block before the clock starts: connections are open then.
        whole_blocks: ask for whole blocks at the end of a shard, too, as direct reads must.
        clock: seconds on a clock that only goes forward.

    Raises:
        ShardReadError: the first that a read raised; all threads have ended.
    """
    places, line = itertools.count(), threading.Barrier(case.concurrency)
    failed = threading.Event()

    def one(place: int, out: NDArray[np.uint8]) -> int:
        shard, offset, nbytes = order[place]
        read(shard, offset, out if whole_blocks else out[:nbytes])
        return nbytes

    def work(number: int) -> tuple[array[float], array[float], array[int], bool]:
        began, ended, sizes = array("d"), array("d"), array("q")
        try:
            out = aligned_buffer(case.block_bytes)
            if warm_up:
                one(len(order) - 1 - number % len(order), out)
            line.wait()
            start = now = clock()
            while not failed.is_set():
                place = next(places)
                if once and place >= len(order):
                    return began, ended, sizes, True
                if now - start >= seconds:
                    break
                before = clock()
                sizes.append(one(place, out))
                now = clock()
                began.append(before)
                ended.append(now)
        except BaseException:
            failed.set()
            line.abort()
            raise
        return began, ended, sizes, False

    cpu_s = time.process_time()
    running = [pool.submit(work, number) for number in range(case.concurrency)]
    try:
        wait(running)
    except BaseException:  # Ctrl-C
        failed.set()
        line.abort()
        raise
    cpu_s = time.process_time() - cpu_s
    errors = [error for error in (future.exception() for future in running) if error]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    parts = [future.result() for future in running]
    starts, ends = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in (0, 1))
    first = starts.min() if len(starts) else 0.0
    sizes = np.concatenate([np.asarray(part[2], np.int64) for part in parts])
    return Reads(starts - first, ends - first, sizes, cpu_s, any(part[3] for part in parts))
