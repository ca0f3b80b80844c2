"""Index the shards of a source: in threads of this process, or as tasks that somebody else runs.

A task indexes some shards, as this process would, and sends back what it found; the catalog is made here, and
is the same whoever looked at the shards.
"""

from __future__ import annotations

import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct, structs

from dataflow.progress.bar import ProgressBar
from prefetch.retries import RetryPolicy
from prefetch.store.retrier import Hosts, Retrier
from sharding.blocks import DEFAULT_BLOCK_BYTES, Format
from sharding.catalog.build import (
    Scanned,
    catalog_of,
    changes,
    default_catalog_path,
    listed_entries,
    scan_shards,
)
from sharding.catalog.table import Catalog
from sharding.errors import ShardError
from sharding.urls import is_local
from sharding.write.file import NewFile, private_folder

RunTasks = Callable[..., Generator[tuple[int, Any], None, None]]
"""Runs tasks elsewhere: (function, tasks) -> (number of the task, what the function returned), in any order.
`partial(dataflow.executors.run_all, executor)` is one."""

INDEX_THREADS = 16
REMOTE_INDEX_THREADS = 48
"""Number of threads, as many as read at a time in training: they wait most of the time."""
_KEPT_TOGETHER = 4_096
ELSEWHERE = "dataflow.sources.tasks:scanned_elsewhere"
"""The function that has shards indexed by tasks that somebody else runs."""


class ShardGroup(Struct, frozen=True, kw_only=True):
    """Some shards that are to be indexed."""

    urls: Sequence[str]
    codec: Format
    storage_options: Mapping[str, Any]
    block_bytes: int
    listed: Mapping[str, Any]
    policy: RetryPolicy
    hosts: Hosts


def index(
    urls: Sequence[str],
    codec: Format,
    retrier: Retrier,
    *,
    storage_options: Mapping[str, Any] | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    progress: bool | None = None,
    run: RunTasks | None = None,
    listed: Mapping[str, Any] | None = None,
) -> Catalog:
    """Build a catalog in parallel, with a progress bar (None: on a terminal).

    `listed`: by URL, what a table says of its files; None: a file beside the shards may say something.
    `run`: runs tasks of some shards each; None: threads of this process index them. Local paths are then
    looked for where its workers are.
    """
    options = storage_options or {}
    entries = listed_entries(urls, codec, options, retrier) if listed is None or codec.listing_name else {}
    listed = listed or entries
    if entries and listed is not entries:  # as of folders with values
        listed = {url: structs.replace(facts, listed=entries.get(url)) for url, facts in listed.items()}
    group = ShardGroup(
        urls=urls,
        codec=codec,
        storage_options=options,
        block_bytes=block_bytes,
        listed=listed,
        policy=retrier.policy,
        hosts=retrier.hosts,
    )
    scans = _KeptScans(group)
    with ProgressBar("indexing", total=len(urls), unit="shard", visible=progress) as bar:
        results = scans.load(retrier)
        missing = [number for number in range(len(urls)) if number not in results]
        rest = structs.replace(group, urls=[urls[number] for number in missing])
        with scanned_here(rest, retrier) if run is None else resolve_name(ELSEWHERE)(rest, run) as scanned:
            new = scans.keeping(missing, scanned)
            catalog = catalog_of(
                urls,
                codec,
                (results[number] if number in results else next(new) for number in range(len(urls))),
                block_bytes=block_bytes,
                progress=lambda done, total, samples: bar.show(done, total, f"{samples:,} samples"),
            )
    scans.remove()
    return catalog


class _KeptScans:
    """The shards that an index which was interrupted has looked at, in this user's folder of catalogs.

    Thousands are written at a time, as a file of their own, so that small datasets cost nothing. They are
    removed when all shards were looked at. What a table or an index file says of shards is not kept along.
    """

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._folder = f"{default_catalog_path(group.urls, group.codec, group.block_bytes)}.parts"

    def load(self, retrier: Retrier) -> dict[int, Scanned]:
        """Return what was found of shards that are as they were, by number."""
        results: dict[int, Any] = {}
        group, unusable = self._group, (OSError, EOFError, LookupError, AttributeError, pickle.PickleError)
        with suppress(*unusable):
            for name in os.listdir(self._folder):
                with suppress(*unusable), open(f"{self._folder}/{name}", "rb") as file:
                    results.update(pickle.load(file))  # of this user's own folder
        if not results or group.listed:
            return {}
        urls = [group.urls[number] for number in results]
        catalog = catalog_of(urls, group.codec, results.values(), block_bytes=group.block_bytes)
        with retrier.pool(REMOTE_INDEX_THREADS, "dataflow-index") as pool:
            changed = {item.url for item in changes(catalog, group.storage_options, pool.map, retry=retrier)}
        return {number: result for number, result in results.items() if result[0].url not in changed}

    def keeping(self, numbers: Sequence[int], scanned: Iterable[Scanned]) -> Iterator[Scanned]:
        """Yield what is found of shards of these numbers, and keep it, but for errors."""
        part: dict[int, Scanned] = {}
        for number, result in zip(numbers, scanned, strict=True):
            if not isinstance(result, ShardError) and not self._group.listed:
                part[number] = replace(result[0], signed_url=""), result[1]
            if len(part) >= _KEPT_TOGETHER:
                self._write(part)
                part.clear()
            yield result

    def _write(self, part: Mapping[int, Scanned]) -> None:
        with suppress(OSError):  # the next start looks at them again
            private_folder(self._folder)
            file = NewFile(f"{self._folder}/{uuid.uuid4().hex}")
            file.write(pickle.dumps(part))
            file.commit()

    def remove(self) -> None:
        """Remove them: the catalog has all."""
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def scanned_here(group: ShardGroup, retrier: Retrier) -> Iterator[Iterator[Scanned]]:
    """Index the shards in threads."""
    from prefetch.store.filesystems import shard_file
    from prefetch.store.reader import StoreReader

    num_threads = INDEX_THREADS if all(map(is_local, group.urls)) else REMOTE_INDEX_THREADS
    with (
        retrier.pool(num_threads, "dataflow-index") as pool,
        closing(StoreReader(group.storage_options, policy=retrier.policy, hosts=retrier.hosts)) as reader,
    ):
        retrier.watch(reader.waiting)
        yield iter(
            scan_shards(
                group.urls,
                group.codec,
                storage_options=group.storage_options,
                block_bytes=group.block_bytes,
                map=pool.map,
                retry=retrier,
                open_shard=partial(shard_file, reader.read_into),
                listed=group.listed,
            )
        )
