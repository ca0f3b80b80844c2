"""A plain loop over a `DataLoader`, for `dataflow doctor`: how long each batch was waited for.

With `--headspace` its batches are replaced by ones from memory once it is measured (`DataStallLoops`).
Where no `GradSchedule` runs, nobody tells when gradients travel or the optimizer steps, so a step has two
parts: waiting for its batch, and the rest. Loops are watched only where `dataflow doctor` asked for it.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataflow.progress.observer import DATA_STALL
from dataflow.telemetry.timing import ROUND, VARIABLE
from dataflow.telemetry.timing.data_stall import WARM_UP, BatchStock, DataStallRecord, wait_for_device
from dataflow.telemetry.timing.records import MOST_STEPS, Recorder, StepRecord, StepTimes
from dataflow.topology_exchange import rank_and_world_size
from prefetch.memory.lifetimes import InlineFinalizer

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


class LoopRecorder:
    """Records how long each batch of a loader was waited for, over all its loops; see `LoaderObserver`.

    Args:
        folder: where the record goes.
        loader: the loader.
        now: seconds on a clock that only goes forward.
        most_steps: that are kept.
    """

    _name = "loop"
    _record_type: type[StepRecord] = StepRecord

    def __init__(
        self,
        folder: str,
        loader: Any,
        now: Callable[[], float] = time.perf_counter,
        *,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self.now = now
        rank, world_size = rank_and_world_size()
        self._recorder = Recorder(
            f"{self._name}-{next(_SERIAL):03d}",
            loader,
            self._record_type,
            most_steps,
            folder=folder,
            now=now,
            rank=rank,
            world_size=world_size,
            in_schedule=False,
        )
        self._num_batches = self._optimizer_steps = 0
        _STEPS.begin()

    def begin(self, owner: Any, epoch: int, position: object) -> RecordedLoop:
        """See `LoaderObserver`."""
        return RecordedLoop(self, owner)

    def step_ended(self, asked_s: float, came_s: float, ended_s: float, *, steps: int, owner: Any) -> None:
        """Keep a step.

        Args:
            asked_s: when its batch was asked for.
            came_s: when that came.
            ended_s: when the next one was asked for.
            steps: of optimizers meanwhile.
            owner: what has the loader's `stats()`.
        """
        number, self._num_batches = self._num_batches, self._num_batches + 1
        self._optimizer_steps += steps
        times = StepTimes(
            window=number,
            microbatches=1,
            data_s=came_s - asked_s,
            compute_s=ended_s - came_s,
        )
        self._recorder.keep_event("window", f"batch {number}", asked_s, ended_s)
        self._recorder.keep_event("wait", "data", asked_s, came_s)
        self._keep(times, owner)

    def save(self, owner: Any) -> None:
        """Write the record."""
        self._recorder.save(owner, optimizer_steps=self._optimizer_steps)

    def _keep(self, times: StepTimes, owner: Any) -> None:
        if self._recorder.keep_step(times, owner):
            self.save(owner)


class RecordedLoop:
    """One loop that is recorded; see `LoopObserver`. Used by the training thread.

    A loop may be left in the middle of a step: that one is not counted.
    """

    def __init__(self, recorder: LoopRecorder, owner: Any) -> None:
        self._recorder, self._owner = recorder, owner
        self._under_way: tuple[float, float, int] | None = None
        """The times when the present batch was asked for and came, and the steps of optimizers before."""
        self._left = InlineFinalizer(self, partial(recorder.save, owner))

    def batch(self, asked_s: float) -> None:
        """Note that a batch is handed out: the step on the one before is over."""
        self.asked(asked_s)
        self._under_way = asked_s, self._recorder.now(), _STEPS.count

    def asked(self, asked_s: float) -> None:
        """Note that a batch is asked for."""
        if self._under_way is not None:
            (began_s, came_s, steps), self._under_way = self._under_way, None
            steps = _STEPS.count - steps
            self._recorder.step_ended(began_s, came_s, asked_s, steps=steps, owner=self._owner)

    def end(self, asked_s: float, error: BaseException | None = None) -> None:
        """Note that the loop has ended, or failed."""
        self._left.cancel()
        self.asked(asked_s)
        self._recorder.save(self._owner)


class DataStallLoops(LoopRecorder):
    """Loops whose batches are the loader's own at first, then replayed ones. Used by the training thread.

    Args:
        folder: where the record goes.
        loader: the loader.
        steps: to measure, of either kind.
        now: seconds on a clock that only goes forward.
    """

    _name = "headspace"
    _record_type = DataStallRecord

    def __init__(
        self, folder: str, loader: Any, steps: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(folder, loader, now, most_steps=2 * (WARM_UP + steps))
        self._planned, self._stock = steps, BatchStock()
        self.position = 0
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

    def next_of(self, batches: Iterator[Any], loop: RecordedLoop, loader: Any) -> Any:
        """The next batch; the step on the one before is over.

        Raises:
            StopIteration: the epoch has as many batches as one of the loader.
            SystemExit: all is measured; the training ends, for it no longer learns from its data.
        """
        if (self._num_batches + 1) % ROUND == 0 or (self.replays and self._stock.is_empty):
            wait_for_device()
        loop.asked(self.now())
        try:
            if self.replays:
                self._prepare(loader)
            asked_s = self.now()
            batch = self._stock.take() if self.replays else self._own(batches)
        except BaseException:
            self.save(loader)
            raise
        loop.batch(asked_s)
        if self._num_batches < WARM_UP:
            self._stock.offer(batch)
        self.position += 1
        return batch

    def save(self, owner: Any) -> None:
        """Write the record."""
        self._recorder.save(
            owner,
            optimizer_steps=self._optimizer_steps,
            steps=self._planned,
            batches=len(self._stock),
            shared=self._stock.shared,
            ended=self._ended,
        )

    def _keep(self, times: StepTimes, owner: Any) -> None:
        if times.window < 2 * (WARM_UP + self._planned):
            self._recorder.keep_step(times, owner)  # not saved now: that takes time beside the training
            if self.is_measured:
                self.save(owner)

    def _own(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except StopIteration:
            self._epoch_batches = self.position
            raise

    def _prepare(self, loader: Any) -> None:
        """Have a copy ready, unless the epoch or the measurement is over."""
        if not self._closed:
            self._closed = True
            self.save(loader)
            loader.close()  # its threads and processes would go on, to fill their queues
        if self.is_measured and self._optimizer_steps:  # what only evaluates goes on: a training may follow
            self._ended = True
            raise SystemExit(0)
        if self.position == self._length(loader):
            raise StopIteration
        if self._stock.is_empty:
            self._stock.fill()

    def _length(self, loader: Any) -> int | None:
        """Batches of an epoch; None: it goes on until all is measured."""
        if self._epoch_batches is not None:
            return self._epoch_batches
        try:
            return len(loader)
        except TypeError:
            return self.position if self.is_measured else None


class ReplayedBatches:
    """An iterator in the place of a loader's, and all else that the loader's own iterator is.

    Args:
        batches: the loader's own; none in an epoch that is all replayed.
        loader: the loader.
        loops: what hands out batches.
    """

    def __init__(self, batches: Any, loader: Any, loops: DataStallLoops) -> None:
        self._batches, self._loader, self._loops = batches, loader, loops
        self._loop = loops.begin(loader, 0, None)

    def __iter__(self) -> ReplayedBatches:
        return self

    def __next__(self) -> Any:
        return self._loops.next_of(self._batches, self._loop, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_LOOPS: weakref.WeakKeyDictionary[Any, DataStallLoops] = weakref.WeakKeyDictionary()


def replayed(engine: Any, loader: Any) -> Any:
    """Return an iterator over a loader's batches, for `dataflow doctor --headspace`."""
    folder, steps = os.environ.get(VARIABLE), os.environ.get(DATA_STALL)
    if not folder or not steps or torch.utils.data.get_worker_info() is not None:
        return iter(engine)
    if loader not in _LOOPS:
        _LOOPS[loader] = DataStallLoops(folder, loader, int(steps))
    loops = _LOOPS[loader]
    loops.position = 0
    return ReplayedBatches(iter(()) if loops.replays else iter(engine), loader, loops)
