"""Send only the largest entries of each gradient, and owe the rest (Aji, Heafield 2017; Lin et al. 2018).

Entries are chosen within each parameter, so the result does not depend on how DDP cuts buckets. Each rank
gathers all ranks' entries and adds them in rank order: replicas stay equal to the bit. The bytes grow with
the number of ranks; where they would exceed those of a dense all-reduce, that is what is done.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from dataflow.grad.strategies.error_feedback import LossyStrategy
from dataflow.grad.strategies.wire import all_reduce_bytes

_INDEX_BYTES = 4


class TopK(LossyStrategy):
    """Top-k with error feedback.

    Args:
        ratio: share of the entries of each parameter that is sent, in (0, 1]; at least one.
        warmup_steps: over so many steps the share falls from 1 to `ratio`, by the same factor each step.
        error_feedback: False loses what is not sent; it is there to show what that costs.
    """

    def __init__(self, ratio: float = 0.01, *, warmup_steps: int = 0, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {ratio}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be >= 0, got {warmup_steps}")
        super().__init__("top-k", ratio=ratio, warmup_steps=warmup_steps, error_feedback=error_feedback)
        self._ratio, self._warmup_steps = ratio, warmup_steps

    def ratio_at(self, step: int) -> float:
        """Share of the entries that is sent in a step."""
        if step >= self._warmup_steps:
            return self._ratio
        return float(self._ratio ** (step / self._warmup_steps))

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean of what the ranks send; called on the thread."""
        flat, owed = bucket.buffer(), self.compensated(bucket)
        ratio = self.ratio_at(self.step)
        counts = [max(1, math.ceil(ratio * tensor.numel())) for tensor in owed.values()]
        entry_bytes = _INDEX_BYTES + next(iter(owed.values())).element_size()
        sparse_bytes = (self.wire.size - 1) * sum(counts) * entry_bytes
        # What is gathered grows with the ranks; the dense sum does not.
        if sparse_bytes < all_reduce_bytes(flat.nbytes, self.wire.size):
            means = self._sparse(owed, counts)
        else:
            means = self._dense(owed)
        for part, mean in zip(bucket.gradients(), means, strict=True):
            part.copy_(mean.view(part.shape))
        return flat

    def _dense(self, owed: dict[str, Tensor]) -> list[Tensor]:
        for name, tensor in owed.items():
            self.feedback.keep(name, torch.zeros_like(tensor))
        self.wire.mean(owed.values())
        return list(owed.values())

    def _sparse(self, owed: dict[str, Tensor], counts: list[int]) -> list[Tensor]:
        entries = [top_k(tensor, k) for tensor, k in zip(owed.values(), counts, strict=True)]
        sums = [torch.zeros_like(tensor) for tensor in owed.values()]
        for (name, tensor), (indices, _) in zip(owed.items(), entries, strict=True):
            self.feedback.keep(name, tensor.index_fill_(0, indices.long(), 0))
        # Values first: they begin at a multiple of their size, which a view as floats needs.
        packed = torch.cat(
            [part.view(torch.uint8) for column in (1, 0) for part in [e[column] for e in entries]]
        )
        cut = sum(counts) * sums[0].element_size()
        for row in self.wire.gather(packed):
            values = row[:cut].view(sums[0].dtype).split(counts)
            indices = row[cut:].view(torch.int32).split(counts)
            for total, where, what in zip(sums, indices, values, strict=True):
                total.index_add_(0, where.long(), what)
        return [total.div_(self.wire.size) for total in sums]


def top_k(vector: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices (int32) and values of the k entries of largest magnitude; NaN counts as the largest."""
    indices = vector.abs().topk(k, sorted=False).indices
    return indices.to(torch.int32), vector[indices]
