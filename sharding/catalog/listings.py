"""Find the `index.json` of a dataset, and what it says of each shard.

A shard's is that of its folder, or of one above that holds shards of the dataset, too, as Streaming's
`merge_index` writes it. Each is read once. Its keys tell whose it is: `sharding.formats.ENTRIES` says what
reads it. The `state.json` of `datasets.save_to_disk` is one, too. Names are relative to that folder, and none
may lead out of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct

from sharding.catalog.storage import exists, read_file
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats import ENTRIES, LISTING_NAME, beside
from sharding.redaction import identity_of
from sharding.urls import file_name, is_local, leaves_folder, local_path, naming_part

LISTING_NAMES = (LISTING_NAME, "state.json")
_SAVED_KEYS = ("_data_files", "_fingerprint")
_KEYS_OF_SHARDS = (*(entry.index_keys[0] for entry in ENTRIES.values() if entry.index), _SAVED_KEYS[0])
_MOST_ABOVE = 8
"""Folders above that are looked into, at most."""


class IndexFile(Struct, frozen=True):
    """The contents of an `index.json`."""

    shards: Sequence[Sequence[str]]
    """For each shard the names that its file may have, the one that needs no decompression first."""
    entries: Mapping[str, Mapping[str, Any]]
    """By each of these names, what is said of the shard."""


def is_listing(url: str) -> bool:
    """Return whether a file is one that lists shards, by its name."""
    return file_name(url) in LISTING_NAMES


def load_listing(url: str, options: Mapping[str, Any] | None) -> IndexFile | None:
    """Read an `index.json` or `state.json`; None: it lists no shards of a format that is known.

    Raises:
        ShardReadError: it cannot be read.
        CorruptShardError: it contradicts itself, is of an unknown version, or names files outside its folder.
    """
    raw = read_file(url, options)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        if any(f'"{key}"'.encode() in raw for key in _KEYS_OF_SHARDS):
            raise _corrupt(
                url, f"is no JSON ({error}): copy it again from where the dataset was written"
            ) from error
        return None
    if not isinstance(value, dict):
        return None
    for entry in ENTRIES.values():
        if entry.index and _has(value, entry.index_keys):
            listed = resolve_name(entry.index)(value, url)
            return None if listed is None else _checked(listed, url, entry.index_keys[0])
    if not _has(value, _SAVED_KEYS):
        return None
    files = value[_SAVED_KEYS[0]]
    names = [file.get("filename") if isinstance(file, dict) else file for file in files]
    return _checked([([name], {}) for name in names], url, "shards")


def _has(value: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return isinstance(value.get(keys[0]), list) and keys[1] in value


def _checked(listed: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], url: str, what: str) -> IndexFile:
    """Return what was listed, with names that stay in the folder; raises for others."""
    if not listed:
        raise _corrupt(url, f"lists no {what}: the dataset is empty")
    for number, (names, _) in enumerate(listed):
        if not names:
            raise _corrupt(url, f"shard {number} has no file name")
        for name in names:
            if not isinstance(name, str) or not name:
                raise _corrupt(url, f"the file name of shard {number} is {name!r}")
            if leaves_folder(name):
                raise _corrupt(url, f"the file name of shard {number}, {name!r}, leads out of its folder")
    entries = {name: said for names, said in listed for name in names}
    if len(entries) < sum(len(names) for names, _ in listed):
        raise _corrupt(url, f"lists one of its {what} twice")
    return IndexFile([names for names, _ in listed], entries)


def _corrupt(url: str, reason: str) -> CorruptShardError:
    return CorruptShardError(identity_of(url), reason, stage="index")


def shards_listed(url: str, options: Mapping[str, Any] | None) -> list[str] | None:
    """The URLs of the shards that an `index.json` lists, in its order; None: see `load_listing`.

    Of a compressed shard that a local cache of Streaming keeps decompressed, too, it is the latter.
    """
    listing = load_listing(url, options)
    if listing is None:
        return None
    shards = []
    for names in listing.shards:
        urls = [beside(url, name) for name in names]
        there = [copy for copy in urls[:-1] if is_local(copy) and os.path.exists(local_path(copy))]
        shards.append((there or urls[-1:])[0])
    return [local_path(shard) for shard in shards] if is_local(url) else shards


def entries_of(urls: Sequence[str], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what lists of shards say of these, by URL; nothing of those that none lists.

    Raises `ShardReadError` where a store fails, and `CorruptShardError` for a list that is damaged.
    """
    known: dict[str, IndexFile | None] = {}
    entries: dict[str, Any] = {}
    common = common_folder(map(_folder, urls))
    for url in urls:
        folder, below = _folder(url), file_name(url)
        for _ in range(_MOST_ABOVE):
            listing_url = url.replace(_folder(url) + file_name(url), folder + LISTING_NAME, 1)
            if listing_url not in known:
                known[listing_url] = _if_there(listing_url, options)
            listing = known[listing_url]
            if listing is not None and below in listing.entries:
                entries[url] = listing.entries[below]
                break
            if len(folder) <= len(common):
                break
            above, _, name = folder[:-1].rpartition("/")
            folder, below = f"{above}/", f"{name}/{below}"
    return entries


def common_folder(folders: Iterable[str]) -> str:
    """The deepest folder that some folders, each with a "/" at its end, lie in, with the "/"; "": none."""
    prefix = os.path.commonprefix([*folders])  # noqa: RUF071 - cut behind a "/"
    return prefix[: prefix.rfind("/") + 1]


def _folder(url: str) -> str:
    """The folder of a file, with the last "/"; "": it has none."""
    part, name = naming_part(url), file_name(url)
    return part[: part.rindex(name)]


def _if_there(url: str, options: Mapping[str, Any] | None) -> IndexFile | None:
    try:
        return load_listing(url, options) if exists(url, options) else None
    except ShardReadError as error:
        if not error.reason.startswith(("permission denied", "no such file")):
            raise
        return None  # a store may not say what is not there
