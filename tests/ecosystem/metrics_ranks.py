"""Two gloo ranks that train until a file "stop" is in the folder that is given; rank 1 is the straggler."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule, Mixture, ShardedDataset, ShardWriter
from dataflow.testing import run_ranks


def made(folder: str) -> list[str]:
    """Shards of numbers, and the folder that they lie in."""
    with ShardWriter(f"{folder}/web/%02d.tar", max_count=50) as shards:
        for number in range(200):
            shards.write({"__key__": f"{number:04d}", "cls": number})
    return [f"{folder}/web/*.tar"]


def busy(rank: int) -> None:
    """Compute for a while, rank 1 for longer."""
    one = torch.ones(64, 64)
    for _ in range(400 if rank else 20):
        one @ one


def train(folder: str) -> None:
    rank = dist.get_rank()
    endless = Mixture({ShardedDataset(f"{folder}/web/*.tar"): 1}, stop="never")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with (
        DataLoader(endless, 4, shuffle=True, num_workers=1) as loader,
        GradSchedule(loader, model, optimizer, accumulate=2) as schedule,
    ):
        validation = DataLoader(range(40), 4, name="numbers/val")
        for batch in schedule:
            loss = model(batch["cls"].float()[:, None]).mean()
            busy(rank)
            schedule.backward(loss * schedule.scale())
            if schedule.step() is None:
                continue
            if schedule.last and schedule.last.window % 50 == 0:
                for _ in validation:
                    pass
            stop = torch.tensor(float(Path(folder, "stop").exists()))
            dist.all_reduce(stop)
            if stop:
                break


if __name__ == "__main__":
    run_ranks(train, 2, args=sys.argv[1:2], timeout_s=300)
