"""Errors that name the context, then the rule.

Every error of the three packages derives from `DataflowError`. Context and reason are fields, `args`
equals the fields, so an error survives pickling into another process.
"""

from __future__ import annotations

from sharding.printable import printable, printable_name
from sharding.redaction import without_secrets


class DataflowError(Exception):
    """Base of every error raised by dataflow, prefetch and sharding.

    Passwords and signatures in URLs are left out of its text, and control characters are written out.

    Examples:
        >>> try:
        ...     ShardedDataset("nowhere/*.tar")
        ... except DataflowError as error:
        ...     print(type(error).__name__)
        ShardReadError
        >>> issubclass(SampleError, DataflowError)
        True
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))

    def __str__(self) -> str:
        return printable(super().__str__())


class ShardError(DataflowError):
    """A shard, or a part of it, cannot be used.

    Attributes:
        shard: URL of the shard, or "" when no single shard is at fault.
        reason: what is wrong and, where there is a cure, what to do.
        offset: byte offset in the shard (of the decompressed bytes, for compressed shards), or None.
        key: sample key or index inside the shard, or None.
        stage: "index", "read", "decode", "transform", "collate", "plan" or "write".

    Examples:
        >>> _ = Path("empty.tar").write_bytes(b"no tar")
        >>> try:
        ...     ShardedDataset("empty.tar")
        ... except ShardError as error:
        ...     print(Path(error.shard).name, error.offset, error.stage)
        empty.tar 0 index
    """

    def __init__(
        self, shard: str, reason: str, offset: int | None = None, key: str | None = None, stage: str = "index"
    ) -> None:
        super().__init__(shard, reason, offset, key, stage)
        self.shard, self.reason = without_secrets(shard), without_secrets(reason)
        self.offset, self.key, self.stage = offset, key, stage

    def __str__(self) -> str:
        context = [printable_name(self.shard) or "dataset"]
        if self.offset is not None:
            context.append(f"byte {self.offset}")
        if self.key is not None:
            context.append(f"sample {self.key!r}")
        return f"{', '.join(context)}: {printable(self.reason)} (stage: {self.stage})"


class ShardReadError(ShardError, OSError):
    """A byte range of a shard could not be read: missing, forbidden, truncated or failing storage.

    It is an `OSError` too, as what Python's own files raise: `filename` is the shard's URL and `errno` None.
    """

    def __init__(
        self, shard: str, reason: str, offset: int | None = None, key: str | None = None, stage: str = "index"
    ) -> None:
        super().__init__(shard, reason, offset, key, stage)
        # `OSError` takes its first argument for an errno and keeps two: pickling needs all five.
        self.args = (self.shard, self.reason, offset, key, stage)
        self.errno, self.strerror, self.filename, self.filename2 = None, self.reason, self.shard, None


class ShardWriteError(ShardError, OSError):
    """A shard could not be written, as there was no room for it. What was finished before is whole.

    It is an `OSError` too, and `filename` is the shard's URL.

    Attributes:
        shard: URL of the shard.
        reason: what is wrong, and what to do.
        errno: the system's number (`errno.ENOSPC` and the like), or None.
    """

    def __init__(self, shard: str, reason: str, errno: int | None = None) -> None:
        super().__init__(shard, reason, stage="write")
        self.args = (self.shard, self.reason, errno)
        self.errno, self.strerror, self.filename, self.filename2 = errno, self.reason, self.shard, None


class ShardChangedError(ShardError):
    """A shard is not the one that was indexed: its size, modification time or etag differs."""


class CorruptShardError(ShardError):
    """The bytes of a shard break the rules of its format."""


class OldCatalogError(CorruptShardError):
    """A catalog is of another version."""


class SampleError(ShardError):
    """One sample cannot be decoded, transformed or collated.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet", transform=lambda sample: 1 / 0)
        >>> try:
        ...     dataset[2]
        ... except SampleError as error:
        ...     print(Path(error.shard).name, error.key, error.stage)
        00.parquet 2 transform
    """
