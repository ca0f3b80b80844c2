"""What is said when a worker process has ended that should not have."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


class WorkerDiedError(RuntimeError):
    """Worker processes ended that should not have.

    Attributes:
        workers: (number, process id, exit code) of each; a negative exit code is a signal's number.
        memory: what the system said about memory, if one was killed.
    """

    def __init__(self, workers: Sequence[tuple[int, int, int | None]], memory: str | None = None) -> None:
        killed = any(code == -signal.SIGKILL for _, _, code in workers)
        if memory is None:
            memory = _memory_said(own_cgroup()) if killed else ""  # now: later it may have changed
        super().__init__(workers, memory)
        self.workers, self.memory = list(workers), memory

    def __str__(self) -> str:
        pids = ", ".join(str(pid) for _, pid, _ in self.workers)
        parts = [f"DataLoader worker (pid(s) {pids}) exited unexpectedly."]
        for _, pid, code in self.workers:
            if code is not None and code < 0:
                name = signal.strsignal(-code) or f"signal {-code}"
                parts.append(f"DataLoader worker (pid {pid}) is killed by signal: {name}.")
            elif code is not None:
                parts.append(
                    f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. Its output "
                    "may tell why; num_workers=0 runs the same code in this process."
                )
        return " ".join(filter(None, [*parts, self.memory]))


def own_cgroup(root: Path = CGROUPS, told: Path = _OWN_CGROUP) -> Path:
    """The folder of this process's cgroup (version 2), or the one that is mounted where that is hidden."""
    with contextlib.suppress(OSError):
        for line in told.read_text().splitlines():
            if line.startswith("0::"):
                folder = root / line[3:].lstrip("/")
                return folder if folder.is_dir() else root
    return root


def _memory_said(cgroup: Path) -> str:
    """What the files of a cgroup say about memory, as far as they say anything."""
    facts: dict[str, list[str]] = {}
    for name in ("memory.events", "memory.current", "memory.max"):
        with contextlib.suppress(OSError):
            facts[name] = (cgroup / name).read_text().split()
    events = facts.get("memory.events", [])
    counts = dict(zip(events[::2], events[1::2], strict=False))
    if not counts:
        return "SIGKILL often means that the machine ran out of memory."
    current, limit = (" ".join(facts.get(name, "?")) for name in ("memory.current", "memory.max"))
    return (
        f"SIGKILL often means out of memory: this cgroup counts {counts.get('oom_kill', '?')} processes "
        f"killed for memory; it uses {current} bytes now, of at most {limit}."
    )
