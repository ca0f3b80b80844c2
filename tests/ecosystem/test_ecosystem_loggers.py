"""Figures of a loader in the frameworks' own loggers, as `docs/guide/monitoring.md` says."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem_kit import make_shards, numbers_of

from dataflow import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
    from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of small data and few workers


class Logs(pl.LightningModule):
    """Logs the loader's figures at the end of an epoch."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.layer, self.loader = torch.nn.Linear(1, 1), loader

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.layer(torch.tensor(numbers_of(batch), dtype=torch.float32)[:, None]).mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.loader.stats().flat())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def test_lightning_logs_the_figures_of_a_loader(tmp_path: Path) -> None:
    with DataLoader(make_shards(tmp_path, 22), 4) as loader:
        trainer = pl.Trainer(
            max_epochs=1,
            logger=CSVLogger(tmp_path, "log", "it"),
            enable_progress_bar=False,
            enable_checkpointing=False,
        )
        trainer.fit(Logs(loader), loader)
        names = loader.stats().flat().keys()
    [row] = csv.DictReader((tmp_path / "log" / "it" / "metrics.csv").read_text().splitlines())
    assert names <= row.keys()
    assert (float(row["samples"]), float(row["batches"])) == (22, 6)


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(torch.tensor(numbers_of(batch), dtype=torch.float32)[:, None]).mean()}


def test_trainer_logs_the_figures_of_a_loader(tmp_path: Path) -> None:
    with DataLoader(make_shards(tmp_path, 22), 4) as loader:

        class LoggingTrainer(Trainer):
            def get_train_dataloader(self) -> DataLoader:
                return loader

            def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
                super().log({**logs, **loader.stats().flat()}, start_time)

        arguments = TrainingArguments(
            str(tmp_path / "out"),
            max_steps=5,
            logging_steps=5,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        trainer = LoggingTrainer(Weight(), arguments)
        trainer.train()
        names = loader.stats().flat().keys()
    row = next(row for row in trainer.state.log_history if row["step"] == 5)
    assert names <= row.keys()
    assert row["batches"] >= 5
