"""The training script of from_webdataset_plain.py with this loader. It can also stop and go on anywhere.

python examples/from_webdataset.py
"""

import tempfile

import torch
from sample_data import mixed_tars

from dataflow import DataLoader, Image, ShardedDataset


def main() -> None:
    """Train two epochs; in the second one the loader is made anew, as after a crash."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 16 * 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        shards = mixed_tars(folder)  # yours are there already
        # [loader]
        columns = {"image": "jpg|png", "label": "cls"}
        dataset = ShardedDataset(shards, columns=columns, decode={"image": Image(size=16), "label": "int"})
        loader = DataLoader(dataset, batch_size=40, shuffle=True, seed=0)
        for epoch in range(2):
            losses = []
            for number, batch in enumerate(loader):
                # [end]
                image = batch["image"].flatten(1) / 255
                loss = torch.nn.functional.cross_entropy(model(image), batch["label"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if epoch == 1 and number == 3:
                    state = loader.state_dict()  # JSON: save it beside the model
            mean = sum(losses) / len(losses)
            print(f"epoch {epoch}: {len(losses)} batches of {len(dataset)} samples, mean loss {mean:.2f}")
        loader.close()

        resumed = DataLoader(dataset, batch_size=40, shuffle=True, seed=0)
        resumed.load_state_dict(state)
        print(f"resumed after batch 4 of epoch 1: {len(list(resumed))} batches are left")
        resumed.close()


if __name__ == "__main__":
    main()
