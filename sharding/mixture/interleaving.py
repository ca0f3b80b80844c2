"""Mixtures of sources as arithmetic: `position -> (source, index)` and back, with no random-number state.

A mixture is an endless sequence of *turns* (`sharding.mixture.shares`), each of `run_length` consecutive
samples of one source, cut into epochs by the stop rule. Weights hold from a named step on, counted in samples
of all ranks since the training began, so they do not move when the number of ranks changes. An epoch is a few
*phases*, one for each set of weights in it; in every phase each source is within one turn of its share at
every prefix. The sequence begins anew with each epoch, but no source does: its samples are numbered through
the whole training, source epoch after source epoch, and what one epoch leaves of a source comes first in the
next. So within a source epoch each sample comes exactly once, and (epoch, position) is the whole state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.mixture.shares import (
    ENDLESS,
    MAX_PERIOD,
    Turns,
    Weight,
    exact_numbers,
    exact_weights,
    fair_pattern,
    integer_shares,
    quota_pattern,
)

T = TypeVar("T")

Stop = Literal["first", "all", "never"]
Counts = Literal["samples", "tokens"]

_NEVER = -1
_CHUNK = 1 << 15  # indices looked up at a time: their temporaries stay in the L2 cache, a third of the time


@dataclass(frozen=True)
class MixturePhase:
    """Turns of an epoch under one set of shares."""

    start: int
    """First turn of the epoch that belongs to it."""
    pattern: Turns
    """The sequence of turns; it begins with the phase."""


class Interleaving:
    """Which source gives the sample of each position of one epoch. Never changes; any thread.

    Args:
        phases: in order, the first from turn 0 on.
        num_samples: positions of the epoch.
        run_length: samples of a turn.
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
        """[phases + 1, sources] turns of each source before each phase; at the end, all it ever has."""
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
        turns = positions // self.run_length if self.run_length > 1 else positions
        first, last = np.searchsorted(self._starts, (turns.min(), turns.max()), side="right") - 1
        if first == last:
            source, index = self._locate_in(int(first), turns)
        else:
            phase = np.searchsorted(self._starts, turns, side="right") - 1
            source, index = np.empty(len(turns), np.int32), np.empty(len(turns), np.int64)
            for number in range(int(first), int(last) + 1):
                here = phase == number
                source[here], index[here] = self._locate_in(number, turns[here])
        if self.run_length > 1:
            index = index * self.run_length + (positions - turns * self.run_length)
        index += self.first[source]
        return source, index

    def _locate_in(self, phase: int, turns: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        source, index = self.phases[phase].pattern.locate(turns - self._starts[phase])
        index += self._before[phase][source]
        return source, index

    def positions(self, source: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The inverse of `locate`, int64 [n]: where a source's samples come; -1: not from `begin` on."""
        index = np.asarray(index, np.int64)
        out = np.empty(len(index), np.int64)
        for at in range(0, len(index), _CHUNK):
            out[at : at + _CHUNK] = self._positions(source, index[at : at + _CHUNK])
        return out

    def _positions(self, source: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        index = index - self.first[source]
        nth = index // self.run_length
        phase = np.searchsorted(self._before[1:, source], nth, side="right")
        out = np.full(len(index), _NEVER, np.int64)
        is_known = nth >= self._before[0, source]
        for number in np.unique(phase[is_known & (phase < len(self.phases))]).tolist():
            here = (phase == number) & is_known
            turns = self.phases[number].pattern.turns(source, nth[here] - self._before[number, source])
            out[here] = (turns + self._starts[number]) * self.run_length
            out[here] += index[here] - nth[here] * self.run_length
        out[out >= self.num_samples] = _NEVER
        return out

    def phase_start(self, position: int) -> int:
        """The first position of the phase that holds a position from `begin` on, or the epoch's end."""
        turn = position // self.run_length
        return int(self._starts[np.searchsorted(self._starts, turn, side="right") - 1]) * self.run_length

    def counts(self, position: int) -> NDArray[np.int64]:
        """Samples of each source in the epoch before a position from `begin` on, int64 [sources]."""
        turn, rest = divmod(position, self.run_length)
        phase = int(np.searchsorted(self._starts, turn, side="right")) - 1
        pattern, within = self.phases[phase].pattern, turn - int(self._starts[phase])
        counts: NDArray[np.int64] = (self._before[phase] + pattern.counts(within)) * self.run_length
        if rest:
            counts[pattern.locate(np.array([within]))[0]] += rest
        return counts


@dataclass(frozen=True, kw_only=True)
class MixtureBase:
    """A place of the training from which on a mixture is known."""

    epoch: int
    position: int
    """In the epoch, at the begin of a turn, or at the end of an epoch that is over."""
    first: tuple[int, ...]
    """Samples that each source gave before the epoch."""
    given: tuple[int, ...]
    """Samples that each source gave in the epoch before the position."""
    end: int | None = None
    """Where the epoch ends, whatever its rule would say of new weights; None: by its rule."""

    @property
    def samples_before(self) -> int:
        """Of all sources, since the training began."""
        return sum(self.first) + self.position


@dataclass(frozen=True)
class MixtureSpec:
    """Sizes, weights and rules: what decides a mixture. A value; see `weighted` and `repeated`."""

    sizes: tuple[int, ...]
    """Samples of each source, >= 1."""
    steps: tuple[tuple[int, tuple[Fraction, ...]], ...]
    """(samples since the training began, or since `base`; weights of sum 1 from there on), from 0 on."""
    _: KW_ONLY
    stop: Stop | None = "first"
    """When an epoch ends. "first": as soon as one source was seen once in it. "all": as soon as every source
    was, smaller ones repeating; sources that a schedule ends before they were do not count. "never".
    None: when each source gave `quota` samples."""
    quota: tuple[int, ...] = ()
    """Samples of each source in an epoch, where `stop` is None; multiples of `run_length`."""
    run_length: int = 1
    """Consecutive samples of one source. The global batch size makes every batch one of a single source."""
    counts: Counts = "samples"
    """What weights are shares of. Epochs by "tokens" follow from lengths: `token_turns.TokenEpochs`."""
    base: MixtureBase | None = None
    """Where the first step begins, instead of at the begin of the training; what lies before is not known."""

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

        A source gives repeats * size samples, rounded to whole ones, or up to whole turns. Raises
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
        """One epoch. O(epochs before the last step of the schedule), and a table for each phase."""
        if self.counts == "tokens":
            raise ValueError("epochs by tokens follow from lengths")
        if epoch < 0 or (epoch and self.stop == "never"):
            raise ValueError(f"there is no epoch {epoch} of a mixture with stop={self.stop!r}")
        begun, at, first = 0, 0, np.zeros(len(self.sizes), np.int64)
        if self.base is not None:
            current = self._interleaving_since(self.base, epoch)
            if epoch == self.base.epoch:
                return current
            begun, at = self.base.epoch + 1, current.num_samples - self.base.position
            first = current.first + self._given_by_end(self.base, current)
        last_step = self.steps[-1][0]
        for number in range(begun, epoch):
            length, counts = self._steady if at >= last_step else self._lengths(at)
            if at >= last_step:
                return self._interleaving(at + (epoch - number) * length, first + (epoch - number) * counts)
            at, first = at + length, first + counts
        return self._interleaving(at, first)

    def known_from(self, current: Interleaving, epoch: int, position: int) -> MixtureSpec:
        """The same mixture, known from the phase of a position on: what came before is left out of it.

        `current`: the epoch as it is now, which knows the position.
        """
        base, begin = self.base, current.phase_start(position)
        if base is not None and base.epoch == epoch and begin <= base.position:
            return self
        since = self._based_at(current, epoch, begin)
        at = since.samples_before - (base.samples_before if base else 0)
        active = max(i for i, (step, _) in enumerate(self.steps) if step <= at)
        later = [(step - at, weights) for step, weights in self.steps[active + 1 :]]
        return replace(self, steps=((0, self.steps[active][1]), *later), base=since)

    def going_on(
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
            position: begins a turn; at the end of the epoch, they hold from the next one on.
            since: from where on the mixture must be known, if before that: what is still to be delivered has
                samples since then.

        Raises `ValueError` for any other position, and for weights that do not fit.
        """
        shares, is_over = self.checked_weights(weights), position == current.num_samples
        if position % self.run_length and not is_over:
            raise ValueError(
                f"weights change between two turns of run_length={self.run_length} samples, and position "
                f"{position} is not: let it be the global batch size"
            )
        end = position if is_over else None
        if since is None or since >= position:
            base = replace(self._based_at(current, epoch, position), end=end)
            return replace(self, steps=((0, shares),), base=base)
        before = self.known_from(current, epoch, since)
        assert before.base is not None
        after = position - before.base.position
        steps = [(step, of) for step, of in before.steps if step < after]
        return replace(self, steps=(*steps, (after, shares)), base=replace(before.base, end=end))

    def _based_at(self, current: Interleaving, epoch: int, position: int) -> MixtureBase:
        """A position of an epoch, as a base."""
        base, given = self.base, np.zeros(len(self.sizes), np.int64)
        if base is not None and (base.epoch, base.position) == (epoch, position):
            return base  # which may lie inside a turn, at the end of the epoch
        if position:
            given = current.counts(position)
        return MixtureBase(
            epoch=epoch,
            position=position,
            first=tuple(current.first.tolist()),
            given=tuple(given.tolist()),
            end=base.end if base is not None and base.epoch == epoch else None,
        )

    @property
    def changes_at(self) -> int | None:
        """Where in the epoch of `base` its last weights begin; None: from `base` on, or in a later epoch."""
        base, step = self.base, self.steps[-1][0]
        if base is None or not step or base.end == base.position + step:
            return None
        return base.position + step

    def base_to_json(self) -> dict[str, object]:
        """What `with_base` takes, as JSON types."""
        assert self.base is not None
        steps = [[step, [str(weight) for weight in weights]] for step, weights in self.steps]
        return {**asdict(self.base), "steps": steps}

    def with_base(self, value: Mapping[str, Any]) -> MixtureSpec:
        """The mixture as it goes on from a place, as a state says. Raises `ValueError` for what is none.

        A state of fewer sources holds: the others are new, and have no share until they get one.
        """
        expected = {field.name for field in fields(MixtureBase)} | {"steps"}
        if set(value) != expected:
            raise ValueError(
                f"weights must have {', '.join(sorted(expected))}, got {', '.join(map(str, value))}"
            )
        known = len(value["first"]) if isinstance(value["first"], Sequence) else 0
        if known > len(self.sizes):
            raise ValueError(
                f"weights: the state is of {known} sources, and the mixture has {len(self.sizes)}: give it "
                "those that were added, in the same order"
            )
        first, given = (self._of_sources(name, value[name], known, 0) for name in ("first", "given"))
        fields_of = {name: value[name] for name in ("epoch", "position", "end")}
        base = MixtureBase(**fields_of, first=first, given=given)
        numbers = (base.epoch, base.position, *base.first, *base.given)
        if any(type(number) is not int or not 0 <= number < ENDLESS for number in numbers):
            raise ValueError(f"weights: epoch and positions must be integers >= 0, got {base}")
        if base.end is not None and (type(base.end) is not int or base.end < base.position):
            raise ValueError(f"weights: end must be None or a position of the epoch, got {base.end!r}")
        begins_turns = base.end == base.position or not any(n % self.run_length for n in base.given)
        if sum(base.given) != base.position or not begins_turns:
            raise ValueError(f"weights: what sources gave does not make up position {base.position}")
        steps, value_steps = list[tuple[int, tuple[Fraction, ...]]](), value["steps"]
        if not isinstance(value_steps, Sequence) or not value_steps:
            raise ValueError(f"weights: steps must be a list, got {value_steps!r}")
        for one in value_steps:
            if not isinstance(one, Sequence) or len(one) != 2 or type(one[0]) is not int:
                raise ValueError(f"weights: a step has samples and shares, got {one!r}")
            if one[0] < 0 or (one[0] == 0) != (not steps) or (steps and one[0] <= steps[-1][0]):
                raise ValueError(f"weights: steps must ascend from 0, got {one[0]}")
            shares = self._of_sources("shares", one[1], known, "0")
            try:
                steps.append((one[0], self.checked_weights([*map(Fraction, shares)])))
            except (ValueError, ZeroDivisionError) as error:
                raise ValueError(f"weights: shares must be fractions >= 0, got {one[1]!r}") from error
        return replace(self, steps=tuple(steps), base=base)

    def _of_sources(self, name: str, value: Any, known: int, fill: T) -> tuple[T, ...]:
        """A list of a state, with an entry for each of the sources it knows, and for the others."""
        kind = type(fill)
        if not isinstance(value, list | tuple) or [*map(type, value)] != [kind] * known:
            raise ValueError(f"weights: {name} must be {known} of {kind.__name__}, got {value!r}")
        return (*value, *[fill] * (len(self.sizes) - known))

    def checked_weights(self, weights: Sequence[Weight]) -> tuple[Fraction, ...]:
        """Weights that may be set, of sum 1.

        Raises `ValueError` for some that do not fit, and where the mixture's weights cannot change.
        """
        if self.stop is None:
            raise ValueError("set_weights needs a mixture by weights, a schedule or a temperature")
        if len(weights) != len(self.sizes):
            raise ValueError(f"there are {len(self.sizes)} sources, but weights {list(weights)}")
        return exact_weights(weights)

    def _interleaving_since(self, base: MixtureBase, epoch: int) -> Interleaving:
        """The epoch of the base, from there on; of any later one, which are asked for, too."""
        if epoch < base.epoch:
            raise ValueError(f"epoch {epoch} of the mixture is over: what it held is not known any more")
        begin = base.position // self.run_length
        phases = [MixturePhase(begin + phase.start, phase.pattern) for phase in self._phases(0)]
        given, zeros = np.array(base.given, np.int64), np.zeros(len(self.sizes), np.int64)
        length = base.end
        if length is None:
            endless = Interleaving(phases, ENDLESS, self.run_length, zeros, given=given)
            length = max(self.changes_at or base.position, self._length(endless))
        return Interleaving(phases, length, self.run_length, np.array(base.first, np.int64), given=given)

    def _given_by_end(self, base: MixtureBase, current: Interleaving) -> NDArray[np.int64]:
        """Samples of each source in the whole epoch of the base, which may end inside a turn."""
        if base.end == base.position:
            return np.array(base.given, np.int64)
        return current.counts(current.num_samples)

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
    def _steady(self) -> tuple[int, NDArray[np.int64]]:
        return self._lengths(self.steps[-1][0])

    def _lengths(self, at: int) -> tuple[int, NDArray[np.int64]]:
        """Samples of the epoch that begins here, and of each source in it."""
        epoch = self._interleaving(at, np.zeros(len(self.sizes), np.int64))
        return epoch.num_samples, epoch.counts(epoch.num_samples)

    def _interleaving(self, at: int, first: NDArray[np.int64]) -> Interleaving:
        if self.stop is None:
            turns = tuple(count // self.run_length for count in self.quota)
            phases = [MixturePhase(0, quota_pattern(turns))]
            return Interleaving(phases, sum(self.quota), self.run_length, first)
        phases = self._phases(at)
        endless = Interleaving(phases, ENDLESS, self.run_length, np.zeros_like(first))
        return Interleaving(phases, self._length(endless), self.run_length, first)

    def steps_from(self, at: int) -> list[tuple[int, tuple[int, ...]]]:
        """(first turn, turns of each source in a period) of an epoch that begins at this sample of all.

        No step is empty.
        """
        current = max(i for i, (step, _) in enumerate(self.steps) if step <= at)
        starts = [0] + [-(-(step - at) // self.run_length) for step, _ in self.steps[current + 1 :]]
        after = [*starts[1:], ENDLESS]
        steps = zip(starts, self.steps[current:], after, strict=True)
        return [(start, integer_shares(weights)) for start, (_, weights), end in steps if start < end]

    def _phases(self, at: int) -> list[MixturePhase]:
        return [MixturePhase(start, fair_pattern(shares)) for start, shares in self.steps_from(at)]

    def _length(self, endless: Interleaving) -> int:
        if self.stop == "never":
            return ENDLESS
        lasts = [endless.positions(i, np.array([size - 1])) for i, size in enumerate(self.sizes)]
        ends = [int(last[0]) + 1 for last in lasts if last[0] != _NEVER]
        return min(ends, default=0) if self.stop == "first" else max(ends, default=0)
