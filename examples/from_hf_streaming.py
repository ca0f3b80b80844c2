"""The script of from_hf_streaming_plain.py with this loader.

python examples/from_hf_streaming.py
"""

import tempfile

from pyarrow.compute import field
from sample_data import review_lines

from dataflow import DataLoader, ShardedDataset


def main() -> None:
    """Count what two epochs hold."""
    with tempfile.TemporaryDirectory() as folder:
        files = review_lines(folder)  # or a repository of the Hub
        # [loader]
        dataset = ShardedDataset(
            files,
            transform=lambda row: {
                "text": row["text"],
                "length": len(row["text"]),
                "label": bool(row["stars"] > 2),
            },
        )
        dataset = dataset.filter(field("stars") != 2)
        with DataLoader(dataset, batch_size=32, shuffle=True, seed=0) as loader:
            for epoch in range(2):
                samples = positive = 0
                for batch in loader:
                    # [end]
                    samples += len(batch["length"])
                    positive += int(batch["label"].sum())
                print(f"epoch {epoch}: {samples} samples, {positive} positive")


if __name__ == "__main__":
    main()
