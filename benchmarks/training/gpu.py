"""`python -m benchmarks.training.gpu`: what a loader costs a training on a GPU.

A vision transformer (bfloat16, SGD) trains on photographs of W1, which each loader decodes, crops at random
and copies to the device; "one batch" is the same training on one batch that lies there: what a perfect loader
would give. What a loader costs a training is what is missing from that rate. Each run is a fresh process;
repeats are interleaved (A B C A B C ...), and medians shown.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import REPOSITORY
from benchmarks.data import Data, Sizes, read_through
from benchmarks.harness import interleaved, medians, run_child
from benchmarks.memory import tree_cpu_s
from benchmarks.options import data_option, jpegs_option, json_option, repeats_option
from benchmarks.peers.images import decode_crop_resize
from benchmarks.peers.ours import _images
from benchmarks.peers.torch import Images, collate_images
from benchmarks.peers.webdataset import _loader
from benchmarks.report import machine, save_figures, versions
from benchmarks.runner import Tell, forever
from dataflow import DataLoader

LIMIT_S = 90.0
"""A run that takes longer is ended and named."""
PERFECT = "one batch"
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
    PERFECT: one_batch,
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


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell the figures of one training, in a process of its own."""
    device = torch.device(job["device"])
    jpegs = Path(job["jpegs"]) if job["jpegs"] else None
    data = Data(Path(job["root"]), Sizes(**job["sizes"]), jpegs)
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
    first_batch_s = time.perf_counter() - started
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
        "done",
        first_batch_s=first_batch_s,
        samples_per_s=num_samples / elapsed_s,
        blocked_share=blocked_s / elapsed_s,
        cpu_s_per_1000=1e3 * cpu_s / num_samples,
        builders=f"{stats().num_workers} {stats().workers}" if stats else "",
    )


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


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    loader: str
    workers: int | None
    """None: the loader's own choice."""
    samples_per_s: float = 0.0
    blocked_share: float = 0.0
    """Of the time, in the loader's `next`; the device may still be busy with earlier steps."""
    cpu_s_per_1000: float = 0.0
    """CPU seconds of all processes for 1,000 samples, the training included."""
    builders: str = ""
    """Who built the batches, as far as the loader tells."""
    first_batch_s: float = 0.0
    """From constructing the loader, its index at hand, to the end of the first step."""
    reason: str = ""


def run_of(run: TrainingRun, job: dict[str, Any]) -> TrainingRun:
    """The run with its figures."""
    told = job | {"loader": run.loader, "workers": run.workers}
    events, _ = run_child(measured, told, environment={"OMP_NUM_THREADS": "1"}, limit_s=LIMIT_S)
    known = {field.name: events[field.name] for field in fields(TrainingRun) if field.name in events}
    return replace(run, **known)


def show(console: Console, rows: Sequence[TrainingRun]) -> None:
    """A table: the fastest first."""
    perfect = next((run.samples_per_s for run in rows if run.loader == PERFECT), 0.0)
    table = Table(title="Training fed by", title_justify="left")
    for heading in ("loader", "workers", "samples/s", "missing %", "in next %", "CPU s/1000", "first step s"):
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    for run in sorted(rows, key=lambda run: -run.samples_per_s):
        if run.reason:
            console.print(f"  {run.loader}, {run.workers} workers: not measured: {run.reason}", markup=False)
            continue
        table.add_row(
            run.loader + (f" ({run.builders})" if run.builders else ""),
            "" if run.workers is None else str(run.workers),
            f"{run.samples_per_s:,.0f}",
            f"{100 * (1 - run.samples_per_s / perfect):.1f}" if perfect else "",
            f"{100 * run.blocked_share:.1f}",
            f"{run.cpu_s_per_1000:.3g}",
            f"{run.first_batch_s:.2f}",
        )
    console.print(table)


@click.command()
@click.option("--device", default="cuda", show_default=True, help="Where the training runs.")
@click.option("--loaders", default=",".join(LOADERS), show_default=True, help="Which loaders.")
@click.option(
    "--workers", default="", help="Numbers of workers of the others.  [default: half the cores, and all]"
)
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Images a step.")
@click.option("--width", type=click.IntRange(64), default=384, show_default=True, help="Of the model.")
@click.option("--depth", type=click.IntRange(1), default=12, show_default=True, help="Of the model.")
@click.option("--images", type=click.IntRange(8), default=4_000, show_default=True, help="In the dataset.")
@repeats_option
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Timed seconds a run.")
@data_option
@jpegs_option
@json_option
def main(
    device: str,
    loaders: str,
    workers: str,
    batch: int,
    width: int,
    depth: int,
    images: int,
    repeats: int,
    seconds: float,
    root: Path | None,
    jpegs: Path | None,
    output: Path | None,
) -> None:
    """Measure what loaders cost a training on a GPU."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    data = Data((root or REPOSITORY / ".bench-data").resolve(), Sizes(images=images), jpegs)
    data.make("W1")
    LOADERS["dataflow"](data, batch, torch.device("cpu")).close()  # the first use indexes the shards
    read_through(data.root / "W1")
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else ""
    console.print(machine(), versions(), gpu)
    cores = len(os.sched_getaffinity(0))
    counts = [int(n) for n in workers.split(",")] if workers else [max(1, cores // 2), cores]
    planned = [
        TrainingRun(loader=name, workers=number)
        for name in re.split(r",(?! )", loaders)
        for number in (counts if name in WITH_WORKERS else [None])
    ]
    job = {"root": str(data.root), "sizes": asdict(data.sizes), "jpegs": str(jpegs) if jpegs else None}
    job |= {"device": device, "batch": batch, "width": width, "depth": depth}
    job |= {"warmup_s": 2.0, "timed_s": seconds}

    def measure(run: TrainingRun) -> TrainingRun:
        done = run_of(run, job)
        figures = done.reason or f"{done.samples_per_s:,.0f} samples/s"
        console.print(f"{run.loader}, {run.workers} workers: {figures}", markup=False)
        return done

    runs = list(interleaved(planned, repeats, measure))
    rows = medians(runs, "loader", "workers")
    show(console, rows)
    if output:
        save_figures(
            output, gpu=gpu, medians=[asdict(row) for row in rows], runs=[asdict(run) for run in runs]
        )


if __name__ == "__main__":
    main()
