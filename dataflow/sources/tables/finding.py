"""Say whether a source is a table, and open it at a version."""

from __future__ import annotations

import os

from dataflow.sources.listing.claims import Listing, SourceArguments, Spec
from dataflow.sources.listing.expand import ICEBERG_METADATA
from dataflow.sources.listing.places import Places
from dataflow.sources.listing.shards import shards_in
from dataflow.sources.tables.files import TableVersion, below
from prefetch.store.small_files import SmallFiles
from sharding.errors import DataflowError
from sharding.redaction import identity_of
from sharding.urls import is_glob, is_local, local_path

_CATALOG = "iceberg://"
_ENDING = ".metadata.json"


def claim_delta(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """The files of a Delta table at a version.

    Raises:
        ImportError: the package that reads its log is not installed.
        ValueError: `format` says that it is one, and it is not; no such version.
        ShardReadError: it cannot be read, lacks files that it lists, or holds what is not read.
        DataflowError: it is empty.
    """
    return _claimed("delta", spec, asked, places)


def claim_iceberg(spec: Spec, asked: SourceArguments, places: Places) -> Listing | None:
    """The files of an Iceberg table at a snapshot; None: it is none. Raises what `claim_delta` raises."""
    if spec.kind == "folder" and asked.format != "iceberg":
        names = places.names(below(spec.text.rstrip("/"), ICEBERG_METADATA))
        is_plain = asked.format == "parquet" and shards_in(places.names(spec.text))
        if is_plain or not any(name.endswith(_ENDING) for name in names):
            return None
    return _claimed("iceberg", spec, asked, places)


def _claimed(kind: str, spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    if len(spec.texts) != 1:
        raise ValueError(f"format={kind!r} takes one table, got {spec.source!r}")
    if asked.format_name not in ("auto", "parquet", kind):
        raise ValueError(
            f"{identity_of(spec.text)} is a {kind} table, whose log says which of its files count: leave "
            f"format={asked.format_name!r} out"
        )
    table = _open(kind, spec.text, places.files, asked.revision)
    if not table.files:
        raise DataflowError(f"{table.name} is empty: it has no files")
    if (asked.config, asked.split) != (None, None):
        raise ValueError(f"config= and split= are not for tables, got them for {table.name}")
    return asked.listing(list(table.files), format=table.codec, facts=table.files, table=table.name)


def _open(kind: str, url: str, store: SmallFiles, revision: str | int | None) -> TableVersion:
    """A table of this kind at a version; None: the last one."""
    if is_local(url) and not url.startswith(_CATALOG):
        url = local_path(url)
    if is_glob(url) and not (is_local(url) and os.path.exists(url)):
        raise ValueError(f"a table is one folder, got the pattern {url!r}")
    if kind == "delta":
        from dataflow.sources.tables.delta import open_delta

        return open_delta(url.rstrip("/"), store, revision)
    try:
        import pyiceberg  # noqa: F401 - the module below is made of its classes
    except ImportError as error:
        raise ImportError(
            f"{identity_of(url)}: reading Iceberg tables needs another package: "
            "pip install 'dataflow-loader[iceberg]'"
        ) from error
    from dataflow.sources.tables.iceberg import open_iceberg

    return open_iceberg(url.rstrip("/"), store, revision)
