"""Accumulate gradients: windows of several batches step exactly as one large batch of their samples would."""

import copy

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dataflow import DataLoader, GradSchedule, ShardedDataset, ShardWriter


def main() -> None:
    """Train with windows of 4 batches, and with one batch of the same samples."""
    rng = np.random.default_rng(0)
    with ShardWriter("points.tar", overwrite=True) as shards:
        for i in range(500):
            x = rng.normal(size=16).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 4})
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    large = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, large))
    lr = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    large_lr = torch.optim.lr_scheduler.CosineAnnealingLR(other, 40)

    dataset = ShardedDataset("points.tar")
    with (
        DataLoader(dataset, batch_size=16, shuffle=True, seed=1) as loader,
        DataLoader(dataset, batch_size=64, shuffle=True, seed=1) as large_batches,
        GradSchedule(
            loader,
            model,
            optimizer,
            accumulate=4,
            weights={"samples": lambda batch: len(batch["cls"])},
            max_norm=1.0,
            lr=lr,
        ) as sched,
    ):
        for batch in sched:
            loss = cross_entropy(model(batch["npy"]), batch["cls"], reduction="sum")
            sched.backward(loss * sched.scale("samples"))
            if info := sched.step():  # a StepInfo at the end of each window
                print(f"step {info.step}: {info.totals['samples']:.0f} samples, lr {info.lr:.4f}")
        for batch in large_batches:
            cross_entropy(large(batch["npy"]), batch["cls"]).backward()
            torch.nn.utils.clip_grad_norm_(large.parameters(), 1.0)
            other.step(), other.zero_grad(), large_lr.step()
    apart = max(
        (a - b).abs().max().item() for a, b in zip(model.parameters(), large.parameters(), strict=True)
    )
    print(f"beside one large batch: equal to rounding: {apart < 1e-5}")


if __name__ == "__main__":
    main()
