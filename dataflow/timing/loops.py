"""A plain loop over a `DataLoader`, for `dataflow doctor`: how long each batch was waited for.

With `--headspace` its batches are replaced by ones from memory once it is measured (`HeadspaceLoop`).
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
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataflow.timing import HEADSPACE, ROUND, VARIABLE
from dataflow.timing.headspace import WARM_UP, BatchStock, HeadspaceRecord, ReplayedEpoch, wait_for_device
from dataflow.timing.records import IN_SCHEDULES, MOST_STEPS, RankRecord, Recorder, StepTimes
from dataflow.topology_exchange import rank_and_world_size

_SERIAL = itertools.count()
"""Number of loaders that this process looped over: one file each."""


class _OptimizerSteps:
    """The number of steps of torch's optimizers in this process since somebody asked."""

    def __init__(self) -> None:
        self.count = 0
        self._begun = False

    def begin(self) -> None:
        """Count steps from now on."""
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
        most_steps: that are kept.
    """

    _name = "loop"
    _record_type: type[RankRecord] = RankRecord

    def __init__(
        self, folder: str, now: Callable[[], float] = time.perf_counter, *, most_steps: int = MOST_STEPS
    ) -> None:
        self._now = now
        rank, world_size = rank_and_world_size()
        self._recorder = Recorder(
            f"{self._name}-{next(_SERIAL):03d}",
            self._record_type,
            most_steps,
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
        """The times when the present batch was asked for, and when it came."""

    def begin(self, loader: Any, engine: Any) -> Any:
        """Return what iterates over an epoch's batches."""
        return iter(engine)

    def next_of(self, batches: Iterator[Any], loader: Any) -> Any:
        """The next batch; the step on the one before is over."""
        self._step_ended(loader)
        return self._take(batches, loader)

    def _take(self, batches: Iterator[Any], loader: Any) -> Any:
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
        """Write the record of the loop."""
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
        self._keep(times, loader)

    def _keep(self, times: StepTimes, loader: Any) -> None:
        if self._recorder.keep_step(times, loader):
            self.save(loader)


class HeadspaceLoop(Loop):
    """A loop whose batches are the loader's own at first, then replayed ones. Used by the training thread.

    Args:
        folder: where the record goes.
        steps: to measure, of either kind.
        now: seconds on a clock that only goes forward.
    """

    _name = "headspace"
    _record_type = HeadspaceRecord

    def __init__(self, folder: str, steps: int, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(folder, now, most_steps=2 * (WARM_UP + steps))
        self._planned, self._stock = steps, BatchStock()
        self._position = 0
        """Batches handed out in this epoch."""
        self._epoch_batches: int | None = None
        """Number of batches of an epoch that the loader ended itself."""
        self._closed = self._ended = False

    @property
    def replays(self) -> bool:
        """Return whether batches come from memory: as soon as the loader's own are measured."""
        return self._num_batches >= WARM_UP + self._planned

    @property
    def is_measured(self) -> bool:
        """Return whether nothing is left to measure."""
        return self._num_batches >= 2 * (WARM_UP + self._planned)

    def begin(self, loader: Any, engine: Any) -> Any:
        """The loader's own as long as they are wanted."""
        self._position = 0
        return ReplayedEpoch(loader) if self.replays else iter(engine)

    def next_of(self, batches: Iterator[Any], loader: Any) -> Any:
        """The next batch; the step on the one before is over.

        Raises:
            StopIteration: the epoch has as many batches as one of the loader.
            SystemExit: all is measured; the training ends, for it no longer learns from its data.
        """
        if (self._num_batches + 1) % ROUND == 0 or (self.replays and self._stock.is_empty):
            wait_for_device()
        self._step_ended(loader)
        batch = self._replayed(loader) if self.replays else self._live(batches, loader)
        self._position += 1
        return batch

    def save(self, loader: Any) -> None:
        """Write the record of the loop."""
        self._recorder.save(
            loader,
            optimizer_steps=self._optimizer_steps,
            steps=self._planned,
            batches=len(self._stock),
            shared=self._stock.shared,
            ended=self._ended,
        )

    def _keep(self, times: StepTimes, loader: Any) -> None:
        if times.window < 2 * (WARM_UP + self._planned):
            self._recorder.keep_step(times, loader)  # not saved now: that takes time beside the training
            if self.is_measured:
                self.save(loader)

    def _live(self, batches: Iterator[Any], loader: Any) -> Any:
        try:
            batch = self._take(batches, loader)
        except StopIteration:
            self._epoch_batches = self._position
            raise
        if self._num_batches < WARM_UP:
            self._stock.offer(batch)
        return batch

    def _replayed(self, loader: Any) -> Any:
        if not self._closed:
            self._closed = True
            self.save(loader)
            loader.close()  # its threads and processes would go on, to fill their queues
        if self.is_measured and self._optimizer_steps:  # what only evaluates goes on: a training may follow
            self._ended = True
            self.save(loader)
            raise SystemExit(0)
        if self._position == self._length(loader):
            self.save(loader)
            raise StopIteration
        if self._stock.is_empty:
            self._stock.fill()
        return self._take(iter((self._stock.take(),)), loader)

    def _length(self, loader: Any) -> int | None:
        """Batches of an epoch; None: it goes on until all is measured."""
        if self._epoch_batches is not None:
            return self._epoch_batches
        try:
            return len(loader)
        except TypeError:
            return self._position if self.is_measured else None


class WatchedIterator:
    """An iterator over a loader's batches, and all else that the loader's own iterator is."""

    def __init__(self, batches: Any, loader: Any, loop: Loop) -> None:
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


_LOOPS: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()


def watched(engine: Any, loader: Any) -> Any:
    """Return an iterator over a loader's batches, watched where `dataflow doctor` asked for it."""
    folder, steps = os.environ.get(VARIABLE), os.environ.get(HEADSPACE)
    if not folder or torch.utils.data.get_worker_info() is not None:
        return iter(engine)
    if not steps and loader in IN_SCHEDULES:
        return iter(engine)
    if loader not in _LOOPS:
        _LOOPS[loader] = HeadspaceLoop(folder, int(steps)) if steps else Loop(folder)
    loop = _LOOPS[loader]
    return WatchedIterator(loop.begin(loader, engine), loader, loop)
