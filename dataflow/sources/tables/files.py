"""A table at a version: which files it has, and what it says of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import Struct

from sharding.blocks import Format
from sharding.formats import resolve_format
from sharding.redaction import identity_of
from sharding.urls import below as url_below, is_http

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

    @property
    def codec(self) -> Format:
        """The format of its files, at this version."""
        return resolve_format(self.format, (), version=self.version)

    @property
    def name(self) -> str:
        """The table and its version, in words."""
        return name_of(self.format, self.url, self.version)


def name_of(format: str, url: str, version: str) -> str:  # noqa: A002
    """A table and its version, in words."""
    kind, what = {"delta": ("Delta", "version"), "iceberg": ("Iceberg", "snapshot")}[format]
    return f"{what} {version} of the {kind} table {identity_of(url)}"


def below(folder: str, name: str) -> str:
    """The URL of a file by its path below a folder."""
    # Elsewhere, what a table calls a file is its key as it is.
    return url_below(folder, quote(name) if is_http(folder) else name)
