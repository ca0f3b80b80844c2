"""What a loader takes for itself in a small container, and how to say less: one core, little memory."""

import os
import tempfile
from pathlib import Path

import numpy as np
from small_store import serve

from dataflow import Cache, DataLoader, ShardedDataset, ShardWriter

SMALL = {
    "memory_limit": "64MB",  # bytes that the loader may hold, of this rank
    "num_workers": 1,  # builders
    "workers": "thread",  # no process, which would import torch once more
    "depth": 2,  # batches kept ready
}


def doubled(sample):
    """Your transform."""
    return {"x": sample["npy"] * 2}


def main() -> None:
    """Print what a loader holds by default and with limits."""
    rng = np.random.default_rng(0)
    Path("bucket").mkdir(exist_ok=True)
    with ShardWriter("bucket/train-%02d.tar", max_count=512, overwrite=True) as shards:
        for i in range(2048):
            x = rng.normal(size=8192).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x})

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, as of a container with --cpus 1
    with serve(Path("bucket")) as store, tempfile.TemporaryDirectory() as volume:
        for name, options in (("default", {}), ("small", SMALL)):
            dataset = ShardedDataset(
                f"{store.url}/train-{{00..03}}.tar",
                transform=doubled,
                cache=Cache(volume, limit="20MB"),  # a mounted volume, smaller than the data
            )
            with DataLoader(dataset, batch_size=32, shuffle=True, seed=1, **options) as loader:
                samples = sum(len(batch["x"]) for batch in loader)
                stats = loader.stats()
            limit, peak = stats.memory.limit_bytes / 1e6, stats.memory.peak_bytes / 1e6
            print(f"{name}: {samples} samples, builders: {stats.num_workers} ({stats.workers_reason})")
            print(f"  memory: at most {peak:.0f} of {limit:.0f} MB")
            kept = sum(file.stat().st_size for file in Path(volume).rglob("*") if file.is_file())
            print(f"  cache folder: {kept / 1e6:.0f} of 20 MB")


if __name__ == "__main__":
    main()
