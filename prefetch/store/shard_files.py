"""A remote shard as a file, for indexing: with the answers checked and the faults survived as in training."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import numpy as np

from prefetch.store.bodies import body_of
from prefetch.store.reader import StoreReader
from sharding.blocks import Shard
from sharding.catalog.storage import SCAN_READ_BYTES, open_shard


def shard_file(reader: StoreReader, shard: Shard, fs: Any, path: str) -> BinaryIO:
    """The stored bytes of a shard, seekable. The caller closes it.

    `fs` and `path` are those of the URL. Filesystems that are not asynchronous open their files themselves:
    some keep what they read of an archive.
    """
    if fs is None or body_of(fs) is None:
        return open_shard(shard, fs, path)
    return io.BufferedReader(_Ranges(reader, shard), SCAN_READ_BYTES)


class _Ranges(io.RawIOBase):
    """Each read is a request."""

    def __init__(self, reader: StoreReader, shard: Shard) -> None:
        self._reader, self._shard, self._at = reader, shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._shard.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, out: Any) -> int:
        place = np.frombuffer(out, np.uint8)[: max(0, self._shard.size - self._at)]
        if len(place):
            self._reader.read_into(self._shard, self._at, place)
            self._at += len(place)
        return len(place)

    def readall(self) -> bytes:
        rest = bytearray(
            max(0, self._shard.size - self._at)
        )  # in one request; the base class makes small ones
        self.readinto(rest)
        return bytes(rest)


__all__ = ["shard_file"]
