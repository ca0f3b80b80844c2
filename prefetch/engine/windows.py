"""The windows of a stream: planned one after the other, admitted when there is credit, read, and closed.

A window is open from its admission until the last chunk that needs it is built. Its reads run on the reader
threads, in stream order. What is read ahead is bounded by credits, by the number of open windows, and, across
the end of an epoch, by what the consumer has shown to want.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from prefetch.engine.ledger import Ledger, State
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import EngineOptions
from prefetch.errors import MemoryLimitError
from prefetch.work import Chunk, StreamWindow, Task

_AHEAD_SHARE = 8
"""The divisor of what is read for an epoch that may never begin: it is at most such a part of the one before
it."""


class _OpenWindow(Struct, eq=False, kw_only=True):
    window: StreamWindow
    num_reads_left: int
    num_users: int = 0
    """Admitted chunks that still need it."""
    has_last_user: bool = False
    """True if no chunk to come needs it."""
    error: BaseException | None = None


class WindowQueue:
    """Windows of one stream, and the chunks that wait for them. Methods are called under the engine's lock.

    Args:
        source: of windows, in stream order; one thread at a time asks it.
        ledger: of the credits.
        options: the engine's, with its lock.
        on_change: called under the lock when a window was planned or staged.
        epoch: of the first window.
    """

    def __init__(
        self,
        source: Iterator[StreamWindow],
        ledger: Ledger,
        options: EngineOptions,
        *,
        on_change: Task,
        epoch: int,
    ) -> None:
        self._source, self._ledger, self._changed = source, ledger, options.monitor
        self._on_change = on_change
        self._max_open = options.max_windows
        self._keep_bytes = self._least_kept_bytes = options.keep_bytes
        self._first_batch_alone = options.first_batch_alone
        """True if nothing is read ahead until the first batch is delivered."""
        self._has_delivered = False
        self.readers = PriorityPool(options.num_readers, "dataflow-read", initializer=options.initializer)
        """Stage the windows."""
        self.chunks: deque[Chunk[Any]] = deque()
        """The chunks of admitted windows, in stream order, from the first that was not dispatched."""
        self._num_chunks = 0
        """The number of chunks of all windows so far."""
        self._newest_epoch = epoch
        """The epoch of the chunk that came last."""
        self._next: StreamWindow | None = None
        """A window that is planned, and not admitted."""
        self._is_planning = False
        self._open: dict[int, _OpenWindow] = {}
        self._epoch = epoch
        """The epoch of what was delivered last."""
        self._bytes_of: dict[int, int] = {}
        """Bytes of the windows admitted of an epoch, this and the next one."""
        self.reads_on = False
        """True if the next epoch is read as far as credit goes, and not only what its beginning needs."""
        self.num_reads_left = 0
        self.has_ended = False
        """True if no window is to come."""
        self.error: BaseException | None = None
        """Why, if the source has not just ended; it comes after the batches of the windows before."""

    @property
    def num_open(self) -> int:
        """Windows being read or staged."""
        return len(self._open)

    # ---- for chunks -----------------------------------------------------------------------------------

    def state_of(self, chunk: Chunk[Any]) -> tuple[bool, BaseException | None]:
        """Return whether a chunk need not wait for its windows any more, and what failed in them."""
        is_staged = True
        for window in chunk.needs:
            opened = self._open[id(window)]
            if opened.error is not None:
                return True, opened.error
            is_staged = is_staged and not opened.num_reads_left
        return is_staged, None

    def shorten_first(self, most_batches: int) -> Chunk[Any]:
        """Halve the first chunk until it has no more batches than that; return it."""
        while (chunk := self.chunks[0]).num_batches > most_batches:
            self.chunks.popleft()
            for half in reversed(chunk.halves()):
                self.chunks.appendleft(half)
                for window in half.needs:
                    self._open[id(window)].num_users += 1
            for window in chunk.needs:
                self._open[id(window)].num_users -= 1
        return chunk

    def raise_priority(self) -> None:
        """The consumer waits for the windows of the first chunk."""
        for window in self.chunks[0].needs:
            if self._open[id(window)].num_reads_left:
                window.raise_priority()

    def keep_free(self, nbytes: int) -> None:
        """Leave so much credit for what builders make, but half of the limit at most."""
        self._keep_bytes = max(self._least_kept_bytes, min(nbytes, self._ledger.limit_bytes // 2))

    def release(self, chunk: Chunk[Any]) -> None:
        """A chunk needs its windows no more."""
        for window in chunk.needs:
            opened = self._open[id(window)]
            opened.num_users -= 1
            self._close_if_unused(opened)

    def delivered(self, chunk: Chunk[Any]) -> None:
        """The consumer has batches of this chunk, and so is in its epoch."""
        self._has_delivered = True
        for window in chunk.needs:
            self._epoch = max(self._epoch, window.epoch)

    # ---- admission ------------------------------------------------------------------------------------

    def admit(self, *, is_awaited: bool, is_idle: bool) -> None:
        """Admit windows while there is credit for them, or have the next one planned.

        Args:
            is_awaited: whether the consumer asks for batches now.
            is_idle: whether all chunks that were dispatched have been delivered, and copied.

        Raises `MemoryLimitError` if the next window can never be admitted.
        """
        while not self.has_ended:
            window = self._next
            if window is None:
                # Planning may take long (an order of millions of samples is drawn), so it is a reader's task
                # like any other, as urgent as the first chunk after all that are admitted.
                is_alone = self._first_batch_alone and not self._has_delivered and self.chunks
                if not self._is_planning and not is_alone:
                    self._is_planning = True
                    self.readers.submit(self._num_chunks, self._plan)
                return
            # Reads of later windows would take their share of a network that the first batch waits for.
            if not self._has_delivered and self.num_reads_left and self.chunks:
                return
            # Without a chunk to come from the open windows (they are carried over to a later one), one more
            # must be admitted whatever their number is, or nothing would ever use and close them.
            if len(self._open) >= self._max_open and self.chunks:
                return
            # A consumer that asks while nothing else could give it a batch does want that epoch.
            is_idle = is_idle and not self.chunks and not self.num_reads_left
            if self._is_early(window) and not (is_awaited and is_idle):
                return
            # Windows leave credit for outputs, or chunks of the windows before could not be built for want of
            # it, and nothing would close these. Only when nothing runs or waits that could free credit is a
            # window admitted without: then what the consumer keeps does not count either, since waiting for
            # it could be for ever. What does not fit even so never will.
            if not self._ledger.reserve(State.WINDOW, window.nbytes, keep_bytes=self._keep_bytes):
                if not is_idle:
                    return
                if not self._ledger.reserve(State.WINDOW, window.nbytes, head_of_order=True):
                    self.check_limit(window.nbytes, "the next shuffle window needs", [window])
                    return
            self._next = None
            self._admit(window)

    def _is_early(self, window: StreamWindow) -> bool:
        """Return whether a window is of an epoch that the consumer may never come to."""
        ahead = window.epoch - self._epoch
        if ahead != 1 or self.reads_on:
            return ahead > 1
        has_first_batch = self._newest_epoch > self._epoch
        nbytes = self._bytes_of.get(window.epoch, 0) + window.nbytes
        return has_first_batch or nbytes > self._bytes_of.get(self._epoch, 0) // _AHEAD_SHARE

    def _admit(self, window: StreamWindow) -> None:
        try:
            chunks, reads = window.chunks(), window.reads()
        except Exception as error:  # no memory for its buffers: the stream ends before this window
            window.close()
            self._ledger.release(State.WINDOW, window.nbytes)
            self._end(self._explained(error))
            return
        opened = _OpenWindow(window=window, num_reads_left=len(reads))
        sums = {epoch: nbytes for epoch, nbytes in self._bytes_of.items() if epoch >= self._epoch}
        self._bytes_of = {**sums, window.epoch: sums.get(window.epoch, 0) + window.nbytes}
        self._open[id(window)] = opened
        for chunk in chunks:
            for needed in chunk.needs:
                self._open[id(needed)].num_users += 1
            for closed in chunk.closes:
                self._open[id(closed)].has_last_user = True
        if chunks:
            self._newest_epoch = max((w.epoch for w in chunks[-1].needs), default=self._newest_epoch)
        self.num_reads_left += len(reads)
        for read in reads:
            self.readers.submit(self._num_chunks, partial(self._run_read, opened, read))
        self.chunks.extend(chunks)
        self._num_chunks += len(chunks)

    def _end(self, error: BaseException | None) -> None:
        """No more windows; the error, if any, comes after the batches of those admitted."""
        self.has_ended, self.error = True, error
        self._changed.notify_all()

    def _close_if_unused(self, opened: _OpenWindow) -> None:
        # The chunks of a window that failed do not wait for its other reads, which still write into it.
        if opened.num_reads_left == 0 and opened.has_last_user and opened.num_users == 0:
            del self._open[id(opened.window)]
            opened.window.close()
            self._ledger.release(State.WINDOW, opened.window.nbytes)

    # ---- when memory is short -------------------------------------------------------------------------

    def check_limit(self, nbytes: int, what: str, windows: Sequence[StreamWindow]) -> None:
        """Raise `MemoryLimitError` for credit that was refused at the head of the order, if none can come.

        `windows`: what it is for; the largest block among them is named.
        """
        if self.num_reads_left:
            return
        held = self._ledger.snapshot()
        need = held.window_bytes + held.building_bytes + held.ready_bytes + nbytes
        largest = f" ({max(windows, key=lambda window: window.nbytes).largest()})" if windows else ""
        raise MemoryLimitError(
            f"{what} {nbytes:,} bytes beside {need - nbytes:,} held, more than "
            f"memory_limit={held.limit_bytes:,}{largest}; raise memory_limit to "
            f"{self._enough(need, nbytes):,} (at least {need:,}), or lower batch_size, "
            "Shuffle(window_blocks=...) or the window= of batching"
        )

    def _enough(self, need: int, nbytes: int) -> int:
        """A limit for whatever comes after this, too, if it is of the size of what was seen.

        All windows but the one that is only read ahead, and an output beside them, half as large again, as a
        larger limit makes larger chunks; a quarter more, as windows differ.
        """
        sizes = [opened.window.nbytes for opened in self._open.values()]
        if self._next is not None:
            sizes.append(self._next.nbytes)
        windows = max(1, self._max_open - 1) * max(sizes, default=0)
        return max(need, windows + max(nbytes, self._keep_bytes) * 3 // 2) * 5 // 4

    def _explained(self, error: BaseException) -> BaseException:
        """Return what kept a window from being opened; a bare lack of memory is put into words."""
        if not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
            return error
        explained = MemoryLimitError(
            f"the system has no memory for the next shuffle window ({type(error).__name__}: {error}); lower "
            f"memory_limit={self._ledger.limit_bytes:,} or Shuffle(window_blocks=...), or write shards with "
            "smaller blocks (row groups)"
        )
        explained.__cause__ = error
        return explained

    # ---- on reader threads, without the lock ----------------------------------------------------------

    def _plan(self) -> None:
        window, error = None, None
        try:
            window = next(self._source, None)
        except BaseException as caught:
            error = self._explained(caught)
        with self._changed:
            self._is_planning = False
            self._next = window
            if window is None:
                self._end(error)
            self._on_change()

    def _run_read(self, opened: _OpenWindow, read: Task) -> None:
        error = None
        self.readers.begin()
        try:
            if opened.error is None:
                read()
        except BaseException as caught:
            error = caught
        self.readers.account()
        with self._changed:
            opened.error = opened.error or error
            opened.num_reads_left -= 1
            self.num_reads_left -= 1
            if opened.num_reads_left == 0:
                self._close_if_unused(opened)  # one that failed may have lost its users before
                self._on_change()

    def close(self) -> None:
        """Close the windows, when nothing reads or builds any more. Under the lock; idempotent."""
        for opened in self._open.values():
            opened.window.close()
        if self._next is not None:
            self._next.close()
        if isinstance(self._source, Generator):  # its frame refers to the windows that it made
            self._source.close()
        self._open.clear()
        self.chunks.clear()
        self._next = None
