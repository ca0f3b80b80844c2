"""Two lossy codes of a vector, as pure functions: its largest entries, and 8-bit integers in blocks.

Both are contractions: the squared norm of what they lose is less than that of the input by a fixed factor,
which is what error feedback needs in order to converge.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEVELS = 127
SCALE_BYTES = 4
"""Each block of a packed row ends with its float32 scale."""


def top_k(vector: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices (int32) and values of the k entries of largest magnitude; NaN counts as the largest."""
    indices = vector.abs().topk(k, sorted=False).indices
    return indices.to(torch.int32), vector[indices]


def quantized(blocks: Tensor) -> Tensor:
    """Rows of floats [n, b] as bytes [n, b + 4]: int8 multiples of the row's largest magnitude / 127.

    Loses at most 1/254 of the largest magnitude per entry. A row that holds inf or NaN comes back as NaN.
    """
    scales = (blocks.abs().amax(1, keepdim=True) / _LEVELS).to(torch.float32)
    steps = torch.where(scales > 0, blocks / scales, 0).nan_to_num_(0, 0, 0)
    whole = steps.round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    # By way of a flat view: the strides of a single row may be anything, and then bytes cannot be viewed.
    as_bytes = scales.reshape(-1).view(torch.uint8).view(-1, SCALE_BYTES)
    return torch.cat([whole.view(torch.uint8), as_bytes], 1)


def dequantized(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats [..., b] that `quantized` rows [..., b + 4] stand for."""
    whole = rows[..., :-SCALE_BYTES].contiguous().view(torch.int8)
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return whole.to(dtype) * scales.to(dtype)
