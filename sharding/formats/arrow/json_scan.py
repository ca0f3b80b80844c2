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
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

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


class TooManyKeysError(Exception):
    """More keys than allowed, with the line at whose byte `args[0]` there are."""


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
        self._is_known = False
        """True if the lines that were read last held nothing new."""
        self._is_steady = False
        """True if the last lines that were looked at brought nothing new."""

    def scan(self, text: bytes, offset: int) -> tuple[int, int]:
        """Look at the lines that begin at a byte of the file: how many, and elements of lists of numbers.

        Raises:
            LineError: a line is not JSON, or not an object; `at` counts from the file's beginning.
            TooManyKeysError: there are more keys.
        """
        num_rows = elements = 0
        for at, piece in pieces(text):
            _check_utf8(piece, offset + at)
            num_lines, count = self._look_at_keys(piece), 0
            if self._is_known and 0 <= num_lines * self.num_keys <= MOST_CELLS:
                count, of_all = self._scan_known(piece)
            if not count:
                num_lines, of_all = self._scan_lines(piece, offset + at)
            num_rows, elements = num_rows + num_lines, elements + of_all
            self._num_lines += num_lines
        return num_rows, elements

    def _look_at_keys(self, piece: bytes) -> int:
        """Count the lines, and note the first with a key twice; -1 where one is not one whole object."""
        text, counted, at, num_lines = np.frombuffer(piece, np.uint8), np.zeros(2, np.int64), 0, 0
        while True:
            keys = address_of(self._keys), 0 if self.doubled else _KEY_SLOTS, address_of(counted)
            answer = library().core_json_lines(address_of(text) + at, len(piece) - at, *keys)
            num_lines, at = num_lines + int(counted[0]), at + int(counted[1])
            if answer != _LINE_KEYS:
                return -1 if answer == _LINES_ODD else num_lines
            end, doubled = piece.find(b"\n", at) + 1 or len(piece), list[str]()
            try:
                json.loads(piece[at:end], object_pairs_hook=partial(note_doubled, doubled))
            except (ValueError, RecursionError):
                return -1
            num_lines, at = num_lines + 1, end
            if doubled:
                self.doubled = self._num_lines + num_lines, doubled[0]

    def _scan_lines(self, piece: bytes, at: int) -> tuple[int, int]:
        lines, elements, done = lines_of(piece), 0, 0
        self._is_known = True
        while done < len(lines):
            some = lines[done : done + max(1, MOST_CELLS // max(1, self.num_keys))]
            count, of_known = self._scan_known(some)
            elements += of_known
            done += count
            if count < len(some):
                if self._is_known:
                    self._is_known, starts = False, at + starts_of_lines(piece)
                some = lines[done : done + _LEARNED_LINES]
                elements += self._learn(some, starts[done : done + len(some)].tolist())
                done += len(some)
        return len(lines), elements

    def _scan_known(self, lines: Sequence[bytes] | bytes) -> tuple[int, int]:
        """Count the lines, from the first on, that hold nothing new, and elements of their lists.

        Of lines in one text, none where one of them holds something new.
        """
        if self._rows is None and self.num_keys and (self._is_steady or self.num_keys <= _STEADY_KEYS):
            self._rows = _ScannedRow.of(self.root)
        if self._rows is None or (decoder := self._rows.decoder) is None:
            return 0, 0
        rows, counted = list[Any](), _Counted()
        with suppress(*NOT_READ):  # rows before a line that is refused stay
            rows.extend(
                decoder.decode_lines(lines) if isinstance(lines, bytes) else map(decoder.decode, lines)
            )
        if not self._rows.count(rows, counted):
            return 0, 0
        for seen, present in counted.present:
            seen.present += present
        return len(rows), counted.elements

    def _learn(self, lines: Sequence[bytes], positions: Sequence[int]) -> int:
        """Look at lines, which begin at these bytes of the file, value by value; elements of lists."""
        learned = _Learned(self)
        for line, at in zip(lines, positions, strict=False):
            with faults_of_line(at):
                learned.see_items(self.root, items_of(line), at, level=1)
        if learned.is_new:
            self._rows = None
        self._is_steady = not learned.is_new
        return learned.elements

    def new_key(self, at: int) -> SchemaInferrer:
        """Count one more key."""
        self.num_keys += 1
        if self.num_keys > self._max_keys:
            raise TooManyKeysError(at)
        return SchemaInferrer()


def note_doubled(doubled: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON of which a key that it has twice is noted."""
    known = dict(pairs)
    if len(known) < len(pairs):
        doubled.append(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return known


def _check_utf8(piece: bytes, at: int) -> None:
    """Raise where a line is not UTF-8: msgspec does not look into what it passes over."""
    if piece.isascii():
        return
    offsets = np.array([0, len(piece)], np.int64)
    texts = pa.Array.from_buffers(pa.large_string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(piece)])
    try:
        texts.validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        for line in piece.split(b"\n"):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise LineError(at, f"this line is not UTF-8: {error}") from error
            at += len(line) + 1


@dataclass
class _Learned:
    """Looks at values one by one."""

    scanner: LineScanner
    is_new: bool = False
    elements: int = 0

    def see_items(self, seen: SchemaInferrer, items: Mapping[str, Text], at: int, level: int) -> None:
        """Note the values of an object's keys."""
        for key, text in items.items():
            child = seen.children.get(key)
            if child is None:
                child = seen.children[key] = self.scanner.new_key(at)
                self.is_new = True
            self._see(child, bytes(text), at, level)

    def _see(self, seen: SchemaInferrer, text: bytes, at: int, level: int) -> None:
        if text == b"null":
            return
        seen.present += 1
        if text[:1] == b"{":
            if level < MAX_LEVELS:
                self._record(seen, [OBJECT], at)
                self.see_items(seen, items_of(text), at, level + 1)
            else:
                self._record(seen, [NESTED], at)
        elif text[:1] == b"[":
            numbers = _numbers_in(text)
            self.elements += 0 if numbers is None else len(numbers)
            self._record(seen, [NESTED] if numbers is None else [LIST, *_kinds_of(numbers)], at)
        else:
            self._record(seen, [VALUE, *_kinds_of([_scalar_in(text)])], at)

    def _record(self, seen: SchemaInferrer, kinds: Sequence[str], at: int) -> None:
        for kind in kinds:
            if kind not in seen.first:
                seen.first[kind] = at
                self.is_new = True


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
    kinds = {_KINDS[one] for one in types}
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


@dataclass
class _Counted:
    """The counts of what a piece holds that may hold nothing new."""

    present: list[tuple[SchemaInferrer, int]] = field(default_factory=list)
    elements: int = 0


@dataclass
class _ScannedRow:
    """A conversion of lines to rows of what was seen so far."""

    children: Sequence[SchemaInferrer]
    inner: Sequence[_ScannedRow | None]
    type: Any
    """The type of a row; None where msgspec cannot look for a key."""

    @classmethod
    def of(cls, seen: SchemaInferrer) -> _ScannedRow:
        """Make the row of objects in which this was seen."""
        children = list(seen.children.values())
        inner = [cls.of(child) if child.is_object else None for child in children]
        if any(one is not None and one.type is None for one in inner):
            return cls(children, inner, None)
        types = [
            one.type | None if one else _scanned_type(child)
            for one, child in zip(inner, children, strict=True)
        ]
        return cls(children, inner, row_type(list(seen.children), types, only=True))

    def __post_init__(self) -> None:
        self.decoder = msgspec.json.Decoder(self.type) if self.type else None

    def count(self, rows: Sequence[Any], counted: _Counted) -> bool:
        """Count the values; return whether the rows hold no kinds but those that were seen."""
        return all(self._count(rows, number, counted) for number in range(len(self.children)))

    def _count(self, rows: Sequence[Any], number: int, counted: _Counted) -> bool:
        seen, inner, values = self.children[number], self.inner[number], values_of(rows, number)
        if inner is None and _scanned_type(seen) is msgspec.Raw:
            texts = RawTexts(values)
            counted.present.append((seen, len(values) - int(texts.missing.sum())))
            return _holds_integers(seen, texts, counted) if seen.shapes == {LIST} else _holds(seen, texts)
        if None in values:
            values = [value for value in values if value is not None]
        counted.present.append((seen, len(values)))
        if inner is not None:
            return not values or inner.count(values, counted)
        if seen.shapes == {LIST}:
            values = list(chain.from_iterable(values))
            counted.elements += len(values)
        return _kinds_of(values) <= seen.first.keys()


def _holds_integers(seen: SchemaInferrer, texts: RawTexts, counted: _Counted) -> bool:
    """Return whether lists hold integers only, of the kinds that were seen."""
    found = texts.integers(np.dtype(np.int64))
    if found is not None:
        numbers, _ = found
        low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
        if low > _LEAST and high < _GREATEST:
            counted.elements += len(numbers)
            return integer_kinds(low, high) <= seen.first.keys()
    try:
        lists = texts.values(_lists_of_numbers)
    except NOT_READ:
        return False
    values = list(chain.from_iterable(one for one in lists if one is not None))
    counted.elements += len(values)
    return _kinds_of(values) <= seen.first.keys()


def _holds(seen: SchemaInferrer, texts: RawTexts) -> bool:
    """Return whether nested values have shapes that were seen; those without a common type are alike."""
    firsts = set(np.unique(texts.first_bytes(np.flatnonzero(~texts.missing))).tolist())
    return not seen.shapes <= {LIST, NESTED} or firsts <= {ord("[")}


def _scanned_type(seen: SchemaInferrer) -> Any:
    if not seen.shapes:
        return None
    if seen.shapes == {VALUE}:
        return _SCALAR
    is_of_integers = INTEGER in seen.first and FRACTION not in seen.first and BOOL not in seen.first
    return _NUMBERS | None if seen.shapes == {LIST} and not is_of_integers else msgspec.Raw
