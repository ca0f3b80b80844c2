"""Chunks of LitData: `chunk-0-0.bin`, beside the `index.json` that says what is in them.

A chunk is `u32 N | u32 offsets[N + 1] | samples`, a sample `u32 sizes[leaves] | leaves`, or bare tokens
(`TokensLoader`). There are four forms of it:

    as it is         a block is a run of samples; its index is their sizes
    .zstd.bin        compressed as a whole: one block
    LDFZ01           frames of zstd, each of which is a block (`compression_level="batch"`)
    ... LDARW01      rows in an Arrow file behind an empty table: blocks are record batches

The last is what LitData writes since 0.2.70 where samples are dicts of numbers and text alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct

from sharding.blocks import Block, Columns, ColumnSpec, Format, Shard, ShardScan, Spans
from sharding.formats.streaming.layout import SampleLayout
from sharding.formats.streaming.listing import LISTING_NAME
from sharding.formats.streaming.litdata_columns import RULES, layout_of, leaf_names
from sharding.formats.streaming.litdata_forms import (
    FRAMES_BEGIN,
    ROWS,
    ROWS_END,
    as_footer,
    check_count,
    scan_frames,
    scan_rows,
)
from sharding.formats.streaming.offset_table import (
    check_sizes,
    codec_of,
    read_offsets,
    samples_in,
    sizes_of,
    starts_of,
    table_blocks,
    unpack,
    unpacked,
)
from sharding.spans import Ints

TOKENS = "tokens"
"""Name of the column of chunks that `TokensLoader` reads."""


class LitDataFormat(Format):
    """The `Format` of LitData's chunks. Thread-safe, stateless.

    Args:
        length: tokens of a sample, for chunks that `TokensLoader` reads; None: a sample is what was written.
    """

    name = "litdata"
    has_empty_samples = True
    locates_numbers = True
    widens = True  # what rows of Arrow are is found chunk by chunk
    listing_name = LISTING_NAME

    def __init__(self, *, length: int | None = None) -> None:
        if length is not None and (not isinstance(length, int | np.integer) or length < 1):
            raise ValueError(f"length must be >= 1 or None (a sample is what was written), got {length!r}")
        self.length = None if length is None else int(length)

    def options(self) -> dict[str, str | int]:
        """Return the options that shape the blocks; see `Format.options`."""
        return {} if self.length is None else {"length": self.length}

    def scan(
        self,
        file: BinaryIO,
        shard: Shard,
        *,
        block_bytes: int,
        listed: Mapping[str, Any] | None = None,
    ) -> ShardScan:
        """Index one chunk; see `Format.scan`. `listed`: what `index.json` says of it.

        Raises:
            CorruptShardError: no `index.json`, encrypted, truncated, or not as `index.json` says.
        """
        if listed is None:
            reason = f"a LitData chunk needs the {LISTING_NAME} that lists it in its folder, and none does"
            raise shard.corrupt(reason)
        layout, config = _layout_in(listed["config"], shard), listed["config"]
        is_tokens = layout.heads == "none"
        if self.length is not None and not is_tokens:
            reason = f"length= is for chunks that TokensLoader reads; this is of {config.get('item_loader')}"
            raise shard.corrupt(reason)
        chunk = listed["chunk"]
        if codec_of(shard.url) is None:
            file.seek(0)
            if file.read(8) == FRAMES_BEGIN:
                return scan_frames(file, shard, layout, chunk)
            file.seek(max(0, shard.size - 8))
            if file.read(8) == ROWS_END:
                return scan_rows(file, shard, block_bytes, chunk)
        with unpacked(file, shard) as plain:
            offsets = read_offsets(plain, shard)
        layout.check_sizes(offsets, shard)
        check_count(chunk, len(offsets) - 1, shard)
        footer = as_footer(layout, codec_of(shard.url))
        if self.length is not None:
            return self._windows(offsets, shard, layout, block_bytes)
        schema = layout.schema(np.diff(offsets))
        return ShardScan(**table_blocks(offsets, shard, block_bytes), schema=schema, footer=footer)

    def _windows(self, offsets: Ints, shard: Shard, layout: SampleLayout, block_bytes: int) -> ShardScan:
        """Windows over the tokens of all samples, as `TokensLoader(block_size=length)` reads them."""
        length, dtype = self.length or 1, np.dtype(layout.columns[0].items)
        row, start, codec = length * dtype.itemsize, int(offsets[0]), codec_of(shard.url)
        total = int(offsets[-1] - start) // row
        per_block = max(1, total if codec else block_bytes // row)
        first = np.arange(0, total, per_block, dtype=np.int64)
        counts = np.minimum(per_block, total - first)
        return ShardScan(
            offset=np.zeros_like(first) if codec else start + first * row,
            length=np.full_like(first, shard.size) if codec else counts * row,
            nbytes=np.full_like(first, offsets[-1]) if codec else counts * row,
            num_samples=counts,
            schema={TOKENS: ColumnSpec("fixed", dtype.name, (length,))},
            footer=as_footer(layout, codec, length=length, start=start),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where samples do not make up the block."""
        footer = _footer(bytes(block.footer))
        if footer is None:
            ROWS.check(block)
        elif footer.length:
            nbytes = block.num_samples * footer.row_bytes
            if footer.codec is None and not nbytes == block.length == block.nbytes:
                raise ValueError(f"{block.length} bytes hold {nbytes}")
        elif footer.is_framed:
            sizes = sizes_of(block)
            least = footer.layout.least_bytes
            if len(sizes) != block.num_samples or sizes.sum() != block.nbytes or (sizes < least).any():
                raise ValueError(f"{block.nbytes} bytes hold samples of {sizes.sum()}, each at least {least}")
        else:
            check_sizes(block, footer.layout.least_bytes)

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """Return where values lie, if the size of a sample tells; see `Format.locate`."""
        footer = _footer(bytes(block.footer))
        if footer is None or footer.codec:
            return None
        if not footer.length:
            return footer.layout.locate(block, sizes_of(block), columns)
        if not footer.layout.wanted(block, columns):
            return {}
        starts = np.arange(block.num_samples, dtype=np.int64) * footer.row_bytes
        sizes = np.full_like(starts, footer.row_bytes)
        return {TOKENS: Spans(np.empty(0, np.uint8), starts, sizes)}

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Views of the wanted values in `data`; see `Format.decode`.

        Raises:
            CorruptShardError: not the bytes that were indexed, or a column is not in the chunk.
        """
        footer = _footer(bytes(block.footer))
        if footer is None:
            return ROWS.decode(block, data, columns)
        if footer.length:
            return self._decode_windows(block, data, footer, columns)
        if footer.is_framed:
            buffer = np.frombuffer(unpack(data, "zstd", block.nbytes, block.corrupt), np.uint8)
            ends = np.cumsum(sizes_of(block))
            return footer.layout.decode(block, buffer, ends - sizes_of(block), ends, columns)
        return footer.layout.decode(block, *samples_in(block, data, footer.codec), columns)

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """See `Format.decode_as`: rows of Arrow have types of their own."""
        if _footer(bytes(block.footer)) is None:
            return ROWS.decode_as(block, data, specs)
        return super().decode_as(block, data, specs)

    def _decode_windows(
        self, block: Block, data: memoryview, footer: _LitDataFooter, columns: Sequence[str] | None
    ) -> Columns:
        if not footer.layout.wanted(block, columns):
            return {}
        if footer.codec:
            data = unpack(data, footer.codec, block.nbytes, block.corrupt)[footer.start :]
        nbytes = block.num_samples * footer.row_bytes
        if len(data) < nbytes or (len(data) > nbytes and not footer.codec):
            raise block.corrupt(f"{len(data)} bytes where {nbytes} of tokens were indexed")
        dtype = np.dtype(footer.layout.columns[0].items)
        return {TOKENS: np.frombuffer(data[:nbytes], dtype).reshape(block.num_samples, footer.length)}

    def select(self, block: Block, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Return the byte ranges that hold columns; see `Format.select`."""
        is_arrow = _footer(bytes(block.footer)) is None
        return ROWS.select(block, columns) if is_arrow else super().select(block, columns)

    def sample_offsets(self, block: Block, data: memoryview | None) -> Ints | None:
        """See `Format.sample_offsets`; rows of Arrow have none, nor samples of frames."""
        footer = _footer(bytes(block.footer))
        if footer is None or footer.is_framed:
            return None
        return super().sample_offsets(block, data) if footer.length else starts_of(block, data)

    def rule(self, spec: ColumnSpec) -> str | Callable[[bytes], Any] | None:
        """Return the decoder of an encoding; see `Format.rule`."""
        return RULES.get(spec.feature_type)


class _LitDataFooter(Struct, frozen=True):
    """The facts that a chunk's blocks have in common."""

    layout: SampleLayout
    codec: str | None
    is_framed: bool
    length: int
    """Tokens of a window; 0: samples are as they were written."""
    start: int
    """First byte of the tokens, in a chunk that is compressed."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a window."""
        return self.length * np.dtype(self.layout.columns[0].items).itemsize


@lru_cache(maxsize=1024)
def _footer(footer: bytes) -> _LitDataFooter | None:
    """Read the footer of a catalog; None: it is that of an Arrow file. `ValueError` where it is neither."""
    if not footer.startswith(b"{"):
        return None
    value = json.loads(footer)
    names, encodings = zip(*value["columns"], strict=True)
    layout = layout_of(names, encodings, "none" if value["heads"] == "none" else "all")
    length, start = int(value.get("length", 0)), int(value.get("start", 0))
    if length < 0 or start < 0 or (length and not layout.columns[0].items):
        raise ValueError(f"windows of {length} tokens from byte {start}")
    codec = value["codec"]
    return _LitDataFooter(
        layout, codec if codec is None else str(codec), bool(value.get("framed")), length, start
    )


def _layout_in(config: Mapping[str, Any], shard: Shard) -> SampleLayout:
    """The columns that `index.json` names; raises for what is not read."""
    level, loader = config.get("compression_level"), config.get("item_loader") or "PyTreeLoader"
    if config.get("encryption") or level == "sample":
        reason = "compression_level='sample' is not read: write it with compression_level='batch'"
        if config.get("encryption"):
            reason = "it is encrypted, and encrypted chunks are not read: write it without encryption"
        raise shard.corrupt(reason)
    try:
        if loader == "TokensLoader":
            layout = layout_of([TOKENS], config["data_format"], "none")
            if not layout.columns[0].items:
                raise ValueError(f"tokens of {config['data_format'][0]!r}")
            return layout
        if loader != "PyTreeLoader":
            raise ValueError(f"chunks of {loader} are not read; those of PyTreeLoader and TokensLoader are")
        return layout_of(leaf_names(config["data_spec"]), config["data_format"], "all")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        odd = "its data_format or data_spec is no list and no text, as LitData writes them"
        texts = {KeyError: f"no {error}", TypeError: odd, AttributeError: odd}
        reason = f"the config in its {LISTING_NAME} cannot be read: {texts.get(type(error), error)}"
        raise shard.corrupt(reason) from error
