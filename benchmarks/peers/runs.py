"""A run of one contestant: its process, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.harness import run_child
from benchmarks.memory import Memory
from benchmarks.peers.measured import Job, measured

POINT = ("workload", "contestant", "consumer")
"""What repeats have in common."""


@dataclass(frozen=True)
class Run:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    workload: str
    contestant: str
    workers: int
    omp_threads: int | None
    """`OMP_NUM_THREADS` of the run; None: unset."""
    consumer: str
    samples_per_s: float = 0.0
    first_batch_s: float = 0.0
    """From constructing the loader, its index at hand, to its first batch; imports excluded."""
    stall_share: float = 0.0
    """Time blocked in `next` over the whole time: near 0 the loader keeps up, near 1 it is the bottleneck."""
    cpu_s_per_s: float = 0.0
    """CPU seconds per second over the process tree, consumer included; 2.0 keeps two cores busy."""
    others_cpu_s_per_s: float = 0.0
    """The same of all other processes: near 0 on a quiet machine; above that, the run was disturbed."""
    batch_s: float = 0.0
    """Seconds per batch, consumer included."""
    burn_s: float = 0.0
    """CPU seconds the consumer burns on each batch."""
    rss_mb: float = 0.0
    pss_mb: float = 0.0
    held_mb: float = 0.0
    """Peak over the bare `import torch` process, without mapped files; see `memory`."""
    delivers: str = ""
    row_groups_per_batch: float | None = None
    reason: str = ""


def run_job(job: Job, environment: Mapping[str, str], *, limit_s: float) -> tuple[dict[str, Any], Memory]:
    """Run one contestant; return its events merged into one dict, and its peak memory."""
    return run_child(measured, asdict(job), environment=environment, limit_s=limit_s)


def to_run(
    job: Job,
    contestant: str,
    omp_threads: int | None,
    outcome: tuple[dict[str, Any], Memory],
    bare: Memory,
) -> Run:
    """Turn a child's events into figures."""
    events, peak = outcome
    consumer = "burn" if job.burn_s else "plain"
    run = Run(job.workload, contestant, job.workers, omp_threads, consumer)
    if events.get("reason"):
        return replace(run, reason=events["reason"])
    elapsed = events["elapsed_s"]
    return replace(
        run,
        samples_per_s=events["samples"] / elapsed,
        first_batch_s=events["first_batch_s"],
        stall_share=events["blocked_s"] / elapsed,
        cpu_s_per_s=events["cpu_s"] / elapsed,
        others_cpu_s_per_s=events["others_cpu_s"] / elapsed,
        batch_s=elapsed / events["batches"],
        burn_s=job.burn_s,
        rss_mb=max(0.0, peak.rss_mb - bare.rss_mb),
        pss_mb=max(0.0, peak.pss_mb - bare.pss_mb),
        held_mb=max(0.0, peak.held_mb - bare.held_mb),
        delivers=events["delivers"],
        row_groups_per_batch=events.get("row_groups_per_batch"),
    )
