"""One body on its way into memory: given up when no byte comes for too long, standing still in a hold.

While a hold lasts (`prefetch.hold`), a connection of ours leaves in the kernel what comes; when that is full,
TCP tells the sender to stop. Nothing is lost and nothing is asked again. The time-out does not run then.
Bodies that others read come as ever, and only have more time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from prefetch.connections import Place
from prefetch.hold import ReadHold

INTERRUPTIBLE_BYTES = 1 << 17
"""Receive buffer of a connection that may have to stand still: what lies there comes all the same. The kernel
doubles it; by itself it would let it grow to several MiB. It is also what may come in a round trip."""


class Arrival:
    """A place for the bytes, and the patience to wait for them. Used by one task of an event loop.

    Args:
        memory: for all bytes.
        arrived: is told of each number of bytes that came.
        stall_s: seconds without a byte after which the body is given up.
        hold: may make it stand still; None: nothing does.
    """

    def __init__(
        self, memory: memoryview, arrived: Callable[[int], None], stall_s: float, hold: ReadHold | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._told, self._stall_s, self._hold = arrived, stall_s, hold
        self._patience = asyncio.timeout(stall_s)
        self._hold_ends: asyncio.TimerHandle | None = None
        self.place = Place(
            memory,
            self._arrived,
            stands=None if hold is None else hold.stands,
            receive_bytes=INTERRUPTIBLE_BYTES if hold is not None and hold.is_limited else None,
        )

    async def wait_for(self, filling: Awaitable[None]) -> bool:
        """Wait until the place is filled; False: no byte came for too long. Raises what `filling` raises."""
        try:
            with nullcontext() if self._hold is None else self._hold.follow(self._follow):
                async with self._patience:
                    await filling
        except Exception:
            if not self._patience.expired():
                raise
            return False
        finally:
            # What is over may be kept by nobody: a time-out knows its task, and that its frames.
            self.place.close()
            if self._hold_ends is not None:
                self._hold_ends.cancel()
            del self._patience
        return True

    def _arrived(self, nbytes: int) -> None:
        self._told(nbytes)
        until_s = self._loop.time() + self._stall_s
        # Some thousand times a second: the timer is moved only when it would be off by a sixteenth.
        if until_s - (self._patience.when() or 0.0) > self._stall_s / 16 and not self._patience.expired():
            self._patience.reschedule(until_s)

    def _follow(self, seconds: float | None) -> None:
        self._loop.call_soon_threadsafe(self._stand, seconds)

    def _stand(self, seconds: float | None) -> None:
        """Stand still for so many seconds at most; None: no more."""
        if self._hold_ends is not None:
            self._hold_ends.cancel()
            self._hold_ends = None
        if not self.place.is_open or self._patience.expired():
            return  # told too late
        if seconds is not None:
            self._hold_ends = self._loop.call_later(seconds, self._stand, None)
        self.place.stand(still=seconds is not None)
        self._patience.reschedule(self._loop.time() + self._stall_s + (seconds or 0.0))


__all__ = ["INTERRUPTIBLE_BYTES", "Arrival"]
