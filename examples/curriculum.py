"""Tune a small GPT on chats of two sources, and train more on what it is worse at.

torchrun --standalone --nproc-per-node 2 examples/curriculum.py

Every few steps the model is measured on some chats of each source that it never trains on, and the shares of
the sources (of tokens) follow. A checkpoint has the shares in the loader's state, so a run that was stopped
goes on from it as instruct_chats.py does, also with another number of processes.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import numbered_batches
from instruct_chats import LENGTH, TEMPLATE, VOCABULARY, train_step
from models import GPT
from sample_data import code_chats, sum_chats, tokenizer_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dataflow import ChatTemplate, DataLoader, Mixture, Packed, ShardedDataset, Topology

BATCHING = Packed(LENGTH, columns=["input_ids", "loss_mask"], overlong="error", window=128)


def main() -> None:
    """One of the processes."""
    parser = ArgumentParser(description="Tune a small GPT on two sources, more on what it is worse at.")
    parser.add_argument("--out", type=Path, default="out/curriculum", help="folder for data and checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--measure-every", type=int, default=20, help="steps between changes of the shares")
    parser.add_argument("--rows", type=int, default=12, help="rows of a step, over all processes")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(LENGTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    files = sum_chats(args.out), code_chats(args.out)
    tokenizer = tokenizer_file(args.out, files, VOCABULARY)
    stage = ChatTemplate(tokenizer, template=TEMPLATE, max_length=LENGTH)
    parts = [ShardedDataset(file, transform=stage).split({"train": 0.9, "held out": 0.1}) for file in files]
    held_out = [rows_of(part["held out"].take(24)) for part in parts]
    mixture = Mixture({part["train"]: 0.5 for part in parts}, shares="tokens", stop="all")
    each = args.rows // dist.get_world_size()
    with DataLoader(mixture, each, shuffle=True, seed=1, drop_last=True, batching=BATCHING) as loader:
        saving = {"folder": args.out, "steps": args.steps, "save_every": args.save_every}
        for step, batch in numbered_batches(loader, model, optimizer, **saving):
            loss = train_step(model, optimizer, batch)
            if step % args.measure_every == 0:  # all processes have the same model, so they agree
                losses = [measured(model.module, batches) for batches in held_out]
                # Sixteenths: rounding of the losses must not decide, and states stay small.
                shares = [max(1, round(16 * one / sum(losses))) for one in losses]
                mixture.set_weights(shares)  # from what is planned next on; a collective
                if dist.get_rank() == 0:
                    print(f"step {step} shares {shares}", flush=True)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


def rows_of(dataset: ShardedDataset) -> list[dict[str, Any]]:
    """All of a small dataset, packed: the same on each process, so each reads it alone."""
    with DataLoader(dataset, 4, batching=BATCHING, topology=Topology()) as loader:
        return list(loader)


@torch.no_grad()
def measured(model: GPT, batches: list[dict[str, Any]]) -> float:
    """The mean loss of what the assistant says."""
    total = tokens = 0.0
    for batch in batches:
        rows = batch["input_ids"]
        logits = model(rows.tokens, rows.positions, rows.attention_mask())
        targets = rows.targets(mask=batch["loss_mask"])
        total += float(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        tokens += int((targets >= 0).sum())
    return total / tokens


if __name__ == "__main__":
    main()
