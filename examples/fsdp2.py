"""FSDP2 with gradient accumulation over batches of different numbers of tokens, saved and resumed.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dataflow import DataLoader, GradSchedule, Pad, ShardedDataset, ShardWriter


def write_texts() -> None:
    """Write 512 texts of 5 to 40 tokens; token 0 fills up."""
    rng = np.random.default_rng(0)
    with ShardWriter("texts.jsonl", overwrite=True) as shards:
        for _ in range(512):
            start, length = rng.integers(1, 60), rng.integers(5, 41)
            shards.write({"tokens": ((start + np.arange(length)) % 60 + 1).tolist()})


def train(saved: dict | None, stop: int) -> dict:
    """Train up to step `stop`; returns what a checkpoint holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 61))
    for layer in (*model, model):
        fully_shard(layer)  # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = {"tokens": lambda batch: (batch["tokens"][:, 1:] > 0).sum()}
    dataset = ShardedDataset("texts.jsonl", decode={"tokens": Pad(0)})
    loader = DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
    with loader, GradSchedule(loader, model, optimizer, 4, weights=weights, max_norm=1.0) as sched:
        if saved:
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
            sched.load_state_dict(saved["sched"])
        for batch in sched:
            logits, targets = model(batch["tokens"][:, :-1]).flatten(0, 1), batch["tokens"][:, 1:].flatten()
            loss = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
            sched.backward(loss * sched.scale("tokens"))
            if info := sched.step():
                if dist.get_rank() == 0:
                    tokens = info.totals["tokens"]
                    print(f"step {info.step}: {tokens:.0f} tokens, gradient {info.grad_norm:.4f}")
                if info.step == stop:
                    break
        model_state, optim_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optim_state, "sched": sched.state_dict()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_texts()
    dist.barrier()
    train(train(None, stop=4), stop=8)  # stopped after 4 steps, and gone on with from the checkpoint
    dist.destroy_process_group()
