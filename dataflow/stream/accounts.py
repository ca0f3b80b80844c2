"""What a loader has delivered over all its sessions, and what it left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataflow.batch.chunk import Delivered
from dataflow.stats import LoaderStats
from dataflow.stream.session import Session
from dataflow.stream.skipped import Skipped
from prefetch.cache.block_cache import NO_CACHE, CacheStats
from prefetch.control.depth import Decision
from prefetch.engine.stats import NOT_STARTED, EngineStats
from prefetch.store.reader import NO_FAULTS, ReadStats
from sharding.order.shuffle import Shuffle

_NOT_IN_FLIGHT = Decision(0, "not started")


@dataclass(frozen=True)
class _Totals:
    """Sums over sessions, and the last one's engine, whose stages have sums, too."""

    engine: EngineStats = NOT_STARTED
    elapsed_s: float = 0.0
    starved_s: float = 0.0
    read_bytes: int = 0
    decoded_bytes: int = 0
    delivered_bytes: int = 0
    faults: ReadStats = NO_FAULTS
    in_flight: Decision = _NOT_IN_FLIGHT
    cache: CacheStats = NO_CACHE

    @classmethod
    def of(cls, session: Session, past: _Totals | None) -> _Totals:
        """The totals with one more session."""
        engine, traffic, past = session.engine.stats(), session.traffic, past or cls()
        stages = engine.read.with_past(past.engine.read), engine.build.with_past(past.engine.build)
        return cls(
            replace(engine, read=stages[0], build=stages[1]),
            past.elapsed_s + engine.elapsed_s,
            past.starved_s + engine.starved_s,
            past.read_bytes + traffic.read_bytes,
            past.decoded_bytes + traffic.decoded_bytes,
            past.delivered_bytes + engine.delivered_bytes,
            past.faults + session.faults(),
            session.in_flight(),
            past.cache + session.caches.stats(),
        )


class Counts:
    """What was delivered, over all sessions."""

    def __init__(self) -> None:
        self.samples = self.batches = self.empty_batches = 0
        self.first_batch_s = 0.0
        self._past: _Totals | None = None

    def add(self, delivered: Delivered) -> None:
        """Count a batch that is handed out, or left out for being empty."""
        self.empty_batches += delivered.in_place or not delivered.num_samples
        self.batches += delivered.num_samples > 0
        self.samples += delivered.num_samples

    def keep(self, session: Session) -> None:
        """Fold a session that ends into the totals: however many there were, one record is kept."""
        self._past = _Totals.of(session, self._past)

    def snapshot(
        self, sessions: Sequence[Session], shuffle: Shuffle, window_reason: str, skipped: Skipped
    ) -> LoaderStats:
        """The totals, and the stages of the running (or last) engine: of several the newest."""
        totals = self._past or _Totals()
        for session in sessions:
            totals = _Totals.of(session, totals)
        engine, elapsed, starved = totals.engine, totals.elapsed_s, totals.starved_s
        return LoaderStats(
            samples=self.samples,
            batches=self.batches,
            read_bytes=totals.read_bytes,
            decoded_bytes=totals.decoded_bytes,
            delivered_bytes=totals.delivered_bytes,
            elapsed_s=elapsed,
            starved_s=starved,
            stall_share=starved / elapsed if elapsed else 0.0,
            first_batch_s=self.first_batch_s,
            read=engine.read,
            build=engine.build,
            ready_batches=engine.ready_batches,
            depth=engine.depth,
            depth_reason=engine.depth_reason,
            in_flight_limit=totals.in_flight.value,
            in_flight_reason=totals.in_flight.reason,
            window_blocks=shuffle.window_blocks or 0,
            window_reason=window_reason,
            memory=engine.memory,
            mapped_bytes=sum(session.mapped_bytes() for session in sessions),
            skipped_samples=skipped.count,
            skipped=tuple(skipped.errors),
            empty_batches=self.empty_batches,
            faults=totals.faults,
            cache=totals.cache,
        )
