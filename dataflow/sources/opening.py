"""Find the catalog of a source: the one that is kept, if it is still true, else a new one.

A kept catalog is believed only after every shard was asked for its size and version. Of a catalog that was
named as the source, only some remote shards are asked, all at once: one round trip, however many there are.
It is not made anew if they changed, and every read compares what the store says with the catalog. Indexing
runs on a thread pool that lives as long as the call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, structs

from dataflow.progress.bar import ProgressBar
from dataflow.sources.folders import UNKNOWN
from dataflow.sources.indexing import INDEX_THREADS, REMOTE_INDEX_THREADS, index
from dataflow.sources.loose import LooseFiles, find_loose, is_listed_alike, may_be_loose
from dataflow.sources.manifests import Manifest, folder_of, is_table
from dataflow.sources.named import resolve_source
from dataflow.sources.tables.files import TableVersion
from dataflow.sources.tables.finding import by_table
from prefetch.store.retrier import Retrier
from prefetch.store.small_files import SmallFiles
from sharding.blocks import DEFAULT_BLOCK_BYTES, Format
from sharding.catalog.build import (
    Map,
    changes,
    changes_text,
    default_catalog_path,
    find_catalog,
    is_catalog,
    unfinished_text,
)
from sharding.catalog.expand import LooksUp, expand, found_again
from sharding.catalog.storage import open_url, shard_info, version_of
from sharding.catalog.table import Catalog
from sharding.errors import OldCatalogError, ShardChangedError, ShardReadError
from sharding.formats import resolve_format
from sharding.hub.names import is_pinned
from sharding.redaction import identity_of
from sharding.urls import is_local
from sharding.write.file import warn_not_kept

_QUICK_S = 1.0
"""Seconds in which shards are mostly asked for; what takes longer shows that it goes on."""


class Opening(Struct, frozen=True, kw_only=True):
    """The settings by which a dataset is opened; see `ShardedDataset` for what the fields mean."""

    format: str | Format
    catalog: str | os.PathLike[str] | Catalog | None
    dtype: str | None
    length: int | None
    header: int | None
    block_bytes: int
    progress: bool | None
    storage_options: Mapping[str, Any]
    allow_unfinished: bool
    config: str | None
    split: str | None
    revision: str | int | None
    manifest: Manifest | None

    def find(self, source: Any, retrier: Retrier) -> Catalog:
        """The catalog of a source; indexes what has no true one, and warns of unfinished shards."""
        catalog = self._find(source, retrier)
        if catalog.unfinished:
            warnings.warn(unfinished_text(catalog), stacklevel=3)
        return catalog

    def _find(self, source: Any, retrier: Retrier) -> Catalog:
        otherwise = partial(self._of_files, source, retrier)
        if self.manifest is not None or isinstance(self.catalog, Catalog) or is_catalog(source):
            return otherwise()
        use = partial(self._catalog_of_table, retrier)
        options, revision = self.storage_options, self.revision
        return by_table(source, use, otherwise, options, retrier, format=self.format, revision=revision)

    def _catalog_of_table(self, retrier: Retrier, table: TableVersion) -> Catalog:
        if (self.config, self.split) != (None, None):
            raise ValueError(f"config= and split= are not for tables, got them for {table.name}")
        return self._catalog_of(list(table.files), retrier, table)

    def _of_files(self, source: Any, retrier: Retrier) -> Catalog:
        options = self.storage_options
        is_named = self.manifest is not None or self.format == "files" or is_table(source)
        if is_named or self.split is not None or may_be_loose(source):
            loose = self._loose(source, retrier)
            if loose is not None:
                return loose
        named = source
        source = resolve_source(
            source,
            options,
            retrier,
            config=self.config,
            split=self.split,
            revision=self.revision,
            format=self.format if isinstance(self.format, str) else self.format.name,
        )
        if isinstance(self.catalog, Catalog):
            return self._signed(self.catalog, source, retrier)
        if self.catalog is None and is_catalog(source):
            return self._checked(load_catalog(os.fspath(source), options, retrier), retrier, rebuild=None)
        look = partial(shards_of, source, options, retrier)
        try:
            return found_again(look, lambda urls: self._catalog_of(urls, retrier))
        except ShardReadError as error:
            # Of a store's folder, only its listing tells; what a store refused has a cause.
            loose = None if error.__cause__ is not None else self._loose(named, retrier)
            if loose is None:
                raise
            return loose

    def _catalog_of(
        self, urls: Sequence[str], retrier: Retrier, table: TableVersion | None = None
    ) -> Catalog:
        """The catalog of shards that are told one by one; `table`: whose files they are."""
        assert not isinstance(self.catalog, Catalog)
        options = self.storage_options
        codec = resolve_format(
            self.format if table is None else table.codec,
            urls,
            dtype=self.dtype,
            length=self.length,
            header=self.header,
            allow_unfinished=self.allow_unfinished,
            exists=SmallFiles(options, retrier).exists,
        )
        path = default_catalog_path(urls, codec, self.block_bytes)
        if self.catalog is not None:
            path = os.fspath(self.catalog)

        def build() -> Catalog:
            built = index(
                urls,
                codec,
                retrier,
                storage_options=options,
                block_bytes=self.block_bytes,
                progress=self.progress,
                listed=None if table is None else table.files,
            )
            try:
                save_catalog(built, path, options, retrier)
            except Exception as error:  # it costs only the next start's indexing
                warn_not_kept(
                    "catalogs",
                    path,
                    error,
                    so="shards are indexed again at each start. See that this user may write there and "
                    "has room, or give catalog= another place",
                )
            return built

        if self.catalog is None:
            catalog = find_catalog(urls, codec, self.block_bytes)
        else:
            catalog = _kept(path, options, retrier)
        same = (list(map(identity_of, urls)), codec.name, codec.options())
        if (
            catalog is None
            or (catalog.urls, catalog.format, catalog.options) != same
            or not self._fits(catalog)
        ):
            return build()
        return self._checked(catalog.signed_by(urls), retrier, rebuild=build)

    def _loose(self, source: Any, retrier: Retrier) -> Catalog | None:
        """The catalog of loose files; None: the source means others. One is kept where `catalog=` says."""
        any_kind, manifest = self.format == "files", self.manifest
        is_asked = any_kind or self.format == "auto"
        if not is_asked or isinstance(self.catalog, Catalog) or is_catalog(source):
            if manifest is not None:
                raise ValueError("manifest= is for a folder of files, not for a catalog or another format")
            return None
        if (self.config, self.revision) != (None, None):
            return None
        if manifest is None and is_table(source):
            source, manifest = folder_of(os.fspath(source)), Manifest(source)
        first = source[0] if isinstance(source, (list, tuple)) and source else source
        find = partial(
            find_loose, source, self.storage_options, any_kind=any_kind, manifest=manifest, split=self.split
        )
        files = retrier(find, str(first), may_ask_nobody=True)
        if files is None:
            return None
        files, options = self._sized(files, retrier), self.storage_options
        built = files.catalog(self.block_bytes)
        if self.catalog is None:
            return built
        path = os.fspath(self.catalog)
        kept = _kept(path, options, retrier)
        if kept is not None and is_listed_alike(kept, built):
            return kept.signed_by(built.locations)
        save_catalog(built, path, options, retrier)
        return built

    def _sized(self, files: LooseFiles, retrier: Retrier) -> LooseFiles:
        """The files with sizes and versions, for which the store is asked where no listing told them.

        Raises `ShardReadError` for the first that cannot be had; a note counts the others.
        """
        unknown = np.flatnonzero(files.sizes == UNKNOWN).tolist()
        if not unknown:
            return files
        options, title = self.storage_options, "asking for sizes"

        def ask(opened: tuple[str, Any, str]) -> tuple[int, str] | ShardReadError:
            try:
                info = retrier(lambda: shard_info(*opened), opened[0])
            except ShardReadError as error:
                return error
            return int(info["size"]), version_of(info)

        sizes, versions, failures = files.sizes.copy(), list(files.versions), list[ShardReadError]()
        opened_urls = [(files.urls[number], *open_url(files.urls[number], options)) for number in unknown]
        with (
            ProgressBar(
                title, total=len(unknown), unit="file", visible=self.progress, after_s=_QUICK_S
            ) as bar,
            retrier.pool(REMOTE_INDEX_THREADS, "dataflow-index") as pool,
        ):
            for number, found in zip(unknown, bar.each(pool.map(ask, opened_urls)), strict=True):
                if isinstance(found, ShardReadError):
                    failures.append(found)
                else:
                    sizes[number], versions[number] = found
        if failures:
            if len(failures) > 1:
                failures[0].add_note(f"so it is with {len(failures) - 1} more of {len(unknown):,} files")
            raise failures[0]
        return structs.replace(files, sizes=sizes, versions=versions)

    def _signed(self, catalog: Catalog, source: Any, retrier: Retrier) -> Catalog:
        """A catalog in memory, with passwords and signatures that the source has."""
        sources = [source] if isinstance(source, (str, os.PathLike)) else source
        if all(identity_of(text) == text for text in map(str, sources)):
            return catalog
        return catalog.signed_by(shards_of(source, self.storage_options, retrier))

    def _fits(self, catalog: Catalog) -> bool:
        """Return whether its blocks are those asked for; the default takes any."""
        return self.block_bytes in (DEFAULT_BLOCK_BYTES, catalog.block_bytes)

    def _checked(self, catalog: Catalog, retrier: Retrier, rebuild: Callable[[], Catalog] | None) -> Catalog:
        """The catalog if its shards are as indexed; says so if not, and indexes again where it may."""
        if all(map(is_pinned, catalog.urls)):  # what a commit holds never changes
            return catalog
        local = all(map(is_local, catalog.urls))
        shards = range(catalog.num_shards) if local or rebuild else _some(catalog.num_shards)
        if local:
            changed = changes(catalog)
        else:
            with (
                retrier.pool(INDEX_THREADS, "dataflow-index") as pool,
                _explain_signatures(catalog),
                checking(len(shards), pool.map, visible=self.progress) as shown_map,
            ):
                changed = changes(
                    catalog, self.storage_options, shown_map, fresh=False, retry=retrier, shards=shards
                )
        if not changed:
            return catalog
        text = changes_text(changed, len(shards))
        if rebuild is None:
            raise ShardChangedError(changed[0].url, f"{text}; index the dataset again: dataflow index")
        warnings.warn(f"{text}; indexing again", stacklevel=5)
        return rebuild()


@contextmanager
def checking(num_shards: int, pool_map: Map, *, visible: bool | None = None) -> Iterator[Map]:
    """Have a bar of asking for so many shards, where that takes long; yields the `map` that shows it."""
    title, after_s = "looking for changes", _QUICK_S
    with ProgressBar(title, total=num_shards, unit="shard", visible=visible, after_s=after_s) as bar:
        yield lambda function, items: bar.each(pool_map(function, items))


@contextmanager
def _explain_signatures(catalog: Catalog) -> Iterator[None]:
    try:
        yield
    except ShardReadError as error:
        if error.reason.startswith("permission denied") and not catalog.signed_urls:
            error.add_note("if its URLs were signed, give them again, and catalog=: it keeps no signatures")
        raise


def load_catalog(url: str, options: Mapping[str, Any], retrier: Retrier) -> Catalog:
    """Load a catalog that was saved."""
    return retrier(lambda: Catalog.load(url, options), url)


def _kept(path: str, options: Mapping[str, Any], retrier: Retrier) -> Catalog | None:
    """The catalog that was saved there; None where there is none, or it is of another version."""
    if not SmallFiles(options, retrier).exists(path):
        return None
    try:
        return load_catalog(path, options, retrier)
    except OldCatalogError as error:
        warnings.warn(f"{error.shard}: {error.reason.partition(';')[0]}; indexing again", stacklevel=6)
        return None


def save_catalog(catalog: Catalog, url: str, options: Mapping[str, Any], retrier: Retrier) -> None:
    """Save a catalog at a URL."""
    retrier(lambda: catalog.save(url, options), url)


def shards_of(
    source: Any,
    options: Mapping[str, Any],
    retrier: Retrier,
    looks_up: LooksUp = "",
    revision: str | None = None,
) -> list[str]:
    """The URLs that a source stands for; of what a store must list, too. `looks_up`: see `expand`."""
    source = resolve_source(source, options, retrier, revision=revision)
    first = source[0] if isinstance(source, (list, tuple)) and source else source
    return retrier(lambda: expand(source, options, looks_up=looks_up), str(first), may_ask_nobody=True)


def _some(num_shards: int) -> Sequence[int]:
    """Return as many shards as are asked at once, the first and the last among them."""
    count = min(num_shards, INDEX_THREADS)
    return [i * (num_shards - 1) // max(1, count - 1) for i in range(count)]
