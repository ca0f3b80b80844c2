"""Compare orders on data that is sorted by label.

python examples/choose_shuffle.py
"""

import tempfile

import torch

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle

LABELS, SAMPLES, BATCH = 10, 5_000, 50
ORDERS = {
    "shuffle=False": False,
    "Shuffle('blocks')": Shuffle("blocks"),
    "Shuffle(window_blocks=16)": Shuffle(window_blocks=16),
    "shuffle=True": True,
    "Shuffle('full')": Shuffle("full"),
}


def write_sorted(folder: str) -> str:
    """Ten shards, each with the samples of one label: the worst order that files can have."""
    with ShardWriter(f"{folder}/sorted-%02d.tar", max_count=SAMPLES // LABELS) as shards:
        for i in range(SAMPLES):
            shards.write({"__key__": f"{i:05d}", "bin": bytes(500), "cls": i * LABELS // SAMPLES})
    return f"{folder}/sorted-*.tar"


def dispersion(labels: torch.Tensor) -> float:
    """Chi-square of the label counts of a batch: about 1 for random draws, BATCH for a single label."""
    expected = len(labels) / LABELS
    counts = torch.bincount(labels, minlength=LABELS)
    return float(((counts - expected) ** 2).sum() / expected / (LABELS - 1))


def main() -> None:
    """Print a row for each order."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_sorted(folder)
        # Blocks of 32 KiB make a large dataset of these 10 MB. Leave block_bytes out with data of your own.
        dataset = ShardedDataset(source, columns=["cls"], block_bytes=1 << 15)
        print(f"{'order':27}labels a batch  dispersion")
        for name, order in ORDERS.items():
            with DataLoader(dataset, BATCH, shuffle=order, seed=1) as loader:
                batches = [batch["cls"] for batch in loader]
            distinct = sum(len(labels.unique()) for labels in batches) / len(batches)
            mean = sum(map(dispersion, batches)) / len(batches)
            print(f"{name:27}{distinct:14.1f}{mean:12.2f}")


if __name__ == "__main__":
    main()
