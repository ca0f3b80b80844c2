"""The measured process of `training`: a vision transformer that is fed by one loader."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.child_events import forever, telling
from benchmarks.data import Data, Sizes
from benchmarks.images import decode_crop_resize
from benchmarks.memory import tree_cpu_s
from benchmarks.ours import _images
from benchmarks.peers_torch import Images, collate_images
from benchmarks.peers_webdataset import _loader
from dataflow import DataLoader

DECIDED_S = 12.0
"""So long a loader that chooses its builders has for going over to processes; then it is taken as it is."""
BATCHES_AHEAD = 2
"""Steps that may be under way on the device before the host waits, as where a training logs its loss."""


class VisionTransformer(nn.Module):
    """ViT-S/16 without dropout (https://arxiv.org/abs/2012.12877), of images as bytes."""

    def __init__(self, width: int = 384, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images.float() / 255).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(tokens).mean(1))


def ours(data: Data, batch: int, device: torch.device, **options: Any) -> Any:
    return DataLoader(_images(data), batch, shuffle=True, drop_last=True, device=device, **options)


def torch_loader(data: Data, batch: int, device: torch.device, workers: int) -> Iterable[Any]:
    return torch.utils.data.DataLoader(
        Images(data),
        batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate_images,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )


def webdataset(data: Data, batch: int, device: torch.device, workers: int) -> Iterable[Any]:
    def sample(fields: dict[str, Any]) -> Any:
        return decode_crop_resize(fields["jpg"]), int(fields["cls"])

    loader = _loader(data.files("W1"), workers, batch, 1000, sample, collate_images)
    loader.pin_memory = device.type == "cuda"
    return loader


def one_batch(data: Data, batch: int, device: torch.device) -> Iterable[Any]:
    """A perfect loader: a batch that lies on the device."""
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, device=device)
    return itertools.repeat((images, torch.randint(0, 1000, (batch,), device=device)))


LOADERS: Mapping[str, Callable[..., Iterable[Any]]] = {
    "one batch": one_batch,
    "dataflow": ours,
    "dataflow, threads": partial(ours, workers="thread"),
    "torch": torch_loader,
    "WebDataset": webdataset,
}
WITH_WORKERS = ("torch", "WebDataset")


def batches_of(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels on the device."""
    for batch in forever(loader):
        images, labels = (batch["jpg"], batch["cls"]) if isinstance(batch, Mapping) else batch
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    device = torch.device(job["device"])
    jpegs = Path(job["jpegs"]) if job["jpegs"] else None
    data = Data(Path(job["root"]), Sizes(**job["sizes"]), jpegs)
    with telling() as tell:
        torch.manual_seed(0)
        model = VisionTransformer(job["width"], job["depth"]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        made = LOADERS[job["loader"]]
        if job["workers"]:
            made = partial(made, workers=job["workers"])
        step = partial(stepped, model, optimizer, device)
        images, labels = next(batches_of(one_batch(data, job["batch"], device), device))
        step(images, labels)  # CUDA and its libraries start
        settled(device)
        started = time.perf_counter()
        loader = made(data, job["batch"], device)
        batches = batches_of(loader, device)
        step(*next(batches))
        settled(device)
        tell("first", first_batch_s=time.perf_counter() - started)
        stats = getattr(loader, "stats", None)
        until = time.perf_counter() + DECIDED_S
        while stats and "until" in stats().workers_reason and time.perf_counter() < until:
            trained(batches, step, device, 0.1)
        trained(batches, step, device, job["warmup_s"])
        cpu_s = tree_cpu_s(os.getpid())
        num_steps, elapsed_s, blocked_s = trained(batches, step, device, job["timed_s"])
        cpu_s = tree_cpu_s(os.getpid()) - cpu_s
        num_samples = num_steps * job["batch"]
        tell(
            "timed",
            samples_per_s=num_samples / elapsed_s,
            blocked_share=blocked_s / elapsed_s,
            cpu_s_per_1000=1e3 * cpu_s / num_samples,
            builders=f"{stats().num_workers} {stats().workers}" if stats else "",
        )
        tell("watched")
    os._exit(0)  # peers whose threads or workers do not end must not hold up the others


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, images: Tensor, labels: Tensor
) -> None:
    """One step of the training, in bfloat16."""
    with torch.autocast(device.type, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def settled(device: torch.device) -> None:
    """Wait for what is under way on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trained(
    batches: Iterator[Any], step: Callable[..., None], device: torch.device, seconds: float
) -> tuple[int, float, float]:
    """Steps, seconds until the last of them has ended, and seconds of them in the loader's `next`."""
    events: list[torch.cuda.Event] = []
    num_steps, blocked_s, started = 0, 0.0, time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        images, labels = next(batches)
        blocked_s += time.perf_counter() - now
        step(images, labels)
        num_steps += 1
        if device.type == "cuda":
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > BATCHES_AHEAD:
                events.pop(0).synchronize()
    settled(device)
    return num_steps, time.perf_counter() - started, blocked_s


if __name__ == "__main__":
    main()
