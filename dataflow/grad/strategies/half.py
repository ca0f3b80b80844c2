"""Gradients rounded to 16 bits on the wire: PyTorch's fp16 and bf16 hooks.

DDP refuses `bf16_compress_hook` by its name where there is no NCCL, although gloo sums bfloat16; behind this
strategy the hook that DDP sees has another name. Half the bytes; the mean is rounded to 11 (fp16) or 8 (bf16)
significant bits, and fp16 overflows above 65504.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dataflow.grad.strategies.passive import Passive

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Half(Passive):
    """All-reduce in 16 bits. Args: `dtype`, "fp16" or "bf16"."""

    hooks_gradients = True

    def __init__(self, dtype: Literal["fp16", "bf16"]) -> None:
        if dtype not in _HOOKS:
            raise ValueError(f"dtype must be 'fp16' or 'bf16', got {dtype!r}")
        super().__init__(dtype)
        self._hook = _HOOKS[dtype]

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce; it overlaps with the backward pass."""
        group = self.context.group
        if group is None or self.wire.size == 1:
            return super().reduce(bucket)
        self.wire.count_all_reduce(2 * bucket.buffer().numel())
        future: Future[Tensor] = self._hook(group, bucket)
        return future
