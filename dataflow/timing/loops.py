"""A plain loop over a `DataLoader`, for `dataflow doctor`: how long each batch was waited for.

Where no `GradSchedule` runs, nobody tells when gradients travel or the optimizer steps, so a step has two
parts: waiting for its batch, and the rest. Loops are watched only where `dataflow doctor` asked for it.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataflow.timing import VARIABLE
from dataflow.timing.records import FIRST_SAVED, IN_SCHEDULES, LoaderTimes, RankRecord, loader_times
from dataflow.timing.window_times import SPANS, WINDOWS, Span, WindowTimes
from sharding.topology.topology import Topology

_SERIAL = itertools.count()
"""Of loaders that this process looped over: one file each."""


class _OptimizerSteps:
    """How often torch's optimizers stepped in this process since somebody asked."""

    def __init__(self) -> None:
        self.count = 0
        self._begun = False

    def begin(self) -> None:
        """Count from now on."""
        if not self._begun:
            self._begun = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.count += 1


_STEPS = _OptimizerSteps()


class Loop:
    """The batches of one loader over all its epochs; the last 2,000 are kept. Used by the training thread.

    Args:
        folder: where the record goes.
        now: seconds on a clock that only goes forward.
    """

    def __init__(self, folder: str, now: Any = time.perf_counter) -> None:
        self._now = now
        self._offset = time.time() - now()
        self._rank, self._world_size = _place()
        self._path = Path(folder) / f"{self._rank:06d}-loop-{next(_SERIAL):03d}.json"
        self._windows: deque[WindowTimes] = deque(maxlen=WINDOWS)
        self._spans: deque[Span] = deque(maxlen=SPANS)
        self._ended, self._save_at = 0, FIRST_SAVED
        self._loader_times: LoaderTimes | None = None
        self._optimizer_steps = self._steps_before = 0
        _STEPS.begin()
        self._under_way: tuple[float, float] | None = None
        """When the present batch was asked for, and when it came."""

    def next_of(self, batches: Iterator[Any], loader: Any) -> Any:
        """The next batch; the step on the one before is over."""
        self._step_ended(loader)
        asked = self._now()
        try:
            batch = next(batches)
        except BaseException:
            self.save(loader)
            raise
        self._under_way, self._steps_before = (asked, self._now()), _STEPS.count
        return batch

    def left(self, loader: Any) -> None:
        """The loop was left, maybe in the middle of a step: that one is not counted."""
        self._under_way = None
        self.save(loader)

    def save(self, loader: Any) -> None:
        """Write the record, with what the loader says of itself; without batches, too."""
        self._loader_times = loader_times(loader, self._loader_times)
        record = RankRecord(
            self._rank,
            self._world_size,
            socket.gethostname(),
            model="",
            strategy="",
            device="",
            loader=self._loader_times,
            windows=tuple(self._windows),
            spans=tuple(self._spans),
            in_schedule=False,
            optimizer_steps=self._optimizer_steps,
        )
        record.save(self._path)

    def _step_ended(self, loader: Any) -> None:
        if self._under_way is None:
            return
        (asked, came), self._under_way, now = self._under_way, None, self._now()
        number = self._ended
        self._optimizer_steps += _STEPS.count - self._steps_before
        self._windows.append(WindowTimes(number, 1, came - asked, 0.0, now - came, None, 0.0))
        for lane, name, since, until in (
            ("window", f"batch {number}", asked, now),
            ("wait", "data", asked, came),
        ):
            self._spans.append(Span(lane, name, since + self._offset, until + self._offset))
        self._ended += 1
        if self._ended == self._save_at:
            self._save_at *= 2
            self.save(loader)


class Watched:
    """An iterator over a loader's batches, and all else that the loader's own iterator is."""

    def __init__(self, batches: Any, loader: Any, loop: Loop) -> None:
        self._batches, self._loader, self._loop = batches, loader, loop
        weakref.finalize(self, loop.left, loader)  # a loop that is left by `break` tells nobody

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> Any:
        return self._loop.next_of(self._batches, self._loader)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_LOOPS: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()


def watched(batches: Any, loader: Any) -> Any:
    """What iterates over the loader's batches, watched where `dataflow doctor` asked for it."""
    folder = os.environ.get(VARIABLE)
    if not folder or loader in IN_SCHEDULES or torch.utils.data.get_worker_info() is not None:
        return batches
    if loader not in _LOOPS:
        _LOOPS[loader] = Loop(folder)
    return Watched(batches, loader, _LOOPS[loader])


def _place() -> tuple[int, int]:
    """Number of this rank, and of all."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        place = Topology.detect()
    except ValueError:
        return 0, 1
    return place.rank, place.world_size
