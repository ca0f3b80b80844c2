"""Ordered delivery of batches that many threads read and build, inside one byte budget.

The work comes as windows and chunks (`prefetch.work`): a source yields windows in stream order,
without end, and each window names its chunks. The engine

* admits a window when the ledger has credit for it, and reads its blocks on the reader threads;
* starts a chunk when its windows are staged, the ready depth asks for it, and the ledger has credit for
  its output; its parts run on the worker threads, most urgent first;
* hands chunks out in stream order, whatever order they finish in;
* charges what only shows when a batch is made, and lays a chunk aside between two batches while more is held
  than the limit; the one at the head goes on when what it has finished is handed out;
* closes a window when the last chunk that needs it is built; a chunk may need any windows that are open.

No thread coordinates: whoever changes the state (a finished task, the consumer) calls `_pump` under the
one lock, so nothing polls. Progress: the head of the order is admitted without counting bytes that the
consumer keeps; if even that does not fit, nothing else could ever free credit, and the consumer gets a
`MemoryLimitError` that says what would fit.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from prefetch.control.depth import DepthPolicy, Observation
from prefetch.engine import switching
from prefetch.engine.ledger import Ledger, State
from prefetch.engine.pool import PriorityPool
from prefetch.engine.stats import NOT_STARTED, EngineStats, StageStats
from prefetch.errors import EngineClosedError, MemoryLimitError, StallError
from prefetch.memory.monitor import Monitor
from prefetch.notices import FIRST_NOTICE_S, next_notice_s
from prefetch.work import Chunk, Piece, Task, Window

T = TypeVar("T")

_log = logging.getLogger("dataflow")
_HANDED_OUT_SHARE = 32
"""What was charged is handed out in such parts of the limit: the consumer has a part until it asks again."""
_AHEAD_SHARE = 8
"""What is read for an epoch that may never begin is at most such a part of the one before it."""


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
    sequence: int = 0
    error: BaseException | None = None
    done: bool = False
    rest: Iterator[Piece[T]] | None = None
    """What is left to finish."""
    aside: bool = False
    """Laid aside, as more is held than the limit."""
    pieces: deque[Piece[T]] = field(default_factory=deque)
    """Finished, to be handed out."""
    ahead: int = 0
    """Bytes of slots charged for the piece to come."""
    num_handed_out: int = 0

    @property
    def charged(self) -> int:
        """Bytes charged for what is not handed out."""
        return self.ahead + sum(piece.slot_bytes + piece.heap_bytes for piece in self.pieces)

    @property
    def num_ready(self) -> int:
        return sum(len(piece.batches) for piece in self.pieces)


@dataclass
class _Wait:
    """When a wait for a batch began, and when something is due: times on one clock."""

    began: float
    options: EngineOptions
    told: bool = False

    def __post_init__(self) -> None:
        self.notice = self.began + self.options.notice_s
        self.deadline = self.began + self.options.timeout_s
        self.watchdog = min(self.deadline, self.began + self.options.watchdog_s)

    @property
    def due(self) -> float:
        return min(self.notice, self.watchdog, self.deadline)


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
    notice_s: float = FIRST_NOTICE_S
    """After this wait a line says what is waited for, and again whenever the wait has doubled."""
    watchdog_s: float = 60.0
    """After this wait the stacks of all threads are printed, once a wait, if nothing explains it."""
    explain: Callable[[], str] = lambda: ""
    """What reads wait for, in words; "": nothing that is known. Must not block."""
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
        self._changed = Monitor()  # guards everything below
        self._waiting_window: Window | None = None
        self._planning = False
        self._epoch = epoch
        """That of what was delivered last."""
        self._asked = False
        """Whether the consumer is in `next_batches`."""
        self._reads_on = False
        self._bytes_of: dict[int, int] = {}
        """Bytes of the windows admitted of an epoch, this and the next one."""
        self._exhausted = False
        self._open: dict[int, _Open] = {}
        self._reads_left = 0
        self._chunks: deque[Chunk[T]] = deque()
        self._sequence = 0
        self._line: deque[_Started[T]] = deque()
        self._line_batches = 0
        self._unbegun: deque[_Started[T]] = deque()
        self._aside: deque[_Started[T]] = deque()
        """Chunks laid aside, in order."""
        self._lent_heap = 0
        """Bytes charged of what was handed out last."""
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
        switching.begin(self)
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
                self._asked = True
                self._ledger.give_back_lent(self._lent_heap)
                self._lent_heap = 0
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

    def read_on(self) -> None:
        """Read ahead into the next epoch as far as credit goes.

        Before, only what its first batches need is read, and nothing if that is much against an epoch: an
        evaluation of one epoch would pay for bytes that it never sees.
        """
        with self._changed:
            if not self._reads_on:
                self._reads_on = True
                self._pump()

    def _deliver(self) -> Sequence[T]:
        """Hand out the chunk at the head, or say why there is none. Under the lock."""
        self._asked = False
        if self._failure and not (self._line and self._line[0].done):
            raise self._failure
        if not self._line:
            if self._plan_error:
                raise self._plan_error
            return ()
        started = self._line[0]
        if started.error:
            self._leave_line(started)
            raise started.error
        batches = self._take_ready(started)
        if started.done and not started.pieces:
            self._leave_line(started)
            leased = started.chunk.leased_bytes
            self._ledger.move(State.READY, State.LENT, leased)
            self._ledger.release(State.READY, started.nbytes - leased)
            self._delivered_bytes += leased
        self._epoch = max([self._epoch, *(window.epoch for window in started.chunk.needs)])
        self._delivered += len(batches)
        self._pump()
        if batches:
            self._handed_out = time.perf_counter(), len(batches)
        return batches

    def _leave_line(self, started: _Started[T]) -> None:
        self._line.popleft()
        self._line_batches -= started.chunk.num_batches - started.num_handed_out

    def _take_ready(self, started: _Started[T]) -> Sequence[T]:
        """Finished batches of the chunk at the head: all that cost nothing beyond it, else a small part."""
        batches: list[T] = []
        slots, heap, most = 0, 0, self._ledger.limit_bytes // _HANDED_OUT_SHARE
        while started.pieces:
            piece = started.pieces[0]
            if batches and slots + heap + piece.slot_bytes + piece.heap_bytes > most:
                break
            # Taken out: the thread that built them may still hold `started`, and must not keep what the
            # consumer drops.
            started.pieces.popleft()
            batches += piece.batches
            slots, heap = slots + piece.slot_bytes, heap + piece.heap_bytes
        self._ledger.move(State.READY, State.LENT, slots + heap)
        self._lent_heap += heap
        self._delivered_bytes += slots
        self._finished -= len(batches)
        started.num_handed_out += len(batches)
        self._line_batches -= len(batches)
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
            head = self._line[0]
            return head.done or (head.aside and bool(head.pieces))
        return self._failure is not None or self._at_end()

    def _at_end(self) -> bool:
        """Whether all there was has been delivered; what `close` dropped was not."""
        left = self._chunks or self._line or self._reads_left
        return self._exhausted and not left and not self._closed

    def _wait(self) -> None:
        wait = _Wait(time.perf_counter(), self._options)
        if self._delivered:
            self._waits += 1
            busy = self._running >= self._workers.num_threads
            self._limit = "" if self._held_back else "building" if busy else "reading"
            self._held_back = False
        self._consumer_waits = True
        self._hurry()
        try:
            while not self._deliverable() and not self._may_build_here():
                if self._closed:
                    raise EngineClosedError("the loader was closed while a batch was awaited")
                now = time.perf_counter()
                if now >= wait.due:
                    self._tell(wait, now)
                self._changed.wait(wait.due - now)
        finally:
            self._consumer_waits = False
        waited_s = time.perf_counter() - wait.began
        self._starved += waited_s
        if wait.told:
            _log.warning("a batch came after %.1f s", waited_s)

    def _tell(self, wait: _Wait, now: float) -> None:
        """Say what is waited for; after the time-out, as an error."""
        why, waited_s, stacks = self._why(), now - wait.began, ""
        if now >= wait.watchdog:
            wait.watchdog = wait.deadline
            if not why or _log.isEnabledFor(logging.DEBUG):
                self._print_stacks(waited_s)
                stacks = "; stacks of all threads are on stderr"
        why = why or self._what_runs()
        if now >= wait.deadline:
            raise StallError(f"no batch within {waited_s:.0f} s{stacks}: {why}")
        if now >= wait.notice:
            wait.notice = wait.began + next_notice_s(waited_s, self._options.notice_s)
            wait.told = True
            _log.warning("no batch for %.0f s: %s", waited_s, why)

    def _why(self) -> str:
        """What explains the wait, in words; "": nothing that is known."""
        if self._line:
            places = self._workers.places()
            return f"one is being built, {places[0]}" if places else ""
        return self._options.explain()

    def _what_runs(self) -> str:
        """What there is to say of a wait that nothing explains."""
        return (
            f"blocks being read: {self._reads_left}" if self._reads_left else "nothing is being read or built"
        )

    def _print_stacks(self, waited_s: float) -> None:
        print(f"dataflow: no batch for {waited_s:.0f} s; {self.stats()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)

    # ---- admission, under the lock ----------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever may start now."""
        if self._closed:
            return
        try:
            self._go_on()
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

    def _go_on(self) -> None:
        """Take up what was laid aside and may go on."""
        waiting, self._aside = self._aside, deque()
        for started in waiting:
            if self._may_go_on(started):
                started.aside = False
                self._running += 1
                self._workers.submit(started.sequence, partial(self._run_rest, started))
            else:
                self._aside.append(started)

    def _may_go_on(self, started: _Started[T]) -> bool:
        """Whether a chunk may make one batch more: the head must, if nothing of it waits to be taken."""
        if not self._ledger.is_over:
            return True
        if started.num_handed_out + started.num_ready == started.chunk.num_batches:
            return True  # nothing is left to make
        return started is self._line[0] and not started.pieces

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
            if self._is_early(window) and not (self._asked and self._idle()):
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

    def _is_early(self, window: Window) -> bool:
        """Whether a window is of an epoch that the consumer may never come to."""
        ahead = window.epoch - self._epoch
        if ahead != 1 or self._reads_on:
            return ahead > 1
        newest = self._chunks[-1] if self._chunks else self._line[-1].chunk if self._line else None
        has_first_batch = newest is not None and max(one.epoch for one in newest.needs) > self._epoch
        nbytes = self._bytes_of.get(window.epoch, 0) + window.nbytes
        return has_first_batch or nbytes > self._bytes_of.get(self._epoch, 0) // _AHEAD_SHARE

    def _idle(self) -> bool:
        """Whether nothing that runs or waits could free credit."""
        return not self._line and not self._reads_left and not self._chunks

    def _admit(self, window: Window) -> None:
        try:
            chunks, reads = window.chunks(), window.reads()
        except Exception as error:  # no memory for its buffers: the stream ends before this window
            window.close()
            self._ledger.release(State.WINDOW, window.nbytes)
            self._end(self._explained(error))
            return
        opened = _Open(window, len(reads))
        kept = {epoch: nbytes for epoch, nbytes in self._bytes_of.items() if epoch >= self._epoch}
        self._bytes_of = {**kept, window.epoch: kept.get(window.epoch, 0) + window.nbytes}
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

    def _explained(self, error: BaseException) -> BaseException:
        """What kept a window from being opened; a bare lack of memory is put into words."""
        if not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
            return error
        explained = MemoryLimitError(
            f"the system has no memory for the next shuffle window ({type(error).__name__}: {error}); lower "
            f"memory_limit={self._ledger.limit_bytes:,} or Shuffle(window_blocks=...), or write shards with "
            "smaller blocks (row groups)"
        )
        explained.__cause__ = error
        return explained

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
            error = self._explained(caught)
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
            if self._closed:
                raise EngineClosedError("the loader was closed while the batch was built")
            if started.error is None:
                part()
        except BaseException as caught:
            error = caught
        with self._changed:
            if started.error is None or isinstance(error, KeyboardInterrupt):  # in the consumer's thread
                started.error = error
            started.left -= 1
            last = started.left == 0
            if not last:
                self._account("build", began)
        if last:
            self._finish(started, began)

    def _run_rest(self, started: _Started[T]) -> None:
        self._finish(started, time.perf_counter())

    def _finish(self, started: _Started[T], began: float) -> None:
        """Make the batches that are left, unless more is held than the limit."""
        while started.error is None:
            with self._changed:
                left = self._closed and started.rest is not None
                if left or not self._may_go_on(started):
                    self._account("build", began)
                    self._lay_aside(started)
                    return
            try:
                if started.rest is None:
                    started.rest = started.chunk.finish()
                piece = next(started.rest, None)
            except BaseException as caught:
                started.error = caught
                break
            if piece is None:
                break
            with self._changed:
                self._charge(started, piece)
            del piece  # the consumer may have it now
        with self._changed:
            self._account("build", began)
            self._complete(started)

    def _charge(self, started: _Started[T], piece: Piece[T]) -> None:
        self._ledger.charge(State.READY, piece.slot_bytes + piece.heap_bytes)
        started.ahead += piece.slot_bytes
        if piece.batches:
            if started.ahead != piece.slot_bytes:
                piece = replace(piece, slot_bytes=started.ahead)
            started.pieces.append(piece)
            started.ahead = 0
            self._finished += len(piece.batches)

    def _lay_aside(self, started: _Started[T]) -> None:
        self._running -= 1
        started.aside = True
        self._aside.append(started)
        self._wake()

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
        else:
            if self._closed or isinstance(started.error, EngineClosedError):
                # Nobody will see where, and the frames hold the memory of what was built.
                started.error = started.error.with_traceback(None)
            self._finished -= started.num_ready
            self._ledger.release(State.READY, started.charged)
            started.pieces.clear()
            self._ledger.release(State.BUILDING, started.nbytes)
        started.rest = None
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
            ready = sum(started.num_ready for started in self._line)
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
            switching.end(self)
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
            self._aside.clear()
            self._line_batches = 0
            self._waiting_window = None
