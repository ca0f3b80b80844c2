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
from numpy.typing import ArrayLike, NDArray

from sharding.order.order import Order
from sharding.topology.topology import Topology


def shard_indices(locations: Sequence[tuple[object, ...]]) -> list[int]:
    """Return the shard index of each rank, for `EpochPlan(rank=...)`: by location, then by rank.

    Args:
        locations: one a rank, from far to near, such as (rack, node) or (rack, node, numa). Racks, and nodes
        in
            them, are listed as they first appear. Nodes may have different numbers of ranks.

    Raises `ValueError` if locations have different lengths.
    """
    if len({len(location) for location in locations}) > 1:
        raise ValueError("all ranks need the same facts, such as (rack, node); leave out what some lack")
    first: dict[tuple[object, ...], int] = {}
    for rank, location in enumerate(locations):
        for depth in range(1, len(location) + 1):
            first.setdefault(location[:depth], rank)

    def key(rank: int) -> tuple[int, ...]:
        location = locations[rank]
        return (*(first[location[:depth]] for depth in range(1, len(location) + 1)), rank)

    out = [0] * len(locations)
    for shard_index, rank in enumerate(sorted(range(len(locations)), key=key)):
        out[rank] = shard_index
    return out


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
    order: Order, nodes: Sequence[int], batch_size: int, *, start: int = 0, cost: ArrayLike | None = None
) -> NDArray[np.int64]:
    """Return what each node reads in an epoch: blocks it takes samples of, each once; int64 [nodes].

    Their sum over the number of blocks (or over the sum of `cost`) is the read amplification: 1.0 if every
    block is read by one node. Never too low, and exact but for two things: an incomplete last batch counts
    as if it were complete, and under "window" a node that takes some samples of a lane's window counts as a
    reader of all its blocks. O(blocks) for every node that shares a lane with another.

    Args:
        order: the epoch's; any kind but "full", which reads samples.
        nodes: the node of each shard index, [world_size], numbered from 0.
        batch_size: samples of one rank in a batch.
        start: position from which the epoch is read.
        cost: [blocks] integers, such as bytes; 1 for each block when None.
    """
    if order.shuffle.kind == "full":
        raise ValueError("a full shuffle reads samples, not blocks: nothing is shared by design")
    owner = _owner_of_position(start, nodes, batch_size, order.num_lanes)
    read: list[list[NDArray[np.int64]]] = [[] for _ in range(max(nodes) + 1)]
    for lane in range(order.num_lanes):
        blocks, begin, end, first = _pieces_from(order, lane, start)
        of_depth = owner[(np.arange(len(owner) // order.num_lanes) + first) * order.num_lanes + lane - start]
        for node in np.unique(of_depth).tolist():
            before = _counter(of_depth == node)
            read[node].append(blocks[before(end) > before(begin)])
    each = [np.unique(np.concatenate(blocks)) if blocks else np.empty(0, np.int64) for blocks in read]
    if cost is None:
        return np.array([len(blocks) for blocks in each], np.int64)
    return np.array([int(np.asarray(cost)[blocks].sum()) for blocks in each], np.int64)


def read_amplification(
    order: Order, batch_size: int, num_ranks: int, *, cost: ArrayLike | None = None
) -> float:
    """Return how often blocks are read in an epoch where each rank reads for itself; 1.0: each once.

    As `reads_by_node` with each rank a node, in O(blocks) for any number of ranks: those of a lane take turns
    in it, so a block is read by as many as have their turns in it, at most by all. Blocks that are cut
    between lanes count in both.

    Args:
        order: the epoch's; any kind but "full".
        batch_size: samples of one rank in a batch.
        num_ranks: ranks.
        cost: [blocks] integers, such as bytes; 1 for each block when None.
    """
    if order.shuffle.kind == "full":
        raise ValueError("a full shuffle reads samples, not blocks: nothing is shared by design")
    lanes, read = order.num_lanes, 0.0
    owner = _owner_of_position(0, range(num_ranks), batch_size, lanes).reshape(-1, lanes)
    for lane in range(lanes):
        blocks, begin, end, _ = _pieces_from(order, lane, 0)
        of_depth = owner[:, lane]
        changes = _counter(of_depth != np.roll(of_depth, 1))
        readers = np.minimum(1 + changes(end) - changes(begin + 1), len(np.unique(of_depth)))
        each = np.ones(len(blocks)) if cost is None else np.asarray(cost)[blocks]
        read += float((readers * each).sum())
    used = np.unique(order.table.piece_block)
    whole = float(len(used) if cost is None else np.asarray(cost)[used].sum())
    return read / whole if whole else 1.0


def _owner_of_position(start: int, nodes: Sequence[int], batch_size: int, lanes: int) -> NDArray[np.int64]:
    """The node that takes each position, counted from `start`, until the pattern repeats in every lane."""
    group = batch_size * len(nodes)
    owner = np.empty(lcm(group, lanes), np.int64)
    of_position = np.repeat(np.asarray(nodes, np.int64), batch_size)
    for begin in range(0, len(owner), group):
        lane = ((start + begin + np.arange(group)) % lanes).astype(np.uint16)
        owner[begin + np.argsort(lane, kind="stable")] = of_position
    return owner


def _pieces_from(
    order: Order, lane: int, start: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Blocks of a lane, between which depths their samples are, and the first depth that is not done.

    Depths count from that first one. Under "window" a block's samples may be anywhere in its window.
    """
    table = order.table
    cells = table.num_windows * np.array([lane, lane + 1])
    pieces = np.arange(*table.cell_piece[cells])
    begin, end = table.piece_start[pieces], table.piece_start[pieces + 1]
    if order.shuffle.kind == "window":
        cell = np.searchsorted(table.cell_piece, pieces, side="right") - 1
        begin, end = table.cell_start[cell], table.cell_start[cell + 1]
    first = max(0, -(-(start - lane) // order.num_lanes))
    origin = table.lane_bounds[lane] + first
    return table.piece_block[pieces], np.maximum(begin - origin, 0), np.maximum(end - origin, 0), first


def _counter(mine: NDArray[np.bool_]) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function that counts how many of the first n of a repeating pattern are mine."""
    before = np.concatenate(([0], np.cumsum(mine)))
    return lambda n: n // len(mine) * before[-1] + before[n % len(mine)]
