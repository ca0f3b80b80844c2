"""Ranks for tests: forked from a process that has torch imported, which takes a tenth of starting Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from dataflow.testing import ranks, run_ranks

# What most test modules import takes each rank up to 0.3 s of a core, unless the fork server has it.
ranks._PRELOADED.extend(
    [
        *("hypothesis", "psutil", "pyarrow.parquet", "PIL.Image"),
        *("dataflow.loader", "dataflow.stream.loader", "dataflow.mixture", "dataflow.grad.schedule"),
    ]
)
fast_ranks = functools.partial(run_ranks, start_method="forkserver")
OLD_TORCH = TorchVersion(torch.__version__) < (2, 13)
F = TypeVar("F", bound=Callable[[], Any])


class RankSet:
    """Runs its functions one after the other in one set of ranks, once, when a result is first asked for."""

    def __init__(self, world_size: int, timeout_s: float = 110.0) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self._functions: list[Callable[[], Any]] = []
        self._results: dict[str, list[Any]] = {}

    def add(self, function: F) -> F:
        """Run the function, too; a decorator."""
        self._functions.append(function)
        return function

    def results(self, function: Callable[[], Any]) -> list[Any]:
        """What the function returned on each rank."""
        if not self._results:
            ranks = fast_ranks(in_turn, self.world_size, args=(self._functions,), timeout_s=self.timeout_s)
            names = [each.__name__ for each in self._functions]
            self._results = {name: [rank[at] for rank in ranks] for at, name in enumerate(names)}
        return self._results[function.__name__]


def in_turn(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each function returns, in one rank."""
    return [function() for function in functions]
