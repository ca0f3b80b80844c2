"""Records of one rank's steps: kept while it trains, gathered for a report, saved for `dataflow doctor`.

`dataflow doctor` sets the variable `DATAFLOW_DOCTOR` to a folder; a schedule that finds it saves its record
there after 50, 100, 200, ... windows, at the end of each loop and when it is closed, so that a run that is
killed leaves one too. The time that saving takes is in no window. A step is a window of a
schedule, or a batch of a loop without one (`loops`).
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dataflow.telemetry.status.facts import cores_of, rank_info
from prefetch.weak_registry import WeakRegistry

if TYPE_CHECKING:
    from dataflow.stats import LoaderStats

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
    peers_s: float
    """Waiting for the other ranks' counts. Near 0, since they are asked for early."""
    compute_s: float
    """Forward and backward passes, and whatever the loop does besides."""
    exposed_s: float | None
    """Gradients on their way after the backward pass had nothing left to compute; waiting for slower ranks is
    in it. Near 0: hidden. None: not measured (then it is in `compute_s`)."""
    optimizer_s: float
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
class RankRecord:
    """The record of one rank's steps."""

    rank: int
    world_size: int
    host: str
    model: str
    """One of "plain", "DDP" and "FSDP2"."""
    strategy: str
    device: str
    loader: LoaderTimes
    windows: tuple[StepTimes, ...]
    events: tuple[TraceEvent, ...] = ()
    mode: str = ""
    """The decisions of the schedule's controller, and why; "" without one."""
    in_schedule: bool = True
    """False: a plain loop. A window is a batch, and computing is all that is not waiting for it."""
    optimizer_steps: int = 0
    """Number of steps of torch's optimizers in a plain loop. 0: it evaluates."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON value."""
        lists = {"windows": [vars(one) for one in self.windows], "events": [vars(one) for one in self.events]}
        return {**vars(self), "loader": vars(self.loader), **lists}  # asdict copies deeply, and takes long

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """`ValueError` if it is no such value."""
        try:
            rest = dict(value)
            rest["loader"] = LoaderTimes(**value["loader"])
            rest["windows"] = tuple(StepTimes(**one) for one in value["windows"])
            rest["events"] = tuple(TraceEvent(**one) for one in value["events"])
            return cls(**rest)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record of this version: {error}") from None

    def save(self, path: Path) -> None:
        """Write it, as `save_text` does."""
        save_text(path, json.dumps(self.to_json()))


class Recorder:
    """Keeps the last steps and 20,000 trace events of one rank. Used by the training thread.

    Args:
        name: of the record among those of the rank, such as "loop-000"; the same on all ranks.
        record_type: what the records are.
        most_steps: that are kept.
        folder: where records are saved; None or "": nowhere.
        now: seconds on the clock that steps are measured by.
        file_order: see `LoaderTimes`.
        about: what the records say of the run: "rank", "world_size" and other fields of `RankRecord`.
    """

    def __init__(
        self,
        name: str,
        record_type: type[RankRecord] = RankRecord,
        most_steps: int = MOST_STEPS,
        *,
        folder: str | None,
        now: Callable[[], float],
        file_order: bool,
        **about: Any,
    ) -> None:
        self._record_type, self._file_order = record_type, file_order
        self._about = about | {"host": socket.gethostname()}
        self._path = Path(folder) / f"{about['rank']:06d}-{name}.json" if folder else None
        self._steps: deque[StepTimes] = deque(maxlen=most_steps)
        self._events: deque[TraceEvent] = deque(maxlen=_MOST_EVENTS)
        self._offset = time.time() - now()
        self._num_steps, self._save_at = 0, _FIRST_SAVED
        self._loader_times: LoaderTimes | None = None
        self._first: LoaderStats | None = None
        """The loader's times after the first step: shares count from there on, without what starts."""

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
        if self._num_steps == 1:
            self._first = _stream_stats(loader)
        is_time = self._num_steps == self._save_at
        self._save_at *= 1 + is_time
        return is_time

    def record(self, loader: Any, *, events: bool = True, **latest: Any) -> RankRecord:
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


def save_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Errors only warn: a training must not end for want of a report."""
    part = path.with_suffix(".part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        warnings.warn(f"this rank's times could not be saved for dataflow doctor: {error}", stacklevel=3)


def _stats_of(loader: Any) -> Any:
    return loader.stats() if callable(getattr(loader, "stats", None)) else None


def _stream_stats(loader: Any) -> LoaderStats | None:
    from dataflow.stats import LoaderStats

    stats = _stats_of(loader)
    return stats if isinstance(stats, LoaderStats) else None


def loader_times(
    loader: Any,
    before: LoaderTimes | None = None,
    *,
    since: LoaderStats | None = None,
    file_order: bool = False,
) -> LoaderTimes:
    """Return what a loader's `stats()` say; little of a loader that is not ours.

    Args:
        loader: of any kind, or what serves its loops.
        before: what they said earlier. Worker processes that have ended cannot be asked any more.
        since: what they were when the first step was over, from where on shares count.
        file_order: see `LoaderTimes`.
    """
    from dataflow.stats import LoaderStats, WorkerStats

    stats = _stats_of(loader)
    cores = cores_of(rank_info())
    always: dict[str, Any] = {"cores": cores, "file_order": file_order}
    if isinstance(stats, WorkerStats):
        busy = busy_cores(stats.worker_pids)
        share = busy / cores if busy is not None else before.cores_busy if before else None
        reason = stats.workers_reason
        return LoaderTimes(stats.workers, stats.stall_share, reason=reason, cores_busy=share, **always)
    if not isinstance(stats, LoaderStats):
        return LoaderTimes("other", file_order=file_order)
    batching = getattr(loader, "batching", None)
    numbers = (stats.since(since) if since else stats).flat()
    name = type(batching).__name__ if batching else ""
    return shard_times(stats.to_json(), numbers, batching=name, **always)


def shard_times(
    figures: Mapping[str, Any],
    numbers: Mapping[str, float],
    *,
    cores: float,
    batching: str = "",
    file_order: bool = False,
) -> LoaderTimes:
    """Return what the figures of a loader over shards say.

    Args:
        figures: `to_json()` of its `LoaderStats`.
        numbers: their `flat()` in the time that shares are of.
        cores: of the rank.
        batching: as `LoaderTimes` has it.
        file_order: as there.
    """

    def share(name: str, of: float) -> float | None:
        return numbers.get(name, 0.0) / of if of > 0 else None

    def busy(stage: str) -> float | None:
        value = share(f"{stage}.busy_s", numbers.get(f"{stage}.threads", 0.0) * elapsed_s)
        return None if value is None else min(1.0, value)

    elapsed_s, workers = numbers.get("elapsed_s", 0.0), str(figures.get("workers", ""))
    build_cores, cache = share("build.cpu_s", elapsed_s), figures.get("cache", {})
    is_cached = cache.get("hits", 0) + cache.get("misses", 0) > 0
    return LoaderTimes(
        "shards",
        share("starved_s", elapsed_s) or 0.0,
        read_busy=busy("read"),
        build_busy=busy("build"),
        reason=str(figures.get("depth_reason", "")),
        store="cached" if is_cached else "remote" if numbers.get("in_flight_limit") else "local",
        batching=batching,
        builders=workers,
        num_builders=int(numbers.get("build.threads", 0)),
        build_cores=build_cores,
        few_chunks=share("few_chunks_s", elapsed_s),
        # Actors compute elsewhere.
        cores_busy=None if build_cores is None or workers == "ray" else build_cores / cores,
        memory_held=share("memory.peak_bytes", numbers.get("memory.limit_bytes", 0.0)),
        cores=cores,
        file_order=file_order,
    )


def busy_cores(pids: Sequence[int], proc: Path = Path("/proc")) -> float | None:
    """Cores that running processes have kept busy since each began; None without one."""
    second = os.sysconf("SC_CLK_TCK")
    busy = []
    with suppress(OSError):  # those of an epoch that is over have ended
        now = float((proc / "uptime").read_text().split()[0])
        for pid in pids:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            user, system, began = (int(fields[at]) / second for at in (11, 12, 19))
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
