"""A script that streams with Hugging Face datasets; from_hf_streaming.py is the same script with this loader.

python examples/from_hf_streaming_plain.py
"""

import tempfile

from datasets import load_dataset
from sample_data import review_lines
from torch.utils.data import DataLoader


def main() -> None:
    """Count what two epochs hold."""
    with tempfile.TemporaryDirectory() as folder:
        files = review_lines(folder)  # or a repository of the Hub
        # [loader]
        dataset = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=folder)
        dataset = dataset.filter(lambda row: row["stars"] != 2)
        dataset = dataset.map(lambda row: {"length": len(row["text"]), "label": row["stars"] > 2})
        dataset = dataset.remove_columns("stars").shuffle(seed=0, buffer_size=100)
        loader = DataLoader(dataset, batch_size=32, num_workers=2)
        for epoch in range(2):
            dataset.set_epoch(epoch)
            samples = positive = 0
            for batch in loader:
                # [end]
                samples += len(batch["length"])
                positive += int(batch["label"].sum())
            print(f"epoch {epoch}: {samples} samples, {positive} positive")


if __name__ == "__main__":
    main()
