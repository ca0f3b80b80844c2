"""Pretrain a small GPT on raw text: tokenized and packed while it trains, by any number of processes.

torchrun --standalone --nproc-per-node 2 examples/pretrain_text.py --text *.txt

A run that was stopped goes on from its last checkpoint, with any number of processes: each step takes the
same rows, so its loss is the same to rounding.
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import numbered_batches
from models import GPT
from sample_data import text_file, tokenizer_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, Packed, PackedRows, ShardedDataset, Tokenize

LENGTH = 128  # tokens of a row
VOCABULARY = 512


def main() -> None:
    """One of the processes."""
    parser = ArgumentParser(description="Pretrain a small GPT on raw text.")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="default: the standard library")
    parser.add_argument("--out", type=Path, default="out/pretrain", help="folder for data and checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=24, help="rows of a step, over all processes")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(LENGTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    text = text_file(args.out, args.text)
    tokenizer = tokenizer_file(args.out, [text], VOCABULARY)
    dataset = ShardedDataset(text, transform=Tokenize(tokenizer, eos="<|end|>"))
    loader = DataLoader(
        dataset,
        args.rows // dist.get_world_size(),
        shuffle=True,
        seed=1,
        drop_last=True,
        batching=Packed(LENGTH, "input_ids"),  # nobody knows how long documents are until they are tokenized
    )
    with loader:
        saving = {"folder": args.out, "steps": args.steps, "save_every": args.save_every}
        for step, batch in numbered_batches(loader, model, optimizer, **saving):
            loss = train_step(model, optimizer, batch["input_ids"])
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


def train_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rows: PackedRows) -> float:
    """One step on this process's rows; the mean loss of all predicted tokens, over all processes."""
    logits = model(rows.tokens, rows.positions, rows.attention_mask())  # documents do not see each other
    targets = rows.targets()  # -100 behind the end of a document
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
