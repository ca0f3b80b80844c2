"""One all-reduce a bucket: DDP's own (or FSDP2's reduce-scatter), the same in a hook, and one in 16 bits."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dataflow.grad.strategies.strategy import PassiveStrategy, StrategyContext
from dataflow.grad.strategies.wire import all_reduce_bytes


class AllReduce(PassiveStrategy):
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
        """What a ring all-reduce sends for these gradients; computed, not measured."""
        return self._bytes_sent


class AllReduceHook(PassiveStrategy):
    """The plain all-reduce as a hook, where DDP's hook must be able to become another one's."""

    hooks_gradients = True
    short_memory = True

    def __init__(self) -> None:
        super().__init__(AllReduce.name)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce; it overlaps with the backward pass."""
        return self.wire.begin_add(bucket.buffer().mul_(1 / self.wire.size))  # as DDP; its hooks divide


_HALF_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Half(PassiveStrategy):
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
