"""Write tars of pictures and captions as shards of MosaicML Streaming, and go on where a run was stopped."""

import numpy as np

from dataflow import DataLoader, ShardedDataset, ShardWriter, convert


def captioned(sample):
    """Return the sample to be written: the same columns each time."""
    return {"image": sample["npy"], "caption": sample["txt"].lower(), "label": sample["cls"]}


def is_large(sample):
    """Return whether to keep it."""
    return sample["npy"].size > 48


def main() -> None:
    """Convert twice: the second run has nothing left to do."""
    rng = np.random.default_rng(0)
    with ShardWriter("pictures/%03d.tar", max_count=100, overwrite=True) as shards:
        for i in range(1000):
            pixels = rng.integers(0, 256, (4, 4 + i % 2, 3), np.uint8)
            shards.write({"__key__": f"{i:04d}", "npy": pixels, "txt": f"Picture {i}", "cls": i % 10})

    for _ in range(2):
        made = convert(
            "pictures/*.tar",
            "streaming",
            to="mds",
            map=captioned,
            filter=is_large,
            shard_samples=250,
            workers=2,
            verify=100,
        )
        print(f"{made.samples} samples in {made.shards} shards, {made.skipped} finished before")
    print(f"{made.verified} samples were compared with the source")

    with DataLoader(ShardedDataset(made.catalog), batch_size=50, shuffle=True) as loader:
        labels = sum(int(batch["label"].sum()) for batch in loader)
    print(f"the labels sum up to {labels}")


if __name__ == "__main__":
    main()
