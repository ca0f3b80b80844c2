"""Our loaders in Hugging Face's Trainer: `get_train_dataloader` returns one."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem_kit import Numbers, make_shards, named, numbers_of
from forked_kit import exit_code_in_child
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow import DataLoader, Mixture

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

from dataflow.integrations.accelerate import prepare_loader
from dataflow.integrations.transformers import resume as keep_place

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = 22


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Recorder(torch.nn.Module):
    """Trains one weight, and remembers the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps: list[list[int]] = []

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps.append([int(number) for number in numbers.flatten()])
        return {"loss": self.layer(numbers).mean()}


class Given(Trainer):
    """A trainer whose training data comes from a given loader, its `loader`."""

    def __init__(self, make: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._make = make

    def get_train_dataloader(self) -> Any:
        self.loader = self._make(self.accelerator)
        return self.loader


def trained(make: Callable[[Any], Any], folder: Path, *, resume: str | None = None, **settings: Any) -> Any:
    trainer = trainer_of(make, folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.steps


def trainer_of(
    make: Callable[[Any], Any], folder: Path, *, keeps_place: bool = False, **settings: Any
) -> Any:
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = {"output_dir": str(folder), "num_train_epochs": 2, "save_strategy": "no", **quiet, **settings}
    given = {"eval_dataset": Numbers(4), "data_collator": named}
    trainer = Given(make, model=Recorder(), args=TrainingArguments(**arguments), **given)
    if keeps_place:
        keep_place(trainer)
    return trainer


def loaders(cls: Any, workers: int = 0) -> Callable[[Any], Any]:
    """Seeded where the trainer asks, so that all runs shuffle alike."""

    def make(accelerator: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        arguments = {"shuffle": True, "num_workers": workers, "collate_fn": named, "generator": generator}
        loader = cls(Numbers(SIZE), 4, **arguments)
        return (prepare_loader if cls is DataLoader else type(accelerator).prepare)(accelerator, loader)

    return make


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_sees_the_batches_that_it_sees_with_torch(
    tmp_path: Path, workers: int, accumulate: int
) -> None:
    settings = {"gradient_accumulation_steps": accumulate}
    ours = trained(loaders(DataLoader, workers), tmp_path, **settings)
    assert ours == trained(loaders(TorchDataLoader, workers), tmp_path, **settings)
    assert sorted(number for step in ours[:6] for number in step) == list(range(SIZE))


def test_a_loader_that_was_not_prepared_works_too(tmp_path: Path) -> None:
    steps = trained(lambda _: DataLoader(Numbers(SIZE), 4, collate_fn=named), tmp_path)
    assert steps == 2 * [[*range(SIZE)][at : at + 4] for at in range(0, SIZE, 4)]


def test_a_checkpoint_inside_an_epoch_resumes_with_the_next_batch(tmp_path: Path) -> None:
    whole = trained(loaders(DataLoader), tmp_path, save_strategy="steps", save_steps=4)
    assert trained(loaders(DataLoader), tmp_path, resume=str(tmp_path / "checkpoint-4")) == whole[4:]


def test_a_loader_over_shards_trains_in_its_order(tmp_path: Path) -> None:
    dataset = make_shards(tmp_path)
    with DataLoader(dataset, 4, shuffle=True, seed=3) as plain:
        expected = [numbers_of(batch) for _ in range(2) for batch in plain]

    def make(accelerator: Any) -> Any:
        loader = DataLoader(dataset, 4, shuffle=True, seed=3, collate_fn=named)
        return prepare_loader(accelerator, loader)

    assert trained(make, tmp_path / "out") == expected


# ---- shards: checkpoints that keep the loader's place ---------------------------------------------------


def over_shards(dataset: Any, batch_size: int = 4, *, prepared: bool = False, **given: Any) -> Any:
    """Makes loaders whose epochs have ten batches of 4."""

    def make(accelerator: Any) -> Any:
        loader = DataLoader(dataset, batch_size, shuffle=True, seed=3, collate_fn=named, **given)
        return prepare_loader(accelerator, loader) if prepared else loader

    return make


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_over_shards_resumes_with_the_next_batch_from_any_checkpoint(
    tmp_path: Path, prepared: bool, accumulate: int
) -> None:
    """Inside epochs, at their ends and in the last one; with evaluation in between."""
    make = over_shards(make_shards(tmp_path), prepared=prepared)
    settings: dict[str, Any] = {"keeps_place": True, "gradient_accumulation_steps": accumulate}
    settings |= {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1}
    steps = trained(make, tmp_path, **settings)
    for epoch in range(3):
        assert sorted(chain(*steps[10 * epoch : 10 * epoch + 10])) == [*range(40)]
    steps_an_epoch = -(-10 // accumulate)
    for step in (1, steps_an_epoch, steps_an_epoch + 2, 2 * steps_an_epoch, 3 * steps_an_epoch - 1):
        epochs, rest = divmod(step, steps_an_epoch)
        done = 10 * epochs + accumulate * rest
        folder = str(tmp_path / f"checkpoint-{step}")
        again = trainer_of(make, tmp_path / "again", **{**settings, "save_strategy": "no"})
        again.train(resume_from_checkpoint=folder)
        assert again.model.steps == steps[done:], f"differs when resumed from step {step}"
        assert again.loader.stats().batches == 30 - done, "batches were read to be dropped"


def test_a_checkpoint_that_names_the_callback_as_it_was_called_before_resumes(tmp_path: Path) -> None:
    make = over_shards(make_shards(tmp_path))
    settings: dict[str, Any] = {"keeps_place": True, "save_strategy": "steps", "save_steps": 4}
    whole = trained(make, tmp_path, **settings)
    stored = tmp_path / "checkpoint-4" / "trainer_state.json"
    text = stored.read_text("utf-8")
    assert "LoaderStateCallback" in text
    stored.write_text(text.replace("LoaderStateCallback", "KeepPlace"), "utf-8")
    assert trained(make, tmp_path, resume=str(stored.parent), **settings) == whole[4:]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_checkpoint_goes_on_with_other_data_between_epochs_only(tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"keeps_place": True, "save_strategy": strategy, "save_steps": 5}
    trained(over_shards(make_shards(tmp_path / "old")), tmp_path, num_train_epochs=2, **settings)
    grown = over_shards(make_shards(tmp_path / "grown", 60))
    if strategy == "steps":
        again = trainer_of(grown, tmp_path / "again", keeps_place=True, max_steps=25)
        with pytest.raises(ValueError, match=r"4 shards, and this loader has 6 shards.*give the shards"):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    again = trainer_of(grown, tmp_path / "again", keeps_place=True, max_steps=30)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert sorted(chain(*again.model.steps[:15])) == [*range(60)]


def test_checkpoints_at_the_ends_of_epochs_resume_with_the_next_epoch(tmp_path: Path) -> None:
    make = over_shards(make_shards(tmp_path), num_workers=2, prepared=True)
    settings: dict[str, Any] = {"keeps_place": True, "save_strategy": "epoch"}
    settings |= {"eval_strategy": "epoch", "prediction_loss_only": True, "num_train_epochs": 3}
    settings |= {"restore_callback_states_from_checkpoint": True}

    def run(resume: str | None) -> list[list[int]]:
        return [step for step in trained(make, tmp_path, resume=resume, **settings) if step != [0, 1, 2, 3]]

    whole = run(None)
    assert run(str(tmp_path / "checkpoint-10")) == whole[10:]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_skip_over_shards_without_the_callback_is_refused_by_its_name(
    tmp_path: Path, prepared: bool
) -> None:
    """Also where the checkpoint was saved without, and the resumed run has it."""
    make = over_shards(make_shards(tmp_path), prepared=prepared)
    whole = trained(make, tmp_path, save_strategy="steps", save_steps=5)
    for keeps in (False, True):
        with pytest.raises(
            (TypeError, ValueError, RuntimeError), match=r"integrations\.transformers\.resume"
        ):
            trained(make, tmp_path, resume=str(tmp_path / "checkpoint-5"), keeps_place=keeps)
    after = trained(make, tmp_path, resume=str(tmp_path / "checkpoint-10"), keeps_place=True, save_steps=1)
    assert after == whole[10:], "an epoch's end needs no place"


def test_ignore_data_skip_begins_the_epoch_anew(tmp_path: Path) -> None:
    make, settings = over_shards(make_shards(tmp_path)), {"keeps_place": True, "save_steps": 3}
    whole = trained(make, tmp_path, save_strategy="steps", **settings)
    again = trained(make, tmp_path, resume=str(tmp_path / "checkpoint-3"), ignore_data_skip=True, **settings)
    assert again == [*whole[:10], *whole[10:17]]


def test_an_order_without_a_length_resumes_with_the_next_batch(tmp_path: Path) -> None:
    """Trainer takes all its steps for one epoch, and the loader for one that begins again."""
    mixture = Mixture({make_shards(tmp_path / "a"): 2, make_shards(tmp_path / "b"): 1}, stop="never")
    make = over_shards(mixture)
    settings: dict[str, Any] = {"keeps_place": True, "max_steps": 25, "save_steps": 12}
    whole = trained(make, tmp_path, save_strategy="steps", **settings)
    assert trained(make, tmp_path, resume=str(tmp_path / "checkpoint-12"), **settings) == whole[12:]


def test_other_batches_go_on_with_the_samples_that_are_left_and_a_warning(tmp_path: Path) -> None:
    """Three steps of 8 are batch 3 of 10, where the steps are of 4, and epoch 1, where they are of 20."""
    dataset, folder = make_shards(tmp_path), str(tmp_path / "checkpoint-3")
    settings: dict[str, Any] = {"keeps_place": True, "max_steps": 24, "save_steps": 3}
    whole = trained(over_shards(dataset, 8), tmp_path, save_strategy="steps", **settings)
    left, epoch = sorted(chain(*whole[3:5])), [*range(40)]
    with pytest.warns(UserWarning, match="step 3 is batch 3 of epoch 0"):
        small = trained(over_shards(dataset, 4), tmp_path, resume=folder, **settings)
    assert sorted(chain(*small[:4])) == left
    assert sorted(chain(*small[4:14])) == epoch
    with pytest.warns(UserWarning, match="step 3 is batch 1 of epoch 1"):
        large = trained(over_shards(dataset, 20), tmp_path, resume=folder, **settings)
    assert sorted(large[0]) == left
    assert sorted(chain(*large[1:3])) == epoch


class KillAt(TrainerCallback):
    """Ends the process after a step, as nothing else does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 15:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_killed_resumes_with_the_batch_after_its_last_checkpoint(tmp_path: Path) -> None:
    make = over_shards(make_shards(tmp_path))
    settings: dict[str, Any] = {"keeps_place": True, "save_strategy": "steps", "save_steps": 6}

    def run() -> None:
        trainer = trainer_of(make, tmp_path, **settings)
        trainer.add_callback(KillAt())
        trainer.train()

    assert exit_code_in_child(run) == -signal.SIGKILL
    whole = trained(make, tmp_path / "whole")
    assert trained(make, tmp_path, resume=str(tmp_path / "checkpoint-12"), keeps_place=True) == whole[12:]


@pytest.mark.ranks(2)
def test_two_ranks_resume_with_their_next_batches(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    dataset, out = make_shards(tmp_path / str(rank)), tmp_path / "out"
    settings: dict[str, Any] = {"keeps_place": True, "save_steps": 3}
    for prepared in (False, True):
        make = over_shards(dataset, prepared=prepared)
        whole = trained(make, out / str(prepared), save_strategy="steps", **settings)
        everyone: list[Any] = [None, None]
        torch.distributed.all_gather_object(everyone, whole)
        for epoch in (slice(5), slice(5, 10)):
            assert sorted(chain(*everyone[0][epoch], *everyone[1][epoch])) == [*range(40)]
        for step in (3, 6):
            folder = str(out / str(prepared) / f"checkpoint-{step}")
            assert trained(make, out, resume=folder, **settings) == whole[step:]
