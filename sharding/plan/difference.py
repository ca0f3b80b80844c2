"""Name what differs between a state and the loader that it is loaded into: one cause, with both values.

A state keeps a fingerprint, which decides, and a few facts, which say why: the first that differs is named,
from what explains most (the format, its options) to what explains least (how shards are cut up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from sharding.catalog.table import Catalog

Facts = Mapping[str, Any]
"""Text and numbers by name, in the order in which they explain."""
SOURCES = "sources"
"""The fact of a mixture: samples and digest of each source, "47:1a2b3c 20:4d5e6f", for a state's size."""
TRANSFORMS, _MOST_CHARACTERS = "transform", 40
_NO_CAUSE = ("first_sample", "units_before", TRANSFORMS)
"""Facts that tell a position, or how batches are made again, and not which samples are theirs."""
_PHRASES = {
    "blocks": "shards cut into blocks {}",
    "bytes": "shards of {:,} bytes",
    "costs": "costs of samples {}",
    "data": "a {}",
    "joins": "joined data {}",
    "kind": "batching of kind {}",
    "lengths": "lengths of samples {}",
    "names": "shards of names {}",
    "num_sources": "{:,} sources with a share",
    "run_length": "run_length={}",
    "samples": "{:,} samples",
    "shards": "{:,} shards",
    "view": "a view of samples {}",
}
"""The words for facts whose names are no setting's; the others are shown as `name=value`."""
_CURES = {
    "balanced": "balanced() by the labels and weights that it had, or none",
    "blocks": "the block_bytes= (or catalog) that it had",
    "bytes": "the shards that it had, as they were",
    "joins": "the join that it had, or none",
    "kind": "the batching= that it had",
    "names": "the shards that it had",
    "num_sources": "the sources that it had (a new one comes last, with weight 0, until set_weights)",
    "shards": "the shards that it had",
    "view": "the part of the shards that it had, or the whole",
    "weights": "the weights that it had, which set_weights of the mixture changes at any batch",
}


@dataclass(frozen=True)
class Difference:
    """One fact in which a state and a loader differ."""

    there: str
    """The value that the state was taken with."""
    here: str
    """The value that the loader has."""
    cure: str
    """The change that the loader needs for the state to mean what it says."""

    def __str__(self) -> str:
        return f"the state was taken with {self.there}, and this loader has {self.here}"


def facts_of_catalog(catalog: Catalog) -> dict[str, Any]:
    """The facts of the shards of a dataset."""
    blocks, urls = catalog.blocks, catalog.urls
    geometry = [array.astype("<i8").tobytes() for array in (blocks.offset, blocks.length, blocks.num_samples)]
    return {
        "format": catalog.format,
        **{name: bounded(value) for name, value in catalog.options.items()},
        "shards": len(urls),
        "names": short_digest(" ".join(url.rpartition("/")[2] for url in urls)),
        "bytes": int(np.sum(catalog.rows.column("size").to_numpy())),
        "samples": int(np.sum(blocks.num_samples)),
        "blocks": f"{len(blocks.length):,} ({short_digest(b''.join(geometry))})",
    }


def short_digest(data: str | bytes, num_bytes: int = 4) -> str:
    """Two hex digits a byte."""
    return blake2b(data.encode() if isinstance(data, str) else data, digest_size=num_bytes).hexdigest()


def bounded(value: str | int) -> str | int:
    """A value that a message shows, or a digest of it where it is long."""
    return value if len(str(value)) <= _MOST_CHARACTERS else short_digest(str(value))


def differing(there: Facts | None, here: Facts | None) -> Difference | None:
    """The first difference between what a state and a loader say of data, or of batching; None: none shows.

    A state's batching is None where batches are of samples, its data where it is of an older release.
    """
    there, here = there or {}, here or {}
    for name in [*there, *(name for name in here if name not in there)]:
        fact, other = there.get(name), here.get(name)
        if fact == other or name in _NO_CAUSE:
            continue
        if name == SOURCES and fact and other:  # a mixture may have more, which have no share
            pairs = enumerate(zip(fact.split(), other.split(), strict=False))
            number, pair = next((pair for pair in pairs if pair[1][0] != pair[1][1]), (0, None))
            if pair is None:
                continue
            what = [f"a source {number} of {mark.replace(':', ' samples (')})" for mark in pair]
            return Difference(what[0], what[1], f"the source {number} that it had")
        said = _phrase(name, fact)
        return Difference(said, _phrase(name, other), _CURES.get(name, said))
    return None


def _phrase(name: str, value: Any) -> str:
    if value is None and name in _PHRASES:
        return "batching=None" if name == "kind" else f"no {name}"
    return _PHRASES[name].format(value) if name in _PHRASES else f"{name}={value!r}"


def are_facts(value: object) -> bool:
    """Return whether a value of a state is such facts."""
    if not isinstance(value, Mapping):
        return False
    numbers = (value.get(name, 0) for name in ("bytes", "num_sources", "samples", "shards"))
    return isinstance(value.get(SOURCES, ""), str) and all(type(number) is int for number in numbers)
