"""A batch that a rank can run again, with weight zero, where it has none of its own.

Zero times infinity is not zero, so a batch whose loss was not finite, or whose window was skipped, is never
run again. Whether a loss is finite is looked at only when that is asked for: asking an accelerator waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Replay:
    """Holds the first batch of the latest window, and the latest one known to be good."""

    def __init__(self) -> None:
        self._good: Any = None
        self._latest: Any = None
        self._finite: Tensor | None = None
        """Of `_latest`; None: there is none."""

    def note(self, batch: Any, loss: Tensor) -> None:
        """The first microbatch of a window was run."""
        self.available()
        self._latest, self._finite = batch, torch.isfinite(loss.detach()).all()

    def forget(self) -> None:
        """The latest window was skipped: a gradient may be infinite where the loss was not."""
        self._latest = self._finite = None

    def available(self) -> bool:
        """Whether there is a batch whose loss was finite."""
        if self._finite is not None:
            if bool(self._finite):
                self._good = (self._latest,)
            self._latest = self._finite = None
        return self._good is not None

    def given(self, batch: Any) -> None:
        """Another rank's batch, for a rank that has none."""
        self._good = (batch,)

    def batch(self, instead: Any) -> Any:
        """The batch to run again; where none is good `instead`, whose window is skipped anyway."""
        return self._good[0] if self.available() else instead
