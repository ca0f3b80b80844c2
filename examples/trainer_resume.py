"""Hugging Face Trainer over shards: stopped inside an epoch, it goes on at the next sample."""

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.integrations.transformers import resume


class Classifier(nn.Module):
    """Your model; it also notes which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.seen: list[int] = []

    def forward(self, npy, cls, index):
        """Return the loss of a batch, as Trainer wants it."""
        self.seen += index.tolist()
        return {"loss": nn.functional.cross_entropy(self.layer(npy), cls)}


# [trainer]
class ShardTrainer(Trainer):
    """Trainer with a loader of ours."""

    def get_train_dataloader(self):
        """Give Trainer a loader of this package."""
        return DataLoader(ShardedDataset("points.tar"), batch_size=20, shuffle=True, seed=1)


# [end]
def train(checkpoint: str | None = None, **arguments) -> list[int]:
    """Train, from a checkpoint if there is one; returns which samples were trained on."""
    settings = TrainingArguments("checkpoints", use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    # [resume]
    trainer = ShardTrainer(Classifier(), settings)
    resume(trainer)  # each checkpoint keeps the loader's state
    trainer.train(resume_from_checkpoint=checkpoint)
    # [end]
    return trainer.model.seen


if __name__ == "__main__":
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    with ShardWriter("points.tar", overwrite=True) as shards:
        for i in range(400):
            x = rng.normal(size=16).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 4, "index": i})

    first = train(max_steps=7, save_steps=7)  # 140 of 400 samples, then the job ends
    rest = train("checkpoints/checkpoint-7", max_steps=20)
    print(f"{len(first)} samples, then {len(rest)}: each once: {sorted(first + rest) == [*range(400)]}")
