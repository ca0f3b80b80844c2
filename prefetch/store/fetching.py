"""Fetch what is missing of a range from a remote store: some parts at a time, twice where the consumer waits.

Everything here runs in the event loop of a filesystem; the thread that reads waits outside (`LoopCall`). What
fails is raised: whether it is tried again is decided by the caller.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from prefetch.errors import ReaderClosedError
from prefetch.http.arrival import Arrival
from prefetch.http.clients import Client, Fill
from prefetch.http.responses import Info
from prefetch.retries import HedgeBudget, ReadTimes, hedge_due_s, is_crawling
from prefetch.store.ranges import Awaited, RangePart, RangeRead
from prefetch.store.retrier import ReadSettings
from sharding.blocks import Shard
from sharding.catalog.storage import check_shard
from sharding.errors import DataflowError, ShardChangedError

_PARTS_AT_ONCE = 4
_LEAST_LOOK_S = 0.01
WHOLE_PART_PATIENCE = 6
"""The number of stall time-outs that a part may take that comes in one piece: 4 MiB in 12 s."""


class RangeFetcher:
    """Fills the missing parts of ranges. Thread-safe."""

    def __init__(self, settings: ReadSettings) -> None:
        self._policy, self._hosts, self._pause = settings.policy, settings.hosts, settings.pause
        self._now, self._count = settings.now, settings.count
        self._lock = threading.Lock()  # guards what follows
        self._checked: set[str] = set()
        self._times = ReadTimes()
        self._budget = HedgeBudget(settings.hedge_share)

    def is_checked(self, shard: Shard) -> bool:
        """Return whether the store has said of this object that it is the one that was indexed."""
        return shard.url in self._checked

    def check(self, shard: Shard, info: Info) -> None:
        """Raise `ShardChangedError` if an object is not the one that was indexed."""
        reason = check_shard(shard, info)
        if reason:
            raise ShardChangedError(shard.url, reason, stage="read")
        if shard.url not in self._checked:
            self._hosts.add(shard.url)
            with self._lock:
                self._checked.add(shard.url)

    def ended(self, nbytes: int, seconds: float | None) -> None:
        """A read ended well, after so long; None: it says nothing of how long reads take."""
        with self._lock:
            self._budget.read(nbytes)
            if seconds is not None:
                self._times.add(nbytes, seconds)

    async def fetch(self, read: RangeRead, fs: Any, path: str, client: Client, stall_s: float) -> None:
        """Ask once for all that is missing. Raises what the store's client raises.

        Args:
            read: what is read.
            fs: the filesystem, in whose event loop this runs.
            path: of the shard in it.
            client: how it is asked.
            stall_s: silence after which a request is given up.
        """
        fill, streams = client
        if not streams:
            stall_s *= WHOLE_PART_PATIENCE
            if not self.is_checked(read.shard):
                async with asyncio.timeout(stall_s):
                    self.check(read.shard, await fs._info(path))
        missing = [part for part in read.parts if part.left]
        if len(missing) == 1:
            await self._fetch_part(read, missing[0], fs, path, fill, stall_s)
            return
        limit = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def fetch(part: RangePart) -> None:
            async with limit:
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
        self, read: RangeRead, part: RangePart, fs: Any, path: str, fill: Fill, stall_s: float
    ) -> None:
        """Fill a part; where the consumer waits for it, by a second request or a new one if it is late.

        Three clocks run against a read that is waited for. Late (`hedge_due_s`): a second request races the
        first, which costs bytes, so it is bound to a budget and made once. Silent or crawling: the first is
        given up and asked again by the caller from the byte reached, which costs a round trip and no bytes,
        so it needs no budget. Until the consumer waits none of them runs: nobody is held up.
        """
        if read.awaited is None:
            await self._stream(read, part, fs, path, fill, stall_s)
            return
        loop = asyncio.get_running_loop()
        first = loop.create_task(self._stream(read, part, fs, path, fill, stall_s))
        tasks = [first]
        try:
            asked_at, asked_s = part.position, self._now()
            part.heard_s = asked_s
            await _first_of(first, read.awaited)
            if not first.done() and self.long_s(read) is None:  # a second look: others may have told by then
                await asyncio.wait([first], timeout=self._policy.least_stall_s)
            hedged = False
            while not first.done():
                long_s = self.long_s(read) or stall_s
                now_s, due_s = self._now(), hedge_due_s(asked_s, part.heard_s, long_s)
                if not hedged and now_s >= due_s and self._may_hedge(part.left):
                    hedged = True
                    other = RangePart(part.position, part.position, part.end, now_s)
                    second = loop.create_task(self._stream(read, other, fs, path, fill, stall_s))
                    tasks.append(second)
                    await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
                    if not _succeeded(first):
                        await asyncio.wait([second])
                    if _succeeded(second) and not _succeeded(first):
                        part.position = part.end
                        self._count(hedges_won=1)
                        return
                    continue  # the second failed, and the first may be silent for ever
                # Asking anew instead costs no bytes, so no budget.
                silent_s = self._policy.awaited_stall_s(read.stalls, long_s)
                if now_s >= part.heard_s + silent_s:
                    raise TimeoutError(f"no byte came for {silent_s:.3g} s, and the training waits")
                if is_crawling(now_s - asked_s, part.position - asked_at, part.left, silent_s):
                    raise TimeoutError(f"few bytes came in {now_s - asked_s:.3g} s, and the training waits")
                next_s = due_s if due_s > now_s and not hedged else part.heard_s + silent_s
                # Each byte puts it off; in a pause the clock stands still.
                await asyncio.wait([first], timeout=max(next_s - now_s, _LEAST_LOOK_S))
            await first
        finally:
            for task in tasks:
                task.cancel()
            if len(tasks) > 1 or not first.done():
                await asyncio.gather(*tasks, return_exceptions=True)
            tasks.clear()
            del first, task

    def long_s(self, read: RangeRead) -> float | None:
        """Longer than nearly all reads of this size take; None where that is not known."""
        with self._lock:
            return self._times.long_s(read.out.nbytes)

    def _may_hedge(self, nbytes: int) -> bool:
        with self._lock:
            if not self._budget.take(nbytes):
                return False
        self._count(hedges=1, hedge_bytes=nbytes)
        return True

    async def _stream(
        self, read: RangeRead, part: RangePart, fs: Any, path: str, fill: Fill, stall_s: float
    ) -> None:
        """Fill a part as its bytes come; it is whole, or an error says why not."""
        failure: Exception | None = None
        try:
            memory, arrived = read.out.data[part.position : part.end], partial(self._arrived, part)
            arrival = Arrival(memory, arrived, stall_s, self._pause)
            check = partial(self.check, read.shard)
            if not await arrival.wait_for(fill(fs, path, read.offset + part.position, arrival.dest, check)):
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
        part.check_whole()

    def _arrived(self, part: RangePart, nbytes: int) -> None:
        part.position += nbytes
        part.heard_s = self._now()


class LoopCall:
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
        self._task.add_done_callback(self._set_result)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _set_result(self, task: asyncio.Task[None]) -> None:
        self._error = closed_error() if task.cancelled() else task.exception()
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


def closed_error() -> ReaderClosedError:
    """Return the error of reads that a closed reader ended."""
    return ReaderClosedError("the loader was closed while a shard was being read")
