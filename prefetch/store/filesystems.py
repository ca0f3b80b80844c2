"""One filesystem for all threads of a process: its connections are reused, and made at the first read.

fsspec keeps a filesystem per thread, which for asynchronous ones only means that every thread has its own
session, connections and (with S3) client to set up: all of them run in one event loop. Those are shared here;
others, which may not be thread-safe, stay one a thread. Never across a fork: a child makes its own.

Caches of whole files (`simplecache::`) are shared, too, as each keeps copies of its own. A copy is made by
one thread at a time, as fsspec gives out what another thread has not written yet.
"""

from __future__ import annotations

import io
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Shard
from sharding.catalog.storage import SCAN_READ_BYTES, open_shard, open_url
from sharding.urls import is_chain, protocol_of

_CONNECTIONS = 128
"""More than the reads that run at a time; botocore would keep 10."""

ReadInto = Callable[[Shard, int, NDArray[np.uint8]], None]
"""Fills memory with a shard's bytes from an offset, as `StoreReader.read_into`."""


class Filesystems:
    """The filesystems of one dataset's URLs. Thread-safe.

    Args:
        options: keyword arguments of the fsspec filesystem.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._lock = threading.Lock()  # guards the rest
        self._pid = os.getpid()
        self._shared: dict[tuple[str, str], Any] = {}
        self._copied: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def open(self, url: str) -> tuple[Any, str]:
        """The filesystem of a URL and the path in it; raises what `open_url` raises."""
        from fsspec.implementations.cached import CachingFileSystem

        protocol, _, rest = url.partition("://")
        host = protocol, rest.partition("/")[0]
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._shared = os.getpid(), {}
                self._copied = defaultdict(threading.Lock)
            fs = self._shared.get(host)
            if fs is not None and not is_chain(url):
                return fs, fs._strip_protocol(url)
            fs, path = open_url(url, self._with_connections(url))
            if isinstance(fs, CachingFileSystem):
                fs = self._shared.setdefault(host, fs)
            elif not is_chain(url) and getattr(fs, "async_impl", False) and not fs.asynchronous:
                self._shared[host] = fs
        return fs, path

    def lock_of(self, fs: Any, url: str) -> AbstractContextManager[Any]:
        """Return the lock to hold while this filesystem reads from a file, where one thread at a time may."""
        from fsspec.implementations.cached import CachingFileSystem

        if not isinstance(fs, CachingFileSystem):
            return nullcontext()
        with self._lock:
            return self._copied[url]

    def _with_connections(self, url: str) -> dict[str, Any]:
        if protocol_of(url) not in ("s3", "s3a") or is_chain(url):
            return self._options
        # Said, because URLs would be signed in the way of before 2014 otherwise.
        config = {
            "max_pool_connections": _CONNECTIONS,
            "signature_version": "s3v4",
            **(self._options.get("config_kwargs") or {}),
        }
        return {**self._options, "config_kwargs": config}


def shard_file(read_into: ReadInto, shard: Shard, fs: Any, path: str) -> BinaryIO:
    """The stored bytes of a shard, seekable, read as in training: checked, and through faults.

    The caller closes it.

    `fs` and `path` are those of the URL. Filesystems that are not asynchronous open their files themselves:
    some keep what they read of an archive.
    """
    from prefetch.http.clients import client_of

    if fs is None or client_of(fs) is None:
        return open_shard(shard, fs, path)
    return io.BufferedReader(_ShardBytes(read_into, shard), SCAN_READ_BYTES)


class _ShardBytes(io.RawIOBase):
    """Each read is a request."""

    def __init__(self, read_into: ReadInto, shard: Shard) -> None:
        self._read_into, self._shard, self._position = read_into, shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._shard.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, out: Any) -> int:
        dest = np.frombuffer(out, np.uint8)[: max(0, self._shard.size - self._position)]
        if len(dest):
            self._read_into(self._shard, self._position, dest)
            self._position += len(dest)
        return len(dest)

    def readall(self) -> bytes:
        rest = bytearray(max(0, self._shard.size - self._position))
        self.readinto(rest)  # in one request; the base class makes small ones
        return bytes(rest)
