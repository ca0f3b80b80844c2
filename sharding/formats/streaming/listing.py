"""The `index.json` of a dataset of Streaming (MDS) or LitData: its shards, and what it says of each.

Both libraries write one file of that name into the folder of the shards; its keys tell whose it is. So does
`datasets.save_to_disk` with `state.json`. Names are relative to that folder, and none may lead out of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from sharding.errors import CorruptShardError
from sharding.redaction import identity_of
from sharding.urls import leaves_folder

LISTING_NAME = "index.json"
LISTING_NAMES = (LISTING_NAME, "state.json")
_SPLIT_CURES = {
    "json": "read its files as JSON Lines: give a list of them and format='jsonl'",
    "csv": "read them with pandas, and write shards with dataflow.ShardWriter",
}


class IndexFile(Struct, frozen=True):
    """The contents of an `index.json`."""

    shards: Sequence[Sequence[str]]
    """For each shard the names that its file may have, the one that needs no decompression first."""
    entries: Mapping[str, Mapping[str, Any]]
    """By each of these names, what is said of the shard."""


def read_listing(raw: bytes, url: str) -> IndexFile | None:
    """Read an `index.json` or `state.json`; None: it is of none of these libraries.

    Raises:
        CorruptShardError: it contradicts itself, is of an unknown version, or names files outside its folder.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        if any(key in raw for key in (b'"shards"', b'"chunks"', b'"_data_files"')):
            raise _corrupt(
                url, f"is no JSON ({error}): copy it again from where the dataset was written"
            ) from error
        return None
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("shards"), list) and "version" in value:
        return _checked(_mds(value, url), url, "shards")
    if isinstance(value.get("chunks"), list) and isinstance(value.get("config"), dict):
        return _checked(_litdata(value, url), url, "chunks")
    if isinstance(files := value.get("_data_files"), list) and "_fingerprint" in value:
        names = [one.get("filename") if isinstance(one, dict) else one for one in files]
        shards = [_safe([name], number, url) for number, name in enumerate(names)]
        return _checked(IndexFile(shards, {name: {} for (name,) in shards}), url, "shards")
    return None


def _mds(value: Mapping[str, Any], url: str) -> IndexFile:
    shards: list[list[str]] = []
    entries: dict[str, Mapping[str, Any]] = {}
    for number, shard in enumerate(value["shards"]):
        if not isinstance(shard, dict):
            raise _corrupt(url, f"shard {number} is {shard!r}")
        version, kind = shard.get("version", value["version"]), shard.get("format")
        if version != 2:
            raise _corrupt(url, f"shard {number} is of version {version!r} of MDS; only version 2 is known")
        if kind != "mds":
            cure = _SPLIT_CURES.get(str(kind), _SPLIT_CURES["csv"])
            raise _corrupt(
                url, f"shard {number} is of Streaming's format {kind!r}, which is not read: {cure}"
            )
        names = [
            data.get("basename")
            for key in ("raw_data", "zip_data")
            if isinstance(data := shard.get(key), dict)
        ]
        shards.append(_safe(names, number, url))
        entries.update(dict.fromkeys(shards[-1], shard))
    return IndexFile(shards, entries)


def _litdata(value: Mapping[str, Any], url: str) -> IndexFile:
    shards: list[list[str]] = []
    entries: dict[str, Mapping[str, Any]] = {}
    for number, chunk in enumerate(value["chunks"]):
        if not isinstance(chunk, dict):
            raise _corrupt(url, f"chunk {number} is {chunk!r}")
        shards.append(_safe([chunk.get("filename")], number, url))
        entries[shards[-1][0]] = {"chunk": chunk, "config": value["config"]}
    return IndexFile(shards, entries)


def _safe(names: Sequence[Any], number: int, url: str) -> list[str]:
    """Names that stay in the folder; raises for others."""
    if not names:
        raise _corrupt(url, f"shard {number} has no file name")
    for name in names:
        if not isinstance(name, str) or not name:
            raise _corrupt(url, f"the file name of shard {number} is {name!r}")
        if leaves_folder(name):
            raise _corrupt(url, f"the file name of shard {number}, {name!r}, leads out of its folder")
    return list(names)


def _checked(listing: IndexFile, url: str, what: str) -> IndexFile:
    if not listing.shards:
        raise _corrupt(url, f"lists no {what}: the dataset is empty")
    if len(listing.entries) < sum(map(len, listing.shards)):
        raise _corrupt(url, f"lists one of its {what} twice")
    return listing


def _corrupt(url: str, reason: str) -> CorruptShardError:
    return CorruptShardError(identity_of(url), reason, stage="index")
