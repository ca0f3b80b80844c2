"""The strategies that `GradSchedule(strategy=...)` takes; see docs/guide/strategies.md.

In: buckets of gradients, or parameters after a step. Out: the ranks' means. A new one is a class that begins
from `Strategy`, and a line in this file. Read `strategy` first (what ours begin from).
"""

from dataflow.grad.strategies.all_reduce import AllReduce, Delayed, Half
from dataflow.grad.strategies.hierarchical import Hierarchical
from dataflow.grad.strategies.local_sgd import DiLoCo, LocalSGD, PostLocalSGD
from dataflow.grad.strategies.lossy import Int8, TopK
from dataflow.grad.strategies.power_sgd import PowerSGD
from dataflow.grad.strategies.strategy import Strategy, StrategyContext

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
    "Strategy",
    "StrategyContext",
    "TopK",
]
