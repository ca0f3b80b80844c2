"""Read images whose labels and captions are in a CSV file, as folders of images often have them.

python examples/labels_table.py
"""

import csv
import tempfile
from pathlib import Path

from sample_data import drawn

from dataflow import DataLoader, Image, Manifest, ShardedDataset

SHAPES = ("across", "down", "falling", "rising")


def main() -> None:
    """Print the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))  # yours is there already
        # [manifest]
        table = Manifest("labels.csv", file="path", classes="shape")
        columns = {"image": "jpg", "label": "shape", "caption": "caption"}
        dataset = ShardedDataset(folder, manifest=table, columns=columns, decode={"image": Image(size=32)})
        names = dataset.features["label"]["names"]
        # [end]
        print(f"{len(dataset)} images of the classes {', '.join(names)}")
        with DataLoader(dataset, batch_size=3) as loader:
            batch = next(iter(loader))
        print(list(batch["image"].shape), batch["label"].tolist(), batch["caption"])


def write(folder: Path) -> None:
    """Write 40 pictures, and a table of them."""
    with open(folder / "labels.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "shape", "caption"))
        for number, (picture, label) in enumerate(drawn(40)):
            (folder / f"{number:03d}.jpg").write_bytes(picture)
            rows.writerow((f"{number:03d}.jpg", SHAPES[label], f"picture {number}"))


if __name__ == "__main__":
    main()
