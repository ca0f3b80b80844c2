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

from dataflow.grad.strategies.error_feedback import LossyStrategy
from dataflow.grad.strategies.strategy import StrategyContext

_LEVELS = 127
_SCALE_BYTES = 4
"""Each block of a packed row ends with its float32 scale."""


@dataclass(frozen=True)
class _BlockOwners:
    """Who owns the blocks of a bucket."""

    order: Tensor
    """Blocks sorted by owner."""
    counts: list[int]
    """Blocks of each owner."""


class Int8(LossyStrategy):
    """Eight bits an entry, with error feedback.

    Args:
        block: entries that share a scale (4 bytes); the last block of a parameter is filled with zeros.
        error_feedback: False loses what is rounded off; it is there to show what that costs.
    """

    short_memory = True

    def __init__(self, block: int = 128, *, error_feedback: bool = True) -> None:
        # The scales lie behind each block and are read as floats of 4 bytes.
        if block < 4 or block % 4:
            raise ValueError(f"block must be a multiple of 4 entries, got {block}")
        super().__init__("int8", block=block, error_feedback=error_feedback)
        self._block = block
        self._deals: dict[tuple[str, ...], _BlockOwners] = {}

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
        owed = self.compensated(bucket)
        dtype = next(iter(owed.values())).dtype
        deal = self._deal(owed)
        blocks = self._as_blocks(owed)[deal.order]
        rows = quantized(blocks)
        rests = blocks - dequantized(rows, dtype)
        own = slice(start := sum(deal.counts[: self.wire.rank]), start + deal.counts[self.wire.rank])
        own_mean = dequantized(self.wire.exchange(rows, deal.counts), dtype).sum(0).div_(self.wire.size)
        own_rows = quantized(own_mean)
        # The owner alone owes what the second rounding loses; the mean over ranks will divide it by `size`.
        rests[own] += (own_mean - dequantized(own_rows, dtype)).mul_(self.wire.size)
        means = dequantized(self._from_owners(own_rows, deal.counts), dtype)
        for name, rest in self._as_parts(rests, deal, owed).items():
            self.feedback.keep(name, rest.clone())
        for part, mean in zip(bucket.gradients(), self._as_parts(means, deal, owed).values(), strict=True):
            part.copy_(mean.view(part.shape))
        return bucket.buffer()

    def _deal(self, owed: dict[str, Tensor]) -> _BlockOwners:
        names = tuple(owed)
        if names not in self._deals:
            # By the block's number in the model, not in the bucket: another cut into buckets changes nothing.
            numbers = [torch.arange(self._blocks_in(t)) + self._first[name] for name, t in owed.items()]
            owners = torch.cat(numbers) % self.wire.size
            counts = owners.bincount(minlength=self.wire.size).tolist()
            order = owners.argsort(stable=True).to(next(iter(owed.values())).device)
            self._deals[names] = _BlockOwners(order, counts)
        return self._deals[names]

    def _as_blocks(self, owed: dict[str, Tensor]) -> Tensor:
        padded = [F.pad(t, (0, -t.numel() % self._block)) for t in owed.values()]
        return torch.cat(padded).view(-1, self._block)

    def _as_parts(self, dealt: Tensor, deal: _BlockOwners, owed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Back to flat tensors by name."""
        blocks = torch.empty_like(dealt)
        blocks[deal.order] = dealt
        split = blocks.split([self._blocks_in(t) for t in owed.values()])
        return {n: b.view(-1)[: t.numel()] for (n, t), b in zip(owed.items(), split, strict=True)}

    def _from_owners(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The rows of all owners, in their order; shorter ones are filled up on the wire."""
        longest = max(counts)
        gathered = self.wire.gather(F.pad(rows, (0, 0, 0, longest - len(rows))))
        return torch.cat([row[:count] for row, count in zip(gathered, counts, strict=True)])


def quantized(blocks: Tensor) -> Tensor:
    """Rows of floats [n, b] as bytes [n, b + 4]: int8 multiples of the row's largest magnitude / 127.

    Loses at most 1/254 of the largest magnitude per entry. A row that holds inf or NaN comes back as NaN.
    """
    scales = (blocks.abs().amax(1, keepdim=True) / _LEVELS).to(torch.float32)
    steps = torch.where(scales > 0, blocks / scales, 0).nan_to_num_(0, 0, 0)
    whole = steps.round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    # By way of a flat view: the strides of a single row may be anything, and then bytes cannot be viewed.
    as_bytes = scales.reshape(-1).view(torch.uint8).view(-1, _SCALE_BYTES)
    return torch.cat([whole.view(torch.uint8), as_bytes], 1)


def dequantized(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats [..., b] that `quantized` rows [..., b + 4] stand for."""
    whole = rows[..., :-_SCALE_BYTES].contiguous().view(torch.int8)
    scales = rows[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return whole.to(dtype) * scales.to(dtype)
