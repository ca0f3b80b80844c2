"""Find where samples come: the inverse of the order of an epoch, by which steps are found and explained.

A seeded permutation is a sort, so its inverse at some values counts smaller keys; a Feistel network runs
backwards. In a mixture, and with classes that are balanced, a sample may come several times, or never.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.order.epoch_order import EpochOrder
from sharding.order.order import Order
from sharding.order.permutations import FULL_ORDER, WINDOW_ORDER, feistel, mix_key, splitmix64
from sharding.order.selection import Selection
from sharding.order.windows import ranges, windows_touched
from sharding.spans import Ints

_CHUNK = 1 << 14  # elements hashed at a time, so that the temporaries stay in the L2 cache


def positions_of(
    order: EpochOrder, samples: Ints, begin: int = 0, end: int | None = None
) -> tuple[Ints, Ints]:
    """The inverse of `order.samples`: each time that some samples come at positions in [begin, end).

    Two int64 [m]: an index in `samples`, and the position, ascending. `end` is None for that of the epoch;
    what lies before `known_from` is left out. `IndexError` for a number that is no sample's.

    Costs a pass over each lane's window touched under "window", O(blocks) at most under the others; of a
    mixture, that of each source epoch that lies in the range.
    """
    if not isinstance(order, Order):
        return _in_mixture(order, samples, begin, end)
    if order.ends is None:
        return _in_order(order, samples, begin, end)
    _check(samples, len(order.ends))
    last = order.ends[samples]
    times = last - np.append(0, order.ends)[samples]
    drawn, positions = _in_order(order, ranges(last - times, times), begin, end)
    which = np.repeat(np.arange(len(samples)), times)[drawn]
    return which, positions[np.lexsort((positions, which))]


def _check(samples: Ints, num_samples: int) -> None:
    if samples.size and not 0 <= int(samples.min()) <= int(samples.max()) < num_samples:
        raise IndexError(f"samples must be in [0, {num_samples}), got {samples.min()} to {samples.max()}")


def _in_mixture(order: Any, samples: Ints, begin: int, end: int | None) -> tuple[Ints, Ints]:
    """The same of a `MixtureWindows`."""
    _check(samples, int(order.sizes.sum()))
    begin, end = (
        max(begin, order.known_from),
        order.num_samples if end is None else min(order.num_samples, end),
    )
    if begin >= end:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first, last = (order.interleaving.first + order.interleaving.counts(edge) for edge in (begin, end))
    component = np.searchsorted(order.first_sample, samples, side="right") - 1
    matches = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for number, part in windows_touched(component):
        part = np.arange(len(samples))[part]
        local_samples, size = samples[part] - order.first_sample[number], int(order.sizes[number])
        for epoch in range(int(first[number]) // size, -(-int(last[number]) // size)):
            which, index = positions_of(order.order_of(number, epoch), local_samples)
            positions = order.interleaving.positions(number, index + epoch * size)
            inside = (positions >= begin) & (positions < end)
            matches.append((part[which[inside]], positions[inside]))
    which, positions = (np.concatenate(parts) for parts in zip(*matches, strict=True))
    by_sample = np.lexsort((positions, which))
    return which[by_sample], positions[by_sample]


def _in_order(order: Order, samples: Ints, begin: int, end: int | None) -> tuple[Ints, Ints]:
    """The same of an order in which each sample comes once."""
    _check(samples, order.num_samples)
    if order.shuffle.kind == "full":
        key = mix_key(order.seed, order.epoch, FULL_ORDER)
        positions = feistel(samples.astype(np.uint64), order.num_samples, key, inverse=True).view(np.int64)
    else:
        positions = _in_windows(order, samples)
    which = np.flatnonzero((positions >= begin) & (positions < (order.num_samples if end is None else end)))
    return which, positions[which]


def _in_windows(order: Order, samples: Ints) -> Ints:
    """The position of each sample, under a shuffle that has windows."""
    table, mixes = order.table, order.shuffle.kind == "window"
    used = np.zeros(len(order.first_sample), bool)
    used[np.searchsorted(order.first_sample, samples, side="right") - 1] = True
    pieces = np.flatnonzero(used[table.piece_block])
    first = order.first_sample[table.piece_block[pieces]] + table.piece_row[pieces]
    by_first = np.argsort(first)
    nth = by_first[np.searchsorted(first, samples, side="right", sorter=by_first) - 1]
    offset = table.piece_start[pieces[nth]] + samples - first[nth]
    cells = np.searchsorted(table.cell_piece, pieces[nth], side="right") - 1
    for cell, part in windows_touched(cells) if mixes else ():
        begin, end = table.cell_start[cell : cell + 2].tolist()
        key = mix_key(order.seed, order.epoch, WINDOW_ORDER, *divmod(cell, order.num_windows))
        offset[part] = begin + places_in_permutation(end - begin, key, offset[part] - begin)
    lane = cells // max(1, order.num_windows)
    return np.asarray((offset - table.lane_bounds[lane]) * order.num_lanes + lane)


def places_in_permutation(n: int, key: int, values: Ints) -> Ints:
    """The inverse of `seeded_permutation(n, key)`: where it has each of some values, int64 [k].

    Nothing is sorted but the values: O(n log k) time, O(k) memory. `values`: in [0, n).
    """
    low = np.uint64((1 << max(n - 1, 0).bit_length()) - 1)

    def sort_keys(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return splitmix64(index ^ np.uint64(key)) & ~low | index

    targets = sort_keys(values.astype(np.uint64))
    by_key = np.argsort(targets)
    ends, smaller = targets[by_key], np.zeros(len(values) + 1, np.int64)
    for start in range(0, n, _CHUNK):
        keys = sort_keys(np.arange(start, min(start + _CHUNK, n), dtype=np.uint64))
        if len(values) == 1:  # as it is for few samples of many
            smaller[0] += np.count_nonzero(keys < ends)
            continue
        smaller += np.bincount(np.searchsorted(ends, keys, side="right"), minlength=len(smaller))
    places = np.empty(len(values), np.int64)
    places[by_key] = np.cumsum(smaller)[:-1]
    return places


def places_in_selection(selection: Selection, blocks: Ints, rows: Ints) -> Ints:
    """The inverse of `Selection.locate`: where samples come among those kept, int64 [n]; -1: they are not."""
    num, total = selection.num_samples, selection.total
    places = np.where(num[blocks] > 0, selection.start[blocks] + rows, -1)
    for block in np.unique(blocks[(num[blocks] > 0) & (num[blocks] < total[blocks])]).tolist():
        index, kept_rows = np.flatnonzero(blocks == block), selection.rows(block)
        nth = np.minimum(np.searchsorted(kept_rows, rows[index]), len(kept_rows) - 1)
        places[index] = np.where(kept_rows[nth] == rows[index], selection.start[block] + nth, -1)
    return places
