"""One run of a loader's engine: from a position of the stream on, until closed.

What it delivers, and how, was decided before (`decisions`); what it works with is open (`resources`). It
knows no loader.
"""

from __future__ import annotations

import threading
import time

import torch

from dataflow.batch.delivered import Delivered
from dataflow.stats import SessionStats
from dataflow.stream.decisions import SessionPlan
from dataflow.stream.deliveries import PendingErrors
from dataflow.stream.measuring import MeasuringStage
from dataflow.stream.resources import Resources
from prefetch.control.gate import ReadGate
from prefetch.control.pause import ReadPause
from prefetch.memory.device import CudaStreams, DeviceCopier
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
        self.decided, self.errors, self._pause, self._stage = decided, errors, pause, stage
        self._now = pause.running_s if pause else time.perf_counter
        self._num_taken, self._last_taken_s = 0, self._now()
        self.copier = DeviceCopier(CudaStreams(device)) if device.type == "cuda" else None
        self.resources = Resources(decided, epoch, start, errors=errors, pause=pause)
        self._engine = self.resources.engine
        self._next: tuple[int, int] | None = (epoch, start)
        """Epoch and position of the next batch, where that is the first of what was asked for."""
        self._closing = threading.RLock()  # held until all has ended
        self._closed = False
        if stage is not None:
            stage.begin(self.next_chunk, self.resources.ledger, epoch, start)

    def next_batches(self) -> Batches[Delivered]:
        """The batches of the next chunk, or what the stage forms next."""
        stage = self._stage
        return self.next_chunk() if stage is None else stage.next_batches()

    def next_chunk(self) -> Batches[Delivered]:
        """Return what the engine has made next."""
        gap_s = self._now() - self._last_taken_s
        batches = self._engine.next_batches()
        if batches:
            self._next = None
            self._last_taken_s = self._now()
            if self.resources.sources.gate:
                self._observe_use(self.resources.sources.gate, len(batches), gap_s)
            if self._pause:
                self._pause.batches_taken()
        return batches

    def _observe_use(self, gate: ReadGate, taken: int, gap_s: float) -> None:
        """Tell the gate how many bytes a batch takes, and how often one is taken."""
        self._num_taken += taken
        # What is read ahead counts, too: that makes the demand too high at first, which does no harm.
        gate.observe_use(self.resources.sources.traffic.read_bytes * taken // self._num_taken, gap_s)

    def read_on(self) -> None:
        """Read ahead into the next epoch: a second one has begun. See `Engine.read_on`."""
        self._engine.read_on()

    def is_at(self, epoch: int, start: int) -> bool:
        """Return whether the next batch is the first from `start` of the epoch."""
        return self._next == (epoch, start)

    def epoch_done(self, epoch: int) -> None:
        """Note that all batches of the epoch were taken."""
        self._next = (epoch + 1, 0)
        if (stage := self._stage) is not None:
            stage.begin(self.next_chunk, self.resources.ledger, epoch + 1, 0)

    def stats(self) -> SessionStats:
        """A snapshot; cheap, any thread."""
        sources, (workers, reason) = self.resources.sources, self.resources.builders.choice()
        return SessionStats(
            engine=self._engine.stats(),
            read_bytes=sources.traffic.read_bytes,
            decoded_bytes=sources.traffic.decoded_bytes,
            in_flight=sources.in_flight,
            faults=sources.faults,
            cache=sources.caches.stats(),
            workers=workers,
            workers_reason=reason,
            num_workers=self.decided.builders.num_workers,
        )

    def resize(self, memory_limit: int) -> bool:
        """Have another limit from now on; False, and nothing is changed, if more is held than that.

        Where other ranks wait for it, it goes on with what it has, as theirs do.
        """
        if not self.resources.ledger.resize(memory_limit - sum(self.decided.kept_bytes.values())):
            stage = self._stage
            return stage is not None and stage.is_shared
        self.resources.arena.resize(memory_limit)
        return True

    def close(self, *, join: bool = True) -> None:
        """Stop everything; see `Engine.close`. Whoever comes second waits, too. Idempotent."""
        self.resources.end_builds()
        with self._closing:
            if self._closed:
                return
            if self.copier:
                self.copier.close()
            self.resources.close(join=join)
            self.errors.forget()
            self._stage = None  # which has this session, and samples
            self._closed = True  # at last: who is interrupted here has not closed it
