"""Read what a URL says by itself, without asking any store.

A URL is a local path, `protocol://path`, or an fsspec chain `outer::inner::...`. In a chain, the first
part with a path of its own names the file: `a.tar` in `zip://a.tar::s3://b/x.zip`, `x.tar` in
`simplecache::s3://b/x.tar`. All but `url_to_fs` is text arithmetic, and imports no fsspec.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_BARE_PROTOCOL = re.compile(r"[a-z][a-z0-9+]*")
_STORES = frozenset(
    [
        "file",
        "local",
        "memory",
        "http",
        "https",
        "s3",
        "s3a",
        "hf",
        "gs",
        "gcs",
        "az",
        "abfs",
        "abfss",
        "adl",
        "oss",
        "ftp",
        "sftp",
        "ssh",
        "smb",
        "webdav",
        "webdavs",
    ]
)
"""Protocols that stand before no other in a chain: "::" behind them is part of a name."""
_QUERY_MARK = "?versionId="


def is_chain(url: str) -> bool:
    """Return whether the URL is an fsspec chain, and not one in whose name "::" stands."""
    outer, separator, _ = url.partition("::")
    protocol, colon, _ = outer.partition("://")
    return bool(separator) and (protocol not in _STORES if colon else bool(_BARE_PROTOCOL.fullmatch(outer)))


def naming_part(url: str) -> str:
    """The part of an fsspec chain that names the file; the URL itself where there is no chain."""
    if not is_chain(url):
        return url
    parts = url.split("::")
    for part in parts:
        _, separator, path = part.partition("://")
        if path if separator else not _BARE_PROTOCOL.fullmatch(part):
            return part
    return parts[-1]


def protocol_of(url: str) -> str:
    """Protocol of the part that names the file; "file" for a plain path."""
    protocol, separator, _ = naming_part(url).partition("://")
    return protocol if separator else "file"


def is_http(url: str) -> bool:
    """Return whether the file is named by an `http(s)://` address, which cannot be listed."""
    return protocol_of(url) in ("http", "https")


def is_local(url: str) -> bool:
    """Return whether the URL is a file of this machine, to be opened without fsspec."""
    if url[:1] == "/" and "://" not in url:  # nearly all are, and each read asks
        return True
    return not is_chain(url) and protocol_of(url) in ("file", "local")


def local_path(url: str) -> str:
    """Absolute path of a local URL; `~` is the home folder. `ValueError` where `is_local` is False."""
    if not is_local(url):
        raise ValueError(f"not a local path: {url!r}")
    return os.path.abspath(os.path.expanduser(url.partition("://")[2] if "://" in url else url))


def file_name(url: str) -> str:
    """Last path component of the file a URL names, without `?query`; the same wherever a copy lies."""
    part = _without_query(url)
    return (part.partition("://")[2] or part).rstrip("/").rpartition("/")[2]


def below(folder: str, name: str) -> str:
    """The URL of a file by its path below a folder."""
    part = naming_part(folder)
    return folder.replace(part, f"{part.rstrip('/')}/{name}", 1)


def is_glob(url: str) -> bool:
    """Return whether the URL holds glob signs, a query aside; a file or folder may be called so, too."""
    return has_glob_signs(_without_query(url))


def has_glob_signs(text: str) -> bool:
    """Return whether a part of a path holds glob characters."""
    return any(sign in text for sign in "*?[")


def _without_query(url: str) -> str:
    part = naming_part(url)
    # Elsewhere than in HTTP, "?" is a glob sign or part of a name, but for the one query of object stores.
    return re.split(r"[?#]", part, maxsplit=1)[0] if is_http(url) else part.partition(_QUERY_MARK)[0]


def leaves_folder(name: str) -> bool:
    """Return whether a path that a dataset's own file gives leads out of the folder of that file."""
    parts = name.split("/")
    return ".." in parts or "" in parts or any(sign in name for sign in ("\\", "::", ":/", "\0"))


def url_to_fs(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the filesystem of a URL, made with these keyword arguments, and the path in it.

    Any sign may stand in a name: fsspec takes every `::` for a chain, `is_chain` knows better.

    Raises what fsspec raises.
    """
    import fsspec.core  # only here: shards of this machine that are spelled out need none of it

    if "::" not in url or is_chain(url):
        fs, path = fsspec.core.url_to_fs(url, **options)
        return fs, str(path)
    protocol = protocol_of(url)
    said = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url)
    fs = fsspec.filesystem(protocol, **{**said, **options})
    return fs, str(fs._strip_protocol(url))
