"""How gradients, or parameters, travel between ranks: the protocol that all strategies keep.

Ours begin from `PassiveStrategy`, which exchanges nothing, and override their own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dataflow.grad.strategies.wire import Wire
from sharding.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class StrategyContext:
    """What a strategy is set up with, once, by `GradSchedule`; the same on every rank but for `rank`.

    Attributes:
        model: the user's module, inside DDP's wrapper where there is one.
        optimizer: the optimizer that steps at the end of each window.
        parameters: name of each parameter that needs a gradient, as in `model.named_parameters()`;
            states that must outlive DDP's re-bucketing are kept by these names.
        group: a private process group for the strategy's own collectives; None in a single process.
        rank: of this process.
        world_size: number of ranks.
        topology: which ranks share a node, a rack.
        timeout_s: seconds that a rank waits for the others in `group`, and in groups that a strategy makes;
            None: PyTorch's default.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    group: ProcessGroup | None
    rank: int
    world_size: int
    topology: Topology
    timeout_s: float | None = None


class Strategy(Protocol):
    """Moves gradients (by a hook) or parameters (after a step) between ranks.

    Every method is called on every rank, in the same order. None is called by several threads at once,
    except `reduce`, which DDP calls from the thread of the backward pass, bucket after bucket.
    """

    @property
    def name(self) -> str:
        """As reported; equal on all ranks."""

    @property
    def key(self) -> str:
        """All settings that change the numbers: ranks compare it, checkpoints keep it."""

    @property
    def hooks_gradients(self) -> bool:
        """Whether `reduce` replaces DDP's all-reduce; False leaves DDP as it is."""

    def setup(self, context: StrategyContext) -> None:
        """Begin; a `ValueError` says which combination is not supported."""

    def syncs(self, step: int) -> bool:
        """Whether gradients are reduced in the window that ends with optimizer step `step` (0, 1, ...)."""

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: the mean over ranks of the bucket's gradients, flat, in its dtype."""

    def before_step(self, step: int) -> None:
        """Gradients are reduced and not yet clipped (a delayed update exchanges them here)."""

    def after_step(self, step: int, *, skipped: bool) -> None:
        """The optimizer has stepped; or every rank has skipped it, and the next step has the same number."""

    def lr_changed(self, ratio: float) -> None:
        """The learning rate became `ratio` times what it was (error feedback is rescaled)."""

    def scale_changed(self, ratio: float) -> None:
        """The GradScaler's scale, in which gradients come, became `ratio` times what it was."""

    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for gradients and parameters so far."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a resumed run needs, kept by parameter name; {} if there are none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; a `ValueError` if it does not fit."""

    def close(self) -> None:
        """Give groups and threads back; may be called twice."""


class PassiveStrategy:
    """Exchanges nothing. Args: the strategy's name, and the settings that change the numbers."""

    name = key = ""
    hooks_gradients = False
    short_memory = False
    """Whether another may take its place at any step: it owes no gradients, ranks stay equal."""
    context: StrategyContext
    wire: Wire
    """Over the context's group."""

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

    def without_gradient(self) -> set[str]:
        """Names of the parameters that no rank has computed a gradient for, once gradients are reduced.

        DDP reduces them nevertheless, as zeros, and then leaves them out.
        """
        return {name for name, parameter in self.context.parameters.items() if parameter.grad is None}

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
        """Nothing waits for all gradients."""

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Parameters stay as the optimizer left them."""

    def lr_changed(self, ratio: float) -> None:
        """Nothing is owed."""

    def scale_changed(self, ratio: float) -> None:
        """What is owed shrinks against gradients that are `ratio` times as large and mean the same."""
        self.lr_changed(1 / ratio)

    def close(self) -> None:
        """Nothing is held."""

    def bytes_sent(self) -> int:
        """What went over the private group."""
        return self.wire.sent

    def state_dict(self) -> dict[str, Any]:
        """A strategy that remembers nothing has an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept what `state_dict` gave."""
        self.check_entries(state, set())

    def check_entries(self, state: Mapping[str, Any], entries: set[str]) -> None:
        """Raise `ValueError` unless the state has just these entries."""
        if set(state) != entries:
            raise ValueError(
                f"the state does not fit {self.key}: it has {sorted(state)}, wanted {sorted(entries)}; "
                "make the strategy with the settings of the run that saved it"
            )

    def checked_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the parameters' devices; `ValueError` for a name or shape that is not the model's."""
        for name, tensor in tensors.items():
            parameter = self.context.parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                shape = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise ValueError(
                    f"the state of {self.name} has {name!r} of shape {tuple(tensor.shape)}, "
                    f"the model has {shape}"
                )
        return {n: t.detach().to(self.context.parameters[n].device, copy=True) for n, t in tensors.items()}
