"""The history of a run: which epochs its steps were in, from where on, in which global batches.

A *step* is a global batch: what all ranks take together. A *stretch* is some steps of one epoch that follow
one another, or as many steps of each of several epochs that do; so a training that runs whole epochs on the
same number of ranks has one. Restarts leave no trace, unless the global batch or the ranks are others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self, cast, get_args

from sharding.plan.batch_plan import Tail

MOST_STRETCHES = 64
MOST_BYTES = 4096
MOST_RANGES = 64
"""Ranges that are passed over, of a state: 3 KB."""
StepRange = tuple[int, int]
"""The first step, and the one after the last."""


class StepRun(NamedTuple):
    """Steps that follow one another, in `num_epochs` epochs from `epoch` on."""

    first_step: int
    epoch: int
    position: int
    """The position at which each of its epochs begins."""
    global_batch: int
    """Items of all ranks in a full batch."""
    world_size: int
    tail: Tail
    num_epochs: int
    num_steps: int
    """The steps of each epoch."""

    @property
    def end(self) -> int:
        """Return the step after its last."""
        return self.first_step + self.num_epochs * self.num_steps

    def at(self, step: int) -> StepPlace:
        """The place of one of its steps."""
        epochs, number = divmod(step - self.first_step, self.num_steps)
        position = self.position + number * self.global_batch
        return StepPlace(step, self.epoch + epochs, position, self.global_batch, self.world_size, self.tail)

    def joined(self, later: StepRun) -> list[StepRun]:
        """Itself and the stretch that follows it, as one where they are."""
        if self[3:6] != later[3:6]:
            return [self, later]
        last = self.epoch + self.num_epochs - 1
        end = self.position + self.num_steps * self.global_batch
        if later.num_epochs == 1 and (later.epoch, later.position) == (last, end):  # gone on with
            whole = self._replace(num_epochs=self.num_epochs - 1)
            grown = StepRun(whole.end, last, self.position, *self[3:6], 1, self.num_steps + later.num_steps)
            return [*([whole] if whole.num_epochs else []), grown]
        if (later.epoch, later.position, later.num_steps) == (last + 1, self.position, self.num_steps):
            return [self._replace(num_epochs=self.num_epochs + later.num_epochs)]
        return [self, later]


class StepPlace(NamedTuple):
    """The place at which a step begins, and the rule by which ranks share it out."""

    step: int
    epoch: int
    position: int
    global_batch: int
    world_size: int
    tail: Tail


@dataclass(frozen=True)
class StepHistory:
    """The steps of a run so far, at most `MOST_STRETCHES` of it: the oldest go. A value."""

    num_steps: int = 0
    """Steps since the training began."""
    stretches: tuple[StepRun, ...] = ()
    """One after the other; the last ends with `num_steps`."""

    @property
    def known_from(self) -> int:
        """The first step that is known."""
        return self.stretches[0].first_step if self.stretches else self.num_steps

    def find(self, step: int) -> StepPlace:
        """The place of a step. `IndexError` where it is not known, or was not taken."""
        for stretch in reversed(self.stretches):
            if stretch.first_step <= step < stretch.end:
                return stretch.at(step)
        known = f"steps {self.known_from:,} to {self.num_steps - 1:,} are" if self.stretches else "none is"
        raise IndexError(f"step {step:,} is not known: of {self.num_steps:,} steps, {known}")

    def after(
        self, num_steps: int, epoch: int, position: int, global_batch: int, world_size: int, tail: Tail
    ) -> Self:
        """The history with more steps, from a position of an epoch on."""
        if not num_steps:
            return self
        later = StepRun(self.num_steps, epoch, position, global_batch, world_size, tail, 1, num_steps)
        *before, last = self.stretches or (None,)
        stretches = before
        for stretch in [later] if last is None else last.joined(later):
            stretches = [*stretches[:-1], *(stretches[-1].joined(stretch) if stretches else [stretch])]
        return type(self)(later.end, tuple(stretches[-MOST_STRETCHES:]))

    def forgotten(self) -> Self:
        """The history of which the number of steps alone is known: data or order are others from here on."""
        return type(self)(self.num_steps)

    def to_json(self) -> str:
        """JSON text of `MOST_BYTES` at most."""
        rows = [list(stretch[:-1]) for stretch in self.stretches]
        while len(text := json.dumps([*rows, self.num_steps], separators=(",", ":"))) > MOST_BYTES:
            del rows[0]
        return text

    @classmethod
    def from_json(cls, text: object) -> Self | None:
        """The inverse of `to_json`; None of None, as in states of before. `ValueError` for other text."""
        if text is None:
            return None
        try:
            *rows, num_steps = json.loads(cast(str, text))
            ends = [*(row[0] for row in rows), num_steps]
            if any(type(end) is not int or end < 0 for end in ends):
                raise ValueError("a step is no integer >= 0")
            if len(rows) > MOST_STRETCHES:
                raise ValueError(f"{len(rows)} stretches")
            stretches = [
                _checked(row, end - first) for row, (first, end) in zip(rows, pairwise(ends), strict=True)
            ]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"history must be the text that a state has, or missing: {error}") from error
        return cls(num_steps, tuple(stretches))


def _checked(row: list[object], num_steps: int) -> StepRun:
    """The stretch of a row of a state's text, which has so many steps in all."""
    *numbers, tail, num_epochs = row
    counts = [count for count in (*numbers, num_epochs) if type(count) is int and 0 <= count < 1 << 62]
    if len(row) != 7 or len(counts) != 6 or tail not in get_args(Tail) or 0 in counts[3:]:
        raise ValueError(f"a stretch is {row}")
    first, epoch, position, group, world_size, epochs = counts
    if group % world_size or num_steps <= 0 or num_steps % epochs:
        raise ValueError(f"a stretch of {num_steps} steps is {row}")
    return StepRun(first, epoch, position, group, world_size, cast(Tail, tail), epochs, num_steps // epochs)


class PassedRange(NamedTuple):
    """Items of an epoch that are passed over, and the steps that were named for it."""

    epoch: int
    begin: int
    end: int
    first_step: int
    end_step: int


def ranges_from_json(rows: object) -> tuple[PassedRange, ...]:
    """The ranges of a state; None: of a state of before. `ValueError` for what are none."""
    rows = [] if rows is None else rows
    if not isinstance(rows, Sequence) or len(rows) > MOST_RANGES:
        raise ValueError(f"passed must be at most {MOST_RANGES} ranges or missing, got {rows!r}")
    for row in rows:
        counts = isinstance(row, Sequence) and [v for v in row if type(v) is int and 0 <= v < 1 << 62]
        if not counts or len(row) != len(counts) or len(row) != 5 or row[1] >= row[2] or row[3] >= row[4]:
            raise ValueError(f"a range that is passed over is five integers, got {row!r}")
    return tuple(PassedRange(*row) for row in rows)
