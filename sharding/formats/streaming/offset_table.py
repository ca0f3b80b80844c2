"""Shards that begin with a table of offsets, as those of Streaming (MDS) and of LitData do.

Layout, little-endian: `u32 N | u32 offsets[N + 1] | anything | samples`. Offsets count from the file's
beginning; the last one is the size of the file. A file that is compressed is so as a whole, and is one block.
A block's index has 4 bytes a sample: its size.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from sharding.blocks import Block, Shard
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats.gathering import cuts_within
from sharding.spans import Bytes, Ints, numbers_at
from sharding.urls import file_name

CODECS = {".zstd": "zstd", ".gz": "gzip", ".br": "brotli", ".bz2": "bz2", ".snappy": "snappy"}
"""pyarrow's name of the codec, by the ending of the file."""
_LITDATA_ZSTD = re.compile(r"\.zstd(:\d+)?\.bin$")
_MOST_SAMPLES = 1 << 24
"""Samples of a compressed shard, at most: of others, its size tells whether their offsets can be there."""


def codec_of(url: str) -> str | None:
    """Return the codec that a shard is compressed by, by its name; LitData has it before `.bin`."""
    name = file_name(url).lower()
    return "zstd" if _LITDATA_ZSTD.search(name) else CODECS.get("." + name.rpartition(".")[2])


@contextmanager
def unpacked(file: BinaryIO, shard: Shard) -> Iterator[BinaryIO]:
    """Open a shard to be read forwards, decompressed."""
    codec = codec_of(shard.url)
    file.seek(0)
    if codec is None:
        yield file
    elif codec == "snappy":
        stored = memoryview(file.read())
        yield io.BytesIO(unpack(stored, codec, _snappy_size(stored), shard.corrupt))
    else:
        try:
            with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) as stream:
                yield cast(BinaryIO, stream)
        except ShardReadError:  # of the store: it is an OSError
            raise
        except (OSError, pa.ArrowException) as error:
            raise shard.corrupt(f"corrupt or truncated {codec} data: {error}") from error


def unpack(
    data: memoryview, codec: str, nbytes: int, corrupt: Callable[[str], CorruptShardError]
) -> memoryview:
    """Decompress a whole file, which must give so many bytes. Releases the GIL.

    `corrupt`: makes the error of a reason.
    """
    try:
        if codec == "snappy":
            size = _snappy_size(data)
            if size < 0:
                raise corrupt("corrupt or truncated snappy data: its size is none")
            if size != nbytes:
                raise corrupt(f"decompresses to {size} bytes where {nbytes} were indexed")
            return memoryview(pa.Codec(codec).decompress(data, decompressed_size=nbytes))
        with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
            plain = stream.read_buffer(nbytes + 1)  # the end of the stream, and its checksum, are looked at
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, CorruptShardError):
            raise
        raise corrupt(f"corrupt or truncated {codec} data: {error}") from error
    if len(plain) != nbytes:
        more = "more than" if len(plain) > nbytes else f"{len(plain)} bytes, not"
        raise corrupt(f"decompresses to {more} the {nbytes} bytes it had when it was indexed")
    return memoryview(plain)


def _snappy_size(data: memoryview) -> int:
    """The size of what raw snappy data decompresses to, a varint at its beginning; -1: it cannot be so large.

    Three bytes of a copy make at most 64.
    """
    size = 0
    for i, byte in enumerate(data[:5]):
        size |= (byte & 127) << (7 * i)
        if byte < 128:
            return size if size <= 22 * len(data) + 64 else -1
    return -1


def read_offsets(plain: BinaryIO, shard: Shard) -> Ints:
    """The offsets of a shard, [N + 1], read from its beginning on; `plain` is then behind them.

    Raises:
        CorruptShardError: truncated, or offsets that fall or do not end where the file does.
    """
    is_whole = codec_of(shard.url) is None
    count = int.from_bytes(_exactly(plain, 4, shard, 0), "little")
    most = shard.size // 4 if is_whole else _MOST_SAMPLES
    if count >= most:
        raise shard.corrupt(f"begins with a number of {count} samples, of which it has at most {most}", 0)
    offsets = np.frombuffer(_exactly(plain, 4 * (count + 1), shard, 4), "<u4").astype(np.int64)
    falls = np.flatnonzero(np.diff(offsets, prepend=4 * (count + 2)) < 0)
    if len(falls):
        i = int(falls[0])
        raise shard.corrupt(f"sample {i} begins at {offsets[i]}, before what precedes it ends", 4 + 4 * i)
    if is_whole and offsets[-1] != shard.size:
        reason = (
            f"its samples end at byte {offsets[-1]}, and it has {shard.size}: truncated, or another shard"
        )
        raise shard.corrupt(reason, min(shard.size, int(offsets[-1])))
    return offsets


def _exactly(plain: BinaryIO, count: int, shard: Shard, offset: int) -> bytes:
    raw = plain.read(count)
    if len(raw) < count:
        raise shard.corrupt(
            f"truncated in its table of offsets, of which {len(raw)} of {count} bytes are there", offset
        )
    return raw


def table_blocks(offsets: Ints, shard: Shard, block_bytes: int) -> dict[str, Any]:
    """The blocks of a shard with these offsets, as arguments of `ShardScan`."""
    sizes = np.diff(offsets).astype("<u4")
    if codec_of(shard.url) is not None:
        first = np.zeros(min(1, len(sizes)), np.int64)  # none of no samples
        return {
            "offset": first,
            "length": np.full_like(first, shard.size),
            "nbytes": np.full_like(first, offsets[-1]),
            "num_samples": np.full_like(first, len(sizes)),
            "index": [b""] * len(first),
        }
    cuts = cuts_within(offsets, block_bytes)
    lengths = np.diff(offsets[cuts])
    return {
        "offset": offsets[cuts[:-1]],
        "length": lengths,
        "nbytes": lengths.copy(),
        "num_samples": np.diff(cuts),
        "index": [sizes[a:b].tobytes() for a, b in pairwise(cuts.tolist())],
    }


def sizes_of(block: Block) -> Ints:
    """Bytes of each sample of a block that is not compressed, [n]."""
    return np.frombuffer(block.index, "<u4").astype(np.int64)


def check_sizes(block: Block, least: int) -> None:
    """Raise `ValueError` where samples, of at least so many bytes, do not make up the block."""
    if codec_of(block.shard.url) is not None:
        if block.offset or block.length != block.shard.size or len(block.index):
            raise ValueError(f"a block of {block.length} bytes of a compressed shard of {block.shard.size}")
        return
    if len(block.index) != 4 * block.num_samples:
        raise ValueError(f"an index of {len(block.index)} bytes for {block.num_samples} samples")
    sizes = sizes_of(block)
    if not sizes.sum() == block.length == block.nbytes or sizes.min(initial=least) < least:
        raise ValueError(f"{block.length} bytes hold samples of {sizes.sum()}, each at least {least}")


def samples_in(block: Block, data: memoryview, codec: str | None) -> tuple[Bytes, Ints, Ints]:
    """Return a block's bytes, decompressed, and where its samples begin and end in them, [n] each.

    Raises:
        CorruptShardError: not the bytes that were indexed.
    """
    if codec is None:
        sizes = sizes_of(block)
        if len(data) != sizes.sum():
            raise block.corrupt(f"{len(data)} bytes where {sizes.sum()} were indexed")
        ends = np.cumsum(sizes)
        return np.frombuffer(data, np.uint8), ends - sizes, ends
    buffer = np.frombuffer(unpack(data, codec, block.nbytes, block.corrupt), np.uint8)
    count = int(buffer[:4].view("<u4")[0]) if len(buffer) >= 8 else -1
    if count != block.num_samples or len(buffer) < 4 * (count + 2):
        raise block.corrupt(f"holds {count} samples where {block.num_samples} were indexed")
    offsets = buffer[4 : 4 * (count + 2)].view("<u4").astype(np.int64)
    if (np.diff(offsets, prepend=4 * (count + 2), append=len(buffer)) < 0).any():
        raise block.corrupt("its offsets fall, or lead out of it")
    return buffer, offsets[:-1], offsets[1:]


def starts_of(block: Block, data: memoryview | None) -> Ints | None:
    """First byte of each sample, [n], in the shard or what it holds decompressed; None: `data` would tell."""
    codec = codec_of(block.shard.url)
    if codec is None:
        sizes = sizes_of(block)
        return block.offset + np.cumsum(sizes) - sizes
    return None if data is None else samples_in(block, data, codec)[1]


def words_at(buffer: Bytes, starts: Ints, count: int = 1) -> Ints:
    """Return u32 numbers at any address, [n, count] from each start on."""
    return numbers_at(buffer, starts, "<u4", (count,)).astype(np.int64)
