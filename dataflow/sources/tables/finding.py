"""Say whether a source is a table, and open it at a version."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dataflow.sources.listing.expand import DELTA_LOG, ICEBERG_METADATA, TableFolderError, expand, table_in
from dataflow.sources.tables.files import TableVersion
from prefetch.store.retrier import Retrier
from prefetch.store.small_files import SmallFiles
from sharding.blocks import Format
from sharding.errors import DataflowError, ShardReadError
from sharding.hub.names import is_hub
from sharding.redaction import identity_of
from sharding.urls import is_glob, is_local, local_path

_CATALOG = "iceberg://"
_ENDING = ".metadata.json"
KINDS = ("delta", "iceberg")
R = TypeVar("R")


def by_table(
    source: Any,
    use: Callable[[TableVersion], R],
    otherwise: Callable[[], R],
    options: Mapping[str, Any],
    retrier: Retrier,
    *,
    format: object = "auto",  # noqa: A002
    revision: str | int | None = None,
) -> R:
    """Return what `use` makes of a table, or `otherwise` of a source that is none.

    Whether a store's folder is a table, `otherwise` finds out, as it lists it: it raises `TableFolderError`.

    Raises:
        ImportError: the package that reads its log is not installed.
        ValueError: `format` says that it is one, and it is not; no such version.
        ShardReadError: it cannot be read, lacks files that it lists, or holds what is not read.
        DataflowError: it is empty.
    """
    one = source[0] if isinstance(source, (list, tuple)) and len(source) == 1 else source
    kind, url = _kind_of(one, format), one
    if kind is None:
        try:
            is_named = format == "auto" and isinstance(one, (str, os.PathLike)) and not is_hub(str(one))
            if is_named and revision is not None:  # of what is no table it is refused before that is listed
                retrier(lambda: expand(source, options), str(one), may_ask_nobody=True)
            return otherwise()
        except TableFolderError as found:
            if format not in ("auto", "parquet"):
                raise ValueError(f"{found}: leave format={format!r} out") from None
            kind, url = found.kind, found.url
    table = _open(kind, os.fspath(url), options, retrier, revision)
    if not table.files:
        raise DataflowError(f"{table.name} is empty: it has no files")
    try:
        return use(table)
    except ShardReadError as error:
        raise _explain_missing(error, table) from error


def _kind_of(one: object, format: object) -> str | None:  # noqa: A002
    """The kind of table that a text, or a look at a folder of this machine, says that a source is."""
    if format in KINDS:
        if not isinstance(one, (str, os.PathLike)):
            raise ValueError(f"format={format!r} takes one table, got {one!r}")
        return str(format)
    if format != "auto" or not isinstance(one, (str, os.PathLike)):
        return None
    text = os.fspath(one)
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


def _open(
    kind: str, url: str, options: Mapping[str, Any], retrier: Retrier, revision: str | int | None
) -> TableVersion:
    """A table of this kind at a version; None: the last one."""
    store = SmallFiles(options, retrier)
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


def _explain_missing(error: ShardReadError, table: TableVersion) -> ShardReadError:
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


def parted_by_folders(
    codec: Format, source: Any, urls: Sequence[str], types: Mapping[str, str] | None
) -> TableVersion | None:
    """Files with the columns that their folders are called by, `label=cat/`; None: there are none."""
    if not types and not any("=" in url for url in urls):
        return None
    from dataflow.sources.tables.hive import hive_table

    table = hive_table(source, urls, types)
    if table is None or codec.name == "parquet":
        return table
    warnings.warn(
        f"{identity_of(urls[0])} and others lie in folders called by values ({table.version}), which are "
        f"columns of Parquet files only: of {codec.name} they are not delivered",
        stacklevel=2,
    )
    return None
