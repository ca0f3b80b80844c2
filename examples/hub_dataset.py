"""Read a dataset of the Hugging Face Hub, or a folder of the same layout.

python examples/hub_dataset.py                                # a folder that is made here
python examples/hub_dataset.py hf://datasets/org/name train   # needs the network
"""

import sys
import tempfile
from pathlib import Path

from dataflow import DataLoader, ShardedDataset, ShardWriter

README = """---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: en/train-*.jsonl}
  - {split: test, path: en/test.jsonl}
- config_name: de
  data_files: de/*.jsonl
---
# Sentences
"""


def write_layout(folder: str) -> str:
    """A small dataset as one lies on the Hub: files, and a README that says which are which."""
    (Path(folder) / "README.md").write_text(README)
    for name, count in (("en/train-0", 300), ("en/test", 20), ("de/train-0", 30)):
        with ShardWriter(f"{folder}/{name}.jsonl") as shards:
            for i in range(count):
                shards.write({"id": i, "text": f"sentence {i}"})
    return folder


def main() -> None:
    """Print what was found, and the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        source, split = sys.argv[1:3] if len(sys.argv) > 2 else (write_layout(folder), "train")
        dataset = ShardedDataset(source, split=split)
        print(f"{split}: {len(dataset)} samples")
        with DataLoader(dataset, batch_size=4, shuffle=True, seed=1) as loader:
            print(next(iter(loader)))
        if source == folder:
            print(f"config de: {len(ShardedDataset(source, config='de'))} samples")


if __name__ == "__main__":
    main()
