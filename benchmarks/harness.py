"""Run contestants side by side: each in a fresh process, repeats interleaved, medians over repeats.

All processes get the same cores and environment (plus what a contestant's own documentation advises).
The memory of each is its peak over that of a bare `import torch` process, measured in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.child import Job
from benchmarks.memory import Memory, tree_memory

SAMPLE_EVERY_S = 0.02
EXIT_S = 5.0
"""A child that has told everything may take this long to exit."""
_LAST = ("watched", "prepared")
"""What a child tells last."""
_WATCHED = ("first", "timed", "loading")
"""After these memory is sampled, up to the next event: in the warm-up and after the timed phase, because to
read a loader's page tables slows it down, its first batch most of all; throughout, where nothing is timed."""
REPOSITORY = Path(__file__).resolve().parent.parent


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
    return run_child("benchmarks.child", asdict(job), environment, limit_s=limit_s)


def run_child(
    module: str, argument: Mapping[str, Any], environment: Mapping[str, str], *, limit_s: float
) -> tuple[dict[str, Any], Memory]:
    """Run a module with one JSON argument to its end; return its events merged, and its peak memory."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, json.dumps(argument)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},  # installed packages are compiled
        start_new_session=True,
    ) as child:
        try:
            return _follow(child, time.monotonic() + limit_s)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(EXIT_S)  # what it shares with its workers is removed at its exit
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its own group: ends workers it left behind


def _follow(child: subprocess.Popen[bytes], deadline: float) -> tuple[dict[str, Any], Memory]:
    assert child.stdout is not None
    assert child.stderr is not None
    result: dict[str, Any] = {}
    peak, watching, tail, pending = Memory(), False, b"", b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        ready.register(child.stderr, selectors.EVENT_READ)
        # Workers that a peer leaves behind hold the pipes open: its last event is the end.
        while result.get("event") not in _LAST and child.stdout in {
            key.fileobj for key in ready.get_map().values()
        }:
            if time.monotonic() > deadline:
                return {"reason": "took too long"}, peak
            for key, _ in ready.select(SAMPLE_EVERY_S if watching else 0.5):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    ready.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    tail = (tail + data)[-2000:]
                else:
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        watching = event["event"] in _WATCHED
                        result |= event
            if watching:
                peak = peak.peak(tree_memory(child.pid))
    if result.get("event") not in _LAST:
        lines_of_tail = tail.decode(errors="replace").strip().splitlines()
        result.setdefault("reason", lines_of_tail[-1] if lines_of_tail else f"exit status {child.wait()}")
    return result, peak


def bare_torch() -> Memory:
    """Memory of a process that only imports torch: the zero of all memory figures."""
    code = "import torch, sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        memory = tree_memory(child.pid)
        child.communicate(b"")
    return memory


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


def interleaved(
    jobs: Sequence[str], repeats: int, run: Callable[[str], Run], tell: Callable[[Run], None]
) -> list[Run]:
    """A B C A B C ...: drift of the machine falls on all alike. A contestant that failed is not run again."""
    runs: list[Run] = []
    failed: set[str] = set()
    for _ in range(repeats):
        for name in jobs:
            if name in failed:
                continue
            runs.append(run(name))
            tell(runs[-1])
            if runs[-1].reason:
                failed.add(name)
    return runs


def medians(runs: Sequence[Run]) -> list[Run]:
    """One row per contestant and consumer, in order of appearance: the median of each figure."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.contestant, run.consumer), []).append(run)
    return [_median(group) for group in groups.values()]


def _median(group: Sequence[Run]) -> Run:
    last = group[-1]
    if last.reason:
        return last
    numbers = {
        name: statistics.median(getattr(run, name) for run in group)
        for name, value in asdict(last).items()
        if isinstance(value, float)
    }
    return replace(last, **numbers)
