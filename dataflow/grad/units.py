"""In what gradients count: the learning rate and the scaler's scale, watched from window to window.

What a strategy owes was measured in those of an earlier window, so it is told how they have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dataflow.grad.boundary import first_lr
from dataflow.grad.strategies.strategy import Strategy


class Units:
    """The learning rate of the first parameter group, and the scale; args: what has them. One thread."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self._lr, self._scale = first_lr(optimizer), self._scale_now()

    def tell(self, strategy: Strategy) -> None:
        """A window begins: tell of what has changed since the last call."""
        lr, last_lr = first_lr(self._optimizer), self._lr
        if lr != last_lr:
            self._lr = lr
            if last_lr:
                strategy.lr_changed(lr / last_lr)
        scale, last_scale = self._scale_now(), self._scale
        if scale != last_scale:
            self._scale = scale
            strategy.scale_changed(scale / last_scale)

    def state(self) -> dict[str, float]:
        """What strategies were told last. JSON."""
        return {"lr": self._lr, "scale": self._scale}

    def load(self, state: Mapping[str, Any]) -> None:
        """What strategies count in now is that of `state()`."""
        self._lr, self._scale = float(state["lr"]), float(state["scale"])

    def _scale_now(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())
