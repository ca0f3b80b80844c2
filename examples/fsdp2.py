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
            tokens = (start + np.arange(length)) % 60 + 1  # each token follows from the one before
            shards.write({"tokens": tokens.tolist()})


def make_training(loader: DataLoader):
    """Make model, optimizer and schedule; `fully_shard` comes before the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 61))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = {"tokens": lambda batch: (batch["tokens"][:, 1:] > 0).sum()}
    return model, optimizer, GradSchedule(loader, model, optimizer, 4, weights=weights, max_norm=1.0)


def train(saved: dict | None, stop: int) -> dict:
    """Train up to step `stop`; returns what a checkpoint holds."""
    dataset = ShardedDataset("texts.jsonl", decode={"tokens": Pad(0)})
    with DataLoader(dataset, batch_size=8, shuffle=True, seed=1) as loader:
        model, optimizer, sched = make_training(loader)
        if saved:
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
            sched.load_state_dict(saved["sched"])
        with sched:
            for batch in sched:
                logits, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
                )
                sched.backward(loss * sched.scale("tokens"))
                if info := sched.step():
                    if dist.get_rank() == 0:
                        tokens = info.totals["tokens"]
                        print(f"step {info.step}: {tokens:.0f} tokens, gradient {info.grad_norm:.4f}")
                    if info.step == stop:
                        break
            states = get_state_dict(model, optimizer)
            return {"model": states[0], "optim": states[1], "sched": sched.state_dict()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_texts()
    dist.barrier()
    train(train(None, stop=4), stop=8)  # stopped after 4 steps, and gone on with from the checkpoint
    dist.destroy_process_group()
