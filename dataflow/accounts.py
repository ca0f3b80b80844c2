"""What a loader has delivered over all its sessions, and what it left out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.session import Session
from dataflow.stats import LoaderStats
from prefetch.block_cache import NO_CACHE, CacheStats
from prefetch.depth import Decision
from prefetch.engine_stats import NOT_STARTED, EngineStats
from prefetch.store import NO_FAULTS, ReadStats
from sharding.errors import SampleError
from sharding.order import Shuffle

_LISTED_ERRORS = 1000
_NOT_IN_FLIGHT = Decision(0, "not started")


@dataclass(frozen=True)
class _Totals:
    """Sums over sessions, and the last one's engine."""

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
        return cls(
            engine,
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
        self.samples = self.batches = 0
        self.first_batch_s = 0.0
        self._past: _Totals | None = None

    def keep(self, session: Session) -> None:
        """Fold a session that ends into the totals: however many there were, one record is kept."""
        self._past = _Totals.of(session, self._past)

    def snapshot(
        self, session: Session | None, shuffle: Shuffle, window_reason: str, skipped: Skipped
    ) -> LoaderStats:
        """The totals, and the running (or last) engine's stages."""
        totals = _Totals.of(session, self._past) if session else self._past or _Totals()
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
            skipped_samples=skipped.count,
            skipped=tuple(skipped.errors),
            faults=totals.faults,
            cache=totals.cache,
        )


class Skipped:
    """The account of samples left out by policy: decided ahead by many threads, counted as delivered."""

    def __init__(self, on_error: Any, budget: int) -> None:
        self._on_error, self._budget = on_error, budget
        self._lock = threading.Lock()  # guards _decided
        self._decided = 0
        self.count = 0
        self.errors: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_lock": threading.Lock()}

    def start(self, count: int) -> None:
        """Forget what was decided about batches that were never delivered."""
        self.count = self._decided = count

    def add(self, errors: Sequence[SampleError]) -> None:
        """Count what is missing from a batch that is handed out."""
        self.count += len(errors)
        self.errors += map(str, errors[: _LISTED_ERRORS - len(self.errors)])

    def decide(self, error: SampleError) -> bool:
        """Whether to leave the sample out."""
        skip = self._on_error == "skip" or (callable(self._on_error) and bool(self._on_error(error)))
        if not skip:
            return False
        with self._lock:
            if self._decided >= self._budget:
                error.add_note(f"{self._decided} samples were skipped before; error_budget={self._budget}")
                return False
            self._decided += 1
        return True
