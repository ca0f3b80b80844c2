"""Hugging Face Accelerate over shards: `save_state` keeps the loader's place, `load_state` goes on there."""

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.integrations.accelerate import prepare_loader


def train(steps: int, *, resumed: bool) -> list[int]:
    """Train up to so many steps; returns which samples were trained on."""
    # [prepare]
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(ShardedDataset("points.tar"), batch_size=20, shuffle=True, seed=1)
    loader = prepare_loader(accelerator, loader)  # in place of accelerator.prepare(loader)
    if resumed:
        accelerator.load_state("checkpoint")
    # [end]
    seen: list[int] = []
    for step, batch in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += batch["index"].tolist()
        if step == steps:
            accelerator.save_state("checkpoint")
            break
    return seen


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    with ShardWriter("points.tar", overwrite=True) as shards:
        for i in range(400):
            x = rng.normal(size=16).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 4, "index": i})

    first = train(7, resumed=False)  # 140 of 400 samples, then the job ends
    rest = train(20, resumed=True)
    print(f"{len(first)} samples, then {len(rest)}: each once: {sorted(first + rest) == [*range(400)]}")
