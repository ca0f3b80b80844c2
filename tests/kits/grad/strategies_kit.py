"""Training loops in plain DDP around a strategy, small enough to run many in one set of ranks."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataflow.grad.strategies.strategy import Strategy, StrategyContext
from sharding.topology.topology import Topology

BUCKET_MB = 0.001
"""So small that each layer has a bucket of its own, and DDP deals them anew after the first backward pass."""


def mlp(dtype=torch.float64, width=24):
    sizes = [12, width, width, width, 4]
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1]).to(dtype)


class Plane(nn.Module):
    """The gradient of its loss is what the batch says, wherever the parameters are."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(40, 9, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(300, dtype=dtype))

    def forward(self, wanted):
        return (self.first.flatten() * wanted[:360]).sum() + (self.second * wanted[360:]).sum()


def plane_gradient(step, rank, dtype=torch.float64):
    return torch.randn(660, generator=torch.Generator().manual_seed(97 * step + rank)).to(dtype)


def context_of(model, optimizer, topology=None):
    module = getattr(model, "module", model)
    rank, world = dist.get_rank(), dist.get_world_size()
    return StrategyContext(
        model=model,
        optimizer=optimizer,
        parameters=dict(module.named_parameters()),
        group=dist.new_group(),
        rank=rank,
        world_size=world,
        topology=topology or Topology.detect(),
    )


@dataclass
class Trained:
    """What a run left on one rank."""

    parameters: list
    state: dict
    buckets: int
    sent: int = 0


class Loop:
    """The loop that a user of plain DDP would write; `strategy` None leaves DDP to itself."""

    def __init__(
        self, strategy, model=None, *, lr=0.1, momentum=0.9, topology=None, saved=None, bucket_mb=BUCKET_MB
    ):
        torch.manual_seed(3)
        model = mlp() if model is None else model
        if saved is not None:
            model.load_state_dict(saved["model"])
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)  # copies rank 0's parameters
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr, momentum)
        self.strategy = Strategy("ddp") if strategy is None else strategy
        self.by_ddp, self.calls, self.per_backward = strategy is None, 0, 0
        self.strategy.setup(context_of(self.ddp, self.optimizer, topology))
        if self.strategy.hooks_gradients:
            self.ddp.register_comm_hook(None, self._hook)
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.strategy.load_state_dict(saved["strategy"])

    def _hook(self, _, bucket):
        self.calls += 1
        return self.strategy.reduce(bucket)

    def backward(self, loss_of, step):
        syncs = self.by_ddp or self.strategy.syncs(step)
        self.calls = 0
        with nullcontext() if syncs else self.ddp.no_sync():
            loss_of(self.ddp, step).backward()
        self.per_backward = self.calls or self.per_backward

    def run(self, steps, loss_of):
        for step in steps:
            self.backward(loss_of, step)
            self.strategy.before_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.strategy.after_step(step, skipped=False)
        return self

    def saved(self):
        return {
            "model": {k: v.clone() for k, v in self.ddp.module.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "strategy": self.strategy.state_dict(),
        }

    def result(self):
        parameters = [p.detach().clone() for p in self.ddp.parameters()]
        return Trained(parameters, self.strategy.state_dict(), self.per_backward, self.strategy.bytes_sent())

    def close(self):
        self.strategy.close()
        self.strategy.close()


def regression(model, step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 12, generator=generator, dtype=dtype)
    return (model(x) - x[:, :4].sin()).square().mean()


def pushed(model, step):
    return model(plane_gradient(step, dist.get_rank(), next(model.parameters()).dtype))


def trained(strategy, steps=6, *, loss_of=regression, **settings):
    loop = Loop(strategy, **settings).run(range(steps), loss_of)
    result = loop.result()
    loop.close()
    return result


def resumed(make, steps, at):
    """The same run, but saved after `at` steps and continued by new objects."""
    first = Loop(make()).run(range(at), regression)
    saved = first.saved()
    first.close()
    second = Loop(make(), saved=saved).run(range(at, steps), regression)
    result = second.result()
    second.close()
    return result


def spread(parameters):
    """Largest difference of any parameter between ranks."""
    flat = torch.cat([p.reshape(-1) for p in parameters])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return max(float((one - found[0]).abs().max()) for one in found)


def apart(one, other):
    """Largest difference between two lists of parameters."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
