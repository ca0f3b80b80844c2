"""The loss spiked at a step: tell which samples were in it, and train again without that step.

python examples/explain_step.py
"""

import tempfile

import torch

import dataflow
from dataflow import DataLoader, ShardedDataset, ShardWriter


def train(loader: DataLoader) -> list[float]:
    """Two epochs of a small regression; the loss of each step."""
    model, losses = torch.nn.Linear(8, 1), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in loader:
            loss = (model(batch["npy"]).squeeze(1) - batch["cls"]).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    """Print what was in the step with the largest loss."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(f"{folder}/train-%03d.tar", max_count=200) as shards:
            for i in range(1_000):
                x = torch.randn(8) * (100 if i == 731 else 1)  # one of them is damaged
                shards.write({"__key__": f"sample{i:04d}", "npy": x.numpy(), "cls": i % 2})

        with DataLoader(ShardedDataset(f"{folder}/*.tar"), batch_size=20, shuffle=True, seed=3) as loader:
            before = loader.state_dict()
            losses = train(loader)
            state = loader.state_dict()  # as any checkpoint has it
        spike = max(range(len(losses)), key=lambda step: losses[step])
        print(f"the loss spiked at step {spike} of {len(losses)}: {losses[spike]:.1f}")

        # Later, on another machine: the state and the data are all it takes.
        dataset = ShardedDataset(f"{folder}/*.tar")
        table = dataflow.provenance(state, dataset, spike)
        largest = [dataset[sample]["npy"].abs().max().item() for sample in table["sample"].to_pylist()]
        row = table.slice(largest.index(max(largest)), 1).to_pylist()[0]
        place = f"{row['shard'].rpartition('/')[2]}, byte {row['offset']}"
        print(f"{row['key']} in row {row['row']} of rank {row['rank']}: {place}, epoch {row['epoch']}")

        with DataLoader(dataset, batch_size=20) as loader:
            loader.load_state_dict(state)
            batch = loader.batch_at(spike)  # the very batch
            print(f"its largest value is {batch['npy'][row['row']].abs().max():.0f}")

        (steps,) = dataflow.find(state, dataset, [row["key"]])["steps"].to_pylist()
        skipped = [(step, step + 1) for step in steps]
        with DataLoader(dataset, batch_size=20, shuffle=True, seed=3, skip_steps=skipped) as loader:
            loader.load_state_dict(before)
            print(f"without steps {steps} the largest loss is {max(train(loader)):.1f}")


if __name__ == "__main__":
    main()
