"""The encoding of protobuf messages, many messages at a time.

`fields` takes one step in all messages at once: the first field of each, then the second of each that has
one, and so on. So a block of records with a handful of features takes a handful of steps of numpy, in
whatever order each record has them. Where few messages go on for long, these are walked one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharding.spans import Bytes, Ints

VARINT, FIXED64, SPAN, FIXED32 = 0, 1, 2, 5
"""Wire types; groups, which are of before 2008, are none."""
_HEAD_BYTES = 5
"""The bytes of a tag or a length, at most: messages end below 2 GiB."""
_VARINT_BYTES = 10
_PIECE_BYTES = 128 << 10
"""Packed numbers are read in pieces that stay in the processor's cache."""
_FEW = 16
"""Fewer messages than this are walked faster one by one (1 us a field) than together (20 us a step)."""


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
    message = np.flatnonzero(starts < ends)
    at, end = starts[message], ends[message]
    parts = list[Fields]()
    while len(message):
        if len(message) < _FEW <= len(parts):
            few = zip(message.tolist(), at.tolist(), end.tolist(), strict=True)
            parts += [_walked(data, *one) for one in few]
            break
        tag, body = varints_at(data, at, _HEAD_BYTES)
        wire, number = tag & 7, tag >> 3
        body, stop = _bodies(data, wire, body)
        if (number == 0).any() or (stop > end).any():
            raise WireError("a field has number 0, or ends behind its message")
        parts.append(Fields(message, number, wire, body, stop))
        goes_on = stop < end
        at = stop
        if not goes_on.all():
            message, at, end = message[goes_on], at[goes_on], end[goes_on]
    if len(parts) < 2:
        none = np.zeros(0, np.int64)
        return parts[0] if parts else Fields(none, none, none, none, none)
    together = Fields(*map(np.concatenate, zip(*parts, strict=True)))
    return together.of(np.argsort(together.message, kind="stable"))


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


def numbers_in(data: Bytes) -> NDArray[np.int64]:
    """All numbers of bytes that hold nothing else, such as packed ones; the last must be whole."""
    is_last = data < 0x80
    if is_last.all():
        return data.astype(np.int64)
    if not is_last[-1]:
        raise WireError("a number ends behind its list")
    numbers = np.empty(int(np.count_nonzero(is_last)), np.int64)
    begin = filled = 0
    while begin < len(data):
        end = min(len(data), begin + _PIECE_BYTES)
        end -= int(is_last[max(begin, end - _VARINT_BYTES - 1) : end][::-1].argmax())
        part, own = data[begin:end], is_last[begin:end]
        if not own[-1]:
            raise WireError(f"a number takes more than {_VARINT_BYTES} bytes")
        found = _numbers_in_piece(part, own)
        numbers[filled : filled + len(found)] = found
        begin, filled = end, filled + len(found)
    return numbers


def _numbers_in_piece(data: Bytes, is_last: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The numbers of bytes that hold nothing else, and the last of them."""
    goes_on = ~is_last
    of_five = goes_on[:-4] & goes_on[1:-3] & goes_on[2:-2] & goes_on[3:-1]
    is_first = np.empty_like(is_last)
    is_first[0], is_first[1:] = True, is_last[:-1]
    if of_five.any():
        return _long_numbers(data, np.flatnonzero(is_first), np.flatnonzero(is_last))
    # The four bytes from each first one on, of which those behind the last are masked; then the gaps between
    # seven bits are closed, and those between pairs of these.
    whole = np.concatenate([data, np.zeros(3, np.uint8)])
    word = np.ndarray(len(data), "<u4", whole.data, 0, (1,))[is_first]
    stop = ~word & np.uint32(0x80808080)
    word &= stop ^ (stop - np.uint32(1))
    for low, high, shift in ((0x007F007F, 0x7F007F00, 1), (0x3FFF, 0x3FFF0000, 2)):
        word = (word & np.uint32(low)) | ((word & np.uint32(high)) >> np.uint32(shift))
    return word.astype(np.int64)


def _long_numbers(data: Bytes, first: Ints, last: Ints) -> NDArray[np.int64]:
    """The numbers between some bytes, which may have more than four."""
    sizes = last - first + 1
    if sizes.max() > _VARINT_BYTES:
        raise WireError(f"a number takes more than {_VARINT_BYTES} bytes")
    value = (data[first] & 0x7F).astype(np.uint64)
    for nth in range(1, int(sizes.max())):
        rows = np.flatnonzero(sizes > nth)
        value[rows] |= (data[first[rows] + nth] & 0x7F).astype(np.uint64) << np.uint64(7 * nth)
    signed: Ints = value.view(np.int64)
    return signed


def _bodies(data: Bytes, wire: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Return where the values behind tags begin and end."""
    is_span = wire == SPAN
    if is_span.all():
        size, start = varints_at(data, at, _HEAD_BYTES)
        return start, start + size
    start, stop = at.copy(), at.copy()
    size, start[is_span] = varints_at(data, at[is_span], _HEAD_BYTES)
    stop[is_span] = start[is_span] + size
    is_varint = wire == VARINT
    stop[is_varint] = varints_at(data, at[is_varint], _VARINT_BYTES)[1]
    stop[wire == FIXED64] += 8
    stop[wire == FIXED32] += 4
    if ((wire > FIXED32) | (wire == 3) | (wire == 4)).any():
        raise WireError("a field has a wire type that there is not")
    return start, stop


def _walked(data: Bytes, message: int, at: int, end: int) -> Fields:
    """The fields of one message from a byte on."""
    body, base, rows = bytes(data[at:end]), at, list[tuple[int, int, int, int]]()
    at, size = 0, end - at
    while at < size:
        tag, at = varint(body, at)
        wire, start = tag & 7, at
        if wire == SPAN:
            length, start = varint(body, at)
            at = start + length
        elif wire == VARINT:
            at = varint(body, at, _VARINT_BYTES)[1]
        elif wire in (FIXED32, FIXED64):
            at += 4 if wire == FIXED32 else 8
        else:
            raise WireError("a field has a wire type that there is not")
        rows.append((tag >> 3, wire, base + start, base + at))
    if at > size or any(number == 0 for number, *_ in rows):
        raise WireError("a field has number 0, or ends behind its message")
    table = np.array(rows, np.int64).reshape(-1, 4).T
    return Fields(np.full(len(rows), message), *table)


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
