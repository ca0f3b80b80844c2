"""Run measurements side by side: each in a fresh process, repeats interleaved, medians over repeats.

All processes get the same cores and environment (plus what a contestant's own documentation advises).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from benchmarks import REPOSITORY
from benchmarks.memory import Memory, tree_memory
from benchmarks.runner import call_command

SAMPLE_EVERY_S = 0.02
EXIT_S = 5.0
"""A child that has told everything may take this long to exit."""
LIMIT_S = 300.0
"""A process that takes longer is ended, and the benchmark with it."""
_WATCHED = ("first", "timed", "loading")
"""After these memory is sampled, up to the next event: in the warm-up and after the timed phase, because to
read a loader's page tables slows it down, its first batch most of all; throughout, where nothing is timed."""

P = TypeVar("P")
R = TypeVar("R")


def run_child(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[dict[str, Any], Memory]:
    """Call a module's function by `runner`; return its events merged into one dict, and its peak memory.

    What failed has a "reason". Processes that it leaves behind are ended.
    """
    with subprocess.Popen(
        call_command(function, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        # Installed packages are compiled.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONWARNINGS": "ignore", **(environment or {})},
        start_new_session=True,
    ) as child:
        try:
            return _follow(child, time.monotonic() + limit_s)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(EXIT_S)  # what it shares with its workers is removed at its exit
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its own group: ends workers it left behind


def in_own_process(function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Any:
    """What a module's function gives in a fresh process; `RuntimeError` if it fails.

    Arguments and result must be JSON.
    """
    events, _ = run_child(function, *arguments, limit_s=limit_s)
    if "reason" in events:
        raise RuntimeError(f"{function.__name__}{arguments}: {events['reason']}")
    return events["result"]


def _follow(child: subprocess.Popen[bytes], deadline: float) -> tuple[dict[str, Any], Memory]:
    assert child.stdout is not None
    assert child.stderr is not None
    result: dict[str, Any] = {}
    peak, watching, tail, pending = Memory(), False, b"", b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        ready.register(child.stderr, selectors.EVENT_READ)
        # Workers that a peer leaves behind hold the pipes open: its last event is the end.
        while result.get("event") != "done" and child.stdout in {
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
                        if event["event"] == "done":
                            break
            if watching:
                peak = peak.peak(tree_memory(child.pid))
    if result.get("event") != "done":
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


def interleaved(
    points: Sequence[P],
    repeats: int,
    measure: Callable[[P], R],
    reason: Callable[[R], str] = lambda run: getattr(run, "reason", ""),
) -> Iterator[R]:
    """A B C A B C ...: drift of the machine falls on all alike. What failed is not run again."""
    failed: set[P] = set()
    for _ in range(repeats):
        for point in points:
            if point not in failed:
                run = measure(point)
                if reason(run):
                    failed.add(point)
                yield run


def medians(runs: Sequence[Any], *alike: str) -> list[Any]:
    """One row for runs whose fields `alike` are the same: the median of each float, or one that failed.

    Runs are dataclasses with a `reason`, which says why a run has no figures.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in alike), []).append(run)
    return [next((run for run in group if run.reason), None) or _median(group) for group in groups.values()]


def _median(group: Sequence[Any]) -> Any:
    numbers = {
        name: statistics.median(getattr(run, name) for run in group)
        for name, value in asdict(group[-1]).items()
        if isinstance(value, float)
    }
    return replace(group[-1], **numbers)
