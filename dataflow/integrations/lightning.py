"""Lightning's Trainer where it forgets the loader's state: loaders set up before a checkpoint is restored.

A checkpoint of Lightning has the states of its training loaders, and a resumed run loads them when it sets up
the loaders. Code that asks for `trainer.estimated_stepping_batches` (in `configure_optimizers`, for a
schedule of a known length) has them set up before the checkpoint is read. Lightning then forgets the states,
and the run begins its epoch anew without a word (Lightning-AI/pytorch-lightning issue 20550).
"""

from __future__ import annotations

from typing import Any

from dataflow.integrations.versions import needed_for, warn_if_untried

with needed_for(__name__, extra="lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

warn_if_untried("lightning", ("2.5", "2.6"))


def resume(trainer: Trainer) -> RestoreLoader:
    """Have a trainer load the states of its loaders, also where these were set up before the checkpoint.

    Needed where `trainer.estimated_stepping_batches` is used; elsewhere it changes nothing.

    Args:
        trainer: before `fit`. A second call changes nothing.

    Returns:
        The callback that was added.

    Examples:
        >>> trainer = Trainer(max_epochs=2)  # of lightning.pytorch
        >>> callback = resume(trainer)
        >>> trainer.fit(module, loader, ckpt_path="last.ckpt")
    """
    callbacks: list[Any] = trainer.callbacks
    for callback in callbacks:
        if isinstance(callback, RestoreLoader):
            return callback
    callbacks.append(added := RestoreLoader())
    return added


class RestoreLoader(Callback):  # type: ignore[misc]
    """The callback that `resume` adds: states of loaders that are left when training starts are loaded."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load them, and begin to iterate again: what was begun before stands elsewhere."""
        loop: Any = trainer.fit_loop
        if loop.restarting and loop._combined_loader_states_to_load:
            loop._load_combined_loader_states()
            iter(loop._data_fetcher)
