"""What `dataflow index` does: find the catalog of a source, say what changed, index, show what is there.

A saved catalog is believed only after every shard was asked for its size and version; what makes it stale
(other shards, changed shards, other options) is listed before the dataset is indexed again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dataflow.opening import index, is_there, load_catalog, save_catalog, shards_of
from prefetch.store.again import Retrier
from prefetch.store.reader import StoreReader
from sharding.blocks import DEFAULT_BLOCK_BYTES, ColumnSpec, Format, spec_text
from sharding.catalog.build import (
    CATALOG_SUFFIX,
    Catalog,
    changes,
    default_catalog_path,
    is_catalog,
    unfinished_text,
    unlisted_columns,
)
from sharding.errors import CorruptShardError
from sharding.formats import resolve_format
from sharding.redaction import identity_of, without_secrets
from sharding.urls import file_name

_CHECK_THREADS = 16
_CHECKSUM_THREADS = 8
_NAMED = 10
"""Stale shards that are named one by one."""


@dataclass(frozen=True)
class Wanted:
    """What the catalog shall be of, and where it lies."""

    urls: list[str]
    codec: Format
    block_bytes: int
    path: str
    storage_options: Mapping[str, Any]


def index_source(
    source: Sequence[str],
    dataset_options: Mapping[str, Any],
    *,
    output: str | None,
    block_bytes: int | None,
    checksum: bool = False,
) -> Catalog:
    """Bring the catalog of a source up to date and print what it holds; returns it.

    `dataset_options`: format, dtype, length, allow_unfinished, storage_options, as for `ShardedDataset`.
    """
    with Retrier() as retrier:
        return _index_source(source, dataset_options, output, block_bytes, checksum, retrier)


def _index_source(
    source: Sequence[str],
    dataset_options: Mapping[str, Any],
    output: str | None,
    block_bytes: int | None,
    checksum: bool,
    retrier: Retrier,
) -> Catalog:
    console = Console(highlight=False)
    format_options = dict(dataset_options)
    storage_options = format_options.pop("storage_options", {})
    if output is not None and not output.endswith(CATALOG_SUFFIX):
        raise ValueError(f"--output must end in {CATALOG_SUFFIX}, got {output!r}")
    if len(source) == 1 and is_catalog(source[0]):
        if format_options:
            raise ValueError(
                "a catalog knows its format: leave out --format, --dtype, --length and --allow-unfinished"
            )
        wanted = _of_catalog(source[0], output, storage_options, block_bytes, retrier)
    else:
        wanted = _of_shards(source, format_options, output, storage_options, block_bytes, retrier)
    catalog, stale = _saved(wanted, retrier)
    if catalog is not None:
        checksum = checksum or catalog.checksums is not None
    if catalog is not None and not stale and checksum == (catalog.checksums is not None):
        console.print("[bold]up to date[/bold]: nothing changed since it was indexed")
    else:
        for line in _shortened(stale):
            console.print(line, markup=False, soft_wrap=True)
        kept = catalog if catalog is not None and not stale else None
        catalog = _indexed(wanted, kept, checksum, retrier)
    _show(console, catalog, wanted.path)
    return catalog


def _of_catalog(
    path: str, output: str | None, options: Mapping[str, Any], block_bytes: int | None, retrier: Retrier
) -> Wanted:
    known = load_catalog(path, options, retrier)
    size = block_bytes or known.block_bytes
    return Wanted(known.locations, known.codec(), size, output or path, options)


def _of_shards(
    source: Sequence[str],
    format_options: dict[str, Any],
    output: str | None,
    options: Mapping[str, Any],
    block_bytes: int | None,
    retrier: Retrier,
) -> Wanted:
    urls = shards_of(list(source), options, retrier)
    name = format_options.pop("format", "auto")
    codec = resolve_format(name, urls, **format_options, exists=lambda url: is_there(url, options, retrier))
    size = block_bytes or DEFAULT_BLOCK_BYTES
    return Wanted(urls, codec, size, output or default_catalog_path(urls, codec, size), options)


def _saved(wanted: Wanted, retrier: Retrier) -> tuple[Catalog | None, list[str]]:
    """The catalog that is there, and what is stale about it."""
    if not is_there(wanted.path, wanted.storage_options, retrier):
        return None, []
    try:
        catalog = load_catalog(wanted.path, wanted.storage_options, retrier).signed_by(wanted.urls)
    except CorruptShardError as error:
        return None, [error.reason]
    return catalog, list(_stale(catalog, wanted, retrier))


def _stale(catalog: Catalog, wanted: Wanted, retrier: Retrier) -> Iterator[str]:
    was = (catalog.format, dict(catalog.options), catalog.block_bytes)
    now = (wanted.codec.name, wanted.codec.options(), wanted.block_bytes)
    for name, before, after in zip(("format", "options", "block bytes"), was, now, strict=True):
        if before != after:
            yield f"{name}: was {before}, now {after}"
    asked = list(map(identity_of, wanted.urls))
    known, urls = set(catalog.urls), set(asked)
    yield from (f"{file_name(url)}: new" for url in asked if url not in known)
    yield from (f"{file_name(url)}: no longer among the shards" for url in catalog.urls if url not in urls)
    if known == urls and catalog.urls != asked:
        yield "the shards come in another order"
    yield from (f"column {name!r}: not listed by an earlier release" for name in unlisted_columns(catalog))
    with retrier.pool(_CHECK_THREADS, "dataflow-index") as pool:
        for change in changes(catalog, wanted.storage_options, pool.map, retry=retrier):
            if change.url in urls:
                yield f"{file_name(change.url)}: {change.what}"


def _shortened(stale: Sequence[str]) -> list[str]:
    if len(stale) <= _NAMED:
        return list(stale)
    return [*stale[:_NAMED], f"and {len(stale) - _NAMED:,} more"]


def _indexed(wanted: Wanted, kept: Catalog | None, checksum: bool, retrier: Retrier) -> Catalog:
    catalog = kept or index(
        wanted.urls,
        wanted.codec,
        retrier,
        storage_options=wanted.storage_options,
        block_bytes=wanted.block_bytes,
    )
    if checksum:
        catalog = catalog.with_checksums(checksums_of(catalog, wanted.storage_options))
    save_catalog(catalog, wanted.path, wanted.storage_options, retrier)
    return catalog


def checksums_of(catalog: Catalog, storage_options: Mapping[str, Any] | None = None) -> NDArray[np.uint32]:
    """[num_blocks] the CRC-32 of every block, by reading them all; some at a time are in memory.

    Bytes that the store sends wrong now are what later reads are held to: index where the data lies safe.
    """
    reader = StoreReader(storage_options)

    def checksum(number: int) -> int:
        block = catalog.block(number)
        data = np.empty(block.length, np.uint8)
        reader.read_into(block.shard, block.offset, data)
        return zlib.crc32(data.data)

    with ThreadPoolExecutor(_CHECKSUM_THREADS, thread_name_prefix="dataflow-index") as pool:
        try:
            found = pool.map(checksum, range(catalog.num_blocks))
            return np.fromiter(found, np.uint32, catalog.num_blocks)
        finally:
            reader.close()


def _show(console: Console, catalog: Catalog, path: str) -> None:
    stored = sum(catalog.rows.column("size").to_pylist())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("format", catalog.format)
    table.add_row("shards", f"{catalog.num_shards:,}, {bytes_text(stored)}")
    table.add_row(
        "blocks", f"{catalog.num_blocks:,}, {bytes_text(stored / catalog.num_blocks)} each on average"
    )
    if catalog.unfinished:
        table.add_row("unfinished", unfinished_text(catalog))
    if catalog.checksums is not None:
        table.add_row("checksums", "CRC-32 of each block")
    table.add_row(
        "samples", f"{catalog.num_samples:,}, {bytes_text(stored / catalog.num_samples)} each on average"
    )
    for name, spec in catalog.schema.items():
        table.add_row("column", f"{name}: {_spec_text(spec)}")
    console.print(table)
    console.print(f"saved    {without_secrets(path)}", markup=False, soft_wrap=True)


def _spec_text(spec: ColumnSpec) -> str:
    parts = [spec_text(spec)]
    if spec.size_range is not None:
        low, high = spec.size_range
        parts.append(f"{low:,} long" if low == high else f"{low:,} to {high:,} long")
    if spec.optional:
        parts.append("not in every sample")
    return ", ".join(parts)


def bytes_text(count: float) -> str:
    """Bytes for people: "117 kB", "1.4 GB"; units are powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
