"""One cached block: its name, and its file, which is the block's bytes and a trailer with their checksum.

The name tells shard, offset and length; the shard by a hash of its URL, version and size. The trailer says
the same, so that a block under another's name is noticed as well as any changed, missing or added byte.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from prefetch.store.local import read_fully
from sharding.blocks import Shard
from sharding.hub.names import is_pinned, parse_name

_TRAILER = struct.Struct("<8s16sQQI")  # magic, tag, offset, length, CRC-32 of the bytes
_SEAL = struct.Struct("<I")  # CRC-32 of the trailer
_MAGIC = b"dfblock1"
MORE_BYTES = _TRAILER.size + _SEAL.size
NAME = re.compile(r"([0-9a-f]{32})-(\d{1,16})-(\d{1,12})")


class DamagedEntryError(Exception):
    """A block in the folder is not what was written."""


@dataclass(frozen=True)
class Entry:
    """Names a block: these bytes of this version of a shard."""

    tag: str
    """The tag of the shard, 32 hex digits (`tag_of`)."""
    offset: int
    nbytes: int

    @property
    def name(self) -> str:
        """Return the file name, which is unique."""
        return f"{self.tag}-{self.offset}-{self.nbytes}"

    @property
    def stored_bytes(self) -> int:
        """Return the number of bytes on the disk."""
        return self.nbytes + MORE_BYTES


@lru_cache(maxsize=4096)
def tag_of(shard: Shard) -> str:
    """32 hex digits for URL, version and size."""
    # On the Hub a version is a hash of the content: the next commit may have the same.
    url = structs.replace(parse_name(shard.url), revision=None).url if is_pinned(shard.url) else shard.url
    text = f"{url}\0{shard.version}\0{shard.size}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def shard_hash(tag: str) -> int:
    """The first 64 bits of a tag: enough to tell shards apart where a mistake costs only time."""
    return int(tag[:16], 16)


def read_entry(root: str, entry: Entry, out: NDArray[np.uint8]) -> int | None:
    """Fill `out` with a block's bytes; their CRC-32, or None if it is not there.

    Raises `DamagedEntryError`, or `OSError` as the disk says. `out` then holds anything.
    """
    try:
        descriptor = os.open(block_path(root, entry.name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):  # no such block, or no such folder
        return None
    try:
        done = read_fully(descriptor, 0, out)
        trailer = os.pread(descriptor, MORE_BYTES + 1, entry.nbytes)
    finally:
        os.close(descriptor)
    checksum = zlib.crc32(out.data)
    if done != entry.nbytes or trailer != trailer_of(entry, checksum):
        raise DamagedEntryError(entry.name)
    return checksum


def block_path(root: str, name: str) -> str:
    """Return the path of a block of this name."""
    # By a checksum and not the tag's first digits: one shard may have more blocks than a folder is good for.
    return os.path.join(root, "blocks", f"{zlib.crc32(name.encode()) & 0xFF:02x}", name)


def trailer_of(entry: Entry, checksum: int) -> bytes:
    """Return the trailer behind a block's bytes, whose CRC-32 is given."""
    body = _TRAILER.pack(_MAGIC, bytes.fromhex(entry.tag), entry.offset, entry.nbytes, checksum)
    return body + _SEAL.pack(zlib.crc32(body))
