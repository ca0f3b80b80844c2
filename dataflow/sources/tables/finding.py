"""Say whether a source is a table, and open it at a version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dataflow.sources.tables.files import TableStore, TableVersion
from prefetch.store.retrier import Retrier
from sharding.catalog.expand import DELTA_LOG, ICEBERG_METADATA, TableFolderError, expand, table_in
from sharding.errors import ShardReadError
from sharding.hub.names import is_hub
from sharding.redaction import identity_of
from sharding.urls import is_glob, is_local, local_path

_CATALOG = "iceberg://"
_ENDING = ".metadata.json"
KINDS = ("delta", "iceberg")


def find_table(
    source: Any,
    options: Mapping[str, Any],
    retrier: Retrier,
    *,
    format: object = "auto",  # noqa: A002
    revision: str | int | None = None,
) -> TableVersion | None:
    """The table that a source means, as its text or a look at this machine's folders tells; else None.

    A store's folder is looked at where a `revision` is given; else, `expand` tells that it is a table.

    Raises:
        ImportError: the package that reads its log is not installed.
        ValueError: `format` says that it is one, and it is not; no such version.
        ShardReadError: it cannot be read, or holds what is not read.
    """
    kind = _kind_of(source, format)
    text = source[0] if isinstance(source, (list, tuple)) and len(source) == 1 else source
    if kind is None:
        named = isinstance(text, (str, os.PathLike)) and not is_hub(str(text)) and format == "auto"
        if revision is None or not named:
            return None
        try:  # A revision of what is no table is refused anyhow.
            retrier(lambda: expand(source, options), str(text), may_ask_nobody=True)
        except TableFolderError as found:
            return open_table(found.kind, found.url, options, retrier, revision=revision)
        return None
    return open_table(kind, os.fspath(text), options, retrier, revision=revision)


def _kind_of(source: Any, format: object) -> str | None:  # noqa: A002
    items = source if isinstance(source, (list, tuple)) else [source]
    if format in KINDS:
        if len(items) != 1 or not isinstance(items[0], (str, os.PathLike)):
            raise ValueError(f"format={format!r} takes one table, got {source!r}")
        return str(format)
    if format != "auto" or len(items) != 1 or not isinstance(items[0], (str, os.PathLike)):
        return None
    text = os.fspath(items[0])
    if not isinstance(text, str) or is_hub(text):
        return None
    if text.startswith(_CATALOG) or text.endswith(_ENDING):
        return "iceberg"
    if is_local(text) and os.path.isdir(path := local_path(text)):
        inner = [name for name in (DELTA_LOG, ICEBERG_METADATA) if os.path.isdir(os.path.join(path, name))]
        if inner == [ICEBERG_METADATA] and not any(
            name.endswith(_ENDING) for name in os.listdir(os.path.join(path, ICEBERG_METADATA))
        ):
            return None
        return table_in(inner)
    return None


def open_table(
    kind: str,
    url: str,
    options: Mapping[str, Any],
    retrier: Retrier,
    *,
    revision: str | int | None = None,
) -> TableVersion:
    """A table of this kind at a version; None: the last one. Raises what `find_table` raises."""
    store = TableStore(options, retrier)
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


def explain_missing(error: ShardReadError, table: TableVersion) -> ShardReadError:
    """The error of a file that a table lists and that is not there, with what may have taken it away."""
    if not error.reason.startswith("no such file"):
        return error
    other = ShardReadError(
        error.shard,
        f"no such file, which {table.name} lists: vacuum, expire_snapshots or somebody removed it. Open a "
        "later version, or restore the file",
    )
    for note in getattr(error, "__notes__", ()):
        other.add_note(note)
    return other
