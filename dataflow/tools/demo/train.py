"""One training run of the demo: what each rank does, with either loader, from the start or from a checkpoint.

The loop is the one a user would write. Beside it runs a stopwatch with the same rules for both loaders: the
wait for the first batch (threads or workers start, the first blocks are read) is told apart, everything
after it is either training or waiting for data. Same seed, same number of ranks: same losses, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataflow.loader import DataLoader
from dataflow.tools.demo.data import LENGTH, tokens
from dataflow.tools.demo.live import LiveLine
from dataflow.tools.demo.model import ByteTransformer, next_byte_loss
from dataflow.tools.demo.torch_loop import MappedTokens, torch_loader

_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Run:
    """What to train, and with which loader."""

    title: str
    folder: str
    steps: int
    """Steps of the whole training; the run ends there, or at `stop`."""
    batch_size: int
    """Samples a rank and step."""
    seed: int
    stop: int | None = None
    """Save a checkpoint after this step and end."""
    resume: bool = False
    """Go on from the checkpoint."""
    torch_workers: int | None = None
    """None: dataflow; else torch's DataLoader with so many workers a rank."""

    @property
    def checkpoint(self) -> Path:
        """File with model, optimizer and loader state."""
        return Path(self.folder) / "checkpoint.pt"


@dataclass
class RunResult:
    """What a rank measured. Seconds are counted from its first batch on, unless said otherwise."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    """Mean over all ranks, per step."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each step after the first, waiting included."""
    samples_per_s: float = 0.0
    """All ranks together."""
    seconds: float = 0.0
    waited_s: float = 0.0
    """Seconds in `next(batches)` after the first batch. Near 0: the loader keeps up."""
    first_batch_s: float = 0.0
    """Seconds from making the loader to the first batch."""
    peak_bytes: int = 0
    """Most memory the rank's process had resident; torch itself is a few hundred MB of it."""
    worker_peak_bytes: list[int] = field(default_factory=list)
    """The same of each worker process; pages shared with the rank are counted here, too."""
    loader_peak_bytes: int = 0
    """Most bytes dataflow's buffers held; 0 for torch's loader, which does not tell."""
    loader_state: dict[str, Any] = field(default_factory=dict)
    """What was saved of the loader at `stop`."""

    @property
    def waiting_share(self) -> float:
        """`waited_s / seconds`."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def median_step_s(self) -> float:
        """Of `step_s`: what other programs do on the machine disturbs it less than the rate."""
        return median(self.step_s) if self.step_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields, and the share."""
        return {**asdict(self), "waiting_share": self.waiting_share}


def train(run: Run) -> RunResult:
    """Main function of a rank."""
    torch.manual_seed(
        run.seed
    )  # and no more: on one CPU thread a rank, this model's operations have one order
    model = DistributedDataParallel(ByteTransformer(LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    _warm_up(model, run.batch_size)
    saved = torch.load(run.checkpoint, weights_only=True) if run.resume else None
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    result = RunResult(first_step=saved["step"] if saved else 0)
    with ExitStack() as stack:
        began = time.perf_counter()
        if run.torch_workers is None:
            loader = stack.enter_context(_loader(run, saved))
            batches = _dataflow_batches(loader)
        else:
            batches = _torch_batches(run)
        live = stack.enter_context(LiveLine(run.title, run.steps, visible=dist.get_rank() == 0))
        _train(run, model, optimizer, batches, live, result, began)
        if run.torch_workers is None:
            result.loader_peak_bytes = loader.stats().memory.peak_bytes
            _save(run, model, optimizer, loader, result)
        _note_memory(result)
    return result


def _train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
    live: LiveLine,
    result: RunResult,
    began: float,
) -> None:
    started = began
    for step in range(result.first_step, run.stop or run.steps):
        asked = time.perf_counter()
        batch = next(batches)
        got = time.perf_counter()
        if step == result.first_step:
            started, result.first_batch_s = got, got - began
        else:
            result.waited_s += got - asked
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.losses.append(_mean_over_ranks(loss))
        done = time.perf_counter()
        result.seconds = done - started
        if step != result.first_step:
            result.step_s.append(done - asked)
        samples = len(result.losses) * run.batch_size * dist.get_world_size()
        result.samples_per_s = samples / result.seconds
        live.show(step + 1, result.losses[-1], result.samples_per_s, LENGTH, result.waiting_share)


def _loader(run: Run, saved: dict[str, Any] | None) -> DataLoader:
    loader = DataLoader(tokens(run.folder), batch_size=run.batch_size, shuffle=True, seed=run.seed)
    if saved:
        loader.load_state_dict(saved["loader"])
    return loader


def _dataflow_batches(loader: DataLoader) -> Iterator[Tensor]:
    while True:  # each loop over the loader is an epoch
        for batch in loader:
            yield batch["tokens"]


def _torch_batches(run: Run) -> Iterator[Tensor]:
    assert run.torch_workers is not None
    paths = sorted(str(path) for path in Path(run.folder).glob("tokens-*.bin"))
    loader, sampler = torch_loader(
        MappedTokens(paths, LENGTH),
        run.batch_size,
        seed=run.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        num_workers=run.torch_workers,
    )
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def _warm_up(model: nn.Module, batch_size: int) -> None:
    """One step that changes nothing: DDP settles the layout of its buckets after its first backward.

    With more than two ranks, the layout decides the order in which gradients are added; without this, a
    run resumed on four ranks differs from an uninterrupted one in the last bits.
    """
    next_byte_loss(model, torch.zeros(batch_size, LENGTH + 1, dtype=torch.int64)).backward()
    model.zero_grad()


def _mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def _save(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, result: RunResult
) -> None:
    if run.stop is None:
        return
    result.loader_state = loader.state_dict()  # the same on every rank
    if dist.get_rank() == 0:
        state = {
            "step": run.stop,
            "model": model.module.state_dict(),  # type: ignore[union-attr]
            "optimizer": optimizer.state_dict(),
            "loader": result.loader_state,
        }
        torch.save(state, run.checkpoint)


def _note_memory(result: RunResult) -> None:
    result.peak_bytes = peak_bytes(os.getpid())
    result.worker_peak_bytes = [peak_bytes(p.pid) for p in multiprocessing.active_children() if p.pid]


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process of ours since it began; 0 where the system does not say."""
    try:
        # Not getrusage: after fork and exec, its maximum includes the parent's.
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
