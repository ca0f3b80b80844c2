"""Deaths of worker processes: the error that names them, and what the kernel says about memory."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_OF_MACHINE = Path("/proc/vmstat")


class WorkerDiedError(RuntimeError):
    """Worker processes ended that should not have.

    Attributes:
        workers: (number, process id, exit code) of each; a negative exit code is a signal's number.
        memory: what the kernel said about memory, if it has killed processes for it meanwhile.
    """

    def __init__(self, workers: Sequence[tuple[int, int, int | None]], memory: str = "") -> None:
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


def own_cgroup(root: Path = CGROUPS, membership: Path = _OWN_CGROUP) -> Path:
    """The folder of this process's cgroup (version 2), or the one that is mounted where that is hidden."""
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            if line.startswith("0::"):
                folder = root / line[3:].lstrip("/")
                return folder if folder.is_dir() else root
    return root


def oom_kills(cgroup: Path | None = None) -> int:
    """Return how many processes the kernel has killed for memory: of this cgroup, or else of the machine."""
    for path in ((cgroup or own_cgroup()) / "memory.events", _OF_MACHINE):
        with contextlib.suppress(OSError, ValueError):
            words = path.read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


def memory_note(before: int, cgroup: Path | None = None) -> str:
    """Return what is to be said of memory where a process has died; "" unless the kernel has killed more."""
    killed = oom_kills(cgroup) - before
    if killed <= 0:
        return ""
    sizes = []
    for name in ("memory.current", "memory.max"):
        try:
            sizes.append(((cgroup or own_cgroup()) / name).read_text().strip())
        except OSError:
            sizes.append("?")
    return (
        f"The machine ran out of memory: the kernel has killed {killed} processes for it since this loop "
        f"began; the cgroup uses {sizes[0]} bytes now, of at most {sizes[1]}."
    )
