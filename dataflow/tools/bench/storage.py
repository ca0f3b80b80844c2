"""`dataflow bench storage` sweeps order, block size and reads in flight over shards where they lie.

Local shards are read around the page cache by fio (`dataflow.tools.bench.fio`) where it is installed, which
tells what the device gives. Otherwise, and from all remote stores, they are read with the reader that
training uses (`prefetch.store.reader`): what is measured is what training gets.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dataflow.sources.listing.claims import SourceArguments, resolve
from dataflow.sources.listing.places import Places
from dataflow.tools.bench.evidence import Evidence, Label, device_bytes, evict, label_of, resident_share
from dataflow.tools.bench.fio import check_direct, run_fio, why_no_fio
from dataflow.tools.bench.reads import (
    ALIGNMENT,
    PERCENTILES,
    BlockOrder,
    Case,
    CaseTimes,
    absent_text,
    in_turn,
    percentiles_of,
    run_case,
)
from dataflow.tools.bench.settings import Sweep, stored_sample_bytes
from dataflow.tools.terminal.report import (
    Drawing,
    Page,
    Part,
    Sentence,
    Table,
    bytes_text,
    machine,
    usable_cores,
)
from dataflow.tools.verdicts.storage import block_text, storage_verdict
from prefetch.counts import NO_FAULTS, ReadStats
from prefetch.store.reader import StoreReader
from prefetch.store.retrier import Retrier
from sharding.blocks import Shard
from sharding.catalog.storage import open_url, shard_info, shard_of
from sharding.errors import DataflowError, ShardReadError
from sharding.redaction import without_secrets
from sharding.urls import is_local

How = Literal["direct", "buffered", "store"]
_HOW: Mapping[How, str] = {
    "direct": "local files, around the page cache, by fio",
    "buffered": "local files, through the page cache, with the reader that training uses",
    "store": "a remote store, with the reader that training uses",
}
_PARTS_OF_TIME = 20
_FIRST_BYTE_READS = 100
_FIRST_BYTE_S = 2.0
_BUSY_CORES = 0.9
_MANY_READS_PER_S = 10_000


@dataclass(frozen=True, eq=False, kw_only=True)
class CaseFigures:
    """The measurements of one case."""

    case: Case
    reads: int
    seconds: float
    total_bytes: int
    mb_per_s: float
    """Throughput in units of 10**6 bytes a second."""
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
    """Number of times that every block was read: above 1, some were read again."""
    exhausted: bool
    """It ended early, since every block was read once."""
    left_out: int
    """Shards that are shorter than a block, which fio cannot read."""
    label: Label
    faults: ReadStats
    """Faults of remote reads that were cured."""
    client_is_busy: bool
    """True if this client may be the limit, and not the store."""

    def to_json(self) -> dict[str, Any]:
        """All figures, as JSON types."""
        return {**asdict(self), "mb_per_s_over_time": [round(rate, 3) for rate in self.mb_per_s_over_time]}

    def to_row(self) -> dict[str, Any]:
        """Return the figures as one row of a CSV file."""
        latency_ms = {name: None if value is None else 1e3 * value for name, value in self.latency_s.items()}
        return {
            "pattern": self.case.pattern,
            "block_bytes": self.case.block_bytes,
            "in_flight": self.case.concurrency,
            "seconds": self.seconds,
            "reads": self.reads,
            "total_bytes": self.total_bytes,
            "mb_per_s": self.mb_per_s,
            "reads_per_s": self.reads_per_s,
            **{f"p{name}_ms": latency_ms[name] for name in PERCENTILES},
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "cores": self.cores,
            "passes": self.passes,
            "data": self.label.word,
            "retries": self.faults.retries,
            "throttled": self.faults.throttled,
        }


@dataclass(frozen=True, eq=False)
class FirstByte:
    """Reads of the smallest size, one at a time."""

    nbytes: int
    """1 from a remote store, a block of 4 KiB directly from a disk."""
    first_s: float
    """The very first one: over a network, with connecting and looking the shard up."""
    reads: int
    """Number of reads after it."""
    latency_s: Mapping[str, float | None]

    @staticmethod
    def of(nbytes: int, latencies_s: NDArray[np.float64]) -> FirstByte:
        """Return what the seconds of all reads, [n] in order, tell."""
        later = latencies_s[1:]
        return FirstByte(nbytes, float(latencies_s[0]), len(later), percentiles_of(later))


@dataclass(frozen=True, eq=False, kw_only=True)
class StorageFigures:
    """The measurements of `dataflow bench storage`."""

    settings: Sweep
    shards: int
    stored_bytes: int
    how: How
    first_byte: FirstByte
    cases: Sequence[CaseFigures]
    sample_bytes: float | None = None
    """Bytes that are read for a sample; None: not asked for."""
    why_no_fio: str = ""
    """The reason why local files were not read by fio; "": nobody asks."""

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        need = self.settings.need
        return {
            "need": None if need is None else need.to_json(self.sample_bytes),
            "source": list(map(without_secrets, self.settings.source)),
            "shards": self.shards,
            "stored_bytes": self.stored_bytes,
            "read": self.how,
            "seconds_a_case": self.settings.seconds,
            "evict": self.settings.evict,
            "machine": machine(),
            "first_byte": asdict(self.first_byte),
            "cases": [result.to_json() for result in self.cases],
        }


# ---- measuring ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelAccounts:
    """The kernel's accounts of what was in memory and what a device gave."""

    from_device: Callable[[], int | None] = device_bytes
    resident_share: Callable[[Sequence[Shard]], float | None] = resident_share


def bench_storage(
    settings: Sweep,
    progress: Callable[[int, int, Case], None] = lambda *_: None,
    accounts: KernelAccounts = KernelAccounts(),
) -> StorageFigures:
    """Measure every case, one after the other; `progress` hears of each before it begins.

    Raises:
        ShardReadError: shards that are missing, forbidden, or fail for longer than the reader is patient.
        ValueError: block sizes that direct reads cannot have, or nothing to read.
        DataflowError: `require_cold` where the evidence does not allow the word.
    """
    sample_bytes = _sample_bytes(settings)
    sweep = itertools.product(settings.patterns, settings.block_bytes, settings.concurrency)
    cases = [Case(*each) for each in sweep]
    with Retrier() as retrier, retrier.pool(max(settings.concurrency), "dataflow-bench") as pool:
        shards = _shards(settings, pool, retrier)
        without_fio = why_no_fio(shards, max(settings.block_bytes))
        how = _how(settings, shards, without_fio)
        with _reader(how, shards, settings, pool, accounts) as reader:
            first_byte = reader.first_byte()
            figures = []
            for number, case in enumerate(cases):
                progress(number, len(cases), case)
                figures.append(_measured(case, shards, how, settings, reader))
    return StorageFigures(
        settings=settings,
        shards=len(shards),
        stored_bytes=sum(shard.size for shard in shards),
        how=how,
        first_byte=first_byte,
        cases=figures,
        sample_bytes=sample_bytes,
        why_no_fio=without_fio if how == "buffered" and settings.read is None else "",
    )


def _sample_bytes(settings: Sweep) -> float | None:
    """Return the bytes of a sample, from the catalog if nobody says; `ValueError` where neither tells."""
    if settings.need is None or settings.sample_bytes is not None or settings.need.unit == "bytes":
        return settings.sample_bytes
    from dataflow.dataset import ShardedDataset

    try:
        source = settings.source[0] if len(settings.source) == 1 else list(settings.source)
        catalog = ShardedDataset(
            source,
            config=settings.config,
            split=settings.split,
            columns=settings.columns,
            storage_options=dict(settings.storage_options),
        ).catalog
    except ShardReadError:
        raise
    except (DataflowError, ValueError) as error:
        raise ValueError(
            f"--need {settings.need.text} counts samples, and what one takes is not known: {error}. Give "
            "--sample-bytes, a catalog as SOURCE, or the need in bytes, such as --need 2GB/s"
        ) from error
    return stored_sample_bytes(catalog)


def _shards(settings: Sweep, pool: Executor, retrier: Retrier) -> list[Shard]:
    source, options = settings.source, settings.storage_options
    listing = resolve(
        list(source),
        SourceArguments(config=settings.config, split=settings.split),
        Places(options, retrier),
    )
    urls = listing.urls if listing.catalog is None else listing.catalog.locations

    def look(url: str) -> Shard:
        fs, path = open_url(url, options)
        return shard_of(url, retrier(lambda: shard_info(url, fs, path), url))

    shards = [shard for shard in pool.map(look, urls) if shard.size]
    if not shards:
        raise ValueError(f"nothing to read: all {len(urls)} shards are empty")
    return shards


def _how(settings: Sweep, shards: Sequence[Shard], why_no_fio: str) -> How:
    """Return how these shards are read. Raises what need not be measured to be known."""
    if not all(is_local(shard.url) for shard in shards):
        if settings.require_cold or settings.evict:
            raise DataflowError(
                "a remote store cannot be called cold, nor made so: what it holds in memory cannot be seen "
                "from here; leave out --require-cold and --evict"
            )
        return "store"
    if settings.read == "buffered" or (settings.read is None and why_no_fio):
        return "buffered"
    if why_no_fio:
        raise DataflowError(f"{why_no_fio}: read with --read buffered")
    check_direct(shards)
    return "direct"


@dataclass(frozen=True)
class _Reader:
    """A reader, and the account of its faults."""

    run: Callable[[Case, BlockOrder], CaseTimes]
    first_byte: Callable[[], FirstByte]
    faults: Callable[[], ReadStats]
    accounts: KernelAccounts


@contextmanager
def _reader(
    how: How, shards: Sequence[Shard], settings: Sweep, pool: Executor, accounts: KernelAccounts
) -> Iterator[_Reader]:
    seconds = settings.seconds
    if how == "direct":
        fio = partial(run_fio, shards=shards, from_device=accounts.from_device)

        def first_block() -> FirstByte:
            smallest = Case("random", ALIGNMENT, 1)
            times = fio(smallest, seconds=_FIRST_BYTE_S, reads=_FIRST_BYTE_READS + 1)
            return FirstByte.of(ALIGNMENT, times.ended_s - times.began_s)

        yield _Reader(lambda case, _: fio(case, seconds=seconds), first_block, lambda: NO_FAULTS, accounts)
        return
    # What was read comes from memory the second time: a case that begins cold must not go round.
    once = how == "buffered" and (settings.evict or settings.require_cold)

    def run(case: Case, order: BlockOrder) -> CaseTimes:
        warm_up = (lambda number: order[-1 - number]) if how == "store" else None
        blocks = in_turn(order, once=once)
        return run_case(
            case,
            blocks,
            store.read_into,
            pool,
            seconds=seconds,
            warm_up=warm_up,
            from_device=accounts.from_device,
        )

    store = StoreReader(settings.storage_options)
    try:
        yield _Reader(run, lambda: _first_byte(shards, store), store.stats, accounts)
    finally:
        store.close()  # also ends reads that run, after Ctrl-C


def _first_byte(shards: Sequence[Shard], store: StoreReader) -> FirstByte:
    out = np.zeros(1, np.uint8)
    order = BlockOrder(shards, ALIGNMENT, "random", seed=1)
    latencies: list[float] = []
    began = now = time.perf_counter()
    for position in range(_FIRST_BYTE_READS + 1):
        shard, offset, _ = order[position]
        store.read_into(shard, offset, out)
        latencies.append(time.perf_counter() - now)
        now += latencies[-1]
        if now - began > _FIRST_BYTE_S:
            break
    return FirstByte.of(1, np.asarray(latencies))


def _measured(case: Case, shards: Sequence[Shard], how: How, settings: Sweep, reader: _Reader) -> CaseFigures:
    if settings.evict:
        evict(shards)
    resident = reader.accounts.resident_share(shards) if how == "buffered" else None
    before = asdict(reader.faults())
    left_out = sum(shard.size < case.block_bytes for shard in shards) if how == "direct" else 0
    order = BlockOrder(shards, case.block_bytes, case.pattern)
    times = reader.run(case, order)
    faults = {name: count - before[name] for name, count in asdict(reader.faults()).items()}
    passes = len(times.nbytes) / max(1, len(order) - left_out)  # of a shorter one, the order has one block
    evidence = Evidence(
        read_bytes=times.total_bytes,
        device_bytes=times.device_bytes,
        resident_share=resident,
        direct=how == "direct",
        repeated=passes > 1,
        remote=how == "store",
    )
    label = label_of(evidence)
    if settings.require_cold and label.word != "cold":
        raise DataflowError(
            f"{case.pattern} reads of {case.block_bytes} bytes were not cold: {label.reason}; "
            "read directly, or add --evict"
        )
    seconds = max(times.seconds, 1e-9)
    return CaseFigures(
        case=case,
        reads=len(times.nbytes),
        seconds=times.seconds,
        total_bytes=times.total_bytes,
        mb_per_s=times.total_bytes / 1e6 / seconds,
        reads_per_s=len(times.nbytes) / seconds,
        latency_s=percentiles_of(times.ended_s - times.began_s),
        cpu_s_per_gb=times.cpu_s / max(times.total_bytes / 1e9, 1e-9),
        cores=times.cpu_s / seconds,
        mb_per_s_over_time=times.mb_per_s_over_time(_PARTS_OF_TIME),
        passes=passes,
        exhausted=times.exhausted,
        left_out=left_out,
        label=label,
        faults=ReadStats(**faults),
        client_is_busy=client_is_busy(
            times.cpu_s / seconds, len(times.nbytes) / seconds, how, usable_cores()
        ),
    )


# ---- telling --------------------------------------------------------------------------------------------


def page_of(figures: StorageFigures) -> Page:
    """All figures, and what a reader of them must know."""
    first = figures.first_byte
    what = "byte" if first.nbytes == 1 else bytes_text(first.nbytes)
    median = first.latency_s["50"]
    later = "-" if median is None else f"{_ms(median)} ms median of {first.reads}"
    facts = (
        ("shards", f"{figures.shards:,}, {bytes_text(figures.stored_bytes)}"),
        ("read", _HOW[figures.how]),
        (f"first {what}", f"{later}; {_ms(first.first_s)} ms the very first time"),
    )
    notes = [f"- {sentence}" for sentence in sentences(figures)]
    drawing = Drawing(13, 4.2, lambda figure: _draw(figures, figure))
    # 80 columns: the units stand below the table.
    units = "x: reads in flight; p: percentiles of the latency in ms; CPU: this client's seconds a GB"
    parts: list[Part] = [Table((), facts), _table(figures), Sentence(units, "dim"), *notes, drawing]
    values = figures.to_json()
    return Page(
        "dataflow bench storage",
        values,
        parts,
        verdict=storage_verdict(values),
        rows=[result.to_row() for result in figures.cases],
    )


def _table(figures: StorageFigures) -> Table:
    percentiles = [f"p{name}" for name in PERCENTILES]
    columns = ("order", "block", "x", "MB/s", "reads/s", *percentiles, "CPU", "data")
    rows = [
        (
            result.case.pattern,
            block_text(result.case.block_bytes),
            str(result.case.concurrency),
            f"{result.mb_per_s:,.1f}",
            f"{result.reads_per_s:,.0f}",
            *(_ms(result.latency_s[name]) for name in PERCENTILES),
            f"{result.cpu_s_per_gb:.2f}",
            result.label.word,
        )
        for result in figures.cases
    ]
    return Table(columns, rows, left=2)


def case_text(case: Case) -> str:
    """Such as "random 2 MiB x 16"."""
    return f"{case.pattern} {block_text(case.block_bytes)} x {case.concurrency}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3g}"


def sentences(figures: StorageFigures) -> Iterator[str]:
    """Yield what a reader of the table must know, one sentence each."""
    cases = figures.cases
    for word, group in _grouped(cases, lambda result: result.label.word).items():
        yield f"{word}: {group[0].label.reason}" + _where(group, cases)
    if figures.how == "direct":
        yield "what lies below the block device (a hypervisor's cache, a controller's) cannot be seen"
    if figures.why_no_fio:
        yield f"{figures.why_no_fio}: these are reads through the page cache, and not what the device gives"
    short = [result for result in cases if result.left_out]
    if short:
        most = max(result.left_out for result in short)
        yield f"{most:,} of the shards, or fewer, are shorter than a block and were not read" + _where(
            short, cases
        )
    few = [result for result in cases if None in result.latency_s.values()]
    if few:
        least = min(few, key=lambda result: result.reads)
        yield absent_text(least.latency_s, least.reads)
    for result in cases:
        if result.exhausted:
            yield f"{case_text(result.case)} ended after {result.seconds:.2f} s: every block was read once"
    busy = [result for result in cases if result.client_is_busy]
    if busy:
        why = "a core (of which Python uses one at a time) or all of them had no time left"
        yield f"this client may be the limit, not the store: {why}" + _where(busy, cases)
    faults = [result for result in cases if any(vars(result.faults).values())]
    if faults:
        yield "reads failed and were tried again (faults in --json)" + _where(faults, cases)


def client_is_busy(busy: float, reads_per_s: float, how: How, cores: int) -> bool:
    """Return whether this client may be the limit, with so many cores busy of `cores`.

    The limit is all of them, or one: of fio, which has one thread, of remote stores, whose event loop runs on
    one, and where buffered reads are many and small, by the interpreter's lock.
    """
    one_core = how != "buffered" or reads_per_s >= _MANY_READS_PER_S
    return busy >= _BUSY_CORES * (1 if one_core else cores)


def _grouped(cases: Sequence[CaseFigures], key: Callable[[CaseFigures], str]) -> dict[str, list[CaseFigures]]:
    groups: dict[str, list[CaseFigures]] = {}
    for result in cases:
        groups.setdefault(key(result), []).append(result)
    return groups


def _where(group: Sequence[CaseFigures], cases: Sequence[CaseFigures]) -> str:
    if len(group) == len(cases):
        return ""
    named = ", ".join(case_text(result.case) for result in group[:3])
    return f" ({named}{f' and {len(group) - 3} more' if len(group) > 3 else ''})"


def _draw(figures: StorageFigures, figure: Any) -> None:
    """Throughput, latency and throughput over time."""
    rates, latency, over_time = figure.subplots(1, 3)
    lines = _grouped(figures.cases, lambda row: f"{row.case.pattern} {block_text(row.case.block_bytes)}")
    for name, cases in lines.items():
        rates.plot([row.case.concurrency for row in cases], [row.mb_per_s for row in cases], "o-", label=name)
        best = max(cases, key=lambda row: row.mb_per_s)
        text = case_text(best.case)
        known = {f"p{name}": value * 1e3 for name, value in best.latency_s.items() if value is not None}
        latency.plot([*known], [*known.values()], "o-", label=text)
        times_s = (np.arange(_PARTS_OF_TIME) + 0.5) * best.seconds / _PARTS_OF_TIME
        over_time.plot(times_s, best.mb_per_s_over_time, label=text)
    if figures.settings.need is not None:
        target = figures.settings.need.to_json(figures.sample_bytes)["bytes_per_s"]
        rates.axhline(
            target / 1e6, color="black", linestyle=":", label=f"needed, {figures.settings.need.text}"
        )
    rates.set(title="throughput", xlabel="reads in flight", ylabel="MB/s", ylim=(0, None))
    latency.set(title="latency", xlabel="percentile", ylabel="ms", yscale="log")
    over_time.set(title="throughput over time", xlabel="s", ylabel="MB/s", ylim=(0, None))
    for axes in (rates, latency, over_time):
        axes.legend(frameon=False, fontsize="small")
