"""Find the `index.json` of a dataset, and what it says of each shard.

A shard's is that of its folder, or of one above that holds shards of the dataset, too, as Streaming's
`merge_index` writes it. Each is read once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from sharding.catalog.storage import exists, read_file
from sharding.errors import ShardReadError
from sharding.formats import beside
from sharding.formats.streaming.listing import LISTING_NAME, LISTING_NAMES, IndexFile, read_listing
from sharding.urls import file_name, is_local, local_path, naming_part

_MOST_ABOVE = 8
"""Folders above that are looked into, at most."""


def is_listing(url: str) -> bool:
    """Return whether a file is one that lists shards, by its name."""
    return file_name(url) in LISTING_NAMES


def load_listing(url: str, options: Mapping[str, Any] | None) -> IndexFile | None:
    """Read an `index.json`; None: it is of neither library.

    Raises `ShardReadError` where it cannot be read, and `CorruptShardError` where it is damaged.
    """
    return read_listing(read_file(url, options), url)


def shards_listed(url: str, options: Mapping[str, Any] | None) -> list[str] | None:
    """The URLs of the shards that an `index.json` lists, in its order; None: it is of neither library.

    Of a compressed shard that a local cache of Streaming keeps decompressed, too, it is the latter.
    """
    listing = load_listing(url, options)
    if listing is None:
        return None
    shards = []
    for names in listing.shards:
        urls = [beside(url, name) for name in names]
        there = [one for one in urls[:-1] if is_local(one) and os.path.exists(local_path(one))]
        shards.append((there or urls[-1:])[0])
    return [local_path(one) for one in shards] if is_local(url) else shards


def entries_of(urls: Sequence[str], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what lists of shards say of these, by URL; nothing of those that none lists.

    Raises `ShardReadError` where a store fails, and `CorruptShardError` for a list that is damaged.
    """
    known: dict[str, IndexFile | None] = {}
    entries: dict[str, Any] = {}
    first, last = min(map(_folder, urls)), max(map(_folder, urls))
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    common = first[: first.rfind("/", 0, same) + 1]
    for url in urls:
        folder, below = _folder(url), file_name(url)
        for _ in range(_MOST_ABOVE):
            at = url.replace(_folder(url) + file_name(url), folder + LISTING_NAME, 1)
            if at not in known:
                known[at] = _if_there(at, options)
            listing = known[at]
            if listing is not None and below in listing.entries:
                entries[url] = listing.entries[below]
                break
            if len(folder) <= len(common):
                break
            above, _, name = folder[:-1].rpartition("/")
            folder, below = f"{above}/", f"{name}/{below}"
    return entries


def _folder(url: str) -> str:
    """The folder of a file, with the last "/"; "": it has none."""
    part, name = naming_part(url), file_name(url)
    return part[: part.rindex(name)]


def _if_there(url: str, options: Mapping[str, Any] | None) -> IndexFile | None:
    try:
        return load_listing(url, options) if exists(url, options) else None
    except ShardReadError as error:
        if error.reason.startswith(
            ("permission denied", "no such file")
        ):  # a store may not say what is not there
            return None
        raise
