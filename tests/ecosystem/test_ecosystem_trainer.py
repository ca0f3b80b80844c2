"""Our loaders in Hugging Face's Trainer: `get_train_dataloader` returns one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem_kit import Numbers, make_shards, named, numbers_of
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

from dataflow.accelerate import prepare_loader

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
    """A trainer whose training data comes from a given loader."""

    def __init__(self, make: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._make = make

    def get_train_dataloader(self) -> Any:
        return self._make(self.accelerator)


def trained(make: Callable[[Any], Any], folder: Path, *, resume: str | None = None, **settings: Any) -> Any:
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = {"output_dir": str(folder), "num_train_epochs": 2, "save_strategy": "no", **quiet, **settings}
    model = Recorder()
    Given(make, model=model, args=TrainingArguments(**arguments)).train(resume_from_checkpoint=resume)
    return model.steps


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
