"""Hugging Face Accelerate around this package's loaders.

`Accelerator.prepare` takes a loader's dataset and settings into torch's `DataLoader`, inside a wrapper that
shards, moves batches to the device and tells gradient accumulation where an epoch ends. `prepare_loader`
leaves all that to Accelerate, and puts a loader of the user's own class into the wrapper: with its hand-over
from workers, and with a state that `Accelerator.save_state` and `load_state` keep.

Over shards the loader deals samples out to ranks itself, so that the wrapper shards nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from dataflow.integrations.versions import needed_for, warn_if_untried
from dataflow.loader import DataLoader
from dataflow.shard_order import ShardOrder

with needed_for(__name__, extra="transformers"):
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

warn_if_untried("accelerate", ("1.10", "1.15"))
_REPLACED = ("dataset", "_dataset_kind", "sampler", "batch_sampler", "batch_size", "drop_last", "generator")
_FINISHED = "_iterator_finished"
"""Accelerate's mark in a state: the last batch of the epoch is out."""
_ITERATION = "iteration"
ADDED = frozenset((_FINISHED, _ITERATION))
"""Entries that prepared loaders add to the state."""


def prepare_loader(
    accelerator: Accelerator, loader: DataLoader, *, device_placement: bool | None = None
) -> DataLoader:
    """Return what `accelerator.prepare(loader)` does, with a loader of this package inside.

    Args:
        accelerator: used as it is configured, except that states are the loader's own whatever
            `use_stateful_dataloader` says.
        loader: over any dataset. It is not used itself, unless it is over shards.
        device_placement: whether batches are moved to the accelerator's device; None: as it is configured.

    Returns:
        Accelerate's `DataLoaderShard` or `DataLoaderDispatcher`; `.base_dataloader` is the loader inside.

    Raises:
        TypeError: `loader` is not one of this package.

    Examples:
        >>> dataset = ShardedDataset("rows/*.parquet")
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> loader = prepare_loader(accelerator, DataLoader(dataset, batch_size=2, shuffle=True))
        >>> for batch in loader:
        ...     accelerator.backward(mse_loss(model(batch["x"]), batch["y"]))
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare_loader is for dataflow.DataLoader, got {type(loader).__name__}; use accelerator.prepare"
        )
    order: Any = loader.sampler
    if isinstance(order, ShardOrder):
        # It is not to be taken apart: Accelerate makes a wrapper for another one.
        wrapper = accelerator.prepare_data_loader(TorchDataLoader([0]), device_placement)  # type: ignore[arg-type]
        base = loader
        loader.batch_sampler.num_processes = accelerator.num_processes  # type: ignore[union-attr]
        # `begin` knows better than the dataset's length what the last batch repeats.
        wrapper._drop_last = True
    else:
        wrapper = accelerator.prepare_data_loader(loader, device_placement)
        base = copy.copy(loader)
        base.__dict__.update({name: wrapper.base_dataloader.__dict__[name] for name in _REPLACED})
    kind = _Dispatcher if type(wrapper) is DataLoaderDispatcher else _Shard
    prepared: Any = kind.__new__(kind)
    prepared.adopt(wrapper, base)
    accelerator._dataloaders[accelerator._dataloaders.index(wrapper)] = prepared
    return prepared  # type: ignore[no-any-return]


class _Keeping:
    """A wrapper whose state holds the epoch too, which Accelerate counts and sets samplers by."""

    def adopt(self, wrapper: Any, base: DataLoader) -> None:
        self.__dict__.update(wrapper.__dict__)
        self.base_dataloader: Any = base
        self.use_stateful_dataloader = True  # so that save_state and load_state ask for states
        self._is_accelerate_prepared = True
        self.end_of_dataloader = False
        self.iteration: int
        self._update_state_dict()

    def begin(self) -> None:
        """Begin as Accelerate does. It cuts the last batch that it gathers for metrics off at `remainder`."""
        super().begin()  # type: ignore[misc]
        if isinstance(order := getattr(self.base_dataloader, "sampler", None), ShardOrder):
            self.remainder = order.remainder

    def _update_state_dict(self) -> None:
        ended = bool(self.end_of_dataloader)
        marks = {_FINISHED: ended, _ITERATION: self.iteration + ended}
        self.dl_state_dict = {**self.base_dataloader.state_dict(), **marks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not state.keys() >= ADDED:
            raise ValueError(f"not a state of a prepared DataLoader: {str(state)[:200]}")
        self.base_dataloader.load_state_dict({k: v for k, v in state.items() if k not in ADDED})
        self.iteration = state[_ITERATION]
        self.dl_state_dict = dict(state)


class _Shard(_Keeping, DataLoaderShard):  # type: ignore[misc]
    pass


class _Dispatcher(_Keeping, DataLoaderDispatcher):  # type: ignore[misc]
    def _fetch_batches(self, iterator: Any) -> Any:
        # A batch for every process is fetched while those before are handed out: the state is that of now.
        if not self.end_of_dataloader:
            self._update_state_dict()
        state = self.dl_state_dict
        try:
            return super()._fetch_batches(iterator)
        finally:
            self.dl_state_dict = state
