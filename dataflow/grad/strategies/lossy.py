"""Lossy codes whose losses are added to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).

Invariant, in exact arithmetic: the means that were applied, plus the mean over ranks of what is left, are the
mean of all gradients so far. So a lossy compressor delays parts of the gradient but loses none.

Residuals are kept by parameter name, because DDP deals parameters to other buckets after the first backward
pass. They count gradients under the learning rate of now: when it changes, they are rescaled, so that what is
owed in units of the parameters stays what it was. What a step left becomes valid when the step is known to
have been taken; a skipped step (non-finite gradients) leaves no trace. Nor does a step where no rank has
computed a gradient for a parameter: what was sent of it is not applied, so it is owed as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import functional as F  # noqa: N812

from dataflow.grad.strategies.strategy import BucketStrategy, StrategyContext, all_reduce_bytes

_LEVELS = 127
_SCALE_BYTES = 4
"""Each block of a packed row ends with its float32 scale."""
_INDEX_BYTES = 4


class LossyStrategy(BucketStrategy):
    """Reduces by a lossy code and owes what it left out; the step count and the residuals are its state.

    One caller at a time.

    Args:
        name, settings: as of `Strategy`.
        error_feedback: False drops what is left out (to see what that costs).
    """

    def __init__(self, name: str, *, error_feedback: bool, **settings: Any) -> None:
        super().__init__(name, **settings, error_feedback=error_feedback)
        self._error_feedback = error_feedback
        self.residuals: dict[str, Tensor] = {}
        """Gradients that are owed, flat, by parameter name."""
        self._of_step: dict[str, Tensor] = {}
        """Valid when the step is known to have been taken."""
        self.step = 0

    def compensated(self, name: str, gradient: Tensor) -> Tensor:
        """A new flat tensor: the gradient plus what is owed; at least float32: small rests survive."""
        owed = self._of_step.get(name, self.residuals.get(name))
        precise = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return precise if owed is None else precise.add_(owed)

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean of what the ranks send; called on the thread."""
        flat, parts = bucket.buffer(), bucket.gradients()
        named = zip(self.names_in(bucket), parts, strict=True)
        owed = {name: self.compensated(name, part) for name, part in named}
        for part, mean in zip(parts, self.means(owed, flat.nbytes), strict=True):
            part.copy_(mean.view(part.shape))
        return flat

    def means(self, owed: dict[str, Tensor], nbytes: int) -> Iterable[Tensor]:
        """The means of what the ranks send of what should be sent, flat, by parameter; what is left is kept.

        `nbytes`: of the bucket's gradients.
        """
        raise NotImplementedError

    def keep(self, name: str, residual: Tensor) -> None:
        """Remember what of a compensated gradient was not sent; flat, and this object's from now on."""
        if self._error_feedback:
            self._of_step[name] = residual

    def before_step(self, step: int) -> None:
        """Go on owing what is not applied."""
        for name in self.without_gradient():
            self._of_step.pop(name, None)

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Keep what this step left; or, if it was skipped, what was owed before."""
        if not skipped:
            self.residuals |= self._of_step
        self._of_step = {}
        self.step = step + (not skipped)

    def lr_changed(self, ratio: float) -> None:
        """Rescale what is owed; to or from a learning rate of 0 there is nothing to convert by."""
        if math.isfinite(ratio) and ratio > 0:
            for residual in self.residuals.values():
                residual.div_(ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank owes, shaped as the parameters, and the step: every rank saves its own."""
        parameters = self.context.parameters
        owed = {name: flat.view(parameters[name].shape).clone() for name, flat in self.residuals.items()}
        return {"step": self.step, "residuals": owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"step", "residuals"})
        residuals, step = self.checked_tensors(state["residuals"]), int(state["step"])
        self.residuals, self._of_step = {n: t.reshape(-1) for n, t in residuals.items()}, {}
        self.step = step


@dataclass(frozen=True)
class _BlockOwners:
    """The ranks that own the blocks of a bucket."""

    order: Tensor
    """Blocks, sorted by their owner."""
    counts: list[int]
    """Number of blocks of each owner."""


class Int8(LossyStrategy):
    """Eight bits an entry and a scale a block, with error feedback, in two hops.

    Each block of a parameter has an owner, dealt round robin over the whole model, so that neither the code
    of a block nor its owner depends on how DDP cuts buckets. Ranks send their blocks to the owners
    (all-to-all), an owner adds the dequantised blocks in rank order and sends the mean, quantised again, to
    all (all-gather): (p - 1) / p bytes an entry each way, whatever the number of ranks p. Replicas stay equal
    to the bit.

    What the second rounding loses is owed by the owner alone: `size` times as much, since it will be divided
    by the number of ranks. So one residual a parameter covers both roundings.

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

    def means(self, owed: dict[str, Tensor], nbytes: int) -> Iterable[Tensor]:
        """Send blocks to their owners, and get their means from them."""
        dtype = next(iter(owed.values())).dtype
        deal = self._deal(owed)
        blocks = self._as_blocks(owed)[deal.order]
        rows = quantized(blocks)
        rests = blocks - dequantized(rows, dtype)
        span = slice(start := sum(deal.counts[: self.wire.rank]), start + deal.counts[self.wire.rank])
        own_mean = dequantized(self.wire.exchange(rows, deal.counts), dtype).sum(0).div_(self.wire.size)
        own_rows = quantized(own_mean)
        # The owner alone owes what the second rounding loses; the mean over ranks will divide it by `size`.
        rests[span] += (own_mean - dequantized(own_rows, dtype)).mul_(self.wire.size)
        means = dequantized(self._from_owners(own_rows, deal.counts), dtype)
        for name, rest in self._as_parts(rests, deal, owed).items():
            self.keep(name, rest.clone())
        return self._as_parts(means, deal, owed).values()

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


class TopK(LossyStrategy):
    """Send only the largest entries of each gradient, and owe the rest (Aji, Heafield 2017; Lin et al. 2018).

    Entries are chosen within each parameter, so the result does not depend on how DDP cuts buckets. Each rank
    gathers all ranks' entries and adds them in rank order: replicas stay equal to the bit. The bytes grow
    with the number of ranks; where they would exceed those of a dense all-reduce, that is what is done.

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

    def means(self, owed: dict[str, Tensor], nbytes: int) -> Iterable[Tensor]:
        """Send the largest entries, or all where that is less."""
        ratio = self.ratio_at(self.step)
        counts = [math.ceil(ratio * tensor.numel()) for tensor in owed.values()]  # none of an empty one
        entry_bytes = _INDEX_BYTES + next(iter(owed.values())).element_size()
        sparse_bytes = (self.wire.size - 1) * sum(counts) * entry_bytes
        # What is gathered grows with the ranks; the dense sum does not.
        if sparse_bytes < all_reduce_bytes(nbytes, self.wire.size):
            return self._sparse(owed, counts)
        for name, tensor in owed.items():
            self.keep(name, torch.zeros_like(tensor))
        self.wire.mean(owed.values())
        return owed.values()

    def _sparse(self, owed: dict[str, Tensor], counts: list[int]) -> list[Tensor]:
        entries = [top_k(tensor, k) for tensor, k in zip(owed.values(), counts, strict=True)]
        sums = [torch.zeros_like(tensor) for tensor in owed.values()]
        for (name, tensor), (indices, _) in zip(owed.items(), entries, strict=True):
            self.keep(name, tensor.index_fill_(0, indices.long(), 0))
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
