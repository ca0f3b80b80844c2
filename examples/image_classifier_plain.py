"""What image_classifier.py does, in plain PyTorch.

torchrun --standalone --nproc-per-node 2 examples/image_classifier_plain.py --jpegs folder/
"""

import os
import tarfile
from argparse import ArgumentParser
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see the end of main()
from models import ConvNet
from sample_data import image_tar
from simplejpeg import decode_jpeg
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TarImages(Dataset[tuple[torch.Tensor, int]]):
    """The samples of an uncompressed tar with a jpg and a cls for each key, in any order."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        places: dict[str, tuple[int, int]] = {}
        classes: dict[str, int] = {}
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, _, ending = member.name.rpartition(".")
                if ending == "jpg":
                    places[key] = (member.offset_data, member.size)
                elif ending == "cls":
                    classes[key] = int(tar.extractfile(member).read())
        self.samples = [(*places[key], classes[key]) for key in places]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        offset, num_bytes, label = self.samples[index]
        with open(self.path, "rb") as file:  # not one file for all: workers would share its position
            file.seek(offset)
            pixels = torch.from_numpy(decode_jpeg(file.read(num_bytes))).permute(2, 0, 1)
        pixels = interpolate(pixels[None].float(), (self.size, self.size), mode="bilinear")[0]
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return pixels.round().byte(), label


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
    dataset = TarImages(args.tar or image_tar(args.out, args.jpegs), args.size)
    # Pads with samples of the epoch's beginning, so every rank has as many batches.
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader = DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=1, pin_memory=device.type == "cuda"
    )

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
        torch.manual_seed(1000 * epoch + dist.get_rank())  # workers' draws begin here, so they are repeated
        batches = islice(loader, num_done, None)  # reads and decodes what was trained on again, to skip it
        while step < args.steps and (window := list(islice(batches, args.accumulate))):
            # The losses are divided by the number of samples of all ranks' windows.
            total = torch.tensor(sum(len(labels) for _, labels in window), device=device)
            dist.all_reduce(total)
            mean_loss = torch.zeros((), device=device)
            for number, (pictures, labels) in enumerate(window, 1):
                # Gradients travel in the backward pass of the last microbatch only. DDP averages them, so
                # the number of ranks is multiplied in again.
                with nullcontext() if number == len(window) else model.no_sync():
                    loss = cross_entropy(model(pictures.to(device)), labels.to(device), reduction="sum")
                    loss = loss * dist.get_world_size() / total
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
