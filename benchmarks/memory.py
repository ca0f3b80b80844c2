"""Memory of a process tree: what it really occupies, without counting shared pages twice.

`pss` is the proportional set size of all processes. `held` is its anonymous and shared-memory part: what the
kernel cannot drop. The difference is file pages that happen to be mapped; a loader that maps its shards shows
the page cache there, one that reads them does not, though both use the same cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

FIELD = re.compile(rb"^(Rss|Pss|Pss_Anon|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """Megabytes (10^6 bytes) of one process tree."""

    rss_mb: float = 0.0
    """Sum of resident sets; counts shared pages once per process."""
    pss_mb: float = 0.0
    """Sum of proportional set sizes, mapped files included."""
    held_mb: float = 0.0
    """The part of `pss_mb` that is not a mapped file."""

    def peak(self, other: Memory) -> Memory:
        """The greater of each figure."""
        return Memory(
            max(self.rss_mb, other.rss_mb),
            max(self.pss_mb, other.pss_mb),
            max(self.held_mb, other.held_mb),
        )


def tree_memory(pid: int) -> Memory:
    """Memory of a process and its descendants now; zero when it is gone."""
    totals = dict.fromkeys((b"Rss", b"Pss", b"Pss_Anon", b"Pss_Shmem"), 0)
    for number in _tree(pid):
        try:
            text = Path(f"/proc/{number}/smaps_rollup").read_bytes()
        except OSError:  # it ended between listing and reading
            continue
        for name, kilobytes in FIELD.findall(text):
            totals[name] += int(kilobytes)
    held = totals[b"Pss_Anon"] + totals[b"Pss_Shmem"]
    return Memory(*(kb * 1024 / 1e6 for kb in (totals[b"Rss"], totals[b"Pss"], held)))


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of a process, its living descendants, and the children they have reaped."""
    total = 0.0
    for number in _tree(pid):
        try:
            times = psutil.Process(number).cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def machine_cpu_s() -> float:
    """CPU seconds that all processes have used since the machine started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []
