"""Read byte ranges of remote shards into given memory, through faults.

Ranges are copied into the destination as they arrive (`prefetch.store.fetching`). What fails is tried again
as `prefetch.retries` decides, from the byte that was reached; a range of several parts has them in flight
together. The reading thread waits outside the event loop, and ends waits when the reader is closed;
it returns only when nothing writes into its memory any more. Calls of filesystems that are not asynchronous
are given up and abandoned (`prefetch.store.blocking`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from fsspec.implementations.cached import CachingFileSystem
from numpy.typing import NDArray

from prefetch.errors import next_notice_s
from prefetch.http.clients import client_of
from prefetch.memory.mapping import touch_pages
from prefetch.retries import failure_of
from prefetch.store.blocking import BlockingCall
from prefetch.store.fetching import WHOLE_PART_PATIENCE, LoopCall, RangeFetcher, closed_error
from prefetch.store.filesystems import Filesystems
from prefetch.store.local import truncated
from prefetch.store.ranges import Awaited, RangePart, RangeRead
from prefetch.store.retrier import ReadSettings, host_of
from sharding.blocks import Shard
from sharding.catalog.storage import failure_text
from sharding.errors import DataflowError, ShardReadError


class RemoteReader:
    """Reads ranges of remote shards for a `StoreReader`. Thread-safe."""

    def __init__(self, settings: ReadSettings) -> None:
        self._filesystems = Filesystems(settings.storage_options)
        self._settings, self._policy, self._hosts = settings, settings.policy, settings.hosts
        self._now, self._closed, self._count = settings.now, settings.closed, settings.count
        self._lock = threading.Lock()  # guards what follows
        self._running: dict[LoopCall | BlockingCall, RangeRead] = {}
        self._failing: dict[int, RangeRead] = {}
        self._fetcher = RangeFetcher(settings)

    def read(self, shard: Shard, offset: int, out: NDArray[np.uint8], awaited: Awaited | None) -> None:
        """Fill `out` with the shard's bytes from `offset`. See `StoreReader.read_into`."""
        if offset + out.nbytes > shard.size:
            raise truncated(shard, offset, out.nbytes, max(0, shard.size - offset))
        began_s, part_bytes = self._now(), self._settings.part_bytes
        starts = range(0, out.nbytes, part_bytes)
        parts = [RangePart(start, start, min(start + part_bytes, out.nbytes), began_s) for start in starts]
        read = RangeRead(shard=shard, offset=offset, out=out, awaited=awaited, began_s=began_s, parts=parts)
        try:
            attempts = self._attempt_until_whole(read)
        finally:
            if read.failures:
                with self._lock:
                    self._failing.pop(id(read), None)
        # What others took says how long a read takes that nothing befalls.
        self._fetcher.ended(out.nbytes, self._now() - began_s if attempts == 1 else None)

    def waiting(self) -> str:
        """Say what reads wait for; "": none runs."""
        with self._lock:
            failing = [read for read in self._failing.values() if read.left == read.left_then]
            running = list(self._running.values())
        now = self._now()
        if failing:
            oldest = min(failing, key=lambda read: read.last_byte_s)
            silent_s = now - oldest.last_byte_s
            return (
                f"{_reads(len(failing))} of {host_of(oldest.shard.url)} without a byte for {silent_s:.0f} s, "
                f"asked again for {max(0.0, self._policy.deadline_s - silent_s):.0f} s more; the last time: "
                f"{oldest.reason}"
            )
        if running:
            heard_s = max(part.heard_s for read in running for part in read.parts)
            total = sum(read.out.nbytes for read in running)
            come = total - sum(read.left for read in running)
            return (
                f"{_reads(len(running))} of {host_of(running[0].shard.url)} on the way, {come / 1e6:.1f} of "
                f"{total / 1e6:.1f} MB came, the last byte {now - heard_s:.1f} s ago"
            )
        return ""

    def close(self) -> None:
        """End all reads that run, with `ReaderClosedError`, when `closed` is set. Does not wait."""
        with self._lock:
            running = list(self._running)
        for call in running:
            call.cancel()

    def _attempt_until_whole(self, read: RangeRead) -> int:
        """Ask for what is missing until nothing is; how often that was."""
        shard, offset, due_s = read.shard, read.offset, next_notice_s(0.0)
        for attempts in count(1):
            if self._closed.is_set():
                raise closed_error()
            left = read.left
            idle_s = self._now() - read.last_byte_s
            stall_s = self._policy.stall_timeout_s(read.stalls, idle_s, self._fetcher.long_s(read))
            try:
                self._attempt(read, stall_s)
                return attempts
            except DataflowError:
                raise
            except Exception as caught:
                error = caught  # deleted below: its traceback leads back here
            now = self._now()
            if read.left < left:
                read.failures, read.stalls, read.last_byte_s, due_s = 0, 0, now, next_notice_s(0.0)
            failure, idle_s = failure_of(error), now - read.last_byte_s
            read.failures += 1
            read.stalls += failure.kind == "timeout"
            self._count(throttled=failure.kind == "throttled", timeouts=failure.kind == "timeout")
            if failure.kind not in ("connection", "timeout"):
                self._hosts.add(shard.url)
            decision = self._policy.next_attempt(
                f"{shard.url} {offset}", read.failures, failure, idle_s, answered=shard.url in self._hosts
            )
            reason = failure_text(error)
            if decision.delay_s is None:
                if failure.kind != "final":
                    last = offset + read.out.nbytes - 1
                    reason = (
                        f"bytes {offset} to {last} were given up after {attempts} attempts in "
                        f"{now - read.began_s:.1f} s: {decision.reason}; the last one: {reason}"
                    )
                raise ShardReadError(shard.url, reason, offset, stage="read") from error
            del error
            resumed = sum(part.begin < part.position < part.end for part in read.parts)
            self._count(retries=1, resumed=resumed)
            read.reason, read.left_then = reason, read.left
            with self._lock:
                self._failing[id(read)] = read
            if (say := self._settings.say) and idle_s >= due_s:
                say(f"waiting {idle_s:.0f} s for a read: {self.waiting()}")
                due_s = next_notice_s(idle_s)
            if self._settings.wait(decision.delay_s):
                raise closed_error()
        raise AssertionError("unreachable")

    def _attempt(self, read: RangeRead, stall_s: float) -> None:
        """Ask once for all that is missing. Raises what the store's client raises."""
        fs, path = self._filesystems.open(read.shard.location)
        client = client_of(fs)
        if client is not None:
            call = LoopCall(fs.loop)
            with self._lock:
                self._running[call] = read
            try:
                call.run(
                    self._fetcher.fetch(read, fs, path, client, stall_s),
                    cancelled=self._closed.is_set,
                    meanwhile=partial(touch_pages, read.out),
                )
            finally:
                with self._lock:
                    del self._running[call]
            return
        if not self._fetcher.is_checked(read.shard):
            self._fetcher.check(read.shard, self._block(read, fs, stall_s, lambda: fs.info(path)))
        for part in read.parts:
            if part.left:
                ask = partial(self._piece, fs, path, read.shard.url, read.offset + part.position, part.left)
                piece = self._block(read, fs, stall_s, ask)[: part.left]
                read.out.data[part.position : part.position + len(piece)] = piece
                part.position, part.heard_s = part.position + len(piece), self._now()
                part.check_whole()

    def _piece(self, fs: Any, path: str, url: str, start: int, nbytes: int) -> bytes:
        with self._filesystems.lock_of(fs, url):
            piece: bytes = fs.cat_file(path, start=start, end=start + nbytes)
        return piece

    def _block(self, read: RangeRead, fs: Any, stall_s: float, ask: Callable[[], Any]) -> Any:
        """Return the result of a client's call; abandon it if it takes too long, or when the reader ends."""
        call = BlockingCall(ask)
        with self._lock:
            self._running[call] = read
        if self._closed.is_set():  # before `close` could know of this call
            call.cancel()
        # A copy of a whole file takes as long as it takes.
        patient_s = None if isinstance(fs, CachingFileSystem) else WHOLE_PART_PATIENCE * stall_s
        try:
            return call.run(patient_s)
        except TimeoutError:
            type(fs).clear_instance_cache()  # the one that hangs may not be used by two threads
            raise
        finally:
            with self._lock:
                del self._running[call]


def _reads(count: int) -> str:
    return "a read" if count == 1 else f"{count} reads"
