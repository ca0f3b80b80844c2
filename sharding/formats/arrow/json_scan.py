"""Learning what the lines of a file hold, key by key, a piece at a time.

Most pieces hold nothing new: msgspec reads them into rows of what was seen so far, and refuses any other key;
which kinds of values are in a column is then asked in one call. A piece that holds something new is read line
by line, and some of its lines are looked at value by value. Keys that an object has twice are looked for in
the text. Memory is that of a piece, and some hundred bytes a key.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sharding.arrow_arrays import bytes_array
from sharding.core.library import address_of, library
from sharding.formats.arrow.json_arrays import RawTexts, Text
from sharding.formats.arrow.json_lines import (
    MOST_CELLS,
    NOT_READ,
    LineError,
    faults_of_line,
    items_of,
    lines_of,
    pieces,
    row_type,
    starts_of_lines,
    values_of,
)
from sharding.formats.arrow.json_types import (
    BOOL,
    FRACTION,
    INTEGER,
    LIST,
    MAX_LEVELS,
    NESTED,
    OBJECT,
    SURROGATE,
    TEXT,
    VALUE,
    SchemaInferrer,
    integer_kinds,
)

_LEARNED_LINES = 64
"""Lines looked at value by value, before it is tried again whether others are like them."""
_FEWER_KEYS = (
    'write keys that are data as values: {"key": ..., "value": ...}; '
    "or accept more with format=JsonlFormat(max_columns=...)"
)
_KEY_SLOTS = 1 << 12
"""Twice the keys of a line that are compared without a second look."""
_LINE_KEYS, _LINES_ODD = 1, 2
_STEADY_KEYS = 500
"""Up to so many, a row is made anew for each new key; beyond only where some lines brought none."""
_KINDS = {bool: BOOL, int: INTEGER, float: FRACTION, str: TEXT}
_SCALAR = int | float | bool | str | None
_NUMBERS = list[int | float | bool | None]
_numbers = msgspec.json.Decoder(_NUMBERS)
_lists_of_numbers = msgspec.json.Decoder(list[_NUMBERS | None])
_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
_scalar = msgspec.json.Decoder(_SCALAR)


class LineScanner:
    """A record of what the lines looked at so far hold.

    Args:
        max_keys: keys that make a column each, at most.
    """

    def __init__(self, max_keys: int) -> None:
        self.root, self.num_keys = SchemaInferrer(), 0
        self.doubled: tuple[int, str] | None = None
        """A line, counted from 1 on without empty ones, and a key that it has twice, if any was seen."""
        self._num_lines = 0
        self._max_keys = max_keys
        self._keys = np.zeros(_KEY_SLOTS * 3 // 2, np.uint64)
        self._rows: _ScannedRow | None = None
        self._num_elements = 0
        self._is_known = False
        """True if the lines that were read last held nothing new."""
        self._is_new = True
        """True if the last lines that were looked at brought something new."""

    def scan(self, text: bytes, offset: int) -> tuple[int, int]:
        """Look at the lines that begin at a byte of the file: how many, and elements of lists of numbers.

        Raises:
            LineError: a line is not JSON, not an object, or one with which there are more keys; `at` counts
                from the file's beginning.
        """
        num_rows, before = 0, self._num_elements
        for position, piece in pieces(text):
            _check_utf8(piece, offset + position)
            num_lines, count = self._look_at_keys(piece), 0
            if self._is_known and 0 <= num_lines * self.num_keys <= MOST_CELLS:
                count = self._scan_known(piece)
            if not count:
                num_lines = self._scan_lines(piece, offset + position)
            num_rows += num_lines
            self._num_lines += num_lines
        return num_rows, self._num_elements - before

    def _look_at_keys(self, piece: bytes) -> int:
        """Count the lines, and note the first with a key twice; -1 where one is not one whole object."""
        text, counted, position, num_lines = np.frombuffer(piece, np.uint8), np.zeros(2, np.int64), 0, 0
        while True:
            keys = address_of(self._keys), 0 if self.doubled else _KEY_SLOTS, address_of(counted)
            answer = library().core_json_lines(address_of(text) + position, len(piece) - position, *keys)
            num_lines, position = num_lines + int(counted[0]), position + int(counted[1])
            if answer != _LINE_KEYS:
                return -1 if answer == _LINES_ODD else num_lines
            end, doubled = piece.find(b"\n", position) + 1 or len(piece), list[str]()
            try:
                json.loads(piece[position:end], object_pairs_hook=partial(note_doubled, doubled))
            except (ValueError, RecursionError):
                return -1
            num_lines, position = num_lines + 1, end
            if doubled:
                self.doubled = self._num_lines + num_lines, doubled[0]

    def _scan_lines(self, piece: bytes, offset: int) -> int:
        lines, done = lines_of(piece), 0
        self._is_known = True
        while done < len(lines):
            some = lines[done : done + max(1, MOST_CELLS // max(1, self.num_keys))]
            count = self._scan_known(some)
            done += count
            if count < len(some):
                if self._is_known:
                    self._is_known, starts = False, offset + starts_of_lines(piece)
                some = lines[done : done + _LEARNED_LINES]
                self._learn(some, starts[done : done + len(some)].tolist())
                done += len(some)
        return len(lines)

    def _scan_known(self, lines: Sequence[bytes] | bytes) -> int:
        """Count the lines, from the first on, that hold nothing new, and what they hold.

        Of lines in one text, none where one of them holds something new.
        """
        if self._rows is None and self.num_keys and (not self._is_new or self.num_keys <= _STEADY_KEYS):
            self._rows = _ScannedRow(self.root)
        if self._rows is None or (decoder := self._rows.decoder) is None:
            return 0
        rows, counted = list[Any](), list[_Counted]()
        with suppress(*NOT_READ):  # rows before a line that is refused stay
            rows.extend(
                decoder.decode_lines(lines) if isinstance(lines, bytes) else map(decoder.decode, lines)
            )
        if not self._rows.count(rows, counted):
            return 0
        for seen, present, elements in counted:
            seen.present += present
            self._num_elements += elements
        return len(rows)

    def _learn(self, lines: Sequence[bytes], positions: Sequence[int]) -> None:
        """Look at lines, which begin at these bytes of the file, value by value."""
        self._is_new = False
        for line, position in zip(lines, positions, strict=False):
            with faults_of_line(position):
                self._see_items(self.root, items_of(line), position, level=1)
        if self._is_new:
            self._rows = None

    def _see_items(self, seen: SchemaInferrer, items: Mapping[str, Text], position: int, level: int) -> None:
        """Note the values of an object's keys."""
        for key, text in items.items():
            child = seen.children.get(key)
            if child is None:
                self.num_keys += 1
                if self.num_keys > self._max_keys:
                    reason = f"with this line there are more than {self._max_keys} different keys"
                    raise LineError(position, f"{reason}; {_FEWER_KEYS}")
                child = seen.children[key] = SchemaInferrer()
                self._is_new = True
            self._see(child, bytes(text), position, level)

    def _see(self, seen: SchemaInferrer, text: bytes, position: int, level: int) -> None:
        if text == b"null":
            return
        seen.present += 1
        if text[:1] == b"{":
            kinds = {OBJECT if level < MAX_LEVELS else NESTED}
        elif text[:1] == b"[":
            numbers = _numbers_in(text)
            self._num_elements += len(numbers or ())
            kinds = {NESTED} if numbers is None else {LIST, *_kinds_of(numbers)}
        else:
            kinds = {VALUE, *_kinds_of([_scalar_in(text)])}
        for kind in kinds - seen.first.keys():
            seen.first[kind], self._is_new = position, True
        if OBJECT in kinds:
            self._see_items(seen, items_of(text), position, level + 1)


def note_doubled(doubled: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON of which a key that it has twice is noted."""
    known = dict(pairs)
    if len(known) < len(pairs):
        doubled.append(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return known


def _check_utf8(piece: bytes, position: int) -> None:
    """Raise where a line is not UTF-8: msgspec does not look into what it passes over."""
    if piece.isascii():
        return
    try:
        bytes_array([piece], pa.large_string()).validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        for line in piece.split(b"\n"):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise LineError(position, f"this line is not UTF-8: {error}") from error
            position += len(line) + 1


def _numbers_in(text: bytes) -> list[Any] | None:
    """The elements of a list of numbers, bools and nulls; None of another list."""
    try:
        return _numbers.decode(text)
    except msgspec.ValidationError as error:
        if "out of range" not in str(error):
            return None
    except NOT_READ:
        pass
    values = json.loads(text)
    return None if any(isinstance(value, str | list | dict) for value in values) else values


def _scalar_in(text: bytes) -> Any:
    try:
        return _scalar.decode(text)
    except NOT_READ:
        return json.loads(text)


def _kinds_of(values: Sequence[Any]) -> set[str]:
    """The kinds of numbers, bools and texts; of nulls none."""
    types = set(map(type, values)) - {type(None)}
    kinds = {_KINDS[kind] for kind in types}
    if int in types:
        integers = values if len(types) == 1 and None not in values else [v for v in values if type(v) is int]
        kinds |= integer_kinds(min(integers), max(integers))
    if str in types and len(values) == 1 and not _is_utf8(values[0]):
        kinds.add(SURROGATE)
    return kinds


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_Counted = tuple[SchemaInferrer, int, int]
"""A key in lines that may hold nothing new, the lines that hold a value of it, and elements of its lists."""


class _ScannedRow:
    """A conversion of lines to rows of what was seen so far.

    Args:
        seen: in the objects that become rows. Where msgspec cannot look for a key, `decoder` is None.
    """

    def __init__(self, seen: SchemaInferrer) -> None:
        self.children = list(seen.children.values())
        self.inner = [_ScannedRow(child) if child.is_object else None for child in self.children]
        self.type: Any = None
        if all(row is None or row.type is not None for row in self.inner):
            types = [
                row.type | None if row else _scanned_type(child)
                for row, child in zip(self.inner, self.children, strict=True)
            ]
            self.type = row_type(list(seen.children), types, only=True)
        self.decoder = msgspec.json.Decoder(self.type) if self.type else None

    def count(self, rows: Sequence[Any], counted: list[_Counted]) -> bool:
        """Count the values; return whether the rows hold no kinds but those that were seen."""
        return all(self._count(rows, number, counted) for number in range(len(self.children)))

    def _count(self, rows: Sequence[Any], number: int, counted: list[_Counted]) -> bool:
        seen, inner, values = self.children[number], self.inner[number], values_of(rows, number)
        if inner is None and _scanned_type(seen) is msgspec.Raw:
            texts = RawTexts(values)
            kinds, elements = (
                _kinds_of_lists(texts) if seen.shapes == {LIST} else (_shapes_of(seen, texts), 0)
            )
            counted.append((seen, len(values) - int(texts.missing.sum()), elements))
            return kinds <= seen.first.keys()
        if None in values:
            values = [value for value in values if value is not None]
        present, is_list = len(values), seen.shapes == {LIST}
        if is_list:
            values = list(chain.from_iterable(values))
        counted.append((seen, present, len(values) if is_list else 0))
        if inner is not None:
            return not values or inner.count(values, counted)
        return _kinds_of(values) <= seen.first.keys()


def _kinds_of_lists(texts: RawTexts) -> tuple[set[str], int]:
    """The kinds of what lists hold, and how many there are; of what is no list of numbers, `NESTED`."""
    pair = texts.integers(np.dtype(np.int64))
    if pair is not None:
        numbers, _ = pair
        low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
        if low > _LEAST and high < _GREATEST:
            return integer_kinds(low, high), len(numbers)
    try:
        lists = texts.values(_lists_of_numbers)
    except NOT_READ:
        return {NESTED}, 0
    values = list(chain.from_iterable(items for items in lists if items is not None))
    return _kinds_of(values), len(values)


def _shapes_of(seen: SchemaInferrer, texts: RawTexts) -> set[str]:
    """The shapes of nested values that were not seen; those without a common type are alike."""
    firsts = texts.first_bytes(np.flatnonzero(~texts.missing))
    return {OBJECT} if seen.shapes <= {LIST, NESTED} and (firsts != ord("[")).any() else set()


def _scanned_type(seen: SchemaInferrer) -> Any:
    if not seen.shapes:
        return None
    if seen.shapes == {VALUE}:
        return _SCALAR
    is_of_integers = INTEGER in seen.first and FRACTION not in seen.first and BOOL not in seen.first
    return _NUMBERS | None if seen.shapes == {LIST} and not is_of_integers else msgspec.Raw
