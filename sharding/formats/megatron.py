r"""Megatron indexed datasets: tokens in `name.bin`, sequences and documents in `name.idx`.

The shard is the `.bin`; its blocks are ranges of it, and the `.idx` beside it is read once, when indexing:
`MMIDIDX\0\0 | u64 version = 1 | u8 dtype | u64 S | u64 D | i32 lengths[S] | i64 pointers[S] | i64 bounds[D] |
optional i8 modes[S]`: document i is sequences bounds[i] to bounds[i+1], and bounds[D-1] = S. Sequences must
lie one after the other (Megatron's builder writes nothing else), hence a document is one run of tokens. A
block carries its documents' sizes, 4 bytes each.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Block, Columns, ColumnSpec, Shard, ShardScan, Spans
from sharding.errors import CorruptShardError
from sharding.formats.gathering import cuts_within
from sharding.formats.tokens import COLUMN, TokensFormat, check_tokens, tokens_in, wants_tokens

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


class MegatronFormat(TokensFormat):
    """Documents (`length=None`), or windows of `length` + 1 tokens over all documents as `TokensFormat` has.

    Shards are the `.bin` files; whoever indexes opens the file with `sibling_suffix` beside each and hands it
    to `scan`. Thread-safe, stateless.
    """

    name = "megatron"
    sibling_suffix = ".idx"
    may_lack_sibling = False

    def __init__(self, *, length: int | None = None) -> None:
        if length is not None and (not isinstance(length, int | np.integer) or length < 1):
            raise ValueError(f"length must be >= 1 or None (one sample a document), got {length!r}")
        self.dtype, self.length = None, None if length is None else int(length)
        self.has_empty_samples = length is None  # a document may be

    def scan(
        self, file: BinaryIO, shard: Shard, *, block_bytes: int, sibling: BinaryIO | None = None
    ) -> ShardScan:
        """Index a `.bin` by its `.idx`, given as `sibling`.

        Raises:
            CorruptShardError: no `.idx`, one that is truncated or contradicts itself, or sequences that do
                not lie one after the other inside the `.bin`; offsets are those of the `.idx`.
        """
        if sibling is None:
            reason = f"a Megatron dataset needs its index beside it ({self.sibling_suffix}), which is missing"
            raise shard.corrupt(reason)
        dtype, starts = _read_index(sibling, shard, bin_size=file.seek(0, io.SEEK_END))
        if self.length is not None:
            return self.windows(0, int(starts[-1]), dtype, self.length, block_bytes)
        cuts = cuts_within(starts, max(1, block_bytes // dtype.itemsize))
        sizes = np.diff(starts)
        nbytes = (starts[cuts[1:]] - starts[cuts[:-1]]) * dtype.itemsize
        size_range = (int(sizes.min()), int(sizes.max())) if len(sizes) else None
        runs = [sizes[a:b] for a, b in pairwise(cuts)]  # in 4 bytes each, 8 if one has 2**32 tokens or more
        return ShardScan(
            offset=starts[cuts[:-1]] * dtype.itemsize,
            length=nbytes,
            nbytes=nbytes.copy(),
            num_samples=np.diff(cuts),
            schema={COLUMN: ColumnSpec("list", dtype.name, size_range=size_range)},
            index=[run.astype("<u4" if run.max() < 1 << 32 else "<u8").tobytes() for run in runs],
            footer=dtype.name.encode(),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block's documents or windows take other bytes than it has."""
        if not block.index:
            super().check(block)
            return
        if len(block.index) not in (4 * block.num_samples, 8 * block.num_samples):
            raise ValueError(f"an index of {len(block.index)} bytes for {block.num_samples} documents")
        dtype, (starts, sizes) = np.dtype(bytes(block.footer).decode()), _documents(block)
        if dtype.name not in _DTYPES.values() or ((sizes < 0) | (sizes > block.length)).any():
            raise ValueError(f"documents of {sizes.min()} to {sizes.max()} {dtype} tokens")
        check_tokens(block, dtype, int(starts[-1] + sizes[-1]))

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """The block's documents or windows, in bytes."""
        if not block.index:
            return super().locate(block, columns)
        if not wants_tokens(block, columns):
            return {}
        starts, sizes = _documents(block)
        width = np.dtype(bytes(block.footer).decode()).itemsize
        return {COLUMN: Spans(np.empty(0, np.uint8), starts * width, sizes * width)}

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """{"tokens": documents as spans of `data`}, or the windows [n, length + 1] as a view of it.

        Raises:
            CorruptShardError: a column other than "tokens", or too few bytes.
        """
        if not block.index:
            return super().decode(block, data, columns)
        if not wants_tokens(block, columns):
            return {}
        starts, sizes = _documents(block)
        dtype = np.dtype(bytes(block.footer).decode())
        return {COLUMN: Spans(tokens_in(block, data, dtype, int(sizes.sum())), starts, sizes)}


def known_dtypes() -> list[str]:
    """Integer types that an index can name."""
    return sorted(name for name in _DTYPES.values() if np.dtype(name).kind in "iu")


def index_bytes(sizes: NDArray[np.int64], dtype: np.dtype[Any]) -> bytes:
    """The `.idx` of documents of so many tokens each [D], one sequence a document."""
    code = next(code for code, name in _DTYPES.items() if name == dtype.name)
    header = _HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1)
    pointers = (np.cumsum(sizes) - sizes) * dtype.itemsize
    bounds = np.arange(len(sizes) + 1, dtype="<i8")
    return b"".join(
        [header, sizes.astype("<i4").tobytes(), pointers.astype("<i8").tobytes(), bounds.tobytes()]
    )


def _documents(block: Block) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and size of the block's documents, in tokens from its beginning."""
    width = len(block.index) // block.num_samples
    sizes = np.frombuffer(block.index, np.dtype(f"<u{width}")).astype(np.int64)
    return np.cumsum(sizes) - sizes, sizes


def _read_index(file: BinaryIO, shard: Shard, bin_size: int) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """The dtype, and where documents start, in tokens, with the number of tokens as last entry."""
    file.seek(0)
    raw = file.read()
    dtype, num_sequences, num_bounds = _read_header(raw, shard)
    offset = _HEADER.size
    lengths = np.frombuffer(raw, "<i4", num_sequences, offset).astype(np.int64)
    offset += 4 * num_sequences
    pointers = np.frombuffer(raw, "<i8", num_sequences, offset).astype(np.int64)
    bounds_at = offset + 8 * num_sequences
    bounds = np.frombuffer(raw, "<i8", num_bounds, bounds_at).astype(np.int64)
    ends = np.cumsum(np.maximum(lengths, 0))
    wrong = np.flatnonzero((lengths < 0) | (pointers != (ends - lengths) * dtype.itemsize))
    if len(wrong):
        i = int(wrong[0])
        reason = f"sequence {i} of {lengths[i]} tokens at byte {pointers[i]} does not follow the one before"
        raise _corrupt(shard, reason, offset + 8 * i)
    tokens = int(ends[-1]) if num_sequences else 0
    if tokens * dtype.itemsize > bin_size:
        reason = f"{tokens} {dtype.name} tokens are indexed, the .bin has {bin_size} bytes"
        raise _corrupt(shard, reason, _HEADER.size)
    if bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise _corrupt(shard, f"document bounds must rise from 0 to {num_sequences}", bounds_at)
    return dtype, np.concatenate([[0], ends])[bounds]


def _read_header(raw: bytes, shard: Shard) -> tuple[np.dtype[Any], int, int]:
    """dtype, number of sequences, number of document bounds; the size of the file is as they say."""
    if raw[: len(_MAGIC)] != _MAGIC:
        raise _corrupt(shard, f"not a Megatron index: begins with {raw[:9]!r}", 0)
    if len(raw) < _HEADER.size:
        raise _corrupt(shard, f"truncated in its header: {len(raw)} bytes", len(raw))
    _, version, code, num_sequences, num_bounds = _HEADER.unpack_from(raw)
    if version != 1:
        raise _corrupt(shard, f"version {version}; only version 1 is known", 9)
    if code not in _DTYPES:
        raise _corrupt(shard, f"unknown dtype code {code}", 17)
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(raw) not in (expected, expected + num_sequences):
        reason = f"{num_sequences} sequences and {num_bounds} bounds take {expected} bytes, it has {len(raw)}"
        raise _corrupt(shard, reason, min(len(raw), expected))
    if not num_bounds:
        raise _corrupt(shard, "no document bounds", 26)
    return np.dtype(_DTYPES[code]), num_sequences, num_bounds


def _corrupt(shard: Shard, reason: str, offset: int) -> CorruptShardError:
    return shard.corrupt(f"in the .idx beside it: {reason}", offset)
