"""The strategies that `GradSchedule(strategy=...)` takes; see docs/guide/strategies.md.

In: buckets of gradients, or parameters after a step. Out: the ranks' means. A new one is a file here and a
line in this one. Read `strategy` first (the protocol, and what ours begin from), then `wire`.
"""

from dataflow.grad.strategies.all_reduce import AllReduce, Half
from dataflow.grad.strategies.delayed import Delayed
from dataflow.grad.strategies.hierarchical import Hierarchical
from dataflow.grad.strategies.int8 import Int8
from dataflow.grad.strategies.local_sgd import DiLoCo, LocalSGD, PostLocalSGD
from dataflow.grad.strategies.power_sgd import PowerSGD
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
