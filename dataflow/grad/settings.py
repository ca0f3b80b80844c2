"""What a `GradSchedule` was told: checked when it is made, compared between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

from dataflow.grad.lookahead import Weight
from dataflow.grad.windows import (
    MICROBATCHES,
    Partial,
    Uneven,
    accumulate_for,
    checked_choices,
    checked_weight,
)


@dataclass(frozen=True)
class Settings:
    """As in `GradSchedule`; `ValueError` for values that cannot be meant."""

    accumulate: int | None
    global_batch: int | None
    weights: Mapping[str, Weight]
    uneven: Uneven
    partial: Partial
    max_norm: float | None
    skip_nonfinite: bool
    timeout_s: float

    def __post_init__(self) -> None:
        checked_choices(self.uneven, self.partial)
        if self.accumulate is not None and self.global_batch is not None:
            raise ValueError("accumulate and global_batch both say how large a window is: give one of them")
        if self.accumulate is not None and (type(self.accumulate) is not int or self.accumulate < 1):
            raise ValueError(f"accumulate must be an integer >= 1, got {self.accumulate!r}")
        if self.global_batch is not None and type(self.global_batch) is not int:
            raise ValueError(f"global_batch must be an integer >= 1, got {self.global_batch!r}")
        if MICROBATCHES in self.weights:
            raise ValueError(f"{MICROBATCHES!r} is a weight that is there always: choose another name")
        for name, weight in self.weights.items():
            if not callable(weight):
                checked_weight(name, weight)
        if self.max_norm is not None and not (isinstance(self.max_norm, Real) and self.max_norm > 0):
            raise ValueError(f"max_norm must be > 0, got {self.max_norm!r}; for no clipping, leave it out")
        if not (isinstance(self.timeout_s, Real) and self.timeout_s > 0 and isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s must be > 0 seconds, and finite, got {self.timeout_s!r}")

    def window_size(self, loader: Any, world_size: int) -> int:
        """Microbatches a rank and full window."""
        if self.global_batch is None:
            return self.accumulate or 1
        size = getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("global_batch needs a loader with a batch_size: give accumulate instead")
        return accumulate_for(self.global_batch, batch_size=size, world_size=world_size)

    @property
    def constant_weights(self) -> bool:
        """No weight depends on the batch."""
        return not any(callable(weight) for weight in self.weights.values())

    def compared(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "uneven": self.uneven,
            "partial": self.partial,
            "max_norm": self.max_norm,
            "skip_nonfinite": self.skip_nonfinite,
            "weights": {
                name: "a function" if callable(weight) else float(weight)
                for name, weight in sorted(self.weights.items())
            },
        }


def checked_names(weights: Any) -> dict[str, Weight]:
    """A copy; `ValueError` unless names are told for weights."""
    if weights is not None and not (
        isinstance(weights, Mapping) and all(type(name) is str for name in weights)
    ):
        raise ValueError(f'weights must be names with weights, such as {{"samples": len}}, got {weights!r}')
    return dict(weights or {})
