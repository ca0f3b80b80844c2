"""`dataflow index` finds the catalog of a source, says what changed, indexes, and shows what is there.

A saved catalog is believed only after every shard was asked for its size and version; what makes it stale
(other shards, changed shards, other options) is listed before the dataset is indexed again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.executors import run_all
from dataflow.progress.bar import ProgressBar
from dataflow.sources.indexing import index
from dataflow.sources.listing.claims import Listing, SourceArguments, looked_again, resolve
from dataflow.sources.listing.places import Places
from dataflow.sources.opening import checking, load_catalog, save_catalog, with_codec
from dataflow.sources.tasks import in_order, shared_out
from dataflow.tools.terminal.report import Part, Sentence, Table, bytes_text, show
from prefetch.store.reader import StoreReader
from prefetch.store.retrier import Retrier
from prefetch.store.small_files import SmallFiles
from sharding.blocks import DEFAULT_BLOCK_BYTES, Block, ColumnSpec, Format, spec_text
from sharding.catalog.build import (
    CATALOG_SUFFIX,
    changes,
    default_catalog_path,
    unfinished_text,
)
from sharding.catalog.reading import read_block
from sharding.catalog.table import Catalog
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats import FORMATS
from sharding.hub.names import options_elsewhere
from sharding.lengths.kept import folder_beside
from sharding.redaction import identity_of, without_secrets
from sharding.urls import file_name, is_local, local_path
from sharding.write.file import NewFile, user_folder

_CHECK_THREADS = 16
_CHECKSUM_THREADS = 8
_BLOCKS = 4_096
"""Blocks of a task that reads them for checksums, at most."""
_NO_LENGTHS = (
    "no lengths were found of its samples by this user yet: name the transform by --transform, or let a "
    "loader with batching= run an epoch, with a transform that has a fingerprint, or a lengths_key="
)
_NAMED = 10
"""Stale shards that are named one by one."""


@dataclass(frozen=True, kw_only=True)
class CatalogTarget:
    """The shards that a catalog shall be of, and where it lies."""

    urls: list[str]
    codec: Format
    block_bytes: int
    path: str
    storage_options: Mapping[str, Any]
    listed: Mapping[str, Any] | None = None
    """By URL, what a table says of its files; None: they are of none."""


def index_source(
    source: Sequence[str],
    dataset_options: Mapping[str, Any],
    *,
    output: str | None,
    block_bytes: int | None,
    checksum: bool = False,
    lengths: bool = False,
    transform: str | None = None,
    lengths_of: str | None = None,
    executor: Executor | None = None,
) -> Catalog:
    """Bring the catalog of a source up to date and print what it holds; returns it.

    `dataset_options`: format, dtype, length, allow_unfinished, revision, storage_options, as for
    `ShardedDataset`.
    `lengths`: put those that loaders have found beside it. `transform`: the name of a function; samples that
    it makes are measured first: the column `lengths_of`. `executor`: looks at the shards; None: threads do.
    """
    if output is not None and not output.endswith(CATALOG_SUFFIX):
        raise ValueError(f"--output must end in {CATALOG_SUFFIX}, got {output!r}")
    if not lengths and (transform or lengths_of):
        raise ValueError("--transform and --lengths-of say which --lengths are measured: give that, too")
    if "columns" in dataset_options and transform is None:
        raise ValueError("--columns says what --transform is given: a catalog has all columns")
    rest = dict(dataset_options)
    asked = SourceArguments(
        **{name: rest.pop(name) for name in SourceArguments.__struct_fields__ if name in rest}
    )
    with Retrier() as retrier:
        places = Places(rest.pop("storage_options", {}), retrier)
        listing = resolve(list(source), asked, places)

        def brought_up(listing: Listing) -> tuple[CatalogTarget, Catalog]:
            target = _target(source, listing, asked, places, rest, output, block_bytes)
            return target, _brought_up(target, retrier, executor, checksum=checksum)

        try:
            target, catalog = brought_up(listing)
        except ShardReadError as error:
            target, catalog = brought_up(looked_again(listing, asked, places, error))
        show([*_parts(catalog, target.path)])
        if lengths:
            if not is_local(target.path):
                where = f"beside the catalog, and {target.path} is none of this machine"
                raise ValueError(f"--lengths puts files {where}")
            if transform is not None:
                from dataflow.tools.terminal.measuring import measure_samples  # which imports torch

                options = {k: v for k, v in dataset_options.items() if k in ("columns", "storage_options")}
                num_samples = measure_samples(transform, lengths_of, catalog, target.path, options)
                show([f"measured {num_samples:,} of {catalog.num_samples:,} samples"])
            num_files, folder = _copy_lengths(catalog.fingerprint(), local_path(target.path))
            show([f"{num_files} of lengths, in {folder}" if num_files else _NO_LENGTHS])
        return catalog


def _brought_up(
    target: CatalogTarget, retrier: Retrier, executor: Executor | None, *, checksum: bool
) -> Catalog:
    """The catalog, made anew where it is none or stale, and saved."""
    catalog, stale = _saved(target, retrier)
    has_checksums = catalog is not None and catalog.checksums is not None
    if catalog is not None and not stale and (has_checksums or not checksum):
        show(["up to date: nothing changed since it was indexed"])
        return catalog
    more = [f"and {len(stale) - _NAMED:,} more"] if len(stale) > _NAMED else []
    show([Sentence(line, whole=True) for line in [*stale[:_NAMED], *more]])
    if catalog is None or stale:
        catalog = index(
            target.urls,
            target.codec,
            retrier,
            storage_options=target.storage_options,
            block_bytes=target.block_bytes,
            run=None if executor is None else partial(run_all, executor),
            listed=target.listed,
        )
    if checksum or has_checksums:
        catalog = catalog.with_checksums(checksums_of(catalog, target.storage_options, executor))
    save_catalog(catalog, target.path, target.storage_options, retrier)
    return catalog


def _target(
    source: Sequence[str],
    listing: Listing,
    asked: SourceArguments,
    places: Places,
    format_options: Mapping[str, Any],
    output: str | None,
    block_bytes: int | None,
) -> CatalogTarget:
    if listing.files is not None:
        raise ValueError(
            f"{identity_of(source[0])} means loose files, which are listed each time they are opened: "
            "nothing is to be indexed; ShardedDataset(..., catalog='x.catalog') keeps a catalog"
        )
    if listing.catalog is not None:
        if format_options or asked.format != "auto":
            raise ValueError(
                "a catalog knows its format: leave out --format, --dtype, --length and --allow-unfinished"
            )
        catalog = listing.catalog
        urls, codec = catalog.locations, catalog.codec()
        size, path = block_bytes or catalog.block_bytes, output or source[0]
    else:
        listing = with_codec(listing, asked, places, **format_options)
        assert isinstance(listing.format, Format)
        urls, codec = list(listing.urls), listing.format
        size = block_bytes or DEFAULT_BLOCK_BYTES
        path = output or default_catalog_path(urls, codec, size)
    return CatalogTarget(
        urls=urls,
        codec=codec,
        block_bytes=size,
        path=path,
        storage_options=places.options,
        listed=listing.facts,
    )


def _saved(target: CatalogTarget, retrier: Retrier) -> tuple[Catalog | None, list[str]]:
    """The catalog that is there, and what is stale about it."""
    if not SmallFiles(target.storage_options, retrier).exists(target.path):
        return None, []
    try:
        catalog = load_catalog(target.path, target.storage_options, retrier).signed_by(target.urls)
    except CorruptShardError as error:
        return None, [error.reason]
    return catalog, list(_stale(catalog, target, retrier))


def _stale(catalog: Catalog, target: CatalogTarget, retrier: Retrier) -> Iterator[str]:
    before = (catalog.format, dict(sorted(catalog.options.items())), catalog.block_bytes)
    now = (target.codec.name, dict(sorted(target.codec.options().items())), target.block_bytes)
    for name, old, new in zip(("format", "options", "block bytes"), before, now, strict=True):
        if old != new:
            yield f"{name}: was {old}, now {new}"
    urls = list(map(identity_of, target.urls))
    old_urls, new_urls = set(catalog.urls), set(urls)
    yield from (f"{file_name(url)}: new" for url in urls if url not in old_urls)
    lost = (url for url in catalog.urls if url not in new_urls)
    yield from (f"{file_name(url)}: no longer among the shards" for url in lost)
    if old_urls == new_urls and catalog.urls != urls:
        yield "the shards come in another order"
    with (
        retrier.pool(_CHECK_THREADS, "dataflow-index") as pool,
        checking(catalog.num_shards, pool.map) as shown_map,
    ):
        changed = changes(catalog, target.storage_options, shown_map, retry=retrier)
    yield from (f"{file_name(change.url)}: {change.what}" for change in changed if change.url in new_urls)


def checksums_of(
    catalog: Catalog,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> NDArray[np.uint32]:
    """[num_blocks] the CRC-32 of every block, by reading them all; some at a time are in memory.

    Bytes that the store sends wrong now are what later reads are held to: index where the data lies safe.
    """
    options, num_blocks = storage_options or {}, catalog.num_blocks
    with ProgressBar("reading for checksums", total=num_blocks, unit="block") as bar, ExitStack() as opened:
        if executor is None:
            blocks = map(catalog.block, range(num_blocks))
            each = opened.enter_context(_checksums(blocks, options))
        else:
            options = options_elsewhere(catalog.urls, options)
            tasks = ((_bare(catalog, numbers), options) for numbers in shared_out(range(num_blocks), _BLOCKS))
            results = opened.enter_context(closing(run_all(executor, _checksums_of_task, tasks)))
            each = (checksum for part in in_order(results) for checksum in part)
        return np.fromiter(bar.each(each), np.uint32, num_blocks)


@contextmanager
def _checksums(blocks: Iterable[Block], options: Mapping[str, Any]) -> Iterator[Iterator[int]]:
    """The CRC-32 of each of some blocks, as threads read them."""
    reader = StoreReader(options)

    def checksum(block: Block) -> int:
        return zlib.crc32(read_block(block, reader.read_into))

    with (
        ThreadPoolExecutor(_CHECKSUM_THREADS, thread_name_prefix="dataflow-index") as pool,
        closing(reader),
    ):
        yield pool.map(checksum, blocks)


def _checksums_of_task(task: tuple[list[Block], Mapping[str, Any]]) -> list[int]:
    """The CRC-32 of each block of a task, in a worker."""
    with _checksums(*task) as checksums:
        return list(checksums)


def _bare(catalog: Catalog, numbers: Iterable[int]) -> list[Block]:
    """Blocks as a worker needs them to read them whole."""
    return [replace(catalog.block(number), index=b"", footer=b"") for number in numbers]


def _parts(catalog: Catalog, path: str) -> Iterator[Part]:
    """Yield what a catalog holds, and where it lies."""
    stored = sum(catalog.rows.column("size").to_pylist())
    codec = catalog.codec() if catalog.format in FORMATS else None
    footers = catalog.rows.column("footer").to_pylist()
    passed_over = sum(map(codec.num_passed_over, footers)) if codec else 0
    block, sample = (bytes_text(stored / count) for count in (catalog.num_blocks, catalog.num_samples))
    facts = [
        ("format", catalog.format),
        ("version", str(catalog.options.get("version", ""))),
        ("shards", f"{catalog.num_shards:,}, {bytes_text(stored)}"),
        ("blocks", f"{catalog.num_blocks:,}, {block} each on average"),
        ("unfinished", unfinished_text(catalog) if catalog.unfinished else ""),
        ("checksums", "CRC-32 of each block" if catalog.checksums is not None else ""),
        ("samples", f"{catalog.num_samples:,}, {sample} each on average"),
        ("passed over", f"{passed_over:,} files: hidden, or without an extension" if passed_over else ""),
        *(
            ("column", f"{name}: {_spec_text(spec)}")
            for name, spec in catalog.schema.items()
            if name not in catalog.schema.conflicts
        ),
        *(
            ("conflict", f"{without_secrets(file_name(conflict.shard))}: {without_secrets(conflict.reason)}")
            for conflict in catalog.schema.conflicts.values()
        ),
    ]
    yield Table((), [(name, text) for name, text in facts if text])
    yield Sentence(f"saved    {without_secrets(path)}", whole=True)


def _spec_text(spec: ColumnSpec) -> str:
    parts = [spec_text(spec)]
    if spec.size_range is not None:
        low, high = spec.size_range
        parts.append(f"{low:,} long" if low == high else f"{low:,} to {high:,} long")
    if spec.optional:
        parts.append("not in every sample")
    return ", ".join(parts)


def _copy_lengths(catalog: str, catalog_path: str) -> tuple[int, str]:
    """Put the lengths that were measured of a catalog's samples beside it; how many files, and where.

    Raises `OSError` where that cannot be written.
    """
    folder, names = folder_beside(catalog_path), list[str]()
    with suppress(FileNotFoundError):
        names = [name for name in os.listdir(user_folder("lengths")) if name.startswith(f"{catalog}-")]
    names = [name for name in names if name.endswith(".npy")]
    for name in names:
        with open(os.path.join(user_folder("lengths"), name), "rb") as source:
            file = NewFile(os.path.join(folder, name), overwrite=True)
            file.write(source.read())
            file.commit()
    return len(names), folder
