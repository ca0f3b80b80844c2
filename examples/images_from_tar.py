"""Decode, crop and mirror images of a tar, and jitter their colours, the same in every run.

python examples/images_from_tar.py
"""

import tempfile
from typing import Any

import numpy as np
import torch
from simplejpeg import encode_jpeg

from dataflow import DataLoader, Image, ShardedDataset, ShardWriter

MEAN = 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw for one sample: numbers that depend on the seed, the epoch and the sample alone."""
    return {**sample, "brightness": rng.uniform(0.6, 1.4)}


def jitter(batch: dict[str, Any]) -> dict[str, Any]:
    """Compute once for the whole batch."""
    images = batch["jpg"] * batch.pop("brightness").float().view(-1, 1, 1, 1)
    return {**batch, "jpg": (images.clamp(0, 255) - MEAN) / STD}


def main() -> None:
    """Print what the batches hold."""
    with tempfile.TemporaryDirectory() as folder:
        # 40 JPEGs of unlike sizes; yours are there already.
        with ShardWriter(f"{folder}/photos-%02d.tar") as shards:
            for i in range(40):
                pixels = np.random.default_rng(i).integers(0, 256, (90 + i, 120, 3), np.uint8)
                shards.write({"__key__": f"{i:02d}", "jpg": encode_jpeg(pixels), "cls": i % 10})
        source = f"{folder}/photos-*.tar"

        train = {"jpg": Image(size=64, crop="random_resized", flip=0.5)}
        dataset = ShardedDataset(source, decode=train, transform=draw, batch_transform=jitter)
        with DataLoader(dataset, batch_size=8, shuffle=True, seed=1) as loader:
            batch = next(iter(loader))
            print(
                f"training: {batch['jpg'].dtype} {list(batch['jpg'].shape)}, classes {batch['cls'].tolist()}"
            )
        with DataLoader(dataset, batch_size=8, shuffle=True, seed=1) as loader:
            print(f"the same pixels in the next run: {next(iter(loader))['jpg'].equal(batch['jpg'])}")

        evaluation = ShardedDataset(source, decode={"jpg": Image.for_evaluation(64)})
        with DataLoader(evaluation, batch_size=8) as loader:
            batch = next(iter(loader))
            print(
                f"evaluation: {batch['jpg'].dtype} {list(batch['jpg'].shape)}, mean {batch['jpg'].mean():.2f}"
            )


if __name__ == "__main__":
    main()
