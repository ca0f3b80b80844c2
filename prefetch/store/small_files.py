"""The small files that describe a dataset, read whole: from any store, asked again where it fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from prefetch.store.retrier import Retrier
from sharding.catalog.storage import exists, open_url, read_file, store_errors
from sharding.urls import is_local, local_path


class SmallFiles:
    """Reads small files. Thread-safe.

    Args:
        options: keyword arguments of the fsspec filesystem.
        retrier: asks again.
    """

    def __init__(self, options: Mapping[str, Any], retrier: Retrier) -> None:
        self._options, self.retrier = options, retrier

    def exists(self, url: str) -> bool:
        """Return whether a file is there."""
        return self.retrier(lambda: exists(url, self._options), url)

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
