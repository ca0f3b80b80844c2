"""Building the catalog of a dataset, finding it again, and telling what changed since.

Shards are indexed one call each of the `map` that the caller gives (an executor's, for remote shards), so
this module starts no threads. Each shard costs one request for size and version, and the reads of its
format's `scan`: headers or footers. All shards are tried before an error is raised, so that it can say
how many others fail.

Where catalogs are looked for: the user's `catalog=` path if there is one, else `default_catalog_path` in
the user's cache folder, else nowhere. Beside the data is a good value for `catalog=`, never a default.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
from msgspec import Struct

from sharding.blocks import DEFAULT_BLOCK_BYTES, Format, Shard, ShardScan
from sharding.catalog.file import VERSION, arrow_rows, kept_folder
from sharding.catalog.listings import entries_of
from sharding.catalog.schema import group_schemas
from sharding.catalog.storage import (
    check_shard,
    exists,
    failure_text,
    open_shard,
    open_url,
    shard_info,
    shard_of,
)
from sharding.catalog.table import Catalog
from sharding.compression import HEAD_BYTES, compression_in, misnamed
from sharding.errors import CorruptShardError, DataflowError, ShardError, ShardReadError
from sharding.formats import ENTRIES, FormatEntry, catalog_options, may_be_empty, sibling
from sharding.printable import printable_name
from sharding.redaction import identity_of
from sharding.urls import file_name, is_chain, is_http, is_local

CATALOG_SUFFIX = ".catalog"
"""Ending of saved catalogs; a source with this ending is one."""
_NAMED_IN_A_WARNING = 3

T = TypeVar("T")
R = TypeVar("R")


class Map(Protocol):
    """`map` or an executor's: results in the order of the items; may run the calls in threads."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        """Call the function on every item."""
        ...


class Retry(Protocol):
    """Calls a function, and may call it again where it failed; this package knows no clock to do so with."""

    def __call__(self, call: Callable[[], R], url: str, /) -> R:
        """Return the result of a call that asks the store at this URL, trying again where that helps."""
        ...


def once(call: Callable[[], R], url: str, /) -> R:
    """Call without a second chance."""
    return call()


OpenShard = Callable[[Shard, Any, str], BinaryIO]
"""The stored bytes of a shard, whose fsspec filesystem and path are given, as a seekable file."""


class ShardChange(Struct, frozen=True):
    """One shard that is not as it was when it was indexed."""

    url: str
    what: str
    """In words: "no such file", "its size is 12 bytes; it was 10 when it was indexed"."""


class _OpenedUrl(Struct, frozen=True):
    """A shard's URL, opened in the caller's thread (fsspec keeps one filesystem per thread)."""

    url: str
    """The URL, with password and signature."""
    fs: Any
    path: str


Scanned = tuple[Shard, ShardScan] | ShardError
"""One shard as it was indexed, or why it could not be."""


def listed_entries(
    urls: Sequence[str], codec: Format, storage_options: Mapping[str, Any] | None, retry: Retry = once
) -> Mapping[str, Any]:
    """Return what files that list the shards say of each, by URL; {} for formats that have none."""
    if not codec.listing_name or not urls:
        return {}
    return retry(lambda: entries_of(urls, storage_options), urls[0])


def scan_shards(
    urls: Sequence[str],
    codec: Format,
    *,
    storage_options: Mapping[str, Any] | None,
    block_bytes: int,
    map: Map = map,  # noqa: A002
    retry: Retry = once,
    open_shard: OpenShard = open_shard,
    listed: Mapping[str, Any],
) -> Iterable[Scanned]:
    """Index each of some shards, which may be a part of a dataset's.

    Args:
        urls: shards in reading order, as `expand` lists them.
        codec: their format.
        storage_options: keyword arguments of the fsspec filesystem.
        block_bytes: bytes a block aims at.
        map: calls a function on every shard; pass an executor's to index in parallel.
        retry: indexes a shard, again if it failed and that may help.
        open_shard: opens a shard to be scanned.
        listed: what lists the shards says of each, by URL; see `listed_entries`.
    """

    def index(opened: _OpenedUrl) -> Scanned:
        def scan() -> Scanned:
            entry = listed.get(opened.url)
            return _index_shard(opened, codec, entry, storage_options, block_bytes, open_shard)

        try:
            return retry(scan, opened.url)
        except ShardError as error:
            return error

    return map(index, _opened(urls, storage_options))


def catalog_of(
    urls: Sequence[str],
    codec: Format,
    scanned: Iterable[Scanned],
    *,
    block_bytes: int,
    progress: Callable[[int, int, int], None] | None = None,
) -> Catalog:
    """Return the catalog of shards that were indexed, in the order of `urls`.

    `progress` is called in this thread after each shard with (shards done, shards, samples so far).

    Raises:
        ShardReadError: a shard is missing, forbidden or failing; a note counts the others.
        CorruptShardError: a shard is empty or breaks its format.
        DataflowError: there is not one sample in all shards.
        ValueError: no shard is given, or an option of the format cannot be kept.
    """
    if not urls:
        raise ValueError("urls must name at least one shard, got none")
    options = catalog_options(codec)
    shards, scans, failures, num_samples = list[Shard](), list[ShardScan](), list[ShardError](), 0
    for count, result in enumerate(scanned, 1):
        if isinstance(result, ShardError):
            failures.append(result)
        else:
            shards.append(result[0])
            scans.append(result[1])
            num_samples += int(result[1].num_samples.sum())
        if progress:
            progress(count, len(urls), num_samples)
    if len(failures) > 1:
        also = f"{len(failures) - 1} of the other {len(urls) - 1} shards cannot be indexed either"
        failures[0].add_note(f"{also}, the last of them {failures[-1]}")
    if failures:
        raise failures[0]
    if num_samples == 0:
        passed_over = sum(codec.num_passed_over(scan.footer) for scan in scans)
        other = f", and {passed_over} files that are hidden or have no extension" if passed_over else ""
        raise DataflowError(
            f"the dataset is empty: no samples in {len(urls)} shards such as {urls[0]}{other}"
        )
    schemas, groups = group_schemas(
        (scan.schema if scan.num_samples.any() else None for scan in scans),
        together=codec.columns_are_extensions,
    )
    catalog = Catalog(
        codec.name,
        options,
        block_bytes,
        schemas,
        rows=arrow_rows(shards, scans, groups),
        unfinished={number: scan.unfinished for number, scan in enumerate(scans) if scan.unfinished},
        missing=_missing(scans),
    )
    return catalog.signed_by(urls)


def _missing(scans: Sequence[ShardScan]) -> dict[str, tuple[int, str]]:
    """Return the first sample that lacks each column that any lacks, as `Catalog.missing` has it."""
    first: dict[str, tuple[int, str]] = {}
    names = {name for scan in scans if scan.num_samples.any() for name in scan.schema}
    seen: set[frozenset[str]] = set()
    for number, scan in enumerate(scans):
        for name, what in scan.missing.items():
            first.setdefault(name, (number, what))
        if scan.num_samples.any():
            columns = frozenset(scan.schema)
            for name in names - columns if columns not in seen else ():  # of each set of columns once
                first.setdefault(name, (number, ""))
            seen.add(columns)
    return first


def _opened(urls: Sequence[str], options: Mapping[str, Any] | None) -> list[_OpenedUrl]:
    return [
        _OpenedUrl(url, None, "") if is_local(url) else _OpenedUrl(url, *open_url(url, options))
        for url in urls
    ]


def _index_shard(
    opened: _OpenedUrl,
    codec: Format,
    listed: Any,
    options: Mapping[str, Any] | None,
    block_bytes: int,
    open_shard: OpenShard,
) -> tuple[Shard, ShardScan]:
    shard = shard_of(opened.url, shard_info(opened.url, opened.fs, opened.path))
    entry = ENTRIES.get(codec.of or codec.name)
    if shard.size == 0:
        if not may_be_empty(opened.url, codec.of or codec.name):
            raise CorruptShardError(shard.url, "is empty (0 bytes)")
        none = np.zeros(0, np.int64)
        return shard, ShardScan(none, none, none, none, schema={})
    with ExitStack() as files:
        file = files.enter_context(open_shard(shard, opened.fs, opened.path))
        named, beside = {opened.url: file}, dict[str, Any]()
        if codec.listing_name or listed is not None:
            beside["listed"] = listed
        other_url = sibling(opened.url, codec.sibling_suffix) if codec.sibling_suffix else ""
        if other_url and not (codec.may_lack_sibling and not exists(other_url, options)):
            other = _opened([other_url], options)[0]
            shard_beside = shard_of(other.url, shard_info(other.url, other.fs, other.path))
            file_beside = files.enter_context(open_shard(shard_beside, other.fs, other.path))
            named[other_url] = beside["sibling"] = file_beside
        if entry is not None and entry.takes_any_bytes:
            _refuse_compressed(named, entry)
        try:
            scan = codec.scan(file, shard, block_bytes=block_bytes, **beside)
        except (ShardReadError, ImportError):
            raise
        except Exception as error:
            _refuse_compressed(named, entry)
            if isinstance(error, DataflowError):
                raise
            raise ShardReadError(shard.url, f"indexing it failed; {failure_text(error)}") from error
        if not scan.num_samples.any():
            _refuse_compressed(named, entry)
        return shard, scan


def _refuse_compressed(named: Mapping[str, BinaryIO], entry: FormatEntry | None) -> None:
    """Raise where a file of a shard, by URL, is compressed and its name does not say so.

    Asked where indexing fails or finds nothing, so that no shard costs a read more.
    """
    for url, file in named.items():
        if entry is None or entry.listed_name or file_name(url).lower().endswith(entry.compressions):
            continue  # they tell themselves how they are compressed
        file.seek(0)
        head = file.read(HEAD_BYTES)
        file.seek(0)
        if reason := misnamed(head, url, may_be_compressed=entry.may_be_compressed):
            if is_http(url) and not is_chain(url) and compression_in(head) == "gzip":
                reason += (
                    "; or, if it comes with 'Content-Encoding: gzip', put 'simplecache::' before the URL"
                )
            raise CorruptShardError(identity_of(url), reason, offset=0, stage="index")


def changes(
    catalog: Catalog,
    storage_options: Mapping[str, Any] | None = None,
    map: Map = map,  # noqa: A002
    *,
    fresh: bool = True,
    retry: Retry = once,
    shards: Iterable[int] | None = None,
) -> list[ShardChange]:
    """Return the changes of a catalog's shards in the store, in shard order; one request a shard.

    `fresh=False` believes listings that fsspec still holds, which makes it free right after a glob. `shards`
    are those to ask for; None: all. Raises `ShardReadError` where the store fails or refuses to say.
    """
    numbers = range(catalog.num_shards) if shards is None else list(shards)
    locations = catalog.locations
    opened_urls = _opened([locations[number] for number in numbers], storage_options)
    if fresh:
        for fs in {id(opened.fs): opened.fs for opened in opened_urls if opened.fs is not None}.values():
            fs.invalidate_cache()

    def change(numbered: tuple[int, _OpenedUrl]) -> ShardChange | None:
        number, opened = numbered
        try:
            info = retry(lambda: shard_info(opened.url, opened.fs, opened.path), opened.url)
            what = check_shard(catalog.shard(number), info)
        except ShardReadError as error:
            if isinstance(error.__cause__, Exception) and not error.reason.startswith("no such"):
                raise
            what = error.reason
        return None if what is None else ShardChange(identity_of(opened.url), what)

    return [result for result in map(change, zip(numbers, opened_urls, strict=True)) if result is not None]


def changes_text(shard_changes: Sequence[ShardChange], num_shards: int) -> str:
    """A warning that counts the changed shards and names the first few."""
    listed = _first_few([(change.url, change.what) for change in shard_changes])
    return f"{len(shard_changes)} of {num_shards} shards changed since they were indexed: {listed}"


def unfinished_text(catalog: Catalog) -> str:
    """A warning that counts the unfinished shards and names the first few."""
    listed = _first_few([(catalog.shard(number).url, how) for number, how in catalog.unfinished.items()])
    counted = f"{len(catalog.unfinished)} of {catalog.num_shards} shards are unfinished"
    return f"{counted}, and only their whole samples are read: {listed}"


def _first_few(shards: Sequence[tuple[str, str]]) -> str:
    named = "; ".join(
        f"{printable_name(file_name(url))}: {what}" for url, what in shards[:_NAMED_IN_A_WARNING]
    )
    more = len(shards) - _NAMED_IN_A_WARNING
    return f"{named}; and {more} more" if more > 0 else named


def is_catalog(source: object) -> bool:
    """Return whether a source is a saved catalog, by its ending."""
    return isinstance(source, (str, os.PathLike)) and file_name(str(source)).endswith(CATALOG_SUFFIX)


def default_catalog_path(urls: Sequence[str], codec: Format, block_bytes: int = DEFAULT_BLOCK_BYTES) -> str:
    """Return where the catalog of these shards is kept unless the user says otherwise.

    `<kept_folder>/<hash>.catalog`. The hash is over the URLs in order, without signatures, and all that
    shapes the blocks, so different readings of the same shards differ.
    """
    names = list(map(identity_of, urls))
    key = json.dumps([VERSION, codec.name, catalog_options(codec), block_bytes, names], sort_keys=True)
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + CATALOG_SUFFIX
    return os.path.join(kept_folder(), name)


def find_catalog(path: str) -> Catalog | None:
    """The catalog kept there; None where there is none, or it is damaged or of another release.

    It may be out of date: ask `changes` before using it.
    """
    try:
        return Catalog.load(path) if os.path.exists(path) else None
    except DataflowError:
        return None  # The new catalog that the caller builds replaces it.
