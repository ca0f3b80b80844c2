"""Take parts of datasets, join two of them by key, and mix sources in given shares.

python examples/mix_datasets.py
"""

import tempfile
from collections import Counter

import pyarrow.compute as pc

from dataflow import DataLoader, Mixture, ShardedDataset, ShardWriter


def write(pattern: str, source: str, count: int) -> None:
    """JSON Lines of one source, with a score from 0 to 9."""
    with ShardWriter(pattern, max_count=500) as shards:
        for i in range(count):
            shards.write({"id": i, "source": source, "score": i % 10})


def main() -> None:
    """Print what the batches hold."""
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/web-%02d.jsonl", "web", 2_000)
        write(f"{folder}/code-%02d.jsonl", "code", 500)
        with ShardWriter(f"{folder}/notes-%02d.jsonl") as shards:
            for i in range(0, 2_000, 2):
                shards.write({"number": i, "note": f"note {i}"})
        web, code = (ShardedDataset(f"{folder}/{name}-*.jsonl") for name in ("web", "code"))

        parts = web.split({"train": 0.9, "validation": 0.1})
        print({name: len(part) for name, part in parts.items()})

        good = web.filter(pc.field("score") >= 5)
        print(f"{len(good)} of {len(web)} samples have a score of 5 or more")

        noted = good.join(ShardedDataset(f"{folder}/notes-*.jsonl"), on=("id", "number"))
        print(f"{len(noted)} of them have a note: {noted[0]}")

        mixture = Mixture({parts["train"]: 0.7, code: 0.3}, stop="all")
        with DataLoader(mixture, batch_size=100, shuffle=True, seed=1) as loader:
            for step, batch in enumerate(loader):
                if step in (0, 1, 10, 11):
                    print(f"step {step}: {dict(Counter(batch['source']))}")
                if step == 9:
                    mixture.set_weights([0.5, 0.5])  # from the next batch on, on all ranks
                if step == 11:
                    break


if __name__ == "__main__":
    main()
