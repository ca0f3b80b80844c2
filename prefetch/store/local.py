"""Ranges of local shards, read straight into memory; files of which another version has come are noticed.

One descriptor per read: opening costs microseconds, and nothing can leak. After the read the descriptor's
size and modification time must still be those of the catalog, so bytes of another version are never handed
on; a file replaced by rename in the middle keeps serving the old bytes of the open descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Shard
from sharding.catalog.storage import check_shard, failure_text, local_info
from sharding.errors import ShardChangedError, ShardReadError
from sharding.urls import local_path

Read = Callable[[int, list[memoryview], int], int]
"""Fills memory from an offset of a descriptor, maybe not all of it; gives the bytes read, as `os.preadv`."""


def read_fully(descriptor: int, offset: int, out: NDArray[np.uint8], *, read: Read = os.preadv) -> int:
    """Fill `out` from an offset; the bytes read, fewer than `out` holds only where the file ends.

    Raises `OSError` as the system does. Releases the GIL.
    """
    view, done = out.data, 0
    while done < len(view):
        got = read(descriptor, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


_path = lru_cache(maxsize=4096)(local_path)


def read_local(shard: Shard, offset: int, out: NDArray[np.uint8], *, read: Read = os.preadv) -> None:
    """Fill `out` from an offset. Raises `ShardReadError`, `ShardChangedError`."""
    try:
        descriptor = os.open(_path(shard.url), os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = read_fully(descriptor, offset, out, read=read)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ShardReadError(shard.url, failure_text(error), offset, stage="read") from error
    if status.st_size != shard.size or shard.version != f"mtime:{status.st_mtime_ns}":
        changed = check_shard(shard, local_info(status))
        if changed:
            raise ShardChangedError(shard.url, changed, offset, stage="read")
    if nbytes != out.nbytes:
        raise truncated(shard, offset, out.nbytes, nbytes)


def truncated(shard: Shard, offset: int, nbytes: int, got: int) -> ShardReadError:
    """The error of a shard that ends too early."""
    return ShardReadError(shard.url, f"truncated: wanted {nbytes} bytes, got {got}", offset, stage="read")
