"""A step's microbatches, which users call a window: what each rank runs, what is summed, what is run again.

A step has up to `accumulate` microbatches a rank; the optimizer steps after them. Each rank reports how many
microbatches it has for the next step and the sum of each weight over them; from these reports, the same on
all ranks, `plan_step` decides the same on all ranks. Invariants: every rank ends the same steps; each
microbatch that is run counts once; over all of them, scale * weight sums to the number of ranks, which the
mean over ranks divides out again. So a step's gradient is that of one large batch, whatever its parts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dataflow.grad.lookahead import StepBatches
from dataflow.ragged import Ragged

Uneven = Literal["pad", "min", "error"]
Partial = Literal["keep", "drop"]
Weight = float | Callable[[Any], Any]
"""The weight of one microbatch: a constant, or a function of the batch."""

MICROBATCHES = "microbatches"
"""The weight that every step has: 1 a microbatch."""
_VERSION = 1
_ENTRIES = (
    *("window", "step", "order", "left_out", "totals", "accumulate", "global_batch", "world_size"),
    *("lr", "scale", "loader", "strategy"),
)
"""Entries that every state of a schedule has."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The settings as `GradSchedule` takes them; `ValueError` for values that cannot be meant."""

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
        batching = getattr(loader, "batching", None)  # where it counts batches, the loader's size is 1
        counted = loader if getattr(batching, "kind", "packed") == "packed" else batching
        size = getattr(counted, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("global_batch needs a loader with a batch_size: give accumulate instead")
        return accumulate_for(self.global_batch, batch_size=size, world_size=world_size)

    def weigh(self, batch: Any) -> dict[str, float]:
        """All weights of a batch."""
        return {
            name: checked_weight(name, weight(batch) if callable(weight) else weight)
            for name, weight in self.weights.items()
        }

    def compared(self) -> dict[str, Any]:
        """Return what must be the same on all ranks."""
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


# ---- what all ranks decide on ---------------------------------------------------------------------------


class UnevenRanksError(ValueError):
    """Ranks have different numbers of microbatches, and uneven="error" (or the model) does not allow it.

    Attributes:
        counts: microbatches of each rank in the window.
        cure: what to do.
    """

    def __init__(self, counts: tuple[int, ...], cure: str) -> None:
        super().__init__(counts, cure)
        self.counts, self.cure = counts, cure

    def __str__(self) -> str:
        each = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(self.counts))
        return f"ranks have different numbers of microbatches in this window: {each}; {self.cure}"


@dataclass(frozen=True)
class StepPlan:
    """The work of one step, the same value on every rank."""

    counts: tuple[int, ...]
    """Microbatches that each rank runs and that count."""
    forwards: tuple[int, ...]
    """Forward passes of each rank: its microbatches, then replays with weight zero. All 0: no step."""
    left_out: tuple[int, ...]
    """Microbatches of each rank that are not run."""
    last: bool
    """No step of this epoch follows."""

    @property
    def empty(self) -> bool:
        """Return whether nothing is run."""
        return not any(self.forwards)

    @property
    def replays(self) -> bool:
        """Return whether a rank runs a batch with weight zero."""
        return self.forwards != self.counts

    def merged(self, at_once: int) -> StepPlan:
        """The same step in passes of `at_once` microbatches; the last of a rank may have fewer."""
        counts, forwards = (tuple(-(-n // at_once) for n in each) for each in (self.counts, self.forwards))
        return replace(self, counts=counts, forwards=forwards)


def plan_step(
    counts: Sequence[int],
    *,
    accumulate: int,
    uneven: Uneven = "pad",
    partial: Partial = "keep",
    equal_forwards: bool = False,
) -> StepPlan:
    """Decide on a step from the microbatches that each rank has for it.

    Args:
        counts: of each rank, in [0, accumulate]; less than `accumulate` only where a rank's data ends.
        accumulate: microbatches of a full window.
        uneven: what happens where counts differ. "pad": ranks that lack a part replay a batch with weight
            zero; "min": all run what the shortest has, and the epoch ends; "error": `UnevenRanksError`.
        partial: "drop" leaves out a window that is full on no rank.
        equal_forwards: the model's forward pass is collective, so replays fill up to the longest rank;
            otherwise a rank replays only to take part in the reduction, once if it has nothing.
    """
    # A count below `accumulate` is the only sign of a rank's end, so an epoch whose last window is full ends
    # with a step that is empty on every rank.
    last = min(counts) < accumulate if uneven == "min" else max(counts) < accumulate
    if uneven == "error" and len(set(counts)) > 1:
        raise UnevenRanksError(
            tuple(counts), 'use uneven="pad" or uneven="min", or give each rank as much data'
        )
    runs = [min(counts)] * len(counts) if uneven == "min" else list(counts)
    if partial == "drop" and max(runs) < accumulate:
        runs = [0] * len(counts)
    longest = max(runs)
    fewest = longest if equal_forwards else min(1, longest)
    forwards = tuple(max(count, fewest) for count in runs)
    left_out = tuple(count - run for count, run in zip(counts, runs, strict=True))
    return StepPlan(tuple(runs), forwards, left_out, last)


def scales(totals: Mapping[str, float], world_size: int) -> dict[str, float]:
    """Return the factor of a sum of losses: world size / total, since ranks' gradients are averaged.

    A total of zero gives 0: then no sample of the step has weight, and a sum over none is zero anyway.
    Raises `ValueError` for a total so small that its reciprocal is not finite, on all ranks alike.
    """
    factors = {name: world_size / total if total else 0.0 for name, total in totals.items()}
    for name, factor in factors.items():
        if factor == math.inf:
            raise ValueError(
                f"the weights {name!r} of a window add up to {totals[name]}: too little to divide by"
            )
    return factors


def summed(weights: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The weights of several microbatches, or ranks, added up; exactly rounded, so in any order the same."""
    names = weights[0] if weights else {}
    return {name: math.fsum(each[name] for each in weights) for name in names}


def joined(batches: list[Any], *, outermost: bool = True) -> Any:
    """Batches of tensors, and mappings, tuples and lists of them, put together along the first dimension.

    As many samples a window, in fewer and larger passes: the gradients of a window travel while its last
    backward pass runs, so a longer one hides more of them. Sums of losses stay what they were, to rounding.

    Raises `ValueError` for what else a batch may be made of, for tensors that do not fit together, and for
    a list inside a batch that may hold samples as well as parts of one.
    """
    first = batches[0]
    if isinstance(first, Ragged):
        return Ragged.joined(batches)
    if isinstance(first, Tensor):
        try:
            return torch.cat(batches)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in batches)
            raise _cannot_be_joined(f"tensors of shapes {shapes}") from error
    if isinstance(first, Mapping):
        return {name: joined([each[name] for each in batches], outermost=False) for name in first}
    if isinstance(first, list | tuple) and any(isinstance(part, Tensor | Mapping) for part in first):
        make = getattr(type(first), "_make", None)  # named tuples want their fields one by one
        # `[inputs, targets]`, which torch makes, are no samples; other lists of tensors may be.
        may_be_samples = all(isinstance(part, Mapping) for part in first) or (
            not outermost and all(isinstance(part, Tensor) for part in first)
        )
        if make is None and may_be_samples:
            raise _cannot_be_joined(f"a {type(first).__name__} of samples, or of parts of each sample,")
        parts = zip(*batches, strict=True)
        return (make or type(first))(joined(list(each), outermost=False) for each in parts)
    if isinstance(first, list):
        return [part for each in batches for part in each]
    raise _cannot_be_joined(f"a {type(first).__name__}")


def _cannot_be_joined(what: str) -> ValueError:
    return ValueError(
        f"microbatches with {what} in them cannot be put together; say how with "
        'adapt={"accumulate": ..., "merge": function of a list of batches}'
    )


def merged_batches(
    batches: Sequence[Any], count: int, at_once: int, join: Callable[[list[Any]], Any]
) -> list[Any]:
    """The first `count` batches, `at_once` of them joined; a single one is left as it is."""
    groups = [list(batches[start : min(start + at_once, count)]) for start in range(0, count, at_once)]
    return [join(group) if len(group) > 1 else group[0] for group in groups]


# ---- on this rank -----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Step:
    """A step that all ranks have decided on, on this rank."""

    plan: StepPlan
    share: StepBatches
    lent: list[Any] = field(default_factory=list)
    """Another rank's batches of the same microbatches, one a replay; none: an own batch is replayed."""
    totals: dict[str, float]
    """Each weight over all ranks."""
    scales: dict[str, float]
    """Factors of sums of losses, by weight."""
    is_scaled: bool = False
    """A loss of it was scaled."""
    has_ended: bool = False


@dataclass(kw_only=True)
class Microbatch:
    """One forward and backward pass of a step on this rank, as it was handed out."""

    step: Step
    index: int
    is_last: bool
    """The step ends with it."""
    is_replay: bool
    """It was run before and has weight zero now."""
    reduces: bool
    """Its backward pass reduces gradients."""
    batch: Any = field(repr=False)
    buffers: Iterable[tuple[Tensor, Tensor]] = ()
    """Buffers that a replay must not move, with their values."""
    is_done: bool = False
    """Its backward pass has been."""

    def scale(self, name: str) -> float:
        """Return what its sum of losses is multiplied with."""
        if name not in self.step.scales:
            raise ValueError(f"weights has no {name!r}; there are {', '.join(self.step.scales)}")
        return 0.0 if self.is_replay else self.step.scales[name]

    def finish(self) -> None:
        """Its backward pass has been: set back what a replay has moved, let the batch go."""
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        self.is_done, self.buffers, self.batch = True, (), None


class Replay:
    """Holds a batch that a rank can run again, with weight zero, to take part in a reduction.

    It is the first batch of the latest step that is known to be good. Zero times infinity is not zero, so a
    batch whose loss was not finite, or whose step was skipped, is never run again. Whether a loss is finite
    is looked at only when that is asked for: asking an accelerator waits.
    """

    def __init__(self) -> None:
        self._good: tuple[Any] | None = None
        self._latest: tuple[Any, Tensor] | None = None
        """A batch, and whether its loss was finite."""

    def note(self, batch: Any, loss: Tensor) -> None:
        """The first microbatch of a step was run."""
        self.available()
        self._latest = batch, torch.isfinite(loss.detach()).all()

    def forget(self) -> None:
        """The latest step was skipped: a gradient may be infinite where the loss was not."""
        self._latest = None

    def available(self) -> bool:
        """Return whether there is a batch whose loss was finite."""
        if self._latest is not None:
            batch, finite = self._latest
            if bool(finite):
                self._good = (batch,)
            self._latest = None
        return self._good is not None

    def take_over(self, batch: Any) -> None:
        """Use another rank's batch, on a rank that has none."""
        self._good = (batch,)

    def batch(self, instead: Any) -> Any:
        """The batch to run again; where none is good `instead`, whose step is skipped anyway."""
        return self._good[0] if self.available() and self._good else instead


# ---- where a run stands ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Position:
    """Equal on all ranks, but for `left_out`."""

    window: int = 0
    """Number of windows that have ended."""
    step: int = 0
    """Number of optimizer steps taken."""
    order: int = 0
    """Checksum of every window's passes, syncs and layers: ranks that differ issued other collectives."""
    left_out: int = 0
    """Microbatches of this rank that were not run, because of uneven="min" or partial="drop"."""
    totals: dict[str, float] = field(default_factory=dict)
    """Each weight summed over all windows and ranks."""

    @classmethod
    def start(cls, weights: Iterable[str]) -> Position:
        """Return the position of a run that begins."""
        return cls(totals=dict.fromkeys([*weights, MICROBATCHES], 0.0))

    def step_ended(
        self, plan: StepPlan, totals: Mapping[str, float], *, syncs: bool, skipped: bool, layers: int = 0
    ) -> None:
        """One more window. `layers`: a checksum of those that ran, where their collectives are the ranks'."""
        self.order = zlib.crc32(
            repr((self.window, plan.forwards, syncs, skipped, layers)).encode(), self.order
        )
        self.window += 1
        self.step += not skipped
        for name, total in totals.items():
            self.totals[name] += total

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON value."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], weights: Iterable[str]) -> Position:
        """Read what `to_json()` returned; `ValueError` if it is something else. New weights begin at 0."""
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ValueError(f"a GradSchedule state of version {_VERSION} is needed, got {state!r:.80}")
        missing = [name for name in _ENTRIES if name not in state]
        strategy = state.get("strategy")
        if not missing and not (isinstance(strategy, Mapping) and {"key", "state"} <= set(strategy)):
            missing = ["key and state of the strategy"]
        if missing:
            raise ValueError(f"the state of a GradSchedule is not whole: it lacks {', '.join(missing)}")
        counts = {name: state[name] for name in ("window", "step", "order", "left_out")}
        return cls(**counts, totals={**cls.start(weights).totals, **state["totals"]})


def check_same_windows(
    state: Mapping[str, Any], *, accumulate: int, global_batch: int | None, strategy: str
) -> None:
    """`ValueError` if the windows of the state and of this run are not the same."""
    here: dict[str, Any] = {"global_batch": global_batch, "strategy": strategy}
    there: dict[str, Any] = {"global_batch": state["global_batch"], "strategy": state["strategy"]["key"]}
    if global_batch is None:  # else it follows the number of ranks
        here["accumulate"], there["accumulate"] = accumulate, state["accumulate"]
    for name, value in here.items():
        if there[name] != value:
            raise ValueError(
                f"the state was taken with {name}={there[name]!r}, this run has {name}={value!r}"
            )
