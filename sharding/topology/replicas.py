"""Ranks that must get the same batches: tensor, context and pipeline parallel groups.

Such ranks form a *replica group*. Data is split over groups, not over ranks: each group has a data rank in
[0, data_world_size), and the plan of a rank is a function of its group's data rank alone, so that the ranks
of a group get identical batches without a word between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DataParallel(NamedTuple):
    """A rank and size among the replica groups, as Megatron and others give them."""

    rank: int
    size: int


Replicate = int | Sequence[int] | DataParallel
"""R: each R consecutive ranks share data (the inner dimensions of a device mesh); a sequence: the data rank
of every rank; a `DataParallel`: this rank's data rank, where nothing is known of the others."""


def checked_replicate(replicate: Replicate, world_size: int) -> Replicate:
    """The same value, hashable. Raises `ValueError` if it does not fit the world."""
    if isinstance(replicate, int):
        if type(replicate) is not int or replicate < 1 or world_size % replicate:
            raise ValueError(f"replicate must be >= 1 and divide world_size={world_size}, got {replicate!r}")
        return replicate
    if isinstance(replicate, DataParallel):
        _require_ints(replicate)
        if not 0 <= replicate.rank < replicate.size <= world_size:
            raise ValueError(f"data parallel rank and size must fit world_size={world_size}, got {replicate}")
        return replicate
    if not isinstance(replicate, Sequence) or len(replicate) != world_size:
        raise ValueError(
            f"replicate must give the data rank of each of {world_size} ranks, got {replicate!r}; "
            "for a single (rank, size) pass DataParallel(rank, size)"
        )
    _require_ints(replicate)
    if set(replicate) != set(range(max(replicate) + 1)):
        raise ValueError(f"data ranks must be 0, 1, 2, ... without a gap, got {sorted(set(replicate))}")
    return tuple(replicate)


def data_rank_info(replicate: Replicate, rank: int, world_size: int) -> DataParallel:
    """Return the data rank of a rank, and the number of data ranks."""
    if isinstance(replicate, DataParallel):
        return replicate
    if isinstance(replicate, int):
        return DataParallel(rank // replicate, world_size // replicate)
    return DataParallel(replicate[rank], max(replicate) + 1)


def data_ranks(replicate: Replicate, world_size: int) -> tuple[int, ...] | None:
    """Data rank of every rank; None if only this rank's is known."""
    if isinstance(replicate, DataParallel):
        return (0,) * world_size if replicate.size == 1 else None
    if isinstance(replicate, int):
        return tuple(rank // replicate for rank in range(world_size))
    return tuple(replicate)


def _require_ints(values: Sequence[int]) -> None:
    if any(type(value) is not int for value in values):
        raise ValueError(f"data ranks must be integers, got {values!r}")
