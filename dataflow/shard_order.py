"""Datasets with an order of their own, and that order in the place where frameworks look for a sampler.

The order is a `DistributedSampler` because its loader deals samples out to ranks by itself: Lightning puts
its own in the place of any other kind of sampler, and tells this one the epoch. Nobody but the loader reads
in this order: to iterate over it is an error, so that a framework that took the dataset and this sampler
into a loader of its own (as Accelerate does) cannot train on other samples than were planned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler, SequentialSampler

from dataflow.tables import Shown

_NOT_READ = (
    "a loader over shards is iterated over (and measured) itself, not through its sampler or in another "
    "loader. With Accelerate, use dataflow.integrations.accelerate.prepare_loader(accelerator, loader), and "
    "to go on inside an epoch accelerator.load_state or load_state_dict. The Trainer of transformers skips "
    "batches after dataflow.integrations.transformers.resume(trainer)"
)


class Sharded(Shown):
    """Base of datasets that have an order of their own: `ShardedDataset`, `Mixture`.

    Not in their modules: a loader over any other dataset imports neither them nor pyarrow and pandas, which
    would cost it 0.3 s and 40 MB.
    """

    @property
    def commit(self) -> str:
        """Return which commit of a repository its samples are of; "": of none, or of several."""
        return ""


class ShardOrder(DistributedSampler[int]):
    """`.sampler` of a `DataLoader` over shards.

    A `DataLoader` that is given this order, or a batch sampler over it, has the settings of its stream,
    whatever else it is given.

    Args:
        stream: the loader's `StreamLoader`.
    """

    def __init__(self, stream: Any) -> None:
        # Not DistributedSampler's: it asks torch.distributed for a rank now, and the dataset for a length.
        self._stream = stream
        self._ahead = 0

    def over(self, stream: Any) -> ShardOrder:
        """The same of another `StreamLoader`."""
        order = copy.copy(self)
        order._stream = stream
        return order

    @property
    def settings(self) -> Any:
        """The `StreamSettings` of the loader whose order it is."""
        return self._stream.settings

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs this epoch; after a state was loaded, counted from the state's epoch on.

        Frameworks count from 0 in a new process, or call again for the epoch that the state is in. That is
        the one they had named: in a cycle, beside a longer loader, this one has begun others by itself since.
        """
        stream = self._stream
        if stream.is_taken_ahead(epoch + self._ahead):
            return
        if stream.resumed:
            named = stream.epoch if stream.epoch_named is None else stream.epoch_named
            if epoch != named + 1 or not (stream.nothing_left or stream.epoch > named):
                self._ahead = named - epoch
                return
            self._ahead = 0
        stream.set_epoch(epoch + self._ahead)
        stream.epoch_named = epoch + self._ahead

    def __iter__(self) -> Iterator[int]:
        raise TypeError(_NOT_READ)

    def __len__(self) -> int:
        raise TypeError(_NOT_READ)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that runs, or runs next."""
        return int(self._stream.epoch)

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The dataset of the loader."""
        return self._stream.dataset

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed of the order."""
        return int(self._stream.seed)

    @property
    def shuffle(self) -> bool:  # type: ignore[override]
        """Return whether the order is another one than that of the shards."""
        return bool(self._stream.shuffle.kind != "none")

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Return whether the last, incomplete global batch is left out."""
        return bool(self._stream.tail == "drop")

    @property
    def remainder(self) -> int:
        """Samples of the next loop's last batch of all ranks that come for the first time.

        0: as many as it has. -1: it has samples besides which do not lie at its end, or units that are none.
        """
        return int(self._stream.remainder)

    @property
    def nothing_left(self) -> bool:
        """True if no batches are left of the epoch that the next loop runs, after a state was loaded."""
        return bool(self._stream.nothing_left)

    def is_after(self, epoch: int, num_batches: int) -> bool:
        """Return whether the next loop goes on after so many batches of an epoch on this rank."""
        return bool(self._stream.is_after(epoch, num_batches))

    def begin_next(self, epoch: int) -> None:
        """Let the next loop run the epoch after the present one, which a framework calls `epoch`."""
        self._stream.set_epoch(self._stream.epoch + 1)
        self._ahead = self._stream.epoch - epoch

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Ranks that get different batches."""
        return int(self._stream.topology.data_world_size)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The number of this process among them."""
        return int(self._stream.topology.data_rank)


def order_given(sampler: Any, batch_sampler: Any) -> ShardOrder | None:
    """The order that a framework hands back, as it is or inside a batch sampler of its own; None: none."""
    order = getattr(batch_sampler, "sampler", None) if sampler is None else sampler
    return order if isinstance(order, ShardOrder) else None


def is_file_order(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler is that of the dataset as it lies, which `shuffle=False` is here.

    Lightning puts it into a loader that it makes anew for `overfit_batches`.
    """
    return type(sampler) is SequentialSampler and sampler.data_source is dataset
