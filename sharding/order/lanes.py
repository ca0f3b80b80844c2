"""Lanes: an epoch's blocks as several sequences that advance side by side, one for each node to read.

Position p of an epoch is sample `p // L` of lane `p % L`. So every run of L positions takes one sample of
each lane, whatever the batch size, and who reads whole lanes reads whole blocks. That needs lanes of equal
length (those of the first positions are one sample longer if L does not divide the epoch). Blocks are dealt
so that the lanes come out nearly equal, and what a lane has too much at its end is cut off and fills the
others up. At most L - 1 cuts an epoch fall inside a block; every other block belongs to one lane.

*Dealt evenly* (`exchange=1`): in block order, each block goes to the lane that has fewest samples so far. At
any moment the lanes are within one block of each other, so blocks that are neighbours in the block order
are read at the same time, by different lanes.

*Dealt with exchange*: blocks of nearly equal size form groups of L, for the whole run, and each group deals
its blocks to the L lanes by a permutation that is drawn anew only now and then: of every epoch's groups, a
share `exchange` is. Since sizes within a group hardly differ, the lanes' lengths differ by less than two
blocks. Permutations nest: most of the time blocks move among lanes with neighbouring numbers only, half as
often among twice as many; lanes lie rack by rack (`sharding.plan.placement`), so near nodes exchange first.

All functions are pure; they cost O(blocks) time and memory.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.order.permutations import EXCHANGE, mix_key, seeded_permutation, splitmix64

_CHUNK = 1 << 16
_ONE = 1 << 32
"""Shares of epochs count in units of 2**-32, exactly."""


class Lanes(Struct, frozen=True, eq=False):
    """The pieces of each lane, lane after lane. A piece is a whole block, or a part of one that was cut."""

    position: NDArray[np.int64]
    """[pieces]: position of its block in the block order; ascends within a lane but for what filled it up."""
    row: NDArray[np.int64]
    """[pieces]: first sample of the block that belongs to the piece."""
    start: NDArray[np.int64]
    """[pieces + 1]: samples in the pieces before, over all lanes."""
    bounds: NDArray[np.int64]
    """[lanes + 1]: samples in the lanes before."""


def lane_bounds(num_samples: int, num_lanes: int) -> NDArray[np.int64]:
    """Samples in the lanes before each lane, and in all of them, int64 [num_lanes + 1]."""
    lanes = np.arange(num_lanes + 1)
    return lanes * (num_samples // num_lanes) + np.minimum(lanes, num_samples % num_lanes)


def deal_evenly(sizes: NDArray[np.int64], num_lanes: int) -> NDArray[np.uint16]:
    """Deal blocks in their order, each to the first lane with fewest samples, uint16 [blocks].

    Greedy list scheduling (Graham 1966): after any number of blocks, no two lanes differ by more than the
    largest block so far. 0.2 microseconds a block; blocks of one size are dealt round at no cost.
    """
    if num_lanes == 1 or not len(sizes) or int(sizes.min()) == int(sizes.max()):
        return (np.arange(len(sizes)) % num_lanes).astype(np.uint16)
    lane = np.empty(len(sizes), np.uint16)
    heap = list(range(num_lanes))  # load * num_lanes + lane: integers compare fastest, and ties go by lane
    for first in range(0, len(sizes), _CHUNK):
        lanes = []
        for load in (sizes[first : first + _CHUNK] * num_lanes).tolist():
            least = heap[0]
            lanes.append(least % num_lanes)
            heapreplace(heap, least + load)
        lane[first : first + _CHUNK] = lanes
    return lane


def deal_with_exchange(
    sizes: NDArray[np.int64], num_lanes: int, share: float, *, seed: int, epoch: int
) -> NDArray[np.uint16]:
    """Deal blocks so that from one epoch to the next at most `share` of them change lane; uint16 [blocks].

    Args:
        sizes: samples of each block, [blocks], in an order that does not depend on the epoch.
        num_lanes: lanes, at most 4096.
        share: in [0, 1]; rounded to 2**-32.
        seed: of the run.
        epoch: >= 0; any epoch costs the same.
    """
    if num_lanes == 1 or not len(sizes):
        return np.zeros(len(sizes), np.uint16)
    key = mix_key(seed, EXCHANGE)
    hashed = seeded_permutation(len(sizes), mix_key(key, 0))
    by_size = hashed[np.argsort(-sizes[hashed], kind="stable")]
    num_groups = -(-len(sizes) // num_lanes)
    drawn = _times_drawn(num_groups, share, mix_key(key, 1), epoch)
    permuted = _nested_permutations(drawn, num_lanes, mix_key(key, 2))
    lane_at = np.empty(permuted.shape, np.uint16)
    np.put_along_axis(lane_at, permuted, np.arange(num_lanes, dtype=np.uint16)[None, :], axis=1)
    lane = np.empty(len(sizes), np.uint16)
    lane[by_size] = lane_at.reshape(-1)[: len(sizes)]
    return lane


def _times_drawn(num_groups: int, share: float, key: int, epoch: int) -> NDArray[np.uint64]:
    """Count the permutations each group has drawn by an epoch: its phases are spread evenly."""
    whole, part = divmod(epoch * round(share * _ONE), _ONE)
    phase = seeded_permutation(num_groups, key) * _ONE // num_groups
    return ((phase + part) // _ONE).astype(np.uint64) + np.uint64(whole & (1 << 64) - 1)


def _nested_permutations(drawn: NDArray[np.uint64], num_lanes: int, key: int) -> NDArray[np.int64]:
    """A permutation of the lanes for each group, int64 [groups, lanes].

    Level by level the lanes are halved, and each part permuted within itself: pairs at every draw, fours at
    every second one, and so on.
    """
    # From the whole to the pairs: level l hashes `drawn >> (levels - 1 - l)`, which changes half as often as
    # what the next level hashes. So a draw that only the last level sees swaps neighbours and moves no block
    # to a far node. A permutation of all lanes at every draw would be as fair, and move every block anywhere.
    column = np.arange(num_lanes, dtype=np.uint64)
    groups = np.arange(len(drawn), dtype=np.uint64)
    permuted = np.broadcast_to(column.astype(np.int64), (len(drawn), num_lanes))
    levels = (num_lanes - 1).bit_length()
    for level in range(levels):
        part = (column << np.uint64(level)) // np.uint64(num_lanes)
        times = drawn >> np.uint64(levels - 1 - level)
        hashed = splitmix64(splitmix64(groups ^ np.uint64(mix_key(key, level))) ^ times)
        hashed = splitmix64(hashed[:, None] ^ column)
        # Sort by part, then by hash; the last 12 bits tell the column.
        hashed = (part << np.uint64(52)) | (hashed >> np.uint64(24) << np.uint64(12)) | column
        hashed.sort(axis=1)
        permuted = np.take_along_axis(permuted, (hashed & np.uint64(0xFFF)).astype(np.int64), axis=1)
    return permuted


def cut_lanes(sizes: NDArray[np.int64], lane: NDArray[np.uint16], num_lanes: int, rotation: int = 0) -> Lanes:
    """Put each lane's blocks in their order and make the lanes equal.

    Args:
        sizes: samples of each block in block order, [blocks], each > 0.
        lane: [blocks], in [0, num_lanes).
        num_lanes: lanes.
        rotation: added to every lane's number, modulo `num_lanes`.
    """
    bounds = lane_bounds(int(sizes.sum()), num_lanes)
    position = np.argsort(lane, kind="stable")
    lane, size = lane[position], sizes[position]
    row = np.zeros(len(position), np.int64)
    quota = np.roll(np.diff(bounds), -rotation)
    load = np.diff(np.concatenate(([0], np.cumsum(size)))[np.searchsorted(lane, np.arange(num_lanes + 1))])
    uneven = bool(np.any(load != quota))
    if uneven:
        position, lane, row, size = _level(position, lane, size, load, quota)
    if uneven or rotation:
        by_lane = np.argsort((lane + rotation) % num_lanes, kind="stable")
        position, row, size = position[by_lane], row[by_lane], size[by_lane]
    return Lanes(position, row, np.concatenate(([0], np.cumsum(size))), bounds)


def _level(
    position: NDArray[np.int64],
    lane: NDArray[np.uint16],
    size: NDArray[np.int64],
    load: NDArray[np.int64],
    quota: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.int64], NDArray[np.int64]]:
    """Cut every lane at its quota and fill short lanes with what was cut off: position, lane, row, size."""
    begin = np.cumsum(size) - size - (np.cumsum(load) - load)[lane]
    inside = np.clip(quota[lane] - begin, 0, size)
    over, whole = np.flatnonzero(inside < size), np.flatnonzero(inside)
    # What is cut off lies side by side on one axis, and so does the room in the short lanes; both are equally
    # long. Cut at the ends of either, the axis falls into pieces of one block that go to one lane.
    end = np.cumsum(size[over] - inside[over])
    room = np.cumsum(np.maximum(quota - load, 0))
    # Not by `union1d`, which imports numpy.ma: 8 ms, a third of what a first batch waits for the plan.
    stop = np.sort(np.concatenate((end, room[room > 0])))
    stop = stop[np.diff(stop, prepend=-1) > 0]
    begin = np.concatenate(([0], stop[:-1]))
    source = np.searchsorted(end, begin, side="right")
    cut = over[source]
    return (
        np.concatenate((position[whole], position[cut])),
        np.concatenate((lane[whole], np.searchsorted(room, begin, side="right"))).astype(np.uint16),
        np.concatenate((np.zeros(len(whole), np.int64), size[cut] - (end[source] - begin))),
        np.concatenate((inside[whole], stop - begin)),
    )
