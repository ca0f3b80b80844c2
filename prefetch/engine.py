"""Ordered delivery of batches that many threads read and build, inside one byte budget.

The work comes as windows and chunks (`prefetch.work`): a source yields windows in stream order, without end,
and each window names its chunks. The engine

* admits a window when the ledger has credit for it, and reads its blocks on the reader threads;
* starts a chunk when its windows are staged, the ready depth asks for it, and the ledger has credit for
  its output; its parts run on the worker threads, most urgent first;
* hands chunks out in stream order, whatever order they finish in;
* closes a window when the last chunk that needs it is built; a chunk may need any windows that are open.

No thread coordinates: whoever changes the state (a finished task, the consumer) calls `_pump` under the
one lock, so nothing polls. Progress: the head of the order is admitted without counting bytes that the
consumer keeps; if even that does not fit, nothing else could ever free credit, and the consumer gets a
`MemoryLimitError` that says what would fit.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from prefetch import switching
from prefetch.depth import DepthPolicy, Observation
from prefetch.engine_stats import NOT_STARTED, EngineStats, StageStats
from prefetch.ledger import Ledger, State
from prefetch.pool import PriorityPool, Task
from prefetch.work import Chunk, Window
from sharding.errors import DataflowError

T = TypeVar("T")


class MemoryLimitError(DataflowError):
    """The memory limit cannot hold even the next window or batch alone."""


class StallError(DataflowError):
    """No batch came within the time-out. The stacks of all threads were printed to stderr."""


@dataclass
class _Open:
    window: Window
    left: int
    """Read tasks not finished."""
    users: int = 0
    """Admitted chunks that still need it."""
    last_user_seen: bool = False
    """Whether no chunk to come needs it."""
    error: BaseException | None = None


@dataclass
class _Started(Generic[T]):
    chunk: Chunk[T]
    nbytes: int
    began: float = 0.0
    left: int = 0
    batches: Sequence[T] = ()
    leased: int = 0
    sequence: int = 0
    error: BaseException | None = None
    done: bool = False


@dataclass
class _Busy:
    seconds: float = 0.0
    tasks: int = 0


@dataclass
class EngineOptions:
    """How much of what the engine may use."""

    num_readers: int
    num_workers: int
    depth: DepthPolicy
    max_windows: int = 3
    """Windows admitted at a time (one drained, one staged, one being read)."""
    keep_bytes: int = 0
    """Credit that windows leave free for outputs."""
    timeout_s: float = 600.0
    """Longest wait for one batch."""
    watchdog_s: float = 60.0
    """After this wait the stacks of all threads are printed, once a wait."""
    initializer: Task | None = field(default=None)
    """Runs first in each worker thread."""
    interrupt: Task | None = field(default=None)
    """Ends running reads early, as errors; called when the engine closes, before threads are joined."""
    in_consumer: Callable[[Task], None] | None = None
    """Runs a chunk's work in the consumer's thread, where it would only wait; None: it waits. For chunks
    that are copies: what may hang has no time-out there."""


class Engine(Generic[T]):
    """Threads, queues and credits of one stream of batches. `next_batches` is for one consumer thread."""

    def __init__(
        self, windows: Iterator[Window], ledger: Ledger, options: EngineOptions, *, epoch: int = 0
    ) -> None:
        """`epoch`: that of the first window."""
        self._windows = windows
        self._ledger = ledger
        self._options = options
        self._changed = threading.Condition(threading.RLock())  # guards everything below
        self._waiting_window: Window | None = None
        self._planning = False
        self._epoch = epoch
        """That of what was delivered last."""
        self._exhausted = False
        self._open: dict[int, _Open] = {}
        self._reads_left = 0
        self._chunks: deque[Chunk[T]] = deque()
        self._sequence = 0
        self._line: deque[_Started[T]] = deque()
        self._line_batches = 0
        self._unbegun: deque[_Started[T]] = deque()
        self._builds_here: threading.Thread | None = None
        """The consumer's thread while it builds a chunk."""
        self._failure: BaseException | None = None
        self._plan_error: BaseException | None = None
        self._closed = False
        self._consumer_waits = False
        self._delivered = 0
        self._delivered_bytes = 0
        self._finished = 0
        self._waits = 0
        self._limit = ""
        self._held_back = False
        """Whether the depth has kept idle workers from work since the last wait."""
        self._leads: list[float] = []
        self._steps: list[float] = []
        self._handed_out: tuple[float, int] | None = None
        """When the consumer last got batches, and how many."""
        self._running = 0
        """Chunks begun and not done."""
        self._starved = 0.0
        self._began = time.perf_counter()
        self._busy = {"read": _Busy(), "build": _Busy()}
        self._pid = os.getpid()
        self._readers = PriorityPool(options.num_readers, "dataflow-read", initializer=options.initializer)
        self._workers = PriorityPool(options.num_workers, "dataflow-build", initializer=options.initializer)
        switching.begin()
        with self._changed:
            self._pump()

    # ---- consumer -------------------------------------------------------------------------------

    def next_batches(self) -> Sequence[T]:
        """The batches of the next chunk; empty at the end of a finite source.

        Raises what building them raised, `StallError` after the time-out, `MemoryLimitError`.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a loader's threads do not survive a fork; make the loader in the child")
        while True:
            with self._changed:
                if self._handed_out is not None:
                    since, batches = self._handed_out
                    self._steps.append((time.perf_counter() - since) / batches)
                    self._handed_out = None
                if not self._deliverable():
                    self._pump()  # batches that the consumer dropped since may have made room
                if not self._deliverable() and not self._may_build_here():
                    self._wait()
                if self._deliverable():
                    return self._deliver()
            self._build_here()

    def _deliver(self) -> Sequence[T]:
        """Hand out the chunk at the head, or say why there is none. Under the lock."""
        if self._failure and not (self._line and self._line[0].done):
            raise self._failure
        if not self._line:
            if self._plan_error:
                raise self._plan_error
            return ()
        started = self._line.popleft()
        self._line_batches -= started.chunk.num_batches
        self._finished -= len(started.batches)
        if started.error:
            raise started.error
        self._ledger.move(State.READY, State.LENT, started.leased)
        self._ledger.release(State.READY, started.nbytes - started.leased)
        self._epoch = max([self._epoch, *(window.epoch for window in started.chunk.needs)])
        self._delivered += len(started.batches)
        self._delivered_bytes += started.leased
        self._pump()
        # The thread that built them may still hold `started`; it must not keep what the consumer drops.
        batches, started.batches = started.batches, ()
        if batches:
            self._handed_out = time.perf_counter(), len(batches)
        return batches

    def _may_build_here(self) -> bool:
        """Whether the consumer, which would wait, can build a chunk that no thread has begun.

        With few cores, one builder more would share a core with the consumer and be woken for every chunk.
        """
        return self._options.in_consumer is not None and bool(self._unbegun)

    def _build_here(self) -> None:
        began, started = time.perf_counter(), None
        try:
            with self._changed:  # inside: whatever comes, `close` does not wait for it in vain
                if not self._closed:
                    self._builds_here = threading.current_thread()
                    started = self._next_unbegun()
            if started is not None:
                assert self._options.in_consumer is not None
                self._options.in_consumer(partial(self._build, started))
                if isinstance(started.error, KeyboardInterrupt):
                    raise started.error
        finally:
            with self._changed:
                self._builds_here = None
                self._starved += time.perf_counter() - began
                if self._closed:
                    self._changed.notify_all()

    def _next_unbegun(self) -> _Started[T] | None:
        """The most urgent chunk that no thread has begun."""
        try:
            return self._unbegun.popleft()
        except IndexError:
            return None

    def _deliverable(self) -> bool:
        if self._line:
            return self._line[0].done
        return self._failure is not None or self._at_end()

    def _at_end(self) -> bool:
        """Whether all there was has been delivered; what `close` dropped was not."""
        left = self._chunks or self._line or self._reads_left
        return self._exhausted and not left and not self._closed

    def _wait(self) -> None:
        began = time.perf_counter()
        watchdog = began + self._options.watchdog_s
        deadline = began + self._options.timeout_s
        if self._delivered:
            self._waits += 1
            busy = self._running >= self._workers.num_threads
            self._limit = "" if self._held_back else "building" if busy else "reading"
            self._held_back = False
        self._consumer_waits = True
        self._hurry()
        try:
            while not self._deliverable() and not self._may_build_here():
                now = time.perf_counter()
                if self._closed:
                    raise RuntimeError("the loader was closed while a batch was awaited")
                if now >= deadline:
                    self._print_stacks(now - began)
                    text = f"no batch within {now - began:.0f} s; stacks of all threads are on stderr"
                    raise StallError(text)
                if now >= watchdog:
                    self._print_stacks(now - began)
                    watchdog = deadline
                self._changed.wait(min(watchdog, deadline) - now)
        finally:
            self._consumer_waits = False
        self._starved += time.perf_counter() - began

    def _print_stacks(self, waited_s: float) -> None:
        print(f"dataflow: no batch for {waited_s:.0f} s; {self.stats()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)

    # ---- admission, under the lock ----------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever may start now."""
        if self._closed:
            return
        try:
            self._start_chunks()
            self._admit_windows()
            self._hurry()
        except Exception as error:  # a thread that ended here would leave the consumer waiting
            self._fail(error)

    def _hurry(self) -> None:
        """Tell the windows whose reads the consumer waits for."""
        if self._consumer_waits and not self._line and self._chunks:
            for window in self._chunks[0].needs:
                if self._open[id(window)].left:
                    window.hurry()

    def _start_chunks(self) -> None:
        while self._chunks:
            chunk = self._chunks[0]
            staged = [self._open[id(w)] for w in chunk.needs]
            failed = next((w.error for w in staged if w.error), None)
            if failed is None and any(w.left for w in staged):
                return
            nbytes = 0 if failed else chunk.nbytes
            if self._line and self._line_batches + chunk.num_batches > self._depth(nbytes):
                self._held_back |= self._running < self._workers.num_threads
                return
            credited = self._ledger.reserve(State.BUILDING, nbytes) or (
                not self._line and self._ledger.reserve(State.BUILDING, nbytes, head_of_order=True)
            )
            if not credited:
                self._check_stuck(nbytes, "the next batches need")
                return
            self._chunks.popleft()
            started: _Started[T] = _Started(
                chunk, nbytes, sequence=self._sequence, error=failed, began=time.perf_counter()
            )
            self._sequence += 1
            self._line.append(started)
            self._line_batches += chunk.num_batches
            if failed is not None:
                self._settle(started)
                self._changed.notify_all()
            else:
                self._running += 1
                self._unbegun.append(started)
                self._workers.submit(started.sequence, self._run_begin)
                if len(self._unbegun) > 1 and self._options.in_consumer:
                    self._changed.notify_all()

    def _depth(self, nbytes: int) -> int:
        return self._options.depth(self._observe(nbytes)).value

    def _observe(self, nbytes: int) -> Observation:
        leads, steps = tuple(self._leads), tuple(self._steps)
        self._leads.clear()
        self._steps.clear()
        return Observation(
            self._delivered,
            self._starved,
            self._line_batches,
            nbytes,
            time.perf_counter(),
            self._waits,
            self._limit,
            self._finished,
            leads,
            steps,
        )

    def _admit_windows(self) -> None:
        while not self._exhausted and self._failure is None:
            window = self._waiting_window
            if window is None:
                if not self._planning:
                    self._planning = True
                    # As urgent as the first chunk after all that are admitted, whose reads come before.
                    self._readers.submit(self._sequence + len(self._chunks), self._run_plan)
                return
            if len(self._open) >= self._options.max_windows and self._chunks:
                return
            if window.epoch > self._epoch + 1 and not self._idle():
                return
            nbytes, keep = window.nbytes, self._options.keep_bytes
            if not self._ledger.reserve(State.WINDOW, nbytes, keep_bytes=keep):
                if not self._idle():
                    return
                if not self._ledger.reserve(State.WINDOW, nbytes, head_of_order=True):
                    self._check_stuck(nbytes, "the next shuffle window needs")
                    return
            self._waiting_window = None
            self._admit(window)

    def _idle(self) -> bool:
        """Whether nothing that runs or waits could free credit."""
        return not self._line and not self._reads_left and not self._chunks

    def _admit(self, window: Window) -> None:
        try:
            chunks, reads = window.chunks(), window.reads()
        except Exception as error:  # no memory for its buffers: the stream ends before this window
            window.close()
            self._ledger.release(State.WINDOW, window.nbytes)
            self._end(error)
            return
        opened = _Open(window, len(reads))
        self._open[id(window)] = opened
        for chunk in chunks:
            for needed in chunk.needs:
                self._open[id(needed)].users += 1
            for closed in chunk.closes:
                self._open[id(closed)].last_user_seen = True
        self._reads_left += len(reads)
        self._chunks.extend(chunks)  # type: ignore[arg-type]
        deadline = self._sequence + len(self._chunks) - len(chunks)
        for read in reads:
            self._readers.submit(deadline, partial(self._run_read, opened, read))

    def _check_stuck(self, nbytes: int, what: str) -> None:
        if self._line or self._reads_left:
            return
        held = self._ledger.snapshot()
        need = held.window_bytes + held.building_bytes + held.ready_bytes + nbytes
        self._fail(
            MemoryLimitError(
                f"{what} {nbytes:,} bytes beside {need - nbytes:,} held, more than "
                f"memory_limit={held.limit_bytes:,}; raise memory_limit to {self._enough(need, nbytes):,} "
                f"(at least {need:,}), or lower batch_size, Shuffle(window_blocks=...) or the window= of "
                "batching"
            )
        )

    def _enough(self, need: int, nbytes: int) -> int:
        """A limit for whatever comes after this, too, if it is of the size of what was seen.

        All windows but the one that is only read ahead, and an output beside them; a quarter more, as windows
        differ, and a larger limit makes larger chunks.
        """
        opened = [one.window.nbytes for one in self._open.values()]
        if self._waiting_window is not None:
            opened.append(self._waiting_window.nbytes)
        windows = max(1, self._options.max_windows - 1) * max(opened, default=0)
        return max(need, windows + max(nbytes, self._options.keep_bytes)) * 5 // 4

    def _end(self, error: BaseException | None) -> None:
        """No more windows; the error, if any, comes after the batches of those admitted."""
        self._exhausted, self._plan_error = True, error
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    # ---- tasks ------------------------------------------------------------------------------------

    def _run_plan(self) -> None:
        window, error = None, None
        try:
            window = next(self._windows, None)
        except BaseException as caught:
            error = caught
        with self._changed:
            self._planning = False
            self._waiting_window = window
            if window is None:
                self._end(error)
            self._pump()
            self._wake()

    def _run_read(self, opened: _Open, read: Task) -> None:
        began, error = time.perf_counter(), None
        try:
            if opened.error is None:
                read()
        except BaseException as caught:
            error = caught
        with self._changed:
            self._account("read", began)
            opened.error = opened.error or error
            opened.left -= 1
            self._reads_left -= 1
            if opened.left == 0:
                self._close_if_unused(opened)  # one that failed may have lost its users before
                self._pump()
                self._wake()

    def _run_begin(self) -> None:
        started = self._next_unbegun()
        if started is not None:  # else the consumer took it
            self._build(started)

    def _build(self, started: _Started[T]) -> None:
        began = time.perf_counter()
        try:
            parts = started.chunk.begin()
        except BaseException as caught:
            with self._changed:
                self._account("build", began)
                started.error = caught
                self._complete(started)
            return
        started.left = len(parts)
        for part in parts[1:]:
            self._workers.submit(started.sequence, partial(self._run_part, started, part))
        if parts:
            with self._changed:
                self._account("build", began)
            self._run_part(started, parts[0])
        else:
            self._finish(started, began)

    def _run_part(self, started: _Started[T], part: Task) -> None:
        began, error = time.perf_counter(), None
        try:
            if started.error is None:
                part()
        except BaseException as caught:
            error = caught
        with self._changed:
            started.error = started.error or error
            started.left -= 1
            last = started.left == 0
            if not last:
                self._account("build", began)
        if last:
            self._finish(started, began)

    def _finish(self, started: _Started[T], began: float) -> None:
        if started.error is None:
            try:
                started.batches, started.leased = started.chunk.finish()
            except BaseException as caught:
                started.error = caught
        with self._changed:
            self._account("build", began)
            self._complete(started)

    def _complete(self, started: _Started[T]) -> None:
        """The chunk is built, or failed. Under the lock."""
        self._running -= 1
        self._settle(started)
        self._pump()
        self._wake()

    def _wake(self) -> None:
        """Wake the consumer if there is something for it: each needless wake-up costs two switches."""
        if self._deliverable():
            self._changed.notify_all()

    def _settle(self, started: _Started[T]) -> None:
        """Credits move, and the chunk's windows lose a user. Under the lock."""
        chunk = started.chunk
        if started.error is None:
            self._ledger.move(State.BUILDING, State.READY, started.nbytes)
            self._leads.append(time.perf_counter() - started.began)
            self._finished += len(started.batches)
        else:
            started.batches = ()
            self._ledger.release(State.BUILDING, started.nbytes)
        for window in chunk.needs:
            opened = self._open[id(window)]
            opened.users -= 1
            self._close_if_unused(opened)
        started.done = True

    def _close_if_unused(self, opened: _Open) -> None:
        # The chunks of a window that failed do not wait for its other reads, which still write into it.
        if opened.left == 0 and opened.last_user_seen and opened.users == 0:
            del self._open[id(opened.window)]
            opened.window.close()
            self._ledger.release(State.WINDOW, opened.window.nbytes)

    def _account(self, stage: str, began: float) -> None:
        self._busy[stage].seconds += time.perf_counter() - began
        self._busy[stage].tasks += 1

    # ---- life -------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        if os.getpid() != self._pid:
            return NOT_STARTED  # a thread of the parent may have held the lock at the fork
        with self._changed:
            ready = sum(len(s.batches) for s in self._line if s.done)
            decision = self._options.depth(self._observe(0))
            return EngineStats(
                elapsed_s=time.perf_counter() - self._began,
                starved_s=self._starved,
                delivered_batches=self._delivered,
                delivered_bytes=self._delivered_bytes,
                ready_batches=ready,
                depth=decision.value,
                depth_reason=decision.reason,
                open_windows=len(self._open),
                read=self._stage("read", self._readers),
                build=self._stage("build", self._workers),
                memory=self._ledger.snapshot(),
            )

    def staged_batches(self) -> int:
        """Batches that need no further read: built, or being built. Takes no lock."""
        return self._line_batches

    def _stage(self, name: str, pool: PriorityPool) -> StageStats:
        busy = self._busy[name]
        return StageStats(pool.num_threads, busy.seconds, busy.tasks, pool.num_queued)

    def close(self, *, join: bool = True) -> None:
        """Stop and join the threads, drop all work. Idempotent, thread-safe, safe in a finaliser.

        With `join=False` (a task hangs), or in one of our own threads (where a finaliser may run), nothing is
        waited for: running tasks keep their memory until they end, and their threads end with them.
        """
        if os.getpid() != self._pid:
            return  # the threads belong to the parent, and one of them may have held the lock at the fork
        with self._changed:
            if not self._closed:
                switching.end()
            self._closed = True
            self._changed.notify_all()
        if self._options.interrupt:
            self._options.interrupt()
        builds_here = self._builds_here is threading.current_thread()
        if not join or self._readers.runs_here or self._workers.runs_here or builds_here:
            self._readers.stop()
            self._workers.stop()
            return
        self._readers.close()
        self._workers.close()
        with self._changed:
            while self._builds_here is not None:
                self._changed.wait()
            for opened in self._open.values():
                opened.window.close()
            if self._waiting_window is not None:
                self._waiting_window.close()
            if isinstance(self._windows, Generator):  # its frame refers to the windows that it made
                self._windows.close()
            self._open.clear()
            self._chunks.clear()
            self._line.clear()
            self._unbegun.clear()
            self._line_batches = 0
            self._waiting_window = None
