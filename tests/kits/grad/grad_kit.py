"""One small training run, in windows on several ranks and as large batches in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from dataflow import GradSchedule
from dataflow.grad.adapt.options import Adapt

Batch = dict[str, Tensor]
FEATURES = 3
WRAPS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "static-view": {"static_graph": True, "gradient_as_bucket_view": True},
    "fsdp": {},
}


@dataclass(frozen=True)
class Case:
    """What is run."""

    counts: tuple[int, ...]
    """Microbatches of each rank."""
    wrap: str = "ddp"
    accumulate: int = 3
    max_norm: float | None = None
    momentum: float = 0.0
    scaler: bool = False
    normalisers: tuple[str, ...] = ("tokens",)
    bad: tuple[int, int] | None = None
    """(rank, microbatch) whose values are infinite."""
    uneven: str = "pad"
    partial: str = "keep"


class Net(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 5), nn.Linear(5, 2)
        if unused:
            self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@dataclass
class Result:
    """What came of a run: values after each window, and parameters at the end."""

    norms: list[float | None]
    lrs: list[float]
    skipped: list[bool]
    totals: list[dict[str, float]]
    parameters: list[Tensor]
    averaged: list[Tensor]
    replays: int = 0
    exchanges: int = 0
    """All-reduces that Python began: what ranks told each other. DDP's own are C++'s."""
    left_out: int = 0


def batches_of(rank: int, case: Case) -> list[Batch]:
    """Microbatches of 1 to 4 samples, each sample with 0 to 5 tokens."""
    random = torch.Generator().manual_seed(rank)
    made = []
    for number in range(case.counts[rank]):
        size = int(torch.randint(1, 5, (1,), generator=random))
        x = torch.randn(size, FEATURES, generator=random, dtype=torch.float64)
        tokens = torch.randint(0, 6, (size,), generator=random).double()
        tokens[0] += 1
        if case.bad == (rank, number):
            x[0, 0] = torch.inf
        made.append({"x": x, "tokens": tokens})
    return made


def token_loss(out: Tensor, batch: Batch) -> Tensor:
    return (out.square().sum(1) * batch["tokens"]).sum()


def sample_loss(out: Tensor) -> Tensor:
    return out.abs().sum()


def mean_loss(out: Tensor) -> Tensor:
    """A mean over the microbatch: what auxiliary losses are."""
    return (out[:, 0] - out[:, 1]).square().mean()


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net(unused=case.wrap == "unused").double()
    return model, *stepping(model, case)


def stepping(model: nn.Module, case: Case) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=case.momentum)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def wrapped(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer, lr = made(case)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model, optimizer, lr
    if case.wrap == "fsdp":
        fully_shard(model.first)
        fully_shard(model)
        return model, *stepping(model, case)
    return DistributedDataParallel(model, **WRAPS[case.wrap]), optimizer, lr


def plain_values(parameters: Any) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


def go_on_in_mode(sched: GradSchedule, *options: int) -> None:
    """Load the schedule's state, as if its controller had chosen these options."""
    state = sched.state_dict()
    for setting, option in zip(state["control"]["controller"]["settings"], options, strict=True):
        setting["chosen"] = option
    state["control"]["controller"]["ran"] = []
    sched.load_state_dict(state)


def in_windows(case: Case, adapt: Adapt | None = None, mode: tuple[int, ...] | None = None) -> Result:
    """This rank's part of the run; `mode`: what the controller has chosen."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer, lr = wrapped(case)
    averaged: list[Tensor] = []

    def average(inner: nn.Module) -> None:
        values = plain_values(inner.parameters())
        averaged[:] = [(a + b) / 2 for a, b in zip(averaged or values, values, strict=True)]

    weights = {"tokens": lambda b: b["tokens"].sum(), "samples": lambda b: len(b["x"])}
    sched = GradSchedule(
        batches_of(rank, case),
        model,
        optimizer,
        case.accumulate,
        weights={name: weights[name] for name in case.normalisers if name in weights},
        max_norm=case.max_norm,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**7) if case.scaler else None,
        lr=lr,
        ema=average,
        uneven=case.uneven,  # type: ignore[arg-type]
        partial=case.partial,  # type: ignore[arg-type]
        timeout_s=20,
        adapt=adapt,
    )
    if mode is not None:
        go_on_in_mode(sched, *mode)
    result = Result([], [], [], [], [], averaged)
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as exchange:
        loop_over(sched, model, case, result)
    result.parameters = plain_values(model.parameters())
    result.exchanges, result.left_out = exchange.call_count, sched.position.left_out
    sched.close()
    return result


def loop_over(sched: GradSchedule, model: nn.Module, case: Case, result: Result) -> None:
    """One epoch, whose steps the result tells."""
    for batch in sched:
        out = model(batch["x"])
        loss = token_loss(out, batch) * sched.scale("tokens") if "tokens" in case.normalisers else 0
        if "samples" in case.normalisers:
            loss = loss + sample_loss(out) * sched.scale("samples")
        if "microbatches" in case.normalisers:
            loss = loss + mean_loss(out) * sched.scale("microbatches")
        sched.backward(loss)  # type: ignore[arg-type]
        if info := sched.step():
            result.norms.append(info.grad_norm)
            result.lrs.append(info.lr)
            result.skipped.append(info.skipped)
            result.totals.append(dict(info.totals))
            result.replays += info.replays


def as_large_batches(case: Case) -> Result:
    """The same run, each window one forward and backward pass over all its samples."""
    model, optimizer, lr = made(case)
    data = [batches_of(rank, case) for rank in range(len(case.counts))]
    result = Result([], [], [], [], [], [])
    for begin in range(0, max(case.counts), case.accumulate):
        parts = [part for share in data for part in share[begin : begin + case.accumulate]]
        sizes = [len(part["x"]) for part in parts]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        out = model(whole["x"])
        totals = {"tokens": float(whole["tokens"].sum()), "samples": float(len(out))}
        loss: Any = 0
        if "tokens" in case.normalisers:
            loss = loss + token_loss(out, whole) / totals["tokens"]
        if "samples" in case.normalisers:
            loss = loss + sample_loss(out) / totals["samples"]
        if "microbatches" in case.normalisers:
            loss = loss + sum(mean_loss(piece) for piece in out.split(sizes)) / len(parts)
        optimizer.zero_grad()
        loss.backward()
        norm = float(clip_grad_norm_(model.parameters(), case.max_norm or torch.inf))
        result.norms.append(norm)
        result.lrs.append(optimizer.param_groups[0]["lr"])
        kept = {name: totals[name] for name in case.normalisers if name in totals}
        result.totals.append({**kept, "microbatches": len(parts)})
        result.skipped.append(not torch.isfinite(torch.tensor(norm)))
        if result.skipped[-1]:
            continue
        optimizer.step()
        lr.step()
        values = plain_values(model.parameters())
        result.averaged = [(a + b) / 2 for a, b in zip(result.averaged or values, values, strict=True)]
    result.parameters = plain_values(model.parameters())
    return result


def run_cases(cases: dict[str, Case]) -> dict[str, Result]:
    """Several runs in one rank: starting ranks takes longer than running."""
    return {name: in_windows(case) for name, case in cases.items()}
