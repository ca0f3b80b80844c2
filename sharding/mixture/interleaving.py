"""Mixtures of sources as arithmetic: `position -> (source, index)` and back, with no random-number state.

A mixture is an endless sequence of *draws* (`sharding.mixture.shares`), each of `run_length` consecutive
samples of one source, cut into epochs by the stop rule. Weights hold from a step of the schedule on, counted
in samples of all ranks since the training began, or, where they were set, from a position in an epoch on;
neither moves when the number of ranks does. An epoch is a few *phases*, one for each set of weights in it; in
every phase each source is within one draw of its share at every prefix. The sequence begins anew with each
epoch, but no source does: its samples are numbered through the whole training, source epoch after source
epoch, and what one epoch leaves of a source comes first in the next. So within a source epoch each sample
comes exactly once, and (epoch, position) is the whole state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.mixture.shares import (
    ENDLESS,
    MAX_PERIOD,
    SourceSchedule,
    Weight,
    exact_numbers,
    exact_weights,
    fair_pattern,
    integer_shares,
    quota_pattern,
)
from sharding.mixture.weight_steps import MAX_STEPS, NOTHING_SET, MixtureBase, WeightStep, WeightSteps

Stop = Literal["first", "all", "never"]
Counts = Literal["samples", "tokens"]

_NEVER = -1
_CHUNK = 1 << 15  # indices looked up at a time: their temporaries stay in the L2 cache, a third of the time


@dataclass(frozen=True)
class MixturePhase:
    """Draws of an epoch under one set of shares."""

    start: int
    """First draw of the epoch that belongs to it."""
    pattern: SourceSchedule
    """The sequence of draws; it begins with the phase."""


class Interleaving:
    """The source of the sample of each position of one epoch. Never changes; any thread.

    Args:
        phases: in order, the first from draw 0 on.
        num_samples: positions of the epoch.
        run_length: samples of a draw.
        first: [sources] samples that each source gave before this epoch.
        given: [sources] samples that each gave in it before the first phase, where that begins later: what
            lies before is not known.
    """

    def __init__(
        self,
        phases: Sequence[MixturePhase],
        num_samples: int,
        run_length: int,
        first: NDArray[np.int64],
        *,
        given: NDArray[np.int64] | None = None,
    ) -> None:
        self.phases, self.num_samples, self.run_length = tuple(phases), num_samples, run_length
        self.first = np.array(first, np.int64)
        self.num_sources = len(self.first)
        self._starts = np.array([phase.start for phase in phases], np.int64)
        self.begin = int(self._starts[0]) * run_length
        """The first position that is known."""
        self._before = np.zeros((len(phases) + 1, self.num_sources), np.int64)
        if given is not None:
            self._before[0] = given // run_length
        """[phases + 1, sources] draws of each source before each phase; at the end, all it ever has."""
        for i, (phase, after) in enumerate(pairwise(phases)):
            self._before[i + 1] = self._before[i] + phase.pattern.counts(after.start - phase.start)
        self._before[-1] = np.minimum(self._before[-2] + phases[-1].pattern.totals, ENDLESS)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The source of each position, int32 [n], and the sample's index in it, int64 [n].

        Indices count through all epochs: index // size is the source's own epoch. Positions come in any
        order; few at a time are fastest, whose temporaries stay in the L2 cache. A position before `begin`
        stands for the one as far behind it: a last batch is filled up with those. Raises `IndexError` for a
        position that is not in [0, num_samples).
        """
        positions = np.asarray(positions, np.int64)
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.num_samples:
            raise IndexError(f"positions must be in [0, {self.num_samples})")
        if not len(positions):
            return np.empty(0, np.int32), np.empty(0, np.int64)
        if int(positions.min()) < self.begin:
            behind = self.begin + positions % (self.num_samples - self.begin)
            positions = np.where(positions < self.begin, behind, positions)
        draws = positions // self.run_length if self.run_length > 1 else positions
        first, last = np.searchsorted(self._starts, (draws.min(), draws.max()), side="right") - 1
        if first == last:
            component, index = self._locate_in(int(first), draws)
        else:
            phase = np.searchsorted(self._starts, draws, side="right") - 1
            component, index = np.empty(len(draws), np.int32), np.empty(len(draws), np.int64)
            for number in range(int(first), int(last) + 1):
                here = phase == number
                component[here], index[here] = self._locate_in(number, draws[here])
        if self.run_length > 1:
            index = index * self.run_length + (positions - draws * self.run_length)
        index += self.first[component]
        return component, index

    def _locate_in(self, phase: int, draws: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        component, index = self.phases[phase].pattern.locate(draws - self._starts[phase])
        index += self._before[phase][component]
        return component, index

    def positions(self, component: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The inverse of `locate`, int64 [n]: where a component's samples come; -1: not from `begin` on."""
        index = np.asarray(index, np.int64)
        out = np.empty(len(index), np.int64)
        for start in range(0, len(index), _CHUNK):
            out[start : start + _CHUNK] = self._positions(component, index[start : start + _CHUNK])
        return out

    def _positions(self, component: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        index = index - self.first[component]
        nth = index // self.run_length
        phase = np.searchsorted(self._before[1:, component], nth, side="right")
        out = np.full(len(index), _NEVER, np.int64)
        is_known = nth >= self._before[0, component]
        for number in np.unique(phase[is_known & (phase < len(self.phases))]).tolist():
            here = (phase == number) & is_known
            draws = self.phases[number].pattern.draws(component, nth[here] - self._before[number, component])
            out[here] = (draws + self._starts[number]) * self.run_length
            out[here] += index[here] - nth[here] * self.run_length
        out[out >= self.num_samples] = _NEVER
        return out

    def counts(self, position: int) -> NDArray[np.int64]:
        """Samples of each source in the epoch before a position from `begin` on, int64 [sources]."""
        draw, rest = divmod(position, self.run_length)
        phase = int(np.searchsorted(self._starts, draw, side="right")) - 1
        pattern, within = self.phases[phase].pattern, draw - int(self._starts[phase])
        counts: NDArray[np.int64] = (self._before[phase] + pattern.counts(within)) * self.run_length
        if rest:
            counts[pattern.locate(np.array([within]))[0]] += rest
        return counts


@dataclass(frozen=True)
class MixtureSpec:
    """Sizes, weights and rules: what decides a mixture. A value; see `weighted` and `repeated`."""

    sizes: tuple[int, ...]
    """Samples of each source, >= 1."""
    steps: tuple[tuple[int, tuple[Fraction, ...]], ...]
    """(samples since the training began; weights of sum 1 from there on), from 0 on."""
    _: KW_ONLY
    stop: Stop | None = "first"
    """The end of an epoch. "first": as soon as one source was seen once in it. "all": as soon as every source
    was, smaller ones repeating; sources that a schedule ends before they were do not count. "never".
    None: when each source gave `quota` samples."""
    quota: tuple[int, ...] = ()
    """Samples of each source in an epoch, where `stop` is None; multiples of `run_length`."""
    run_length: int = 1
    """Consecutive samples of one source. The global batch size makes every batch one of a single source."""
    counts: Counts = "samples"
    """The unit that weights are shares of. Epochs by "tokens" follow from lengths:
    `token_schedule.TokenEpochs`."""
    changes: WeightSteps = NOTHING_SET
    """Weights that were set: the schedule ends with the first of them."""
    begun: tuple[int, tuple[int, ...]] | None = None
    """An epoch, and the samples that each source gave before it, where they do not follow from the epochs
    before: a state told them. None: each source began with epoch 0."""

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"every source of a mixture must hold samples, got sizes {list(self.sizes)}")
        if self.stop is not None and self.stop not in get_args(Stop):
            raise ValueError(f"stop must be one of {', '.join(get_args(Stop))}, got {self.stop!r}")
        if self.run_length < 1:
            raise ValueError(f"run_length must be >= 1, got {self.run_length}")
        if self.counts not in get_args(Counts):
            raise ValueError(f"shares must be one of {', '.join(get_args(Counts))}, got {self.counts!r}")
        if self.counts == "tokens" and (self.run_length > 1 or self.stop in (None, "never")):
            raise ValueError(
                'shares="tokens" needs weights or a schedule, stop="first" or "all", and no run_length'
            )

    @classmethod
    def weighted(
        cls,
        sizes: Sequence[int],
        weights: Sequence[Weight] | Mapping[int, Sequence[Weight]],
        *,
        stop: Stop = "first",
        run_length: int = 1,
        counts: Counts = "samples",
    ) -> MixtureSpec:
        """A mixture by weights, or by a schedule: {samples since the training began: weights from there on}.

        Raises `ValueError` for weights that do not fit the sources, or a schedule that does not begin at 0.
        """
        schedule = weights if isinstance(weights, Mapping) else {0: weights}
        if 0 not in schedule or min(schedule) < 0:
            raise ValueError(f"a schedule must begin at step 0, got steps {sorted(schedule)}")
        for of_sources in schedule.values():
            if len(of_sources) != len(sizes):
                raise ValueError(f"there are {len(sizes)} sources, but weights {list(of_sources)}")
        steps = tuple((step, exact_weights(schedule[step])) for step in sorted(schedule))
        return cls(tuple(sizes), steps, stop=stop, run_length=run_length, counts=counts)

    @classmethod
    def repeated(cls, sizes: Sequence[int], repeats: Sequence[Weight], *, run_length: int = 1) -> MixtureSpec:
        """Every source exactly `repeats` times an epoch: 2 is twice, 0.5 half of it, then the other half.

        A source gives repeats * size samples, rounded to whole ones, or up to whole draws. Raises
        `ValueError` for repeats that are negative or do not fit the sources.
        """
        if len(repeats) != len(sizes):
            raise ValueError(f"there are {len(sizes)} sources, but repeats {list(repeats)}")
        samples = [round(n * size) for n, size in zip(exact_numbers(repeats), sizes, strict=True)]
        if not any(samples):
            raise ValueError(
                f"repeats {list(repeats)} of sources with {list(sizes)} samples leave no samples"
            )
        quota = tuple(-(-count // run_length) * run_length for count in samples)
        steps = ((0, exact_weights(quota)),)
        return cls(tuple(sizes), steps, stop=None, quota=quota, run_length=run_length)

    def epoch(self, epoch: int) -> Interleaving:
        """One epoch. O(epochs before the last step of the schedule), and a table for each phase.

        Raises `ValueError` for one that there is not, or that is not known any more.
        """
        if self.counts == "tokens":
            raise ValueError("epochs by tokens follow from lengths")
        if epoch < 0 or (epoch and self.stop == "never"):
            raise ValueError(f"there is no epoch {epoch} of a mixture with stop={self.stop!r}")
        self.check_known(epoch)
        return self._interleaving(epoch, self.first(epoch))

    def check_known(self, epoch: int) -> None:
        """Raise `ValueError` for an epoch that was over when the oldest weights were set that are kept."""
        if epoch < self.changes.known_from[0]:
            raise ValueError(
                f"epoch {epoch} of the mixture is over, and weights were set more than {MAX_STEPS} times: "
                "what it held is not known any more"
            )

    def changed(
        self,
        current: Interleaving,
        epoch: int,
        weights: Sequence[Weight],
        *,
        position: int,
        since: int | None = None,
    ) -> MixtureSpec:
        """The mixture with other weights from a position of an epoch on.

        Args:
            current: the epoch as it is now.
            epoch: its number.
            weights: of the sources.
            position: begins a draw; at the end of the epoch, they hold from the next one on.
            since: from where on the mixture must be known, if before that: what is still to be delivered has
                samples since then.

        Raises `ValueError` for any other position, and for weights that do not fit.
        """
        shares, is_over = self.checked_weights(weights), position == current.num_samples
        if position % self.run_length and not is_over:
            raise ValueError(
                f"weights change between two draws of run_length={self.run_length} samples, and position "
                f"{position} is not: let it be the global batch size"
            )
        step = WeightStep(epoch + 1, 0, shares) if is_over else WeightStep(epoch, position, shares)
        changes = self.changes.with_step(step)
        if (oldest := changes.surplus((epoch, position if since is None else since))) is not None:
            begin = oldest.position if oldest.epoch == epoch else 0
            base = MixtureBase(tuple(current.first.tolist()), tuple(current.counts(begin).tolist()))
            changes = changes.known_since(oldest._replace(epoch=epoch, position=begin), base)
        return replace(self, changes=changes)

    def resumed(self, weights: Mapping[str, object]) -> MixtureSpec:
        """The mixture with the weights of a state. Raises `ValueError` as `WeightSteps.from_json` does."""
        if self.stop is None:
            raise ValueError("the state has weights that were set, and a mixture with repeats= has none")
        return replace(self, changes=WeightSteps.from_json(weights, len(self.sizes), self.run_length))

    def checked_weights(self, weights: Sequence[Weight]) -> tuple[Fraction, ...]:
        """Weights that may be set, of sum 1.

        Raises `ValueError` for some that do not fit, and where the mixture's weights cannot change.
        """
        if self.stop is None:
            raise ValueError("set_weights needs a mixture by weights, a schedule or a temperature")
        if len(weights) != len(self.sizes):
            raise ValueError(f"there are {len(self.sizes)} sources, but weights {list(weights)}")
        return exact_weights(weights)

    @property
    def num_used(self) -> int:
        """Sources up to the last one that ever has a share: those behind it change nothing."""
        return 1 + max(i for _, weights in self.steps for i, weight in enumerate(weights) if weight)

    @property
    def digest(self) -> str:
        """16 hex digits over everything that decides which sample comes when."""
        n = self.num_used
        weights = [(step, [str(w) for w in weights[:n]]) for step, weights in self.steps]
        facts = (self.sizes[:n], weights, self.stop, self.quota[:n], self.run_length, MAX_PERIOD)
        if self.counts != "samples":
            facts = (*facts, self.counts)  # type: ignore[assignment]
        return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()

    @cached_property
    def _runs(self) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """Return by the first of a run of epochs alike: samples of each source before it, and in each."""
        return {epoch: (np.array(first, np.int64), None) for epoch, first in self.starts.items()}

    @property
    def starts(self) -> dict[int, tuple[int, ...]]:
        """{epoch: samples that each source gave before it} of those that need not be counted to."""
        base, begun = self.changes.base, dict([self.begun]) if self.begun else {}
        first = base.first if base else (0,) * len(self.sizes)
        return {**begun, self.changes.known_from[0]: first}

    def counted(self, epoch: int) -> tuple[int, ...] | None:
        """The same as `first`, where epochs tell it at once; None: by tokens, all would be tabulated."""
        return None if self.counts == "tokens" else tuple(self.first(epoch).tolist())

    def first(self, epoch: int) -> NDArray[np.int64]:
        """Samples of each source before an epoch."""
        number = max(known for known in [*self._runs] if known <= epoch)
        while number < epoch:
            first, each = self._runs[number]
            if each is None:
                interleaving = self._interleaving(number, first)
                each = interleaving.counts(interleaving.num_samples)
                self._runs[number] = first, each
            unlike = self._next_unlike(number, int(first.sum()))
            if unlike > epoch:
                return first + (epoch - number) * each
            number, first = unlike, first + (unlike - number) * each
            self._runs.setdefault(number, (first, None))
        return self._runs[epoch][0]

    def _next_unlike(self, epoch: int, sample: int) -> int:
        """The first epoch that may differ from this one, which begins at this sample of all."""
        is_set = self.changes.at_begin(epoch) is not None
        if self.changes.within(epoch) or not (is_set or sample >= self.steps[-1][0]):
            return epoch + 1
        return self.changes.next_epoch(epoch)

    def _interleaving(self, epoch: int, first: NDArray[np.int64]) -> Interleaving:
        """An epoch before which each source gave so much."""
        if self.stop is None:
            draws = tuple(count // self.run_length for count in self.quota)
            phases = [MixturePhase(0, quota_pattern(draws))]
            return Interleaving(phases, sum(self.quota), self.run_length, first)
        steps = self.steps_of(epoch, int(first.sum()))
        phases, counts = [MixturePhase(start, fair_pattern(shares)) for start, shares in steps], None
        if (before := self.changes.given(epoch)) is not None:
            counts = np.array(before, np.int64)
        endless = Interleaving(phases, ENDLESS, self.run_length, np.zeros_like(first), given=counts)
        length = max(self._length(endless), self.lasts_to(epoch))
        return Interleaving(phases, length, self.run_length, first, given=counts)

    def lasts_to(self, epoch: int) -> int:
        """Samples that an epoch has at least: in which weights were set, it had come to there."""
        return max((step.position for step in self.changes.within(epoch)), default=0)

    def steps_of(self, epoch: int, at: int) -> list[tuple[int, tuple[int, ...]]]:
        """(first draw, draws of each source in a period) of an epoch that begins at this sample of all.

        No step is empty. The first begins with the epoch, or where that is known.
        """
        steps, begun = list[tuple[int, tuple[Fraction, ...]]](), self.changes.at_begin(epoch)
        if begun is not None:
            steps.append((0, begun))
        elif self.changes.given(epoch) is None:
            current = max(i for i, (step, _) in enumerate(self.steps) if step <= at)
            steps.append((0, self.steps[current][1]))
            steps += [(-(-(step - at) // self.run_length), w) for step, w in self.steps[current + 1 :]]
        if within := [
            (step.position // self.run_length, step.weights) for step in self.changes.within(epoch)
        ]:
            steps = [step for step in steps if step[0] < within[0][0]] + within
        ends = [*(start for start, _ in steps[1:]), ENDLESS]
        pairs = zip(steps, ends, strict=True)
        return [(start, integer_shares(weights)) for (start, weights), end in pairs if start < end]

    def _length(self, endless: Interleaving) -> int:
        if self.stop == "never":
            return ENDLESS
        lasts = [endless.positions(i, np.array([size - 1])) for i, size in enumerate(self.sizes)]
        ends = [int(last[0]) + 1 for last in lasts if last[0] != _NEVER]
        return min(ends, default=0) if self.stop == "first" else max(ends, default=0)
