"""Train from a store that is busy at first; a folder of this machine keeps what was read for later epochs."""

from pathlib import Path

import numpy as np
from small_store import serve

from dataflow import Cache, DataLoader, RetryPolicy, ShardedDataset, ShardWriter


def main() -> None:
    """Run two epochs over four shards behind HTTP."""
    rng = np.random.default_rng(0)
    Path("bucket").mkdir(exist_ok=True)
    with ShardWriter("bucket/train-%02d.tar", max_count=256, overwrite=True) as shards:
        for i in range(1024):
            x = rng.normal(size=2048).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 10})

    with serve(Path("bucket")) as store:
        # Yours: "s3://bucket/train-{00..03}.tar", "https://...", "az://...", "gs://...".
        dataset = ShardedDataset(
            f"{store.url}/train-{{00..03}}.tar",
            cache=Cache("cached-blocks", limit="1GB"),
            retry=RetryPolicy(deadline_s=60),
        )
        store.busy = 3  # its next answers are 503, as a busy store's
        with DataLoader(dataset, batch_size=64, shuffle=True, seed=1) as loader:
            before = 0
            for epoch in range(2):
                samples = sum(len(batch["cls"]) for batch in loader)
                stats = loader.stats()
                read = stats.cache.miss_bytes
                print(f"epoch {epoch}: {samples} samples, {(read - before) / 1e6:.0f} MB from the store")
                before = read
            faults = stats.faults
            print(f"{faults.throttled} answers that the store is busy, {faults.retries} reads asked again")


if __name__ == "__main__":
    main()
