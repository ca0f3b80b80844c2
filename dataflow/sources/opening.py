"""Find the catalog of a source: the one that is kept, if it is still true, else a new one.

A kept catalog is believed only after every shard was asked for its size and version. Of a catalog that was
named as the source, only some remote shards are asked, all at once: one round trip, however many there are.
It is not made anew if they changed, and every read compares what the store says with the catalog. Indexing
runs on a thread pool that lives as long as the call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct, structs

from dataflow.progress.bar import ProgressBar
from dataflow.sources.indexing import INDEX_THREADS, index
from dataflow.sources.listing.claims import (
    PARTED_BY_FOLDERS,
    Listing,
    SourceArguments,
    Spec,
    claim_shards,
    looked_again,
    refuse_unmeant,
    resolve,
)
from dataflow.sources.listing.places import Places
from prefetch.store.retrier import Retrier
from sharding.blocks import DEFAULT_BLOCK_BYTES, Format
from sharding.catalog.build import (
    Map,
    changes,
    changes_text,
    default_catalog_path,
    find_catalog,
    unfinished_text,
)
from sharding.catalog.table import Catalog
from sharding.errors import OldCatalogError, ShardChangedError, ShardReadError
from sharding.formats import resolve_format
from sharding.hub.names import is_pinned
from sharding.redaction import identity_of
from sharding.urls import is_local
from sharding.write.file import warn_not_kept

QUICK_S = 1.0
"""Seconds in which shards are mostly asked for; what takes longer shows that it goes on."""


class OpenOptions(Struct, frozen=True, kw_only=True):
    """The settings by which a dataset is opened; see `ShardedDataset` for what the fields mean."""

    asked: SourceArguments
    dtype: str | None
    length: int | None
    header: int | None
    block_bytes: int
    progress: bool | None
    allow_unfinished: bool
    places: Places

    def find(self, source: Any) -> tuple[Listing, Catalog]:
        """List a source, and find its catalog: one is made where none is true. Warns of unfinished shards."""
        listing = resolve(source, self.asked, self.places)
        try:
            catalog = self._catalog_of(listing)
        except ShardReadError as error:
            listing = looked_again(listing, self.asked, self.places, error)
            catalog = self._catalog_of(listing)
        if catalog.unfinished:
            warnings.warn(unfinished_text(catalog), stacklevel=3)
        return listing, catalog

    def _catalog_of(self, listing: Listing) -> Catalog:
        if listing.files is not None:
            files_catalog: Catalog = listing.files.catalog_for(self)
            return files_catalog
        if listing.catalog is not None:
            if not isinstance(self.asked.catalog, Catalog):
                self._changed(listing.catalog, every=False)
            return listing.catalog
        if isinstance(self.asked.catalog, Catalog):
            return self.asked.catalog
        listing = with_codec(
            listing, self.asked, self.places, dtype=self.dtype, length=self.length, header=self.header,
            allow_unfinished=self.allow_unfinished,
        )  # fmt: skip
        urls, codec = listing.urls, listing.format
        assert isinstance(codec, Format)
        if self.asked.catalog is None:
            path = default_catalog_path(urls, codec, self.block_bytes)
            catalog = find_catalog(path)
        else:
            path = os.fspath(self.asked.catalog)
            catalog = kept_catalog(path, self.places)
        same = (list(map(identity_of, urls)), codec.name, codec.options())
        if (
            catalog is None
            or (catalog.urls, catalog.format, catalog.options) != same
            or self.block_bytes not in (DEFAULT_BLOCK_BYTES, catalog.block_bytes)  # the default takes any
        ):
            return self._built(listing, codec, path)
        if same[0] != urls:
            catalog = catalog.signed_by(urls)
        if text := self._changed(catalog, every=True):
            warnings.warn(f"{text}; indexing again", stacklevel=5)
            return self._built(listing, codec, path)
        return catalog

    def _built(self, listing: Listing, codec: Format, path: str) -> Catalog:
        """A new catalog, kept at a path if that may be written."""
        retrier, options = self.places.retrier, self.places.options
        built = index(
            listing.urls,
            codec,
            retrier,
            storage_options=options,
            block_bytes=self.block_bytes,
            progress=self.progress,
            listed=listing.facts,
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

    def _changed(self, catalog: Catalog, *, every: bool) -> str:
        """Say which shards changed since they were indexed; "": none did.

        `every`: ask for all remote ones; else for some, and raise `ShardChangedError`.
        """
        if all(map(is_pinned, catalog.urls)):  # what a commit holds never changes
            return ""
        local, retrier = all(map(is_local, catalog.urls)), self.places.retrier
        if local and catalog.is_unchanged_here():
            return ""
        shards = range(catalog.num_shards) if local or every else _some(catalog.num_shards)
        if local:
            changed = changes(catalog)
        else:
            with (
                retrier.pool(INDEX_THREADS, "dataflow-index") as pool,
                _explain_signatures(catalog),
                checking(len(shards), pool.map, visible=self.progress) as shown_map,
            ):
                changed = changes(
                    catalog, self.places.options, shown_map, fresh=False, retry=retrier, shards=shards
                )
        text = changes_text(changed, len(shards)) if changed else ""
        if changed and not every:
            raise ShardChangedError(changed[0].url, f"{text}; index the dataset again: dataflow index")
        return text


def claim_catalog(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """A catalog in memory, with passwords and signatures that the source has; or the one that was saved."""
    catalog, source = asked.catalog, spec.source
    if asked.manifest is not None:
        raise ValueError("manifest= is for a folder of files, not for a catalog or another format")
    if not isinstance(catalog, Catalog):
        refuse_unmeant(structs.replace(spec, texts=[os.fspath(source)]), asked)
        if (asked.config, asked.split) != (None, None):
            raise ValueError(
                f"config= and split= are for a folder or a repository of the Hub, got {os.fspath(source)!r}"
            )
        return asked.listing((), catalog=load_catalog(os.fspath(source), places.options, places.retrier))
    texts = list(map(str, [source] if isinstance(source, (str, os.PathLike)) else source))
    if any(identity_of(text) != text for text in texts):
        catalog = catalog.signed_by(claim_shards(spec, SourceArguments(), places).urls)
    return asked.listing((), catalog=catalog)


def with_codec(listing: Listing, asked: SourceArguments, places: Places, **options: Any) -> Listing:
    """The listing with the format of its shards, and the columns that their folders are called by.

    `options`: those of formats, as `resolve_format` takes them.
    """
    is_hive = listing.format == "hive"
    name = "auto" if is_hive else listing.format
    codec = resolve_format(name, listing.urls, **options, exists=places.files.exists)
    listing = structs.replace(listing, format=codec)
    may_be_parted = asked.types or is_hive or any("=" in url for url in listing.urls)
    if listing.facts is not None or not may_be_parted:
        return listing
    parted: Listing = resolve_name(PARTED_BY_FOLDERS)(listing, codec, asked.types, is_hive)
    return parted


@contextmanager
def checking(num_shards: int, pool_map: Map, *, visible: bool | None = None) -> Iterator[Map]:
    """Have a bar of asking for so many shards, where that takes long; yields the `map` that shows it."""
    title, after_s = "looking for changes", QUICK_S
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


def kept_catalog(path: str, places: Places) -> Catalog | None:
    """The catalog that was saved there; None where there is none, or it is of another version."""
    if not places.files.exists(path):
        return None
    try:
        return load_catalog(path, places.options, places.retrier)
    except OldCatalogError as error:
        warnings.warn(f"{error.shard}: {error.reason.partition(';')[0]}; indexing again", stacklevel=6)
        return None


def save_catalog(catalog: Catalog, url: str, options: Mapping[str, Any], retrier: Retrier) -> None:
    """Save a catalog at a URL."""
    retrier(lambda: catalog.save(url, options), url)


def _some(num_shards: int) -> Sequence[int]:
    """Return as many shards as are asked at once, the first and the last among them."""
    count = min(num_shards, INDEX_THREADS)
    return [i * (num_shards - 1) // max(1, count - 1) for i in range(count)]
