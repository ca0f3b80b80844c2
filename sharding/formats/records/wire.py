"""The encoding of protobuf messages, many messages at a time, by the compiled library."""

from __future__ import annotations

import numpy as np

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


def fields(data: Bytes, starts: Ints, ends: Ints, count: int, kind: int = VARINT) -> tuple[Ints, Ints]:
    """The fields 1 to `count` of messages of a few fields each, if they are of a wire type.

    Args:
        data: uint8, what holds the messages.
        starts: where each begins, [n].
        ends: where each ends, [n], inside of `data`.
        count: of fields.
        kind: `VARINT` or `SPAN`.

    Returns:
        The numbers, or the lengths of spans, [n, count], and where what is behind them begins; 0: not there.

    Raises:
        WireError: a message is damaged, or none at all.
    """
    numbers, behind = np.zeros((2, len(starts), count), np.int64)
    rows, positions = np.flatnonzero(starts < ends), starts.copy()
    if (starts[rows] < 0).any() or (ends[rows] > len(data)).any():
        raise WireError(_DAMAGE[-1])
    while len(rows):
        tag, begin = varints_at(data, positions[rows], _HEAD_BYTES)
        number, wire = tag >> 3, tag & 7
        if (number == 0).any() or not np.isin(wire, (VARINT, FIXED64, SPAN, FIXED32)).all():
            raise WireError(_DAMAGE[-3 if (number == 0).any() else -4])
        is_fixed = (wire == FIXED64) | (wire == FIXED32)
        value, end = varints_at(data, np.where(is_fixed, positions[rows], begin), 10)
        end = np.where(is_fixed, begin + np.where(wire == FIXED64, 8, 4), end)
        stop = end + np.where(wire == SPAN, value, 0)
        if (stop > ends[rows]).any() or (stop < end).any():
            raise WireError(_DAMAGE[-1])
        if ((wire == SPAN) & (end > begin + _HEAD_BYTES)).any():
            raise WireError(_DAMAGE[-2])
        is_wanted = (wire == kind) & (number <= count)
        numbers[rows[is_wanted], number[is_wanted] - 1] = value[is_wanted]
        behind[rows[is_wanted], number[is_wanted] - 1] = end[is_wanted]
        positions[rows] = stop
        rows = rows[stop < ends[rows]]
    return numbers, behind


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


def varints_at(data: Bytes, positions: Ints, most_bytes: int) -> tuple[Ints, Ints]:
    """The numbers that begin at some bytes, and where each ends; beyond `data` they are anything."""
    byte = data.take(positions, mode="clip")
    value, positions = (byte & 0x7F).astype(np.int64), positions + 1
    rows, size = np.flatnonzero(byte >= 0x80), 1
    while len(rows):
        if size == most_bytes:
            raise WireError(f"a number takes more than {most_bytes} bytes")
        byte = data.take(positions[rows], mode="clip")
        value[rows] |= (byte & 0x7F).astype(np.int64) << 7 * size
        positions[rows] += 1
        rows, size = rows[byte >= 0x80], size + 1
    return value, positions


def whole_numbers(numbers: Ints) -> Ints:
    """Return numbers one behind the other, as the library reads them; those of a table's column are not."""
    return np.ascontiguousarray(numbers, np.int64)


def unharmed(result: int) -> int:
    """Return what a function of the library found; raises `WireError` where that is damage."""
    if result < 0:
        raise WireError(_DAMAGE[result])
    return result


def varint(body: bytes | memoryview, position: int) -> tuple[int, int]:
    """The tag or length that begins at a byte, and where it ends."""
    value = shift = 0
    try:
        while (byte := body[position]) >= 0x80:
            value |= (byte & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if shift >= 7 * _HEAD_BYTES:
                raise WireError(f"a number takes more than {_HEAD_BYTES} bytes")
    except IndexError as error:
        raise WireError("a number ends behind its message") from error
    return value | byte << shift, position + 1
