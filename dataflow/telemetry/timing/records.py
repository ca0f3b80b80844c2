"""Records of one rank's steps: kept while it trains, gathered for a report, saved for `dataflow doctor`.

`dataflow doctor` sets the variable `DATAFLOW_DOCTOR` to a folder; a schedule that finds it saves its record
there after 50, 100, 200, ... windows, at the end of each loop and when it is closed, so that a run that is
killed leaves one too. The time that saving takes is in no window. A step is a window of a
schedule, or a batch of a loop without one (`loops`).
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dataflow.telemetry.status.facts import cores_of, rank_info
from prefetch.weak_registry import WeakRegistry

if TYPE_CHECKING:
    from dataflow.stats import StatsSnapshot

MOST_STEPS, _MOST_EVENTS = 2000, 20_000
"""Steps and events that are kept of a long run."""
_FIRST_SAVED = 50
"""Steps after which a record is saved first."""
IN_SCHEDULES: WeakRegistry[Any] = WeakRegistry()
"""Loaders of schedules that are recorded: their loops are not watched besides, for saving that takes time."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A window, or a plain loop's batch, on one rank; the seconds add up to the time since the one before."""

    window: int
    """Its number since the run began."""
    microbatches: int
    """Forward passes of this rank, replays included."""
    data_s: float
    """Waiting for the loader. Near 0: it keeps up."""
    compute_s: float
    """Forward and backward passes, and whatever the loop does besides."""
    peers_s: float = 0.0
    """Waiting for the other ranks' counts. Near 0, since they are asked for early."""
    exposed_s: float | None = None
    """Gradients on their way after the backward pass had nothing left to compute; waiting for slower ranks is
    in it. Near 0: hidden. None: not measured (then it is in `compute_s`)."""
    optimizer_s: float = 0.0
    """Seconds from the end of the backward pass to the end of `step`."""

    @property
    def total_s(self) -> float:
        """The seconds of the window."""
        return self.data_s + self.peers_s + self.compute_s + (self.exposed_s or 0.0) + self.optimizer_s

    @property
    def own_s(self) -> float:
        """Until this rank had its gradients: who takes longest keeps the others waiting."""
        return self.data_s + self.compute_s


@dataclass(frozen=True)
class TraceEvent:
    """An activity of a rank from one time to another, in seconds since 1970."""

    lane: str
    """One of "window", "phase" and "wait"."""
    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class LoaderTimes:
    """The loader's own times and counts, since it was made; None where it does not count that."""

    kind: str
    """"shards", "process", "thread", "main" or "other"."""
    stall_share: float | None = None
    """Share of the time that training waited for it, in [0, 1]."""
    _: KW_ONLY
    read_busy: float | None = None
    """Share of the time that its reading threads were busy. Near 1: reading is the bottleneck."""
    build_busy: float | None = None
    """Share of the time that its threads or processes that decode and gather batches were busy."""
    builders: str = ""
    """The builders: "main" (whoever asks for a batch), "thread", "process" or "ray"."""
    num_builders: int = 0
    build_cores: float | None = None
    """Cores that they kept busy. Far below `build_busy x num_builders`: they wait, as in a sleep."""
    few_chunks: float | None = None
    """Share of the time that training waited while some of them had nothing to build."""
    memory_held: float | None = None
    """The most of its memory limit that was held, in [0, 1]. Far below 1: a larger one is no use."""
    reason: str = ""
    """The loader's words about its workers or its depth."""
    store: str = ""
    """For shards: "local", "remote", or "cached" where a cache on this machine is in use."""
    batching: str = ""
    """"Packed", "TokenBudget" or "Bucketed", where lengths decide about batches."""
    cores: float | None = None
    """Cores of this rank: those that it may use, in equal parts where all ranks of a machine may use all."""
    cores_busy: float | None = None
    """Share of them that making batches kept busy. Near 1: what computes on them goes at a crawl."""
    file_order: bool = False
    """True if samples come in the order of the dataset, as far as its sampler tells."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of one rank's steps over a loader: what a report is of, and what `diagnose` judges.

    Schedules and loops keep one while they run, `dataflow doctor` reads it from a file, `dataflow top` makes
    it of two pages.
    """

    rank: int
    world_size: int
    host: str
    model: str = ""
    """One of "plain", "DDP" and "FSDP2"; "" of a plain loop, as `strategy` and `device`."""
    strategy: str = ""
    device: str = ""
    loader: LoaderTimes
    windows: tuple[StepTimes, ...]
    events: tuple[TraceEvent, ...] = ()
    mode: str = ""
    """The decisions of the schedule's controller, and why; "" without one."""
    in_schedule: bool = True
    """False: a plain loop. A window is a batch, and computing is all that is not waiting for it."""
    optimizer_steps: int = 0
    """Number of steps of torch's optimizers in a plain loop. 0: it evaluates."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `save` wrote; `ValueError` if it is none. What a later version may add is passed over."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a record of this version: {error}") from None

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. Errors only warn: no training must end for want of a report."""
        part = path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(self))
            part.replace(path)
        except OSError as error:
            text = f"this rank's times could not be saved for dataflow doctor: {error}"
            warnings.warn(text, stacklevel=2)


class Recorder:
    """Keeps the last steps and 20,000 trace events of one rank. Used by the training thread.

    Args:
        name: of the record among those of the rank, such as "loop-000"; the same on all ranks.
        loader: whose steps are recorded.
        record_type: what the records are.
        most_steps: that are kept.
        folder: where records are saved; None or "": nowhere.
        now: seconds on the clock that steps are measured by.
        about: what the records say of the run: "rank", "world_size" and other fields of `StepRecord`.
    """

    def __init__(
        self,
        name: str,
        loader: Any,
        record_type: type[StepRecord] = StepRecord,
        most_steps: int = MOST_STEPS,
        *,
        folder: str | None,
        now: Callable[[], float],
        **about: Any,
    ) -> None:
        self._record_type, self._file_order = record_type, in_file_order(loader)
        self._about = about | {"host": socket.gethostname()}
        self._path = Path(folder) / f"{about['rank']:06d}-{name}.json" if folder else None
        self._steps: deque[StepTimes] = deque(maxlen=most_steps)
        self._events: deque[TraceEvent] = deque(maxlen=_MOST_EVENTS)
        self._offset = time.time() - now()
        self._num_steps, self._save_at = 0, _FIRST_SAVED
        self._loader_times: LoaderTimes | None = None
        self._first: dict[str, float] = {}
        """The loader's numbers after the first step: shares count from there on, without what starts."""

    @property
    def saves(self) -> bool:
        """Return whether `dataflow doctor` asked for records."""
        return self._path is not None

    def keep_event(self, lane: str, name: str, began: float, ended: float) -> None:
        """Keep what happened between two times of the clock."""
        self._events.append(TraceEvent(lane, name, began + self._offset, ended + self._offset))

    def keep_step(self, times: StepTimes, loader: Any) -> bool:
        """Keep a step over a loader that has ended; True where it is time to save."""
        self._steps.append(times)
        self._num_steps += 1
        if self._num_steps == 1 and (stats := _stats_of(loader)) is not None:
            self._first = stats.flat()
        is_time = self._num_steps == self._save_at
        self._save_at *= 1 + is_time
        return is_time

    def record(self, loader: Any, *, events: bool = True, **latest: Any) -> StepRecord:
        """Return what was kept so far, with what the loader says of itself, and fields of now."""
        self._loader_times = loader_times(
            loader, self._loader_times, since=self._first, file_order=self._file_order
        )
        return self._record_type(
            **self._about,
            **latest,
            loader=self._loader_times,
            windows=tuple(self._steps),
            events=tuple(self._events) if events else (),
        )

    def save(self, loader: Any, **latest: Any) -> None:
        """Write the record where `dataflow doctor` looks for it, if it asked; without steps, too."""
        if self._path is not None:
            self.record(loader, **latest).save(self._path)


def _stats_of(loader: Any) -> StatsSnapshot | None:
    """Return a loader's `stats()`; None: it has none that we know."""
    from dataflow.stats import StatsSnapshot

    stats = loader.stats() if callable(getattr(loader, "stats", None)) else None
    return stats if isinstance(stats, StatsSnapshot) else None


def loader_times(
    loader: Any,
    before: LoaderTimes | None = None,
    *,
    since: Mapping[str, float] | None = None,
    file_order: bool = False,
) -> LoaderTimes:
    """Return what a loader's `stats()` say; little of a loader that is not ours.

    Args:
        loader: of any kind, or what serves its loops.
        before: what they said earlier. Worker processes that have ended cannot be asked any more.
        since: their numbers when the first step was over, from where on shares count.
        file_order: see `LoaderTimes`.
    """
    from dataflow.stats import numbers_of, numbers_since

    if (stats := _stats_of(loader)) is None:
        return LoaderTimes("other", file_order=file_order)
    figures, batching = stats.to_json(), getattr(loader, "batching", None)
    numbers = numbers_since(numbers_of(figures), since or {})
    times = times_of(type(stats).__name__, figures, numbers, cores=cores_of(rank_info()))
    busy = before.cores_busy if times.cores_busy is None and before else times.cores_busy
    name = type(batching).__name__ if batching else ""
    return replace(times, batching=name, file_order=file_order, cores_busy=busy)


def times_of(
    kind: str,
    figures: Mapping[str, Any],
    numbers: Mapping[str, float],
    *,
    cores: float,
    is_here: bool = True,
) -> LoaderTimes:
    """Return what the figures of a loader say, of this process or as its page has them.

    Args:
        kind: the class of its `stats()`: "LoaderStats" or "WorkerStats".
        figures: `to_json()` of these.
        numbers: their `flat()` in the time that shares are of.
        cores: of the rank.
        is_here: whether its worker processes are of this machine, and can be asked.
    """

    def share(name: str, of: float) -> float | None:
        return numbers.get(name, 0.0) / of if of > 0 else None

    def busy(stage: str) -> float | None:
        value = share(f"{stage}.busy_s", numbers.get(f"{stage}.threads", 0.0) * elapsed_s)
        return None if value is None else min(1.0, value)

    elapsed_s, workers = numbers.get("elapsed_s", 0.0), str(figures.get("workers", ""))
    if kind == "WorkerStats":
        kept_busy = busy_cores(figures["worker_pids"]) if is_here else None
        return LoaderTimes(
            workers,
            figures["stall_share"],
            reason=figures["workers_reason"],
            cores_busy=None if kept_busy is None else kept_busy / cores,
            cores=cores,
        )
    if kind != "LoaderStats":
        return LoaderTimes("other")
    build_cores, cache = share("build.cpu_s", elapsed_s), figures.get("cache", {})
    is_cached = cache.get("hits", 0) + cache.get("misses", 0) > 0
    return LoaderTimes(
        "shards",
        share("starved_s", elapsed_s) or 0.0,
        read_busy=busy("read"),
        build_busy=busy("build"),
        reason=str(figures.get("depth_reason", "")),
        store="cached" if is_cached else "remote" if numbers.get("in_flight_limit") else "local",
        builders=workers,
        num_builders=int(numbers.get("build.threads", 0)),
        build_cores=build_cores,
        few_chunks=share("few_chunks_s", elapsed_s),
        # Actors compute elsewhere.
        cores_busy=None if build_cores is None or workers == "ray" else build_cores / cores,
        memory_held=share("memory.peak_bytes", numbers.get("memory.limit_bytes", 0.0)),
        cores=cores,
    )


def busy_cores(pids: Sequence[int], proc: Path = Path("/proc")) -> float | None:
    """Cores that running processes have kept busy since each began; None without one."""
    second = os.sysconf("SC_CLK_TCK")
    busy = []
    with suppress(OSError):  # those of an epoch that is over have ended
        now = float((proc / "uptime").read_text().split()[0])
        for pid in pids:
            fields = (proc / f"{pid:d}" / "stat").read_text().rpartition(")")[2].split()
            user, system, began = (int(fields[column]) / second for column in (11, 12, 19))
            busy.append((user + system) / max(now - began, 1 / second))
    return sum(busy) if len(busy) == len(pids) > 0 else None


def in_file_order(loader: Any) -> bool:
    """Return whether samples come in the order of the dataset, as far as a loader's sampler tells."""
    from torch.utils.data import BatchSampler, SequentialSampler

    loader = getattr(loader, "base_dataloader", loader)  # Accelerate's is around ours
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if batches is not None:  # one of the user's may shuffle whatever it is made of
        sampler = batches.sampler if type(batches) is BatchSampler else None
    return isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", None) is False
