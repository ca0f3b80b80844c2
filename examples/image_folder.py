"""Train on a folder of class folders as it lies, as torchvision's ImageFolder reads it; stop, and go on.

python examples/image_folder.py
"""

import tempfile
from pathlib import Path

import torch
from sample_data import drawn

from dataflow import DataLoader, Image, ShardedDataset


def main() -> None:
    """Train an epoch, of which the last batches come from a loader that is made anew."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))  # yours is there already
        # [loader]
        columns = {"image": "jpg", "label": "cls"}
        dataset = ShardedDataset(folder, columns=columns, decode={"image": Image(size=32)})
        names = dataset.features["label"]["names"]
        # [end]
        print(f"{len(dataset)} images of the classes {', '.join(names)}")
        torch.manual_seed(0)
        model = torch.nn.Linear(3 * 32 * 32, len(names))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(dataset, batch_size=40, shuffle=True, seed=0)
        for number, batch in enumerate(loader, 1):
            loss = torch.nn.functional.cross_entropy(model(batch["image"].flatten(1) / 255), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 4:
                state = loader.state_dict()  # JSON: save it beside the model
                break
        loader.close()

        resumed = DataLoader(dataset, batch_size=40, shuffle=True, seed=0)
        resumed.load_state_dict(state)
        print(f"resumed after batch 4: {len(list(resumed))} batches are left")
        resumed.close()


def write(folder: Path) -> None:
    """Write 400 pictures into four folders."""
    for number, (picture, label) in enumerate(drawn(400)):
        path = folder / ("across", "down", "falling", "rising")[label] / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture)


if __name__ == "__main__":
    main()
