"""Draws by tokens: every prefix holds of each source its share of the elements.

Samples differ in length, so the sequence of draws has no period: it follows from the lengths of the samples
in the order in which their sources give them. The rule is worst-case fair queueing (WF2Q, Bennett & Zhang
1996): beside the mixture runs an ideal one that serves all sources at the same time, each by its share of
every element. Of the sources whose next sample the ideal one has begun, the one whose sample it would end
first is taken. With t elements of a source among T, and the longest sample L,

    |t - share * T| <= L        for every source, every prefix and any number of sources:

who may come is not ahead, and at worst the longest sample stands in the way of one that must come. (Taking
the source that lags most exceeds L for many sources, as do the orders by virtual time that a sort would
give.) Whole numbers alone are compared, so all machines agree. An epoch is tabulated when it is asked for: 2
bytes a position, and a sum for each source every 65,536 positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sharding.mixture.interleaving import Interleaving, MixturePhase, MixtureSpec
from sharding.mixture.shares import ENDLESS, tabulated
from sharding.order.windows import windows_touched
from sharding.spans import Ints

SourceLengths = Callable[[int, int], NDArray[np.integer]]
"""(source, epoch of its own) -> lengths of its samples in the order of that epoch."""
DrawSources = Callable[[Ints, Ints, Ints, Ints, Ints, NDArray[np.uint16]], int]
"""Draws sources until `out` is full, or the known lengths of a source with a share have come to their end.

Args, in this order:
    shares: [sources] whole numbers >= 0, one of them positive.
    owed: [sources] what each source is behind, in elements times the sum of shares; changed.
    lengths: [n] of samples of all sources.
    upcoming: [sources] where the length of each source's next sample lies in `lengths`; changed.
    end: [sources] where its known lengths end.
    out: [draws] gets the sources.

Returns the number of draws. O(sources) a draw: compiled code (`prefetch.core`) does it.
"""

_CHUNK = 1 << 16
_KNOWN = 1 << 22
"""Lengths to come of all sources together, at most: 32 MiB."""
_KEPT_TABLES = 32
_KEPT_EPOCHS = 2


class TokenSchedule:
    """Draws that were tabulated, a `sharding.mixture.shares.SourceSchedule`. Thread-safe.

    Args:
        source: uint16 [draws], the source of each draw.
        num_sources: of the mixture.
    """

    def __init__(self, component: NDArray[np.uint16], num_sources: int) -> None:
        self._component = component
        chunks = [component[start : start + _CHUNK] for start in range(0, len(component), _CHUNK)]
        counts = [np.zeros(num_sources, np.int64), *(np.bincount(c, minlength=num_sources) for c in chunks)]
        self._before = np.cumsum(counts, axis=0)
        """[chunks + 1, sources] draws of each source before each chunk."""
        self.totals: Ints = self._before[-1]
        """[sources] the number of all draws of each."""
        each = np.diff(self._before, axis=0)
        self._table = lru_cache(_KEPT_TABLES)(lambda chunk: tabulated(chunks[chunk], each[chunk]))

    def locate(self, draws: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the sources of draws, int32 [n], and how many draws each source had before, int64 [n]."""
        component, chunk = self._component[draws].astype(np.int32), draws // _CHUNK
        index = self._before[chunk, component]
        for number, part in windows_touched(chunk):
            index[part] += self._table(number)[0][draws[part] - number * _CHUNK]
        return component, index

    def draws(self, component: int, index: Ints) -> Ints:
        """Draws of a component, int64 [n], for indices below its total: the inverse of `locate`."""
        chunk = np.searchsorted(self._before[:, component], index, side="right") - 1
        out = np.empty(len(index), np.int64)
        for number, i in windows_touched(chunk):
            _, drawn, first = self._table(number)
            out[i] = drawn[first[component] + index[i] - self._before[number, component]] + number * _CHUNK
        return out

    def counts(self, draw: int) -> Ints:
        """Draws of each source before this one, int64 [sources]."""
        chunk = draw // _CHUNK
        within = self._component[chunk * _CHUNK : draw]
        counts: Ints = self._before[chunk] + np.bincount(within, minlength=len(self.totals))
        return counts


class TokenEpochs:
    """The epochs of a mixture whose shares count tokens. Thread-safe.

    Args:
        spec: with `counts` "tokens".
        lengths: what is delivered of each sample.
        take: draws sources.

    Raises `ValueError` where a source with a share has no tokens.
    """

    def __init__(
        self,
        spec: MixtureSpec,
        lengths: SourceLengths,
        *,
        take: DrawSources,
    ) -> None:
        self.spec, self._lengths, self._take = spec, lengths, take
        self._starts = spec.starts
        self.epoch = lru_cache(_KEPT_EPOCHS)(self._epoch)
        """Gives the `Interleaving` of an epoch."""

    def first(self, epoch: int) -> tuple[int, ...]:
        """Samples that each source gave before an epoch. All epochs since a known start are tabulated."""
        self.spec.check_known(epoch)
        known = max(n for n in tuple(self._starts) if n <= epoch)  # another thread may add to them
        for number in range(known, epoch):
            mixture = self.epoch(number)
            self._starts[number + 1] = tuple((mixture.first + mixture.counts(mixture.num_samples)).tolist())
        return self._starts[epoch]

    def _epoch(self, epoch: int) -> Interleaving:
        if epoch < 0:
            raise ValueError(f"there is no epoch {epoch}")
        first = np.array(self.first(epoch), np.int64)
        steps, lasts_to = self.spec.steps_of(epoch, int(first.sum())), self.spec.lasts_to(epoch)
        counts = np.array(self.spec.changes.given(epoch) or (0,) * len(first), np.int64)
        before, draws, phases = counts, steps[0][0], list[MixturePhase]()
        counting = np.array(steps[-1][1]) > 0
        for (start, shares), following in zip(steps, [*(s for s, _ in steps[1:]), ENDLESS], strict=True):
            is_ruled = start >= lasts_to
            if phases and is_ruled and self._is_over(counts, counting):
                break
            seen = counting if is_ruled else None
            pattern = self._draws(np.array(shares, np.int64), first, counts, seen, following - start)
            phases.append(MixturePhase(start, pattern))
            counts = counts + pattern.totals
            draws += int(pattern.totals.sum())
        return Interleaving(phases, draws, 1, first, given=before)

    def _is_over(self, counts: Ints, counting: NDArray[np.bool_]) -> bool:
        """Return whether an epoch ends once each source gave so much; `counting`: with a share to the end."""
        seen = counts >= np.array(self.spec.sizes)
        return bool(seen.any() if self.spec.stop == "first" else seen[counting].all())

    def _draws(
        self, shares: Ints, first: Ints, counts: Ints, counting: NDArray[np.bool_] | None, most: int
    ) -> TokenSchedule:
        """Return at most so many draws, from where each source gave so much; so many without `counting`."""
        num, counts = len(shares), counts.copy()
        width = min(_CHUNK, -(-_KNOWN // num))
        known = np.zeros((num, width), np.int64)
        """Lengths to come of each source."""
        upcoming = np.arange(num) * width
        end, owed, taken = upcoming.copy(), np.zeros(num, np.int64), 0
        parts = [np.empty(0, np.uint16)]
        while taken < most and (counting is None or not self._is_over(counts, counting)):
            for component in np.flatnonzero((upcoming == end) & (shares > 0)).tolist():
                lengths = self._next_lengths(component, int(first[component]), int(counts[component]))[:width]
                known[component, : len(lengths)] = lengths
                upcoming[component] = component * width
                end[component] = component * width + len(lengths)
            out = np.empty(min(_CHUNK, most - taken), np.uint16)
            out = out[: self._take(shares, owed, known.reshape(-1), upcoming, end, out)]
            parts.append(out)
            counts += np.bincount(out, minlength=num)
            taken += len(out)
        return TokenSchedule(np.concatenate(parts), num)

    def _next_lengths(self, component: int, first: int, count: int) -> NDArray[np.integer]:
        """The lengths to come of a component's own epoch, no more than where it was seen once in this one."""
        size = self.spec.sizes[component]
        epoch, position = divmod(first + count, size)
        lengths = self._lengths(component, epoch)
        if not lengths.any():
            raise ValueError(f"source {component} of the mixture has no tokens, so it has no share of them")
        return lengths[position:] if count >= size else lengths[position : position + size - count]
