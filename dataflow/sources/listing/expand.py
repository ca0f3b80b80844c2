"""List the shards that a user's text means.

A source is a path, a URL, a brace pattern, a glob, a directory or an `index.json`, or a list of those. Braces
expand first, as in bash (order kept, zero padding kept), then globs and directories are listed by the store
and sorted; of MDS and LitData, the `index.json` in a directory lists it. The result has no duplicates, and
local shards are absolute paths. What is spelled out is not looked up at a remote store: a thousand URLs of a
brace pattern cost no request here. Where one of them turns out to be a folder, or not to be there,
`looked_again` (`claims`) lists again.

A name that exists means what is called so, whatever signs are in it; and a glob below folders that exist by
their names is one below these.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from dataflow.sources.listing.places import Entries, entries_of
from dataflow.sources.listing.shards import check_one_split, check_sets, shards_in
from sharding.catalog.listings import is_listing, shards_listed
from sharding.catalog.storage import open_url, store_errors
from sharding.errors import ShardReadError
from sharding.formats import has_suffix, may_be_empty
from sharding.redaction import has_unquoted_password, hide_secrets, identity_of, without_secrets
from sharding.urls import (
    file_name,
    has_glob_signs,
    is_glob,
    is_http,
    is_local,
    local_path,
    naming_part,
)

_IPV6 = re.compile(r"://(?:[^/@]*@)?\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[^/\]]*)?\]")
DELTA_LOG, ICEBERG_METADATA = "_delta_log", "metadata"
"""Folders that tables keep their logs in."""
LooksUp = Literal["", "patterns", "folders"]
BlockSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(
    source: BlockSource,
    storage_options: Mapping[str, Any] | None = None,
    *,
    format: str = "auto",  # noqa: A002
    looks_up: LooksUp = "",
    known: Mapping[str, Any] | None = None,
) -> list[str]:
    """List the URLs of all shards a source stands for, in reading order, with passwords and signatures.

    Args:
        source: path or URL, brace pattern (`train-{0000..1023}.tar`), glob (`*`, `**`, `?`, `[...]`),
            directory, or a list or tuple of those, whose order is kept. fsspec chains (`::`) stay chains.
        storage_options: keyword arguments of the fsspec filesystem.
        format: name of the format whose files are taken from a directory, or of any; see `shards_in`.
            Sub-directories, names that start with "." or "_", and empty files of text beside others are
            left out. What `index.json` or the `state.json` of `datasets` lists is taken as it says.
        looks_up: what is asked of a remote store although it is spelled out: "patterns", whether those with
            braces are names; "folders", whether other names are of folders, too.
        known: by URL, what is known to lie in folders, as fsspec lists it.

    Raises:
        ValueError: not a source, unbalanced braces, a shard named twice, a glob over HTTP, or a directory
            of several splits.
        ShardReadError: nothing is there, a set of shards is not whole, or the store refuses to say.
    """
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(items, (list, tuple)) or not items:
        raise ValueError(
            f"source must be a path, a URL or a list of them, got {without_secrets(repr(source))}"
        )
    texts = [checked_text(item) for item in items]
    pieces = list[str]()
    for text in texts:
        pieces += _expand_braces(text, storage_options, looks_up=bool(looks_up)) if "{" in text else [text]
    urls: list[str] = []
    for piece in pieces:
        is_name = len(pieces) > 1 and has_suffix(piece) and not is_glob(piece) and not piece.endswith("/")
        if is_name and not (os.path.isdir(local_path(piece)) if is_local(piece) else looks_up == "folders"):
            urls.append(_canonical(piece))
            continue
        urls += _look_up(piece, storage_options, format, known or {}, is_alone=len(pieces) == 1)
    for url, count in Counter(map(identity_of, urls)).items():
        if count > 1:
            raise ValueError(f"a shard may be given once only, got {url!r} twice; a Mixture repeats data")
        if not url.isascii() and url != url.encode(errors="replace").decode():
            raise ValueError(f"{url!r} has a name that is not UTF-8: rename the file")
    return urls


def checked_text(item: object) -> str:
    """A text that names files. `ValueError` for what is none, or cannot be read."""
    text = os.fspath(item) if isinstance(item, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"a shard must be a path or a URL, got {item!r}")
    if "::" in text and "://" not in text and os.path.lexists(text.partition("/")[0]):
        return os.path.abspath(text)  # a relative path, whose name would be a chain's
    if _IPV6.search(text):  # fsspec takes "::" for a chain, and brackets are a glob's
        rule = "an IPv6 address in brackets cannot be read; give the host by its name"
        raise ValueError(f"{rule}: {without_secrets(text)!r}")
    if has_unquoted_password(text):
        rule = "a password in a URL has '/', '?' and '#' as %2F, %3F and %23 (urllib.parse.quote does it)"
        raise ValueError(f"{rule}; got another one for {without_secrets(text)!r}")
    return text


def _canonical(url: str) -> str:
    return local_path(url) if is_local(url) else url


def braced(text: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """The texts that braces in one stand for; a name that exists is not taken apart."""
    return (
        _expand_braces(checked_text(text), options, looks_up=False) if "{" in text else [checked_text(text)]
    )


def _expand_braces(pattern: str, options: Mapping[str, Any] | None, *, looks_up: bool) -> list[str]:
    asks = looks_up or is_local(pattern)
    if asks and _exists(pattern, options):
        return [pattern]
    from braceexpand import braceexpand

    folder = _braced_folder(pattern, options) if asks else ""
    try:
        return [folder + name for name in braceexpand(pattern.removeprefix(folder))]
    except ValueError as error:
        if not asks:
            with suppress(Exception):  # there is an error to raise already
                return _expand_braces(pattern, options, looks_up=True)
        hide_secrets(error)
        raise ValueError(f"unbalanced braces in {without_secrets(pattern)!r}") from error


def _braced_folder(pattern: str, options: Mapping[str, Any] | None) -> str:
    """The leading part of a pattern that is a folder with braces in its name; "": there is none."""
    end = len(pattern)
    while (end := pattern.rfind("/", 0, end)) > 0 and "{" in pattern[:end]:
        if _exists(pattern[:end], options):
            return pattern[: end + 1]
    return ""


def _exists(url: str, options: Mapping[str, Any] | None) -> bool:
    """Return whether something is really called that, pattern signs and all. One remote request."""
    if is_local(url):
        return os.path.lexists(local_path(url))
    if is_http(url):
        with suppress(Exception):  # the error says that HTTP knows no patterns
            fs, path = open_url(url, options)
            return bool(fs.info(path))
        return False
    fs, path = open_url(url, options)
    with store_errors(url), suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        return bool(fs.info(path))
    return False


def _look_up(
    url: str, options: Mapping[str, Any] | None, kind: str, known: Mapping[str, Any], *, is_alone: bool
) -> list[str]:
    if is_listing(url) and not is_glob(url):
        return shards_listed(_canonical(url), options) or [_canonical(url)]
    if is_http(url):
        return [_http_file(url, options)]
    if is_glob(url) and not _exists(url, options):
        return _glob(url, options, kind)
    is_file = is_local(url) and os.path.isfile(_canonical(url))
    entries = None if is_file or url in known else entries_of(url, options)
    if (entries := known.get(url, entries)) is None:
        return [_canonical(url)]
    return _list_directory(url, entries, kind, options, is_alone=is_alone)


def _http_file(url: str, options: Mapping[str, Any] | None) -> str:
    if naming_part(url).endswith("/") or (is_glob(url) and not _exists(url, options)):
        rule = (
            "HTTP servers cannot be listed: give a brace pattern such as 'train-{0000..0099}.tar', a list, "
            "or the index.json of MDS or LitData"
        )
        raise ValueError(f"{rule}; got {identity_of(url)!r}")
    return url


def _glob(pattern: str, options: Mapping[str, Any] | None, kind: str) -> list[str]:
    fs, path = open_url(_canonical(pattern), options)
    with store_errors(pattern):
        known = len(re.split(r"[*?\[]", path)[0].rpartition("/")[0])
        matches = {n: info for n, info in _matches(fs, path).items() if not _is_hidden(n, path, known)}
        files = _files(matches.values())
        for name, info in matches.items():  # Spark calls folders `x.parquet`
            if info["type"] == "directory" and has_suffix(name):
                entries = fs.ls(name, detail=True)
                if any(file_name(entry["name"]) == DELTA_LOG for entry in entries):
                    reason = "is a delta table, whose log says which of its files count: give this folder"
                    raise ShardReadError(name, f"{reason}, not a pattern")
                files |= _files(entries, folder=name, kind=kind)
    if not files:
        only = f"; it matches {len(matches)} directories" if matches else ""
        raise ShardReadError(pattern, f"no file matches this pattern{only}")
    return [_in_place_of(path, pattern, name, fs) for name in sorted(files)]


def _is_hidden(path: str, pattern: str, known: int) -> bool:
    """Return whether a path is hidden, and no part of the pattern says so; `known` signs are in both."""
    is_hidden_file = file_name(path).startswith(".") and not file_name(pattern).startswith(".")
    return is_hidden_file or ("/." in f"/{path}"[known:] and "/." not in f"/{pattern}"[known:])


def _matches(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """Return what matches a pattern below the folders that exist by their names: path -> its facts."""
    parts = path.split("/")
    first = end = next(i for i, part in enumerate(parts) if has_glob_signs(part))
    while end < len(parts) - 1 and (not has_glob_signs(parts[end]) or fs.isdir("/".join(parts[: end + 1]))):
        end += 1
    folder, pattern = "/".join(parts[:end]), "/".join(parts[end:])
    if end == first or not has_glob_signs(pattern):
        matches: dict[str, dict[str, Any]] = fs.glob(path, detail=True)
        return matches
    from fsspec.utils import glob_translate

    depth = None if "**" in pattern else pattern.count("/") + 1
    is_match = re.compile(glob_translate(pattern)).match
    entries, start = fs.find(folder, maxdepth=depth, withdirs=True, detail=True), folder.rstrip("/") + "/"
    return {
        name: info
        for name, info in entries.items()
        if name.startswith(start) and is_match(name.rstrip("/").removeprefix(start))
    }


def _list_directory(
    url: str, entries: Entries, format_name: str, options: Mapping[str, Any] | None, *, is_alone: bool
) -> list[str]:
    fs, path = open_url(_canonical(url), options)
    for name in sorted(entry["name"] for entry in entries if is_listing(entry["name"])):
        listed = shards_listed(_in_place_of(path, url.rstrip("/"), name, fs), options)
        if listed is not None:
            return listed
    folders = [file_name(entry["name"]) for entry in entries if entry["type"] == "directory"]
    if DELTA_LOG in folders:  # of files that the log removed, some are still there
        raise ValueError(
            f"{identity_of(url)} is a Delta table, whose log says which of its files count: open each table "
            "by itself, and mix them by a Mixture"
        )
    shards = _files(entries, folder=path, kind=format_name)
    if not shards:
        from sharding.formats.unsupported import unsupported_text

        names = [entry["name"] for entry in entries if entry["type"] != "directory"]
        if unsupported := unsupported_text(names or [url.rstrip("/")]):
            raise ShardReadError(url, unsupported)
        cure = "; it has sub-directories: give a glob such as '<directory>/**/*.tar'" if folders else ""
        cure += "; if it is an Iceberg table, open it by itself" if ICEBERG_METADATA in folders else ""
        num = len(entries) - len(folders)
        raise ShardReadError(url, f"the directory holds no shards among its {num} files{cure}")
    urls = [_in_place_of(path, url.rstrip("/"), name, fs) for name in sorted(shards)]
    names, where = list(map(file_name, urls)), identity_of(url.rstrip("/"))
    if is_alone:
        check_one_split(names, where)
    check_sets(names, where)
    if values := [name for name in folders if "=" in name]:
        what = f"what lies in folders such as {min(values)!r} is left out, as {names[0]!r} lies beside"
        warnings.warn(f"{where}: {what}. To read all, give '{where}/**/*.*'", stacklevel=2)
    return urls


def _files(
    entries: Iterable[Mapping[str, Any]], *, folder: str | None = None, kind: str = "auto"
) -> set[str]:
    """The files of a listing, by path; of a folder, its shards.

    An empty object that stands for a folder is none, and empty files of text hold no samples.
    """
    entries = list(entries)
    folders = {entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"}
    sizes = {
        entry["name"]: entry.get("size")
        for entry in entries
        if entry["type"] != "directory" and entry["name"].rstrip("/") not in {*folders, folder}
    }
    if folder is not None:
        paths = {file_name(path): path for path in sizes}
        sizes = {paths[name]: sizes[paths[name]] for name in shards_in(paths, kind)}
    filled = {name for name, size in sizes.items() if not may_be_empty(name) or _size(name, size) != 0}
    return filled or set(sizes)


def _size(path: str, size: int | None) -> int | None:
    """The bytes of a file; of one of this machine whose listing has no sizes, it is asked for."""
    return os.stat(path).st_size if size is None and os.path.exists(path) else size


def _in_place_of(path: str, url: str, listed: str, fs: Any) -> str:
    """The URL of a path that the store listed, spelled as the user spelled the pattern or directory."""
    if is_local(url):
        return listed
    part = naming_part(url)
    # Host names and leading slashes are stripped differently by each filesystem: keep the user's.
    new = part.removesuffix(path) + listed if part.endswith(path) else fs.unstrip_protocol(listed)
    return url.replace(part, new, 1)
