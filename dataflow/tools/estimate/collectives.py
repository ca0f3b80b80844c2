"""All-reduce as rounds of messages: which rank sends how much to whom, round after round.

Sources: Thakur, Rabenseifner and Gropp 2005 (recursive doubling, halving and doubling), Patarasuk and Yuan
2009 (ring), the levels of NCCL's and Horovod's hierarchical all-reduce. Bytes are those of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from dataflow.tools.estimate.cluster import Cluster, Round

Rounds = Sequence[Round]
_MOST_CHUNKS = 64


def ring(ranks: int, nbytes: float) -> Rounds:
    """Reduce-scatter and all-gather around a ring in rank order: 2(p - 1) rounds of n / p bytes."""
    if ranks == 1:
        return []
    everyone = np.arange(ranks)
    return [Round(everyone, (everyone + 1) % ranks, nbytes / ranks, 2 * (ranks - 1))]


def recursive_doubling(ranks: int, nbytes: float) -> Rounds:
    """Pairs exchange everything, at distance 1, 2, 4, ...: log2(p) rounds of n bytes.

    Ranks beyond a power of two first give theirs to a partner, and get the result in the end.
    """
    return _folded(ranks, nbytes, lambda power: [_exchange(power, d, nbytes) for d in _distances(power)])


def halving_doubling(ranks: int, nbytes: float) -> Rounds:
    """Reduce-scatter by halving, all-gather by doubling: 2 log2(p) rounds, 2(p - 1) / p n bytes."""

    def rounds(power: int) -> list[Round]:
        down = [_exchange(power, d, nbytes * d / power) for d in reversed(_distances(power))]
        return [*down, *reversed(down)]

    return _folded(ranks, nbytes, rounds)


def tree(ranks: int, nbytes: float, chunks: int = 8) -> Rounds:
    """Up a binary tree and down again, in `chunks` pieces that follow one another.

    A piece climbs while the next one starts: 2 (depth + chunks - 1) rounds of n / chunks bytes, in which a
    parent hears both its children.
    """
    if ranks == 1:
        return []
    child = np.arange(1, ranks)
    parent, depth = (child - 1) // 2, int(np.log2(ranks))
    repeats = depth + chunks - 1
    up = Round(child, parent, nbytes / chunks, repeats)
    return [up, Round(parent, child, nbytes / chunks, repeats)]


def hierarchical(sizes: Sequence[int], nbytes: float) -> Rounds:
    """Reduce-scatter level by level, a ring at the top, all-gather back down.

    Args:
        sizes: ranks of a group at each level, the innermost first, such as (ranks of a node, nodes of a rack,
            racks); rank = i0 + sizes[0] * (i1 + sizes[1] * ...).
        nbytes: of the whole tensor.

    At each level, ranks with the same place in their group form a ring of their own, each with its share.
    """
    ranks = int(np.prod(sizes))
    everyone = np.arange(ranks)
    down: list[Round] = []
    stride, share = 1, nbytes
    for size in sizes[:-1]:
        share /= size
        if size > 1:
            down.append(Round(everyone, _next(everyone, stride, size), share, size - 1))
        stride *= size
    top = sizes[-1]
    around = [Round(everyone, _next(everyone, stride, top), share / top, 2 * (top - 1))] if top > 1 else []
    return [*down, *around, *reversed(down)]


def levels(cluster: Cluster) -> tuple[int, ...] | None:
    """(ranks of a node, nodes of a rack, racks), if ranks are numbered so; None if nodes or racks differ."""
    nodes = [(node, len([*ranks])) for node, ranks in groupby(cluster.nodes_of_ranks)]
    racks = [(rack, len([*each])) for rack, each in groupby(cluster.racks_of_nodes[n] for n, _ in nodes)]
    for groups in (nodes, racks):
        if len(dict(groups)) < len(groups) or len({size for _, size in groups}) > 1:
            return None
    return nodes[0][1], racks[0][1], len(racks)


def all_reduces(cluster: Cluster, nbytes: float) -> Mapping[str, Rounds]:
    """Every algorithm that fits, by name; hierarchical ones only where nodes are whole and equal."""
    p = cluster.num_ranks
    algorithms: dict[str, Rounds] = {
        "ring": ring(p, nbytes),
        "recursive doubling": recursive_doubling(p, nbytes),
        "halving-doubling": halving_doubling(p, nbytes),
        "tree": min(
            (tree(p, nbytes, chunks) for chunks in _powers(_MOST_CHUNKS)), key=lambda r: cluster.seconds(r)
        ),
    }
    sizes = levels(cluster)
    if sizes is not None and sizes[0] > 1 and sizes[1] * sizes[2] > 1:
        algorithms["by node"] = hierarchical((sizes[0], sizes[1] * sizes[2]), nbytes)
    if sizes is not None and sizes[1] > 1 and sizes[2] > 1:
        algorithms["by node and rack"] = hierarchical(sizes, nbytes)
    return algorithms


def _exchange(power: int, distance: int, nbytes: float) -> Round:
    everyone = np.arange(power)
    return Round(everyone, everyone ^ distance, nbytes)


def _folded(ranks: int, nbytes: float, rounds: Callable[[int], list[Round]]) -> Rounds:
    power = 1 << (ranks.bit_length() - 1)
    if ranks == power:
        return rounds(power)
    beyond = np.arange(power, ranks)
    return [
        Round(beyond, beyond - power, nbytes),
        *rounds(power),
        Round(beyond - power, beyond, nbytes),
    ]


def _distances(power: int) -> list[int]:
    return _powers(power)[:-1]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _next(everyone: NDArray[np.int64], stride: int, size: int) -> NDArray[np.int64]:
    position = everyone // stride % size
    following: NDArray[np.int64] = everyone + ((position + 1) % size - position) * stride
    return following
