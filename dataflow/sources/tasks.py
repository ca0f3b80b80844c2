"""Index shards elsewhere: as tasks of some shards each, which an executor runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from msgspec import structs

from dataflow.sources.indexing import RunTasks, ShardGroup, scanned_here
from prefetch.store.retrier import Retrier
from sharding.catalog.build import Scanned
from sharding.errors import ShardError
from sharding.hub.names import options_elsewhere

T = TypeVar("T")
_SHARDS_OF_A_TASK = 1_000
_LEAST_TASKS = 64
"""Tasks that a source has, unless it has fewer shards: they are shared out, and one that is lost is short."""


@contextmanager
def scanned_elsewhere(group: ShardGroup, run: RunTasks) -> Iterator[Iterator[Scanned]]:
    """Index the shards by tasks that `run` runs."""
    options = options_elsewhere(group.urls, group.storage_options)
    parts = (
        structs.replace(
            group,
            urls=urls,
            storage_options=options,
            listed={url: group.listed[url] for url in urls if url in group.listed},
        )
        for urls in shared_out(group.urls, _SHARDS_OF_A_TASK)
    )
    with closing(run(_scan, parts)) as results:
        yield (result for part in in_order(results) for result in part)


def _scan(group: ShardGroup) -> list[Scanned]:
    """Index the shards of a task, in a worker; errors of shards are told when all were tried."""
    with Retrier(group.policy, group.hosts) as retrier, scanned_here(group, retrier) as scanned:
        scans = list(scanned)
    for scan in scans:
        if isinstance(scan, ShardError):
            where = f"process {os.getpid()} of {platform.node()}"
            same = (
                ": local paths must be the same on all machines of an engine" if scan.shard[:1] == "/" else ""
            )
            scan.add_note(f"{where} looked at it{same}")
    return scans


def shared_out(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items of each task, in order: at most so many, and fewer where there would be few tasks."""
    step = max(1, min(most, -(-len(items) // _LEAST_TASKS)))
    return (items[start : start + step] for start in range(0, len(items), step))


def in_order(numbered: Iterator[tuple[int, T]]) -> Iterator[T]:
    """The results of tasks that were run elsewhere, in the order of the tasks."""
    early: dict[int, T] = {}
    due = 0
    for number, result in numbered:
        early[number] = result
        while due in early:
            yield early.pop(due)
            due += 1
