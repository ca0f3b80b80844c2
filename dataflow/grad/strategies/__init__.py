"""The strategies that `GradSchedule(strategy=...)` takes; see docs/strategies.md."""

from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.grad.strategies.delayed import Delayed
from dataflow.grad.strategies.half import Half
from dataflow.grad.strategies.hierarchical import Hierarchical
from dataflow.grad.strategies.int8 import Int8
from dataflow.grad.strategies.local_sgd import DiLoCo, LocalSGD
from dataflow.grad.strategies.post_local_sgd import PostLocalSGD
from dataflow.grad.strategies.power_sgd import PowerSGD
from dataflow.grad.strategies.strategy import Strategy
from dataflow.grad.strategies.top_k import TopK

__all__ = [
    "AllReduce",
    "Delayed",
    "DiLoCo",
    "Half",
    "Hierarchical",
    "Int8",
    "LocalSGD",
    "PostLocalSGD",
    "PowerSGD",
    "TopK",
]

# For the type checker: each keeps the protocol.
_STRATEGIES: tuple[type[Strategy], ...] = (
    AllReduce,
    Delayed,
    DiLoCo,
    Half,
    Hierarchical,
    Int8,
    LocalSGD,
    PostLocalSGD,
    PowerSGD,
    TopK,
)
