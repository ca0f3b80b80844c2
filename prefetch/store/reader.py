"""Read byte ranges of shards into given memory, through faults; notice a shard that is not the indexed one.

Local files are read by `preadv` straight into the destination, with the GIL released, one descriptor per
read (opening costs microseconds, and nothing can leak). After the read the descriptor's size and
modification time must still be those of the catalog, so bytes of another version are never handed on;
a file replaced by rename in the middle keeps serving the old bytes of the open descriptor. Values that
are wanted as they are stored are not read but mapped (`prefetch.memory.mapping`).

Remote ranges are copied into the destination as they arrive (`prefetch.store.bodies`). What fails is tried
again as `prefetch.store.retries` decides, from the byte that was reached; a range of several parts has them
in flight together. The reading thread waits outside the event loop and ends waits of any kind when the reader
is closed; it returns only when nothing writes into its memory any more. Filesystems that are not asynchronous
can be neither interrupted nor timed in the middle of a `cat_file`. Thread-safe.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefetch.control.hold import ReadHold
from prefetch.errors import ReaderClosedError
from prefetch.memory.mapping import touch_pages
from prefetch.notices import next_notice_s
from prefetch.store.again import Hosts, host_of
from prefetch.store.answers import Info
from prefetch.store.arrival import Arrival
from prefetch.store.bodies import FillPlace, body_of
from prefetch.store.filesystems import Filesystems
from prefetch.store.full_reads import read_fully
from prefetch.store.retries import (
    CutBodyError,
    HedgeBudget,
    ReadTimes,
    RetryPolicy,
    failure_of,
    hedge_due_s,
    is_crawling,
)
from sharding.blocks import Shard
from sharding.catalog.storage import check_shard, failure_text, local_info
from sharding.errors import DataflowError, ShardChangedError, ShardReadError
from sharding.urls import is_local, local_path

R = TypeVar("R")
Awaited = Future[None]
"""Done when the consumer waits for what is being read."""

_PART_BYTES = 4 << 20
_PARTS_AT_ONCE = 4
_LEAST_LOOK_S = 0.01
_WHOLE_PART_PATIENCE = 6
"""How many times the stall time-out a part may take that comes in one piece: 4 MiB in 12 s."""


@dataclass(frozen=True)
class ReadStats:
    """What went wrong with remote reads, and what was done about it; all counts since the start."""

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
    """Those that were faster than the first request."""
    hedge_bytes: int = 0
    """Bytes that second requests asked for: at most 2 % of all bytes read."""
    checksum_failures: int = 0
    """Blocks that came with other bytes than were indexed. Each was read again once, and is an error if it
    differed again."""

    def __add__(self, other: ReadStats) -> ReadStats:
        return ReadStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


NO_FAULTS = ReadStats()


@dataclass
class _Part:
    """A piece of a range: the bytes [at, end) of the destination are still to come."""

    begin: int
    at: int
    end: int
    heard_s: float
    """When its last byte came, or it was asked."""

    @property
    def left(self) -> int:
        return self.end - self.at


@dataclass
class _Range:
    """One read on its way."""

    shard: Shard
    offset: int
    out: NDArray[np.uint8]
    awaited: Awaited | None
    began_s: float
    parts: list[_Part] = field(default_factory=list)
    failures: int = 0
    """In a row, without a byte between them."""
    stalls: int = 0
    """Of these, requests without a byte for too long."""
    reason: str = ""
    """Why the last attempt failed."""
    left_then: int = 0
    """Bytes that were still to come then."""
    last_byte_s: float = field(init=False)
    """When an attempt that failed had brought a byte, or the read began."""

    def __post_init__(self) -> None:
        self.last_byte_s = self.began_s

    @property
    def left(self) -> int:
        return sum(part.left for part in self.parts)


class StoreReader:
    """Reads ranges of the shards of one dataset, wherever they lie. Thread-safe.

    Args:
        storage_options: keyword arguments of the fsspec filesystem.
        policy: when a remote read is tried again.
        hedge_share: share of all bytes that may be asked for a second time.
        hosts: that have answered; the one that opened the dataset knows.
        say: is given a line on what a read waits for, after 3 s and at growing intervals. None: who waits
            asks `waiting`.
        hold: makes bytes stand still while it holds, where a store is read directly; time-outs and second
            requests do not count that time. It does not keep reads from beginning.
        now: seconds on a clock that only goes forward; None: a real one, that of the hold if there is one.
        wait: waits so many seconds, or until the reader is closed; whether it is. None: on a real clock.
    """

    def __init__(
        self,
        storage_options: Mapping[str, Any] | None = None,
        *,
        policy: RetryPolicy | None = None,
        hedge_share: float = 0.02,
        hosts: Hosts | None = None,
        say: Callable[[str], None] | None = None,
        hold: ReadHold | None = None,
        now: Callable[[], float] | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._filesystems = Filesystems(storage_options or {})
        self._policy, self._say = policy or RetryPolicy(), say
        self._hosts = Hosts() if hosts is None else hosts
        self._hold = hold
        self._now = now or (hold.moving_s if hold else time.monotonic)
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._lock = threading.Lock()  # guards everything below
        self._checked: set[str] = set()
        self._running: dict[_OnLoop, _Range] = {}
        self._failing: dict[int, _Range] = {}
        self._counts = NO_FAULTS
        self._times = ReadTimes()
        self._budget = HedgeBudget(hedge_share)

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
        """What went wrong so far."""
        with self._lock:
            return self._counts

    def waiting(self) -> str:
        """What its remote reads wait for, in words; "": none runs."""
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
        """End all reads that run, with `ReaderClosedError`. Idempotent, thread-safe, does not wait."""
        self._closed.set()
        with self._lock:
            running = list(self._running)
        for call in running:
            call.cancel()

    def _read(self, shard: Shard, offset: int, out: NDArray[np.uint8], awaited: Awaited | None) -> None:
        if is_local(shard.url):
            _read_local(shard, offset, out)
        else:
            self._read_remote(shard, offset, out, awaited)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts += ReadStats(**more)

    # ---- attempts ---------------------------------------------------------------------------------------

    def _read_remote(
        self, shard: Shard, offset: int, out: NDArray[np.uint8], awaited: Awaited | None
    ) -> None:
        if offset + out.nbytes > shard.size:
            raise _truncated(shard, offset, out.nbytes, max(0, shard.size - offset))
        began_s = self._now()
        starts = range(0, out.nbytes, _PART_BYTES)
        parts = [_Part(at, at, min(at + _PART_BYTES, out.nbytes), began_s) for at in starts]
        read = _Range(shard, offset, out, awaited, began_s, parts)
        try:
            attempts = self._attempt_until_whole(read)
        finally:
            if read.failures:
                with self._lock:
                    self._failing.pop(id(read), None)
        with self._lock:
            self._budget.read(out.nbytes)
            if attempts == 1:  # what others took says how long a read takes that nothing befalls
                self._times.add(out.nbytes, self._now() - began_s)

    def _attempt_until_whole(self, read: _Range) -> int:
        """Ask for what is missing until nothing is; how often that was."""
        shard, offset, due_s = read.shard, read.offset, next_notice_s(0.0)
        for attempts in count(1):
            if self._closed.is_set():
                raise _closed()
            left = read.left
            idle_s = self._now() - read.last_byte_s
            stall_s = self._policy.stall_timeout_s(read.stalls, idle_s, self._long_s(read))
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
            resumed = sum(part.begin < part.at < part.end for part in read.parts)
            self._count(retries=1, resumed=resumed)
            read.reason, read.left_then = reason, read.left
            with self._lock:
                self._failing[id(read)] = read
            if self._say and idle_s >= due_s:
                self._say(f"waiting {idle_s:.0f} s for a read: {self.waiting()}")
                due_s = next_notice_s(idle_s)
            if self._wait(decision.delay_s):
                raise _closed()
        raise AssertionError("unreachable")

    def _attempt(self, read: _Range, stall_s: float) -> None:
        """Ask once for all that is missing. Raises what the store's client raises."""
        fs, path = self._filesystems.open(read.shard.location)
        body = body_of(fs)
        if body is not None:
            call = _OnLoop(fs.loop)
            with self._lock:
                self._running[call] = read
            try:
                call.run(
                    self._fetch(read, fs, path, *body, stall_s),
                    cancelled=self._closed.is_set,
                    meanwhile=partial(touch_pages, read.out),
                )
            finally:
                with self._lock:
                    del self._running[call]
            return
        if not self._is_checked(read.shard):
            self._check(read.shard, fs.info(path))
        for part in read.parts:
            if part.left:
                start = read.offset + part.at
                with self._filesystems.turn(fs, read.shard.url):
                    piece = fs.cat_file(path, start=start, end=start + part.left)[: part.left]
                read.out.data[part.at : part.at + len(piece)] = piece
                part.at, part.heard_s = part.at + len(piece), self._now()
                _whole(part)

    # ---- in the event loop ------------------------------------------------------------------------------

    async def _fetch(
        self, read: _Range, fs: Any, path: str, fill: FillPlace, streams: bool, stall_s: float
    ) -> None:
        if not streams:
            stall_s *= _WHOLE_PART_PATIENCE
            if not self._is_checked(read.shard):
                async with asyncio.timeout(stall_s):
                    self._check(read.shard, await fs._info(path))
        missing = [part for part in read.parts if part.left]
        if len(missing) == 1:
            await self._fetch_part(read, missing[0], fs, path, fill, stall_s)
            return
        turns = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def fetch(part: _Part) -> None:
            async with turns:
                await self._fetch_part(read, part, fs, path, fill, stall_s)

        # All end before the first error is raised: nothing may write into `out` after that.
        ended = await asyncio.gather(*map(fetch, missing), return_exceptions=True)
        errors = [error for error in ended if error is not None]
        try:
            if errors:
                raise next((e for e in errors if isinstance(e, DataflowError)), errors[0])
        finally:
            del ended, errors  # no cycle from an error's traceback back to it

    async def _fetch_part(
        self, read: _Range, part: _Part, fs: Any, path: str, fill: FillPlace, stall_s: float
    ) -> None:
        if read.awaited is None:
            await self._stream(read, part, fs, path, fill, stall_s)
            return
        loop = asyncio.get_running_loop()
        first = loop.create_task(self._stream(read, part, fs, path, fill, stall_s))
        tasks = [first]
        try:
            asked_at, asked_s = part.at, self._now()
            part.heard_s = asked_s
            await _first_of(first, read.awaited)
            if not first.done() and self._long_s(read) is None:  # a second look: others may have told by then
                await asyncio.wait([first], timeout=self._policy.least_stall_s)
            hedged = False
            while not first.done():
                long_s = self._long_s(read) or stall_s
                now_s, due_s = self._now(), hedge_due_s(asked_s, part.heard_s, long_s)
                if not hedged and now_s >= due_s and self._may_hedge(part.left):
                    hedged = True
                    other = _Part(part.at, part.at, part.end, now_s)
                    second = loop.create_task(self._stream(read, other, fs, path, fill, stall_s))
                    tasks.append(second)
                    await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
                    if not _succeeded(first):
                        await asyncio.wait([second])
                    if _succeeded(second) and not _succeeded(first):
                        part.at = part.end
                        self._count(hedges_won=1)
                        return
                    continue  # the second failed, and the first may be silent for ever
                # Asking anew in its place costs no bytes, so no budget.
                silent_s = self._policy.awaited_stall_s(read.stalls, long_s)
                if now_s >= part.heard_s + silent_s:
                    raise TimeoutError(f"no byte came for {silent_s:.3g} s, and the training waits")
                if is_crawling(now_s - asked_s, part.at - asked_at, part.left, silent_s):
                    raise TimeoutError(f"few bytes came in {now_s - asked_s:.3g} s, and the training waits")
                next_s = due_s if due_s > now_s and not hedged else part.heard_s + silent_s
                # Each byte puts it off; in a hold the clock stands still.
                await asyncio.wait([first], timeout=max(next_s - now_s, _LEAST_LOOK_S))
            await first
        finally:
            for task in tasks:
                task.cancel()
            if len(tasks) > 1 or not first.done():
                await asyncio.gather(*tasks, return_exceptions=True)
            tasks.clear()
            del first, task

    def _long_s(self, read: _Range) -> float | None:
        with self._lock:
            return self._times.long_s(read.out.nbytes)

    def _may_hedge(self, nbytes: int) -> bool:
        with self._lock:
            if not self._budget.take(nbytes):
                return False
        self._count(hedges=1, hedge_bytes=nbytes)
        return True

    async def _stream(
        self, read: _Range, part: _Part, fs: Any, path: str, fill: FillPlace, stall_s: float
    ) -> None:
        """Fill a part as its bytes come; it is whole, or an error says why not."""
        failure: Exception | None = None
        try:
            memory, arrived = read.out.data[part.at : part.end], partial(self._arrived, part)
            arrival = Arrival(memory, arrived, stall_s, self._hold)
            check = partial(self._check, read.shard)
            if not await arrival.wait_for(fill(fs, path, read.offset + part.at, arrival.place, check)):
                failure = TimeoutError(f"no byte came for {stall_s:g} s")
        except Exception as error:
            failure = error
        if failure is not None:
            # The error is kept by the task, and by the body that it broke. With the traceback that leads to
            # these (the body knows its task) it would keep itself, and with it the memory read into.
            try:
                raise failure.with_traceback(None)
            finally:
                del failure
        _whole(part)

    def _arrived(self, part: _Part, nbytes: int) -> None:
        part.at += nbytes
        part.heard_s = self._now()

    # ---- the object -------------------------------------------------------------------------------------

    def _is_checked(self, shard: Shard) -> bool:
        return shard.url in self._checked

    def _check(self, shard: Shard, info: Info) -> None:
        what = check_shard(shard, info)
        if what:
            raise ShardChangedError(shard.url, what, stage="read")
        if shard.url not in self._checked:
            self._hosts.add(shard.url)
            with self._lock:
                self._checked.add(shard.url)


class _OnLoop:
    """A coroutine that one thread runs in an event loop, waits for, and others may cancel."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        # Held until then. A Future would wake the thread while it holds the lock that the thread needs next.
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(
        self,
        coroutine: Coroutine[Any, Any, None],
        *,
        cancelled: Callable[[], bool],
        meanwhile: Callable[[], None],
    ) -> None:
        """Do something meanwhile and wait for its end.

        Raises what it raises, `ReaderClosedError` if it was cancelled.
        """
        self._loop.call_soon_threadsafe(self._start, coroutine)
        if cancelled():  # before `cancel` could know of this call
            self.cancel()
        try:
            meanwhile()
            self._wait()
        except BaseException:
            # Interrupted from outside: the memory it writes into is the caller's again only at its end.
            self.cancel()
            self._wait()
            raise
        error, self._error, self._task = self._error, None, None
        if error is not None:
            try:
                raise error
            finally:  # its traceback leads here: without this, garbage collection had to free its buffers
                del error

    def cancel(self) -> None:
        """End it soon. Any thread; does not wait."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _wait(self) -> None:
        while not self._has_ended:
            self._ended.acquire()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._settle)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._error = _closed() if task.cancelled() else task.exception()
        self._has_ended = True
        self._ended.release()


async def _first_of(task: asyncio.Task[Any], signal: Awaited) -> None:
    """Wait in the event loop for the end of a task, or for what another thread sets."""
    if signal.done():
        return
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    signal.add_done_callback(lambda _: loop.call_soon_threadsafe(heard.set))
    task.add_done_callback(lambda _: heard.set())
    await heard.wait()


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _whole(part: _Part) -> None:
    if part.left:
        raise CutBodyError(f"the body ended {part.left} bytes too early")


def _closed() -> ReaderClosedError:
    return ReaderClosedError("the loader was closed while a shard was being read")


def _read_local(shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
    got = _with_file(shard, offset, lambda descriptor: read_fully(descriptor, offset, out))
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
    except ShardReadError:
        raise
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


def _reads(count: int) -> str:
    return "a read" if count == 1 else f"{count} reads"


def _truncated(shard: Shard, offset: int, wanted: int, got: int) -> ShardReadError:
    return ShardReadError(shard.url, f"truncated: wanted {wanted} bytes, got {got}", offset, stage="read")
