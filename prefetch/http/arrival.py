"""One body on its way into memory: given up when no byte comes for too long, standing still in a pause.

While a pause lasts (`prefetch.control.pause`), a connection of ours leaves in the kernel what comes; when
that is full, TCP tells the sender to stop. Nothing is lost and nothing is asked again. The time-out does not
run then. Bodies that others read come as ever, and only have more time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from prefetch.control.pause import ReadPause
from prefetch.http.connections import Destination

INTERRUPTIBLE_BYTES = 1 << 17
"""Receive buffer of a connection that may have to stand still: what lies there comes all the same. The kernel
doubles it; by itself it would let it grow to several MiB. It is also what may come in a round trip."""


class Arrival:
    """A destination for the bytes, and the patience to wait for them. Used by one task of an event loop.

    Args:
        memory: for all bytes.
        arrived: is told of each number of bytes that came.
        stall_s: seconds without a byte after which the body is given up.
        pause: may make it stand still; None: nothing does.
    """

    def __init__(
        self, memory: memoryview, arrived: Callable[[int], None], stall_s: float, pause: ReadPause | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._stall_s, self._pause = arrived, stall_s, pause
        self._until_s = self._loop.time() + stall_s
        self._look_again: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._expired = False
        self._pause_ends: asyncio.TimerHandle | None = None
        self.dest = Destination(
            memory,
            self._arrived,
            when_still=None if pause is None else pause.stand_still,
            receive_bytes=INTERRUPTIBLE_BYTES if pause is not None and pause.is_limited else None,
        )

    async def wait_for(self, filling: Awaitable[None]) -> bool:
        """Wait until all bytes came; False: none came for too long. Raises what `filling` raises."""
        self._task = task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        self._look_again = self._loop.call_at(self._until_s, self._look)
        try:
            if self._pause is None:
                await filling
            else:
                with self._pause.follow(self._follow):
                    await filling
        except (Exception, asyncio.CancelledError):  # a client may say in its own way that it was cancelled
            if not self._expired or task.uncancel() > cancels:  # somebody else cancels, too
                raise
            return False
        finally:
            # What is over may be kept by nobody: a task knows its frames.
            self.dest.close()
            self._look_again.cancel()
            if self._pause_ends is not None:
                self._pause_ends.cancel()
            self._task = task = None
        return True

    def _arrived(self, nbytes: int) -> None:
        self._listener(nbytes)
        self._until_s = self._loop.time() + self._stall_s  # seen by `_look`: the timer stays where it is

    def _look(self) -> None:
        if self._loop.time() < self._until_s:
            self._look_again = self._loop.call_at(self._until_s, self._look)
        elif self._task is not None:
            self._expired = True
            self._task.cancel()

    def _follow(self, seconds: float | None) -> None:
        self._loop.call_soon_threadsafe(self._stand, seconds)

    def _stand(self, seconds: float | None) -> None:
        """Stand still for so many seconds at most; None: no more."""
        if self._pause_ends is not None:
            self._pause_ends.cancel()
            self._pause_ends = None
        if not self.dest.is_open or self._expired or self._look_again is None:
            return  # told too late
        if seconds is not None:
            self._pause_ends = self._loop.call_later(seconds, self._stand, None)
        self.dest.stand(still=seconds is not None)
        self._until_s = self._loop.time() + self._stall_s + (seconds or 0.0)
        self._look_again.cancel()  # a pause may end before its time
        self._look_again = self._loop.call_at(self._until_s, self._look)
