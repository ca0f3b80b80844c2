"""Costs of samples beside their lengths (patches of pictures, say): budgets of rows, and an order for ranks.

Both are functions of a packing window's plan and of the units before it: any number of ranks deals out the
same sequence, and it resumes everywhere. Whole numbers alone are costs, so all machines agree. The core finds
these functions by their names, where a batching has `balance=` or `budget=`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sharding.errors import DataflowError
from sharding.lengths.batching import Batching, Packed
from sharding.lengths.cutting import pack
from sharding.lengths.units import PackingWindow, Segments, lengths_in
from sharding.order.windows import ranges

if TYPE_CHECKING:
    from sharding.lengths.unit_plan import UnitPlan

_FEW = 8
"""Units of a group that are still more alike: a step of few ranks."""
_PROBE = np.arange(64, dtype=np.int64) ** 2


def planned(batching: Batching, sizes: NDArray[np.integer], key: int | None, before: int) -> PackingWindow:
    """Units of one packing window, none above the budget, those of like cost together if they are balanced.

    Args:
        batching: the rule, with `balance` or `budget`.
        sizes: [n, 1 + costs], of each sample its length, and its costs in the columns of `cost_columns`; [n]
            where there are none.
        key: decides the order of the units, as in `Batching.cut`.
        before: units of the epoch before these.

    Raises `ValueError` where a function returns no costs.
    """
    costs = np.atleast_2d(sizes.T)[1:].T.astype(np.int64)
    if isinstance(batching, Packed) and batching.budget:
        most = np.array([*batching.budget.values()], np.int64)
        if (costs[:, : len(most)] > most).any():
            raise DataflowError(f"a sample costs more than budget={batching.budget!r} alone: leave it out")
        within = partial(within_budget, costs=costs[:, : len(most)], length=batching.length, most=most)
        units = pack(sizes[:, 0], batching.length, batching.overlong, key, within)
    else:
        units = batching.cut(lengths_in(sizes), key)
    if batching.balance is None:
        return units
    lengths = dict.fromkeys(batching.columns, units.segments.length)
    of_column = zip(batching.cost_columns, costs[units.segments.position].T, strict=True)
    of_segment = _costs(batching, lengths | dict(of_column)).astype(np.int64)
    of_unit = np.add.reduceat(of_segment, units.first[:-1]) if len(units) else of_segment
    num_whole = len(units) - (len(sizes) % batching.sizes_multiple > 0)  # a short one stays the last
    order = balanced(of_unit[:num_whole], before, batching.balance_group)
    order = np.append(order, np.arange(num_whole, len(units)))
    counts = np.diff(units.first)[order]
    segments = units.segments.take(ranges(units.first[:-1][order], counts))
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return PackingWindow(segments, first, units.stats, of_unit[order])


def _costs(batching: Batching, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.integer]:
    """The costs of segments. `ValueError` where a function returns no whole numbers >= 0."""
    if not callable(batching.balance):
        return lengths[batching.balance or ""]
    costs, size = np.asarray(batching.balance(lengths)), len(lengths[batching.columns[0]])
    if costs.shape != (size,) or costs.dtype.kind not in "iu" or (costs < 0).any():
        raise ValueError(
            f"balance= must return {size} integers >= 0, a cost for each segment, and returned "
            f"{costs.dtype} of shape {costs.shape}"
        )
    return costs


def balance_mark(batching: Batching) -> str:
    """Name a column, or a function by its `fingerprint`, else by what it returns, for a state."""
    if isinstance(batching.balance, str):
        return batching.balance
    if mark := str(getattr(batching.balance, "fingerprint", "") or ""):
        return f"function {mark}"
    names = (*batching.columns, *batching.cost_columns)
    costs = _costs(batching, {name: _PROBE + index for index, name in enumerate(names)}).astype("<i8")
    return f"function {hashlib.blake2b(costs.tobytes(), digest_size=8).hexdigest()}"


def within_budget(
    segments: Segments,
    row: NDArray[np.int64],
    num_rows: int,
    *,
    costs: NDArray[np.int64],
    length: int,
    most: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:
    """Move segments out of rows that cost too much, the costliest of each, to rows with room for both.

    Those that are moved go by best fit, the largest first: a search through all rows for each.

    Args:
        segments: of the packing window.
        row: [e], of each segment.
        num_rows: of them all.
        costs: [n, k], of each sample.
        length: elements of a row.
        most: [k], above 0: no row has more, nor a sample alone.

    Returns:
        The row of each segment, [e], and the number of rows.
    """
    costs, lengths = costs[segments.position], segments.length
    share = (costs / most).max(axis=1)
    order = np.lexsort((share, row))  # the cheapest of each row first: most of them stay
    so_far, first = np.cumsum(costs[order], axis=0), np.searchsorted(row[order], row[order])
    moved = order[(so_far - (so_far - costs[order])[first] > most).any(axis=1)]
    if not len(moved):
        return row, num_rows
    stays, size = np.delete(np.arange(len(row)), moved), num_rows + len(moved)
    room, left = np.full(size, length), np.tile(most, (size, 1))
    np.subtract.at(room, row[stays], lengths[stays])
    np.subtract.at(left, row[stays], costs[stays])
    out, weight = row.copy(), np.maximum(share, lengths / length)[moved]
    for segment in moved[np.argsort(-weight, kind="stable")].tolist():
        fits = np.flatnonzero((room >= lengths[segment]) & (left >= costs[segment]).all(axis=1))
        target = fits[np.argmin(room[fits])]  # the empty ones are last
        room[target] -= lengths[segment]
        left[target] -= costs[segment]
        out[segment] = target
    used, out = np.unique(out, return_inverse=True)
    return out.astype(np.int64), len(used)


def balanced(costs: NDArray[np.int64], first: int, group: int) -> NDArray[np.int64]:
    """An order of units in which those of like cost stand in the same group, int64 [units].

    Units without a cost have groups of their own. Groups begin at multiples of `group` units of the epoch,
    of which `first` are before these, so steps of as many units, or of a divisor, lie in one. In a group,
    each eight are alike once more. The parts of groups at both ends take units about the median, where most
    are alike, and have groups of eight. Apart from that units keep their order, which is seeded.
    """
    by_cost = np.argsort(costs, kind="stable")
    num_free = int(np.count_nonzero(costs == 0))
    free, rest = by_cost[:num_free], by_cost[num_free:]
    head = min(-first % group, len(costs))
    num_ends = min(len(rest), head + (len(rest) - head) % group)
    middle = (len(rest) - num_ends) // 2 // group * group
    ends = np.sort(rest[middle : middle + num_ends])
    rest = np.delete(rest, np.s_[middle : middle + num_ends])
    if len(ends) < head:  # nearly nothing costs anything
        ends, free = np.sort(np.append(ends, free[: head - len(ends)])), free[head - len(ends) :]
    num_whole = len(free) // group * group
    few = _FEW if group % _FEW == 0 else group
    blocks = np.sort(np.append(free[:num_whole], rest).reshape(-1, group // few, few), axis=2)
    blocks = np.take_along_axis(blocks, np.argsort(blocks[:, :, :1], axis=1), axis=1)
    groups = blocks[np.argsort(blocks[:, 0, 0])]
    before, behind = ends[:head], np.append(np.sort(free[num_whole:]), ends[head:])
    if few < group:
        before = before[balanced(costs[before], first, few)]
        behind = behind[balanced(costs[behind], 0, few)]
    return np.concatenate((before, groups.ravel(), behind)).astype(np.int64)


def cost_max_over_mean(plan: UnitPlan, num_units: int) -> float:
    """The greatest cost of a rank over the mean of all, on average over the full batches of so many units."""
    costs, ranks = plan.sequence.unit_costs, range(plan.batch_plan.world_size)
    parts = [plan.dealt(num_units, is_all=False, rank=rank) for rank in ranks]
    items = np.stack([dealt.items(0, dealt.num_full)[0] for dealt in parts], axis=1) - plan.sequence.begin
    return max_over_mean(costs[items].reshape(-1, parts[0].batch_size, len(parts)).sum(axis=1))


def max_over_mean(costs: NDArray[np.int64]) -> float:
    """The greatest cost of a rank over the mean of all, on average over steps, of [steps, ranks].

    Steps without any cost do not count; 0.0 where there are no others.
    """
    costs = costs[costs.any(axis=1)] if costs.size else costs
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean()) if costs.size else 0.0
