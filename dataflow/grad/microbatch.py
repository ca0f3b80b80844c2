"""A microbatch that was handed out: what its loss is scaled with, and what its replay must not change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dataflow.grad.negotiation import Window


@dataclass
class Microbatch:
    """One forward and backward pass of a window on this rank."""

    window: Window
    index: int
    is_last: bool
    """The window ends with it."""
    is_replay: bool
    """It was run before and has weight zero now."""
    reduces: bool
    """Its backward pass reduces gradients."""
    batch: Any = field(repr=False)
    kept: Iterable[tuple[Tensor, Tensor]] = ()
    """Buffers that a replay must not move, with their values."""
    done: bool = False
    """Its backward pass has been."""

    def scale(self, name: str) -> float:
        """What its sum of losses is multiplied with."""
        if name not in self.window.scales:
            raise ValueError(f"weights has no {name!r}; there are {', '.join(self.window.scales)}")
        return 0.0 if self.is_replay else self.window.scales[name]

    def finish(self) -> None:
        """Its backward pass has been: set back what a replay has moved, let the batch go."""
        with torch.no_grad():
            for buffer, value in self.kept:
                buffer.copy_(value)
        self.done, self.kept, self.batch = True, (), None
