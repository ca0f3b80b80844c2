"""A plain loop over a `DataLoader`, for `dataflow doctor`: how long each batch was waited for.

Where no `GradSchedule` runs, nobody tells when gradients travel or the optimizer steps, so a step has two
parts: waiting for its batch, and the rest. Loops are watched only where `dataflow doctor` asked for it.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataflow.timing import HEADSPACE, VARIABLE
from dataflow.timing.headspace import HeadspaceLoop
from dataflow.timing.records import IN_SCHEDULES, Recorder, StepTimes
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
    """The batches of one loader over all its epochs. Used by the training thread.

    Args:
        folder: where the record goes.
        now: seconds on a clock that only goes forward.
    """

    def __init__(self, folder: str, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        rank, world_size = _rank_and_world_size()
        self._recorder = Recorder(
            f"loop-{next(_SERIAL):03d}",
            folder=folder,
            now=now,
            rank=rank,
            world_size=world_size,
            model="",
            strategy="",
            device="",
            in_schedule=False,
        )
        self._num_batches = self._optimizer_steps = self._steps_before = 0
        _STEPS.begin()
        self._under_way: tuple[float, float] | None = None
        """When the present batch was asked for, and when it came."""

    def next_of(self, batches: Iterator[Any], loader: Any) -> Any:
        """The next batch; the step on the one before is over."""
        self._step_ended(loader)
        asked_at = self._now()
        try:
            batch = next(batches)
        except BaseException:
            self.save(loader)
            raise
        self._under_way, self._steps_before = (asked_at, self._now()), _STEPS.count
        return batch

    def left(self, loader: Any) -> None:
        """The loop was left, maybe in the middle of a step: that one is not counted."""
        self._under_way = None
        self.save(loader)

    def save(self, loader: Any) -> None:
        """Write the record."""
        self._recorder.save(loader, optimizer_steps=self._optimizer_steps)

    def _step_ended(self, loader: Any) -> None:
        if self._under_way is None:
            return
        (asked_at, came_at), self._under_way, now = self._under_way, None, self._now()
        number, self._num_batches = self._num_batches, self._num_batches + 1
        self._optimizer_steps += _STEPS.count - self._steps_before
        times = StepTimes(
            window=number,
            microbatches=1,
            data_s=came_at - asked_at,
            peers_s=0.0,
            compute_s=now - came_at,
            exposed_s=None,
            optimizer_s=0.0,
        )
        self._recorder.keep_event("window", f"batch {number}", asked_at, now)
        self._recorder.keep_event("wait", "data", asked_at, came_at)
        if self._recorder.keep_step(times, loader):
            self.save(loader)


class WatchedIterator:
    """An iterator over a loader's batches, and all else that the loader's own iterator is."""

    def __init__(self, batches: Any, loader: Any, loop: Loop | HeadspaceLoop) -> None:
        self._batches, self._loader, self._loop = batches, loader, loop
        weakref.finalize(self, loop.left, loader)  # a loop that is left by `break` tells nobody

    def __iter__(self) -> WatchedIterator:
        return self

    def __next__(self) -> Any:
        return self._loop.next_of(self._batches, self._loader)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_LOOPS: weakref.WeakKeyDictionary[Any, Loop | HeadspaceLoop] = weakref.WeakKeyDictionary()


def watched(engine: Any, loader: Any) -> Any:
    """What iterates over the batches of a loader's engine, watched where `dataflow doctor` asked for it."""
    folder, steps = os.environ.get(VARIABLE), os.environ.get(HEADSPACE)
    if not folder or torch.utils.data.get_worker_info() is not None:
        return iter(engine)
    if not steps and loader in IN_SCHEDULES:
        return iter(engine)
    if loader not in _LOOPS:
        _LOOPS[loader] = _headspace_loop(folder, int(steps)) if steps else Loop(folder)
    loop = _LOOPS[loader]
    batches = loop.begin(loader, engine) if isinstance(loop, HeadspaceLoop) else iter(engine)
    return WatchedIterator(batches, loader, loop)


def _headspace_loop(folder: str, steps: int) -> HeadspaceLoop:
    _STEPS.begin()
    return HeadspaceLoop(
        folder,
        steps=steps,
        rank_and_world_size=_rank_and_world_size(),
        optimizer_steps=lambda: _STEPS.count,
    )


def _rank_and_world_size() -> tuple[int, int]:
    """Number of this rank, and of all."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        topology = Topology.detect()
    except ValueError:
        return 0, 1
    return topology.rank, topology.world_size
