"""Ordered delivery of batches that many threads read and build, inside one byte budget.

The work comes as windows and chunks (`prefetch.work`): a source yields windows in stream order,
without end, and each window names its chunks. The engine

* admits a window when the ledger has credit for it, and reads its blocks on the reader threads (`windows`);
* hands a chunk to the builders when its windows are staged, the ready depth asks for it, and the ledger has
  credit for its output, most urgent first; it gets batches in slots or an error back (`builders`);
* delivers chunks in stream order, whatever order they finish in (`builds`);
* charges what only shows when a batch is made, and suspends a chunk between two batches while more is held
  than the limit; the one at the head goes on when what it has finished is delivered;
* closes a window when the last chunk that needs it is built, and its batches are made, which may be while the
  consumer takes them; a chunk may need any windows that are open.

No thread coordinates: whoever changes the state (a finished task, the consumer) calls `_pump` under the
one lock, so nothing polls. Progress: the head of the order is admitted without counting bytes that the
consumer keeps; if even that does not fit, nothing else could ever free credit, and the consumer gets a
`MemoryLimitError` that says what would fit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

from prefetch.control.depth import Observation
from prefetch.engine.builders import Builders
from prefetch.engine.builds import ChunkBuild, ChunkQueue
from prefetch.engine.ledger import Ledger, State
from prefetch.engine.pool import lower_switch_interval, restore_switch_interval
from prefetch.engine.stats import NOT_STARTED, ConsumerWait, EngineOptions, EngineStats
from prefetch.engine.windows import WindowQueue
from prefetch.errors import EngineClosedError
from prefetch.work import Batches, StreamWindow

T = TypeVar("T")

_DELIVERED_SHARE = 32
"""The fraction of the limit that what was charged is delivered in: the consumer has a part until it asks
again."""


class Engine(Generic[T]):
    """Queues and credits of one stream of batches. `next_batches` is for one consumer thread.

    Args:
        source: of windows, in stream order.
        ledger: of all credits.
        builders: build the chunks; the engine closes them.
        options: how much it may use.
        epoch: that of the first window.
    """

    def __init__(
        self,
        source: Iterator[StreamWindow],
        *,
        ledger: Ledger,
        builders: Builders[T],
        options: EngineOptions,
        epoch: int = 0,
    ) -> None:
        self._ledger, self._builders, self._options = ledger, builders, options
        self._changed = options.monitor  # guards everything below, and what it calls
        self._failure: BaseException | None = None
        self._is_asked = False
        """True if the consumer is in `next_batches`."""
        self._consumer_waits = False
        self._delivered_heap_bytes = 0
        """Charged of what was delivered last."""
        self._delivered = 0
        self._delivered_bytes = 0
        self._delivered_last: tuple[float, int] | None = None
        """The time when the consumer last got batches, and how many."""
        self._steps_s: list[float] = []
        self._waits = 0
        self._limited_by = ""
        self._starved_s = self._few_chunks_s = 0.0
        self._began_s = time.perf_counter()
        self._pid = os.getpid()
        self._windows = WindowQueue(source, ledger, options, on_change=self._go_on, epoch=epoch)
        self._queue: ChunkQueue[T] = ChunkQueue(
            ledger,
            options,
            windows=self._windows,
            builders=builders,
            on_end=self._go_on,
            depth=lambda nbytes: options.depth(self._observe(nbytes)).value,
        )
        lower_switch_interval(self)
        with self._changed:
            self._pump()

    # ---- consumer -------------------------------------------------------------------------------

    def next_batches(self) -> Batches[T]:
        """Batches of the next chunk, or of the same one; empty at the end of a finite source.

        Raises what building them raised, `StallError` after the time-out, `MemoryLimitError`.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a loader's threads do not survive a fork; make the loader in the child")
        with self._changed:
            self._is_asked = True
            if self._delivered_heap_bytes:
                self._ledger.give_back(self._delivered_heap_bytes)
                self._delivered_heap_bytes = 0
            if self._delivered_last is not None:
                since_s, num_batches = self._delivered_last
                self._steps_s.append((time.perf_counter() - since_s) / num_batches)
                self._delivered_last = None
            if not self._is_deliverable():
                self._pump()  # batches that the consumer dropped since may have made room
                if not self._is_deliverable():
                    self._wait()
            return self._deliver()

    def read_on(self) -> None:
        """Read ahead into the next epoch as far as credit goes.

        Before, only what its first batches need is read, and nothing if that is much against an epoch: an
        evaluation of one epoch would pay for bytes that it never sees.
        """
        with self._changed:
            if not self._windows.reads_on:
                self._windows.reads_on = True
                self._pump()

    def _deliver(self) -> Batches[T]:
        """The finished batches at the head of the order, or what there is instead. Under the lock."""
        self._is_asked = False
        head = self._queue.line[0] if self._queue.line else None
        if self._failure and not (head and head.is_deliverable):
            raise self._failure
        if head is None:
            if self._windows.error:
                raise self._windows.error
            return ()
        if head.error and not head.partials:  # it comes behind the batches before it
            self._drop(head)
            raise head.error
        batches, slots, heap = self._queue.take(self._ledger.limit_bytes // _DELIVERED_SHARE)
        if not batches and self._queue.is_closed:  # they waited for the end of a chunk that is dropped
            raise EngineClosedError("the loader was closed while a batch was awaited")
        if slots + heap:
            self._ledger.move(State.READY, State.IN_USE, slots + heap)
        self._delivered_heap_bytes += heap
        self._delivered_bytes += slots
        if head.is_done and not head.partials and not head.error:
            self._drop(head)
        self._windows.delivered(head.chunk)
        self._delivered += len(batches)
        self._pump()
        if batches:
            self._delivered_last = time.perf_counter(), len(batches)
        return batches

    def _drop(self, head: ChunkBuild[T]) -> None:
        """Record that all of the head was delivered."""
        self._queue.line.popleft()
        self._queue.num_batches -= head.chunk.num_batches - head.num_delivered
        if head.error or not head.chunk.reads_windows:  # else its credits stay as long
            leased = head.chunk.leased_bytes
            self._ledger.move(State.READY, State.IN_USE, leased)
            self._ledger.release(State.READY, head.nbytes - leased)
            self._delivered_bytes += leased

    def _is_deliverable(self) -> bool:
        if self._queue.line:
            return self._queue.line[0].is_deliverable
        is_left = self._windows.chunks or self._windows.num_reads_left
        is_at_end = self._windows.has_ended and not is_left
        return self._failure is not None or (is_at_end and not self._queue.is_closed)

    def _wait(self) -> None:
        began_s = time.perf_counter()
        wait = ConsumerWait(began_s, self._options)
        num_running, has_few = self._queue.num_running, False
        if self._delivered:
            self._waits += 1
            is_busy = num_running >= self._builders.num_builders
            has_few = not is_busy and num_running > 0 and not self._windows.num_reads_left
            self._limited_by = "" if self._queue.has_held_back else "building" if is_busy else "reading"
            self._queue.has_held_back = False
        self._consumer_waits = True
        self._raise_priority()
        try:
            while not self._is_deliverable():
                if self._queue.is_closed:
                    raise EngineClosedError("the loader was closed while a batch was awaited")
                if self._builders.needs_consumer:
                    self._changed.without(self._builders.work)
                    continue
                now_s = time.perf_counter()
                if now_s >= wait.due_s:
                    reads = self._windows.num_reads_left
                    otherwise = f"blocks being read: {reads}" if reads else "nothing is being read or built"
                    wait.tell(now_s, self._reason(), otherwise, self.stats)
                self._changed.wait(wait.due_s - now_s)
        finally:
            self._consumer_waits = False
        waited_s = time.perf_counter() - began_s
        self._starved_s += waited_s
        self._few_chunks_s += waited_s * has_few
        if wait.was_told:
            wait.end(waited_s)

    def _reason(self) -> str:
        """Say what explains the wait; "": nothing that is known."""
        if self._queue.line:
            contexts = self._builders.contexts()
            return f"one is being built, {contexts[0]}" if contexts else ""
        return self._options.explain()

    # ---- under the lock -----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever may start now."""
        if self._queue.is_closed:
            return
        try:
            if self._queue.copying:
                self._queue.release_windows()
            if self._queue.suspended:
                self._queue.resume()
            self._queue.start()
            if self._failure is None:
                num_chunks = len(self._windows.chunks)
                self._windows.admit(is_awaited=self._is_asked, is_idle=self._queue.is_idle)
                # Where nothing is to be read, no end of a read starts them.
                if len(self._windows.chunks) > num_chunks:
                    self._queue.start()
            self._raise_priority()
        except Exception as error:  # a thread that ended here would leave the consumer waiting
            self._failure = self._failure or error
            self._changed.notify_all()

    def _go_on(self) -> None:
        """Something was planned, read or built."""
        self._pump()
        if (
            self._is_deliverable() or self._builders.needs_consumer
        ):  # each needless wake-up costs two switches
            self._changed.notify_all()

    def _raise_priority(self) -> None:
        """Tell the windows whose reads the consumer waits for."""
        if self._consumer_waits and not self._queue.line and self._windows.chunks:
            self._windows.raise_priority()

    def _observe(self, nbytes: int) -> Observation:
        queue, copies = self._queue, self._builders.copies
        leads_s, steps_s = tuple(queue.leads_s), tuple(self._steps_s)
        queue.leads_s.clear()
        self._steps_s.clear()
        return Observation(
            delivered_batches=self._delivered,
            starved_s=self._starved_s + (copies.starved_s if copies else 0.0),
            ready_batches=queue.num_batches,
            batch_bytes=nbytes,
            now_s=time.perf_counter(),
            waits=self._waits,
            limit=self._limited_by,
            finished_batches=queue.num_finished,
            leads_s=leads_s,
            steps_s=steps_s,
        )

    # ---- life -------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Take a snapshot; cheap."""
        if os.getpid() != self._pid:
            return NOT_STARTED  # a thread of the parent may have held the lock at the fork
        with self._changed:
            decision, copies = self._options.depth(self._observe(0)), self._builders.copies
            return EngineStats(
                elapsed_s=time.perf_counter() - self._began_s,
                starved_s=self._starved_s + (copies.starved_s if copies else 0.0),
                few_chunks_s=self._few_chunks_s,
                delivered_batches=self._delivered,
                delivered_bytes=self._delivered_bytes + (copies.taken_bytes if copies else 0),
                ready_batches=self._queue.num_ready + (copies.ready_batches if copies else 0),
                depth=decision.value,
                depth_reason=decision.reason,
                open_windows=self._windows.num_open,
                read=self._windows.readers.stats(),
                build=self._builders.stats(),
                memory=self._ledger.snapshot(),
            )

    def staged_batches(self) -> int:
        """Batches that need no further read: built, or being built. Takes no lock."""
        return self._queue.num_batches

    def close(self, *, join: bool = True) -> None:
        """Stop and join the threads, drop all work. Idempotent, thread-safe, safe in a finaliser.

        With `join=False` (a task hangs), or in one of our own threads (where a finaliser may run), nothing is
        waited for: running tasks keep their memory until they end, and their threads end with them.
        """
        if os.getpid() != self._pid:
            return  # the threads belong to the parent, and one of them may have held the lock at the fork
        with self._changed:
            restore_switch_interval(self)
            self._queue.is_closed = True
            self._changed.notify_all()
        self._windows.readers.stop()
        self._builders.stop()
        if self._options.interrupt:
            self._options.interrupt()
        if not join or self._windows.readers.runs_here or self._builders.runs_here:
            return
        self._windows.readers.close()  # reads have deadlines, and are interrupted
        self._builders.close()
        with self._changed:
            self._windows.close()
            self._queue.drop_all()
