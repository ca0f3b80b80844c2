"""One run of a loader's engine: from a position of the stream on, until closed.

What it delivers, and how, was decided before (`decisions`); what it works with is open (`resources`). It
knows no loader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dataflow.batch.delivered import Delivered
from dataflow.outputs.columns import closed_error
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import StreamSettings
from dataflow.stats import SessionStats
from dataflow.stream.decisions import SessionPlan, plan_builders, plan_session
from dataflow.stream.deliveries import PendingErrors
from dataflow.stream.measuring import LengthsStage, MeasuringStage
from dataflow.stream.resources import Resources
from prefetch.control.pause import ReadPause
from prefetch.memory.device import CudaStreams, DeviceCopier
from prefetch.memory.interrupts import Uninterrupted
from prefetch.work import Batches


class Session:
    """One engine with its arena and ledger, from a position of the stream on. `close` may run in any thread.

    Args:
        decided: what it works with.
        epoch, start: of the first batch.
        errors: decides about bad samples.
        pause: asks remote reads to wait; outlives the session.
        device: where batches go.
        stage: forms the batches of what the engine makes; None: it makes batches.
    """

    def __init__(
        self,
        decided: SessionPlan,
        epoch: int,
        start: int,
        *,
        errors: PendingErrors,
        pause: ReadPause | None,
        device: torch.device,
        stage: MeasuringStage | None = None,
    ) -> None:
        self.decided, self.errors, self._pause, self.stage = decided, errors, pause, stage
        self._now = pause.running_s if pause else time.perf_counter
        self._num_taken, self._last_taken_s = 0, self._now()
        self.copier = DeviceCopier(CudaStreams(device)) if device.type == "cuda" else None
        self.resources = Resources(decided, epoch, start, errors=errors, pause=pause)
        self._engine, self.sums = self.resources.engine, self.resources.sums
        self._next: tuple[int, int] | None = (epoch, start)
        """Epoch and position of the next batch, where that is the first of what was asked for."""
        self._closing = threading.RLock()  # held until all has ended
        self._closed = False
        self._rows: list[Session] = []
        """The session that builds rows, where this one only measures for it: each has half of the limit."""
        if isinstance(stage, LengthsStage):
            stage.open_rows = self._open_rows
        if stage is not None:
            stage.sums = self.sums
            stage.begin(self.next_chunk, self.resources.ledger, epoch, start)

    def _open_rows(
        self, plan: StreamPlan, settings: StreamSettings, epoch: int, start: int
    ) -> tuple[Callable[[], Batches[Delivered]], Any]:
        """Open the session that builds rows, and return what gives its next batches, and their sums."""
        topology, limit = self.decided.topology, self.decided.memory_limit
        decided = plan_session(plan, settings, topology, limit, plan_builders(plan, settings, topology))
        with Uninterrupted(), self._closing:
            if self._closed:
                raise closed_error()
            here = torch.device("cpu")
            self._rows = [Session(decided, epoch, start, errors=self.errors, pause=self._pause, device=here)]
        return self._rows[0].next_chunk, self._rows[0].sums

    def next_chunk(self) -> Batches[Delivered]:
        """Return what the engine has made next."""
        gap_s = self._now() - self._last_taken_s
        batches = self._engine.next_batches()
        if batches:
            self._next = None
            self._last_taken_s = self._now()
            if self.resources.sources.gate:
                self._num_taken += len(batches)
                # What is read ahead counts, too: that makes the demand too high at first, which does no harm.
                each = self.resources.sources.traffic.read_bytes * len(batches) // self._num_taken
                self.resources.sources.gate.observe_use(each, gap_s)
            if self._pause:
                self._pause.batches_taken()
        return batches

    def read_on(self) -> None:
        """Read ahead into the next epoch: a second one has begun. See `Engine.read_on`."""
        self._engine.read_on()
        for rows in self._rows:
            rows.read_on()

    def is_at(self, epoch: int, start: int) -> bool:
        """Return whether the next batch is the first from `start` of the epoch."""
        return self._next == (epoch, start)

    def epoch_done(self, epoch: int) -> None:
        """Note that all batches of the epoch were taken."""
        self._next = (epoch + 1, 0)
        if (stage := self.stage) is not None:
            stage.begin(self.next_chunk, self.resources.ledger, epoch + 1, 0)

    def stats(self) -> SessionStats:
        """A snapshot; cheap, any thread."""
        sources, (workers, reason) = self.resources.sources, self.resources.choice()
        stats = SessionStats(
            **vars(self._engine.stats()),
            read_bytes=sources.traffic.read_bytes,
            decoded_bytes=sources.traffic.decoded_bytes,
            in_flight=sources.in_flight,
            faults=sources.faults,
            cache=sources.caches.stats(),
            workers=workers,
            workers_reason=reason,
            num_workers=self.decided.builders.num_workers,
        )
        return self._rows[0].stats().with_past(stats) if self._rows else stats

    @property
    def mapped_bytes(self) -> int:
        """Bytes of local shards whose pages are in this process."""
        return self.resources.sources.mapped_bytes + sum(rows.mapped_bytes for rows in self._rows)

    def resize(self, memory_limit: int) -> bool:
        """Have another limit from now on; False, and nothing is changed, if more is held than that.

        Where other ranks wait for it, it goes on with what it has, as theirs do.
        """
        memory_limit //= 2 if isinstance(self.stage, LengthsStage) else 1
        fits = self.resources.ledger.resize(memory_limit - sum(self.decided.kept_bytes.values()))
        if not (fits and all(rows.resize(memory_limit) for rows in self._rows)):
            stage = self.stage
            return stage is not None and stage.is_shared
        self.resources.arena.resize(memory_limit)
        return True

    def close(self, *, join: bool = True) -> None:
        """Stop everything; see `Engine.close`. Whoever comes second waits, too. Idempotent."""
        self.resources.builds_end.set()
        with self._closing:
            if self._closed:
                return
            if self.copier:
                self.copier.close()
            if isinstance(self.stage, LengthsStage):
                self.stage.known.tell(is_closed=True)
            for rows in self._rows:
                rows.close(join=join)
            self.resources.close(join=join)
            self.errors.forget()
            self.stage = None  # which has this session, and samples
            self._closed = True  # at last: who is interrupted here has not closed it
