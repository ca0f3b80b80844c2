"""Tell whether a loader, a rank or a node is well: for `loader.health()`, and for schedulers of clusters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.telemetry.status.record import LoaderRecord, TrainingRecord
from dataflow.telemetry.timing.diagnosis import diagnose
from dataflow.telemetry.timing.records import loader_times
from sharding.printable import printable

LIMIT_S = 600.0
"""Seconds without a batch after which a loop that runs is taken to hang."""
_STALLED = 0.1
"""Share of waiting that is worth a word."""


@dataclass(frozen=True, kw_only=True)
class LoaderHealth:
    """The value that `loader.health()` returns.

    Examples:
        >>> loader = DataLoader(range(8), batch_size=4)
        >>> loader.health().is_ready
        False
        >>> batches = list(loader)
        >>> loader.health().is_ready
        True
    """

    is_alive: bool
    """False: a loop failed, or had no batch for longer than the limit."""
    is_ready: bool
    """True after the first batch."""
    last_batch_s: float | None
    """Seconds since the last batch; None: there was none, or nobody counts (`DATAFLOW_LIVE=0`)."""
    stall_share: float
    """Share of the time since the first batch was asked for that the training waited, in [0, 1]."""
    message: str
    """One sentence: what is wrong, or that nothing is."""

    def __str__(self) -> str:
        return self.message


def health_of(record: LoaderRecord, now: float, limit_s: float = LIMIT_S, loader: Any = None) -> LoaderHealth:
    """Return how a loader fares by its record.

    Args:
        record: the record.
        now: seconds since 1970.
        limit_s: seconds without a batch that a loop may take.
        loader: asked what helps where the training waits for it; None: it is not here.
    """
    since = max(0.0, now - record.last_batch_at) if record.last_batch_at else None
    quiet = now - max(record.last_batch_at, record.loop_began_at)  # between two loops it may take long
    hangs = record.state == "running" and quiet > limit_s
    share = float(record.stats.get("stall_share", 0.0))
    if record.state == "failed":
        message = f"the last loop failed: {record.error}"
    elif hangs:
        message = (
            f"no batch was taken for {quiet:,.0f} s, more than {limit_s:,.0f}: the training code or the "
            "loader hangs; `py-spy dump` shows where"
        )
    else:
        message = _well(share, loader, is_ready=since is not None, is_running=record.state == "running")
    return LoaderHealth(
        is_alive=not hangs and record.state != "failed",
        is_ready=since is not None,
        last_batch_s=since,
        stall_share=share,
        message=message,
    )


def health_of_loader(loader: Any, limit_s: float) -> LoaderHealth:
    """The entry of `DataLoader.health`: as the doctor, it says what helps where the training waits."""
    status, now = loader._status, time.time()
    if status is not None:
        status.ask()
    record = None if status is None else status.record(now, time.monotonic())

    if record is not None:
        return health_of(record, now, limit_s, loader)
    stats = loader.stats()  # nobody counts when it had its batches
    is_ready, share = stats.batches > 0, stats.stall_share
    message = _well(share, loader, is_ready=is_ready, is_running=is_ready)
    return LoaderHealth(
        is_alive=True, is_ready=is_ready, last_batch_s=None, stall_share=share, message=message
    )


def _well(share: float, loader: Any, *, is_ready: bool, is_running: bool) -> str:
    if not is_ready:
        return "no batch was delivered yet"
    if share > _STALLED and is_running:
        next_action = "`dataflow doctor` says what to do"
        if loader is not None:
            next_action = f"next: {diagnose(loader_times(loader)).action}"
        return f"the training waits {share:.0%} of its time for data; {next_action}"
    return "all is well"


def liveness(records: Sequence[TrainingRecord], now: float, limit_s: float) -> tuple[bool, str]:
    """Return whether all ranks of a node live, and a line a rank. Without a record: nothing is known yet.

    A rank lives while its process does and one of its loaders had a batch within the limit, or none runs. One
    that has ended without an error is well.
    """
    lines, is_alive = [], True
    for record in records:
        loops = [loader for loader in record.loaders if loader.state == "running"]
        healths = [health_of(loop, now, limit_s) for loop in loops]
        failed = [loader for loader in record.loaders if loader.state == "failed"]
        # Of any loader: one loop waits while another validates.
        is_busy = bool(record.last_batch_at) and now - record.last_batch_at <= limit_s
        if record.state == "ended" and not record.error:
            text = "ended"  # its node's other ranks may still write the last checkpoint
        elif not record.is_alive:
            is_alive, text = False, f"process {record.pid} {record.state}{_because(record.error)}"
        elif healths and not any(health.is_alive for health in healths) and not is_busy:
            is_alive, text = False, healths[0].message
        elif failed:
            text = f"the loop over {failed[0].name} failed{_because(failed[0].error)}; the process runs"
        else:
            text = "alive"
        lines.append(f"rank {record.rank}: {text}")
    return is_alive, printable("\n".join(lines) or "no batch was delivered yet")


def readiness(records: Sequence[TrainingRecord]) -> tuple[bool, str]:
    """Return whether every rank of a node had its first batch, and a line about it."""
    alive = [record for record in records if record.is_alive and record.last_batch_at]
    expected = max((record.local_world_size for record in records), default=1)
    text = f"{len(alive)} of {expected} ranks of this node had their first batch"
    return len(alive) >= expected, text


def _because(error: str) -> str:
    return f": {error}" if error else ""
