"""Log a loader's figures to TensorBoard: pip install tensorboard; tensorboard --logdir runs."""

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from dataflow import DataLoader, ShardedDataset, ShardWriter

# [figures]
FIGURES = (
    "stall_share",  # of the time, waiting for data: near 0, the loader keeps up
    "samples_per_s",
    "read_bytes_per_s",
    "ready_batches",
    "memory.peak_bytes",
    "skipped_samples",
    "faults.retries",
)


class LoaderFigures:
    """Writes what a loader did since the last call: rates and shares of an interval, not of the whole run."""

    def __init__(self, writer: SummaryWriter, loader: DataLoader) -> None:
        self._writer, self._loader, self._before = writer, loader, loader.stats()

    def write(self, step: int) -> None:
        """Add the figures of the interval that ends at this step."""
        now = self._loader.stats()
        interval = now.since(self._before).flat()
        for name in FIGURES:
            self._writer.add_scalar(f"loader/{name}", interval[name], step)
        self._before = now
        # [end]


if __name__ == "__main__":
    with ShardWriter("points.tar", overwrite=True) as shards:
        for i in range(2048):
            shards.write({"__key__": f"{i:04d}", "npy": torch.randn(64).numpy(), "cls": i % 10})
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = ShardedDataset("points.tar")
    with SummaryWriter("runs") as writer, DataLoader(dataset, batch_size=32, shuffle=True, seed=1) as loader:
        figures = LoaderFigures(writer, loader)
        for step, batch in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 16 == 0:  # rarely: a snapshot takes microseconds, a written figure more
                writer.add_scalar("loss", loss.item(), step)
                figures.write(step)
        print(f"{step} steps, figures of {step // 16} intervals in runs/")
