"""Shards of MosaicML Streaming (MDS): `.mds`, or compressed by zstd, gzip, brotli, bzip2 or snappy.

A shard is `u32 N | u32 offsets[N + 1] | JSON of the columns | samples`; a sample is the lengths of those of
its columns that have no fixed size (u32 each), then the columns' bytes, in the order of the JSON, which is
the shard's footer here. Indexing reads this head, and where arrays have no shape in it, the first bytes of
those of the first sample, which tell their dimensions. A block carries 4 bytes a sample: where at most one
column has no fixed size, these tell where every value lies; else lengths are read with the block.

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
from sharding.formats.streaming.layout import SampleLayout
from sharding.formats.streaming.listing import LISTING_NAME
from sharding.formats.streaming.mds_columns import as_in_sample, layout_of, rule_of
from sharding.formats.streaming.offset_table import (
    check_sizes,
    codec_of,
    read_offsets,
    samples_in,
    sizes_of,
    starts_of,
    table_blocks,
    unpacked,
)
from sharding.spans import Ints

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
            start = 4 * (len(offsets) + 1)
            config = plain.read(min(int(offsets[0]) - start, _HEADER_BYTES))
            layout = _layout_in(config, shard, start)
            if len(offsets) > 1:
                read = _reader(plain, start + len(config), int(offsets[0]))
                layout = as_in_sample(layout, int(offsets[1] - offsets[0]), read)
        layout.check_sizes(offsets, shard)
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
        return None if footer.codec else footer.layout.locate(block, sizes_of(block), columns)

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Views of the wanted values in `data`; see `Format.decode`.

        Raises:
            CorruptShardError: not the bytes that were indexed, or a column is not in the shard.
        """
        footer = _footer(bytes(block.footer))
        _check_hashes(footer, data, block)
        buffer, starts, ends = samples_in(block, data, footer.codec)
        return footer.layout.decode(block, buffer, starts, ends, columns)

    def sample_offsets(self, block: Block, data: memoryview | None) -> Ints | None:
        """See `Format.sample_offsets`: the first bytes of samples, in a compressed shard decompressed."""
        return starts_of(block, data)

    def rule(self, spec: ColumnSpec) -> str | Callable[[bytes], Any] | None:
        """Return the decoder of an encoding; see `Format.rule`."""
        return rule_of(spec.feature_type)


class _MdsFooter(Struct, frozen=True):
    """The facts that a shard's blocks have in common."""

    layout: SampleLayout
    codec: str | None
    hashes: tuple[tuple[str, str], ...]


@lru_cache(maxsize=1024)
def _footer(footer: bytes) -> _MdsFooter:
    """Read the footer of a catalog. `ValueError` where it is none."""
    value = json.loads(footer)
    hashes = tuple((str(name), str(digest)) for name, digest in value.get("hashes", {}).items())
    return _MdsFooter(layout_of(value["columns"]), value.get("codec"), hashes)


def _layout_in(config: bytes, shard: Shard, offset: int) -> SampleLayout:
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
        raise shard.corrupt(f"the columns of the shard cannot be read: {what}", offset) from error


def _reader(plain: BinaryIO, position: int, base: int) -> Callable[[int, int], bytes]:
    """Return what reads some of the bytes from `base` on, each time further on; `plain` is at `position`.

    Of what is decompressed, bytes between are read, too, a few at a time.
    """

    def read(start: int, count: int) -> bytes:
        nonlocal position
        if plain.seekable():
            plain.seek(base + start)
            position = base + start
        while position < base + start and (skipped := plain.read(min(base + start - position, 1 << 20))):
            position += len(skipped)
        data = plain.read(count) if position == base + start else b""
        position += len(data)
        return data

    return read


def _agreeing(listed: Mapping[str, Any], shard: Shard, codec: str | None, offsets: Ints) -> dict[str, str]:
    """The hashes of the stored bytes that `index.json` has; raises where it contradicts the shard."""
    raw, packed = (_told_of(listed, key, shard) for key in ("raw_data", "zip_data"))
    facts = [
        ("samples", listed.get("samples"), len(offsets) - 1),
        ("bytes", raw.get("bytes"), int(offsets[-1])),
    ]
    if codec:
        facts.append(("stored bytes", packed.get("bytes"), shard.size))
    for what, said, count in facts:
        if said != count:
            reason = (
                f"{LISTING_NAME} says that it has {said} {what}, and it has {count}: one is another dataset's"
            )
            raise shard.corrupt(reason)
    hashes = (packed if codec else raw).get("hashes")
    return {str(name): str(digest) for name, digest in hashes.items()} if isinstance(hashes, dict) else {}


def _told_of(listed: Mapping[str, Any], key: str, shard: Shard) -> Mapping[str, Any]:
    facts = listed.get(key) or {}
    if not isinstance(facts, Mapping):
        reason = (
            f"{LISTING_NAME} has {str(facts)[:40]!r} as its {key}: copy it again from where it was written"
        )
        raise shard.corrupt(reason)
    return facts


def _check_hashes(footer: _MdsFooter, data: memoryview, block: Block) -> None:
    for name, digest in footer.hashes:
        result = _digest(name, data)
        if result is not None and result != digest:
            raise block.corrupt(f"its {name} is {result}, and {LISTING_NAME} says {digest}")


def _digest(name: str, data: memoryview) -> str | None:
    """The hash of this name; None where this machine has no such function."""
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name, data, usedforsecurity=False).hexdigest()
    try:
        import xxhash
    except ImportError:
        return None
    return str(getattr(xxhash, name)(data).hexdigest()) if name in xxhash.algorithms_available else None
