"""Errors of reading ahead; those of shards are in `sharding.errors`."""

from sharding.errors import DataflowError


class MemoryLimitError(DataflowError):
    """The memory limit cannot hold even the next window or batch alone."""


class EngineClosedError(RuntimeError):
    """The engine was closed while a batch was awaited."""


class StallError(DataflowError):
    """No batch came within the time-out. Where nothing explains it, all threads' stacks are on stderr."""


class ReaderClosedError(DataflowError):
    """The reader was closed while it read."""
