"""What one loader does: columns, missing values, random draws, bad samples, resume, figures.

python examples/tour.py
"""

import json
import tempfile
from typing import Any

import numpy as np

from dataflow import DataLoader, Optional, ShardedDataset, ShardWriter


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Called for each sample; `rng` draws the same numbers in every run."""
    if sample["label"] < 0:
        raise ValueError("a label is 0 to 9")
    return {**sample, "noise": rng.random()}


def main() -> None:
    """Print what each part does."""
    with tempfile.TemporaryDirectory() as folder:
        # A WebDataset tar: one member a column. Every third sample has no caption, and one label is wrong.
        with ShardWriter(f"{folder}/train-%02d.tar", max_count=250) as shards:
            for i in range(1_000):
                caption = {"txt": f"picture {i}"} if i % 3 else {}
                label = -1 if i == 77 else i % 10
                shards.write({"__key__": f"{i:04d}", "bin": bytes(784), "cls": label, **caption})
        dataset = ShardedDataset(
            f"{folder}/train-*.tar",
            columns={"x": "bin", "label": "cls", "caption": "txt"},  # the others are not read
            decode={"caption": Optional(default="", mask=True)},
            transform=augment,
            on_error="skip",
        )
        print(f"{len(dataset):,} samples; dataset[1] has {dataset[1]['caption']!r}")

        with DataLoader(dataset, batch_size=64, shuffle=True, seed=1, memory_limit="200MB") as loader:
            batches = iter(loader)
            batch = next(batches)
            print({name: list(getattr(value, "shape", [len(value)])) for name, value in batch.items()})
            print(f"{int(batch['caption_mask'].sum())} of {len(batch['caption'])} captions are there")
            state = json.dumps(loader.state_dict())  # after one batch
            expected = [batch["noise"].tolist() for batch in batches]
            stats = loader.stats()
            bad = stats.skipped[0].partition(", ")[2]
            print(f"{stats.samples} samples delivered, and one left out: {bad}")

        with DataLoader(dataset, batch_size=64, shuffle=True, seed=1) as resumed:
            resumed.load_state_dict(json.loads(state))
            same = [batch["noise"].tolist() for batch in resumed] == expected
            print(f"resumed from {len(state)} bytes, the same batches: {same}")


if __name__ == "__main__":
    main()
