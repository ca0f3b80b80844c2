"""The encoding of protobuf messages, many messages at a time, by the compiled library."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharding.core.library import address_of, library
from sharding.spans import Bytes, Ints

VARINT, FIXED64, SPAN, FIXED32 = 0, 1, 2, 5
"""Wire types; groups, which are of before 2008, are none."""
_HEAD_BYTES = 5
"""The bytes of a tag or a length, at most: messages end below 2 GiB."""
_DAMAGE = {
    -1: "a field or a number ends behind its message",
    -2: "a number takes too many bytes",
    -3: "a field has number 0",
    -4: "a field has a wire type that there is not",
    -5: "a record is no tf.train.Example",
}
"""`core_damage` of `core.h`."""


class WireError(ValueError):
    """Bytes that are no message."""


class Fields(NamedTuple):
    """Fields of messages, in the order of messages and within each as they are stored."""

    message: Ints
    """[k] the message that each is of."""
    number: Ints
    wire: Ints
    start: Ints
    """[k] where the value begins; of a varint, its first byte."""
    end: Ints

    def of(self, rows: NDArray[np.bool_] | Ints) -> Fields:
        """Return those that a mask has, or these rows."""
        return Fields(*(column[rows] for column in self))


def fields(data: Bytes, starts: Ints, ends: Ints) -> Fields:
    """All fields of messages.

    Args:
        data: uint8, what holds the messages.
        starts: where each begins, [n].
        ends: where each ends, [n], inside of `data`.

    Raises:
        WireError: a message is damaged, or none at all.
    """
    starts, ends = whole_numbers(starts), whole_numbers(ends)
    spans = (address_of(data), len(data), address_of(starts), address_of(ends), len(starts))
    most, found = 0, 2 * len(starts) + 1
    while most < found:  # as many as there are, where there are more than the guess
        most = found
        table = np.empty((5, most), np.int64)
        found = unharmed(library().core_fields(*spans, address_of(table), most))
    return Fields(*table[:, :found])


def numbers_in(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The varints of spans of bytes that hold nothing else, and how many each has.

    Args:
        data: uint8, what holds the spans.
        starts: where each begins, [n].
        ends: where each ends, [n], inside of `data`.

    Raises:
        WireError: a number takes more than 10 bytes, or ends behind its span.
    """
    starts, ends, counts = whole_numbers(starts), whole_numbers(ends), np.empty(len(starts), np.int64)
    spans = (address_of(data), len(data), address_of(starts), address_of(ends), len(starts))
    total = unharmed(library().core_numbers(*spans, address_of(counts), None, 0))
    numbers = np.empty(total, np.int64)
    unharmed(library().core_numbers(*spans, address_of(counts), address_of(numbers), total))
    return numbers, counts


def varints_at(data: Bytes, at: Ints, most_bytes: int) -> tuple[Ints, Ints]:
    """The numbers that begin at some bytes, and where each ends; beyond `data` they are anything."""
    byte = data.take(at, mode="clip")
    value, at = (byte & 0x7F).astype(np.int64), at + 1
    rows, size = np.flatnonzero(byte >= 0x80), 1
    while len(rows):
        if size == most_bytes:
            raise WireError(f"a number takes more than {most_bytes} bytes")
        byte = data.take(at[rows], mode="clip")
        value[rows] |= (byte & 0x7F).astype(np.int64) << 7 * size
        at[rows] += 1
        rows, size = rows[byte >= 0x80], size + 1
    return value, at


def whole_numbers(numbers: Ints) -> Ints:
    """Return numbers one behind the other, as the library reads them; those of a table's column are not."""
    return np.ascontiguousarray(numbers, np.int64)


def unharmed(found: int) -> int:
    """Return what a function of the library found; raises `WireError` where that is damage."""
    if found < 0:
        raise WireError(_DAMAGE[found])
    return found


def varint(body: bytes | memoryview, at: int, most_bytes: int = _HEAD_BYTES) -> tuple[int, int]:
    """The number that begins at a byte, and where it ends."""
    value = shift = 0
    try:
        while (byte := body[at]) >= 0x80:
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if shift >= 7 * most_bytes:
                raise WireError(f"a number takes more than {most_bytes} bytes")
    except IndexError as error:
        raise WireError("a number ends behind its message") from error
    return value | byte << shift, at + 1
