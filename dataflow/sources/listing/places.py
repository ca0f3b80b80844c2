"""Look into folders of this machine and of stores: each is listed once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from prefetch.store.retrier import Retrier
from prefetch.store.small_files import SmallFiles
from sharding.catalog.storage import open_url, store_errors
from sharding.errors import ShardReadError
from sharding.urls import file_name, is_glob, is_http, is_local, local_path

Entries = list[dict[str, Any]]
"""Files and folders as fsspec lists them: "name" (the path), "type" and "size" (None: not told)."""


class Places:
    """Looks into folders, and remembers what it saw.

    Args:
        options: keyword arguments of the fsspec filesystem.
        retrier: asks again where a store fails.
    """

    def __init__(self, options: Mapping[str, Any], retrier: Retrier) -> None:
        self.options, self.retrier = options, retrier
        self.files = SmallFiles(options, retrier)
        self.known: dict[str, Entries | None] = {}
        """By URL, what lies in folders that were listed; None: it is a file of a store."""

    def folder(self, url: str) -> Entries | None:
        """The files and folders in a folder; None: it is no folder, or none that can be listed."""
        if url in self.known:
            return self.known[url]
        if is_local(url):
            if os.path.isdir(local_path(url)):
                self.known[url] = _entries_here(local_path(url))
        elif not (is_http(url) or is_glob(url) or "{" in url):
            with suppress(ShardReadError):  # whoever reads it says what is wrong
                self.known[url] = self.retrier(
                    lambda: entries_of(url, self.options), url, may_ask_nobody=True
                )
        return self.known.get(url)

    def names(self, url: str, kind: str = "file") -> list[str]:
        """The names of the files, or folders, in a folder; none where it is no folder."""
        is_folder = kind == "directory"
        return [
            file_name(entry["name"])
            for entry in self.folder(url) or ()
            if (entry["type"] == "directory") == is_folder
        ]


def _entries_here(path: str) -> Entries:
    with store_errors(path), os.scandir(path) as entries:
        return [
            {"name": entry.path, "type": "directory" if entry.is_dir() else "file", "size": None}
            for entry in entries
        ]


def entries_of(url: str, options: Mapping[str, Any] | None) -> Entries | None:
    """List a folder of a store; None: it is a file. An empty object may stand for a folder."""
    fs, path = open_url(local_path(url) if is_local(url) else url, options)
    with store_errors(url):
        info = fs.info(path)
        if info["type"] != "directory" and info["size"]:
            return None
        entries: Entries = fs.ls(path, detail=True)
    start = path.rstrip("/") + "/"
    is_folder = info["type"] == "directory" or any(entry["name"].startswith(start) for entry in entries)
    return entries if is_folder else None
