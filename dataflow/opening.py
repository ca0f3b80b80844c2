"""From a source to its catalog: the one that is kept, if it is still true, else a new one.

A kept catalog is believed only after every shard was asked for its size and version. Of a catalog that was
named as the source, only some remote shards are asked, all at once: one round trip, however many there are.
It is not made anew if they changed, and every read compares what the store says with the catalog. Indexing
runs on a thread pool that lives as long as the call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefetch.again import asking_pool, until_answered
from sharding.blocks import DEFAULT_BLOCK_BYTES, Format
from sharding.catalog import (
    Catalog,
    build_catalog,
    changes,
    changes_text,
    default_catalog_path,
    find_catalog,
    is_catalog,
    options_of,
    unlisted_columns,
)
from sharding.errors import ShardChangedError
from sharding.formats import resolve_format
from sharding.source import expand
from sharding.storage import exists
from sharding.urls import is_local

_INDEX_THREADS = 16


@dataclass(frozen=True)
class Opening:
    """How a dataset is opened; see `ShardedDataset` for what the fields mean."""

    format: str | Format
    catalog: str | os.PathLike[str] | Catalog | None
    dtype: str | None
    length: int | None
    block_bytes: int
    progress: bool | None
    storage_options: Mapping[str, Any]

    def find(self, source: Any) -> Catalog:
        """The catalog of a source; indexes what has no true one."""
        if isinstance(self.catalog, Catalog):
            return self.catalog
        if self.catalog is None and is_catalog(source):
            return self._checked(self._load(os.fspath(source)), rebuild=None)
        urls = expand(source, self.storage_options)
        codec = resolve_format(self.format, urls, dtype=self.dtype, length=self.length, exists=self._exists)
        path = default_catalog_path(urls, codec, self.block_bytes)
        if self.catalog is not None:
            path = os.fspath(self.catalog)

        def build() -> Catalog:
            built = index(
                urls,
                codec,
                storage_options=self.storage_options,
                block_bytes=self.block_bytes,
                progress=self.progress,
            )
            _save_quietly(built, path, required=self.catalog is not None, options=self.storage_options)
            return built

        if self.catalog is None:
            found = find_catalog(urls, codec, self.block_bytes)
        else:
            found = self._load(path) if self._exists(path) else None
        same = (urls, codec.name, options_of(codec))
        if found is None or (found.urls, found.format, found.options) != same or not self._fits(found):
            return build()
        return self._checked(found, rebuild=build)

    def _fits(self, found: Catalog) -> bool:
        """Whether its blocks are those asked for; the default takes any."""
        return self.block_bytes in (DEFAULT_BLOCK_BYTES, found.block_bytes)

    def _load(self, path: str) -> Catalog:
        return until_answered(lambda: Catalog.load(path, self.storage_options))

    def _exists(self, url: str) -> bool:
        return until_answered(lambda: exists(url, self.storage_options))

    def _checked(self, found: Catalog, rebuild: Callable[[], Catalog] | None) -> Catalog:
        """The catalog if its shards are as indexed; says so if not, and indexes again where it may."""
        local = all(map(is_local, found.urls))
        shards = range(found.num_shards) if local or rebuild else _some(found.num_shards)
        if local:
            changed = changes(found)
        else:
            with asking_pool(_INDEX_THREADS, "dataflow-index") as (pool, again):
                changed = changes(
                    found, self.storage_options, pool.map, fresh=False, again=again, shards=shards
                )
        if not changed:
            return self._with_all_columns(found, rebuild)
        text = changes_text(changed, len(shards))
        if rebuild is None:
            raise ShardChangedError(changed[0].url, f"{text}; index the dataset again: dataflow index")
        warnings.warn(f"{text}; indexing again", stacklevel=4)
        return rebuild()

    def _with_all_columns(self, found: Catalog, rebuild: Callable[[], Catalog] | None) -> Catalog:
        """The catalog, or a new one if an earlier release made it, which could not deliver some columns."""
        unlisted = unlisted_columns(found)
        if not unlisted:
            return found
        text = f"the catalog is of an earlier release and leaves out column {unlisted[0]!r}"
        if rebuild is None:
            warnings.warn(f"{text}; index the dataset again for it: dataflow index", stacklevel=5)
            return found
        warnings.warn(f"{text}; indexing again", stacklevel=5)
        return rebuild()


def _some(num_shards: int) -> Sequence[int]:
    """As many shards as are asked at once, the first and the last among them."""
    asked = min(num_shards, _INDEX_THREADS)
    return [i * (num_shards - 1) // max(1, asked - 1) for i in range(asked)]


def index(
    urls: Sequence[str],
    codec: Format,
    *,
    storage_options: Mapping[str, Any] | None = None,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    progress: bool | None = None,
) -> Catalog:
    """Build a catalog in parallel, with a progress bar (None: on a terminal)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    hidden = not (console.is_terminal if progress is None else progress)
    look = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with (
        Progress(*look, TimeRemainingColumn(), console=console, disable=hidden, transient=True) as bar,
        asking_pool(_INDEX_THREADS, "dataflow-index") as (pool, again),
    ):
        task = bar.add_task("", total=len(urls))

        def show(done: int, total: int, samples: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{samples:,} samples")

        return build_catalog(
            urls,
            codec,
            storage_options=storage_options,
            block_bytes=block_bytes,
            map=pool.map,
            progress=show,
            again=again,
        )


def _save_quietly(catalog: Catalog, path: str, *, required: bool, options: Mapping[str, Any]) -> None:
    """Keep a catalog; a cache folder that cannot be written costs only the next start's indexing."""
    try:
        if is_local(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        catalog.save(path, options)
    except Exception:
        if required:
            raise
