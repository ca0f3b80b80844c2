"""Decide which node reads what: the shard indices of ranks, and reads by more than one node.

`EpochPlan` gives runs of lanes to runs of ranks. So ranks are listed rack by rack, node by node and NUMA
node by NUMA node, and lanes with neighbouring numbers are read near each other. Blocks that change lane
(`Shuffle(exchange=...)`) mostly go to a neighbouring lane: to the same node first, then to the same rack.

With n nodes, L lanes and B blocks, each of the n - 1 boundaries between nodes falls between two lanes, which
costs nothing, or inside a lane, whose blocks two nodes then read. And at most L - 1 blocks are cut between
lanes. So there are at most `(n - 1) * (B / L + 1) + L - 1` reads more than blocks: 1 + (n - 1) / L reads a
block. If n divides L and the lanes divide blocks of one size, there is exactly one. All this if L divides
the global batch G; if not, boundaries wander between two lanes and cost twice that (more if G < L * L).
`reads_by_node` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from sharding.order.order import Order
from sharding.topology.topology import Topology


def shard_indices(locations: Sequence[tuple[object, ...]]) -> list[int]:
    """Return the shard index of each rank, for `EpochPlan(rank=...)`: by location, then by rank.

    Args:
        locations: one a rank, from far to near, such as (rack, node) or (rack, node, numa). Racks, and nodes
            in them, are listed as they first appear. Nodes may have different numbers of ranks.

    Raises `ValueError` if locations have different lengths.
    """
    if len({len(location) for location in locations}) > 1:
        raise ValueError("all ranks need the same facts, such as (rack, node); leave out what some lack")
    places = [[location[:depth] for depth in range(1, len(location) + 1)] for location in locations]
    first: dict[tuple[object, ...], int] = {}
    for rank, place in enumerate(places):
        for part in place:
            first.setdefault(part, rank)
    ranks = sorted(range(len(locations)), key=lambda rank: [first[part] for part in places[rank]])
    indices: list[int] = np.argsort(ranks).tolist()
    return indices


def shard_index_of(topology: Topology) -> int:
    """Return the shard index of a process: by rack, node and NUMA node where known, else its data rank.

    Ranks of a replica group share a shard index. All ranks must know the same facts, or all must lack them.
    """
    nodes, of_rank = topology.nodes_of_data_ranks, topology.data_ranks
    if nodes is None or of_rank is None:
        return topology.data_rank
    racks = topology.racks or ("",) * topology.num_nodes
    numa = topology.numa_nodes_of_ranks
    if numa is None or None in numa:  # ranks that are bound to no NUMA node are equally near to all
        numa = (0,) * topology.world_size
    first = [of_rank.index(data_rank) for data_rank in range(topology.data_world_size)]
    locations = [(racks[group[0]], group[0], numa[rank]) for group, rank in zip(nodes, first, strict=True)]
    return shard_indices(locations)[topology.data_rank]


def reads_by_node(
    order: Order, nodes: Sequence[int], batch_size: int, *, cost: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return what each node reads in an epoch: blocks it takes samples of, each once; int64 [nodes].

    Their sum over that of `cost` is the read amplification: 1.0 if every block is read by one node. Never too
    low, and exact but for two things: an incomplete last batch counts as if it were complete, and under
    "window" a node that takes some samples of a lane's window counts as a reader of all its blocks. O(blocks)
    for every node that shares a lane with another.

    Args:
        order: the epoch's; any kind but "full", which reads samples.
        nodes: the node of each shard index, [world_size], numbered from 0.
        batch_size: samples of one rank in a batch.
        cost: [blocks] integers, such as bytes.
    """
    owners = _owners(order, nodes, batch_size)
    read = [[np.empty(0, np.int64)] for _ in range(max(nodes) + 1)]
    for lane, owner in enumerate(owners.T):
        blocks, begin, end = _pieces_of(order, lane)
        for node in np.unique(owner).tolist():
            before = _counter(owner == node)
            read[node].append(blocks[before(end) > before(begin)])
    return np.array([int(cost[np.unique(np.concatenate(blocks))].sum()) for blocks in read], np.int64)


def read_amplification(order: Order, batch_size: int, num_ranks: int, *, cost: NDArray[np.integer]) -> float:
    """Return how often blocks are read in an epoch where each rank reads for itself; 1.0: each once.

    As `reads_by_node` with each rank a node, in O(blocks) for any number of ranks: those of a lane take turns
    in it, so a block is read by as many as have their turns in it, at most by all. Blocks that are cut
    between lanes count in both.
    """
    read = 0
    for lane, owner in enumerate(_owners(order, range(num_ranks), batch_size).T):
        blocks, begin, end = _pieces_of(order, lane)
        changes = _counter(owner != np.roll(owner, 1))
        readers = np.minimum(1 + changes(end) - changes(begin + 1), len(np.unique(owner)))
        read += int((readers * cost[blocks]).sum())
    whole = int(cost[np.unique(order.table.piece_block)].sum())
    return read / whole if whole else 1.0


def _owners(order: Order, nodes: Sequence[int], batch_size: int) -> NDArray[np.int64]:
    """The node that takes each depth of each lane, until the pattern repeats, int64 [depths, lanes]."""
    if order.shuffle.kind == "full":
        raise ValueError("a full shuffle reads samples, not blocks: nothing is shared by design")
    group, lanes = batch_size * len(nodes), order.num_lanes
    owner = np.empty(lcm(group, lanes), np.int64)
    of_position = np.repeat(np.asarray(nodes, np.int64), batch_size)
    for begin in range(0, len(owner), group):
        lane = ((begin + np.arange(group)) % lanes).astype(np.uint16)
        owner[begin + np.argsort(lane, kind="stable")] = of_position
    return owner.reshape(-1, lanes)


def _pieces_of(order: Order, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Blocks of a lane, and between which depths their samples are.

    Under "window" a block's samples may be anywhere in its window.
    """
    table = order.table
    pieces = np.arange(*table.cell_piece[table.num_windows * np.array([lane, lane + 1])])
    starts, index = table.piece_start, pieces
    if order.shuffle.kind == "window":
        starts, index = table.cell_start, np.searchsorted(table.cell_piece, pieces, side="right") - 1
    origin = table.lane_bounds[lane]
    return table.piece_block[pieces], starts[index] - origin, starts[index + 1] - origin


def _counter(mine: NDArray[np.bool_]) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function that counts how many of the first n of a repeating pattern are mine."""
    before = np.concatenate(([0], np.cumsum(mine)))
    return lambda n: n // len(mine) * before[-1] + before[n % len(mine)]
