"""Pass over items: global batches that are not delivered, while all others stay where they are.

What is passed over are ranges of items, whatever batches they are dealt in. A global batch of nothing else is
no batch of any rank. One that such a range ends in has its other items, listed by lane as ever, and is
smaller: ranks share them as evenly as possible. Each has one at least, so that ranks step together, also
where that brings one twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.plan.batch_plan import BatchPlan
from sharding.plan.history import PassedRange, StepRange
from sharding.spans import Ints


def checked_steps(ranges: object) -> tuple[StepRange, ...]:
    """The ranges of steps [first, end) that a user names, ascending. `ValueError` for what are none."""
    if not isinstance(ranges, Sequence) or isinstance(ranges, str):
        raise ValueError(
            f"skip_steps must be a list of pairs (first step, step after the last), got {ranges!r}"
        )
    pairs = list[StepRange]()
    for pair in ranges:
        if not isinstance(pair, Sequence) or [type(step) for step in pair] != [int, int]:
            raise ValueError(
                f"skip_steps has pairs of integers (first step, step after the last), got {pair!r}"
            )
        if not 0 <= pair[0] < pair[1]:
            raise ValueError(f"skip_steps has pairs (first step >= 0, a later one), got {tuple(pair)}")
        pairs.append((pair[0], pair[1]))
    return tuple(sorted(set(pairs)))


def passing(plan: BatchPlan, ranges: Sequence[PassedRange]) -> BatchPlan:
    """The plan without some items of its epoch; itself, where there are none. The ranges may overlap."""
    spans = list[list[int]]()
    for begin, end in sorted((span.begin, span.end) for span in ranges):
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    values: dict[str, Any] = {member.name: getattr(plan, member.name) for member in fields(BatchPlan)}
    return PassingBatchPlan(inner=plan, spans=np.array(spans, np.int64), **values) if spans else plan


@dataclass(frozen=True, eq=False, kw_only=True)
class PassingBatchPlan(BatchPlan):
    """Batches without some items; batch numbers count those that have any. See `passing`."""

    inner: BatchPlan
    """The plan of all items."""
    spans: Ints
    """[ranges, 2] first item and end of what is passed over, ascending and apart from each other."""
    _rests: dict[int, tuple[Ints, NDArray[np.bool_]]] = field(default_factory=dict, init=False, repr=False)

    # ---- which global batches there are ---------------------------------------------------------------

    @cached_property
    def _runs(self) -> tuple[Ints, Ints, Ints]:
        """First and end of each run of global batches of which nothing is left, and how many come before."""
        (begin, end), size = self.spans.T, self.global_batch_size
        first, stop = -(-np.maximum(begin - self.start, 0) // size), (end - self.start) // size
        if (num := self.inner.num_steps_global) > self.inner.num_full:
            stop = np.where(end >= self.num_items, np.maximum(stop, num), stop)
        used = stop > first
        first, stop = first[used], stop[used]
        return first, stop, np.concatenate(([0], np.cumsum(stop - first)))

    @cached_property
    def _changed(self) -> Ints:
        """The global batches that have fewer items, or others that fill them up, ascending."""
        last = self.inner.num_steps_global - 1
        edges = self.spans[self.spans[:, 0] < self.num_items] - [0, 1]
        batches = (np.minimum(edges, self.num_items - 1) - self.start) // self.global_batch_size
        numbers: Ints = np.unique(batches[(batches >= 0) & (batches <= last)])
        if self.spans[0, 0] < self.inner.num_padded_global and self.wraps:
            numbers = np.unique(np.append(numbers, last))
        return np.asarray(numbers[~self._is_empty(numbers)])

    def _is_empty(self, numbers: Ints) -> NDArray[np.bool_]:
        """Return whether nothing is left of global batches."""
        first, stop, _ = self._runs
        run = np.searchsorted(first, numbers, side="right") - 1
        return (run >= 0) & (numbers < np.append(stop, 0)[run])

    def _numbers(self, batches: Ints) -> Ints:
        """The numbers of batches among all global batches."""
        first, _, before = self._runs
        return np.asarray(batches + before[np.searchsorted(first - before[:-1], batches, side="right")])

    def _count_left(self, num: int) -> int:
        """The number of those of the first `num` global batches that there are."""
        first, stop, _ = self._runs
        return num - int((np.minimum(stop, num) - np.minimum(first, num)).sum())

    @cached_property
    def num_global_batches(self) -> int:
        """See `BatchPlan.num_global_batches`."""
        return self._count_left(self.inner.num_steps_global)

    @cached_property
    def num_batches(self) -> int:
        """See `BatchPlan.num_batches`."""
        last = self.inner.num_steps_global - 1
        if last < self.inner.num_full or self._is_empty(np.array([last]))[0]:
            return self.num_global_batches
        has_it = len(self._rest(last)[0]) if last in self._changed else self.inner.num_batches > last
        return self.num_global_batches - (not has_it)

    @cached_property
    def num_full(self) -> int:
        """See `BatchPlan.num_full`; one that is smaller, but not the last, counts."""
        return self._count_left(self.inner.num_full)

    @property
    def num_steps(self) -> int:
        """See `BatchPlan.num_steps`."""
        return self.inner.num_steps

    @property
    def num_steps_global(self) -> int:
        """See `BatchPlan.num_steps_global`."""
        return self.inner.num_steps_global

    def steps_after(self, num_batches: int) -> int:
        """See `BatchPlan.steps_after`."""
        return int(self._numbers(np.array([num_batches - 1]))[0]) + 1 if num_batches else 0

    # ---- what they consist of -------------------------------------------------------------------------

    def items(self, first_batch: int, last_batch: int) -> tuple[Ints, Ints]:
        """See `BatchPlan.items`."""
        if not 0 <= first_batch <= last_batch <= self.num_batches:
            raise IndexError(f"batches [{first_batch}, {last_batch}) are not within [0, {self.num_batches})")
        parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for first, end, is_changed in self._pieces(first_batch, last_batch):
            rest = self._rest(first)[0] if is_changed else None
            parts.append(self.inner.items(first, end) if rest is None else (rest, np.array([len(rest)])))
        items, sizes = zip(*parts, strict=True)
        return np.concatenate(items), np.concatenate(sizes)

    def repeats(self, first_batch: int, last_batch: int) -> NDArray[np.bool_]:
        """See `BatchPlan.repeats`."""
        pieces = self._pieces(first_batch, last_batch)
        flags = [self._rest(a)[1] if is_changed else self.inner.repeats(a, b) for a, b, is_changed in pieces]
        return np.asarray(np.concatenate([np.zeros(0, bool), *flags]))

    def _pieces(self, first_batch: int, last_batch: int) -> list[tuple[int, int, bool]]:
        """Runs of global batches [first, end) that some batches are; one that is changed comes alone."""
        numbers = self._numbers(np.arange(first_batch, last_batch))
        changed = np.isin(numbers, self._changed)
        cuts = np.flatnonzero((np.diff(numbers) != 1) | changed[1:] | changed[:-1]) + 1
        bounds = pairwise([0, *cuts.tolist(), len(numbers)] if len(numbers) else [])
        return [(int(numbers[a]), int(numbers[b - 1]) + 1, bool(changed[a])) for a, b in bounds]

    def _rest(self, number: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the rank's items of a global batch that is changed, and which of them come once more."""
        if (rest := self._rests.get(number)) is not None:
            return rest
        whole = replace(
            self.inner, rank=0, world_size=1, batch_size=self.global_batch_size, tail="uneven"
        ).items(number, number + 1)[0]
        left = whole[~self.is_passed(whole)]
        size, evenly = len(left), -(-len(left) // self.world_size) * self.world_size
        is_last = number == self.inner.num_full
        if self.tail in ("even", "pad"):
            size = (
                self.global_batch_size
                if is_last and self.tail == "pad" and len(left) == len(whole)
                else evenly
            )
        elif not is_last:
            size = max(size, self.world_size)
        each, extra = divmod(size, self.world_size)
        places = self.rank * each + min(self.rank, extra) + np.arange(each + (self.rank < extra))
        rest = self._rests[number] = left[places % max(1, len(left))], places >= len(left)
        return rest

    def is_passed(self, items: Ints) -> NDArray[np.bool_]:
        """Return which items are passed over, bool [n]."""
        span = np.searchsorted(self.spans[:, 0], items, side="right") - 1
        return np.asarray((span >= 0) & (items < self.spans[span, 1]))

    @property
    def _is_last_changed(self) -> bool:
        last = self.inner.num_steps_global - 1
        return last in self._changed or bool(self._is_empty(np.array([last]))[0])

    @property
    def num_padded(self) -> int:
        """See `BatchPlan.num_padded`; what fills up a batch that is smaller is not counted."""
        return 0 if self._is_last_changed else self.inner.num_padded

    @property
    def num_padded_global(self) -> int:
        """See `num_padded`."""
        return 0 if self._is_last_changed else self.inner.num_padded_global

    @property
    def padding(self) -> Ints:
        """See `BatchPlan.padding`."""
        return self.inner.padding[: self.num_padded]

    # ---- where they lie -------------------------------------------------------------------------------

    def rank_items(self, first: int, end: int) -> Ints | None:
        """See `BatchPlan.rank_items`; what fills up a batch that is smaller is not left out."""
        items = self.inner.rank_items(first, end)
        if items is None:
            items = np.arange(first, end)
        changed = self._changed_items
        inside = changed[(changed >= first) & (changed < end)]
        return np.concatenate((items[~self._is_touched(items)], inside))

    def takes(self, positions: Ints) -> NDArray[np.bool_]:
        """See `MixtureBatchPlan.takes`; what fills up a batch that is smaller is not left out."""
        inner: Any = self.inner
        mask = inner.takes(positions) & ~self._is_touched(positions)
        return np.asarray(mask | np.isin(positions, self._changed_items))

    def _is_touched(self, items: Ints) -> NDArray[np.bool_]:
        """Return whether items lie in global batches that are passed over or changed."""
        numbers = (items - self.start) // self.global_batch_size
        return self._is_empty(numbers) | np.isin(numbers, self._changed)

    @cached_property
    def _changed_items(self) -> Ints:
        """The rank's items of all batches that are changed, each once, int64 [n]."""
        return np.unique(
            np.concatenate([np.empty(0, np.int64), *(self._rest(n)[0] for n in self._changed.tolist())])
        )

    def batches_within(self, first: int, end: int) -> range:
        """See `BatchPlan.batches_within`; none, where something is passed over among them."""
        full = self.inner.batches_within(first, end)
        numbers = np.arange(full.start, full.stop)
        if not len(full) or (self._is_empty(numbers) | np.isin(numbers, self._changed)).any():
            return range(0)
        return range(self._count_left(full.start), self._count_left(full.stop))

    def whole_lanes(self, batch: int) -> tuple[Ints, Ints, int] | None:
        """See `BatchPlan.whole_lanes`; as far as batches follow one another."""
        return self.inner.whole_lanes(int(self._numbers(np.array([batch]))[0]))
