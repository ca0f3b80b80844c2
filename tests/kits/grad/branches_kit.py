"""A model whose batches choose its layers, trained in windows on ranks, and as large batches on one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dataflow import GradSchedule

Batch = tuple[Tensor, Tensor, tuple[str, ...]]
"""Inputs, targets, and the layers that they go through."""
LAYERS = ("one", "two", "three", "never")
EPOCHS = 2


class Branches(nn.Module):
    """Layers of unequal sizes, of which a batch uses some; "never" is there for none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, width in zip(LAYERS, (3, 8, 24, 3), strict=True):
            self.add_module(name, nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)))
        self.double()

    def forward(self, x: Tensor, way: Sequence[str]) -> Tensor:
        parts: list[Tensor] = [getattr(self, name)(x) for name in way]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class Run:
    """What is run. The seed decides on batches, their layers, and how many each rank has in an epoch."""

    seed: int
    world: int
    optimizer: str = "momentum"
    wrap: str = "ddp"
    scaler: bool = False
    max_norm: float | None = None

    @property
    def accumulate(self) -> int:
        """Microbatches a rank and full window."""
        return 1 + self.seed % 3

    def counts(self, epoch: int) -> list[int]:
        """Microbatches of each rank; from none to three windows."""
        draw = random.Random(f"{self.seed}/{epoch}")
        counts = [draw.randint(0, 3 * self.accumulate) for _ in range(self.world)]
        counts[draw.randrange(self.world)] += 1
        return counts

    def batches(self, epoch: int, rank: int) -> list[Batch]:
        """Layers are drawn by microbatch, and by rank unless these must run the same ones."""
        made = []
        for number in range(self.counts(epoch)[rank]):
            place = f"{self.seed}/{epoch}/{number}"
            own, way = random.Random(f"{place}/{rank}"), random.Random(place)
            size = own.randint(1, 4)
            x, y = (
                torch.tensor([[own.gauss(0, 1) for _ in range(width)] for _ in range(size)]).double()
                for width in (4, 3)
            )
            ways = [("one",), ("two",), ("three",), ("one", "two"), ("two", "three")]
            # Whole windows, too, in which a layer is used by nobody.
            draw = way if self.wrap == "fsdp" else own
            made.append((x, y, draw.choice(ways[: 3 if number // self.accumulate % 2 else 5])))
        return made

    def stepping(self, model: nn.Module) -> torch.optim.Optimizer:
        """Such that a gradient of zeros moves what no gradient would not."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


class Epochs:
    """A loader of one rank; how much it has is not known before."""

    def __init__(self, run: Run, rank: int) -> None:
        self._run, self._rank, self._epoch = run, rank, 0

    def __iter__(self) -> Iterator[Batch]:
        self._epoch += 1
        yield from self._run.batches(self._epoch - 1, self._rank)


@dataclass
class Trained:
    """What came of a run."""

    with_gradient: list[list[str]] = field(default_factory=list)
    """Parameters that had a gradient at each step."""
    values: list[Tensor] = field(default_factory=list)
    """All parameters after each step."""
    stepped: set[str] = field(default_factory=set)
    """Parameters of which the optimizer has a state."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    reached: list[list[str]] = field(default_factory=list)
    """Parameters that this rank's own microbatches reached, by window."""
    replays: int = 0
    """Of all ranks, where it is counted."""


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y, way = batch
    return (model(x, way) - y).square().sum()


def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    trained = Trained()

    def note(*_: Any) -> None:
        names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        trained.with_gradient.append(names)

    optimizer.register_step_pre_hook(note)
    return trained


def finish(trained: Trained, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    for name, parameter in model.named_parameters():
        trained.parameters[name] = whole(parameter)
        if optimizer.state.get(parameter):
            trained.stepped.add(name)
    return trained


def flat(model: nn.Module) -> Tensor:
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    if wrap == "fsdp":
        for name in LAYERS:
            fully_shard(getattr(model, name))
        return fully_shard(model)
    return DistributedDataParallel(model, find_unused_parameters=True)


def in_windows(run: Run, strategy: Any = None) -> Trained:
    """This rank's part."""
    model = Branches()
    # A plain model where nothing is between ranks; strategies look for DDP.
    outer = wrapped(model, run.wrap) if dist.is_initialized() else model
    optimizer = run.stepping(model)
    trained = watch(model, optimizer)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sched = GradSchedule(
        Epochs(run, rank),
        outer,
        optimizer,
        run.accumulate,
        weights={"n": lambda batch: len(batch[0])},
        strategy=strategy,
        max_norm=run.max_norm,
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0) if run.scaler else None,
        timeout_s=20,
    )
    for _ in range(EPOCHS):
        own: set[str] = set()
        for batch in sched:
            if sched.scale("n"):
                own.update(name for name, _ in model.named_parameters() if name.split(".")[0] in batch[2])
            sched.backward(loss_of(outer, batch) * sched.scale("n"))
            if info := sched.step():
                trained.values.append(flat(model))
                trained.reached.append(sorted(own))
                trained.replays += info.replays
                own = set()
    if callable(average := getattr(strategy, "average", None)):  # ranks may be apart until then
        average()
    sched.close()
    return finish(trained, model, optimizer)


def as_large_batches(run: Run) -> Trained:
    """Each window one sum of losses, and one backward pass."""
    model = Branches()
    optimizer = run.stepping(model)
    trained = watch(model, optimizer)
    for epoch in range(EPOCHS):
        shares = [run.batches(epoch, rank) for rank in range(run.world)]
        for begin in range(0, max(map(len, shares)), run.accumulate):
            window = [batch for share in shares for batch in share[begin : begin + run.accumulate]]
            losses = torch.stack([loss_of(model, batch) for batch in window])
            (losses.sum() / sum(len(x) for x, _, _ in window)).backward()
            if run.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            trained.values.append(flat(model))
    return finish(trained, model, optimizer)
