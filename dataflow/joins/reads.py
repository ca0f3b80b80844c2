"""The cost of joined datasets to a session: which stay in memory, and how often the others are read.

Where single values can be read, a window reads those of its samples, and nothing twice. Where whole blocks
must be decoded, a dataset whose blocks fit a quarter of the memory limit is read once and stays; of larger
ones each window reads the blocks that it needs, which a shuffle brings together from everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataflow.joins.join import Join
from dataflow.joins.matches import allowance, reads_in_windows
from sharding.order.shuffle import Shuffle

_KEPT_IN_LIMIT = 4


def kept_bytes(plan: Any, memory_limit: int) -> dict[tuple[int, int], int]:
    """(Source, number of what is joined to it) -> bytes of all its blocks, for those that stay."""
    sizes: dict[tuple[int, int], int] = {}
    for number, component in enumerate(plan.dataset.sources):
        for index, join in enumerate(component.joins_used):
            nbytes = _bytes_in_memory(join)
            if not join.other.reads_values and sum(sizes.values()) + nbytes <= memory_limit // _KEPT_IN_LIMIT:
                sizes[number, index] = nbytes
    return sizes


def _bytes_in_memory(join: Join) -> int:
    """Return the bytes of all blocks that hold matches, stored and decoded."""
    table, blocks = join.other.catalog.blocks, np.unique(join.matches.other_blocks)
    num_rows = int(table.num_samples[blocks].sum())
    staged: int = sum(output.staged_bytes(num_rows) for output in join.other.outputs)
    rounded = (1 << 10) * len(blocks) * len(join.other.outputs)
    return int((table.length + table.nbytes)[blocks].sum()) + staged + rounded


def check_reads(plan: Any, memory_limit: int) -> None:
    """Raise `ValueError` where an epoch reads a joined dataset more often than its join allows."""
    residents = kept_bytes(plan, memory_limit)
    if plan.shuffle.kind == "full" or plan.shuffle.is_file_order:
        return  # one read a sample, as it says; what file order takes was checked by the join
    for number, component in enumerate(plan.dataset.sources):
        used: Sequence[Join] = component.joins_used
        for index, join in enumerate(used):
            if join.other.reads_values or (number, index) in residents:
                continue
            shuffle = plan.shuffle.of_source(number)
            order = component.windows(0, shuffle, seed=plan.seed)
            nbytes = join.other.catalog.blocks.length
            times = reads_in_windows(order, join.matches, nbytes)
            if times > join.amplification:
                raise ValueError(_refusal(order.shuffle, join, times))


def _refusal(shuffle: Shuffle, join: Join, times: float) -> str:
    table = join.other.catalog.blocks
    blocks = np.unique(join.matches.other_blocks)
    once = int(table.length[blocks].sum())
    return (
        f"with this shuffle, an epoch reads {times * once:,.0f} bytes of {join.other.catalog.shard(0).url} "
        f"and its like, {times:.3g} times the {once:,} that they have: a window of "
        f"{shuffle.window_blocks} blocks needs samples from everywhere, and of theirs only whole blocks "
        f"of {int(table.num_samples[blocks].mean()):,} samples can be read. Write them in smaller blocks "
        f"(row groups), raise memory_limit to {_KEPT_IN_LIMIT * _bytes_in_memory(join):,} so that they stay "
        f"in memory, leave shuffle= out, or allow the reads: join(..., amplification={allowance(times)})"
    )
