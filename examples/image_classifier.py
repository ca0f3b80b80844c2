"""Train a small image classifier on a tar of JPEGs, in several processes. A stopped run goes on where it was.

torchrun --standalone --nproc-per-node 2 examples/image_classifier.py --jpegs folder/

The same in plain PyTorch is in image_classifier_plain.py.
"""

import os
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
from models import ConvNet
from sample_data import image_tar
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule, Image, ShardedDataset


def main() -> None:
    """One of the processes."""
    parser = ArgumentParser(description="Train a small image classifier on a tar of JPEGs.")
    parser.add_argument("--tar", type=Path, help="a WebDataset tar with jpg and cls")
    parser.add_argument("--jpegs", type=Path, help="without --tar: JPEGs to make one of, in a folder a class")
    parser.add_argument("--classes", type=int, default=10, help="number of classes, or more")
    parser.add_argument("--size", type=int, default=32, help="height and width that pictures are resized to")
    parser.add_argument("--out", type=Path, default="out/images", help="folder for tar and checkpoint")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a microbatch on each rank")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches of a step on each rank")
    args = parser.parse_args()

    # torchrun started this script several times, and gave each process a number.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(1)
    model = DistributedDataParallel(ConvNet(args.classes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tar = args.tar or image_tar(args.out, args.jpegs)
    # Decoded, resized and mirrored at random: {"jpg": uint8 [batch, 3, size, size], "cls": int64 [batch]}.
    pictures = Image(size=args.size, flip=0.5)
    dataset = ShardedDataset(tar, columns=["jpg", "cls"], decode={"jpg": pictures, "cls": "int"})

    with (
        # Each rank gets its part of the same shuffled batches.
        DataLoader(dataset, args.batch_size, shuffle=True, seed=1, device=device) as loader,
        # A step is that of one batch of all ranks' microbatches, the shorter one at an epoch's end too.
        GradSchedule(
            loader, model, optimizer, args.accumulate, weights={"samples": num_samples}, max_norm=1.0
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
                loss = cross_entropy(model(batch["jpg"]), batch["cls"], reduction="sum")
                loss = loss * sched.scale("samples")
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


def num_samples(batch: dict[str, torch.Tensor]) -> int:
    """Pictures of a batch."""
    return len(batch["cls"])


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sched: GradSchedule) -> None:
    """Write a checkpoint, under another name first: the job may be killed at any time."""
    if dist.get_rank() == 0:  # it is the same on every rank
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "sched": sched.state_dict()}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
