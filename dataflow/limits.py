"""Limits of the bytes that a loader may hold: in memory, and on a disk of this machine in a `Cache`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prefetch.errors import MemoryLimitError
from sharding.plan.window_size import DEFAULT_LIMIT
from sharding.urls import local_path

if TYPE_CHECKING:  # at run time it would bring pyarrow into loaders without shards
    from sharding.catalog.table import Catalog


def memory_limit_bytes(
    limit: int | str | None, local_world_size: int, window_bytes: int = 0, building_bytes: int = 0
) -> int:
    """The limit in bytes; without one 1 GiB, or an eighth of the machine's memory per rank if less.

    Args:
        limit: as the user gave it.
        local_world_size: ranks of this machine.
        window_bytes: of the windows that mix. Their size is part of the order, so a small machine cannot
            make them smaller: without a limit they have four times as much as they need, up to half of it.
        building_bytes: of batches that keep all builders at work. Where there are many, 1 GiB has no room for
            them beside four windows (sixteen processes were idle half of the time): without a limit they have
            it, up to that eighth.
    """
    if limit is None:
        share = machine_memory() // max(1, local_world_size)
        most = max(DEFAULT_LIMIT, min(share // 8, 4 * window_bytes + building_bytes))
        return max(64 << 20, min(most, max(share // 8, min(4 * window_bytes, share // 2))))
    nbytes = parse_bytes(str(limit))
    if nbytes <= 0:
        raise ValueError(f"memory_limit must be > 0 bytes, got {limit}")
    return nbytes


@contextmanager
def told_of_memory(task: str, cure: str, catalogs: Iterable[Catalog] = ()) -> Iterator[None]:
    """A lack of memory inside, in words: what of, and what to do. Raises `MemoryLimitError` for it.

    `catalogs`: those that say how many samples there are; the shard that has most is named.
    """
    try:
        yield
    except MemoryError as error:
        reason = str(error) or "it gave no reason"
        claims = "".join(f"; {most_samples(catalog)}" for catalog in [*catalogs][:1])
        raise MemoryLimitError(f"the system has no memory to {task}: {reason}{claims}; {cure}") from error


def most_samples(catalog: Catalog) -> str:
    """The shard with most samples, as its catalog says, in words."""
    table = catalog.blocks
    in_shards = np.bincount(table.shard, table.num_samples, minlength=catalog.num_shards)
    shard = int(in_shards.argmax())
    in_block = int(table.num_samples[table.shard == shard].max(initial=0))
    url = catalog.shard(shard).url
    return f"the catalog says that {url} has {int(in_shards[shard]):,} samples, {in_block:,} in a block"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "512MB" or "2GiB": MB is 10**6, MiB is 2**20."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units[letter] = units[letter + "b"] = 1000**power
        units[letter + "ib"] = 1024**power
    number = text.strip().lower().rstrip("bikmgt")
    unit = text.strip().lower()[len(number) :]
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f'a size must be like 1000000, "512MB" or "2GiB", got {text!r}') from None


def machine_memory() -> int:
    """Bytes that this machine, or the container, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):  # "max" is no limit
        return total


def allowed_cores() -> int:
    """Cores that this process may use: its affinity, and the share that its container has."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cores


@dataclass(frozen=True)
class Cache:
    """A folder for blocks of remote shards, shared by all ranks of a machine and by any number of jobs.

    Args:
        path: a folder on a disk of this machine; made if it is not there. Nothing is removed from it but
            what a cache has written.
        limit: bytes of all blocks in the folder, or text such as "200GB".

    Raises:
        ValueError: a limit that is no size, or a path of another machine.

    Examples:
        >>> dataset = ShardedDataset("s3://bucket/*.parquet", cache=Cache("cache", "50GB"))
        >>> with DataLoader(dataset, batch_size=4) as loader:
        ...     for batch in loader:  # the next epoch, and the next job, read from the folder
        ...         tokens = batch["tokens"]
    """

    path: str | os.PathLike[str]
    limit: int | str = "200GB"

    def __post_init__(self) -> None:
        local_path(os.fspath(self.path))  # raises for a URL
        if self.limit_bytes <= 0:
            raise ValueError(f"limit must be > 0 bytes, got {self.limit!r}")

    @property
    def folder(self) -> str:
        """The absolute path of the cache."""
        return local_path(os.fspath(self.path))

    @property
    def limit_bytes(self) -> int:
        """Bytes in the folder at most."""
        return parse_bytes(str(self.limit))
