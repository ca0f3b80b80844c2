"""Errors that name the place, then the rule.

Every error of the three packages derives from `DataflowError`. Place and reason are fields, `args`
equals the fields, so an error survives pickling into another process.
"""

from __future__ import annotations


class DataflowError(Exception):
    """Base of every error raised by dataflow, prefetch and sharding."""


class ShardError(DataflowError):
    """A shard, or a part of it, cannot be used.

    Attributes:
        shard: URL of the shard, or "" when no single shard is at fault.
        reason: what is wrong and, where there is a cure, what to do.
        offset: byte offset in the shard (of the decompressed bytes, for compressed shards), or None.
        key: sample key or index inside the shard, or None.
        stage: "index", "read", "decode", "transform" or "write".
    """

    def __init__(
        self,
        shard: str,
        reason: str,
        offset: int | None = None,
        key: str | None = None,
        stage: str = "index",
    ) -> None:
        super().__init__(shard, reason, offset, key, stage)
        self.shard, self.reason, self.offset, self.key, self.stage = shard, reason, offset, key, stage

    def __str__(self) -> str:
        place = [self.shard or "dataset"]
        if self.offset is not None:
            place.append(f"byte {self.offset}")
        if self.key is not None:
            place.append(f"sample {self.key!r}")
        return f"{', '.join(place)}: {self.reason} (stage: {self.stage})"


class ShardReadError(ShardError):
    """A byte range of a shard could not be read: missing, forbidden, truncated or failing storage."""


class ShardChangedError(ShardError):
    """A shard is not the one that was indexed: its size, modification time or etag differs."""


class CorruptShardError(ShardError):
    """The bytes of a shard break the rules of its format."""


class SampleError(ShardError):
    """One sample cannot be decoded, transformed or collated."""
