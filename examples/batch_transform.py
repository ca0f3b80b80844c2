"""A transform of one's own that gets many samples at once.

python examples/batch_transform.py
"""

import tempfile
from typing import Any

import torch

from dataflow import DataLoader, ShardedDataset, ShardWriter

Sample = dict[str, Any]


# [transform]
class UpperCase:
    """The bytes of a text in capitals."""

    lists = ("codes",)  # 1-D tensors of unlike length: Ragged in a batch
    fingerprint = "upper-1"  # kept in states; another one is refused
    releases_gil = False  # True: threads serve as well as processes

    def __call__(self, sample: Sample) -> Sample:
        """Transform one sample: needed where one is asked for."""
        return self.batch([sample])[0]

    def batch(self, samples: list[Sample]) -> list[Sample]:
        """Transform many, and leave them as they are."""
        return [{"codes": torch.tensor(list(sample["text"].upper().encode()))} for sample in samples]


# [end]
with tempfile.TemporaryDirectory() as folder:
    with ShardWriter(f"{folder}/%d.jsonl") as shards:
        for i in range(8):
            shards.write({"text": "a" * (i + 1)})
    with DataLoader(ShardedDataset(f"{folder}/*.jsonl", transform=UpperCase()), batch_size=4) as loader:
        for batch in loader:
            codes = batch["codes"]
            print(f"{bytes(codes.values[:3].tolist())}, offsets {codes.offsets.tolist()}")
