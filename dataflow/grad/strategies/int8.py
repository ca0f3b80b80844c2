"""Gradients as 8-bit integers with a scale a block, in two hops: to the rank that adds, and back to all.

Each block of a parameter has an owner, dealt round robin over the whole model, so that neither the code of a
block nor its owner depends on how DDP cuts buckets. Ranks send their blocks to the owners (all-to-all), an
owner adds the dequantised blocks in rank order and sends the mean, quantised again, to all (all-gather):
(p - 1) / p bytes an entry each way, whatever the number of ranks p. Replicas stay equal to the bit.

What the second rounding loses is owed by the owner alone: `size` times as much, since it will be divided by
the number of ranks. So one residual a parameter covers both roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import functional as F  # noqa: N812

from dataflow.grad.strategies.compress import dequantized, quantized
from dataflow.grad.strategies.error_feedback import Compensated
from dataflow.grad.strategies.strategy import StrategyContext


@dataclass(frozen=True)
class _Deal:
    """Who owns the blocks of a bucket."""

    order: Tensor
    """Blocks sorted by owner."""
    counts: list[int]
    """Blocks of each owner."""


class Int8(Compensated):
    """Eight bits an entry, with error feedback.

    Args:
        block: entries that share a scale (4 bytes); the last block of a parameter is filled with zeros.
        error_feedback: False loses what is rounded off; it is there to show what that costs.
    """

    def __init__(self, block: int = 128, *, error_feedback: bool = True) -> None:
        # The scales lie behind each block and are read as floats of 4 bytes.
        if block < 4 or block % 4:
            raise ValueError(f"block must be a multiple of 4 entries, got {block}")
        super().__init__("int8", block=block, error_feedback=error_feedback)
        self._block = block
        self._deals: dict[tuple[str, ...], _Deal] = {}

    def setup(self, context: StrategyContext) -> None:
        """Number the blocks of the model."""
        super().setup(context)
        self._first: dict[str, int] = {}
        total = 0
        for name, parameter in context.parameters.items():
            self._first[name] = total
            total += self._blocks_in(parameter)

    def _blocks_in(self, tensor: Tensor) -> int:
        return -(-tensor.numel() // self._block)

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean of what the ranks send; called on the thread."""
        owed = self.owed(bucket)
        dtype = next(iter(owed.values())).dtype
        deal = self._deal(owed)
        wanted = self._as_blocks(owed)[deal.order]
        rows = quantized(wanted)
        rests = wanted - dequantized(rows, dtype)
        own = slice(start := sum(deal.counts[: self.wire.rank]), start + deal.counts[self.wire.rank])
        mean = dequantized(self.wire.exchange(rows, deal.counts), dtype).sum(0).div_(self.wire.size)
        told = quantized(mean)
        rests[own] += (mean - dequantized(told, dtype)).mul_(self.wire.size)
        means = dequantized(self._from_owners(told, deal.counts), dtype)
        for name, rest in self._as_parts(rests, deal, owed).items():
            self.feedback.left(name, rest.clone())
        for part, found in zip(bucket.gradients(), self._as_parts(means, deal, owed).values(), strict=True):
            part.copy_(found.view(part.shape))
        return bucket.buffer()

    def _deal(self, owed: dict[str, Tensor]) -> _Deal:
        names = tuple(owed)
        if names not in self._deals:
            numbers = [torch.arange(self._blocks_in(t)) + self._first[name] for name, t in owed.items()]
            owners = torch.cat(numbers) % self.wire.size
            counts = owners.bincount(minlength=self.wire.size).tolist()
            order = owners.argsort(stable=True).to(next(iter(owed.values())).device)
            self._deals[names] = _Deal(order, counts)
        return self._deals[names]

    def _as_blocks(self, owed: dict[str, Tensor]) -> Tensor:
        padded = [F.pad(t, (0, -t.numel() % self._block)) for t in owed.values()]
        return torch.cat(padded).view(-1, self._block)

    def _as_parts(self, dealt: Tensor, deal: _Deal, owed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Back to flat tensors by name."""
        blocks = torch.empty_like(dealt)
        blocks[deal.order] = dealt
        split = blocks.split([self._blocks_in(t) for t in owed.values()])
        return {n: b.view(-1)[: t.numel()] for (n, t), b in zip(owed.items(), split, strict=True)}

    def _from_owners(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The rows of all owners, in their order; shorter ones are filled up on the wire."""
        longest = max(counts)
        gathered = self.wire.gather(F.pad(rows, (0, 0, 0, longest - len(rows))))
        return torch.cat([told[:count] for told, count in zip(gathered, counts, strict=True)])
