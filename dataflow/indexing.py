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

from dataflow.opening import index
from prefetch.again import asking_pool, until_answered
from prefetch.store import StoreReader
from sharding.block_table import options_of
from sharding.blocks import DEFAULT_BLOCK_BYTES, ColumnSpec, Format, spec_text
from sharding.catalog import (
    CATALOG_SUFFIX,
    Catalog,
    changes,
    default_catalog_path,
    is_catalog,
    unlisted_columns,
)
from sharding.errors import CorruptShardError
from sharding.formats import resolve_format
from sharding.source import exists, expand
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

    `dataset_options`: format, dtype, length, storage_options, as for `ShardedDataset`.
    """
    console = Console(highlight=False)
    format_options = dict(dataset_options)
    storage_options = format_options.pop("storage_options", {})
    if output is not None and not output.endswith(CATALOG_SUFFIX):
        raise ValueError(f"--output must end in {CATALOG_SUFFIX}, got {output!r}")
    if len(source) == 1 and is_catalog(source[0]):
        if format_options:
            raise ValueError("a catalog knows its format: leave out --format, --dtype and --length")
        wanted = _of_catalog(source[0], output, storage_options, block_bytes)
    else:
        wanted = _of_shards(source, format_options, output, storage_options, block_bytes)
    catalog, stale = _saved(wanted)
    if catalog is not None:
        checksum = checksum or catalog.checksums is not None
    if catalog is not None and not stale and checksum == (catalog.checksums is not None):
        console.print("[bold]up to date[/bold]: nothing changed since it was indexed")
    else:
        for line in _shortened(stale):
            console.print(line, markup=False, soft_wrap=True)
        kept = catalog if catalog is not None and not stale else None
        catalog = _indexed(wanted, kept, checksum)
    _show(console, catalog, wanted.path)
    return catalog


def _of_catalog(path: str, output: str | None, options: Mapping[str, Any], block_bytes: int | None) -> Wanted:
    known = Catalog.load(path, options)
    size = block_bytes or known.block_bytes
    return Wanted(known.urls, known.codec(), size, output or path, options)


def _of_shards(
    source: Sequence[str],
    format_options: dict[str, Any],
    output: str | None,
    options: Mapping[str, Any],
    block_bytes: int | None,
) -> Wanted:
    urls = expand(list(source), options)
    name = format_options.pop("format", "auto")
    codec = resolve_format(name, urls, **format_options, exists=lambda url: _exists(url, options))
    size = block_bytes or DEFAULT_BLOCK_BYTES
    return Wanted(urls, codec, size, output or default_catalog_path(urls, codec, size), options)


def _saved(wanted: Wanted) -> tuple[Catalog | None, list[str]]:
    """The catalog that is there, and what is stale about it."""
    if not _exists(wanted.path, wanted.storage_options):
        return None, []
    try:
        catalog = Catalog.load(wanted.path, wanted.storage_options)
    except CorruptShardError as error:
        return None, [error.reason]
    return catalog, list(_stale(catalog, wanted))


def _exists(url: str, options: Mapping[str, Any]) -> bool:
    return until_answered(lambda: exists(url, options))


def _stale(catalog: Catalog, wanted: Wanted) -> Iterator[str]:
    was = (catalog.format, dict(catalog.options), catalog.block_bytes)
    now = (wanted.codec.name, options_of(wanted.codec), wanted.block_bytes)
    for name, before, after in zip(("format", "options", "block bytes"), was, now, strict=True):
        if before != after:
            yield f"{name}: was {before}, now {after}"
    known, urls = set(catalog.urls), set(wanted.urls)
    yield from (f"{file_name(url)}: new" for url in wanted.urls if url not in known)
    yield from (f"{file_name(url)}: no longer among the shards" for url in catalog.urls if url not in urls)
    if known == urls and catalog.urls != wanted.urls:
        yield "the shards come in another order"
    yield from (f"column {name!r}: not listed by an earlier release" for name in unlisted_columns(catalog))
    with asking_pool(_CHECK_THREADS, "dataflow-index") as (pool, again):
        for change in changes(catalog, wanted.storage_options, pool.map, again=again):
            if change.url in urls:
                yield f"{file_name(change.url)}: {change.what}"


def _shortened(stale: Sequence[str]) -> list[str]:
    if len(stale) <= _NAMED:
        return list(stale)
    return [*stale[:_NAMED], f"and {len(stale) - _NAMED:,} more"]


def _indexed(wanted: Wanted, kept: Catalog | None, checksum: bool) -> Catalog:
    catalog = kept or index(
        wanted.urls,
        wanted.codec,
        storage_options=wanted.storage_options,
        block_bytes=wanted.block_bytes,
    )
    if checksum:
        catalog = catalog.with_checksums(checksums_of(catalog, wanted.storage_options))
    catalog.save(wanted.path, wanted.storage_options)
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
    if catalog.checksums is not None:
        table.add_row("checksums", "CRC-32 of each block")
    table.add_row(
        "samples", f"{catalog.num_samples:,}, {bytes_text(stored / catalog.num_samples)} each on average"
    )
    for name, spec in catalog.schema.items():
        table.add_row("column", f"{name}: {_spec_text(spec)}")
    console.print(table)
    console.print(f"saved    {path}", markup=False, soft_wrap=True)


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
