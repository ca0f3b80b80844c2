"""Pack documents into rows, and attend inside each document only, with a compiled `flex_attention`.

python examples/packed_rows.py

It trains on a GPU. On a CPU, where flex_attention has no backward pass, it prints the losses alone.
"""

import tempfile

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy

from dataflow import DataLoader, Packed, PackedRows, ShardedDataset, ShardWriter

LENGTH, VOCABULARY, WIDTH = 256, 64, 32
attend = torch.compile(flex_attention)


class Model(torch.nn.Module):
    """One layer of attention with a single head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = torch.nn.Embedding(LENGTH, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, rows: PackedRows) -> torch.Tensor:
        """Logits [rows, LENGTH, VOCABULARY]."""
        x = self.token(rows.tokens) + self.position(rows.positions)
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)  # [rows, 1 head, LENGTH, WIDTH]
        return self.head(x + attend(q, k, v, block_mask=rows.block_mask())[:, 0])


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_grad_enabled(device == "cuda")
torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with tempfile.TemporaryDirectory() as folder:
    with ShardWriter(f"{folder}/%d.jsonl") as shards:
        for i in range(400):  # documents of 1 to 200 tokens
            shards.write({"tokens": [(i + place) % VOCABULARY for place in range(1 + i * 37 % 200)]})
    dataset, batching = ShardedDataset(f"{folder}/*.jsonl"), Packed(LENGTH, "tokens")
    # With drop_last all batches have one shape, so there is one compilation.
    with DataLoader(dataset, 16, True, drop_last=True, batching=batching, device=device) as loader:
        for batch in loader:
            rows = batch["tokens"]
            loss = cross_entropy(model(rows).flatten(0, 1), rows.targets().flatten())
            if device == "cuda":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"{len(rows.segments.length)} documents in {len(rows.tokens)} rows, loss {loss:.3f}")
        print(f"{loader.stats().lengths.efficiency:.1%} of the places hold tokens")
