"""Facts of this process that its page tells, and how counts and texts stand there."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sharding.printable import printable_name
from sharding.redaction import without_secrets
from sharding.topology.launchers import RankInfo, detect_rank_info, given_variables

_MOST_LETTERS = 300
_OF_JOB = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)
"""Environment variables that are the same on all ranks of a job, and differ between jobs."""


def counts_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the counts among what `stats().to_json()` returned, by the names of `flat`."""
    from dataflow.stats import is_count, numbers_of

    return {name: value for name, value in numbers_of(figures).items() if is_count(name)}


def totals_of(counts: Mapping[str, float], offset: Mapping[str, float]) -> dict[str, float]:
    """Add two sets of counts; a name that one lacks is 0 there."""
    return {name: counts.get(name, 0.0) + offset.get(name, 0.0) for name in {**counts, **offset}}


def in_one_line(text: object) -> str:
    """Return an error or a reason as a short line without secrets and control characters."""
    if isinstance(text, BaseException):
        said = ""
        with suppress(Exception):  # of whoever wrote it
            said = str(text)
        text = f"{type(text).__name__}: {said}"
    line = printable_name(without_secrets(str(text).strip().partition("\n")[0]))
    return line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS]}..."


def program() -> str:
    """Return the name of the script that runs, without its folder and arguments."""
    return os.path.basename(sys.argv[0]) if sys.argv else ""


def rank_info() -> RankInfo:
    """Return which rank this process is, as torch.distributed says, else the launcher."""
    try:
        info = detect_rank_info(given_variables(None))
    except ValueError:  # a loader over shards has raised it, if it matters
        info = RankInfo()
    dist = sys.modules.get("torch.distributed")  # not imported for this: who has it initialised has it
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if (info.rank, info.world_size) != (rank, world_size):
            return RankInfo.alone_on_its_node(rank, world_size, "torch.distributed")
    return info


def ranks_of(owner: Any) -> tuple[int, int, int, int]:
    """Return rank, world size, local rank and node, as who serves a loop knows them, or else this process."""
    ranks: tuple[int, int, int, int] | None = getattr(owner, "ranks", None)
    if ranks is None:
        rank = rank_info()
        ranks = rank.rank, rank.world_size, rank.local_rank, rank.node
    return ranks


def cores_of(rank: RankInfo) -> float:
    """Return the cores of this rank: those that it may use, in equal parts where all may use all of them."""
    usable = len(os.sched_getaffinity(0))
    return usable / (rank.local_world_size if usable == os.cpu_count() else 1)


def job_of(rank: RankInfo, pid: int) -> str:
    """Return an id that the ranks of a job have in common, and no other job on this machine has."""
    parts = [str(pid)]
    if rank.world_size > 1:
        parts = [os.environ.get(name, "") for name in _OF_JOB]
        if not any(parts):
            parts = [str(os.getppid())]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


@cache
def package_version() -> str:
    """Return the version of this package; "" where it was not installed."""
    with suppress(PackageNotFoundError):
        return version("dataflow-loader")
    return ""
