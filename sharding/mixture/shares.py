"""Fair shares: every prefix of the sequence of draws is within one of each source's share.

This is the chairman assignment problem. Tijdeman (1980) solves it with two bounds: of k sources, draw j of
the source with weight w may not come before position `(j + d) / w` and must come by `(j + 1 - d) / w`, where
d = 1 / (2k - 2); among the draws that may come, the one that must come soonest is taken. Then

    |count(p) - w * p| <= 1 - 1 / (2k - 2) < 1      for every source, every prefix p and every k,

which no rule can better. (Taking the source with the largest deficit, the usual rule, exceeds 1 for many
sources.) With integer shares of a sum N the sequence repeats every N positions, so one table of N entries
gives source and index of any position, and back, in O(1). Weights whose common denominator exceeds
`MAX_PERIOD` are rounded to that denominator.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 1 << 16
"""Entries of a table at most: shares are exact, or within about 1 / 65536 of the weights."""

ENDLESS = 1 << 62
"""Draws of a sequence that never ends."""

Weight = int | float | Fraction


def exact_weights(weights: Sequence[Weight]) -> tuple[Fraction, ...]:
    """Weights as fractions of sum 1. Raises as `exact_numbers` does."""
    exact = exact_numbers(weights)
    total = sum(exact)
    return tuple(w / total for w in exact)


def exact_numbers(weights: Sequence[Weight]) -> tuple[Fraction, ...]:
    """Numbers as fractions: 0.7 is 7/10, and 1/3 as a float is one third again.

    Raises `ValueError` unless all are finite and >= 0, and one is positive.
    """
    if not all(isinstance(w, (int, float, Fraction)) and 0 <= w < math.inf for w in weights):
        raise ValueError(f"weights must be finite numbers >= 0, got {list(weights)}")
    if not any(weights):
        raise ValueError(f"at least one weight must be positive, got {list(weights)}")
    return tuple(map(_fraction, weights))


def _fraction(weight: Weight) -> Fraction:
    exact = Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight)
    simple = exact.limit_denominator(MAX_PERIOD)
    return simple if abs(simple - exact) * (1 << 50) <= exact else exact


def temperature_weights(sizes: Sequence[int], temperature: float) -> tuple[Fraction, ...]:
    """Weights in proportion to `size ** (1 / temperature)`: 1 by size, infinity all equal.

    Raises `ValueError` unless temperature > 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if temperature == 1:
        return exact_weights(sizes)
    return exact_weights([float(size) ** (1 / temperature) for size in sizes])


def integer_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Draws of each source in one period.

    Exact where the weights have a common denominator <= `MAX_PERIOD`. Else the period is that, by largest
    remainder: each share is within 1 / `MAX_PERIOD` of its weight, but that no positive weight gets less than
    one draw, which the largest shares pay for. Raises `ValueError` for more sources than `MAX_PERIOD`.
    """
    used = sum(w > 0 for w in weights)
    if used > MAX_PERIOD:
        raise ValueError(f"at most {MAX_PERIOD} sources can be mixed, got {used}")
    common = math.lcm(*(w.denominator for w in weights))
    if common <= MAX_PERIOD:
        return tuple(int(w * common) for w in weights)
    shares = [max(math.floor(w * MAX_PERIOD), int(w > 0)) for w in weights]
    owed = [weight * MAX_PERIOD - share for weight, share in zip(weights, shares, strict=True)]
    left = MAX_PERIOD - sum(shares)
    for i in sorted(range(len(shares)), key=lambda i: (-owed[i], i))[: max(left, 0)]:
        shares[i] += 1
    for _ in range(-left):
        shares[shares.index(max(shares))] -= 1
    return tuple(shares)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pattern:
    """A sequence of draws that repeats. Draws count from 0; thread-safe, O(period) memory."""

    shares: NDArray[np.int64]
    """[sources] draws of each source in one period."""
    source: NDArray[np.int32]
    """[period] the source of each draw."""
    nth: NDArray[np.int64]
    """[period] draws that this source had before, in the same period."""
    by_source: NDArray[np.int64]
    """[period] draws of the period in order of source, then of time."""
    first: NDArray[np.int64]
    """[sources + 1] where a source's draws begin in `by_source`."""

    @property
    def period(self) -> int:
        """Draws until the sequence repeats."""
        return len(self.source)

    @property
    def totals(self) -> NDArray[np.int64]:
        """The number of draws that each source ever has, int64 [sources]."""
        return np.where(self.shares > 0, ENDLESS, 0)

    def locate(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the sources of draws, int32 [n], and how many draws each source had before, int64 [n]."""
        cycle = draws // self.period
        within = draws - cycle * self.period
        component = self.source[within]
        cycle *= self.shares[component]
        cycle += self.nth[within]
        return component, cycle

    def draws(self, component: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draws of a component of a positive share, int64 [n]: the inverse of `locate`."""
        share = int(self.shares[component])
        cycle = index // share
        drawn: NDArray[np.int64] = self.by_source[self.first[component] + index - cycle * share]
        return drawn + cycle * self.period

    def counts(self, draw: int) -> NDArray[np.int64]:
        """Draws of each source before this one, int64 [sources]."""
        cycle, within = divmod(draw, self.period)
        counts: NDArray[np.int64] = np.bincount(self.source[:within], minlength=len(self.shares))
        return counts + self.shares * cycle


@lru_cache(maxsize=128)  # weights may be set 64 times
def fair_pattern(shares: tuple[int, ...]) -> Pattern:
    """The fair sequence of integer shares >= 0, one of them positive. About 1 microsecond a draw."""
    counts = np.array(shares, np.int64)
    component = _chairman_assignment(counts)
    nth, by_source, first = tabulated(component, counts)
    pattern = Pattern(shares=counts, source=component, nth=nth, by_source=by_source, first=first)
    for array in vars(pattern).values():
        array.flags.writeable = False
    return pattern


def tabulated(draws: NDArray[Any], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return `nth`, `by_source` and `first` of draws, as in `Pattern`; `counts`: those of each source."""
    by_source = np.argsort(draws, kind="stable")
    first = np.concatenate(([0], np.cumsum(counts)))
    nth = np.empty(len(draws), np.int64)
    nth[by_source] = np.arange(len(draws)) - first[draws[by_source]]
    return nth, by_source, first


class QuotaPattern:
    """A sequence in which each source has exactly its quota of draws. Thread-safe.

    Up to `limit` draws (a common divisor aside) are one fair sequence. More are cut into cycles: each is one
    period of rounded shares, followed by the few draws (less than one a source, on average) that the rounding
    left, which are themselves in fair order. Every prefix is then within sources + 3 draws of the shares.
    O(limit + sources * quota / limit) memory.
    """

    def __init__(self, quota: Sequence[int], limit: int = MAX_PERIOD) -> None:
        self.totals = np.array(quota, np.int64)
        cycles = max(int(np.gcd.reduce(self.totals)), -(-int(self.totals.sum()) // limit))
        shares = self.totals // cycles
        extra = self.totals - shares * cycles
        self._base = fair_pattern(tuple(shares.tolist()))
        self._extra = fair_pattern(tuple(extra.tolist())) if extra.any() else None
        cycle = np.arange(cycles + 1)
        self._extra_start = cycle * int(extra.sum()) // cycles
        """[cycles + 1] extra draws before each cycle."""
        self._start = cycle * self._base.period + self._extra_start
        before = [np.searchsorted(self._extra_draws(i), self._extra_start) for i in range(len(shares))]
        self._extra_before = np.stack(before, axis=1)
        self._before = cycle[:, None] * shares + self._extra_before
        """[cycles + 1, sources] draws of each source before each cycle."""

    def _extra_draws(self, component: int) -> NDArray[np.int64]:
        if (extra := self._extra) is None:
            return np.zeros(0, np.int64)
        return extra.by_source[extra.first[component] : extra.first[component + 1]]

    def locate(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the sources of draws, int32 [n], and how many draws each source had before, int64 [n]."""
        cycle = np.searchsorted(self._start, draws, side="right") - 1
        within, period = draws - self._start[cycle], self._base.period
        component, index = self._base.locate(np.minimum(within, period - 1))
        index += self._before[cycle, component]
        late = np.flatnonzero(within >= period)
        if len(late) and self._extra:
            cycles = cycle[late]
            component[late], nth = self._extra.locate(self._extra_start[cycles] + within[late] - period)
            index[late] = (cycles + 1) * self._base.shares[component[late]] + nth
        return component, index

    def draws(self, component: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draws of a component, int64 [n]; indices are below its quota."""
        cycle = np.searchsorted(self._before[:, component], index, side="right") - 1
        nth, share = index - self._before[cycle, component], int(self._base.shares[component])
        out = np.empty(len(index), np.int64)
        early, late = nth < share, nth >= share
        out[early] = self._base.draws(component, nth[early]) if share else 0
        if self._extra and late.any():
            cycles = cycle[late]
            extra = self._extra.draws(component, self._extra_before[cycles, component] + nth[late] - share)
            out[late] = extra - self._extra_start[cycles] + self._base.period
        return out + self._start[cycle]

    def counts(self, draw: int) -> NDArray[np.int64]:
        """Draws of each source before this one, int64 [sources]."""
        cycle = int(np.searchsorted(self._start, draw, side="right")) - 1
        within, period = draw - int(self._start[cycle]), self._base.period
        counts: NDArray[np.int64] = self._before[cycle] + self._base.counts(min(within, period))
        if within > period and self._extra:
            start = int(self._extra_start[cycle])
            counts += self._extra.counts(start + within - period) - self._extra.counts(start)
        return counts


class SourceSchedule(Protocol):
    """A sequence of draws, counted from 0: one that repeats for ever, or one that ends."""

    @property
    def totals(self) -> NDArray[np.int64]:
        """The number of draws that each source ever has, int64 [sources]."""

    def locate(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the sources of draws, int32 [n], and how many draws each source had before, int64 [n]."""

    def draws(self, component: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draws of a component, int64 [n]: the inverse of `locate`."""

    def counts(self, draw: int) -> NDArray[np.int64]:
        """Draws of each source before this one, int64 [sources]."""


@lru_cache(maxsize=8)
def quota_pattern(quota: tuple[int, ...]) -> QuotaPattern:
    """The sequence in which each source has exactly its quota of draws, one of them positive."""
    return QuotaPattern(quota)


def _chairman_assignment(shares: NDArray[np.int64]) -> NDArray[np.int32]:
    """Tijdeman's rule on whole numbers: int32 [sum of shares]."""
    period, slack = int(shares.sum()), 2 * int((shares > 0).sum()) - 2
    component = np.repeat(np.arange(len(shares), dtype=np.int32), shares)
    if not slack:
        return component
    nth = np.arange(period) - np.repeat(np.cumsum(shares) - shares, shares)
    share = shares[component] * slack
    may_come = -(-(nth * slack + 1) * period // share) - 1  # draws from 0
    must_come = ((nth + 1) * slack - 1) * period // share
    order = np.argsort(may_come, kind="stable")
    # One integer a candidate compares faster than a pair: what must come soonest, then the component.
    urgency = (must_come * len(shares) + component)[order].tolist()
    coming = np.searchsorted(may_come[order], np.arange(period), side="right").tolist()
    waiting: list[int] = []
    draws, start = [], 0
    for stop in coming:
        for candidate in urgency[start:stop]:
            heapq.heappush(waiting, candidate)
        start = stop
        draws.append(heapq.heappop(waiting))
    return (np.array(draws) % len(shares)).astype(np.int32)
