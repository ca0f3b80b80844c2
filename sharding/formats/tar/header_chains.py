"""Tar headers by the thousand: the members whose headers lie in one buffer of an archive.

Every 512-byte block with the ustar magic and a right checksum is a candidate; sizes come from one matrix
product. A candidate is believed only if it lies on the chain that starts at a known header (each member
ends where the next begins), so payloads that are tar archives themselves fool nobody.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sharding.formats.tar.header import (
    BARE_TYPES,
    BLOCK,
    CHECKSUM,
    EXTENSION_TYPES,
    LINK_TYPES,
    MAGIC,
    PREFIX,
    SIZE,
    TYPE,
    changes_member,
)

_USTAR, _MTIME = np.frombuffer(b"ustar", np.uint8), np.frombuffer(b" mtime=", np.uint8)
_OCTAL_WEIGHTS = 8.0 ** np.arange(10, -1, -1)


def one_of(kinds: bytes) -> NDArray[np.bool_]:
    """Table `[256]` of the member types in `kinds`."""
    return np.isin(np.arange(256), np.frombuffer(kinds, np.uint8))


_IS_BARE, _IS_EXTENSION, _IS_UNUSUAL = (
    one_of(BARE_TYPES),
    one_of(EXTENSION_TYPES),
    one_of(b"\0S" + LINK_TYPES),
)


def chain_of(
    blocks: NDArray[np.uint8], base: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], list[int]] | None:
    """The members whose headers are chained from the first of `blocks` ([n, 512], at byte `base`) on.

    Returns:
        [k, 6] first byte, extension headers included, header, end, size, flags and where the name stands, in
        the archive; their headers [k, 512]; the numbers of those that `MemberReader` has to look at. None
        where the first block is no header that can be believed by itself: the caller reads that one slowly.
    """
    at, heads, size = _candidates(blocks)
    if not len(at) or at[0] != 0:
        return None
    kind = heads[:, TYPE]
    size = np.where(_IS_BARE[kind], 0, size)
    after = at + 1 + -(-size // BLOCK)
    chain = _chain(at, after)
    extension = _IS_EXTENSION[kind[chain]]
    members = chain[~extension]
    if not len(members):
        return None
    unusual = _IS_UNUSUAL[kind[members]] | (heads[members, PREFIX.start] != 0)
    extensions = chain[extension & (chain < members[-1])]
    # webdataset's own writer puts a time before every member: looking at each would take all the time saved.
    extensions = extensions[~_only_mtime(kind[extensions], size[extensions], blocks[at[extensions] + 1, :9])]
    for row in extensions.tolist():
        if changes_member(kind[row], blocks[at[row] + 1 : after[row]].tobytes()):
            unusual[np.searchsorted(members, row)] = True
    end = base + after[members] * BLOCK
    first = np.append(base, end[:-1])  # where the previous member ends, its extension headers begin
    header = base + at[members] * BLOCK  # its first field is the name
    table = np.stack([first, header, end, size[members], np.zeros_like(end), header], axis=1)
    return table, heads[members], np.flatnonzero(unusual).tolist()


def _only_mtime(
    kind: NDArray[np.uint8], size: NDArray[np.int64], body: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    """Return which pax headers hold one record, a time."""
    digits = (body[:, :2] - ord("0")).astype(np.int64)
    one_record = digits[:, 0] * 10 + digits[:, 1] == size
    return np.asarray((kind == ord("x")) & one_record & (body[:, 2:9] == _MTIME).all(axis=1))


def _candidates(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Blocks that look like current headers: numbers `[n]`, bytes `[n, 512]` and stated sizes `[n]`."""
    numbers = np.flatnonzero(blocks[:, MAGIC.start] == _USTAR[0])
    heads = blocks[numbers]
    size, sound = octal_sizes(heads[:, SIZE])
    sound &= (heads[:, MAGIC] == _USTAR).all(axis=1) & _checksums_hold(heads)
    return numbers[sound], heads[sound], size[sound]


def _chain(numbers: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which candidates follow each other without a gap, from the first one on."""
    # Mostly all do. Else a payload holds what looks like a header (a tar in the tar), and the chain, which
    # steps over payloads, has to be followed link by link from the first gap on.
    breaks = np.flatnonzero(after[:-1] != numbers[1:])
    if not len(breaks):
        return np.arange(len(numbers))
    follow = np.searchsorted(numbers, after)
    linked = np.append(numbers, -1)[follow] == after
    chain = list(range(int(breaks[0]) + 1))
    while linked[chain[-1]]:
        chain.append(int(follow[chain[-1]]))
    return np.array(chain)


def octal_sizes(fields: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Values of size fields `[n, 12]`, and which of them are 11 octal digits and an end mark."""
    digits = fields[:, :11] - ord("0")  # wraps around for other characters
    values = digits.astype(np.float64) @ _OCTAL_WEIGHTS  # exact below 2**53, and BLAS does it
    return values.astype(np.int64), (digits < 8).all(axis=1) & _ends_number(fields[:, 11])


def _checksums_hold(heads: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which headers `[n, 512]` sum to what they state in 6 or 7 digits."""
    stated = heads[:, CHECKSUM]
    digits = stated[:, :7] - ord("0")
    long = digits[:, 6] < 8
    total = (digits[:, :6].astype(np.float64) @ _OCTAL_WEIGHTS[-6:]).astype(np.int64)
    total = np.where(long, total * 8 + digits[:, 6], total)
    ended = _ends_number(np.where(long, stated[:, 7], stated[:, 6]))
    sums = heads.sum(axis=1, dtype=np.uint32).astype(np.int64) - stated.sum(axis=1) + 8 * ord(" ")
    return np.asarray((sums == total) & (digits[:, :6] < 8).all(axis=1) & ended)


def _ends_number(mark: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return np.asarray((mark == 0) | (mark == ord(" ")))
