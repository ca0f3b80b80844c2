"""Costs of units beside their elements (patches of pictures, say): budgets of rows, and an order for ranks.

Both are functions of a megabatch's plan and of the units before it: any number of ranks deals out the same
sequence, and it resumes everywhere. Whole numbers alone are costs, so all machines agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharding.errors import DataflowError

_FEW = 8
"""Units of a group that are still more alike: a step of few ranks."""


def within_budget(
    row: NDArray[np.int64],
    num_rows: int,
    lengths: NDArray[np.int64],
    costs: NDArray[np.int64],
    length: int,
    most: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:
    """Move segments out of rows that cost too much, the costliest of each, to rows with room for both.

    Those that are moved go by best fit, the largest first: a search through all rows for each.

    Args:
        row: [e], of each segment.
        num_rows: of them all.
        lengths: [e], elements of each.
        costs: [e, k].
        length: elements of a row.
        most: [k], above 0: no row has more, nor a segment alone.

    Returns:
        The row of each segment, [e], and the number of rows.
    """
    share = (costs / most).max(axis=1)
    order = np.lexsort((share, row))  # the cheapest of each row first: most of them stay
    first = np.searchsorted(row[order], np.arange(num_rows))
    so_far = np.cumsum(costs[order], axis=0)
    before = np.concatenate((np.zeros((1, costs.shape[1]), np.int64), so_far))[first]
    moved = np.empty(len(row), bool)
    moved[order] = (so_far - before[row[order]] > most).any(axis=1)
    if not moved.any():
        return row, num_rows
    out, stays = row.copy(), ~moved
    size = num_rows + int(np.count_nonzero(moved))
    room = np.full(size, length)
    room -= np.bincount(row[stays], lengths[stays], size).astype(np.int64)
    left = np.tile(most, (size, 1))
    np.subtract.at(left, row[stays], costs[stays])
    segments = np.flatnonzero(moved)
    weight = np.maximum(share, lengths / length)[segments]
    for segment in segments[np.argsort(-weight, kind="stable")].tolist():
        fits = np.flatnonzero(
            (room[:num_rows] >= lengths[segment]) & (left[:num_rows] >= costs[segment]).all(1)
        )
        at = int(fits[np.argmin(room[fits])]) if len(fits) else num_rows
        num_rows = max(num_rows, at + 1)
        room[at] -= lengths[segment]
        left[at] -= costs[segment]
        out[segment] = at
    used, out = np.unique(out, return_inverse=True)
    return out.astype(np.int64), len(used)


def check_budget(costs: NDArray[np.integer], budget: Sequence[tuple[str, int]]) -> None:
    """Raise `DataflowError` for the first sample, of costs [n, k], that alone is above the budget."""
    for at, (name, most) in enumerate(budget):
        if len(costs) and int(costs[:, at].max()) > most:
            raise DataflowError(
                f"a sample of {int(costs[:, at].max()):,} in column {name!r} is above "
                f"budget={{{name!r}: {most}}} alone: raise it, or leave such samples out"
            )


def unit_sums(costs: NDArray[np.integer], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cost of each unit, int64 [units], from those of its segments, and `Units.first`."""
    sums = np.concatenate(([0], np.cumsum(costs, dtype=np.int64)))
    own: NDArray[np.int64] = np.diff(sums[first])
    return own


def balanced(costs: NDArray[np.int64], first: int, group: int) -> NDArray[np.int64]:
    """An order of units in which those of like cost stand in the same group, int64 [units].

    Units without a cost have groups of their own. Groups begin at multiples of `group` units of the epoch,
    of which `first` are before these, so steps of as many units, or of a divisor, lie in one. In a group,
    each eight are alike once more. The parts of groups at both ends take units about the median, where most
    are alike. Apart from that units keep their order, which is seeded.
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
    parts = (ends[:head], groups.ravel(), np.sort(free[num_whole:]), ends[head:])
    return np.concatenate(parts).astype(np.int64)


def max_over_mean(costs: NDArray[np.int64]) -> float:
    """The greatest cost of a rank over the mean of all, on average over steps, of [steps, ranks].

    Steps without any cost do not count; 0.0 where there are no others.
    """
    costs = costs[costs.any(axis=1)] if costs.size else costs
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean()) if costs.size else 0.0
