"""One tar member at a time: the fields of a 512-byte header, and the extension headers before it.

Follows CPython's `tarfile`, the reader webdataset uses: ustar, old v7 (no magic), GNU long names ("L"),
GNU base-256 numbers, pax records ("x", and "g" for all that follows). Two things `tarfile` does silently
are errors here: it stops at a damaged header as if the archive ended there, and it reads on past one. An
archive without a zero block behind its last member was cut short, which is one, too. Names stay bytes. Sparse
members are refused: their bytes are not in the archive in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from msgspec import Struct

from sharding.errors import CorruptShardError

BLOCK = 512
"""Bytes of a header, and the unit payloads are padded to."""
NO_MAGIC, ODD_SIZE, COPIED = 1, 2, 4
"""Flags: a header without ustar magic; a size not written as 11 octal digits in the header itself; a payload
that lies in a block's index, as the block does not have it."""

NAME, SIZE, CHECKSUM, TYPE, LINK_NAME, MAGIC, PREFIX = (
    slice(0, 100),
    slice(124, 136),
    slice(148, 156),
    156,
    slice(157, 257),
    slice(257, 262),
    slice(345, 500),
)
REGULAR_TYPES = b"0\0" + b"7"
EXTENSION_TYPES = b"xgXLK"
BARE_TYPES = b"123456"
"""Links, devices, folders, pipes: no payload follows, whatever their size field says."""
LINK_TYPES = b"12"
"""Hard links and symbolic links."""
_SPARSE_TYPE = ord("S")
_OCTAL = re.compile(rb"[0-7]*")
_PLAIN_SIZE = re.compile(rb"[0-7]{11}[\0 ]")
_PAX_RECORD = re.compile(rb"(\d+) ([^=]+)=")
_MAX_EXTENSION_BYTES = 16 << 20
_MAX_MEMBER_BYTES = 1 << 50
"""More than any store holds, and few enough to add up."""


class MemberLink(Struct, frozen=True):
    """A link: the bytes are those of another file."""

    target: bytes
    is_symbolic: bool
    """A symbolic link names a file relative to its own folder, a hard link one of the archive before it."""


class Member(Struct, frozen=True, kw_only=True):
    """One member and where it lies; all positions count bytes from the start of the archive."""

    first: int
    """First byte, extension headers included."""
    header: int
    """The header; the payload begins `BLOCK` bytes on."""
    size: int
    """The bytes of the payload."""
    end: int
    """The position at which the next header belongs."""
    is_kept: bool
    """True if it is a file or a link; folders and the like are not."""
    name: bytes
    name_start: int
    """The position at which `name` stands in the archive in one piece; -1: nowhere."""
    flags: int
    link: MemberLink | None
    """Whose bytes it stands for, where it is a link."""


class Extensions(Struct):
    """The values of extension headers about the next member. Of several, the first one counts."""

    name: bytes | None = None
    name_start: int = -1
    link: bytes | None = None
    size: int | None = None

    def add(self, kind: int, body: bytes, start: int) -> None:
        """Take in the payload of one extension header, which lies at `start`. ValueError: malformed."""
        if kind == ord("L") and self.name is None:
            self.name, self.name_start = body.partition(b"\0")[0], start
        elif kind == ord("K") and self.link is None:
            self.link = body.partition(b"\0")[0]
        elif kind in b"xX" and changes_member(kind, body):
            for keyword, value, position in reversed(pax_records(body)):
                if keyword.startswith(b"GNU.sparse."):
                    raise ValueError("a sparse member; pack the shard without --sparse")
                if keyword == b"path" and self.name is None:
                    self.name, self.name_start = value.rstrip(b"/"), start + position
                elif keyword == b"linkpath" and self.link is None:
                    self.link = value
                elif keyword == b"size" and self.size is None:
                    if not value.isdigit():
                        raise ValueError(f"a pax size of {value!r}")
                    self.size = int(value)


def changes_member(kind: int, body: bytes) -> bool:
    """Return whether an extension header may change a member's name or size; most only state times."""
    if kind in b"xX":
        return b"path=" in body or b"size=" in body or b"GNU.sparse." in body
    return kind in b"gL"


def pax_records(body: bytes) -> list[tuple[bytes, bytes, int]]:
    """Keyword, value and position of the value of every record. ValueError where lengths do not fit."""
    records, position = [], 0
    while match := _PAX_RECORD.match(body, position):
        end = position + int(match[1])
        if not match.end() < end <= len(body):
            raise ValueError("a malformed pax record")
        records.append((match[2], body[match.end() : end - 1], match.end()))
        position = end
    return records


class _CutShortError(Exception):
    """The file ends before the archive does: where, and what is missing there."""


class MemberReader(Struct, kw_only=True):
    """Reads members one by one; keeps what global pax headers say."""

    url: str
    read: Callable[[int, int], memoryview]
    """`read(position, num_bytes)`: fewer bytes at the end of the archive only."""
    total_bytes: Callable[[], int]
    """Tells where the file ends; asked when nothing more can be read."""
    allow_unfinished: bool = False
    """True if a file may end anywhere, as an archive that is still written does."""
    unfinished: str = ""
    """The way in which the file ends before the archive does; "": it does not."""
    global_name: bytes | None = None
    last_header: int = -1
    last_name: bytes = b""
    last_payload_end: int = 0
    """The end of the previous member's payload, to tell a missing padding from a missing payload."""

    def member_at(self, first: int) -> Member | None:
        """The member whose first header is at `first`, or None where the archive, or the file, ends."""
        try:
            return self._member_at(first)
        except _CutShortError as error:
            position, reason = error.args
            if not self.allow_unfinished:
                offset = min(position, self.total_bytes())
                self.fail(offset, f"truncated: {reason}; allow_unfinished=True reads the whole samples")
            self.unfinished = reason
            return None

    def _member_at(self, first: int) -> Member | None:
        position, extensions = first, Extensions()
        while True:
            head = bytes(self.read(position, BLOCK))
            if position == first and self._ends(head, position):
                return None
            if len(head) < BLOCK:
                raise _CutShortError(position, f"it ends inside a header {self._behind()}")
            if not checksum_holds(head):
                self.fail(position, "not a tar header (bad checksum)")
            try:
                size = _number(head[SIZE])
            except ValueError as error:
                self.fail(position, f"the header's size field {head[SIZE]!r} is no number", error)
            if head[TYPE] not in EXTENSION_TYPES:
                return self._member(head, first, position, extensions, size)
            self._extend(head[TYPE], size, position, extensions)
            position += BLOCK + padded(size)

    def fail(self, position: int, reason: str, cause: Exception | None = None) -> NoReturn:
        """Raise `CorruptShardError` for the header at `position`."""
        raise CorruptShardError(self.url, reason, offset=position, stage="index") from cause

    def _ends(self, head: bytes, position: int) -> bool:
        if head.strip(b"\0"):
            return False
        if len(head) < BLOCK:
            if self.total_bytes() < self.last_payload_end:
                raise _CutShortError(self.last_header, f"it ends inside the payload of {self._last()}")
            raise _CutShortError(position, f"no block of zeros stands {self._behind()}")
        if bytes(self.read(position + BLOCK, BLOCK)).strip(b"\0"):
            self.fail(position, "a single zero block with data after it: neither a header nor an end")
        return True

    def _behind(self) -> str:
        return "at its start" if self.last_header < 0 else f"behind {self._last()}"

    def _last(self) -> str:
        return f"its last member, {self.last_name.decode(errors='backslashreplace')!r}"

    def _extend(self, kind: int, size: int, position: int, extensions: Extensions) -> None:
        start = position + BLOCK
        if size > _MAX_EXTENSION_BYTES:
            self.fail(position, f"a pax or GNU extension header of {size} bytes")
        body = bytes(self.read(start, size))
        if len(body) < size:
            raise _CutShortError(position, f"it ends inside a pax or GNU header {self._behind()}")
        try:
            if kind == ord("g"):
                self._extend_all(body, start)
            else:
                extensions.add(kind, body, start)
        except ValueError as error:
            self.fail(position, str(error), error)

    def _extend_all(self, body: bytes, start: int) -> None:
        everything = Extensions()
        everything.add(ord("x"), body, start)
        if everything.size is not None:
            raise ValueError("a global pax header that sets the size of all members")
        self.global_name = everything.name if everything.name is not None else self.global_name

    def _member(self, head: bytes, first: int, header: int, extensions: Extensions, size: int) -> Member:
        kind = head[TYPE]
        name, start = self._name(head, header, extensions)
        if kind == _SPARSE_TYPE:
            self.fail(header, "a sparse member; pack the shard without --sparse")
        # v7 marks folders by a slash at the end of the name field
        bare = kind in BARE_TYPES or (kind == 0 and head[NAME].partition(b"\0")[0].endswith(b"/"))
        plain_size = extensions.size is None and _PLAIN_SIZE.fullmatch(head[SIZE])
        flags = (0 if head[MAGIC] == b"ustar" else NO_MAGIC) | (0 if plain_size else ODD_SIZE)
        size = 0 if bare else size if extensions.size is None else extensions.size
        if size > _MAX_MEMBER_BYTES:
            self.fail(header, f"the header states {size} bytes of payload: it is damaged")
        self.passed(header, name, size)
        return Member(
            first=first,
            header=header,
            size=size,
            end=header + BLOCK + padded(size),
            is_kept=kind in LINK_TYPES or (kind in REGULAR_TYPES and not bare),
            name=name,
            name_start=start,
            flags=flags,
            link=_link(head, extensions) if kind in LINK_TYPES else None,
        )

    def passed(self, header: int, name: bytes, size: int) -> None:
        """Remember the last member before where the reader stands."""
        self.last_header, self.last_name, self.last_payload_end = header, name, header + BLOCK + size

    def _name(self, head: bytes, header: int, extensions: Extensions) -> tuple[bytes, int]:
        if extensions.name is not None:
            return extensions.name, extensions.name_start
        if self.global_name is not None:
            return self.global_name, -1
        name, prefix = (head[field].partition(b"\0")[0] for field in (NAME, PREFIX))
        return (prefix + b"/" + name, -1) if prefix else (name, header)


def _link(head: bytes, extensions: Extensions) -> MemberLink:
    stated = head[LINK_NAME].partition(b"\0")[0] if extensions.link is None else extensions.link
    return MemberLink(stated, is_symbolic=head[TYPE] == ord("2"))


def padded(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def checksum_holds(head: bytes) -> bool:
    """Return whether a header's bytes sum to what it states; as signed bytes, too, as some tars count."""
    try:
        stated = _number(head[CHECKSUM])
    except ValueError:
        return False
    rest = head[: CHECKSUM.start] + head[CHECKSUM.stop :]
    unsigned = sum(rest) + 8 * ord(" ")
    return stated in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest))


def _number(text: bytes) -> int:
    """An octal or base-256 field; ValueError for negative numbers and other text."""
    if text[:1] == b"\x80":
        return int.from_bytes(text[1:], "big")
    digits = text.partition(b"\0")[0].strip()
    if not _OCTAL.fullmatch(digits):
        raise ValueError(f"{text!r} is no octal number")
    return int(digits or b"0", 8)
