"""The end of a step, in the one right order.

Gradients are reduced, and those that only replays have made are dropped; the scaler divides its scale out;
ranks agree whether they are finite, and with FSDP2 whether the same layers ran; they are clipped; the
optimizer steps; gradients are dropped; only then, and only if it has stepped, the learning rate and the
running average move. A step that is skipped is skipped on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dataflow.grad.agreement import Consensus
from dataflow.grad.step import ScheduleSettings
from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.grad.strategies.strategy import Strategy
from dataflow.grad.strategies.switch import StrategySwitch
from dataflow.grad.wrapper import DdpModel, Fsdp2Model, ModelWrapper


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    grad_norm: float | None
    """Norm of the step's gradient before clipping; None if nothing asked for it."""
    skipped: bool
    """The gradient was not finite on some rank: parameters, learning rate and average stayed."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    layers: int
    """Checksum of the layers that ran, where ranks must run the same; 0 elsewhere."""


@dataclass(kw_only=True)
class StepBoundary:
    """The end of each step: sums, clipping, the optimizer. One thread.

    Attributes:
        model: the user's, as it is wrapped.
        optimizer, scaler, schedulers, ema: what steps.
        settings: `max_norm`: gradients are scaled down to this norm; None: never. `skip_nonfinite`: a
            gradient with infinities or NaN makes no step; False, without `max_norm` and `scaler`: nobody
            looks.
    """

    model: ModelWrapper
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    agreement: Consensus
    settings: ScheduleSettings
    scaler: Any = None
    schedulers: Sequence[Any] = ()
    ema: Any = None

    def __post_init__(self) -> None:
        self._lr, self._scale, self._layers = self._lr_now(), self._scale_now(), 0

    def units_changed(self) -> None:
        """Tell the strategy what has changed since the last call: what it owes was measured in other units.

        They are the learning rate of the first parameter group, and the scaler's scale.
        """
        lr, last_lr = self._lr_now(), self._lr
        if lr != last_lr:
            self._lr = lr
            if last_lr:
                self.strategy.lr_changed(lr / last_lr)
        scale, last_scale = self._scale_now(), self._scale
        if scale != last_scale:
            self._scale = scale
            self.strategy.scale_changed(scale / last_scale)

    def units(self) -> dict[str, float]:
        """The units that the strategy was told last. JSON."""
        return {"lr": self._lr, "scale": self._scale}

    def load_units(self, state: Mapping[str, Any]) -> None:
        """Set the learning rate and scale that the strategy counts in to those of `units()`."""
        self._lr, self._scale = float(state["lr"]), float(state["scale"])

    def step(self, number: int, *, replays: bool) -> Outcome:
        """End the step with this number, counted over those taken; `replays`: some rank replayed a batch."""
        self.model.keep_real_gradients(self.agreement)
        self.strategy.before_step(number)
        scaled = self.scaler is not None and self.scaler.is_enabled()
        agree = self.agreement.world_size > 1 and not self._are_equal(number)
        self._layers = self.model.checksum()
        max_norm = self.settings.max_norm
        looks = max_norm is not None or self.settings.skip_nonfinite or scaled
        infinite = False
        if scaled:
            infinite = self._unscale(agree)
        elif replays and self._is_sharded and not looks:  # else it is told with what is told anyway
            self._tell(0.0)
        norm = self._norm() if looks else None
        value = None if norm is None else float(norm)
        skipped = infinite or (value is not None and not math.isfinite(value))
        if agree and value is not None and not scaled and not self._is_sharded:
            skipped = self.agreement.any(skipped)
        if norm is not None and max_norm is not None and not skipped:
            clip_grads_with_norm_(self._parameters(), max_norm, norm)
        lr = self._lr_now()
        if not skipped:
            if scaled and self._parameters():
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        self.strategy.after_step(number, skipped=skipped)
        self.drop_gradients()
        if not skipped:
            for scheduler in self.schedulers:
                scheduler.step()
            if self.ema is not None:
                getattr(self.ema, "update_parameters", self.ema)(self.model.inner)
        return Outcome(value, skipped, lr, self._layers)

    def drop_gradients(self) -> None:
        """Let the next step begin without gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _parameters(self) -> list[torch.Tensor]:
        every: list[torch.Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [parameter for parameter in every if parameter.grad is not None]

    def _are_equal(self, number: int) -> bool:
        """Return whether DDP has averaged: ranks hold the same gradient then, and judge it without a word."""
        is_mean = type(self.strategy) is AllReduce or isinstance(self.strategy, StrategySwitch)
        return is_mean and self.strategy.syncs(number) and isinstance(self.model, DdpModel)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.model, Fsdp2Model)

    def _local(self) -> list[torch.Tensor]:
        """The entries of gradients that this rank holds."""
        entries = [_entries(p) for p in self._parameters()]
        return [g.to_local() if isinstance(g, DTensor) else g for g in entries]

    def _tell(self, value: float) -> list[float]:
        """Return what each rank tells.

        `DisagreementError` where their collectives did not belong together.
        """
        rows = self.agreement.offer([value, self._layers])()
        self.model.check_same([row[1] for row in rows], self.agreement)
        return [row[0] for row in rows]

    def _norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient; of sharded ones over all ranks."""
        norm = get_total_norm(self._local())
        if not isinstance(self.model, Fsdp2Model):
            return norm
        # Not by DTensor's own collectives: ranks whose gradients are not the same would mix them.
        norms = self._tell(float(norm))[: self.model.num_shards]
        return torch.tensor(math.hypot(*norms), dtype=norm.dtype, device=norm.device)

    def _unscale(self, agree: bool) -> bool:
        """Divide the scale out; whether some rank's gradient is not finite, where ranks tell each other.

        A scaler skips its step for what it has found itself, and only for that, so each rank's must find
        what one has. Nor can it update where it has seen no gradient: then it sees one of no parameter.
        """
        local = self._local()
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in local) if agree else True
        infinite = agree and any(self._tell(float(not finite)))
        for gradient in local if infinite and finite else ():
            gradient.view(-1)[:1] = torch.nan
        if local:
            self.scaler.unscale_(self.optimizer)
        else:
            nothing = torch.zeros(1, device=self.model.device, requires_grad=True)
            nothing.grad = torch.full_like(nothing, torch.nan if infinite else 0.0)
            self.scaler.unscale_(torch.optim.SGD([nothing]))
        return infinite

    def _lr_now(self) -> float:
        groups = self.optimizer.param_groups
        return float(groups[0]["lr"]) if groups else 0.0

    def _scale_now(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())


def _entries(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient; of a sparse one its values, where changes reach the gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad._values()


_SCALER_METHODS = ("scale", "unscale_", "step", "update", "is_enabled", "get_scale")


def check_boundary(optimizer: Any, schedulers: Sequence[Any], ema: Any, scaler: Any) -> None:
    """`ValueError` for what cannot be stepped here."""
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in _SCALER_METHODS):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}")
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise ValueError(f"optimizer must be one torch optimizer, got {type(optimizer).__name__}")
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau steps on a metric, not on windows: step it yourself")
        if not callable(getattr(scheduler, "step", None)):
            raise ValueError(
                f"lr must be a scheduler with a step(), or several, got {type(scheduler).__name__}"
            )
    if ema is not None and not callable(getattr(ema, "update_parameters", ema)):
        raise ValueError(
            "ema must be an AveragedModel, or a function that is called with the model, "
            f"got {type(ema).__name__}"
        )
