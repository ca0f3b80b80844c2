"""A training that waits for its data: see it in the loader's figures, and what more workers change."""

import time
from argparse import ArgumentParser

import torch
from torch import nn
from torch.utils.data import Dataset

from dataflow import DataLoader


class Slow(Dataset):
    """Items that take 2 ms, as a file on a busy disk does."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.full((256,), float(i % 10)), i % 10


def main() -> None:
    """Train an epoch, and print every 8 batches how much of the time went to waiting."""
    parser = ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    workers = parser.parse_args().workers
    options = {"num_workers": workers, "workers": "thread"} if workers else {}

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Slow(), batch_size=32, shuffle=True, **options)
    before = loader.stats()
    for step, (x, y) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)  # stands for a larger model
        if step % 8 == 0:
            now = loader.stats()
            waited = now.since(before).stall_share
            print(f"step {step}: waited {waited:.0%} of the time, {now.ready_batches} batches ready")
            before = now


if __name__ == "__main__":
    main()
