"""The files that describe a table, read whole: from any store, asked again where it fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from msgspec import Struct

from prefetch.store.retrier import Retrier
from sharding.catalog.storage import open_url, read_file, store_errors
from sharding.errors import DataflowError
from sharding.redaction import identity_of
from sharding.urls import is_chain, is_http, is_local, local_path

if TYPE_CHECKING:
    from sharding.formats.tables.fitting import TableFile


class TableVersion(Struct, frozen=True, eq=False, kw_only=True):
    """A table as it was at one time."""

    format: str
    """"delta" or "iceberg"."""
    url: str
    version: str
    files: Mapping[str, TableFile]
    """By URL, in reading order."""

    def check_filled(self) -> None:
        """Raise `DataflowError` for a table without rows."""
        if not self.files:
            raise DataflowError(f"{self.name} is empty: it has no files")

    @property
    def name(self) -> str:
        """The table and its version, in words."""
        return name_of(self.format, self.url, self.version)


def name_of(format: str, url: str, version: str) -> str:  # noqa: A002
    """A table and its version, in words."""
    kind, what = {"delta": ("Delta", "version"), "iceberg": ("Iceberg", "snapshot")}[format]
    return f"{what} {version} of the {kind} table {identity_of(url)}"


class TableStore:
    """Reads small files of a table. Thread-safe.

    Args:
        options: keyword arguments of the fsspec filesystem.
        retrier: asks again.
    """

    def __init__(self, options: Mapping[str, Any], retrier: Retrier) -> None:
        self._options, self.retrier = options, retrier

    def read(self, url: str) -> bytes:
        """A file, whole. `ShardReadError` where it cannot be read."""
        return self.retrier(lambda: read_file(url, self._options), url)

    def names(self, folder: str) -> dict[str, Any]:
        """Names and facts of the files in a folder; none where it is not there."""
        return self.retrier(lambda: self._names(folder), folder)

    def _names(self, folder: str) -> dict[str, Any]:
        with store_errors(folder):
            fs, path = open_url(local_path(folder) if is_local(folder) else folder, self._options)
            fs.invalidate_cache()  # a table grows
            try:
                entries = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {
            os.path.basename(entry["name"].rstrip("/")): entry
            for entry in entries
            if entry["type"] != "directory"
        }


def below(folder: str, name: str) -> str:
    """The URL of a file by its path below a folder."""
    if is_local(folder):
        return os.path.join(local_path(folder), name)
    if is_http(folder):  # elsewhere, what a table calls a file is its key as it is
        name = quote(name)
    first, chained, rest = folder.partition("::") if is_chain(folder) else (folder, "", "")
    if chained and not first.partition("://")[2]:  # simplecache::s3://...
        return f"{first}::{rest.rstrip('/')}/{name}"
    return f"{first.rstrip('/')}/{name}{chained}{rest}"
