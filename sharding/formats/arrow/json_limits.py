"""What JSON text may ask of its parser, counted before it is parsed.

pyarrow's parser calls itself once a level: some 12,000 levels overflow a stack of 8 MB, which ends the
process. And it keeps a place in memory for each key of a column in every object of it: 30,000 lines of one
key each, all different, take 900 million places. Neither can be caught.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MAX_DEPTH = 100
"""Levels of brackets: Arrow refuses schemas of more than 128, Python text of some 1,000."""
_MAX_PARSED_DEPTH = 1000
"""Levels that pyarrow parses on the stack of any thread, at some 0.5 KB each."""
_CHUNK_BYTES = 1 << 10
_PIECE_BYTES = 4 << 20
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_TOKEN = re.compile(rb'("[^"]*")\s*:|"[^"]*"|([\[{])|([\]}])|(,)')
_LINE_END, _RETURN, _OPENING, _CLOSING = b"\n\r{}"


def too_deep(data: bytes | memoryview, *, exact: bool = False) -> int | None:
    """Where the first line begins that is nested more than `MAX_DEPTH` levels deep, or None.

    `exact=False` may let pass what the parser survives, up to 1,000 levels: that takes a twentieth to a tenth
    of the time of parsing.
    """
    raw = np.frombuffer(data, np.uint8)
    openings = np.zeros(-(-len(raw) // _CHUNK_BYTES) * _CHUNK_BYTES, np.bool_)
    np.equal(raw & 0xDF, ord("["), out=openings[: len(raw)])  # "{" is "[" and one bit
    if np.count_nonzero(openings) <= (MAX_DEPTH if exact else _MAX_PARSED_DEPTH):
        return None
    line_ends = np.flatnonzero(raw == _LINE_END)
    if not exact and not _has_many_openings(raw, openings, line_ends):
        return None
    depth = 0
    for start, piece in _pieces(data, line_ends):
        before = depth
        deepest, depth = _levels(piece, before)
        if deepest > MAX_DEPTH:
            for line in piece.splitlines(keepends=True):
                deepest, before = _levels(line, before)
                if deepest > MAX_DEPTH:
                    break
                start += len(line)
            return start
    return None


def _has_many_openings(
    raw: NDArray[np.uint8], openings: NDArray[np.bool_], line_ends: NDArray[np.int64]
) -> bool:
    """Whether so many may lie between two places at which no object is open: line ends amid "}" and "{"."""
    ends = line_ends[(line_ends > 1) & (line_ends < len(raw) - 1)]
    before = np.where(raw[ends - 1] == _RETURN, raw[ends - 2], raw[ends - 1])
    ends = ends[(before == _CLOSING) & (raw[ends + 1] == _OPENING)]
    # Eight at a time: each of a word's bytes counts up to the 128 words of a chunk.
    words = np.add.reduce(openings.view(np.uint64).reshape(-1, _CHUNK_BYTES // 8), axis=1)
    chunks = words.view(np.uint8).reshape(-1, 8).sum(axis=1, dtype=np.int64)
    upto = np.append(0, np.cumsum(chunks))
    bounds = np.concatenate([[0], ends, [len(raw) - 1]]) // _CHUNK_BYTES
    return bool((upto[bounds[1:] + 1] - upto[bounds[:-1]]).max() > _MAX_PARSED_DEPTH)


def _pieces(data: bytes | memoryview, line_ends: NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
    """The text in pieces of whole lines, each with its place."""
    behind = np.searchsorted(line_ends, np.arange(_PIECE_BYTES, len(data), _PIECE_BYTES))
    cuts = np.append(line_ends + 1, len(data))[np.unique(behind)]
    for start, end in pairwise([0, *cuts.tolist(), len(data)]):
        yield start, bytes(data[start:end])


def _levels(text: bytes, depth: int) -> tuple[int, int]:
    """The deepest level of a text that begins at level `depth`, outside of strings, and that at its end."""
    # Without escapes, each quote opens or ends a string: every second piece between them lies outside.
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
    brackets = np.frombuffer(b"".join(bare.split(b'"')[::2]), np.uint8)
    deepest = depth
    for start in range(0, len(brackets), _PIECE_BYTES):
        steps = (brackets[start : start + _PIECE_BYTES] & 2).astype(np.int32) - 1  # opening: 1, closing: -1
        levels = depth + np.cumsum(steps)
        deepest, depth = max(deepest, int(levels.max())), int(levels[-1])
    return deepest, depth


def num_places(line: bytes, max_keys: int) -> tuple[int, int]:
    """How many different keys a line has, by their path, and how many places in memory they take.

    A key has a place in each object of its path: one, or one for each element of the list that the path goes
    through last. Counting ends where there are more than `max_keys`, and where the text is no JSON.
    """
    # One pass with a stack of the open brackets: the depth is the attacker's, so no recursion. A path is a
    # number: one for each pair of the number of the path before and the key, or "[", that is last on it.
    text = line.replace(rb"\\", b"\0").replace(rb"\"", b"\1")  # other than any that JSON may hold
    paths: dict[tuple[int, bytes], int] = {}
    list_of, elements = [0], {0: 1}  # path -> last list on it; list -> how many elements
    stack: list[tuple[int, bool]] = []
    here = 0
    for key, opening, closing, comma in (token.groups() for token in _TOKEN.finditer(text)):
        if opening == b"[":
            here = paths.setdefault((here, opening), len(paths) + 1)
            elements[here] = elements.get(here, 0) + 1
            list_of[here:] = [here] if here == len(list_of) else list_of[here:]
        if opening:
            stack.append((here, opening == b"["))
        elif closing and stack:
            stack.pop()
        elif stack and comma and stack[-1][1]:
            here = stack[-1][0]
            elements[here] += 1
        elif stack and key:
            owner = stack[-1][0]
            here = paths.setdefault((owner, key), len(paths) + 1)
            if here == len(list_of):
                list_of.append(list_of[owner])
        if len(paths) > max_keys or not stack:
            break
    return len(paths), sum(elements[one] for one in list_of[1:])
