"""The engine of a `DataLoader` over any dataset that is not sharded: torch's loader with our iterators.

It holds nothing of its own, as the loader must not be part of a cycle: what loops share is the loader's
`DropInState`, and persistent workers end with the loader that keeps their iterator.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader as TorchDataLoader

from dataflow.workers.fetching import FetchIterator, MainIterator, WorkerLoader

if TYPE_CHECKING:
    from dataflow.progress.observer import EpochPosition
    from dataflow.stats import WorkerStats
    from dataflow.workers.iterator import WorkerIterator


def checked_workers(workers: Any, num_workers: int, context: Any) -> str:
    """`workers=`, if it goes with the other arguments. Raises `ValueError` saying why not.

    A context whose `Process` is a thread, such as that of MONAI's `ThreadDataLoader`, asks for threads.
    """
    if workers not in (None, "process", "thread"):
        raise ValueError(
            f'over datasets that are not sharded workers must be "process" or "thread", got {workers!r}'
        )
    if workers == "thread" and num_workers == 0:
        raise ValueError('workers="thread" needs num_workers > 0')
    kind = getattr(context, "Process", None)
    if num_workers and isinstance(kind, type) and issubclass(kind, threading.Thread):
        if workers == "process":
            raise ValueError(
                'workers="process" contradicts a multiprocessing_context whose Process is a thread'
            )
        return "thread"
    if workers == "thread" and context is not None:
        raise ValueError('multiprocessing_context cannot be used with workers="thread"')
    return workers or "process"


class DropInEngine:
    """Serves batches of map-style and iterable datasets, as `StreamLoader` those of shards."""

    read_pause = None

    def __init__(self, loader: WorkerLoader) -> None:
        self._loader, self._state = loader, loader._drop_in

    def warm_up(self) -> None:
        """Start what worker processes will come from, without waiting for it."""
        from dataflow.workers.processes import begin_to_start

        if self._loader.num_workers and self._loader.workers == "process":
            begin_to_start(self._loader)

    def __len__(self) -> int:
        """Return the number of batches as torch counts them. `TypeError` where it cannot."""
        return TorchDataLoader.__len__(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if self.resumed or getattr(loader._iterator, "ends_with_epoch", False):
            loader._iterator = None  # persistent workers stand elsewhere, or have ended
        began = time.perf_counter()
        iterator = cast("FetchIterator", TorchDataLoader.__iter__(loader))
        self._state.meter.begins(began)
        if (observer := self._state.observer) is not None:
            iterator.observer = observer.begin(
                self._state, max(0, self._state.progress.epoch), self._position
            )
        return iterator

    def new_iterator(self) -> MainIterator | WorkerIterator:
        """An iterator that begins an epoch, or goes on where a loaded state says."""
        from dataflow.workers.iterator import WorkerIterator

        state = self._state
        if self._loader.num_workers == 0:
            main = MainIterator(self._loader)
            state.latest = weakref.ref(main)
            return main
        self._loader.check_worker_number_rationality()
        closed = state.times_closed
        iterator = WorkerIterator(self._loader)
        state.iterators.add(iterator)
        if closed != state.times_closed:  # by another thread, which saw no iterator
            iterator.close()
        state.latest = weakref.ref(iterator)
        return iterator

    @property
    def resumed(self) -> bool:
        """Return whether the next loop goes on where a loaded state says."""
        return self._state.progress.loaded is not None

    def _position(self) -> EpochPosition:
        """Return where the loop begins that was asked for last."""
        from dataflow.progress.observer import EpochPosition

        loader: Any = self._loader
        length, num_batches = loader._IterableDataset_len_called, None
        with suppress(Exception):  # of whoever wrote the dataset: it has no length
            num_batches = len(self)
        loader._IterableDataset_len_called = length  # else torch warns where it is exceeded
        progress = self._state.progress
        return EpochPosition(progress.epoch, progress.batches, num_batches)

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs this epoch; sampler, batch sampler and dataset are told where they want to know.

        A loaded position is kept where it is in this epoch. Of another epoch, it is left: what remains of
        that is passed over, and what decides orders stands as if it had been delivered.
        """
        from dataflow.workers.samplers import parts

        if not isinstance(epoch, Integral) or epoch < 0:
            raise ValueError(f"epoch must be an integer >= 0, got {epoch!r}")
        self._state.set_epoch(int(epoch), self._loader)
        loader: Any = self._loader
        members = [loader.sampler, *parts(loader._index_sampler), loader.dataset]
        for part in {id(part): part for part in members}.values():
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop begun last stands."""
        return self._state.progress.to_json(self._loader)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on there. `ValueError`, and nothing changes, for what fits no such loader."""
        from dataflow.workers.state import progress_from

        self._state.load(progress_from(state, self._loader), self._loader)

    def stats(self) -> WorkerStats:
        """Return a snapshot of the counts; cheap."""
        self._state.workers = self._loader.num_workers, self._loader.workers
        return self._state.stats()

    def close(self) -> None:
        """End the workers of all loops. Idempotent."""
        self._loader._iterator = None
        self._state.times_closed += 1
        for iterator in list(self._state.iterators):
            iterator.close()
