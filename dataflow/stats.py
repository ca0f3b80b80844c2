"""The values that `loader.stats()` returns: frozen, each field with its unit and what its extremes mean.

`StatsSnapshot` gives both kinds a table, a difference (`since`) and plain numbers (`flat`). It goes by the
fields: each number is a count, which `since` subtracts, unless `_NOW` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self, cast

from dataflow.tables import (
    Row,
    builders_text,
    bytes_text,
    counted,
    html_table,
    number_text,
    text_table,
    with_reason,
)
from prefetch.control.depth import Decision
from prefetch.counts import NO_CACHE, NO_FAULTS, CacheStats, ReadStats
from prefetch.engine.stats import NOT_STARTED, EngineStats, StageStats
from sharding.cached_property import cached_property
from sharding.lengths.units import LengthStats

_NOT_STARTED = Decision(0, "not started")
_NOW = {
    *("ahead_batches", "build.queued", "build.threads", "depth", "first_batch_s", "in_flight", "lengths"),
    *("mapped_bytes", "memory", "num_workers", "open_windows", "read.queued", "read.threads"),
    *("read_amplification", "ready_batches", "shared_bytes", "unfinished_shards", "window", "worker_pids"),
}
"""Figures that are not counts: they hold at one time, or for a whole epoch."""
_NOW_BY_NAME = {*_NOW, "in_flight_limit", "window_blocks"}
"""Their names in `flat`."""
PARTS_OF_STATS = {"delivered_batches", "in_flight", "open_windows", "window"}
"""Fields of `LoaderStats` whose figures have names of their own, or are the engine's alone."""


class StatsSnapshot(ABC):
    """The abilities that both kinds of stats share; they are frozen dataclasses, with these fields."""

    batches: int
    delivered_bytes: int
    elapsed_s: float
    starved_s: float
    first_batch_s: float
    num_workers: int
    workers: str
    workers_reason: str

    @property
    def stall_share(self) -> float:
        """`starved_s / elapsed_s`, in [0, 1]."""
        return _rate(self.starved_s, self.elapsed_s)

    @property
    def batches_per_s(self) -> float:
        """`batches / elapsed_s`; 0 before the first batch, like all rates."""
        return _rate(self.batches, self.elapsed_s)

    @property
    def delivered_bytes_per_s(self) -> float:
        """`delivered_bytes / elapsed_s`."""
        return _rate(self.delivered_bytes, self.elapsed_s)

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yield the rows of the table; one with an empty text is left out."""

    def since(self, earlier: Self) -> Self:
        """Return the figures of the time between an earlier snapshot and this one.

        Counts, and with them rates and shares, are those of the interval. What holds at one time (depth,
        memory, ready batches, the builders) stays as it is in this snapshot.

        Args:
            earlier: what `stats()` of the same loader returned before.

        Returns:
            A snapshot of the same kind.

        Raises:
            ValueError: `earlier` is of the other kind, or counts more than this one.
        """
        if type(earlier) is not type(self):
            raise ValueError(f"earlier must be a {type(self).__name__}, got {type(earlier).__name__}")
        before, after = earlier.flat(), self.flat()
        if more := [name for name in ("batches", "elapsed_s") if before[name] > after[name]]:
            raise ValueError(
                f"earlier must be an older snapshot of the same loader, but its {more[0]} is "
                f"{before[more[0]]:g} and this one's is {after[more[0]]:g}; call newer.since(older)"
            )
        now: Any = self
        return cast("Self", replace(now, **{f.name: _between(f.name, self, earlier) for f in fields(now)}))

    def to_json(self) -> dict[str, Any]:
        """Return all figures by their names, as JSON values."""
        return {name: value for name, value in _figures(self).items() if name not in PARTS_OF_STATS}

    def flat(self) -> dict[str, float]:
        """Return all numbers by stable names, for loggers: `{"batches": 200.0, "read.busy_s": 1.5, ...}`.

        The names are those of the attributes, parts joined by ".". Texts, lists and what is None are left
        out; `image_warnings` is the sum of all kinds.
        """
        return numbers_of(self.to_json())

    def __str__(self) -> str:
        return text_table(self._title, self.rows())

    def _repr_html_(self) -> str:
        return html_table(self._title, self.rows())

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {number_text(self.elapsed_s)} s"

    def _rows_of_batches(self) -> Iterator[Row]:
        yield "batches", _per_s(number_text(self.batches), self.batches_per_s)
        yield "first batch", f"after {number_text(self.first_batch_s)} s" if self.first_batch_s else ""
        yield "delivered", _per_s(bytes_text(self.delivered_bytes), self.delivered_bytes_per_s, bytes_text)
        yield "waited", f"{number_text(self.starved_s)} s, {self.stall_share:.1%} of the time"
        builders = with_reason(builders_text(self.workers, self.num_workers), self.workers_reason)
        yield "builders", builders if self.workers else ""


def numbers_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of what `to_json` returned, by the names of `flat`."""
    return dict(_numbers("", figures))


def is_count(name: str) -> bool:
    """Return whether a figure only grows, by its name in `flat`; others hold at one time, or are rates."""
    parts = name.split(".")
    paths = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return not paths & _NOW_BY_NAME and not name.endswith(("_per_s", "_share"))


def numbers_since(later: Mapping[str, float], earlier: Mapping[str, float]) -> dict[str, float]:
    """Do what `since` does, of the numbers that `flat` returned. Rates and shares stay as they were later."""
    return {
        name: max(0.0, value - earlier.get(name, 0.0)) if is_count(name) else value
        for name, value in later.items()
    }


def _between(name: str, now: object, before: object) -> Any:
    """A field in an interval; `name` is its path from the snapshot, the objects are those that have it."""
    attribute = name.rpartition(".")[2]
    later, sooner = getattr(now, attribute), getattr(before, attribute)
    if name in _NOW or sooner is None:
        return later
    if is_dataclass(later) and not isinstance(later, type):
        return replace(later, **{f.name: _between(f"{name}.{f.name}", later, sooner) for f in fields(later)})
    if isinstance(later, tuple):
        return later[len(sooner) :]
    if isinstance(later, Mapping):
        return {key: n - sooner.get(key, 0) for key, n in later.items() if n > sooner.get(key, 0)}
    return max(type(later)(0), later - sooner) if isinstance(later, (int, float)) else later


def _figures(value: object) -> Any:
    """Fields and properties of a dataclass by name, those of its parts as well; other values as they are."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [f.name for f in fields(value)]
    for kind in type(value).__mro__:
        names += [name for name, attr in vars(kind).items() if isinstance(attr, property) and name[0] != "_"]
    return {name: _figures(getattr(value, name)) for name in names}


def _numbers(prefix: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if name == "image_warnings":
            yield name, float(sum(value.values()))
        elif isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}.", value)
        elif isinstance(value, (int, float)):
            yield prefix + name, float(value)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _per_s(text: str, rate: float, to_text: Any = number_text) -> str:
    return f"{text}, {to_text(rate)}/s"


def _busy(stage: StageStats, elapsed_s: float) -> str:
    if not stage.threads:
        return ""
    share = _rate(stage.busy_s, elapsed_s * stage.threads)
    return f"{share:.0%} of {stage.threads} busy, {counted(stage.tasks, 'task')}, {stage.queued:,} wait"


def _listed(counts: Mapping[str, float]) -> str:
    """Name those that are not 0: "3 retries"."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


@dataclass(frozen=True, kw_only=True)
class SessionStats(EngineStats):
    """The work of threads for the batches of a loader."""

    read_bytes: int = 0
    """Bytes read, from the store or from a cache. Far above `delivered_bytes`: most of each block is not
    used by this rank."""
    decoded_bytes: int = 0
    """Bytes of blocks after decompression and decoding, before rows are picked."""
    in_flight: Decision = _NOT_STARTED
    """Bytes that may be in flight at a remote store; 0: local shards, read without such a limit."""
    faults: ReadStats = NO_FAULTS
    """Faults of remote reads: retries, throttling, second requests, wrong checksums."""
    num_workers: int = 0
    """Builders of batches, threads or processes; 0: batches are built in `next`."""
    workers: str = ""
    """The builders: "main" (whoever asks), "thread", "process" or "ray"; "" before the first batch."""
    workers_reason: str = ""
    """The reason for these builders."""
    cache: CacheStats = NO_CACHE
    """Counts of reads through a `Cache`: hits, misses, bytes, blocks dropped, errors."""

    def with_past(self, past: EngineStats) -> Self:
        """See `EngineStats.with_past`."""
        assert isinstance(past, SessionStats)
        total: Self = super().with_past(past)
        return replace(
            total,
            read_bytes=past.read_bytes + self.read_bytes,
            decoded_bytes=past.decoded_bytes + self.decoded_bytes,
            faults=past.faults + self.faults,
            cache=past.cache + self.cache,
        )


NO_SESSION = SessionStats(**vars(NOT_STARTED))
"""The figures before the first batch."""


@dataclass(frozen=True, kw_only=True)
class LoaderStats(SessionStats, StatsSnapshot):
    """A snapshot of a `DataLoader`, counted since it was made; of several loops, the newest one's engine.

    Examples:
        >>> with DataLoader(ShardedDataset("tokens/*.parquet"), batch_size=4) as loader:
        ...     batches = list(loader)
        ...     stats = loader.stats()
        >>> stats.samples, stats.batches
        (8, 2)
    """

    samples: int
    """Samples delivered to the training code, on this rank; with `batching=`, segments of samples."""
    batches: int
    """Batches delivered on this rank."""
    first_batch_s: float
    """Seconds from asking for the first batch to having it; 0 before that."""
    window: Decision
    """Blocks mixed together by the shuffle; 0 where the order has no windows."""
    skipped_samples: int
    """Samples left out by `on_error`."""
    skipped: tuple[str, ...]
    """The first 1,000 of them: shard, offset, key, reason."""
    empty_batches: int
    """Batches of which that left nothing. With one rank they are left out; with several the rank's last good
    batch came again in the place of each, so that no rank lacks a step."""
    image_warnings: Mapping[str, int]
    """Images delivered whose JPEG data is odd at its end, by kind; see `Image.strict`. Empty: none."""
    untrained_samples: int
    """Samples delivered of which no token is to be learned, as where `max_length` has cut all answers off."""
    read_amplification: float | None
    """Times that the ranks together read each byte of the shards in an epoch, by the plan, caches left out.
    1: no block by two ranks, as with one rank or `shuffle=True` on up to eight. Up to the number of ranks in
    file order, where each takes a part of every batch. None: not known (full shuffles, mixtures,
    `batching=`)."""
    lengths: LengthStats | None
    """Figures of the lengths, as `batching=` takes them, of the epoch that was begun last, over all ranks:
    efficiency, elements cut off, and more, as far as they are measured, from the packing window on in which a
    state or other weights went on. None without `batching=`."""
    mapped_bytes: int
    """Bytes of local shards whose pages are in this process now: windows in use, which `memory` counts, too,
    and up to a quarter of the limit beside them. They are the page cache's: shared with other processes, and
    the system takes them back when it needs memory."""
    unfinished_shards: int
    """Shards that end before their format says so, which `allow_unfinished=True` lets pass. Above 0: samples
    may be missing."""

    @cached_property  # no figure, as properties are
    def engine(self) -> EngineStats:
        """Its figures that are the engine's."""
        return EngineStats(**{field.name: getattr(self, field.name) for field in fields(EngineStats)})

    @property
    def samples_per_s(self) -> float:
        """`samples / elapsed_s`; 0 before the first batch, like all rates."""
        return _rate(self.samples, self.elapsed_s)

    @property
    def read_bytes_per_s(self) -> float:
        """`read_bytes / elapsed_s`."""
        return _rate(self.read_bytes, self.elapsed_s)

    @property
    def in_flight_limit(self) -> int:
        """Bytes that may be in flight at a remote store; 0: local shards, read without such a limit."""
        return self.in_flight.value

    @property
    def in_flight_reason(self) -> str:
        """The reason for the value of `in_flight_limit`."""
        return self.in_flight.reason

    @property
    def window_blocks(self) -> int:
        """Blocks mixed together by the shuffle; 0 where the order has no windows."""
        return self.window.value

    @property
    def window_reason(self) -> str:
        """The reason for the value of `window_blocks`."""
        return self.window.reason

    def rows(self) -> Iterator[Row]:
        """See `StatsSnapshot`."""
        held, cache, lengths = self.memory, self.cache, self.lengths
        yield "samples", _per_s(number_text(self.samples), self.samples_per_s)
        yield from self._rows_of_batches()
        yield "build", _busy(self.build, self.elapsed_s)
        yield "read", _busy(self.read, self.elapsed_s)
        times = self.read_amplification or 1
        twice = f"; the ranks read each byte {times:.3g} times" if times > 1.005 else ""
        yield "bytes read", _per_s(bytes_text(self.read_bytes), self.read_bytes_per_s, bytes_text) + twice
        yield "ready", with_reason(f"{self.ready_batches:,} of {self.depth:,} batches", self.depth_reason)
        if self.window_blocks:
            yield "window", with_reason(counted(self.window_blocks, "block"), self.window_reason)
        if self.in_flight_limit:
            yield (
                "in flight",
                with_reason(f"at most {bytes_text(self.in_flight_limit)}", self.in_flight_reason),
            )
        now = held.window_bytes + held.building_bytes + held.ready_bytes + held.in_use_bytes
        if held.limit_bytes:
            limit, peak = bytes_text(held.limit_bytes), bytes_text(held.peak_bytes)
            yield "memory", f"{bytes_text(now)} of {limit}, at most {peak} so far"
        if asked := cache.hits + cache.misses:
            yield "cache", f"{cache.hits / asked:.1%} hits, {_listed(_figures(cache))}"
        yield "faults", _listed(_figures(self.faults))
        yield "skipped", f"{counted(self.skipped_samples, 'sample')}, {self.empty_batches:,} empty batches"
        if lengths is not None:
            cut = _listed({"samples split": lengths.split, "truncated": lengths.truncated})
            yield "lengths", f"{lengths.efficiency:.1%} of the places filled{cut and ', '}{cut}"
        yield "images", _listed(self.image_warnings)
        yield "untrained", _listed({"samples without a token to learn": self.untrained_samples})
        yield "unfinished", _listed({"shards": self.unfinished_shards})


@dataclass(frozen=True, kw_only=True)
class WorkerStats(StatsSnapshot):
    """A snapshot of a `DataLoader` over any other dataset, counted since it was made.

    Examples:
        >>> with DataLoader(range(8), batch_size=4) as loader:
        ...     batches = list(loader)
        ...     stats = loader.stats()
        >>> stats.batches
        2
    """

    batches: int
    """Batches handed to the training code."""
    delivered_bytes: int
    """Bytes of those batches. From processes, all that was sent; otherwise tensors and arrays in lists,
    tuples and mappings. 0 with many batches: they are made of other objects."""
    elapsed_s: float
    """Seconds in loops, from the beginning of each to its last batch or its end; 0 before the first."""
    starved_s: float
    """Seconds the training code waited in `iter` and `next`. Near 0: the loader keeps up. Near `elapsed_s`:
    it is the bottleneck, as it is by nature where the batches are made in this process."""
    first_batch_s: float
    """Seconds from the beginning of the first loop to its first batch; 0 before that. Large: the workers'
    start, or the first items, take long."""
    num_workers: int
    """Processes or threads; 0: none."""
    workers: str
    """The workers: "main" (this process), "process" or "thread"."""
    workers_reason: str
    """The reason for these workers."""
    ahead_batches: int
    """Batches of the loop begun last that are in work or ready. 0: none is fetched before it is asked for."""
    ready_batches: int
    """Number of them that are ready. 0 while training: the workers are behind. At `ahead_batches`: they are
    ahead, and wait for the training code."""
    shared_bytes: int
    """Bytes of memory that the workers' shared file takes now, batches that are still used included. 0
    without worker processes. Grows with every batch that is kept."""
    worker_pids: tuple[int, ...]
    """Process ids of the workers of the loop begun last; empty without worker processes."""
    start: str = ""
    """The start method of those processes: "forked server", "fork server" (which takes 1 to 2 s once), or the
    one that was asked for; see docs/guide/workers.md. Empty without worker processes."""
    start_reason: str = ""
    """The reason for this start method."""

    def rows(self) -> Iterator[Row]:
        """See `StatsSnapshot`."""
        yield from self._rows_of_batches()
        yield "started by", with_reason(self.start, self.start_reason) if self.start else ""
        yield "ready", f"{self.ready_batches} of {self.ahead_batches} batches fetched ahead"
        yield "shared memory", bytes_text(self.shared_bytes) if self.worker_pids else ""
