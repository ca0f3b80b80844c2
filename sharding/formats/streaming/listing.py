"""Read what the `index.json` of a dataset of Streaming (MDS) or LitData says of its shards.

Both libraries write one file of that name into the folder of the shards. `sharding.catalog.listings` reads
it, tells by its keys whose it is, and holds to be well-formed what is found here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharding.errors import CorruptShardError
from sharding.redaction import identity_of

Listed = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
"""Names that the file of each shard may have, the one that needs no decompression first, and what is said
of it."""

LISTING_NAME = "index.json"
_SPLIT_CURES = {
    "json": "read its files as JSON Lines: give a list of them and format='jsonl'",
    "csv": "read them with pandas, and write shards with dataflow.ShardWriter",
}


def mds_shards(value: Mapping[str, Any], url: str) -> Listed:
    """The shards that Streaming lists. `CorruptShardError` for those of another version or format."""
    shards = list[tuple[list[Any], Mapping[str, Any]]]()
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
        files = (shard.get(key) for key in ("raw_data", "zip_data"))
        shards.append(([data.get("basename") for data in files if isinstance(data, dict)], shard))
    return shards


def litdata_chunks(value: Mapping[str, Any], url: str) -> Listed | None:
    """The chunks that LitData lists; None: it is no list of LitData's."""
    if not isinstance(value["config"], dict):
        return None
    for number, chunk in enumerate(value["chunks"]):
        if not isinstance(chunk, dict):
            raise _corrupt(url, f"chunk {number} is {chunk!r}")
    return [
        ([chunk.get("filename")], {"chunk": chunk, "config": value["config"]}) for chunk in value["chunks"]
    ]


def _corrupt(url: str, reason: str) -> CorruptShardError:
    return CorruptShardError(identity_of(url), reason, stage="index")
