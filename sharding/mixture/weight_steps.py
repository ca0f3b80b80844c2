"""Weights that were set while a mixture ran, as steps behind its schedule; a state keeps them.

A step holds from a position in an epoch on: where the batches that were delivered ended, or the begin of the
next epoch where nothing was left of that one. So an epoch in which weights were set is known like any other,
and may begin anew. A step takes some 50 bytes of a state. There are at most `MAX_STEPS`, fewer of very many
sources: then the oldest are merged into a base, which tells how far each source was where the oldest step
that is kept begins. What came before is not known any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from sharding.mixture.shares import ENDLESS, exact_weights

MAX_STEPS = 64
_MAX_WEIGHTS = 4096
"""The weights of all steps together, at most: some 32 KB of a state."""

EpochPosition = tuple[int, int]
"""Epoch, and samples of it before."""


class WeightStep(NamedTuple):
    """Weights, and from where on they hold."""

    epoch: int
    position: int
    """Samples of the epoch before; a draw begins there."""
    weights: tuple[Fraction, ...]
    """The weights of the sources, of sum 1."""

    @property
    def begin(self) -> EpochPosition:
        """The position at which the weights begin to hold."""
        return self.epoch, self.position


class MixtureBase(NamedTuple):
    """The samples that each source had given where the oldest step begins."""

    first: tuple[int, ...]
    """Samples that each source gave before the epoch of the step."""
    given: tuple[int, ...]
    """Samples that each source gave in that epoch before the step."""


@dataclass(frozen=True)
class WeightSteps:
    """The weights that were set, in order. A value."""

    steps: tuple[WeightStep, ...] = ()
    base: MixtureBase | None = None
    """At the first step, where older ones were merged; None: all are kept."""

    @property
    def known_from(self) -> EpochPosition:
        """The position from which on the mixture is known."""
        return self.steps[0].begin if self.base else (0, 0)

    def given(self, epoch: int) -> tuple[int, ...] | None:
        """Samples that each source gave in an epoch before what is known of it; None: it is known whole."""
        return self.base.given if self.base and epoch == self.steps[0].epoch else None

    def at_begin(self, epoch: int) -> tuple[Fraction, ...] | None:
        """The weights that an epoch begins with; None: those of the schedule, or it is not known."""
        before = [step.weights for step in self.steps if step.begin <= (epoch, 0)]
        return before[-1] if before else None

    def within(self, epoch: int) -> list[WeightStep]:
        """Return the steps that were set in an epoch, but for its begin."""
        return [step for step in self.steps if step.epoch == epoch and step.position]

    def next_epoch(self, epoch: int) -> int:
        """The next epoch for which, or in which, weights were set; `ENDLESS`: none."""
        return min((step.epoch for step in self.steps if step.epoch > epoch), default=ENDLESS)

    def with_step(self, step: WeightStep) -> WeightSteps:
        """The steps up to one that is set; later ones end there."""
        return replace(self, steps=(*(earlier for earlier in self.steps if earlier.begin < step.begin), step))

    def surplus(self, since: EpochPosition) -> WeightStep | None:
        """Return the step that holds at a position, if the many steps before it are to be merged."""
        most = max(4, min(MAX_STEPS, _MAX_WEIGHTS // len(self.steps[0].weights)))
        older = [step for step in self.steps if step.begin <= since]
        return older[-1] if len(self.steps) > most and older else None

    def known_since(self, oldest: WeightStep, base: MixtureBase) -> WeightSteps:
        """The steps from one on, where each source was as far as `base` says."""
        return WeightSteps((oldest, *(step for step in self.steps if step.begin > oldest.begin)), base)

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` takes, as JSON types."""
        steps = [[step.epoch, step.position, " ".join(map(str, step.weights))] for step in self.steps]
        base = self.base._asdict() if self.base else {}
        return {"steps": steps, **{name: list(counts) for name, counts in base.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], num_sources: int, run_length: int) -> WeightSteps:
        """The steps of a state. Raises `ValueError` for what is none.

        A state of fewer sources holds: the others are new, and have no share until they get one.
        """
        if set(value) not in ({"steps"}, {"steps", *MixtureBase._fields}):
            names = ", ".join(map(str, value))
            raise ValueError(f"weights must have steps, or steps, first and given, got {names}")
        values, steps = value["steps"], list[WeightStep]()
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"weights: steps must be a list, got {values!r}")
        for entry in values:
            if not isinstance(entry, list | tuple) or [*map(type, entry)] != [int, int, str]:
                raise ValueError(f"weights: a step has an epoch, a position and shares, got {entry!r}")
            epoch, position, text = entry
            if not (0 <= epoch < ENDLESS and 0 <= position < ENDLESS) or position % run_length:
                raise ValueError(f"weights: a step must begin a draw of an epoch, got {entry!r}")
            if steps and (epoch, position) <= steps[-1].begin:
                raise ValueError(f"weights: steps must ascend, got {entry!r}")
            steps.append(WeightStep(epoch, position, _shares_of(text, num_sources)))
        if len(value) == 1:
            return cls(tuple(steps))
        first, counts = (_counts_of(name, value[name], num_sources) for name in MixtureBase._fields)
        if sum(counts) != steps[0].position or any(count % run_length for count in counts):
            raise ValueError(f"weights: what sources gave does not make up position {steps[0].position}")
        return cls(tuple(steps), MixtureBase(first, counts))


NOTHING_SET = WeightSteps()


def _shares_of(text: str, num_sources: int) -> tuple[Fraction, ...]:
    words = text.split(" ")
    _check_known(len(words), num_sources)
    try:
        return exact_weights([*map(Fraction, words), *[Fraction(0)] * (num_sources - len(words))])
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"weights: shares must be fractions >= 0, got {text!r}") from error


def _counts_of(name: str, value: Any, num_sources: int) -> tuple[int, ...]:
    is_list = isinstance(value, Sequence) and all(type(count) is int for count in value)
    if not is_list or any(not 0 <= count < ENDLESS for count in value):
        raise ValueError(f"weights: {name} must be integers >= 0, got {value!r}")
    _check_known(len(value), num_sources)
    return (*value, *[0] * (num_sources - len(value)))


def _check_known(known: int, num_sources: int) -> None:
    if known > num_sources:
        raise ValueError(
            f"weights: the state is of {known} sources, and the mixture has {num_sources}: give it those "
            "that were added, in the same order"
        )
