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
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataflow.bench.direct import aligned_buffer
from sharding.blocks import Shard
from sharding.keyed import feistel

Pattern = Literal["sequential", "random"]
ReadInto = Callable[[Shard, int, NDArray[np.uint8]], None]
_AT_ONCE = 4096
_KEPT = 16


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
        self._sizes = np.array([shard.size for shard in self._shards], np.int64)
        self._ends = np.cumsum(np.maximum(1, self._sizes // block_bytes))
        self._total = int(self._ends[-1]) if self._shards else 0
        # Made some thousand at a time: what Python does between two reads counts as the store's time.
        self._lock = threading.Lock()  # guards what is written into it; at the beginning all threads want one
        self._parts: dict[int, list[tuple[Shard, int, int]]] = {}
        if self._total:
            self._part(0)

    def __len__(self) -> int:
        """Blocks of one pass."""
        return self._total

    def __getitem__(self, place: int) -> tuple[Shard, int, int]:
        """The block at a place; places beyond the first pass begin another one, in the same order."""
        part, at = divmod(place % self._total, _AT_ONCE)
        if at == _AT_ONCE // 2:  # one thread, while the others read on
            self._part((part + 1) % -(-self._total // _AT_ONCE))
        made = self._parts.get(part)
        return (self._part(part) if made is None else made)[at]

    def _part(self, part: int) -> list[tuple[Shard, int, int]]:
        """From memory, or made by one thread."""
        with self._lock:
            if part not in self._parts:
                if len(self._parts) == _KEPT:
                    del self._parts[next(iter(self._parts))]
                self._parts[part] = self._made(part)
            return self._parts[part]

    def _made(self, part: int) -> list[tuple[Shard, int, int]]:
        places = np.arange(part * _AT_ONCE, min((part + 1) * _AT_ONCE, self._total), dtype=np.uint64)
        random = self._pattern == "random"
        numbers = (feistel(places, self._total, self._seed) if random else places).astype(np.int64)
        shard = np.searchsorted(self._ends, numbers, side="right")
        first = np.where(shard > 0, self._ends[shard - 1], 0)
        offsets = (numbers - first) * self._block_bytes
        nbytes = np.minimum(self._block_bytes, self._sizes[shard] - offsets)
        shards = [self._shards[number] for number in shard.tolist()]
        return list(zip(shards, offsets.tolist(), nbytes.tolist(), strict=True))


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

    def work(number: int) -> tuple[array[float], array[float], array[int], bool]:
        began, ended, sizes = array("d"), array("d"), array("q")
        try:
            out = aligned_buffer(case.block_bytes)
            if warm_up:
                shard, offset, nbytes = order[len(order) - 1 - number % len(order)]
                read(shard, offset, out[:nbytes])
            line.wait()
            start = now = clock()
            while not failed.is_set():
                place = next(places)
                if once and place >= len(order):
                    return began, ended, sizes, True
                if now - start >= seconds:
                    break
                shard, offset, nbytes = order[place]
                into = out if whole_blocks or nbytes == case.block_bytes else out[:nbytes]
                before = clock()
                read(shard, offset, into)
                now = clock()
                began.append(before)
                ended.append(now)
                sizes.append(nbytes)
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
