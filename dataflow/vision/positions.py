"""Positions of tokens in time, height and width (mRoPE), from runs of text and grids of pictures."""

from __future__ import annotations

import torch
from torch import Tensor


def image_positions(is_image: Tensor, lengths: Tensor, grids: Tensor, merge: int) -> Tensor:
    """Positions in time, height and width of samples that lie side by side, as `get_rope_index` gives them.

    Each sample begins at 0. A picture's tokens have the place of its first, plus their own in its grid; what
    follows begins behind its longer side.

    Args:
        is_image: bool [tokens], true at the tokens of pictures.
        lengths: int64 [samples], the tokens of each.
        grids: int64 [pictures, 3]: time, height and width of each picture in patches.
        merge: the patches of a side that become one token.

    Returns:
        int64 [3, tokens].

    Raises `ValueError` where pictures and tokens do not agree.

    Examples:
        >>> is_image = torch.tensor([False, True, True, False])
        >>> image_positions(is_image, torch.tensor([4]), torch.tensor([[1, 2, 4]]), 2).tolist()
        [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    time, height, width = (grids // torch.tensor([1, merge, merge], device=grids.device)).unbind(1)
    sizes = time * height * width
    places = is_image.nonzero()[:, 0]
    if int(sizes.sum()) != len(places):
        raise ValueError(f"{len(places)} tokens stand for pictures whose sizes make {int(sizes.sum())}")
    number = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    last = sizes.cumsum(0) - 1
    within = torch.arange(len(places), device=places.device) - (last + 1 - sizes)[number]
    if not bool((places - within == places[last][number] - sizes[number] + 1).all()):
        raise ValueError("a picture's tokens are not one behind the other")
    steps = (~is_image).long()
    steps[places[last]] = torch.maximum(height, width)
    before = steps.cumsum(0) - steps  # of each token, from the first sample on
    if len(before):
        begins = (lengths.cumsum(0) - lengths).clamp(max=len(before) - 1)  # an empty sample may be the last
        before = before - before[begins].repeat_interleave(lengths)
    out = before.expand(3, -1).clone()
    high, wide = height[number], width[number]
    out[:, places] += torch.stack([within // (high * wide), within // wide % high, within % wide])
    return out
