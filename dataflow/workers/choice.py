"""Whether worker processes or worker threads fetch the batches: a pure decision from what was measured.

Threads save the way between processes, but all of them, and the training code, share one interpreter lock.
So per batch three figures bound each kind, all in seconds: the work itself, of which `num_workers` go on
side by side; its processor time, of which there are as many side by side as cores; and what happens under
the lock, one at a time. A batch from a process costs packing there, and unpacking here under the lock.

Before any of that, the same training code must see the same values either way: what tells that it would
not is an `obstacle`, and processes it is.
"""

from __future__ import annotations

from dataclasses import dataclass

_CROSSING_S = 3e-5
"""What a batch from a process costs this one beside unpacking: the task, the pipes, being woken."""
_MARGIN = 1.1
"""Threads may be slower by this factor: their batches do not wait for a worker's next batch, and they take
no memory and no time to start."""
_LOCK_SHARE = 0.5
"""Of the time at full speed, threads may hold the interpreter lock so long; the rest is for training code."""


@dataclass(frozen=True)
class Decision:
    """Who fetches batches, and why."""

    value: str
    """"main", "process" or "thread"; "auto": not decided yet."""
    reason: str


@dataclass(frozen=True)
class Observed:
    """What fetching one batch took on a trial, in one thread with nothing beside it."""

    work_s: float
    """From beginning to end. Far above `cpu_s`: it waits for storage."""
    cpu_s: float
    """Processor time."""
    locked_s: float
    """Time under the interpreter lock. 0: threads never wait for each other. At `work_s`: several threads are
    no faster than one."""
    locked_is_bound: bool
    """The machine was busy with other things: `locked_s` is an upper bound."""
    pack_s: float
    """What a worker process would need beside, to hand the batch over."""
    unpack_s: float
    """What this process would need to take it."""


def decide(seen: Observed | str, *, num_workers: int, num_cores: int) -> Decision:
    """Choose "process" or "thread".

    Args:
        seen: what was measured, or what keeps the values from being the same in threads.
        num_workers: of either.
        num_cores: that this process may use.
    """
    if isinstance(seen, str):
        return Decision("process", seen)
    side_by_side, cores = num_workers, min(num_workers, num_cores)
    take_s = seen.unpack_s + _CROSSING_S
    threads_s = max(seen.work_s / side_by_side, seen.cpu_s / cores, seen.locked_s)
    processes_s = max((seen.work_s + seen.pack_s) / side_by_side, (seen.cpu_s + seen.pack_s) / cores, take_s)
    figures = (
        f"{_ms(threads_s)} a batch with threads, {_ms(processes_s)} with processes; the interpreter lock is "
        f"held for {_ms(seen.locked_s)} of a batch in threads, {_ms(take_s)} to take one from a process"
    )
    if seen.locked_is_bound:
        figures += ". The cores were busy with other things: the lock may be held for less"
    if threads_s > _MARGIN * processes_s:
        return Decision("process", f"faster: {figures}")
    if seen.locked_s > max(_LOCK_SHARE * threads_s, take_s):
        return Decision("process", f"threads would keep the lock from the training code: {figures}")
    return Decision("thread", f"as fast, and nothing has to cross between processes: {figures}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
