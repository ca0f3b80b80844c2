"""What an engine tells of itself: frozen values, each field with its unit and what its extremes mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefetch.engine.ledger import MemoryHeld


@dataclass(frozen=True)
class StageStats:
    """One stage of the pipeline since the engine started."""

    threads: int
    busy_s: float
    """Thread-seconds spent in tasks. Near threads x elapsed: this stage is the bottleneck. Near 0: idle."""
    tasks: int
    """Tasks finished."""
    queued: int
    """Tasks that wait for a thread now. 0: the stage waits for work; large: it is behind."""

    def with_past(self, past: StageStats) -> StageStats:
        """The stage as it is, its sums together with those of an earlier engine."""
        return replace(self, busy_s=past.busy_s + self.busy_s, tasks=past.tasks + self.tasks)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine."""

    elapsed_s: float
    starved_s: float
    """Seconds the consumer waited in `next`. Near 0: the loader keeps up. Near `elapsed_s`: it is slower."""
    delivered_batches: int
    delivered_bytes: int
    """Slots handed out."""
    ready_batches: int
    """Finished batches waiting. 0: the consumer is faster. At the depth: the loader is ahead."""
    depth: int
    """Batches the depth policy asks for."""
    depth_reason: str
    open_windows: int
    """Windows being read or staged."""
    read: StageStats
    build: StageStats
    memory: MemoryHeld

    def with_past(self, past: EngineStats) -> EngineStats:
        """The engine as it is, its sums together with those of an earlier one."""
        return replace(
            self,
            elapsed_s=past.elapsed_s + self.elapsed_s,
            starved_s=past.starved_s + self.starved_s,
            delivered_batches=past.delivered_batches + self.delivered_batches,
            delivered_bytes=past.delivered_bytes + self.delivered_bytes,
            read=self.read.with_past(past.read),
            build=self.build.with_past(past.build),
        )


NOT_STARTED = EngineStats(
    elapsed_s=0.0,
    starved_s=0.0,
    delivered_batches=0,
    delivered_bytes=0,
    ready_batches=0,
    depth=0,
    depth_reason="not started",
    open_windows=0,
    read=StageStats(0, 0.0, 0, 0),
    build=StageStats(0, 0.0, 0, 0),
    memory=MemoryHeld(0, 0, 0, 0, 0, 0),
)
"""What there is to say before the first batch."""
