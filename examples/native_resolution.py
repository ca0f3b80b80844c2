"""Patches of images that keep their shape, with another longest length in each batch, as timm trains NaFlex.

python examples/native_resolution.py
"""

import tempfile
from collections import Counter
from typing import Any

import cv2
import numpy as np
from simplejpeg import decode_jpeg, decode_jpeg_header, encode_jpeg

from dataflow import DataLoader, ShardedDataset, ShardWriter, TokenBudget

SIDE, BUDGET, LENGTHS = 16, 2048, np.array([64, 128, 256])
# As many batches of each length, all of about `BUDGET` patches: so more images of the shorter ones.
SHARES = (1 / LENGTHS) / (1 / LENGTHS).sum()


class Patches:
    """As many patches of an image as a drawn length allows; its shape stays."""

    releases_gil = True

    def grid(self, sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, int]:
        """Return the number of patches down and across, from the header alone."""
        height, width, *_ = decode_jpeg_header(sample["jpg"].numpy())
        most = rng.choice(LENGTHS, p=SHARES)
        down = max(1, int((most * height / width) ** 0.5))
        return down, max(1, min(int(most / down), int(down * width / height)))

    def measure(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, int]:
        """Return the number of patches: rows are planned from it before an image is decoded."""
        down, across = self.grid(sample, rng)
        return {"patches": down * across}

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return patches [n, 768] of uint8, and the place of each."""
        down, across = self.grid(sample, rng)  # `rng` draws what it drew for `measure`
        image = cv2.resize(decode_jpeg(sample["jpg"].numpy()), (across * SIDE, down * SIDE))
        patches = image.reshape(down, SIDE, across, SIDE * 3).swapaxes(1, 2).reshape(down * across, -1)
        y, x = np.divmod(np.arange(down * across), across)
        return {"patches": patches, "y": y, "x": x, "label": sample["cls"]}


def main() -> None:
    """Print what two epochs consist of."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(f"{folder}/images-%02d.tar") as shards:
            for i in range(300):
                height, width = rng.integers(100, 400, 2)
                jpeg = encode_jpeg(np.zeros((height, width, 3), np.uint8))
                shards.write({"__key__": f"{i:03d}", "jpg": jpeg, "cls": i % 10})
        # [loader]
        dataset = ShardedDataset(f"{folder}/*.tar", decode={"jpg": None}, transform=Patches())
        batching = TokenBudget(BUDGET, columns=["patches", "y", "x"])
        # [end]
        with DataLoader(dataset, shuffle=True, batching=batching) as loader:
            for epoch in range(2):
                batches = list(loader)
                assert sum(len(batch["label"]) for batch in batches) == len(dataset)
                longest = [batch["patches"].tokens.shape[1] for batch in batches]
                drawn = Counter(LENGTHS[np.searchsorted(LENGTHS, longest)].tolist())
                print(f"epoch {epoch}: batches by length {dict(sorted(drawn.items()))}")
                print(f"  {loader.stats().lengths.efficiency:.1%} of their places are patches")


if __name__ == "__main__":
    main()
