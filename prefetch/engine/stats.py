"""Define the engine's options and figures, each with its unit and extremes, and report long waits."""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from prefetch.control.chunk_time import ChunkTime
from prefetch.control.depth import DepthPolicy
from prefetch.engine.ledger import MemoryHeld
from prefetch.errors import FIRST_NOTICE_S, StallError, next_notice_s
from prefetch.memory.interrupts import Monitor
from prefetch.work import Task
from sharding.printable import printable

_log = logging.getLogger("dataflow")

_ALL_TOLD = 3
"""Late batches that have lines, each."""


class LateBatches:
    """The batches of an engine that came late, and which of them have lines.

    The first three have, then the 6th, 12th, 24th and so on: a machine that is slow is so for long. One that
    is twice as late as all that had lines has one, too: it may never come.
    """

    def __init__(self) -> None:
        self._count, self._next_told = 0, 1
        self.left_out = 0
        """Late batches without a line since the last one that had one."""
        self.longest_s = 0.0
        """The longest wait that had a line."""

    def has_line(self) -> bool:
        """Count one more; whether it has a line by its number."""
        self._count += 1
        if self._count < self._next_told:
            return False
        self._next_told = self._count + 1 if self._count < _ALL_TOLD else 2 * self._count
        return True


@dataclass(kw_only=True)
class EngineOptions:
    """The resources that the engine may use."""

    num_readers: int
    depth: DepthPolicy
    max_windows: int = 3
    """Windows admitted at a time (one drained, one staged, one being read)."""
    first_batch_alone: bool = False
    """True if no more is read before the consumer has a batch than builders can use: where reading takes
    cores, and not time, it would take them from who builds that batch. Else it is begun when what that batch
    needs was read."""
    chunk_time: ChunkTime | None = None
    """Says how many batches a builder is given at a time; None: whole chunks."""
    keep_bytes: int = 0
    """Credit that windows leave free for outputs."""
    timeout_s: float = 600.0
    """Longest wait for one batch."""
    notice_s: float = FIRST_NOTICE_S
    """After this wait a line says what is waited for, and again whenever the wait has doubled."""
    late: LateBatches = field(default_factory=LateBatches)
    """The late batches of this engine."""
    watchdog_s: float = 60.0
    """After this wait the stacks of all threads are printed, once a wait, if nothing explains it."""
    explain: Callable[[], str] = lambda: ""
    """Says what reads wait for, in words; "": nothing that is known. Must not block."""
    initializer: Task | None = field(default=None)
    """Runs first in each reader thread."""
    interrupt: Task | None = field(default=None)
    """Ends running reads early, as errors; called when the engine closes, before threads are joined."""
    monitor: Monitor = field(default_factory=Monitor)
    """The engine's lock, and where the consumer waits."""


@dataclass(frozen=True)
class StageStats:
    """One stage of the pipeline since the engine started."""

    threads: int = 0
    busy_s: float = 0.0
    """Seconds that its threads or processes were at work, those at it now included. Near threads x elapsed:
    this stage is the bottleneck. Near 0: idle."""
    tasks: int = 0
    """The number of tasks that are finished."""
    queued: int = 0
    """Tasks that wait for a thread now. 0: the stage waits for work; large: it is behind."""
    cpu_s: float = field(default=0.0, kw_only=True)
    """Processor seconds of finished tasks. Near `busy_s`: they compute. Near 0: they wait, for a lock, a disk
    or another machine."""

    def with_past(self, past: StageStats) -> StageStats:
        """The stage as it is, its sums together with those of an earlier engine."""
        return replace(
            self,
            busy_s=past.busy_s + self.busy_s,
            tasks=past.tasks + self.tasks,
            cpu_s=past.cpu_s + self.cpu_s,
        )


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine."""

    elapsed_s: float = 0.0
    """Seconds since the first batch was asked for."""
    starved_s: float = 0.0
    """Seconds the training code waited for a batch. Near 0: the loader keeps up. Near `elapsed_s`: it is the
    bottleneck."""
    few_chunks_s: float = 0.0
    """Seconds of these in which some builders built and others had nothing, though no read was awaited. Near
    `starved_s`: there are more builders than chunks."""
    delivered_batches: int = 0
    """The number of batches that were delivered. Those of a chunk count at once, also where they are made
    while the consumer takes them."""
    delivered_bytes: int = 0
    """Bytes of the batches' slots. Python objects (text, JSON, transformed samples) are not counted."""
    ready_batches: int = 0
    """Finished batches waiting. 0 while training: the loader is behind. At `depth`: it is ahead."""
    depth: int = 0
    """Batches kept ready or in work."""
    depth_reason: str = "not started"
    """The reason for the value of `depth`."""
    open_windows: int = 0
    """Windows being read or staged."""
    read: StageStats = StageStats()
    """The stage that reads and decodes blocks."""
    build: StageStats = StageStats()
    """The stage that gathers and decodes batches."""
    memory: MemoryHeld = field(default_factory=MemoryHeld)
    """Bytes held now, by state: what `memory_limit` is about."""

    def with_past(self, past: EngineStats) -> Self:
        """The engine as it is, its sums together with those of an earlier one."""
        return replace(
            self,
            elapsed_s=past.elapsed_s + self.elapsed_s,
            starved_s=past.starved_s + self.starved_s,
            few_chunks_s=past.few_chunks_s + self.few_chunks_s,
            delivered_batches=past.delivered_batches + self.delivered_batches,
            delivered_bytes=past.delivered_bytes + self.delivered_bytes,
            read=self.read.with_past(past.read),
            build=self.build.with_past(past.build),
        )


NOT_STARTED = EngineStats()
"""The figures before the first batch."""


class ConsumerWait:
    """One wait for a batch: when a line says what for, stacks are printed, and it is given up.

    Times are seconds on one clock.
    """

    def __init__(self, began_s: float, options: EngineOptions) -> None:
        self._late, self._is_late = options.late, False
        self._began_s, self._first_notice_s = began_s, options.notice_s
        self._notice_s = began_s + options.notice_s
        self._deadline_s = began_s + options.timeout_s
        self._watchdog_s = min(self._deadline_s, began_s + options.watchdog_s)
        self.was_told = False
        """True if a line said that the batch did not come."""

    @property
    def due_s(self) -> float:
        """The time at which `tell` has something to do."""
        return min(self._notice_s, self._watchdog_s, self._deadline_s)

    def tell(self, now_s: float, reason: str, otherwise: str, stats: Callable[[], object]) -> None:
        """Say what is waited for, if that is due.

        Args:
            now_s: the time.
            reason: what explains the wait, in words; "": nothing that is known.
            otherwise: what is said where nothing explains it.
            stats: of the engine, printed above the stacks.

        Raises `StallError` after the time-out.
        """
        waited_s, stacks = now_s - self._began_s, ""
        if now_s >= self._watchdog_s:
            self._watchdog_s = self._deadline_s
            if not reason or _log.isEnabledFor(logging.DEBUG):
                line = printable(f"dataflow: no batch for {waited_s:.0f} s; {stats()}")
                print(line, file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                stacks = "; stacks of all threads are on stderr"
        if now_s >= self._deadline_s:
            raise StallError(f"no batch within {waited_s:.0f} s{stacks}: {reason or otherwise}")
        if now_s >= self._notice_s:
            late = self._late
            if not self._is_late and not late.has_line() and waited_s < 2 * late.longest_s:
                self._is_late, self._notice_s = True, self._began_s + 2 * late.longest_s
                late.left_out += 1
                return
            late.left_out -= self._is_late and not self.was_told
            self._notice_s = self._began_s + next_notice_s(waited_s, self._first_notice_s)
            self._is_late = self.was_told = True
            others = f" ({late.left_out:,} late batches before it had no line)" if late.left_out else ""
            late.left_out = 0
            _log.warning("no batch for %.0f s: %s%s", waited_s, printable(reason or otherwise), others)

    def end(self, waited_s: float) -> None:
        """Say that the batch came."""
        self._late.longest_s = max(self._late.longest_s, waited_s)
        _log.warning("a batch came after %.1f s", waited_s)
