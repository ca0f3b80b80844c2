"""One case of a storage benchmark: blocks of one size, in one order, so many in flight, for some seconds.

"In flight" is the number of threads, each with one read at a time. Sequential means one stream in the order
of the shards, whichever thread asks; random takes the blocks in a seeded permutation, each once before any
comes again. Reads around the page cache are fio's (`dataflow.tools.bench.fio`).
Every read's beginning and end are kept; all figures are made from them.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.tools.bench.evidence import device_bytes
from dataflow.tools.bench.settings import Pattern
from sharding.blocks import Shard
from sharding.order.permutations import feistel

ReadInto = Callable[[Shard, int, NDArray[np.uint8]], None]
Block = tuple[Shard, int, int]
"""A block: shard, offset, bytes."""
_AT_ONCE = 4096
ALIGNMENT = 4096
"""Alignment of offsets and lengths of direct reads: every device accepts it."""
PERCENTILES = ("50", "90", "99", "99.9")
"""Percentiles that are reported, in per cent."""
_BEYOND = 10


@dataclass(frozen=True)
class Case:
    """One case of reads that are asked of the store."""

    pattern: Pattern
    block_bytes: int
    concurrency: int


class BlockOrder:
    """The order of the blocks: position -> (shard, offset, bytes). Thread-safe but for its iterators.

    Blocks are whole ones, aligned in their shard; a shard that is smaller than a block is one block.
    """

    def __init__(self, shards: Sequence[Shard], block_bytes: int, pattern: Pattern, seed: int = 0) -> None:
        self._shards = [shard for shard in shards if shard.size]
        self._block_bytes, self._pattern, self._seed = block_bytes, pattern, seed
        self._sizes = np.array([shard.size for shard in self._shards], np.int64)
        self._ends = np.cumsum(np.maximum(1, self._sizes // block_bytes))
        self._total = int(self._ends[-1]) if self._shards else 0

    def __len__(self) -> int:
        """Return the number of blocks of one pass."""
        return self._total

    def __getitem__(self, position: int) -> Block:
        """The block at a position; positions beyond the first pass begin another one, in the same order."""
        position %= self._total
        return self.blocks(range(position, position + 1))[0]

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks of one pass."""
        # Some thousand at a time: what Python does between two reads counts as the store's time.
        for first in range(0, self._total, _AT_ONCE):
            yield from self.blocks(range(first, min(first + _AT_ONCE, self._total)))

    def blocks(self, positions: range) -> list[Block]:
        """Return the blocks at many positions of the first pass."""
        indices = np.arange(positions.start, positions.stop, dtype=np.uint64)
        random = self._pattern == "random"
        numbers = (feistel(indices, self._total, self._seed) if random else indices).astype(np.int64)
        shard = np.searchsorted(self._ends, numbers, side="right")
        first = np.where(shard > 0, self._ends[shard - 1], 0)
        offsets = (numbers - first) * self._block_bytes
        nbytes = np.minimum(self._block_bytes, self._sizes[shard] - offsets)
        shards = [self._shards[number] for number in shard.tolist()]
        return list(zip(shards, offsets.tolist(), nbytes.tolist(), strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class CaseTimes:
    """The measurements of one case. Times are seconds on one clock."""

    began_s: NDArray[np.float64]
    """[n] when each read began, in seconds."""
    ended_s: NDArray[np.float64]
    """[n] when each read ended, in seconds."""
    nbytes: NDArray[np.int64]
    """[n] bytes of each read."""
    cpu_s: float
    """Processor time of the process that reads, all threads, user and system, while it does."""
    device_bytes: int | None
    """Bytes that it caused to be fetched from storage meanwhile; None: the kernel does not say."""
    exhausted: bool
    """True if it ended because every block was read once."""

    @property
    def seconds(self) -> float:
        """The time from the beginning of the first read to the end of the last."""
        return float(self.ended_s.max() - self.began_s.min()) if len(self.ended_s) else 0.0

    @property
    def total_bytes(self) -> int:
        """The bytes of all reads."""
        return int(self.nbytes.sum())

    def mb_per_s_over_time(self, parts: int) -> list[float]:
        """[parts] MB/s in equal parts of the time; a read's bytes count evenly from beginning to end."""
        began = self.began_s - (self.began_s.min() if len(self.began_s) else 0.0)
        duration = np.maximum(self.ended_s - self.began_s, 1e-9)
        edges = np.linspace(0, self.seconds, parts + 1)
        read_bytes = [(np.clip((edge - began) / duration, 0, 1) * self.nbytes).sum() for edge in edges]
        rates: list[float] = (np.diff(read_bytes) / 1e6 / max(self.seconds / parts, 1e-9)).tolist()
        return rates


def in_turn(order: BlockOrder, *, once: bool) -> Callable[[int], Iterator[Block]]:
    """Return for each of several threads, by number, its blocks: whatever comes next when it asks.

    Args:
        order: of the blocks.
        once: end when every block was given once.
    """
    passes = iter(order) if once else itertools.chain.from_iterable(itertools.repeat(order))
    taking = threading.Lock()

    def blocks(number: int) -> Iterator[Block]:
        while True:
            with taking:
                block = next(passes, None)
            if block is None:
                return
            yield block

    return blocks


def run_case(
    case: Case,
    blocks: Callable[[int], Iterator[Block]],
    read: ReadInto,
    pool: Executor,
    *,
    seconds: float,
    warm_up: Callable[[int], Block] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    from_device: Callable[[], int | None] = device_bytes,
) -> CaseTimes:
    """Read by threads for some seconds; reads in flight at the end are finished and count.

    Args:
        case: what is asked.
        blocks: for each thread, by its number, what it reads.
        read: fills memory from a shard.
        pool: has at least `case.concurrency` threads, all idle.
        seconds: when to stop asking.
        warm_up: for each thread a block that it reads before the clock starts: connections are open then.
        clock: seconds on a clock that only goes forward.
        from_device: bytes that this process has caused to be fetched from storage so far; None: not known.

    Raises:
        ShardReadError: the first that a read raised; all threads have ended.
    """
    failed = threading.Event()
    cpu_s, fetched = 0.0, None

    def begin() -> None:
        nonlocal cpu_s, fetched
        cpu_s, fetched = time.process_time(), from_device()

    line = threading.Barrier(case.concurrency, begin)

    def work(number: int) -> _ThreadTimes:
        try:
            out, mine = np.zeros(case.block_bytes, np.uint8), blocks(number)
            out.fill(0)  # its pages are there before the clock starts
            if warm_up is not None:
                shard, offset, nbytes = warm_up(number)
                read(shard, offset, out[:nbytes])
            line.wait()
            return _read_on(mine, read, out, seconds, failed, clock)
        except BaseException:
            failed.set()
            line.abort()
            raise

    running = [pool.submit(work, number) for number in range(case.concurrency)]
    try:
        wait(running)
    except BaseException:  # Ctrl-C
        failed.set()
        line.abort()
        raise
    errors = [error for error in (future.exception() for future in running) if error]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    cpu_s, after = time.process_time() - cpu_s, from_device()
    began, ended, sizes, exhausted = zip(*(future.result() for future in running), strict=True)
    return CaseTimes(
        began_s=np.concatenate(began),
        ended_s=np.concatenate(ended),
        nbytes=np.concatenate(sizes).astype(np.int64),
        cpu_s=cpu_s,
        device_bytes=None if fetched is None or after is None else after - fetched,
        exhausted=any(exhausted),
    )


_ThreadTimes = tuple["array[float]", "array[float]", "array[int]", bool]
"""The times when reads began and ended, their bytes, and whether there was no further block."""


def _read_on(
    blocks: Iterator[Block],
    read: ReadInto,
    out: NDArray[np.uint8],
    seconds: float,
    failed: threading.Event,
    clock: Callable[[], float],
) -> _ThreadTimes:
    """One thread's reads. What it does between two counts as the store's time, so it does little."""
    began, ended, sizes = array("d"), array("d"), array("q")
    block_bytes, end = len(out), clock() + seconds
    for shard, offset, nbytes in blocks:
        into = out if nbytes == block_bytes else out[:nbytes]
        before = clock()
        read(shard, offset, into)
        now = clock()
        began.append(before)
        ended.append(now)
        sizes.append(nbytes)
        if now >= end or failed.is_set():
            return began, ended, sizes, False
    return began, ended, sizes, True


def needed(percentile: str) -> int:
    """Values that the percentile needs: "99.9" needs 10,000."""
    return math.ceil(_BEYOND / (1 - Fraction(percentile) / 100))


def percentiles_of(values: NDArray[np.floating[Any]]) -> dict[str, float | None]:
    """Percentile -> value, None where `values` [n] are too few for it.

    The q-th percentile of n values is the ceil(q n)-th smallest (nearest rank: always a value that occurred).
    It is told if at least ten values lie beyond it; with fewer, a repetition would give quite another one.
    """
    ordered = np.sort(values)
    values_of: dict[str, float | None] = {}
    for name in PERCENTILES:
        rank = math.ceil(Fraction(name) / 100 * len(ordered))
        values_of[name] = float(ordered[rank - 1]) if len(ordered) >= needed(name) else None
    return values_of


def absent_text(percentiles: Mapping[str, float | None], count: int) -> str:
    """Why some percentiles are not told; "" if all are."""
    absent = [name for name, value in percentiles.items() if value is None]
    if not absent:
        return ""
    wants = ", ".join(f"p{name} needs {needed(name):,}" for name in absent)
    return f"{count:,} reads are too few for some percentiles ({wants}); --seconds makes more"
