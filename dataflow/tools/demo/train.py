"""One training of the demo: what each rank does, with either loader, from the start or from a checkpoint.

The loop is the one a user would write. Beside it runs a stopwatch with the same rules for both loaders: the
wait for the first batch (threads or workers start, the first blocks are read) is told apart, everything
after it is either training or waiting for data. Same seed, same number of ranks: same losses, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataflow.loader import DataLoader
from dataflow.tools.demo.data import LENGTH, tokens
from dataflow.tools.demo.loaders import torch_epochs
from dataflow.tools.demo.model import ByteTransformer, next_byte_loss

_LEARNING_RATE = 3e-3
_REDRAW_S = 0.1
_PLAIN_LINES = 4
"""Lines a training prints where nothing can be redrawn."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train, and with which loader."""

    title: str
    folder: str
    steps: int
    """Steps of the whole training; it ends there, or at `stop`."""
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


@dataclass(kw_only=True)
class TrainingResult:
    """What a rank measured. Seconds are counted from its first batch on, unless said otherwise."""

    first_step: int = 0
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


def train(training: Training) -> TrainingResult:
    """Main function of a rank."""
    # And no more: on one CPU thread a rank, this model's operations have one order.
    torch.manual_seed(training.seed)
    model = DistributedDataParallel(ByteTransformer(LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    _warm_up(model, training.batch_size)
    saved = torch.load(training.checkpoint, weights_only=True) if training.resume else None
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    result = TrainingResult(first_step=saved["step"] if saved else 0)
    with ExitStack() as stack:
        began = time.perf_counter()
        if training.torch_workers is not None:
            _train(training, model, optimizer, _torch_batches(training), result, began)
        else:
            dataset = tokens(training.folder)
            loader = stack.enter_context(
                DataLoader(dataset, training.batch_size, shuffle=True, seed=training.seed)
            )
            if saved:
                loader.load_state_dict(saved["loader"])
            _train(training, model, optimizer, _batches(loader), result, began)
            result.loader_peak_bytes = loader.stats().memory.peak_bytes
            if training.stop is not None:
                result.loader_state = loader.state_dict()  # the same on every rank
                _save(training, model, optimizer, result.loader_state)
        result.peak_bytes = peak_bytes(os.getpid())
        result.worker_peak_bytes = [peak_bytes(p.pid) for p in multiprocessing.active_children() if p.pid]
    return result


def _train(
    training: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
    result: TrainingResult,
    began: float,
) -> None:
    started = began
    line = ProgressLine(training.title, training.steps, visible=dist.get_rank() == 0)
    for step in range(result.first_step, training.stop or training.steps):
        before = time.perf_counter()
        batch = next(batches)
        after = time.perf_counter()
        first = step == result.first_step
        if first:
            started, result.first_batch_s = after, after - began
        else:
            result.waited_s += after - before
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.losses.append(_mean_over_ranks(loss))
        now = time.perf_counter()
        result.seconds = now - started
        result.step_s += [] if first else [now - before]
        samples = len(result.losses) * training.batch_size * dist.get_world_size()
        result.samples_per_s = samples / result.seconds
        line.show(step + 1, result)
    line.close()


def _batches(loader: DataLoader) -> Iterator[Tensor]:
    while True:  # each loop over the loader is an epoch
        for batch in loader:
            yield batch["tokens"]


def _torch_batches(training: Training) -> Iterator[Tensor]:
    assert training.torch_workers is not None
    epochs = torch_epochs(
        training.folder,
        training.batch_size,
        seed=training.seed,
        num_workers=training.torch_workers,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    for batches in epochs:
        yield from batches


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
    training: Training,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loader_state: dict[str, Any],
) -> None:
    if dist.get_rank() == 0:
        state = {
            "step": training.stop,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader_state,
        }
        torch.save(state, training.checkpoint)


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process of ours since it began; 0 where the system does not say."""
    try:
        # Not getrusage: after fork and exec, its maximum includes the parent's.
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0


class ProgressLine:
    """Where a training stands: redrawn in place on a terminal, a few plain lines elsewhere."""

    def __init__(self, title: str, steps: int, *, visible: bool) -> None:
        self._title, self._steps, self._visible = title, steps, visible
        self._redrawn = sys.stdout.isatty()
        self._shown_at = 0.0
        self._text = ""

    def show(self, step: int, result: TrainingResult) -> None:
        """Tell about a finished step; on a terminal ten times a second at most."""
        mb_per_s = result.samples_per_s * LENGTH / 1e6
        self._text = (  # fits 80 columns
            f"  {self._title:<13} {step:>3}/{self._steps} loss {result.losses[-1]:.3f} "
            f"{result.samples_per_s:>5,.0f} samples/s {mb_per_s:.3f} MB/s waiting {result.waiting_share:.1%}"
        )
        now = time.perf_counter()
        if self._redrawn and now - self._shown_at > _REDRAW_S:
            self._shown_at = now
            self._print("\r")
        elif not self._redrawn and step % max(1, self._steps // _PLAIN_LINES) == 0:
            self._print("\n")

    def close(self) -> None:
        """Leave the last line of a terminal as it is."""
        if self._redrawn:
            self._print("\n")

    def _print(self, end: str) -> None:
        if self._visible:
            print(f"{self._text:<79}" if self._redrawn else self._text, end=end, flush=True)
