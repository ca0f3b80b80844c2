"""PyTorch Lightning over shards: stopped inside an epoch, the training goes on at the next sample."""

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from dataflow import DataLoader, ShardedDataset, ShardWriter


class Classifier(pl.LightningModule):
    """Your module; it also notes which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        self.seen += batch["index"].tolist()
        return nn.functional.cross_entropy(self.layer(batch["npy"]), batch["cls"])

    def configure_optimizers(self):
        """Choose the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(max_steps: int, checkpoint: str | None = None) -> Classifier:
    """Train up to `max_steps` steps, from a checkpoint if there is one."""
    dataset = ShardedDataset("points.tar")
    trainer = pl.Trainer(max_steps=max_steps, max_epochs=-1, logger=False, enable_progress_bar=False)
    module = Classifier()
    with DataLoader(dataset, batch_size=20, shuffle=True, seed=1) as loader:
        trainer.fit(module, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint("at.ckpt")  # has the loader's state, too
    return module


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    with ShardWriter("points.tar", overwrite=True) as shards:
        for i in range(400):
            x = rng.normal(size=16).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 4, "index": i})

    first = fit(max_steps=7).seen  # 140 of 400 samples, then the job ends
    rest = fit(max_steps=20, checkpoint="at.ckpt").seen
    print(f"{len(first)} samples, then {len(rest)}: each once: {sorted(first + rest) == [*range(400)]}")
