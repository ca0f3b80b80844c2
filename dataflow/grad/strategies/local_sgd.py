"""Local SGD (Stich 2019) and DiLoCo (Douillard et al. 2023): ranks step alone and meet every so many steps.

No rank is ever more than `every` steps away from the common model, which bounds its staleness. Between the
meetings nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dataflow.grad.strategies.drift import Drifting
from dataflow.grad.strategies.strategy import StrategyContext


def _checked_every(every: int) -> int:
    if every < 1:
        raise ValueError(f"every must be >= 1 step, got {every}")
    return every


class LocalSGD(Drifting):
    """Average the parameters every so many steps. Momentum and other optimizer state stay each rank's own.

    Args:
        every: steps from one average to the next; 1 with plain SGD is what averaging gradients does.
    """

    def __init__(self, every: int = 8) -> None:
        super().__init__("local-sgd", every=_checked_every(every))
        self.every = every

    @torch.no_grad()
    def after_step(self, step: int, *, skipped: bool) -> None:
        """Average at every `every`-th step."""
        if skipped:
            return
        self.drifted = True
        if (step + 1) % self.every == 0:
            self.meet()


class DiLoCo(Drifting):
    """Average what ranks did in `every` steps; an outer SGD with Nesterov momentum takes that as a gradient.

    Costs the memory of the parameters twice: the last common model, and the outer momentum.

    Args:
        every: inner steps for an outer one.
        outer_lr: of the outer SGD; 1 without momentum is plain averaging.
        outer_momentum: of the outer SGD, Nesterov's; 0 for none.
    """

    def __init__(self, every: int = 32, *, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> None:
        _checked_every(every)
        if outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"outer_lr must be > 0 and outer_momentum in [0, 1), got {outer_lr} and {outer_momentum}"
            )
        super().__init__("diloco", every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
        self._every, self._lr, self._momentum = every, outer_lr, outer_momentum

    def setup(self, context: StrategyContext) -> None:
        """Nothing is common yet: parameters may still be loaded."""
        super().setup(context)
        self._common: dict[str, Tensor] = {}

    def before_step(self, step: int) -> None:
        """Remember the common model before the first step."""
        if not self._common:
            self._begin()

    def _begin(self) -> None:
        self._common = {name: p.detach().clone() for name, p in self.context.parameters.items()}
        nesterov = self._momentum > 0
        self._outer = torch.optim.SGD(self._common.values(), self._lr, self._momentum, nesterov=nesterov)

    @torch.no_grad()
    def after_step(self, step: int, *, skipped: bool) -> None:
        """Take an outer step at every `every`-th step."""
        if skipped:
            return
        self.drifted = True
        if (step + 1) % self._every:
            return
        for name, common in self._common.items():
            common.grad = common - self.context.parameters[name]
        self.wire.mean([_grad_of(common) for common in self._common.values()])
        self._outer.step()
        self._outer.zero_grad()
        for name, common in self._common.items():
            self.context.parameters[name].copy_(common)
        self.drifted = False

    def state_dict(self) -> dict[str, Any]:
        """The common model and the outer momentum, by name; this rank's parameters, if they are its own."""
        momentum = {}
        for name, common in self._common.items():
            buffer = self._outer.state.get(common, {}).get("momentum_buffer")
            if buffer is not None:
                momentum[name] = buffer.clone()
        copies = {name: tensor.clone() for name, tensor in self._common.items()}
        return super().state_dict() | {"common": copies, "momentum": momentum}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"parameters", "common", "momentum"})
        common, momentum = self.checked_tensors(state["common"]), self.checked_tensors(state["momentum"])
        super().load_state_dict({"parameters": state["parameters"]})
        if not common:  # before the first step
            self._common = {}
            return
        self._begin()
        for name, tensor in common.items():
            self._common[name].copy_(tensor)
        for name, buffer in momentum.items():
            self._outer.state[self._common[name]]["momentum_buffer"] = buffer


def _grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
