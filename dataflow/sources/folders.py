"""List a folder: its files with sizes and versions, and the folders of splits.

Links are followed; hidden files and what systems leave behind are counted only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from sharding.catalog.build import CATALOG_SUFFIX
from sharding.catalog.storage import VERSION_KEYS, open_url, store_errors, version_of
from sharding.errors import ShardReadError
from sharding.urls import is_http, is_local, local_path

UNKNOWN = -1
"""The size of a file that a listing does not tell, as pages of HTTP servers do not."""
_NO_DATA = {"thumbs.db", "desktop.ini", "__macosx"}

Files = dict[str, tuple[int, str]]
"""By path below a folder, the size (`UNKNOWN`: to be asked for) and version of a file."""


class FolderListing(NamedTuple):
    """The contents of a folder."""

    files: Files
    folders: set[str]
    """The names of the folders that lie in it."""
    num_hidden: int
    """Hidden files and folders, which are left out."""


def listing(url: str, options: Mapping[str, Any] | None, *, depth: int | None = None) -> FolderListing:
    """The files below a folder, `depth` levels deep."""
    with store_errors(url):
        if is_local(url):
            return _local_listing(local_path(url), depth)
        fs, root = open_url(url, options)
        return _remote_listing(fs, root, depth)


def _local_listing(root: str, depth: int | None) -> FolderListing:
    files, folders, num_hidden = Files(), set[str](), 0
    status = os.stat(root)
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ((status.st_dev, status.st_ino),))]
    while waiting:
        path, above = waiting.pop()
        with os.scandir(os.path.join(root, path)) as entries:
            for entry in entries:
                name = f"{path}/{entry.name}" if path else entry.name
                if is_hidden(entry.name):
                    num_hidden += 1
                elif entry.is_dir():
                    if depth is not None and len(above) >= depth:
                        continue
                    status = entry.stat()
                    own = status.st_dev, status.st_ino
                    if own in above:
                        reason = "is a link to a folder that it lies in: take the link away"
                        raise ShardReadError(entry.path, reason)
                    waiting.append((name, (*above, own)))
                    folders.add(name.partition("/")[0])
                elif (facts := _facts(entry)) is None:
                    num_hidden += 1
                else:
                    files[name] = facts
    return FolderListing(files, folders, num_hidden)


def _facts(entry: os.DirEntry[str]) -> tuple[int, str] | None:
    """Size and version of a file; None: it is a pipe, a socket or a device, which nobody reads by name."""
    try:
        status = entry.stat()
    except FileNotFoundError as error:
        what = "is a link to a file that is not there" if entry.is_symlink() else "no such file any more"
        raise ShardReadError(entry.path, what) from error
    return (status.st_size, f"mtime:{status.st_mtime_ns}") if stat.S_ISREG(status.st_mode) else None


def _remote_listing(fs: Any, root: str, depth: int | None) -> FolderListing:
    files, num_hidden = Files(), 0
    start, is_page = root.rstrip("/") + "/", is_http(root)
    version, is_checked = version_of, False
    for path, info in fs.find(root, maxdepth=depth, detail=True).items():
        name = path.removeprefix(start)
        if info["type"] == "directory" or path.endswith("/") or not path.startswith(start):
            continue
        if is_page and ("?" in name or "#" in name):
            continue  # a link that sorts the page
        if any(map(is_hidden, name.split("/"))):
            num_hidden += 1
        elif info.get("size") is None:
            files[name] = UNKNOWN, ""
        else:
            alone = info if is_checked else fs.info(path)
            if alone is not info and any(info.get(key) != alone.get(key) for key in VERSION_KEYS):
                version = _no_version  # A read asks for its file alone, and would take it for another one.
            is_checked = True
            files[name] = int(info["size"]), version(info)
    return FolderListing(files, {name.partition("/")[0] for name in files if "/" in name}, num_hidden)


def _no_version(info: Mapping[str, Any]) -> str:
    return ""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is one that systems leave behind, and nobody's sample."""
    return name.startswith(".") or name.lower() in _NO_DATA or name.endswith(CATALOG_SUFFIX)
