"""What gpt_text.py does, in plain PyTorch.

torchrun --standalone --nproc-per-node 2 examples/gpt_text_plain.py --text *.txt
"""

import os
from argparse import ArgumentParser
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see the end of main()
from models import GPT
from sample_data import END, token_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH = 128  # tokens a sample is trained on


class Windows(Dataset[torch.Tensor]):
    """Pieces of LENGTH + 1 tokens of a file; the last token of one is the first of the next."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint8, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * LENGTH
        return torch.from_numpy(self.tokens[start : start + LENGTH + 1].astype(np.int64))


def main() -> None:
    """One of the processes."""
    parser = ArgumentParser(description="Train a small GPT on text.")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="default: the standard library")
    parser.add_argument(
        "--out", type=Path, default="out/gpt", help="folder for the tokens and the checkpoint"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a microbatch on each rank")
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches of a step on each rank")
    args = parser.parse_args()

    # torchrun started this script several times, and gave each process a number.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(LENGTH).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = Windows(token_file(args.out, args.text))
    # Pads with samples of the epoch's beginning, so every rank has as many batches.
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, pin_memory=device.type == "cuda")

    checkpoint = args.out / "checkpoint_plain.pt"
    step = epoch = num_done = 0  # num_done: batches of this epoch that were trained on
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # Only for as many ranks and the same batch size: else these batches are others.
        step, epoch, num_done = saved["step"], saved["epoch"], saved["num_done"]

    while step < args.steps:
        sampler.set_epoch(epoch)  # or each epoch would have the order of the first
        batches = islice(loader, num_done, None)  # reads what was trained on again, to skip it
        while step < args.steps and (window := list(islice(batches, args.accumulate))):
            # The losses are divided by the number of targets of all ranks' windows.
            total = torch.tensor(sum(num_targets(batch) for batch in window), device=device)
            dist.all_reduce(total)
            mean_loss = torch.zeros((), device=device)
            for number, batch in enumerate(window, 1):
                # Gradients travel in the backward pass of the last microbatch only. DDP averages them, so
                # the number of ranks is multiplied in again.
                with nullcontext() if number == len(window) else model.no_sync():
                    loss = sum_of_losses(model, batch.to(device)) * dist.get_world_size() / total
                    loss.backward()
                mean_loss += loss.detach() / dist.get_world_size()
            if clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
                step += 1
            optimizer.zero_grad()
            num_done += len(window)
            dist.all_reduce(mean_loss)
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean_loss.item():.6f}", flush=True)
            if step % args.save_every == 0:
                save(checkpoint, model, optimizer, {"step": step, "epoch": epoch, "num_done": num_done})
        epoch, num_done = epoch + 1, 0
    # A thread of gloo that still holds a tensor while Python ends aborts the program, so its threads must end
    # here. Nothing may keep the group (DDP's first import of dist.nn would, in default arguments), and DDP
    # may not be the last that lets go of it: it waits for the threads with the interpreter lock held.
    del model
    dist.destroy_process_group()


def num_targets(tokens: torch.Tensor) -> int:
    """Tokens of a batch that are predicted: not the ends of texts."""
    return int((tokens[:, 1:] != END).sum())


def sum_of_losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token, added up."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=END, reduction="sum")


def save(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: dict[str, int]
) -> None:
    """Write a checkpoint, under another name first: the job may be killed at any time."""
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, **position}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
