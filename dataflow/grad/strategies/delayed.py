"""Updates that are one step late: gradients travel while the next step computes.

Step t applies the mean gradient of step t - 1; step 0 applies zeros, and the last gradient of a run is never
applied. The whole exchange hides behind a whole step, at the price of one step of staleness: lower the
learning rate or the momentum if the loss starts to swing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from dataflow.grad.strategies.ordered_comm import OrderedComm
from dataflow.grad.strategies.strategy import PassiveStrategy, StrategyContext


class Delayed(PassiveStrategy):
    """All-reduce with one step of staleness."""

    _comm: OrderedComm | None = None

    def __init__(self) -> None:
        super().__init__("delayed")

    def setup(self, context: StrategyContext) -> None:
        """Start the thread."""
        super().setup(context)
        self._comm = OrderedComm("comm-delayed")
        self._late: dict[str, Tensor] = {}
        self._exchange: Future[Tensor] | None = None

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Send this step's gradients off; put the previous step's means in their place."""
        if self._comm is None:
            raise RuntimeError("delayed is closed, or was never set up")
        last_means = self._means()
        parameters = self.context.parameters
        self._late = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()
        }
        gradients = list(self._late.values())  # copies: the optimizer steps on others meanwhile
        for name, parameter in parameters.items():
            mean = last_means.get(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_() if mean is None else parameter.grad.copy_(mean)

        @torch.no_grad()
        def exchange() -> Tensor:
            self.wire.mean(gradients)
            return gradients[0]

        self._exchange = self._comm.run(exchange, gradients[0])

    def _means(self) -> dict[str, Tensor]:
        """The means of the step before, when they are there."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        return self._late

    @torch.no_grad()
    def scale_changed(self, ratio: float) -> None:
        """The means that the next step applies came in the old scale."""
        for mean in self._means().values():
            mean.mul_(ratio)

    def bytes_sent(self) -> int:
        """What has arrived and what is under way."""
        self._means()
        return super().bytes_sent()

    def state_dict(self) -> dict[str, Any]:
        """The means that the next step will apply."""
        return {"late": {name: mean.clone() for name, mean in self._means().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self.check_entries(state, {"late"})
        self._means()
        self._late = self.checked_tensors(state["late"])

    def close(self) -> None:
        """Wait for what is under way; end the thread."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
