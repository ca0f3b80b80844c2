"""Tune a small GPT on chats of two sources, 70 to 30 by tokens: the loss counts what the assistant says.

torchrun --standalone --nproc-per-node 2 examples/instruct_chats.py

A run that was stopped goes on from its last checkpoint, also with another number of processes, as in
pretrain_text.py.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import numbered_batches
from models import GPT
from sample_data import code_chats, sum_chats, tokenizer_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dataflow import ChatTemplate, DataLoader, Mixture, Packed, ShardedDataset

LENGTH = 128  # tokens of a row, and most of a chat
VOCABULARY = 512
TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}"""


def main() -> None:
    """One of the processes."""
    parser = ArgumentParser(description="Tune a small GPT on chats of two sources.")
    parser.add_argument("--out", type=Path, default="out/chats", help="folder for data and checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=12, help="rows of a step, over all processes")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(LENGTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    sources = sum_chats(args.out), code_chats(args.out)
    tokenizer = tokenizer_file(args.out, sources, VOCABULARY)
    stage = ChatTemplate(tokenizer, template=TEMPLATE, max_length=LENGTH)
    sums, code = (ShardedDataset(source, transform=stage) for source in sources)
    # [mixture]
    mixture = Mixture({sums: 0.7, code: 0.3}, shares="tokens", stop="all")
    batching = Packed(LENGTH, columns=["input_ids", "loss_mask"], overlong="error")
    # [end]
    each = args.rows // dist.get_world_size()
    with DataLoader(mixture, each, shuffle=True, seed=1, drop_last=True, batching=batching) as loader:
        saving = {"folder": args.out, "steps": args.steps, "save_every": args.save_every}
        for step, batch in numbered_batches(loader, model, optimizer, **saving):
            loss = train_step(model, optimizer, batch)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: dict[str, Any]
) -> float:
    """One step on this process's rows; the mean loss of all that the assistant says, over all processes."""
    rows = batch["input_ids"]
    logits = model(rows.tokens, rows.positions, rows.attention_mask())  # chats do not see each other
    targets = rows.targets(mask=batch["loss_mask"])  # -100 but where the assistant speaks
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    totals = torch.stack([loss.detach(), (targets >= 0).sum()])
    dist.all_reduce(totals)
    optimizer.zero_grad()
    # DDP takes the mean over processes; what is wanted is the sum over tokens, divided by their number.
    (loss * dist.get_world_size() / totals[1]).backward()
    optimizer.step()
    return float(totals[0] / totals[1])


if __name__ == "__main__":
    main()
