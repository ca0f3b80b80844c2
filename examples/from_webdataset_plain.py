"""A training script with WebDataset; from_webdataset.py is the same script with this loader.

python examples/from_webdataset_plain.py
"""

import tempfile

import torch
import webdataset as wds
from sample_data import mixed_tars


def main() -> None:
    """Train two epochs."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 16 * 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        shards = mixed_tars(folder)  # yours are there already
        # [loader]
        dataset = (
            wds.WebDataset(shards, shardshuffle=4, nodesplitter=wds.split_by_node)
            .shuffle(200)
            .decode("torchrgb")
            .to_tuple("jpg;png", "cls")
            .batched(40)
        )
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
        for epoch in range(2):
            losses = []
            for image, label in loader:
                # [end]
                loss = torch.nn.functional.cross_entropy(model(image.flatten(1)), torch.as_tensor(label))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            mean = sum(losses) / len(losses)
            print(f"epoch {epoch}: mean loss {mean:.2f}")


if __name__ == "__main__":
    main()
