"""Read byte ranges of shards into given memory, and notice a shard that is not the indexed one.

Local files are read by `preadv` straight into the destination, with the GIL released, one descriptor per
read (opening costs microseconds, and nothing can leak). After the read the descriptor's size and
modification time must still be those of the catalog, so bytes of another version are never handed on;
a file replaced by rename in the middle keeps serving the old bytes of the open descriptor. Values that
are wanted as they are stored are not read but mapped (`prefetch.mapping`).

Every other store goes through fsspec's `cat_file` on the process's one filesystem object; a shard is
checked against the store once per process, before its first range. Thread-safe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Shard
from sharding.errors import DataflowError, ShardChangedError, ShardReadError
from sharding.storage import check_shard, failure_text, local_info, open_url
from sharding.urls import is_local, local_path

R = TypeVar("R")


class StoreReader:
    """Reads ranges of the shards of one dataset, wherever they lie. Thread-safe."""

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(storage_options or {})
        self._lock = threading.Lock()  # guards _checked
        self._checked: set[str] = set()

    def read_into(self, shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the shard's bytes from `offset`.

        Raises:
            ShardReadError: missing, forbidden, or shorter than the catalog says.
            ShardChangedError: size, time or etag differ from the catalog.
        """
        if is_local(shard.url):
            _read_local(shard, offset, out)
        else:
            self._read_remote(shard, offset, out)

    def _read_remote(self, shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
        try:
            fs, path = open_url(shard.url, self._options)
            self._check(shard, fs, path)
            data = fs.cat_file(path, start=offset, end=offset + out.nbytes)
        except DataflowError:
            raise
        except Exception as error:
            raise ShardReadError(shard.url, failure_text(error), offset, stage="read") from error
        if len(data) != out.nbytes:
            raise _truncated(shard, offset, out.nbytes, len(data))
        np.copyto(out, np.frombuffer(data, np.uint8))

    def _check(self, shard: Shard, fs: Any, path: str) -> None:
        if shard.url in self._checked:
            return
        what = check_shard(shard, fs.info(path))
        if what:
            raise ShardChangedError(shard.url, what, stage="read")
        with self._lock:
            self._checked.add(shard.url)


def _read_local(shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
    got = _with_file(shard, offset, lambda descriptor: _read_fully(descriptor, offset, out))
    if got != out.nbytes:
        raise _truncated(shard, offset, out.nbytes, got)


def _with_file(shard: Shard, offset: int, read: Callable[[int], R]) -> R:
    """Read from a local shard; afterwards the file must still be the one that was indexed."""
    try:
        descriptor = os.open(_path(shard.url), os.O_RDONLY | os.O_CLOEXEC)
        try:
            result = read(descriptor)
            seen = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ShardReadError(shard.url, failure_text(error), offset, stage="read") from error
    if seen.st_size != shard.size or shard.version != f"mtime:{seen.st_mtime_ns}":
        changed = check_shard(shard, local_info(seen))
        if changed:
            raise ShardChangedError(shard.url, changed, offset, stage="read")
    return result


@lru_cache(maxsize=4096)
def _path(url: str) -> str:
    return local_path(url)


def _read_fully(descriptor: int, offset: int, out: NDArray[np.uint8]) -> int:
    view, done = out.data, 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def _truncated(shard: Shard, offset: int, wanted: int, got: int) -> ShardReadError:
    return ShardReadError(shard.url, f"truncated: wanted {wanted} bytes, got {got}", offset, stage="read")
