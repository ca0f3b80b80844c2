"""The strategies that `GradSchedule(strategy=...)` takes; see docs/strategies.md."""

from dataflow.grad.all_reduce import AllReduce
from dataflow.grad.delayed import Delayed
from dataflow.grad.half import Half
from dataflow.grad.hierarchical import Hierarchical
from dataflow.grad.int8 import Int8
from dataflow.grad.local_sgd import DiLoCo, LocalSGD
from dataflow.grad.post_local_sgd import PostLocalSGD
from dataflow.grad.power_sgd import PowerSGD
from dataflow.grad.strategy import Strategy
from dataflow.grad.top_k import TopK

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
