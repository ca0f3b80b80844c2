"""A strategy that leaves everything as it is: what the others begin from, each overriding its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dataflow.grad.strategies.ordered_comm import OrderedComm
from dataflow.grad.strategies.strategy import StrategyContext
from dataflow.grad.strategies.wire import Wire


class Passive:
    """Exchanges nothing. Args: the strategy's name, and the settings that change the numbers."""

    hooks_gradients = False

    def __init__(self, name: str, **settings: Any) -> None:
        self.name = name
        self.key = f"{name}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"

    def setup(self, context: StrategyContext) -> None:
        """Remember the context and the private group. `ValueError` for parameters that FSDP2 shards."""
        sharded = next((n for n, p in context.parameters.items() if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise ValueError(
                f"{self.name} needs whole parameters on each rank, but {sharded!r} is sharded; "
                "use DistributedDataParallel, or leave the reduction to FSDP2 with AllReduce()"
            )
        self.context = context
        self.wire = Wire(context.group)
        self._names = {id(parameter): name for name, parameter in context.parameters.items()}

    def names_in(self, bucket: GradBucket) -> tuple[str, ...]:
        """Names of the parameters of a bucket, in its order."""
        return tuple(self._names[id(parameter)] for parameter in bucket.parameters())

    def syncs(self, step: int) -> bool:
        """Where gradients are hooked, every window reduces them."""
        return self.hooks_gradients

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Give the bucket back."""
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    def before_step(self, step: int) -> None:
        """Do nothing."""

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Do nothing."""

    def lr_changed(self, ratio: float) -> None:
        """Do nothing."""

    def scale_changed(self, ratio: float) -> None:
        """Do nothing."""

    def bytes_sent(self) -> int:
        """What went over the private group."""
        return self.wire.sent

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept what `state_dict` gave."""
        self.check_entries(state, set())

    def check_entries(self, state: Mapping[str, Any], wanted: set[str]) -> None:
        """Raise `ValueError` unless the state has just these entries."""
        if set(state) != wanted:
            raise ValueError(
                f"the state does not fit {self.key}: it has {sorted(state)}, wanted {sorted(wanted)}; "
                "make the strategy with the settings of the run that saved it"
            )

    def checked_tensors(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the parameters' devices; `ValueError` for a name or shape that is not the model's."""
        for name, tensor in found.items():
            have = self.context.parameters.get(name)
            if have is None or have.shape != tensor.shape:
                shape = "no such parameter" if have is None else f"shape {tuple(have.shape)}"
                raise ValueError(
                    f"the state of {self.name} has {name!r} of shape {tuple(tensor.shape)}, "
                    f"the model has {shape}"
                )
        return {n: t.detach().to(self.context.parameters[n].device, copy=True) for n, t in found.items()}

    def close(self) -> None:
        """Nothing is held."""


class Reducing(Passive):
    """A strategy that reduces each bucket by blocking work on one ordered thread."""

    hooks_gradients = True
    _comm: OrderedComm | None = None

    def setup(self, context: StrategyContext) -> None:
        """Start the thread."""
        super().setup(context)
        self._comm = OrderedComm(f"comm-{self.name}")

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """`reduced` of the bucket, on the thread."""
        if self._comm is None:
            raise RuntimeError(f"{self.name} is closed, or was never set up")
        return self._comm.run(lambda: self.reduced(bucket), bucket.buffer())

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean over ranks, flat; called on the thread."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
