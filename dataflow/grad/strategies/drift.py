"""Strategies under which ranks step by themselves, and their parameters drift apart until they are averaged.

While they have drifted, one rank's checkpoint is not the run: DDP copies rank 0's parameters to all when it
is made. So the state of these strategies holds the rank's own parameters whenever they differ, and loading it
puts them back. The optimizer's state differs too: every rank saves and loads its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dataflow.grad.strategies.passive import Passive


class Drifting(Passive):
    """Keeps account of whether parameters are equal on all ranks. Args: as `Passive`."""

    drifted = False
    """Whether ranks have stepped by themselves since all parameters were last averaged."""

    def parameters(self) -> Iterable[Tensor]:
        """The data of all parameters, in the model's order."""
        return [parameter.data for parameter in self.context.parameters.values()]

    @torch.no_grad()
    def meet(self) -> None:
        """Average the parameters now, if ranks have drifted apart; on all ranks."""
        if self.drifted:
            self.wire.mean(self.parameters())
        self.drifted = False

    def state_dict(self) -> dict[str, Any]:
        """The rank's parameters by name, if they are its own."""
        own = self.context.parameters.items() if self.drifted else ()
        return {"parameters": {name: parameter.detach().clone() for name, parameter in own}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put this rank's parameters back."""
        self.check_entries(state, {"parameters"})
        for name, own in self.checked_tensors(state["parameters"]).items():
            self.context.parameters[name].copy_(own)
        self.drifted = bool(state["parameters"])
