"""Shards of MosaicML Streaming (MDS): `.mds`, or compressed by zstd, gzip, brotli, bzip2 or snappy.

A shard is `u32 N | u32 offsets[N + 1] | JSON of the columns | samples`; a sample is the lengths of those of
its columns that have no fixed size (u32 each), then the columns' bytes, in the order of the JSON, which is
the shard's footer here. So its head is all that indexing reads, and a block carries 4 bytes a sample. Where
at most one column has no fixed size, these tell where every value lies; else lengths are read with the block.

`index.json` is needed for none of this. Where it lies beside, or in a folder above, it must agree, and the
hashes that it has of compressed shards, which are read whole, are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct

from sharding.blocks import Block, Columns, ColumnSpec, Format, Shard, ShardScan, Spans
from sharding.errors import CorruptShardError
from sharding.formats.streaming.listing import LISTING_NAME
from sharding.formats.streaming.mds_columns import MdsLayout, layout_of, rule_of
from sharding.formats.streaming.offset_table import (
    Ints,
    check_sizes,
    codec_of,
    read_offsets,
    samples_in,
    sizes_of,
    starts_of,
    table_blocks,
    unpacked,
    words_at,
)

_HEADER_BYTES = 16 << 20
"""The JSON of the columns of a shard, at most."""


class MdsFormat(Format):
    """The `Format` of Streaming's `.mds` shards. Thread-safe, stateless."""

    name = "mds"
    has_empty_samples = False
    locates_numbers = True
    listing_name = LISTING_NAME

    def scan(
        self,
        file: BinaryIO,
        shard: Shard,
        *,
        block_bytes: int,
        listed: Mapping[str, Any] | None = None,
    ) -> ShardScan:
        """Index one shard by its table of offsets; see `Format.scan`. `listed`: what `index.json` says of it.

        Raises:
            CorruptShardError: truncated, of an encoding that is not known, or not as `index.json` says.
        """
        with unpacked(file, shard) as plain:
            offsets = read_offsets(plain, shard)
            at = 4 * (len(offsets) + 1)
            layout = _layout_in(plain.read(min(int(offsets[0]) - at, _HEADER_BYTES)), shard, at)
            if layout.has_arrays and len(offsets) > 1:  # the first tells how many dimensions they have
                layout = layout.as_in(_first_sample(plain, offsets))
        lacking = np.flatnonzero(np.diff(offsets) < layout.least_bytes)
        if len(lacking):
            i = int(lacking[0])
            size = offsets[i + 1] - offsets[i]
            reason = f"sample {i} has {size} bytes, and its columns at least {layout.least_bytes}"
            raise CorruptShardError(shard.url, reason, int(offsets[i]), stage="index")
        codec = codec_of(shard.url)
        footer: dict[str, Any] = {"columns": layout.as_json()}
        if codec:
            footer["codec"] = codec
        if listed is not None:
            hashes = _agreeing(listed, shard, codec, offsets)
            if codec and hashes:
                footer["hashes"] = hashes
        return ShardScan(
            **table_blocks(offsets, shard, block_bytes),
            schema=layout.schema(np.diff(offsets)),
            footer=json.dumps(footer).encode(),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where samples do not make up the block."""
        check_sizes(block, _footer(bytes(block.footer)).layout.least_bytes)

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """Return where values lie, if the size of a sample tells; see `Format.locate`."""
        footer = _footer(bytes(block.footer))
        layout = footer.layout
        wanted = layout.wanted(block, columns)
        if footer.codec or layout.num_heads > 1 or any(column.is_rewritten for column in wanted):
            return None
        sizes = sizes_of(block)
        starts = np.cumsum(sizes) - sizes
        lengths = (
            (sizes - layout.least_bytes)[:, None] if layout.num_heads else np.zeros((len(sizes), 0), np.int64)
        )
        spans = layout.spans(starts, lengths)
        empty = np.empty(0, np.uint8)
        return {column.name: Spans(empty, *spans[column.name]) for column in wanted}

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Views of the wanted values in `data`; see `Format.decode`.

        Raises:
            CorruptShardError: not the bytes that were indexed, or a column is not in the shard.
        """
        footer = _footer(bytes(block.footer))
        wanted = footer.layout.wanted(block, columns)
        _check_hashes(footer, data, block)
        buffer, starts, ends = samples_in(block, data, footer.codec)
        num_heads = footer.layout.num_heads
        if (ends - starts < 4 * num_heads).any():
            raise block.corrupt("a sample is shorter than the lengths of its columns")
        lengths = words_at(buffer, starts, num_heads) if num_heads else np.zeros((len(starts), 0), np.int64)
        differs = np.flatnonzero(lengths.sum(axis=1) + footer.layout.least_bytes != ends - starts)
        if len(differs):
            i = int(differs[0])
            reason = f"the columns of sample {block.first_in_shard + i} do not take the bytes that it has"
            raise CorruptShardError(block.shard.url, reason, block.offset + int(starts[i]), stage="decode")
        spans = footer.layout.spans(starts, lengths)
        return {column.name: column.decode(buffer, *spans[column.name], block) for column in wanted}

    def sample_offsets(self, block: Block, data: memoryview | None) -> Ints | None:
        """See `Format.sample_offsets`: the first bytes of samples, in a compressed shard decompressed."""
        return starts_of(block, data)

    def rule(self, spec: ColumnSpec) -> str | Callable[[bytes], Any] | None:
        """Return the decoder of an encoding; see `Format.rule`."""
        return rule_of(spec.feature_type)


def _first_sample(plain: BinaryIO, offsets: Ints) -> bytes:
    """The bytes of the first sample, of a file that is read forwards from behind the table."""
    plain.seek(int(offsets[0]))
    return plain.read(int(offsets[1] - offsets[0]))


class _Footer(Struct, frozen=True):
    """The facts that a shard's blocks have in common."""

    layout: MdsLayout
    codec: str | None
    hashes: tuple[tuple[str, str], ...]


@lru_cache(maxsize=1024)
def _footer(footer: bytes) -> _Footer:
    """Read the footer of a catalog. `ValueError` where it is none."""
    value = json.loads(footer)
    hashes = tuple((str(name), str(digest)) for name, digest in value.get("hashes", {}).items())
    return _Footer(layout_of(value["columns"]), value.get("codec"), hashes)


def _layout_in(config: bytes, shard: Shard, at: int) -> MdsLayout:
    """The columns that a shard itself names."""
    try:
        value = json.loads(config)
        version = value["version"]
        if version != 2:
            raise ValueError(f"version {version!r} of MDS; only version 2 is known")
        parts = (value["column_names"], value["column_encodings"], value["column_sizes"])
        return layout_of(list(zip(*parts, strict=True)))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptShardError(shard.url, f"the columns of the shard cannot be read: {what}", at) from error


def _agreeing(listed: Mapping[str, Any], shard: Shard, codec: str | None, offsets: Ints) -> dict[str, str]:
    """The hashes of the stored bytes that `index.json` has; raises where it contradicts the shard."""
    raw, packed = listed.get("raw_data") or {}, listed.get("zip_data") or {}
    facts = [
        ("samples", listed.get("samples"), len(offsets) - 1),
        ("bytes", raw.get("bytes"), int(offsets[-1])),
    ]
    if codec:
        facts.append(("stored bytes", packed.get("bytes"), shard.size))
    for what, said, found in facts:
        if said != found:
            reason = (
                f"{LISTING_NAME} says that it has {said} {what}, and it has {found}: one is another dataset's"
            )
            raise CorruptShardError(shard.url, reason, stage="index")
    hashes = (packed if codec else raw).get("hashes")
    return {str(name): str(digest) for name, digest in hashes.items()} if isinstance(hashes, dict) else {}


def _check_hashes(footer: _Footer, data: memoryview, block: Block) -> None:
    for name, digest in footer.hashes:
        made = _digest(name, data)
        if made is not None and made != digest:
            raise block.corrupt(f"its {name} is {made}, and {LISTING_NAME} says {digest}")


def _digest(name: str, data: memoryview) -> str | None:
    """The hash of this name; None where this machine has no such function."""
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name, data, usedforsecurity=False).hexdigest()
    try:
        import xxhash
    except ImportError:
        return None
    return str(getattr(xxhash, name)(data).hexdigest()) if name in xxhash.algorithms_available else None
