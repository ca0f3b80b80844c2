"""The plain strategy: DDP's own all-reduce, or FSDP2's own reduce-scatter, at the end of each window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from dataflow.grad.strategies.strategy import StrategyContext


class AllReduce:
    """Leave gradients to DDP or FSDP2: no hook of our own, no state."""

    name = "all-reduce"
    key = "all-reduce"
    hooks_gradients = False

    def __init__(self) -> None:
        self._bytes_a_window = 0
        self._bytes_sent = 0

    def setup(self, context: StrategyContext) -> None:
        """Count what a window sends: each gradient once in and out, 2 (W - 1) / W of its bytes."""
        world = context.world_size
        held = sum(p.numel() * p.element_size() for p in context.parameters.values())
        self._bytes_a_window = 2 * (world - 1) * held // world

    def syncs(self, step: int) -> bool:
        """Always."""
        return True

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Never called: `hooks_gradients` is False."""
        raise NotImplementedError("DDP reduces by itself")

    def before_step(self, step: int) -> None:
        """Gradients have been reduced once more."""
        self._bytes_sent += self._bytes_a_window

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Nothing to do."""

    def lr_changed(self, ratio: float) -> None:
        """Nothing depends on it."""

    def scale_changed(self, ratio: float) -> None:
        """Nothing depends on it."""

    def bytes_sent(self) -> int:
        """What a ring all-reduce sends for these gradients; computed, not measured."""
        return self._bytes_sent

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse what another strategy has kept."""
        if state:
            raise ValueError(f"AllReduce keeps no state, got {sorted(state)}")

    def close(self) -> None:
        """Nothing to give back."""
