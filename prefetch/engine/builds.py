"""Chunks in stream order, from those that wait for their windows to those that wait for the consumer.

Whatever order chunks are built in, they leave in the order in which they came, each as a whole unless some of
its batches are flushed early. What fails comes behind the batches that were finished before it. What only
shows when a batch is made is charged then, and before it as much is reserved as the last ones took; a build
that gets no room is suspended between two batches. The one at the head of the order goes on all the same when
what it has finished was delivered, so that there always is progress.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from prefetch.engine.builders import Builders
from prefetch.engine.ledger import Ledger, State
from prefetch.engine.stats import EngineOptions
from prefetch.engine.windows import WindowQueue
from prefetch.errors import EngineClosedError
from prefetch.work import Batches, Chunk, PartialChunk, Task

T = TypeVar("T")

_FORGETS = 8
"""The estimate of what batches take falls by such a part with each, and rises at once."""


def chunks_ahead(num_builders: int) -> int:
    """Chunks that are under way or ready: two of each builder, and the one that is consumed."""
    return max(3, 2 * num_builders + 1)


class ChunkBuild(Struct, Generic[T], eq=False):
    """The engine's side of a `Build`: a chunk that was dispatched, and what of it waits for the consumer."""

    _queue: ChunkQueue[T]
    chunk: Chunk[T]
    nbytes: int
    """The credits of its output."""
    number: int
    progress: Any = None
    began_s: float = field(default_factory=time.perf_counter)
    error: BaseException | None = None
    is_done: bool = False
    is_suspended: bool = False
    is_finishing: bool = False
    partials: deque[PartialChunk[T]] = field(default_factory=deque)
    """The batches that are finished, and to be delivered."""
    ahead_bytes: int = 0
    """The bytes of slots that are charged for the next partial chunk."""
    reserved_bytes: int = 0
    """The credits for what the next partial chunk makes, which shows only then."""
    num_delivered: int = 0

    @property
    def is_cancelled(self) -> bool:
        """See `Build`."""
        return self._queue.is_closed

    def may_go_on(self) -> bool:
        """See `Build`."""
        with self._queue.lock:
            is_dropped = self.is_finishing and self.is_cancelled
            if not is_dropped and self._queue.make_room(self):
                self.is_finishing = True
                return True
            self._queue.suspend(self)
            return False

    def add(self, partial: PartialChunk[T]) -> None:
        """See `Build`."""
        with self._queue.lock:
            charged = partial.slot_bytes + partial.heap_bytes
            if partial.batches:
                self._queue.end_room(self, partial)
            if charged:  # views of the chunk's slots cost nothing beyond it
                self._queue.ledger.charge(State.READY, charged)
                self.ahead_bytes += partial.slot_bytes
            if partial.batches:
                if self.ahead_bytes != partial.slot_bytes:
                    partial = replace(partial, slot_bytes=self.ahead_bytes)
                self.partials.append(partial)
                self.ahead_bytes = 0
                self._queue.num_finished += len(partial.batches)
                if partial.flush_now:
                    self._queue.notify_if_deliverable()

    def end(self, error: BaseException | None = None) -> None:
        """See `Build`."""
        queue = self._queue
        with queue.lock:
            queue.num_running -= 1
            queue.finish(self, error)
            queue.on_end()

    @property
    def num_ready(self) -> int:
        """Return the number of finished batches."""
        return sum(len(partial.batches) for partial in self.partials)

    @property
    def must_go_on(self) -> bool:
        """Return whether the consumer waits for a batch to be made: nothing else would make room for it."""
        return self is self._queue.line[0] and not self.partials

    @property
    def is_deliverable(self) -> bool:
        """Return whether the consumer gets something, at the head of the order.

        What is being built comes whole, unless that takes long.
        """
        return (
            self.is_done
            or (self.is_suspended and bool(self.partials))
            or any(part.flush_now for part in self.partials)
        )


class ChunkQueue(Generic[T]):
    """Builds in stream order. Everything happens under the engine's lock.

    Args:
        ledger: of the credits.
        options: the engine's, with its lock.
        windows: that chunks need, and the chunks that wait for them.
        builders: of the chunks.
        on_end: called when a chunk is built, or failed.
        depth: batches to have ready or in work, given the bytes of the next chunk.
    """

    def __init__(
        self,
        ledger: Ledger,
        options: EngineOptions,
        *,
        windows: WindowQueue,
        builders: Builders[T],
        on_end: Task,
        depth: Callable[[int], int],
    ) -> None:
        self.lock, self.ledger, self._windows, self._builders = options.monitor, ledger, windows, builders
        self.on_end, self._depth, self._chunk_time = on_end, depth, options.chunk_time
        self.line: deque[ChunkBuild[T]] = deque()
        """The chunks that were dispatched and not delivered."""
        self.suspended: deque[ChunkBuild[T]] = deque()
        self.copying: deque[ChunkBuild[T]] = deque()
        """Built, but for copies that are made while the consumer takes them."""
        self._num_chunks = 0
        """The number of chunks that were dispatched so far."""
        self.num_batches = 0
        """In the line. Read without the lock, too."""
        self.num_finished = 0
        """The number of batches in the line that are finished."""
        self.num_running = 0
        """Chunks of the line that are neither done nor suspended."""
        self.has_held_back = False
        """True if the depth has kept idle builders from work; reset by who reads it."""
        self.partial_bytes = 0
        """The bytes that making a partial chunk takes and that only show then, by those that were made
        last."""
        self.leads_s: list[float] = []
        """Seconds from start to finish of chunks, since it was cleared."""
        self.is_closed = False

    def start(self) -> None:
        """Hand out the chunks whose windows are staged, as many as builders, depth and credits allow.

        A chunk that waits for a builder is no longer shortened, so few do.
        """
        most = sys.maxsize  # of copies, whose chunks stay as they are
        if self._chunk_time is not None:
            most = chunks_ahead(self._builders.num_builders)
        while self._windows.chunks and self.num_running < most:
            chunk = self._windows.chunks[0]
            is_staged, error = self._windows.state_of(chunk)
            if not is_staged:
                return
            if self._chunk_time is not None and error is None:
                chunk = self._windows.shorten_first(self._chunk_time.decision.value)
            nbytes = 0 if error else chunk.nbytes
            if self.line and self.num_batches + chunk.num_batches > self._depth(nbytes):
                self.has_held_back |= self.num_running < self._builders.num_builders
                return
            # The head is admitted without counting what the consumer keeps: one that keeps every batch would
            # otherwise wait for credits that only it can free.
            if not self.ledger.reserve(State.BUILDING, nbytes):
                if not self.is_idle:
                    return
                if not self.ledger.reserve(State.BUILDING, nbytes, head_of_order=True):
                    self._windows.check_limit(nbytes, "the next batches need", chunk.needs)
                    return
            self._windows.chunks.popleft()
            build = ChunkBuild(self, chunk, nbytes, self._num_chunks)
            self._num_chunks += 1
            self.line.append(build)
            self.num_batches += chunk.num_batches
            if error is not None:
                self.finish(build, error)
                self.lock.notify_all()
                continue
            self.num_running += 1
            self._builders.build(build)

    @property
    def num_ready(self) -> int:
        """Batches that are made and wait."""
        return sum(build.num_ready for build in self.line if not build.chunk.reads_windows)

    @property
    def is_idle(self) -> bool:
        """Return whether all that was delivered is made: nothing here gives credits back any more."""
        return not self.line and not self.copying

    def make_room(self, build: ChunkBuild[T]) -> bool:
        """Reserve what making the next partial chunk takes, by the last ones; whether it may be made."""
        self._release_room(build)
        if build.num_delivered + build.num_ready == build.chunk.num_batches:
            return True  # nothing is left to make
        if not self.ledger.reserve(State.BUILDING, self.partial_bytes):
            if not build.must_go_on:
                return False
            self.ledger.charge(State.BUILDING, self.partial_bytes)
        build.reserved_bytes = self.partial_bytes
        return True

    def end_room(self, build: ChunkBuild[T], partial: PartialChunk[T]) -> None:
        """Record what a partial chunk took."""
        self._release_room(build)
        if self._chunk_time is not None:
            self._chunk_time.observe(len(partial.batches), partial.build_s)
        made_bytes = partial.made_bytes or partial.heap_bytes
        self.partial_bytes = max(made_bytes, self.partial_bytes - self.partial_bytes // _FORGETS)
        self._windows.keep_free(self.partial_bytes * self._builders.num_builders)

    def _release_room(self, build: ChunkBuild[T]) -> None:
        self.ledger.release(State.BUILDING, build.reserved_bytes)
        build.reserved_bytes = 0

    def suspend(self, build: ChunkBuild[T]) -> None:
        """A build makes no more batches until there is room."""
        self._release_room(build)
        self.num_running -= 1
        build.is_suspended = True
        self.suspended.append(build)
        self.notify_if_deliverable()

    def notify_if_deliverable(self) -> None:
        """Wake the consumer, if there is something for it: each needless wake-up costs two switches."""
        if self.line and self.line[0].is_deliverable:
            self.lock.notify_all()

    def resume(self) -> None:
        """Dispatch again what was suspended and has room."""
        builds, self.suspended = self.suspended, deque()
        for build in builds:
            if self.make_room(build):
                build.is_suspended = False
                self.num_running += 1
                self._builders.build(build)
            else:
                self.suspended.append(build)

    def take(self, most_bytes: int) -> tuple[Batches[T], int, int]:
        """Batches of the head, and their charged bytes of slots and of heap.

        All that cost nothing beyond their chunk, else a part of at most `most_bytes`, or one partial chunk.
        The last ones of a chunk wait for its end, with which something must be delivered.
        """
        build = self.line[0]
        batches: Batches[T] = ()
        slots = heap = 0
        while build.partials:
            partial = build.partials[0]
            if batches and slots + heap + partial.slot_bytes + partial.heap_bytes > most_bytes:
                break
            num_taken = build.num_delivered + len(batches) + len(partial.batches)
            if num_taken == build.chunk.num_batches and not build.is_done:
                break
            # Taken out: the thread that built them may still hold the build, and must not keep what the
            # consumer drops.
            build.partials.popleft()
            batches = [*batches, *partial.batches] if batches else partial.batches
            slots, heap = slots + partial.slot_bytes, heap + partial.heap_bytes
        self.num_finished -= len(batches)
        build.num_delivered += len(batches)
        self.num_batches -= len(batches)
        return batches, slots, heap

    def drop_all(self) -> None:
        """Nothing is delivered any more."""
        for builds in (self.line, self.suspended):
            builds.clear()
        self.copying.clear()
        self.num_batches = 0

    def finish(self, build: ChunkBuild[T], error: BaseException | None) -> None:
        """A chunk is built, or failed: credits move, and its windows lose a user."""
        self._release_room(build)
        self.ledger.move(State.BUILDING, State.READY, build.nbytes)
        if error is None:
            self.leads_s.append(time.perf_counter() - build.began_s)
        else:
            if self.is_closed or isinstance(error, EngineClosedError):
                # Nobody will see where, and the frames hold the memory of what was built.
                error = error.with_traceback(None)
            self.ledger.release(State.READY, build.ahead_bytes)
        build.error, build.progress = error, None
        if error is None and build.chunk.reads_windows:
            self.copying.append(build)
        else:
            self._windows.release(build.chunk)
        build.is_done = True

    def release_windows(self) -> None:
        """Let go of windows and credits of batches that were delivered before they were made."""
        while self.copying and not self.copying[0].chunk.reads_windows:
            build = self.copying.popleft()
            self._windows.release(build.chunk)
            self.ledger.release(State.READY, build.nbytes)
