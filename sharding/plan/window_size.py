"""How many blocks a shuffle window holds where nobody says, and why.

More blocks mix better; the bytes of a window are memory, and the read-ahead. So a window is about 64 MiB,
never fewer than 8 blocks while a quarter of the memory limit holds them (two windows are open at a time, and
batches need the rest). The choice is a function of the block table and of the limit the user gave, never of
the machine: ranks of unlike machines must agree on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sharding.order.shuffle import Shuffle

if TYPE_CHECKING:
    from sharding.catalog.table import BlockTable

WINDOW_BYTES = 64 << 20
"""What a window aims at."""
DEFAULT_LIMIT = 1 << 30
"""The memory limit assumed where none is given, whatever the machine has."""
_MIN_BLOCKS = 8
_SHARE_OF_LIMIT = 4


@dataclass(frozen=True)
class WindowSize:
    """A decision and its reason."""

    window_blocks: int
    """Blocks mixed together, >= 1. At 1 samples mix inside their block only; at all blocks, everywhere."""
    reason: str
    """For people: what set the number."""


def choose_window_blocks(table: BlockTable, memory_limit: int | None = None) -> WindowSize:
    """Blocks of a window for a dataset.

    Args:
        table: the dataset's blocks; those without samples do not count.
        memory_limit: bytes the loader may hold, as the user gave it; None where the user gave none.

    Raises `ValueError` for a limit below one byte.
    """
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit must be >= 1 byte, got {memory_limit}")
    used = table.num_samples > 0
    num_blocks = int(used.sum())
    if not num_blocks:
        return WindowSize(1, "the dataset has no samples")
    mean = max(1, int(np.maximum(table.length, table.nbytes)[used].mean()))
    of_bytes, of_limit = WINDOW_BYTES // mean, (memory_limit or DEFAULT_LIMIT) // _SHARE_OF_LIMIT // mean
    blocks = f"blocks of {_mib(mean)} on average"
    if num_blocks <= min(max(of_bytes, _MIN_BLOCKS), of_limit):
        return WindowSize(num_blocks, f"all {num_blocks:,} {blocks}: the whole dataset fits into one window")
    if of_limit < max(of_bytes, _MIN_BLOCKS):
        limit = _mib(DEFAULT_LIMIT) + ", the default" if memory_limit is None else _mib(memory_limit)
        few = "" if of_limit else "; not even one fits, and a window has at least one"
        return WindowSize(max(1, of_limit), f"{blocks} in a quarter of memory_limit ({limit}){few}")
    if of_bytes < _MIN_BLOCKS:
        return WindowSize(_MIN_BLOCKS, f"the fewest that mix, though {blocks} exceed {_mib(WINDOW_BYTES)}")
    return WindowSize(of_bytes, f"{_mib(WINDOW_BYTES)} of {blocks}")


def deciding_table(
    tables: Sequence[BlockTable], memory_limit: int | None = None
) -> tuple[BlockTable, int | None]:
    """Of several sources that share a memory limit, the one that decides, and its share of the limit.

    It is the one with the smallest window, of those that do not fit into one; of the others, the largest.
    """
    if len(tables) == 1:
        return tables[0], memory_limit
    share = max(1, (memory_limit or DEFAULT_LIMIT) // len(tables))
    sizes = [choose_window_blocks(table, share).window_blocks for table in tables]
    fits = [size >= np.count_nonzero(table.num_samples) for size, table in zip(sizes, tables, strict=True)]
    best = min(range(len(tables)), key=lambda i: (fits[i], -sizes[i] if fits[i] else sizes[i]))
    return tables[best], share


def resolve_windows(
    shuffle: Shuffle, table: BlockTable, memory_limit: int | None = None
) -> tuple[Shuffle, str]:
    """The shuffle with nothing left open, and what set its window's size.

    Arguments and errors as those of `choose_window_blocks`; a window has at least a block of every lane.
    """
    if shuffle.kind == "full":
        return shuffle, "a full shuffle has no windows"
    if shuffle.window_blocks is not None:
        return shuffle.resolved(), "as given"
    size = choose_window_blocks(table, memory_limit)
    resolved = shuffle.resolved(size.window_blocks)
    if resolved.num_lanes > size.window_blocks:
        return resolved, f"one of each lane; without lanes {size.window_blocks:,}: {size.reason}"
    return resolved, size.reason


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB" if count >= 1 << 20 else f"{count / (1 << 10):,.1f} KiB"
