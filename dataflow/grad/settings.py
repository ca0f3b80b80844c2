"""The settings of a `GradSchedule`: checked when it is made, compared between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

Uneven = Literal["pad", "min", "error"]
Partial = Literal["keep", "drop"]
Weight = float | Callable[[Any], Any]
"""Of one microbatch: a constant, or a function of the batch."""

MICROBATCHES = "microbatches"
"""The weight that every step has: 1 a microbatch."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
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
        for name, value, choices in (("uneven", self.uneven, Uneven), ("partial", self.partial, Partial)):
            if value not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
        if self.accumulate is not None and self.global_batch is not None:
            raise ValueError("accumulate and global_batch both say how large a window is: give one of them")
        if self.accumulate is not None and (type(self.accumulate) is not int or self.accumulate < 1):
            raise ValueError(f"accumulate must be an integer >= 1, got {self.accumulate!r}")
        if self.global_batch is not None and type(self.global_batch) is not int:
            raise ValueError(f"global_batch must be an integer >= 1, got {self.global_batch!r}")
        if not isinstance(self.weights, Mapping) or any(type(name) is not str for name in self.weights):
            raise ValueError(
                f'weights must be names with weights, such as {{"samples": len}}, got {self.weights!r}'
            )
        object.__setattr__(self, "weights", dict(self.weights))
        if MICROBATCHES in self.weights:
            raise ValueError(f"{MICROBATCHES!r} is a weight that is there always: choose another name")
        for name, weight in self.weights.items():
            if not callable(weight):
                checked_weight(name, weight)
        if self.max_norm is not None and not (isinstance(self.max_norm, Real) and self.max_norm > 0):
            raise ValueError(f"max_norm must be > 0, got {self.max_norm!r}; for no clipping, leave it out")
        if not (isinstance(self.timeout_s, Real) and self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s must be > 0 seconds, and finite, got {self.timeout_s!r}")

    def window_size(self, loader: Any, world_size: int) -> int:
        """Microbatches a rank and full window."""
        if self.global_batch is None:
            return self.accumulate or 1
        size = getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("global_batch needs a loader with a batch_size: give accumulate instead")
        return accumulate_for(self.global_batch, batch_size=size, world_size=world_size)

    def weigh(self, batch: Any) -> dict[str, float]:
        """All weights of a batch."""
        return {
            name: checked_weight(name, weight(batch) if callable(weight) else weight)
            for name, weight in self.weights.items()
        }

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


def checked_weight(name: str, value: object) -> float:
    """A weight as a finite number >= 0, or `ValueError`."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        number = float(value)  # type: ignore[arg-type]  # a 0-dimensional tensor is a number too
    except (TypeError, ValueError) as error:
        raise ValueError(f"weight {name!r} of a batch must be a number, got {value!r}") from error
    if not 0 <= number < math.inf:
        raise ValueError(f"weight {name!r} of a batch must be finite and >= 0, got {number}")
    return number


def accumulate_for(global_batch: int, *, batch_size: int, world_size: int) -> int:
    """Microbatches a rank and window that make `global_batch` samples a step.

    Raises `ValueError` where they do not divide.
    """
    at_once = batch_size * world_size
    if global_batch < 1 or global_batch % at_once:
        near = max(1, global_batch // at_once) * at_once
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of batch_size * ranks = {batch_size} * "
            f"{world_size} = {at_once}; take {near}, or another batch_size"
        )
    return global_batch // at_once
