"""Updates that are one step late: gradients travel while the next step computes.

Step t applies the mean gradient of step t - 1; step 0 applies none, and the last gradient of a run is never
applied. The whole exchange hides behind a whole step, at the price of one step of staleness: lower the
learning rate or the momentum if the loss starts to swing. Which parameters have a gradient on any rank
travels with the means: zeros in place of none would move the others by weight decay and momentum.
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
        last_means, sent = self._means(), dict[str, Tensor]()
        unknown = self.without_gradient()
        for name, parameter in self.context.parameters.items():
            sent[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = last_means.get(name)
        first = next(iter(sent.values()))
        has_gradient = first.new_tensor([name not in unknown for name in sent])  # goes with the first's kind

        @torch.no_grad()
        def exchange() -> Tensor:
            self.wire.mean([*sent.values(), has_gradient])
            named = zip(sent.items(), has_gradient.tolist(), strict=True)
            self._late = {name: mean for (name, mean), share in named if share}
            return first

        self._exchange = self._comm.run(exchange, first)

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
