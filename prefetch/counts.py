"""Counts of reads: of a store's faults, and of a cache. Values alone, which cost next to no import."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """The counts of failures of remote reads, and of what was done about them, since the start."""

    retries: int = 0
    """Attempts after a read's first. 0: no faults."""
    throttled: int = 0
    """Answers 429 and 503: the store was asked more than it serves. Many: fewer reads should be in flight."""
    timeouts: int = 0
    """Requests given up because no byte came, and answers 408."""
    resumed: int = 0
    """Bodies that broke off and were continued from the byte reached."""
    hedges: int = 0
    """Second requests for reads that the training code waited for."""
    hedges_won: int = 0
    """The number of second requests that were faster than the first."""
    hedge_bytes: int = 0
    """Bytes that second requests asked for: at most 2 % of all bytes read."""
    checksum_failures: int = 0
    """Blocks that came with other bytes than were indexed. Each was read again once, and is an error if it
    differed again."""

    def __add__(self, other: ReadStats) -> ReadStats:
        return ReadStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: ReadStats) -> ReadStats:
        return ReadStats(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


NO_FAULTS = ReadStats()


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """The counts of reads through a cache, on this rank, since the start."""

    hits: int = 0
    """Blocks that came from the cache."""
    misses: int = 0
    """Blocks fetched from the store. In a second epoch 0, if the limit holds everything."""
    hit_bytes: int = 0
    miss_bytes: int = 0
    waited: int = 0
    """The number of `hits` whose blocks another rank or job fetched meanwhile."""
    stored_bytes: int = 0
    """Bytes written to the folder."""
    passed: int = 0
    """Blocks that were not kept, as everything in the cache is needed sooner. Many: the limit is too small
    for the dataset."""
    evicted: int = 0
    """Blocks dropped by this rank to make room."""
    evicted_bytes: int = 0
    errors: int = 0
    """Blocks that could not be read or written, or were damaged. The first of a kind was warned about."""

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


NO_CACHE = CacheStats()
