"""What `loader.stats()` returns: frozen values, each field with its unit and what its extremes mean."""

from __future__ import annotations

from dataclasses import dataclass

from prefetch.engine import StageStats
from prefetch.ledger import MemoryHeld
from prefetch.store import NO_FAULTS, ReadStats
from sharding.units import LengthStats


@dataclass(frozen=True)
class LoaderStats:
    """A snapshot of a `DataLoader`, counted since it was made."""

    samples: int
    """Samples delivered to the training code, on this rank; with `batching=`, pieces of samples."""
    batches: int
    """Batches delivered on this rank."""
    read_bytes: int
    """Bytes read from the store. Far above `delivered_bytes`: most of each block is not used by this rank."""
    decoded_bytes: int
    """Bytes of blocks after decompression and decoding, before rows are picked."""
    delivered_bytes: int
    """Bytes of the batches' slots. Python objects (text, JSON, transformed samples) are not counted."""
    elapsed_s: float
    """Seconds since the first batch was asked for."""
    starved_s: float
    """Seconds the training code waited for a batch. Near 0: the loader keeps up. Near `elapsed_s`: the
    loader is the bottleneck."""
    stall_share: float
    """`starved_s / elapsed_s`, in [0, 1]."""
    first_batch_s: float
    """Seconds from asking for the first batch to having it; 0 before that."""
    read: StageStats
    """Reading and decoding blocks."""
    build: StageStats
    """Gathering and decoding batches."""
    ready_batches: int
    """Finished batches waiting. 0 while training: the loader is behind. At `depth`: it is ahead."""
    depth: int
    """Batches kept ready or in work."""
    depth_reason: str
    """Why that many."""
    window_blocks: int
    """Blocks mixed together by the shuffle; 0 where the order has no windows."""
    window_reason: str
    """Why that many."""
    memory: MemoryHeld
    """Bytes held now, by state."""
    skipped_samples: int
    """Samples left out by `on_error`."""
    skipped: tuple[str, ...]
    """The first 1,000 of them: shard, offset, key, reason."""
    faults: ReadStats = NO_FAULTS
    """What went wrong with remote reads: retries, throttling, second requests, wrong checksums."""
    lengths: LengthStats | None = None
    """What `batching=` makes of the lengths of the epoch that was begun last, over all ranks: efficiency,
    elements cut off, and more. None without `batching=`."""
