"""The values that `loader.stats()` returns: frozen, each field with its unit and what its extremes mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from prefetch.cache.block_cache import NO_CACHE, CacheStats
from prefetch.control.depth import Decision
from prefetch.engine.ledger import MemoryHeld
from prefetch.engine.stats import NOT_STARTED, EngineStats, StageStats
from prefetch.store.reader import NO_FAULTS, ReadStats
from sharding.lengths.units import LengthStats

_NOT_STARTED = Decision(0, "not started")


@dataclass(frozen=True, kw_only=True)
class SessionStats:
    """The work of threads for the batches of a loader."""

    engine: EngineStats = NOT_STARTED
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

    def with_past(self, past: SessionStats) -> SessionStats:
        """The session as it is, its sums together with those of earlier ones."""
        return SessionStats(
            engine=self.engine.with_past(past.engine),
            read_bytes=past.read_bytes + self.read_bytes,
            decoded_bytes=past.decoded_bytes + self.decoded_bytes,
            in_flight=self.in_flight,
            faults=past.faults + self.faults,
            num_workers=self.num_workers,
            workers=self.workers,
            workers_reason=self.workers_reason,
            cache=past.cache + self.cache,
        )


@dataclass(frozen=True, kw_only=True)
class LoaderStats(SessionStats):
    """A snapshot of a `DataLoader`, counted since it was made; of several loops, the newest one's engine.

    Example:
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
    efficiency, elements cut off, and more, as far as they are measured, from the megabatch on in which a
    state or other weights went on. None without `batching=`."""
    mapped_bytes: int
    """Bytes of local shards whose pages are in this process now: windows in use, which `memory` counts, too,
    and up to a quarter of the limit beside them. They are the page cache's: shared with other processes, and
    the system takes them back when it needs memory."""
    unfinished_shards: int
    """Shards that end before their format says so, which `allow_unfinished=True` lets pass. Above 0: samples
    may be missing."""

    @property
    def delivered_bytes(self) -> int:
        """Bytes of the batches' slots. Python objects (text, JSON, transformed samples) are not counted."""
        return self.engine.delivered_bytes

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first batch was asked for."""
        return self.engine.elapsed_s

    @property
    def starved_s(self) -> float:
        """Seconds the training code waited for a batch.

        Near 0: the loader keeps up. Near `elapsed_s`: the loader is the bottleneck.
        """
        return self.engine.starved_s

    @property
    def stall_share(self) -> float:
        """`starved_s / elapsed_s`, in [0, 1]."""
        return self.starved_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def read(self) -> StageStats:
        """The stage that reads and decodes blocks."""
        return self.engine.read

    @property
    def build(self) -> StageStats:
        """The stage that gathers and decodes batches."""
        return self.engine.build

    @property
    def ready_batches(self) -> int:
        """Finished batches waiting. 0 while training: the loader is behind. At `depth`: it is ahead."""
        return self.engine.ready_batches

    @property
    def depth(self) -> int:
        """Batches kept ready or in work."""
        return self.engine.depth

    @property
    def depth_reason(self) -> str:
        """The reason for the value of `depth`."""
        return self.engine.depth_reason

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

    @property
    def memory(self) -> MemoryHeld:
        """Bytes held now, by state: what `memory_limit` is about."""
        return self.engine.memory

    def to_json(self) -> dict[str, Any]:
        """All figures by their names, as JSON values."""
        properties = [name for name, value in vars(LoaderStats).items() if isinstance(value, property)]
        figures: Mapping[str, Any] = {**vars(self), **{name: getattr(self, name) for name in properties}}
        parts = {"engine", "in_flight", "window"}  # their figures have names of their own
        return {
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in figures.items()
            if name not in parts
        }


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """A snapshot of a `DataLoader` over any other dataset, counted since it was made.

    Example:
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
    """Seconds since the first loop began; 0 before."""
    starved_s: float
    """Seconds the training code waited in `iter` and `next`. Near 0: the loader keeps up. Near `elapsed_s`:
    it is the bottleneck, as it is by nature where the batches are made in this process."""
    stall_share: float
    """`starved_s / elapsed_s`, in [0, 1]."""
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
