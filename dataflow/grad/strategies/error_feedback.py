"""What compression left out, added to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).

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
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from dataflow.grad.strategies.ordered_comm import BucketStrategy


class ErrorFeedback:
    """The residuals of one rank. One caller at a time.

    Args:
        enabled: False drops what is left out (to see what that costs).
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._residuals: dict[str, Tensor] = {}
        self._of_step: dict[str, Tensor] = {}
        """Valid when the step is known to have been taken."""

    def compensated(self, name: str, gradient: Tensor) -> Tensor:
        """A new flat tensor: the gradient plus what is owed; at least float32: small rests survive."""
        owed = self._of_step.get(name, self._residuals.get(name))
        precise = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return precise if owed is None else precise.add_(owed)

    def keep(self, name: str, residual: Tensor) -> None:
        """Remember what of a compensated gradient was not sent; flat, and this object's from now on."""
        if self._enabled:
            self._of_step[name] = residual

    def undo(self, names: Iterable[str]) -> None:
        """What this step has sent of these was not applied."""
        for name in names:
            self._of_step.pop(name, None)

    def step_ended(self, *, skipped: bool) -> None:
        """Keep what this step left; or, if it was skipped, what there was before."""
        if not skipped:
            self._residuals |= self._of_step
        self._of_step = {}

    def lr_changed(self, ratio: float) -> None:
        """The learning rate became `ratio` times what it was; to or from 0 there is nothing to convert by."""
        if math.isfinite(ratio) and ratio > 0:
            for residual in self._residuals.values():
                residual.div_(ratio)

    def state(self) -> dict[str, Tensor]:
        """The residuals by parameter name, flat; not copies."""
        return dict(self._residuals)

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Take over flat residuals; the tensors are this object's from now on."""
        self._residuals, self._of_step = dict(residuals), {}


class LossyStrategy(BucketStrategy):
    """Reduces by a lossy code with error feedback: the step count and the residuals are its state.

    Args: as `PassiveStrategy`; `error_feedback` is among the settings.
    """

    def __init__(self, name: str, *, error_feedback: bool, **settings: Any) -> None:
        super().__init__(name, **settings, error_feedback=error_feedback)
        self.feedback = ErrorFeedback(enabled=error_feedback)
        self.step = 0

    def compensated(self, bucket: GradBucket) -> dict[str, Tensor]:
        """New flat tensors by parameter name, in the order of the bucket: what should be sent."""
        parts = zip(self.names_in(bucket), bucket.gradients(), strict=True)
        return {name: self.feedback.compensated(name, part) for name, part in parts}

    def before_step(self, step: int) -> None:
        """Go on owing what is not applied."""
        self.feedback.undo(self.without_gradient())

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Settle what is owed."""
        self.feedback.step_ended(skipped=skipped)
        self.step = step + (not skipped)

    def lr_changed(self, ratio: float) -> None:
        """Rescale what is owed."""
        self.feedback.lr_changed(ratio)

    def state_dict(self) -> dict[str, Any]:
        """What this rank owes, shaped as the parameters, and the step: every rank saves its own."""
        parameters = self.context.parameters
        owed = {
            name: flat.view(parameters[name].shape).clone() for name, flat in self.feedback.state().items()
        }
        return {"step": self.step, "residuals": owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"step", "residuals"})
        residuals, step = self.checked_tensors(state["residuals"]), int(state["step"])
        self.feedback.load({n: t.reshape(-1) for n, t in residuals.items()})
        self.step = step
