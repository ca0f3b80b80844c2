"""Train the same model with gradients sent in several ways: the loss at the end, and the bytes of a step."""

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule, ShardedDataset, ShardWriter
from dataflow.grad.strategies import AllReduce, Half, Int8, LocalSGD, TopK
from dataflow.testing import run_ranks

STRATEGIES = {
    "AllReduce()": AllReduce,
    'Half("bf16")': lambda: Half("bf16"),
    "Int8()": Int8,
    "TopK(0.1)": lambda: TopK(0.1),
    "LocalSGD(8)": lambda: LocalSGD(8),
}


def train(name: str) -> tuple[float, float]:
    """Train on one of the ranks: loss at the end, and kB that this rank sent a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    dataset = ShardedDataset("digits.tar")
    losses = []
    with (
        DataLoader(dataset, batch_size=32, shuffle=True, seed=1) as loader,
        GradSchedule(loader, model, optimizer, accumulate=1, strategy=STRATEGIES[name]()) as sched,
    ):
        for _ in range(4):
            for batch in sched:
                loss = nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
                sched.backward(loss)
                sched.step()
                losses.append(loss.item())
        return float(np.mean(losses[-10:])), sched.strategy.bytes_sent() / sched.position.step / 1000


def train_with_each() -> dict[str, tuple[float, float]]:
    """Train with one strategy after the other."""
    return {name: train(name) for name in STRATEGIES}


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(10, 64))
    with ShardWriter("digits.tar", overwrite=True) as shards:
        for i in range(1280):
            x = (centers[i % 10] + rng.normal(0, 4, 64)).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 10})
    results = run_ranks(train_with_each, 2, start_method="forkserver")[0]  # what rank 0 returned
    for name, (loss, kilobytes) in results.items():
        print(f"{name:12}  loss {loss:.2f}  {kilobytes:4.0f} kB sent a step")
