"""Setting a strategy up: its context, its private group, its place in DDP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from dataflow.grad.agreement import Agreement, private_group
from dataflow.grad.all_reduce import AllReduce
from dataflow.grad.strategy import Strategy, StrategyContext
from dataflow.grad.wrapped import Ddp, Wrapped, trainable
from dataflow.topology_exchange import detect_topology
from sharding.topology import Topology


def check_strategy(strategy: Strategy, model: Wrapped) -> None:
    """`ValueError` if the strategy has nothing to hook into."""
    if strategy.hooks_gradients and not isinstance(model, Ddp):
        raise ValueError(f"{strategy.name} needs DistributedDataParallel's hook, got a {model.kind} model")


def set_up(
    strategy: Strategy,
    model: Wrapped,
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
    place = topology or detect_topology()
    parameters = trainable(model.inner)
    strategy.setup(
        StrategyContext(
            model.inner, optimizer, parameters, group, agreement.rank, agreement.world_size, place
        )
    )

    def reduced(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        on_bucket()
        return strategy.reduce(bucket)

    if strategy.hooks_gradients and isinstance(model, Ddp):
        # DDP compares annotations with its classes, and ours are strings: a lambda has none.
        model.ddp.register_comm_hook(None, lambda _, bucket: reduced(bucket))

    def end() -> None:
        nonlocal group
        strategy.close()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        group = None

    return end
