"""Train a small GPT on text, in several processes. A run that was stopped goes on from its last checkpoint.

torchrun --standalone --nproc-per-node 2 examples/gpt_text.py --text *.txt

The same in plain PyTorch is in gpt_text_plain.py.
"""

import os
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
from models import GPT
from sample_data import END, token_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule, ShardedDataset

LENGTH = 128  # tokens a sample is trained on


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
    tokens = token_file(args.out, args.text)
    dataset = ShardedDataset(tokens, format="tokens", dtype="uint8", length=LENGTH)

    with (
        # Each rank gets its part of the same shuffled batches: {"tokens": int64 [batch, LENGTH + 1]}.
        DataLoader(dataset, args.batch_size, shuffle=True, seed=1, device=device) as loader,
        # What a loss is divided by differs from batch to batch, so it is counted, over a whole window.
        GradSchedule(
            loader, model, optimizer, args.accumulate, weights={"tokens": num_targets}, max_norm=1.0
        ) as sched,
    ):
        checkpoint = args.out / "checkpoint.pt"
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=device, weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            sched.load_state_dict(saved["sched"])  # windows, steps, and the place in the data

        mean_loss = torch.zeros((), device=device)
        while sched.position.step < args.steps:  # one loop over `sched` is one epoch
            for batch in sched:
                # The sum over this microbatch, scaled: a part of the mean over all ranks' windows.
                loss = sum_of_losses(model, batch["tokens"]) * sched.scale("tokens")
                sched.backward(loss)
                mean_loss += loss.detach() / dist.get_world_size()
                if info := sched.step():  # at the end of a window the optimizer has stepped
                    dist.all_reduce(mean_loss)
                    if dist.get_rank() == 0:
                        print(f"step {info.step} loss {mean_loss.item():.6f}", flush=True)
                    mean_loss.zero_()
                    if info.step % args.save_every == 0:
                        save(checkpoint, model, optimizer, sched)
                    if info.step == args.steps:
                        break
    dist.destroy_process_group()


def num_targets(batch: dict[str, torch.Tensor]) -> int:
    """Tokens of a batch that are predicted: not the ends of texts."""
    return int((batch["tokens"][:, 1:] != END).sum())


def sum_of_losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token, added up."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=END, reduction="sum")


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sched: GradSchedule) -> None:
    """Write a checkpoint, under another name first: the job may be killed at any time."""
    if dist.get_rank() == 0:  # it is the same on every rank
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "sched": sched.state_dict()}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
