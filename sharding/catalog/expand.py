"""From what a user types to the list of shards it means.

A source is a path, a URL, a brace pattern, a glob or a directory, or a list of those. Braces expand first,
as in bash (order kept, zero padding kept), then globs and directories are listed by the store and sorted.
The result has no duplicates, and local shards are absolute paths. What is spelled out is not looked up:
a thousand URLs of a brace pattern cost no request here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sharding.catalog.storage import open_url, store_errors
from sharding.errors import ShardReadError
from sharding.formats import has_suffix
from sharding.redaction import has_unquoted_password, hide_secrets, identity_of, without_secrets
from sharding.urls import file_name, is_glob, is_http, is_local, local_path, naming_part

_IPV6 = re.compile(r"://(?:[^/@]*@)?\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[^/\]]*)?\]")
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(
    source: Source,
    storage_options: Mapping[str, Any] | None = None,
    *,
    suffixes: Collection[str] | None = None,
) -> list[str]:
    """List the URLs of all shards a source stands for, in reading order, with passwords and signatures.

    Args:
        source: path or URL, brace pattern (`train-{0000..1023}.tar`), glob (`*`, `**`, `?`, `[...]`),
            directory, or a list or tuple of those, whose order is kept. fsspec chains (`::`) stay chains.
        storage_options: keyword arguments of the fsspec filesystem.
        suffixes: endings taken from a directory, e.g. (".tar",); None takes every known format's.
            Sub-directories and names that start with "." or "_" are left out.

    Raises:
        ValueError: not a source, unbalanced braces, a shard named twice, or a glob over HTTP.
        ShardReadError: nothing is there, or the store refuses to say.
    """
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(items, (list, tuple)) or not items:
        raise ValueError(
            f"source must be a path, a URL or a list of them, got {without_secrets(repr(source))}"
        )
    pieces = [piece for item in items for piece in _expand_braces(_text(item))]
    spelled_out = len(pieces) > 1
    urls: list[str] = []
    for piece in pieces:
        if spelled_out and has_suffix(piece) and not is_glob(piece):
            urls.append(_canonical(piece))
        else:
            urls += _look_up(piece, storage_options, suffixes)
    return _without_duplicates(urls)


def _text(item: object) -> str:
    text = os.fspath(item) if isinstance(item, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"a shard must be a path or a URL, got {item!r}")
    shown = without_secrets(text)
    if _IPV6.search(text):  # fsspec takes "::" for a chain, and brackets are a glob's
        raise ValueError(f"an IPv6 address in brackets cannot be read; give the host by its name: {shown!r}")
    if has_unquoted_password(text):
        rule = "a password in a URL has '/', '?' and '#' as %2F, %3F and %23 (urllib.parse.quote does it)"
        raise ValueError(f"{rule}; got another one for {shown!r}")
    return text


def _canonical(url: str) -> str:
    return local_path(url) if is_local(url) else url


def _expand_braces(pattern: str) -> list[str]:
    if "{" not in pattern or _is_literal(pattern):
        return [pattern]
    from braceexpand import braceexpand

    try:
        return list(braceexpand(pattern))
    except ValueError as error:
        hide_secrets(error)
        raise ValueError(f"unbalanced braces in {without_secrets(pattern)!r}") from error


def _is_literal(url: str) -> bool:
    """Whether a local file is really called that, pattern signs and all."""
    return is_local(url) and os.path.lexists(local_path(url))


def _look_up(url: str, options: Mapping[str, Any] | None, suffixes: Collection[str] | None) -> list[str]:
    if is_http(url):
        return [_http_file(url)]
    if is_glob(url) and not _is_literal(url):
        return _glob(url, options)
    fs, path = open_url(_canonical(url), options)
    with store_errors(url):
        is_directory = fs.info(path)["type"] == "directory"
    return _list_directory(url, fs, path, suffixes) if is_directory else [_canonical(url)]


def _http_file(url: str) -> str:
    if is_glob(url) or naming_part(url).endswith("/"):
        rule = (
            "HTTP servers cannot be listed: give a brace pattern such as 'train-{0000..0099}.tar', or a list"
        )
        raise ValueError(f"{rule}; got {identity_of(url)!r}")
    return url


def _glob(pattern: str, options: Mapping[str, Any] | None) -> list[str]:
    fs, path = open_url(_canonical(pattern), options)
    with store_errors(pattern):
        matches: dict[str, dict[str, Any]] = fs.glob(path, detail=True)
    files = sorted(name for name, info in matches.items() if info["type"] != "directory")
    if not file_name(pattern).startswith("."):
        files = [name for name in files if not file_name(name).startswith(".")]
    if not files:
        only = f"; it matches {len(matches)} directories" if matches else ""
        raise ShardReadError(pattern, f"no file matches this pattern{only}")
    return [_in_place_of(path, pattern, name, fs) for name in files]


def _list_directory(url: str, fs: Any, path: str, suffixes: Collection[str] | None) -> list[str]:
    with store_errors(url):
        entries = fs.ls(path, detail=True)
    files = sorted(entry["name"] for entry in entries if entry["type"] != "directory")
    shards = [name for name in files if _is_shard(file_name(name), suffixes)]
    if not shards:
        below = sum(entry["type"] == "directory" for entry in entries)
        cure = "; it has sub-directories: give a glob such as '<directory>/**/*.tar'" if below else ""
        raise ShardReadError(url, f"the directory holds no shards among its {len(files)} files{cure}")
    return [_in_place_of(path, url.rstrip("/"), name, fs) for name in shards]


def _is_shard(name: str, suffixes: Collection[str] | None) -> bool:
    return not name.startswith((".", "_")) and has_suffix(name, suffixes)


def _in_place_of(path: str, url: str, listed: str, fs: Any) -> str:
    """The URL of a path that the store listed, spelled as the user spelled the pattern or directory."""
    if is_local(url):
        return listed
    part = naming_part(url)
    # Host names and leading slashes are stripped differently by each filesystem: keep the user's.
    new = part.removesuffix(path) + listed if part.endswith(path) else fs.unstrip_protocol(listed)
    return url.replace(part, new, 1)


def _without_duplicates(urls: list[str]) -> list[str]:
    names: set[str] = set()
    for url in map(identity_of, urls):
        if url in names:
            raise ValueError(
                f"a shard may be given once only, got {url!r} twice; to repeat data, use a Mixture"
            )
        names.add(url)
    return urls
