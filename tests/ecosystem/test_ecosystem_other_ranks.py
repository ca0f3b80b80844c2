"""Checkpoints of frameworks that two ranks have saved go on in one, with the samples of the plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ecosystem_kit import make_shards, numbers_of
from forked_kit import fast_ranks

from dataflow import DataLoader, ShardedDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for package in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(package)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from test_ecosystem_lightning import SaveAt, steps_of
    from test_ecosystem_trainer import over_shards, trained

    from dataflow.integrations.accelerate import prepare_loader

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

GLOBAL_BATCH, DONE = 4, 3


def loader_of(folder: Path, batch_size: int) -> DataLoader:
    return DataLoader(dataset_of(folder), batch_size, shuffle=True, seed=3)


def dataset_of(folder: Path) -> ShardedDataset:
    return ShardedDataset(f"{folder}/train-*.tar", catalog=f"{folder}/catalog")


def with_accelerate(folder: Path, batch_size: int, *, resumed: bool) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    loader = prepare_loader(accelerator, loader_of(folder, batch_size))
    if resumed:
        accelerator.load_state(str(folder / "accelerate"))
    steps = []
    for batch in loader:
        steps.append(numbers_of(batch))
        if not resumed and len(steps) == DONE:
            accelerator.save_state(str(folder / "accelerate"))
            break
    return steps


def with_trainer(folder: Path, batch_size: int, *, resumed: bool) -> list[list[int]]:
    make, out = over_shards(dataset_of(folder), batch_size), folder / "trainer"
    how: dict[str, Any] = {"keeps_place": True, "save_steps": DONE}
    if resumed:
        return trained(make, out, resume=str(out / f"checkpoint-{DONE}"), num_train_epochs=1, **how)
    return trained(make, out, save_strategy="steps", max_steps=DONE, **how)


def with_lightning(folder: Path, batch_size: int, *, resumed: bool) -> list[list[int]]:
    loader, path = loader_of(folder, batch_size), folder / "at.ckpt"
    if resumed:
        return [numbers for _, numbers in steps_of(loader, max_epochs=1, resume=path)]
    how = {"strategy": "ddp", "devices": 2, "callbacks": [SaveAt(DONE, path)], "max_steps": DONE}
    return [numbers for _, numbers in steps_of(loader, max_epochs=1, **how)]


FRAMEWORKS = {"accelerate": with_accelerate, "trainer": with_trainer, "lightning": with_lightning}


def saved(folder: Path) -> dict[str, list[list[int]]]:
    """What one of two ranks trains on before each framework saves a checkpoint."""
    return {name: run(folder, GLOBAL_BATCH // 2, resumed=False) for name, run in FRAMEWORKS.items()}


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_one_rank_goes_on_where_two_have_saved(tmp_path: Path) -> None:
    """One start of two ranks serves three frameworks: it takes seconds."""
    make_shards(tmp_path)
    ranks = fast_ranks(saved, 2, args=(tmp_path,), timeout_s=100, env={"TORCHELASTIC_RUN_ID": "test"})
    with loader_of(tmp_path, GLOBAL_BATCH) as loader:
        plain = [sorted(numbers_of(batch)) for batch in loader]
    for name, run in FRAMEWORKS.items():
        before = [sorted(one + other) for one, other in zip(*(rank[name] for rank in ranks), strict=True)]
        assert before == plain[:DONE], name
        after = [sorted(step) for step in run(tmp_path, GLOBAL_BATCH, resumed=True)]
        assert after == plain[DONE:], name
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
