"""Transformers' `Trainer` over shards: a checkpoint holds the loader's place, where a resumed run goes on.

`model_inputs` makes the arguments of models that see pictures, from packed rows.

`Trainer` counts optimizer steps. To resume inside an epoch it takes the loader's dataset and sampler into a
loader of its own that drops the batches which were trained before; a loader over shards refuses that.
`resume` adds a callback that keeps the loader's state in `trainer_state.json` and loads it before the first
batch, and has `Trainer` take the loader as it then stands. No batch is read to be dropped: O(1).

What `Trainer` counts by itself stays its own: the learning rate, the number of steps, when the training ends.
"""

from __future__ import annotations

import warnings
from typing import Any

from dataflow.integrations.versions import needed_for, warn_if_untried

with needed_for(__name__, extra="transformers"):
    from transformers import TrainerCallback, trainer as trainer_module
    from transformers.trainer_callback import ExportableState

from dataflow.integrations.accelerate import ADDED
from dataflow.integrations.vision_inputs import model_inputs as model_inputs
from dataflow.shard_order import ShardOrder

warn_if_untried("transformers", ("4.55", "5.24"))
_WITHOUT_STATE = (
    "the checkpoint that Trainer resumes from holds no place of the loader, as it was saved without "
    "dataflow.integrations.transformers.resume(trainer), or is resumed without it; "
    "TrainingArguments(ignore_data_skip=True) begins the epoch anew"
)


def resume(trainer: Any) -> LoaderStateCallback:
    """Keep the place of a trainer's loader over shards in its checkpoints, and go on there.

    The loader may be prepared (`dataflow.integrations.accelerate.prepare_loader`) or not. Other loaders stay
    Trainer's own matter. With `TrainingArguments(ignore_data_skip=True)` nothing is loaded, and the epoch
    begins anew.

    Args:
        trainer: a `transformers.Trainer`, before `train`. A second call changes nothing.

    Returns:
        The callback that was added.

    While it trains, `ValueError` is raised where a checkpoint inside an epoch was saved without the callback,
    or over other data (as by `DataLoader.load_state_dict`). A warning says where `Trainer`, which counts
    steps, takes the checkpoint to be at another place than the data, as with other batches.

    Examples:
        >>> trainer = MyTrainer(model, arguments)  # its get_train_dataloader returns a DataLoader over shards
        >>> callback = resume(trainer)
        >>> result = trainer.train(resume_from_checkpoint=True)
    """
    trainer_module.skip_first_batches = _skip_first_batches
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LoaderStateCallback):
            return callback
    callback = LoaderStateCallback()
    trainer.add_callback(callback)
    return callback


def _skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Skip as Accelerate does, but for loaders over shards, which stand where they should.

    `Trainer` has no other seam between the loader and its skip: it looks this function up in its module.
    """
    if not _is_over_shards(loader):
        return _accelerate_skips(loader, num_batches)
    if not _own(loader).resumed:
        raise ValueError(_WITHOUT_STATE)
    return loader


_accelerate_skips = trainer_module.skip_first_batches


def _own(loader: Any) -> Any:
    """The loader of this package in what Accelerate may have wrapped around it."""
    return getattr(loader, "base_dataloader", loader)


def _is_over_shards(loader: Any) -> bool:
    return isinstance(getattr(_own(loader), "sampler", None), ShardOrder)


class LoaderStateCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """The callback that `resume` adds: the loader's state in each checkpoint, loaded when training begins."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._epoch = 0
        """Trainer's, that of the checkpoint."""
        self._is_elsewhere = False
        """True if the epoch that runs begins where Trainer believes itself elsewhere."""

    def state(self) -> dict[str, Any]:
        """Return what transformers writes into `trainer_state.json`, on the ranks that write.

        Where transformers restores callbacks, "attributes" become the callback's; nobody reads them.
        """
        return {"args": {}, "attributes": {"place": self._place()}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Load the place that the checkpoint holds."""
        self._loader, self._is_elsewhere = None, False
        callbacks, name, before = state.stateful_callbacks, LoaderStateCallback.__name__, "KeepPlace"
        stored = callbacks.pop(before, None) or callbacks.get(name)  # checkpoints of before have its old name
        callbacks[name] = self.state()  # transformers asks for it before it saves
        if not _is_over_shards(train_dataloader):
            return
        self._loader = train_dataloader
        place = stored["attributes"]["place"] if stored else None
        if state.global_step and place is not None and not args.ignore_data_skip:
            self._resume(place, state.global_step, args.gradient_accumulation_steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let what is left of the data's epoch come next, where Trainer ended its own before."""
        if self._is_elsewhere:
            self._epoch += 1
            self._go_on(self._place(), is_begun=False)
        self._is_elsewhere = False

    def _resume(self, place: dict[str, Any], num_steps: int, num_accumulated: int) -> None:
        loader = _own(self._loader)
        num_batches = _length(loader)
        # Trainer counts epochs from where it believes to be, and tells the loader itself, not its order.
        loader.__dict__["set_epoch"] = loader.sampler.set_epoch
        if num_batches is None:  # Trainer takes all steps for one epoch
            self._go_on(place, is_begun=True)
            return
        steps = max(-(-num_batches // num_accumulated), 1)
        self._epoch, done = num_steps // steps, num_steps % steps * num_accumulated
        self._go_on(place, is_begun=done > 0)
        if not loader.sampler.is_after(self._epoch, done):
            self._is_elsewhere = True
            warnings.warn(
                f"Trainer counts {steps} steps an epoch, so that step {num_steps} is batch {done} of epoch "
                f"{self._epoch}; the checkpoint's data ends at another place (epoch {loader.epoch}, "
                f"{loader.batches_left} batches left), as with another number of samples a step, or epochs "
                "of different lengths. The samples go on exactly; where Trainer's epochs begin, and how many "
                "steps are trained before num_train_epochs are over, differ: look at max_steps",
                stacklevel=2,
            )

    def _go_on(self, place: Any, *, is_begun: bool) -> None:
        """Let the next loop go on at a place, also where Trainer's epoch begins and the data's has ended.

        It takes an epoch without a batch for the end of the data.
        """
        loader = _own(self._loader)
        loader.load_state_dict(place)
        if not is_begun and loader.sampler.nothing_left:
            loader.sampler.begin_next(self._epoch)

    def _place(self) -> dict[str, Any] | None:
        if self._loader is None:
            return None
        return {name: value for name, value in self._loader.state_dict().items() if name not in ADDED}


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
