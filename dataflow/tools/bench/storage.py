"""What `dataflow bench storage` does: sweep order, block size and reads in flight over shards where they lie.

Local shards are read around the page cache (`dataflow.tools.bench.direct`), or buffered on demand; those and
all remote ones with the reader that training uses (`prefetch.store.reader`), so what is measured is what
training gets.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from dataflow.opening import load_catalog, shards_of
from dataflow.tools.bench.direct import ALIGNMENT, DirectReader, aligned_buffer
from dataflow.tools.bench.direct_processes import DirectProcesses
from dataflow.tools.bench.evidence import Evidence, Label, evict, label_of, resident_share
from dataflow.tools.bench.percentiles import percentiles_of
from dataflow.tools.bench.reads import BlockOrder, Case, Pattern, ReadInto, Reads, in_turn, run_case
from prefetch.store.again import Retrier
from prefetch.store.reader import NO_FAULTS, ReadStats, StoreReader
from sharding.blocks import Shard
from sharding.catalog.build import is_catalog
from sharding.catalog.storage import open_url, shard_info, shard_of
from sharding.errors import DataflowError
from sharding.redaction import without_secrets
from sharding.urls import is_local

How = Literal["direct", "buffered", "store"]
_PARTS_OF_TIME = 20
_FIRST_BYTE_READS = 100
_FIRST_BYTE_S = 2.0
_BUSY_CORES = 0.9
_MANY_READS_PER_S = 10_000


@dataclass(frozen=True)
class Sweep:
    """What a user asks for."""

    source: Sequence[str]
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    patterns: Sequence[Pattern] = ("sequential", "random")
    block_bytes: Sequence[int] = (128 << 10, 2 << 20)
    concurrency: Sequence[int] = (1, 4, 16)
    seconds: float = 2.0
    """A case."""
    read: Literal["direct", "buffered"] = "direct"
    """How local shards are read."""
    evict: bool = False
    """Ask the kernel to drop the shards' pages before each case."""
    require_cold: bool = False
    """Fail where "cold" cannot be said."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"seconds must be > 0, got {self.seconds}")
        if min(*self.concurrency, *self.block_bytes, 1) < 1:
            raise ValueError("block sizes and reads in flight must be >= 1")

    def cases(self) -> list[Case]:
        """Every combination, the orders one after the other."""
        return [Case(*each) for each in itertools.product(self.patterns, self.block_bytes, self.concurrency)]


@dataclass(frozen=True, eq=False)
class Measured:
    """One case, measured."""

    case: Case
    reads: int
    seconds: float
    total_bytes: int
    mb_per_s: float
    """Units of 10**6 bytes."""
    reads_per_s: float
    latency_s: Mapping[str, float | None]
    """Percentile -> seconds; None where there were too few reads to know it."""
    cpu_s_per_gb: float
    """Processor time of this client, all that reads, per 10**9 bytes. The kernel's work in interrupts, and
    the server's, are not in it."""
    cores: float
    """Processor time per second. About 1 over a remote store: fsspec's event loop may be the limit."""
    mb_per_s_over_time: Sequence[float]
    """In twenty equal parts of the time."""
    passes: float
    """How often every block was read: above 1, some were read again."""
    exhausted: bool
    """It ended early, since every block was read once."""
    label: Label
    faults: ReadStats
    """What went wrong with remote reads, and was cured."""

    def to_json(self) -> dict[str, Any]:
        """All figures, as JSON types."""
        return {**asdict(self), "mb_per_s_over_time": [round(rate, 3) for rate in self.mb_per_s_over_time]}


@dataclass(frozen=True, eq=False)
class FirstByte:
    """Reads of the smallest size, one at a time."""

    nbytes: int
    """1 from a remote store, a block of 4 KiB directly from a disk."""
    first_s: float
    """The very first one: over a network, with connecting and looking the shard up."""
    reads: int
    """Those after it."""
    latency_s: Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class Found:
    """What `dataflow bench storage` found."""

    sweep: Sweep
    shards: int
    stored_bytes: int
    how: How
    first_byte: FirstByte
    cases: Sequence[Measured]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "source": list(map(without_secrets, self.sweep.source)),
            "shards": self.shards,
            "stored_bytes": self.stored_bytes,
            "read": self.how,
            "seconds_a_case": self.sweep.seconds,
            "evict": self.sweep.evict,
            "machine": {"cores": usable_cores(), "system": platform.platform()},
            "first_byte": asdict(self.first_byte),
            "cases": [one.to_json() for one in self.cases],
        }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bench_storage(sweep: Sweep, tell: Callable[[int, int, Case], None] = lambda *_: None) -> Found:
    """Measure every case, one after the other; `tell` hears of each before it begins.

    Raises:
        ShardReadError: shards that are missing, forbidden, or fail for longer than the reader is patient.
        ValueError: block sizes that direct reads cannot have, or nothing to read.
        DataflowError: `require_cold` where the evidence does not allow the word.
    """
    cases = sweep.cases()
    most = max(case.concurrency for case in cases)
    with Retrier() as retrier, retrier.pool(most, "dataflow-bench") as pool:
        shards = _shards(sweep, pool, retrier)
        how = _how(sweep, shards)
        found = []
        with _reader(how, shards, sweep, pool) as reader:
            first_byte = _first_byte(shards, how, reader.read)
            for number, case in enumerate(cases):
                tell(number, len(cases), case)
                found.append(_measured(case, shards, how, sweep, reader))
    return Found(sweep, len(shards), sum(shard.size for shard in shards), how, first_byte, found)


def _shards(sweep: Sweep, pool: Executor, retrier: Retrier) -> list[Shard]:
    options = sweep.storage_options
    if len(sweep.source) == 1 and is_catalog(sweep.source[0]):
        urls = load_catalog(sweep.source[0], options, retrier).locations
    else:
        urls = shards_of(list(sweep.source), options, retrier)

    def look(url: str) -> Shard:
        fs, path = open_url(url, options)
        return shard_of(url, retrier(lambda: shard_info(url, fs, path), url))

    shards = [shard for shard in pool.map(look, urls) if shard.size]
    if not shards:
        raise ValueError(f"nothing to read: all {len(urls)} shards are empty")
    return shards


def _how(sweep: Sweep, shards: Sequence[Shard]) -> How:
    """How these shards are read. Raises what need not be measured to be known."""
    if not all(is_local(shard.url) for shard in shards):
        if sweep.require_cold or sweep.evict:
            raise DataflowError(
                "a remote store cannot be called cold, nor made so: what it holds in memory cannot be seen "
                "from here; leave out --require-cold and --evict"
            )
        return "store"
    if sweep.read == "buffered":
        return "buffered"
    odd = [size for size in sweep.block_bytes if size % ALIGNMENT]
    if odd:
        raise ValueError(f"direct reads need blocks of a multiple of {ALIGNMENT} bytes, got {odd[0]}")
    return "direct"


@dataclass(frozen=True)
class _Reader:
    """What reads, and the account of its faults."""

    read: ReadInto
    run: Callable[[Case, BlockOrder], Reads]
    faults: Callable[[], ReadStats]


@contextmanager
def _reader(how: How, shards: Sequence[Shard], sweep: Sweep, pool: Executor) -> Iterator[_Reader]:
    if how == "direct":
        with DirectReader(shards) as direct, DirectProcesses(shards, usable_cores()) as processes:
            yield _Reader(
                direct.read_into, lambda case, _: processes.run(case, sweep.seconds), lambda: NO_FAULTS
            )
        return
    # What was read comes from memory the second time: a case that begins cold must not go round.
    once = how == "buffered" and (sweep.evict or sweep.require_cold)

    def run(case: Case, order: BlockOrder) -> Reads:
        return run_case(
            case,
            in_turn(order, once=once),
            store.read_into,
            pool,
            seconds=sweep.seconds,
            warm_up=(lambda number: order[-1 - number]) if how == "store" else None,
        )

    store = StoreReader(sweep.storage_options)
    try:
        yield _Reader(store.read_into, run, store.stats)
    finally:
        store.close()  # also ends reads that run, after Ctrl-C


def _first_byte(shards: Sequence[Shard], how: How, read: ReadInto) -> FirstByte:
    nbytes = ALIGNMENT if how == "direct" else 1
    out = aligned_buffer(nbytes)
    order = BlockOrder(shards, max(nbytes, 4096), "random", seed=1)
    taken: list[float] = []
    began = now = time.perf_counter()
    for place in range(_FIRST_BYTE_READS + 1):
        shard, offset, _ = order[place]
        read(shard, offset, out)
        taken.append(time.perf_counter() - now)
        now += taken[-1]
        if now - began > _FIRST_BYTE_S:
            break
    later = np.asarray(taken[1:])
    return FirstByte(nbytes, taken[0], len(later), percentiles_of(later))


def _measured(case: Case, shards: Sequence[Shard], how: How, sweep: Sweep, reader: _Reader) -> Measured:
    if sweep.evict:
        evict(shards)
    resident = resident_share(shards) if how == "buffered" else None
    failed = reader.faults()
    order = BlockOrder(shards, case.block_bytes, case.pattern)
    reads = reader.run(case, order)
    passes = len(reads.nbytes) / max(1, len(order))
    label = label_of(
        Evidence(
            reads.total_bytes,
            reads.device_bytes,
            resident,
            direct=how == "direct",
            repeated=passes > 1,
            remote=how == "store",
        )
    )
    if sweep.require_cold and label.word != "cold":
        raise DataflowError(
            f"{case.pattern} reads of {case.block_bytes} bytes were not cold: {label.reason}; "
            "read directly, or add --evict"
        )
    return _figures(case, reads, passes, label, _difference(reader.faults(), failed))


def _figures(case: Case, reads: Reads, passes: float, label: Label, faults: ReadStats) -> Measured:
    seconds, total = max(reads.seconds, 1e-9), reads.total_bytes
    return Measured(
        case=case,
        reads=len(reads.nbytes),
        seconds=reads.seconds,
        total_bytes=total,
        mb_per_s=total / 1e6 / seconds,
        reads_per_s=len(reads.nbytes) / seconds,
        latency_s=percentiles_of(reads.ended_s - reads.began_s),
        cpu_s_per_gb=reads.cpu_s / max(total / 1e9, 1e-9),
        cores=reads.cpu_s / seconds,
        mb_per_s_over_time=reads.mb_per_s_over_time(_PARTS_OF_TIME),
        passes=passes,
        exhausted=reads.exhausted,
        label=label,
        faults=faults,
    )


def _difference(after: ReadStats, before: ReadStats) -> ReadStats:
    earlier = asdict(before)
    return ReadStats(**{name: count - earlier[name] for name, count in asdict(after).items()})


def client_is_busy(one: Measured, how: How) -> bool:
    """Whether this client may be the limit: of its cores, or of the one that an interpreter's lock allows.

    That one counts over remote stores, whose event loop runs on one, and where buffered reads are many and
    small.
    """
    one_core = how == "store" or (how == "buffered" and one.reads_per_s >= _MANY_READS_PER_S)
    return one.cores >= _BUSY_CORES * (1 if one_core else usable_cores())
