"""All files of a tar archive, and the links to them, from its headers alone.

Where members are small, the archive is read a MiB at a time and thousands of headers are taken at once
(`header_chains`). Where members are large, payloads are skipped and only headers are read. Whatever is
unusual (long names, base-256 sizes, v7 headers, the end, every defect) goes one by one through
`MemberReader`, which alone raises errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from sharding.arrow_arrays import bool_array, bytes_array
from sharding.formats.tar.header import (
    BLOCK,
    MAGIC,
    NAME,
    REGULAR_TYPES,
    TYPE,
    Member,
    MemberLink,
    MemberReader,
)
from sharding.formats.tar.header_chains import chain_of, one_of

BUFFER_BYTES = 1 << 20
_SPARSE_READ_BYTES = 4 << 10
_SPARSE_MEAN_BYTES = 64 << 10
"""Above this mean size of a member, skipping payloads beats reading them (1 MiB reads in about 0.2 ms)."""
_RECHECK_MEMBERS = 64
_NAME_BYTES = 128
"""The bytes of names for each member that is accepted; longer ones count as several members."""
_IS_REGULAR = one_of(REGULAR_TYPES)


class Members(Struct, frozen=True, kw_only=True):
    """The n regular files and links of an archive in order; positions count bytes from its start."""

    first: NDArray[np.int64]
    """First byte of each, extension headers included."""
    header: NDArray[np.int64]
    end: NDArray[np.int64]
    """The position at which the next header belongs; never beyond the file."""
    size: NDArray[np.int64]
    """Bytes behind the header; of links none."""
    flags: NDArray[np.uint16]
    names: pa.LargeBinaryArray
    name_start: NDArray[np.int64]
    """The position at which each name stands in the archive in one piece; -1: nowhere."""
    links: dict[int, MemberLink]
    """By row: what the links among them point to."""
    total_bytes: int
    """The length of the file."""
    unfinished: str
    """The way in which the file ends before the archive does, in words; "": it does not."""
    last_is_cut: bool
    """True if the payload of the last of them is not all there."""

    def __len__(self) -> int:
        return len(self.header)


def list_members(
    file: BinaryIO,
    url: str,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    allow_unfinished: bool = False,
    max_members: int | None = None,
) -> Members:
    """Walk all headers of an archive.

    `file` must be able to seek forwards; it is read from its start to its end, large payloads left out. Not
    thread-safe in `file`. `allow_unfinished`: take the members of a file that ends before its archive does.
    Each member takes some 600 bytes of memory; `max_members` bounds that.

    Raises:
        CorruptShardError: a header is damaged, the file ends before the archive does or goes on behind it, or
            there are more than `max_members`; names the byte.
    """
    walk = _ArchiveWalk(file, url, buffer_bytes, allow_unfinished)
    while walk.advance():
        if max_members is not None:
            walk.check_size(max_members)
    return walk.members()


def _numbers_of(member: Member) -> tuple[int, ...]:
    return member.first, member.header, member.end, member.size, member.flags, member.name_start


def _names_in(fields: NDArray[np.uint8], others: Mapping[int, bytes]) -> pa.LargeBinaryArray:
    """Names as fields of headers hold them, [n, 100], up to the first zero; by row, those of others."""
    is_name = ~np.logical_or.accumulate(fields == 0, axis=1)
    ends = np.append(0, np.cumsum(is_name.sum(axis=1)))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(fields[is_name])]
    names = pa.Array.from_buffers(pa.large_binary(), len(fields), buffers)
    if not others:
        return names
    import pyarrow.compute as pc

    is_other = np.zeros(len(fields), np.bool_)
    is_other[[*others]] = True
    return pc.replace_with_mask(names, bool_array(is_other), bytes_array([*others.values()]))


class _ReadBuffer:
    """Forward reads of a file through one growing buffer; a view is valid until the next call."""

    def __init__(self, file: BinaryIO, ahead: int) -> None:
        file.seek(0)
        self._file = file
        self._buffer = bytearray(ahead)
        self._start = self._stop = 0
        self.ahead = ahead
        """Bytes read at a time, at least."""

    def read(self, position: int, num_bytes: int) -> memoryview:
        """`num_bytes` bytes from `position` on; fewer at the end of the file."""
        if position < self._start or position + num_bytes > self._stop:
            self._fill(position, max(num_bytes, self.ahead))
        return self.buffered(position)[:num_bytes]

    def buffered(self, position: int) -> memoryview:
        """Return the bytes that are already in memory from `position` on."""
        inside = self._start <= position <= self._stop
        begin, end = (position - self._start, self._stop - self._start) if inside else (0, 0)
        return memoryview(self._buffer)[begin:end]

    def total_bytes(self) -> int:
        return self._file.seek(0, 2)

    def _fill(self, position: int, num_bytes: int) -> None:
        rest = bytes(self.buffered(position))
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        self._buffer[: len(rest)] = rest
        self._file.seek(position + len(rest))
        self._start, filled = position, len(rest)
        into = memoryview(self._buffer)
        while filled < num_bytes and (count := self._file.readinto(into[filled:num_bytes])):  # type: ignore[attr-defined]
            filled += count
        self._stop = position + filled


class _ArchiveWalk:
    """A walk through an archive: its position, and the members found so far."""

    def __init__(self, file: BinaryIO, url: str, buffer_bytes: int, allow_unfinished: bool) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffer = _ReadBuffer(file, buffer_bytes)
        self._reader = MemberReader(
            url=url,
            read=self._buffer.read,
            total_bytes=self._buffer.total_bytes,
            allow_unfinished=allow_unfinished,
        )
        self._position = 0
        self._dense = True
        self._checked_at, self._since_check = 0, 0
        self._tables: list[NDArray[np.int64]] = []
        self._names: list[NDArray[np.uint8]] = []
        self._others: dict[int, bytes] = {}
        """By row, names that are not (only) the name field of a header."""
        self._links: dict[int, MemberLink] = {}
        self._count = 0
        self._name_bytes = 0

    def check_size(self, max_members: int) -> None:
        """Raise where more was found than so many members, or names of 128 bytes each, take."""
        if max(self._count, self._name_bytes // _NAME_BYTES) > max_members:
            reason = (
                f"more than {max_members} members, or very long names, in a compressed shard, which is read"
            )
            cure = "write smaller shards, or accept more with format=TarFormat(max_members=...)"
            self._reader.fail(self._position, f"{reason} in one piece; {cure}")

    def advance(self) -> bool:
        """Take in one member or a chain of them; False at the end of the archive."""
        if self._dense and (chain := self._next_chain()):
            self._take_chain(*chain)
            return True
        member = self._reader.member_at(self._position)
        if member is None:
            if not self._reader.unfinished:
                self._refuse_data_behind()
            return False
        row = np.array([_numbers_of(member)])
        self._append(row, np.zeros((1, NAME.stop), np.uint8), np.array([member.is_kept]), {0: member})
        self._move(member.end, 1)
        return True

    def members(self) -> Members:
        """Return all members that were found."""
        table = np.concatenate([np.empty((0, 6), np.int64), *self._tables])
        fields = np.concatenate([np.empty((0, NAME.stop), np.uint8), *self._names])
        total = self._buffer.total_bytes()
        return Members(
            first=table[:, 0],
            header=table[:, 1],
            end=np.minimum(table[:, 2], total),  # the last padding may be missing
            size=table[:, 3],
            flags=table[:, 4].astype(np.uint16),
            names=_names_in(fields, self._others),
            name_start=table[:, 5],
            links=self._links,
            total_bytes=total,
            unfinished=self._reader.unfinished,
            last_is_cut=len(table) > 0 and bool(table[-1, 1] + BLOCK + table[-1, 3] > total),
        )

    def _next_chain(self) -> tuple[NDArray[np.int64], NDArray[np.uint8], list[int]] | None:
        data = self._buffer.buffered(self._position)
        if len(data) < self._buffer_bytes // 64:  # too little to be worth the calls
            data = self._buffer.read(self._position, self._buffer_bytes)
        if self._reader.global_name is not None:
            return None
        blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
        return chain_of(blocks, self._position)

    def _take_chain(self, table: NDArray[np.int64], heads: NDArray[np.uint8], unusual: list[int]) -> None:
        mask = _IS_REGULAR[heads[:, TYPE]]
        members: dict[int, Member] = {}
        count = len(table)
        # What extension headers or odd fields may change is read again, by the reader that knows all rules.
        for i in unusual:
            member = self._reader.member_at(int(table[i, 0]))
            assert member is not None, "a header with a right checksum is no end of an archive"
            is_as_assumed = member.end == table[i, 2]
            members[i], table[i], mask[i] = member, _numbers_of(member), member.is_kept
            if not is_as_assumed or self._reader.global_name is not None:
                count = i + 1  # the chain assumed another end, or names of its own
                break
        if count - 1 not in members:
            name = heads[count - 1, NAME].tobytes().partition(b"\0")[0]
            self._reader.passed(int(table[count - 1, 1]), name, int(table[count - 1, 3]))
        self._append(table[:count], heads[:count, NAME], mask[:count], members)
        self._move(int(table[count - 1, 2]), count)

    def _append(
        self,
        table: NDArray[np.int64],
        names: NDArray[np.uint8],
        mask: NDArray[np.bool_],
        members: dict[int, Member],
    ) -> None:
        rows = self._count + np.cumsum(mask) - 1
        for i, member in members.items():
            if mask[i]:
                self._others[int(rows[i])] = member.name
                self._name_bytes += len(member.name)
            if member.link is not None:
                self._links[int(rows[i])] = member.link
                self._name_bytes += len(member.link.target)
        self._tables.append(table[mask])
        self._names.append(names[mask])
        self._count += int(np.count_nonzero(mask))

    def _move(self, position: int, num_members: int) -> None:
        """Go on, and choose between whole buffers and single headers by the mean size of late."""
        self._position = position
        self._since_check += num_members
        if num_members > 1 or self._since_check >= _RECHECK_MEMBERS:
            self._dense = position - self._checked_at <= self._since_check * _SPARSE_MEAN_BYTES
            self._checked_at, self._since_check = position, 0
        self._buffer.ahead = self._buffer_bytes if self._dense else _SPARSE_READ_BYTES

    def _refuse_data_behind(self) -> None:
        """Archives joined by `cat`, or a hole of zeros between members, would silently lose what follows."""
        start = self._position + BLOCK
        while len(tail := self._buffer.read(start, self._buffer_bytes)):
            data = np.frombuffer(tail, np.uint8)
            if data.any():
                offset = int((data != 0).argmax()) // BLOCK * BLOCK
                what = "a second archive" if bytes(tail[offset:][MAGIC]) == b"ustar" else "data"
                cure = "join archives with `tar --concatenate`"
                self._reader.fail(start + offset, f"{what} after the end of the first archive; {cure}")
            start += len(tail)
