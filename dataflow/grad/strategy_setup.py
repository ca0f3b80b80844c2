"""Setting a strategy up: its context, its private group, its place in DDP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from dataflow.grad.agreement import Agreement, give_private_back, private_group
from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.grad.strategies.delayed import Delayed
from dataflow.grad.strategies.strategy import Strategy, StrategyContext
from dataflow.grad.wrapper import DdpModel, ModelWrapper, sparse_layer, trainable
from dataflow.topology_exchange import detect_topology
from prefetch.weak_registry import WeakRegistry
from sharding.topology.topology import Topology

_IN_USE: WeakRegistry[Strategy] = WeakRegistry()
"""Strategies of schedules that are not closed: a strategy knows one model only."""


def check_strategy(strategy: Strategy, model: ModelWrapper) -> None:
    """`ValueError` if the strategy has nothing to hook into, or cannot send what the model makes."""
    if strategy in _IN_USE:
        raise ValueError(
            f"this {strategy.name} belongs to another GradSchedule: make one for each, or close that schedule"
        )
    if strategy.hooks_gradients and not isinstance(model, DdpModel):
        raise ValueError(f"{strategy.name} needs DistributedDataParallel's hook, got a {model.kind} model")
    sparse = sparse_layer(model.inner)
    if sparse is not None and (strategy.hooks_gradients or isinstance(strategy, Delayed)):
        raise ValueError(
            f"{strategy.name} needs dense gradients, and {sparse!r} makes sparse ones: make it with "
            "sparse=False, or leave the reduction to AllReduce()"
        )


def set_up(
    strategy: Strategy,
    model: ModelWrapper,
    optimizer: torch.optim.Optimizer,
    agreement: Agreement,
    *,
    timeout_s: float,
    topology: Topology | None,
    on_bucket: Callable[[], None],
) -> Callable[[], None]:
    """Set the strategy up on all ranks; `on_bucket` is called before each bucket. Returns what ends it."""
    group = None
    if agreement.world_size > 1 and type(strategy) is not AllReduce:
        # With the backend of the gradients: host memory is not where they are under NCCL.
        backend = dist.get_backend(model.group) if model.group is not None else "gloo"
        group = private_group(agreement.ranks, timeout_s, backend)
    strategy.setup(
        StrategyContext(
            model=model.inner,
            optimizer=optimizer,
            parameters=trainable(model.inner),
            group=group,
            rank=agreement.rank,
            world_size=agreement.world_size,
            topology=topology or detect_topology(),
            timeout_s=timeout_s,
        )
    )
    _IN_USE.add(strategy)

    def reduced(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        on_bucket()
        return strategy.reduce(bucket)

    if strategy.hooks_gradients and isinstance(model, DdpModel):
        # DDP compares annotations with its classes, and ours are strings: a lambda has none.
        model.ddp.register_comm_hook(None, lambda _, bucket: reduced(bucket))

    def end() -> None:
        nonlocal group
        strategy.close()
        _IN_USE.discard(strategy)
        if not agreement.lost:
            give_private_back(group)
        group = None

    return end
