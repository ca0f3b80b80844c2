"""Train on shards with a checkpoint that knows its batch: run it twice, and the second run goes on."""

import sysconfig
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from dataflow import DataLoader, ShardedDataset

# Real data that every machine has: the source of Python's standard library, as two files.
if not Path("text-1.bin").exists():
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    for shard in range(2):
        Path(f"text-{shard}.bin").write_bytes(text[shard << 18 : (shard + 1) << 18])

dataset = ShardedDataset("text-*.bin", format="tokens", dtype="uint8", length=17)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(256, 32),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 32, 256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, 256),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
checkpoint, first = Path("checkpoint.pt"), 1

with DataLoader(dataset, batch_size=256, shuffle=True, seed=1) as loader:
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # on any number of ranks
        first = saved["step"] + 1
        print(f"go on with step {first}")
    for step, batch in enumerate(loader, first):
        tokens = batch["tokens"].long()  # [256, 17]: sixteen bytes, and the one to predict
        predicted = model(tokens[:, :16])
        loss = cross_entropy(predicted, tokens[:, 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            right = (predicted.argmax(1) == tokens[:, 16]).float().mean()
            print(f"step {step}: loss {loss:.2f}, {right:.0%} of the next bytes are right")
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **states}, checkpoint)
