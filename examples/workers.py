"""Build batches in this thread, in threads, in processes: the samples are the same, the rate is not."""

import time

import numpy as np
import torch

from dataflow import DataLoader, ShardedDataset, ShardWriter


def smoothed(sample, rng):
    """Your transform: plain Python, so threads that run it share the interpreter lock."""
    values = sample["npy"].numpy() + rng.normal(0, 0.1, 512)
    for i in range(1, 512):
        values[i] = 0.9 * values[i - 1] + 0.1 * values[i]
    return {"x": torch.from_numpy(values), "y": sample["cls"]}


def main() -> None:
    """Print who built the batches of an epoch, and how fast."""
    noise = np.random.default_rng(0)
    with ShardWriter("signals-%02d.tar", max_count=512, overwrite=True) as shards:
        for i in range(2048):
            shards.write({"__key__": f"{i:04d}", "npy": noise.normal(size=512), "cls": i % 10})
    dataset = ShardedDataset("signals-*.tar", transform=smoothed)

    choices = {
        "num_workers=0": {"num_workers": 0},
        "threads": {"num_workers": 2, "workers": "thread"},
        "processes": {"num_workers": 2},
        "default": {},
    }
    sums = set()
    for name, options in choices.items():
        with DataLoader(dataset, batch_size=64, shuffle=True, seed=1, **options) as loader:
            for _ in range(2):  # the second epoch finds everything started
                start = time.perf_counter()
                total = sum(batch["x"].sum().item() for batch in loader)
                seconds = time.perf_counter() - start
            sums.add(total)
            stats = loader.stats()
            print(f"{name}: built by {stats.workers}, {2048 / seconds:,.0f} samples/s")
            print(f"  why: {stats.workers_reason}")
    print(f"the same batches each time: {len(sums) == 1}")


if __name__ == "__main__":
    main()
