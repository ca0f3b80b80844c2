"""Read byte ranges of shards into given memory; notice a shard that is not the indexed one.

Local files are read straight into the destination (`prefetch.store.local`), remote ones through faults
(`prefetch.store.remote`); values that are wanted as they are stored are not read but mapped
(`prefetch.memory.mapping`).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefetch.counts import NO_FAULTS, ReadStats
from prefetch.retries import RetryPolicy
from prefetch.store.local import read_local
from prefetch.store.ranges import MOST_BYTES, Awaited
from prefetch.store.retrier import Hosts, ReadSettings
from sharding.blocks import Shard
from sharding.errors import ShardReadError
from sharding.urls import is_local

if TYPE_CHECKING:
    from prefetch.control.pause import ReadPause
    from prefetch.store.remote import RemoteReader


class StoreReader:
    """Reads ranges of the shards of one dataset, wherever they lie. Thread-safe.

    Args:
        storage_options: keyword arguments of the fsspec filesystem.
        policy: when a remote read is tried again.
        hedge_share: share of all bytes that may be asked for a second time.
        part_bytes: as much as one request brings.
        hosts: that have answered; the one that opened the dataset knows.
        say: is given a line on what a read waits for, after 3 s and at growing intervals. None: who waits
            asks `waiting`.
        pause: makes bytes stand still while it lasts, where a store is read directly; time-outs and second
            requests do not count that time. It does not keep reads from beginning.
        now: seconds on a clock that only goes forward; None: a real one, that of the pause if there is one.
        wait: waits so many seconds, or until the reader is closed; whether it is. None: on a real clock.
    """

    def __init__(
        self,
        storage_options: Mapping[str, Any] | None = None,
        *,
        policy: RetryPolicy | None = None,
        hedge_share: float = 0.02,
        part_bytes: int = MOST_BYTES,
        hosts: Hosts | None = None,
        say: Callable[[str], None] | None = None,
        pause: ReadPause | None = None,
        now: Callable[[], float] | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._closed = threading.Event()
        self._settings = ReadSettings(
            storage_options=dict(storage_options or {}),
            policy=policy or RetryPolicy(),
            hedge_share=hedge_share,
            part_bytes=part_bytes,
            hosts=Hosts() if hosts is None else hosts,
            say=say,
            pause=pause,
            now=now or (pause.running_s if pause else time.monotonic),
            wait=wait or self._closed.wait,
            closed=self._closed,
            count=self._count,
        )
        self._lock = threading.Lock()  # guards what follows
        self._remote: RemoteReader | None = None
        self._counts = NO_FAULTS

    def read_into(
        self,
        shard: Shard,
        offset: int,
        out: NDArray[np.uint8],
        *,
        checksum: int | None = None,
        awaited: Awaited | None = None,
    ) -> None:
        """Fill `out` with the shard's bytes from `offset`.

        Args:
            shard: as it was indexed.
            offset: first byte in the shard.
            out: [n] contiguous; where the n bytes go. Holds anything after an error.
            checksum: what `zlib.crc32` of the bytes must be; bytes that differ are read again once.
            awaited: becomes done when the consumer waits for this read, which may then be asked twice.

        Raises:
            ShardReadError: missing, forbidden, shorter than the catalog says, failing for as long as the
                policy allows, or other bytes than `checksum` twice.
            ShardChangedError: size, time or etag differ from the catalog.
            ReaderClosedError: `close` was called.
        """
        self._read(shard, offset, out, awaited)
        if checksum is None or zlib.crc32(out.data) == checksum:
            return
        self._count(checksum_failures=1)
        self._read(shard, offset, out, awaited)
        got = zlib.crc32(out.data)
        if got != checksum:
            self._count(checksum_failures=1)
            reason = (
                f"bytes {offset} to {offset + out.nbytes - 1} have checksum {got:08x}, read twice, and had "
                f"{checksum:08x} when they were indexed; copy the shard again, or index it if it is right"
            )
            raise ShardReadError(shard.url, reason, offset, stage="read")

    def stats(self) -> ReadStats:
        """Return the counts of failures so far."""
        with self._lock:
            return self._counts

    def waiting(self) -> str:
        """Say what its remote reads wait for; "": none runs."""
        return self._remote.waiting() if self._remote is not None else ""

    def close(self) -> None:
        """End all reads that run, with `ReaderClosedError`. Idempotent, thread-safe, does not wait."""
        self._closed.set()
        with self._lock:
            remote = self._remote
        if remote is not None:
            remote.close()

    def _read(self, shard: Shard, offset: int, out: NDArray[np.uint8], awaited: Awaited | None) -> None:
        if is_local(shard.url):
            read_local(shard, offset, out)
        else:
            self._reader().read(shard, offset, out, awaited)

    def _reader(self) -> RemoteReader:
        """Return the reader of remote shards, made for the first: local ones need none."""
        if self._remote is None:
            from prefetch.store.remote import RemoteReader

            with self._lock:
                if self._remote is None:
                    self._remote = RemoteReader(self._settings)
        return self._remote

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts += ReadStats(**more)
