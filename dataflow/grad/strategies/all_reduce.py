"""One all-reduce: DDP's own (or FSDP2's reduce-scatter), the same in a hook, in 16 bits, one step late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dataflow.grad.strategies.strategy import Strategy, StrategyContext, ThreadedStrategy, all_reduce_bytes


class AllReduce(Strategy):
    """Leave gradients to DDP or FSDP2: no hook of our own, no state."""

    name = key = "all-reduce"
    short_memory = True

    def __init__(self) -> None:
        self._bytes_a_window = self._bytes_sent = 0

    def setup(self, context: StrategyContext) -> None:
        """Count what a window sends; parameters may be sharded."""
        self.context = context
        gradient_bytes = sum(p.numel() * p.element_size() for p in context.parameters.values())
        self._bytes_a_window = all_reduce_bytes(gradient_bytes, context.world_size)

    def syncs(self, step: int) -> bool:
        """Every window is reduced, though not by a hook."""
        return True

    def before_step(self, step: int) -> None:
        """Count the reduction that DDP has made."""
        self._bytes_sent += self._bytes_a_window

    def bytes_sent(self) -> int:
        """Return what a ring all-reduce sends for these gradients; computed, not measured."""
        return self._bytes_sent


class AllReduceHook(Strategy):
    """The plain all-reduce as a hook, where DDP's hook must be able to become another one's."""

    hooks_gradients = True
    short_memory = True

    def __init__(self) -> None:
        super().__init__(AllReduce.name)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce; it overlaps with the backward pass."""
        return self.wire.begin_add(bucket.buffer().mul_(1 / self.wire.size))  # as DDP; its hooks divide


_HALF_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Half(Strategy):
    """All-reduce in 16 bits, by PyTorch's hooks: half the bytes.

    The mean is rounded to 11 (fp16) or 8 (bf16) significant bits, and fp16 overflows above 65504. DDP refuses
    `bf16_compress_hook` by its name where there is no NCCL, although gloo sums bfloat16; behind this strategy
    the hook that DDP sees has another name.

    Args:
        dtype: "fp16" or "bf16".
    """

    hooks_gradients = True
    short_memory = True

    def __init__(self, dtype: Literal["fp16", "bf16"]) -> None:
        if dtype not in _HALF_HOOKS:
            raise ValueError(f"dtype must be 'fp16' or 'bf16', got {dtype!r}")
        super().__init__(dtype)
        self._hook = _HALF_HOOKS[dtype]

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce; it overlaps with the backward pass."""
        group = self.context.group
        if group is None or self.wire.size == 1:
            return super().reduce(bucket)
        self.wire.count_all_reduce(2 * bucket.buffer().numel())
        future: Future[Tensor] = self._hook(group, bucket)
        return future


class Delayed(ThreadedStrategy):
    """All-reduce whose updates are one step late: gradients travel while the next step computes.

    Step t applies the mean gradient of step t - 1; step 0 applies none, and the last gradient of a run is
    never applied. The whole exchange hides behind a whole step, at the price of one step of staleness: lower
    the learning rate or the momentum if the loss starts to swing. Which parameters have a gradient on any
    rank travels with the means: zeros in place of none would move the others by weight decay and momentum.
    """

    def __init__(self) -> None:
        super().__init__("delayed")

    def setup(self, context: StrategyContext) -> None:
        """Nothing is late yet."""
        super().setup(context)
        self._late: dict[str, Tensor] = {}
        self._exchange: Future[Tensor] | None = None

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Send this step's gradients off; put the previous step's means in their place."""
        comm, last_means, sent = self.comm, self._means(), dict[str, Tensor]()
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

        self._exchange = comm.run(exchange, first)

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
        """Return what has arrived and what is under way."""
        self._means()
        return super().bytes_sent()

    def state_dict(self) -> dict[str, Any]:
        """The means that the next step will apply."""
        return {"late": {name: mean.clone() for name, mean in self._means().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the late gradients of the state."""
        self.check_entries(state, {"late"})
        self._means()
        self._late = self.checked_tensors(state["late"])
