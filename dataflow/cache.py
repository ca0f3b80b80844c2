"""`Cache`: where blocks of remote shards are kept on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dataflow.memory_limit import parse_bytes


@dataclass(frozen=True)
class Cache:
    """A folder for blocks of remote shards, shared by all ranks of a machine and by any number of jobs.

    Args:
        path: a folder on a disk of this machine; made if it is not there. Nothing is removed from it but
            what a cache has written.
        limit: bytes of all blocks in the folder, or text such as "200GB".
        memory: bytes of blocks that each process keeps in memory besides, as a part of the loader's
            `memory_limit`. 0: none; the page cache holds what was read lately anyway.

    Raises `ValueError` for sizes that are none.
    """

    path: str | os.PathLike[str]
    limit: int | str = "200GB"
    memory: int | str = 0

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ValueError(f"limit must be > 0 bytes, got {self.limit!r}")
        if self.memory_bytes < 0:
            raise ValueError(f"memory must be >= 0 bytes, got {self.memory!r}")

    @property
    def folder(self) -> str:
        """Absolute path."""
        return os.path.abspath(os.path.expanduser(os.fspath(self.path)))

    @property
    def limit_bytes(self) -> int:
        """Bytes in the folder at most."""
        return parse_bytes(self.limit) if isinstance(self.limit, str) else int(self.limit)

    @property
    def memory_bytes(self) -> int:
        """Bytes in the memory of each process at most."""
        return parse_bytes(self.memory) if isinstance(self.memory, str) else int(self.memory)
