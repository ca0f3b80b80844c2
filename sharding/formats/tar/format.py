"""WebDataset shards: tar archives whose members are the fields of samples.

`scan` walks the headers once; `decode` then needs no names and no walk, because the block's index says
where every member lies. It compares the headers of the block with the index, so that a shard that was
replaced or damaged since is noticed. A compressed shard is one block, and its index counts decompressed
bytes. Values and keys are views of the block's bytes.

Index of a block (little-endian, positions relative to the block): the number of members (u4), the length
of the key text (u4), then one record per member and one per sample:

    member  header u4, size u4, sample u4, column u2, flags u2      payload: header + 512
    sample  start u4, length u4                                     of the key, in the block ...
    key text                                                        ... or, if not empty, in this text
    copies                                                          positions count on into them

A link is the member that it points to: a record with that one's header. Where this lies in another block, its
payload is copied into the index, and no value of the shard can be located.

Positions and sizes are u8 where `nbytes` is 4 GiB or more. Flags are those of `header`. Columns count
along the shard's sorted extensions, which are in the footer (JSON).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import BinaryIO

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import ALTERNATIVE, Block, Columns, ColumnSpec, Format, Shard, ShardScan, Spans
from sharding.compression import WINDOW_BYTES, compression_of, decompress, open_decompressed
from sharding.errors import CorruptShardError
from sharding.formats.tar.header import BLOCK, COPIED, MAGIC, NO_MAGIC, ODD_SIZE, SIZE
from sharding.formats.tar.header_chains import octal_sizes
from sharding.formats.tar.members import Members, list_members
from sharding.formats.tar.samples import Samples, group_members
from sharding.spans import cuts_reaching

KEY_COLUMN = "__key__"
_COUNTS = np.dtype([("members", "<u4"), ("key_text", "<u4")])
_MOST_COPIED_BYTES = 64 << 20
"""The bytes of payloads in other blocks that a shard's links point to, at most: they go into the catalog."""
_USTAR = np.frombuffer(b"ustar", np.uint8)
_NOTHING = np.empty(0, np.uint8)


def _records(offset: str) -> tuple[np.dtype[np.void], np.dtype[np.void]]:
    member = [("header", offset), ("size", offset), ("sample", "<u4"), ("column", "<u2"), ("flags", "<u2")]
    return np.dtype(member), np.dtype([("start", offset), ("length", "<u4")])


_NARROW, _WIDE = _records("<u4"), _records("<u8")


class TarFormat(Format):
    """The `Format` of `.tar`, `.tar.gz`, `.tgz` and `.tar.zst` shards; stateless and thread-safe.

    Args:
        allow_unfinished: read the whole samples of files that end before their archive does, too.
        max_members: files of a compressed shard that indexing accepts; each takes some 600 bytes of memory.
        window_bytes: window of a zstd frame that indexing accepts, up to 2 GiB: reading it takes so much.
    """

    name = "tar"
    has_keys = True
    has_empty_samples = False
    columns_are_extensions = True

    def __init__(
        self, *, allow_unfinished: bool = False, max_members: int = 500_000, window_bytes: int = WINDOW_BYTES
    ) -> None:
        if not isinstance(max_members, int) or max_members < 1:
            raise ValueError(f"max_members must be an integer >= 1, got {max_members!r}")
        self.allow_unfinished, self.max_members = allow_unfinished, max_members
        self.window_bytes = window_bytes

    def options(self) -> dict[str, str | int]:
        """Return the options that shape the blocks; see `Format.options`."""
        return {"allow_unfinished": True} if self.allow_unfinished else {}

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index one shard; see `Format.scan`. Every extension is a column of kind "bytes".

        An archive without samples gives zero blocks.
        """
        compressed = compression_of(shard.url) is not None
        plain = open_decompressed(file, shard.url, window_bytes=self.window_bytes) if compressed else file
        most = self.max_members if compressed else None  # a plain one is as long as what indexing it takes
        members = list_members(plain, shard.url, allow_unfinished=self.allow_unfinished, max_members=most)
        samples = group_members(members, shard.url)
        sample_first = members.first[samples.member[samples.first]]
        if compressed:
            cuts = np.arange(min(1, len(samples.first)) + 1) * len(samples.first)
            starts, ends = np.zeros(len(cuts) - 1, np.int64), np.full(len(cuts) - 1, members.total_bytes)
        else:
            bounds = np.append(sample_first, members.end[samples.member[-1:]])
            cuts = cuts_reaching(bounds, block_bytes)
            starts, ends = bounds[cuts[:-1]], bounds[cuts[1:]]
        cuts, cut_ends = cuts[:-1], cuts[1:]
        copies = _Copies(file, shard.url)
        indexes = [
            _index_of(members, samples, copies, *block)
            for block in zip(cuts.tolist(), cut_ends.tolist(), starts.tolist(), ends.tolist(), strict=True)
        ]
        footer = {"columns": samples.columns, "passed_over": samples.num_passed_over}
        if copies.num_bytes:
            footer["has_copies"] = True
        return ShardScan(
            offset=starts,
            length=np.full_like(cuts, file.seek(0, 2)) if compressed else ends - starts,
            nbytes=ends - starts + np.array([copied for _, copied in indexes], np.int64),
            num_samples=cut_ends - cuts,
            schema=_schema(members, samples),
            index=[index for index, _ in indexes],
            footer=json.dumps(footer).encode(),
            unfinished=members.unfinished,
            missing=_missing(samples),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block's index does not fit it, or leads outside it."""
        index = _BlockIndex.of(block)
        _facts_in(bytes(block.footer))
        stored = block.nbytes - len(index.copies)
        if compression_of(block.shard.url) is None and block.length != stored:
            raise ValueError(f"{block.length} bytes hold {stored}")
        if len(index.key_text) != int(np.frombuffer(block.index, _COUNTS, 1)[0]["key_text"]):
            raise ValueError(f"an index of {len(block.index)} bytes for {block.num_samples} samples")
        if index.members["sample"].max(initial=0) >= block.num_samples:
            raise ValueError(f"a member is of none of {block.num_samples} samples")
        is_copied = index.members["flags"] & COPIED != 0
        for rows, end in ((index.members[is_copied], block.nbytes), (index.members[~is_copied], stored)):
            _check_inside(rows["header"], rows["size"], end - BLOCK)
        _check_inside(index.keys["start"], index.keys["length"], len(index.key_text) or block.nbytes)

    def num_passed_over(self, footer: bytes) -> int:
        """Files without a key, hidden files, those in `__MACOSX/`, and `__meta__` files."""
        return int(json.loads(footer)["passed_over"])

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """Return where values lie in the shard, relative to `block.offset`; see `Format.locate`.

        None for compressed shards, for those with links from block to block, and for "__key__" where the
        block's keys are only in its index.
        """
        index = _BlockIndex.of(block)
        if (
            compression_of(block.shard.url)
            or _facts_in(bytes(block.footer))[1]
            or (columns and KEY_COLUMN in columns and len(index.key_text))
        ):
            return None
        return index.columns(columns, _NOTHING, block)

    def value_bytes(self, block: Block, column: str) -> NDArray[np.int64]:
        """Bytes of each sample's value; known for compressed shards, too, whose values cannot be located."""
        return _BlockIndex.of(block).columns([column], _NOTHING, block)[column].lengths

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Views of the wanted values in `data`; see `Format.decode`.

        `columns` None means all extensions. "__key__" may be asked for as well: UTF-8 key bytes; and
        "jpg/png", which is the first of these members that a sample has.

        Raises:
            CorruptShardError: `data` is not what was indexed, or a column is not in the shard.
        """
        url = block.shard.url
        if compression_of(url):
            data = decompress(data, url, limit_bytes=block.nbytes)
        index = _BlockIndex.of(block)
        stored = block.nbytes - len(index.copies)
        if len(data) < stored:
            reason = f"{len(data)} bytes where {stored} were indexed; the shard changed or is truncated"
            raise CorruptShardError(url, reason, offset=block.offset + len(data), stage="decode")
        buffer = np.frombuffer(data, np.uint8)
        _compare(index.members[index.members["flags"] & COPIED == 0], buffer, block)
        if len(index.copies):
            buffer = np.concatenate([buffer[:stored], index.copies])
        return {**index.columns(columns, buffer, block)}

    def keys(self, block: Block, data: memoryview) -> list[str]:
        """The keys of a block's samples as text, for messages."""
        column = self.decode(block, data, [KEY_COLUMN])[KEY_COLUMN]
        assert isinstance(column, Spans)
        return [column.value(i).tobytes().decode(errors="surrogateescape") for i in range(len(column))]

    def sample_offsets(self, block: Block, data: memoryview | None) -> NDArray[np.int64]:
        """The header of each sample's first member; of one that is all links, that of its first link.

        A link's record has the header that it points to, which may be another sample's; where the key lies,
        the sample's own headers begin.
        """
        index, none = _BlockIndex.of(block), np.iinfo(np.int64).max
        starts = np.zeros(block.num_samples, np.int64)
        if not len(index.key_text):
            starts = index.keys["start"].astype(np.int64) // BLOCK * BLOCK
        first = np.full(block.num_samples, none)
        members = index.members[index.members["flags"] & COPIED == 0]
        samples, headers = members["sample"], members["header"].astype(np.int64)
        is_own = headers >= starts[samples]
        np.minimum.at(first, samples[is_own], headers[is_own])
        return block.offset + np.where(first == none, starts, first)


class _BlockIndex(Struct, frozen=True):
    """A block's index, as views of its bytes."""

    members: NDArray[np.void]
    keys: NDArray[np.void]
    key_text: NDArray[np.uint8]
    copies: NDArray[np.uint8]
    """Payloads that links of the block point to and that lie in other blocks."""

    @classmethod
    def of(cls, block: Block) -> _BlockIndex:
        member, key = _NARROW if block.nbytes < 1 << 32 else _WIDE
        counts = np.frombuffer(block.index, _COUNTS, 1)[0]
        members = np.frombuffer(block.index, member, counts["members"], offset=_COUNTS.itemsize)
        offset = _COUNTS.itemsize + members.nbytes
        keys = np.frombuffer(block.index, key, block.num_samples, offset=offset)
        text = np.frombuffer(block.index, np.uint8, offset=offset + keys.nbytes)
        return cls(members, keys, text[: counts["key_text"]], text[counts["key_text"] :])

    def columns(
        self, selected: Sequence[str] | None, buffer: NDArray[np.uint8], block: Block
    ) -> dict[str, Spans]:
        names, _ = _facts_in(bytes(block.footer))
        text = self.key_text if len(self.key_text) else buffer
        return {
            name: Spans(text, self.keys["start"].astype(np.int64), self.keys["length"].astype(np.int64))
            if name == KEY_COLUMN
            else self._spans([names.get(part, -1) for part in name.split(ALTERNATIVE)], buffer)
            for name in (names if selected is None else selected)
        }

    def _spans(self, alternatives: Sequence[int], buffer: NDArray[np.uint8]) -> Spans:
        """Return where each sample's member lies: of several columns, that of the first which it has."""
        starts = np.zeros(len(self.keys), np.int64)
        lengths = np.full(len(self.keys), -1, np.int64)
        for column in reversed(alternatives):  # the first is written last, over the others
            rows = self.members[self.members["column"] == column]
            starts[rows["sample"]] = rows["header"].astype(np.int64) + BLOCK
            lengths[rows["sample"]] = rows["size"]
        return Spans(buffer, starts, lengths)


def _check_inside(starts: NDArray[np.integer], lengths: NDArray[np.integer], limit: int) -> None:
    """Raise `ValueError` where a span of unsigned numbers ends behind `limit`."""
    ends = starts.astype(np.int64) + lengths  # u8 may wrap around
    if ends.max(initial=0) > limit or max(starts.max(initial=0), lengths.max(initial=0)) > limit:
        raise ValueError("a member or a key lies outside the block")


@lru_cache(maxsize=1024)
def _facts_in(footer: bytes) -> tuple[dict[str, int], bool]:
    """The number of each column of a shard, and whether blocks have copies of what lies in others."""
    facts = json.loads(footer)
    return {name: number for number, name in enumerate(facts["columns"])}, bool(facts.get("has_copies"))


def _compare(members: NDArray[np.void], buffer: NDArray[np.uint8], block: Block) -> None:
    """Raise where the header of a member is not the one that was indexed."""
    blocks = buffer[: len(buffer) // BLOCK * BLOCK].reshape(-1, BLOCK)
    heads = blocks[members["header"] // BLOCK, SIZE.start : MAGIC.stop]
    sizes, readable = octal_sizes(heads[:, : SIZE.stop - SIZE.start])
    same = (readable & (sizes == members["size"])) | (members["flags"] & ODD_SIZE != 0)
    magic = (heads[:, MAGIC.start - SIZE.start :] == _USTAR).all(axis=1)
    same &= magic | (members["flags"] & NO_MAGIC != 0)
    if not same.all():
        position = int(members["header"][np.flatnonzero(~same)[0]])
        reason = "shard changed or corrupt: the header of a member is not the one that was indexed"
        raise block.shard.corrupt(reason, offset=block.offset + position, stage="decode")


def _schema(members: Members, samples: Samples) -> dict[str, ColumnSpec]:
    size, num_columns = members.size[samples.source], len(samples.columns)
    count = np.bincount(samples.column, minlength=num_columns)
    low, high = np.full(num_columns, np.iinfo(np.int64).max), np.zeros(num_columns, np.int64)
    np.minimum.at(low, samples.column, size)
    np.maximum.at(high, samples.column, size)
    return {
        name: ColumnSpec(
            "bytes", size_range=(int(low[i]), int(high[i])), optional=bool(count[i] < len(samples.first))
        )
        for i, name in enumerate(samples.columns)
    }


def _missing(samples: Samples) -> dict[str, str]:
    """The key of the first sample that lacks a column, for each that some lack."""
    num_samples, first = len(samples.first), {}
    for i, name in enumerate(samples.columns):
        there = samples.sample[samples.column == i]
        if len(there) < num_samples:
            gaps = np.flatnonzero(there != np.arange(len(there)))
            lacking = int(gaps[0]) if len(gaps) else len(there)
            first[name] = samples.keys[lacking].as_py().decode(errors="backslashreplace")
    return first


class _Copies(Struct):
    """Reads the payloads that links point to from other blocks."""

    file: BinaryIO
    url: str
    num_bytes: int = 0

    def read(self, members: Members, row: int, key: bytes) -> bytes:
        """The payload of a member. The key is that of a sample which has a link to it."""
        size, header = int(members.size[row]), int(members.header[row])
        self.num_bytes += size
        if self.num_bytes > _MOST_COPIED_BYTES:
            reason = f"its links point from block to block to more than {_MOST_COPIED_BYTES >> 20} MiB"
            cure = "make the archive with `tar --hard-dereference --dereference`"
            text = key.decode(errors="backslashreplace")
            raise CorruptShardError(self.url, f"{reason}; {cure}", offset=header, key=text)
        self.file.seek(header + BLOCK)
        payload = self.file.read(size)
        if len(payload) < size:
            raise CorruptShardError(self.url, "the target of a link is truncated", offset=header)
        return payload


def _index_of(
    members: Members, samples: Samples, copies: _Copies, cut: int, end: int, start: int, stop: int
) -> tuple[bytes, int]:
    """The index of the block of samples `cut` to `end`, in bytes `start` to `stop`; bytes that it copies."""
    rows = slice(*np.searchsorted(samples.sample, [cut, end]))
    source, flags = samples.source[rows], members.flags[samples.source[rows]]
    header, size = members.header[source] - start, members.size[source]
    outside, payloads = np.flatnonzero((header < 0) | (header + BLOCK + size > stop - start)), list[bytes]()
    if len(outside):
        apart, first, number = np.unique(source[outside], return_index=True, return_inverse=True)
        keys_of = samples.sample[rows][outside[first]].tolist()
        payloads = [
            copies.read(members, row, samples.keys[sample].as_py())
            for row, sample in zip(apart.tolist(), keys_of, strict=True)
        ]
        ends = stop - start + np.cumsum([len(payload) for payload in payloads])
        header[outside], flags[outside] = (ends - members.size[apart])[number] - BLOCK, COPIED
    num_copied = sum(map(len, payloads))
    member, key = _NARROW if stop - start + num_copied < 1 << 32 else _WIDE
    record = np.empty(len(source), member)
    record["header"], record["size"], record["flags"] = header, size, flags
    record["sample"], record["column"] = samples.sample[rows] - cut, samples.column[rows]
    keys, text = np.empty(end - cut, key), b""
    length, key_start = samples.key_length[cut:end], samples.key_start[cut:end] - start
    if (samples.key_start[cut:end] < 0).any():
        text = b"".join(samples.keys[cut:end].to_pylist())
        key_start = np.cumsum(length) - length
    keys["start"], keys["length"] = key_start, length
    counts = np.array((len(record), len(text)), _COUNTS)
    return b"".join([counts.tobytes(), record.tobytes(), keys.tobytes(), text, *payloads]), num_copied
