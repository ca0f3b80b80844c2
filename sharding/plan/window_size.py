"""Choose how many blocks a shuffle window holds where nobody says, and why.

More blocks mix better; the bytes of a window are memory, and the read-ahead. A dataset that fits into 256 MiB
and a quarter of the memory limit is one window, which mixes like a full shuffle. Of larger ones a window is
about 128 MiB: 64 blocks of the usual size, which hold each of ten sorted labels alike enough that a batch of
256 tells no difference from chance (`benchmarks.order.label_mixing`). Blocks of more than 2 MiB would need
far more memory for that, and rows from 128 MiB of columns are gathered a tenth slower than from 64: windows
of such blocks shrink to 64 MiB, which those of 4 MiB and more have. A window has never fewer than 8 blocks
while a quarter of the memory limit holds them (two windows are open at a time, and batches need the rest).
The choice is a function of the block table and of the limit the user gave, never of the machine: ranks of
unlike machines must agree on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sharding.order.shuffle import Kind, Shuffle
from sharding.order.windows import FIRST_WINDOW_BLOCKS, small_windows

if TYPE_CHECKING:
    from sharding.catalog.table import BlockTable

ONE_WINDOW_BYTES = 256 << 20
"""A dataset of no more is one window."""
WINDOW_BYTES = 128 << 20
"""The bytes that a window of a larger dataset aims at, of blocks of at most `USUAL_BLOCK_BYTES`."""
USUAL_BLOCK_BYTES = 2 << 20
SOON_BYTES = 32 << 20
"""A dataset of one window that holds more begins with small ones: its first batch would wait for all."""
READ_BYTES = 64 << 20
"""The same of blocks twice as large and more, and where windows mix nothing: it is read together."""
DEFAULT_LIMIT = 1 << 30
"""The memory limit assumed where none is given, whatever the machine has."""
_MIN_BLOCKS = 8
_SINGLES = 2048
"""The most blocks of a window where each is one sample, as a loose file is: the order of blocks has mixed
them already, and no batch is there before all of its window was read."""
_SHARE_OF_LIMIT = 4


@dataclass(frozen=True)
class WindowSize:
    """A decision and its reason."""

    window_blocks: int
    """Blocks mixed together, >= 1. At 1 samples mix inside their block only; at all blocks, everywhere."""
    reason: str
    """For people: what set the number."""
    num_blocks: int
    """Blocks with samples of the dataset."""
    nbytes: int = 0
    """Their bytes."""

    @property
    def is_whole(self) -> bool:
        """Return whether the window holds the whole dataset."""
        return self.window_blocks >= self.num_blocks


def choose_window_blocks(
    table: BlockTable, memory_limit: int | None = None, kind: Kind = "window"
) -> WindowSize:
    """Blocks of a window for a dataset.

    Args:
        table: the dataset's blocks; those without samples do not count.
        memory_limit: bytes the loader may hold, as the user gave it; None where the user gave none.
        kind: of the shuffle: only under "window" do windows mix.

    Raises `ValueError` for a limit below one byte.
    """
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit must be >= 1 byte, got {memory_limit}")
    sizes = np.maximum(table.length, table.nbytes)[table.num_samples > 0]
    num_blocks, total = len(sizes), int(sizes.sum())
    if not num_blocks:
        return WindowSize(1, "the dataset has no samples", 0)
    mean, allowed = max(1, total // num_blocks), (memory_limit or DEFAULT_LIMIT) // _SHARE_OF_LIMIT
    mixes = kind == "window"
    most = _SINGLES if mixes and not (table.num_samples > 1).any() else num_blocks
    mixed = max(READ_BYTES, WINDOW_BYTES * USUAL_BLOCK_BYTES // max(mean, USUAL_BLOCK_BYTES))
    aim, whole_bytes = (mixed, ONE_WINDOW_BYTES) if mixes else (READ_BYTES, READ_BYTES)
    blocks = f"blocks of {_mib(mean)} on average"
    if total <= min(whole_bytes, allowed) and num_blocks <= most:
        return WindowSize(
            num_blocks,
            f"all {num_blocks:,} {blocks}: the whole dataset fits into one window",
            num_blocks,
            total,
        )
    of_bytes, of_limit = aim // mean, allowed // mean
    if mixes and of_bytes >= _MIN_BLOCKS:
        # As many windows as come nearest: one more, and those of a dataset just above it would hold half.
        of_bytes = min(most, -(-num_blocks // max(1, round(total / aim))))
    if of_limit < max(of_bytes, _MIN_BLOCKS):
        limit = _mib(DEFAULT_LIMIT) + ", the default" if memory_limit is None else _mib(memory_limit)
        few = "" if of_limit else "; not even one fits, and a window has at least one"
        chosen, reason = max(1, of_limit), f"{blocks} in a quarter of memory_limit ({limit}){few}"
    elif of_bytes < _MIN_BLOCKS:
        chosen, reason = _MIN_BLOCKS, f"the fewest that mix, though {blocks} exceed {_mib(aim)}"
    else:
        chosen, reason = of_bytes, f"{_mib(of_bytes * mean)} of {blocks}"
    return WindowSize(chosen, reason, num_blocks)


def resolve_windows(
    shuffle: Shuffle, tables: Sequence[BlockTable], memory_limit: int | None = None
) -> tuple[Shuffle, str]:
    """The shuffle with nothing left open, and what set its window's size.

    Args:
        shuffle: as the user gave it.
        tables: of the dataset, or of each source of a mixture. Those share the limit, and each has windows
            of its own; `window_blocks` is that of the one with the smallest window, of those that do not fit
            into one, or else the largest.
        memory_limit: as for `choose_window_blocks`.

    A window has at least a block of every lane. Errors are those of `choose_window_blocks`.
    """
    if shuffle.kind == "full":
        return shuffle, "a full shuffle has no windows"
    if shuffle.window_blocks is not None:
        return shuffle.resolved(), "as given"
    share = memory_limit
    if len(tables) > 1:
        share = max(1, (memory_limit or DEFAULT_LIMIT) // len(tables))
    sizes = [choose_window_blocks(table, share, shuffle.kind) for table in tables]
    of_sources = tuple(size.window_blocks for size in sizes)
    size = min(sizes, key=lambda w: (w.is_whole, w.window_blocks * (-1 if w.is_whole else 1)))
    resolved = shuffle.resolved(size.window_blocks)
    if shuffle.ramp is None and any(w.is_whole and w.nbytes > SOON_BYTES for w in sizes):
        resolved = replace(resolved, ramp=FIRST_WINDOW_BLOCKS)
    if len({*of_sources}) > 1:
        resolved = replace(resolved, source_windows=of_sources)
    reason = size.reason
    if resolved.num_lanes > size.window_blocks:
        reason = f"one of each lane; without lanes {size.window_blocks:,}: {reason}"
    if len(tables) > 1:
        reason = f"{reason}; {sum(w.is_whole for w in sizes)} of {len(sizes)} sources in one window each"
    of_size = resolved.of_source(sizes.index(size)).window_blocks or 0
    small = small_windows(size.num_blocks, of_size, resolved.num_lanes, resolved.ramp or False)
    if small:
        when = "epoch 0 begins" if shuffle.kind == "window" else "each epoch begins"
        reason = f"{reason}; {when} with {', '.join(map(str, small))}"
    return resolved, reason


def window_bytes(shuffle: Shuffle, tables: Sequence[BlockTable]) -> int:
    """Bytes of a window of each source together, about; 0 where windows mix nothing.

    `shuffle`: with nothing left open.
    """
    if shuffle.kind != "window":
        return 0
    total = 0
    for number, table in enumerate(tables):
        sizes = np.maximum(table.length, table.nbytes)[table.num_samples > 0]
        blocks = min(len(sizes), shuffle.of_source(number).window_blocks or len(sizes))
        total += int(sizes.sum()) * blocks // max(1, len(sizes))
    return total


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB" if count >= 1 << 20 else f"{count / (1 << 10):,.1f} KiB"
