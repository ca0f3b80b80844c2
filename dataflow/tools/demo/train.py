"""The training of the demo: a small model, and what each rank does, from the start or from a checkpoint.

The loop is the one a user would write. Beside it runs a stopwatch: the wait for the first batch (threads
start, the first blocks are read) is told apart, everything after it is either training or waiting for data.
Same seed, same number of ranks: same losses, bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from dataflow.loader import DataLoader
from dataflow.tools.demo.data import LENGTH, tokens

_VOCABULARY = 256
"""Number of values of a byte."""
_LEARNING_RATE = 3e-3
_REDRAW_S = 0.1
_PLAIN_LINES = 4
"""Lines a training prints where nothing can be redrawn."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training of the demo, and how far it goes."""

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

    @property
    def checkpoint(self) -> Path:
        """File with model, optimizer and loader state."""
        return Path(self.folder) / "checkpoint.pt"


@dataclass(kw_only=True)
class TrainingResult:
    """The measurements of a rank. Seconds are counted from its first batch on, unless said otherwise."""

    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    """Mean over all ranks, per step."""
    samples_per_s: float = 0.0
    """Samples a second of all ranks together."""
    seconds: float = 0.0
    waited_s: float = 0.0
    """Seconds in `next(batches)` after the first batch. Near 0: the loader keeps up."""
    first_batch_s: float = 0.0
    """Seconds from making the loader to the first batch."""
    peak_bytes: int = 0
    """Most memory the rank's process had resident; torch itself is a few hundred MB of it."""
    loader_peak_bytes: int = 0
    """Most bytes that the loader's buffers held."""
    loader_state: dict[str, Any] = field(default_factory=dict)
    """State of the loader that was saved at `stop`."""

    @property
    def waiting_share(self) -> float:
        """The share of time spent waiting: `waited_s / seconds`."""
        return self.waited_s / self.seconds if self.seconds else 0.0

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
    began = time.perf_counter()
    dataset = tokens(training.folder)
    with DataLoader(dataset, training.batch_size, shuffle=True, seed=training.seed) as loader:
        if saved:
            loader.load_state_dict(saved["loader"])
        _train(training, model, optimizer, loader, result, began)
        result.loader_peak_bytes = loader.stats().memory.peak_bytes
        result.peak_bytes = _peak_bytes()
        if training.stop is not None:
            result.loader_state = loader.state_dict()  # the same on every rank
            _save(training, model, optimizer, result.loader_state)
    return result


def _train(
    training: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    result: TrainingResult,
    began: float,
) -> None:
    started, batches = began, _endless(loader)
    line = ProgressLine(training.title, training.steps, visible=dist.get_rank() == 0)
    for step in range(result.first_step, training.stop or training.steps):
        before = time.perf_counter()
        batch = next(batches)
        after = time.perf_counter()
        if step == result.first_step:
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
        samples = len(result.losses) * training.batch_size * dist.get_world_size()
        result.samples_per_s = samples / result.seconds
        line.show(step + 1, result)
    line.close()


def _endless(loader: DataLoader) -> Iterator[Tensor]:
    while True:  # each loop over the loader is an epoch
        for batch in loader:
            yield batch["tokens"]


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


def _peak_bytes() -> int:
    """Most resident memory of this process since it began; 0 where the kernel does not say."""
    # Not getrusage: after fork and exec, its maximum includes the parent's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


class ByteTransformer(nn.Module):
    """Predicts the next byte. int64 [batch, length] -> float32 [batch, length, 256]."""

    def __init__(self, length: int, width: int = 96, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(_Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each position."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats; `tokens` is int64 [batch, length + 1]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class ProgressLine:
    """A line of a training's progress: redrawn in place on a terminal, a few plain lines elsewhere."""

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
