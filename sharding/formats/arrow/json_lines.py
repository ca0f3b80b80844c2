"""Lines of JSON as Arrow columns of a given schema, each line parsed for itself.

msgspec reads a piece of many lines in one call, only the wanted keys, into a row of the types that the schema
names; a column of the rows then becomes an array in one call. What nests deeper stays the text that it is in
its line. msgspec is stricter than `json.loads`, which says what a line means: where it refuses a piece (NaN,
Infinity, numbers beyond a float, half of a surrogate pair), each line of that piece has a second look by the
json module, at a tenth of the speed.

A piece is small, so that other threads get the interpreter lock in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.arrow_arrays import bool_array
from sharding.formats.arrow.json_arrays import RawTexts, Text, array_of, integer_lists
from sharding.formats.arrow.json_types import JSON_TEXT, UNREADABLE
from sharding.formats.arrow.schema import is_list, is_text, leaves

NOT_READ = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors that msgspec raises of text that is not JSON as it takes it, or does not fit."""
PIECE_BYTES = 256 << 10
MOST_CELLS = 4 << 20
"""Rows times keys at a time: each takes 8 bytes, also where a line lacks the key."""
SPACE = b" \t\r\n"
_LINE_END, _MARK_START = b"\n\xef"
_MARKS = re.compile(rb"(?m)^(?:\xef\xbb\xbf)+")
_NAMELESS = re.compile(r'[\\"\x00-\x1f]')
"""In a key that msgspec cannot look for: how it is escaped is not its only spelling."""
_items = msgspec.json.Decoder(dict[str, msgspec.Raw])
_after = json.JSONDecoder().raw_decode
_GAP = re.compile(r"[ \t\r\n]*")


class LineError(Exception):
    """A line that cannot be read.

    Args:
        at: where it begins, in bytes of the text.
        reason: why, in words.
    """

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(at, reason)
        self.at, self.reason = at, reason


def pieces(text: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of whole lines, each with its offset; byte order marks before lines become spaces."""
    view, offset = memoryview(text), 0
    while offset < len(view):
        piece = bytes(view[offset : offset + PIECE_BYTES])
        while offset + len(piece) < len(view) and not (end := piece.rfind(b"\n") + 1):
            piece = bytes(view[offset : offset + 2 * len(piece)])
        if offset + len(piece) < len(view):
            piece = piece[:end]
        yield offset, _without_marks(piece)
        offset += len(piece)


def _without_marks(piece: bytes) -> bytes:
    if piece.isascii():
        return piece
    raw = np.frombuffer(piece, np.uint8)
    starts = np.flatnonzero(raw[:-1] == _LINE_END) + 1  # a search for all three bytes takes longer
    if raw[0] != _MARK_START and not (raw[starts] == _MARK_START).any():
        return piece
    return _MARKS.sub(lambda marks: b" " * len(marks[0]), piece)


def lines_of(piece: bytes) -> list[bytes]:
    """The lines that are not blank."""
    return [line for line in piece.split(b"\n") if line.strip(SPACE)]


def starts_of_lines(piece: bytes) -> NDArray[np.int64]:
    """Return where the lines begin that `lines_of` gives, in bytes of the piece."""
    lines = piece.split(b"\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    return starts[[bool(line.strip(SPACE)) for line in lines]]


@contextmanager
def faults_of_line(offset: int) -> Iterator[None]:
    """Turn what `items_of` raises of the line that begins at a byte into `LineError`."""
    try:
        yield
    except RecursionError as error:
        reason = "this line is nested too deeply to be read; write deep values as a string of JSON"
        raise LineError(offset, reason) from error
    except _UnfitLineError as error:
        raise LineError(offset, str(error)) from error
    except ValueError as error:
        raise LineError(offset, f"this line is not JSON: {error}") from error


class _UnfitLineError(ValueError):
    """JSON that is no object, or not what was indexed."""


def items_of(text: Text) -> Mapping[str, Text]:
    """The keys of an object, with the text of their values; of a key that is there twice the last.

    Raises:
        ValueError: the text is no object.
        RecursionError: it is nested too deeply.
    """
    try:
        items: Mapping[str, Text] = _items.decode(text)
    except NOT_READ:
        return _items_by_json(bytes(text))
    return items


def _items_by_json(encoded: bytes) -> dict[str, Text]:
    text = encoded.decode()
    if not isinstance(json.loads(text), dict):
        raise _UnfitLineError("this line is not a JSON object")
    items: dict[str, Text] = {}
    index = _beyond(text, 0) + 1  # the text is known to be right, so only commas and colons lie in between
    while text[index := _beyond(text, index)] != "}":
        if text[index] == ",":
            index = _beyond(text, index + 1)
        key, index = _after(text, index)
        start = _beyond(text, _beyond(text, index) + 1)
        index = _after(text, start)[1]
        key.encode()  # raises: half of a surrogate pair is no name
        items[key] = text[start:index].encode()
    return items


def _beyond(text: str, index: int) -> int:
    gap = _GAP.match(text, index)
    assert gap is not None
    return gap.end()


def field_name(number: int) -> str:
    """The attribute of a row that holds the value of its key of this number."""
    return f"f{number}"


def row_type(keys: Sequence[str], types: Sequence[Any], *, only: bool = False) -> type[msgspec.Struct] | None:
    """Return the type msgspec makes of a line: each key's value, `None` or no text where it is lacking.

    `only`: refuse other keys. None where msgspec cannot look for a key.
    """
    if any(map(_NAMELESS.search, keys)):
        return None
    names = [field_name(number) for number in range(len(keys))]
    default = [msgspec.Raw() if kind is msgspec.Raw else None for kind in types]
    return msgspec.defstruct(
        "Line",
        list(zip(names, types, default, strict=True)),
        rename=dict(zip(names, keys, strict=True)),
        forbid_unknown_fields=only,
        gc=False,
        eq=False,
    )


def values_of(rows: Sequence[Any], number: int) -> list[Any]:
    """The values of one key, by row."""
    return list(map(attrgetter(field_name(number)), rows))


class LineReader:
    """Reads lines into the columns of one schema. Thread-safe.

    Args:
        schema: what to read; keys that lines have besides are passed over, those that they lack are null.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._row = _Row(list(schema))
        self._most_rows = max(1, MOST_CELLS // max(1, len([*leaves(schema)])))

    def read(self, text: bytes | memoryview) -> tuple[pa.Table, int]:
        """The table, and how many lines it has, blank ones aside.

        Raises:
            LineError: a line is not JSON, or does not fit the schema.
        """
        batches, num_rows = [], 0
        for offset, piece in pieces(text):
            for rows in self._rows(piece, offset):
                num_rows += len(rows)
                batches.append(self._batch(rows, offset))
        return pa.Table.from_batches(batches, self.schema), num_rows

    def _rows(self, piece: bytes, offset: int) -> Iterator[list[Any]]:
        """The rows of a piece, as many at a time as may be in memory."""
        decode = self._row.decoder
        if decode is not None and piece.count(b"\n") < self._most_rows:
            try:
                yield decode.decode_lines(piece)
            except NOT_READ:
                yield self._row.read_lines(piece, offset)
            return
        lines = piece.split(b"\n")
        for first in range(0, len(lines), self._most_rows):
            some = b"\n".join(lines[first : first + self._most_rows])
            yield self._row.read_lines(some, offset)
            offset += len(some) + 1

    def _batch(self, rows: list[Any], offset: int) -> pa.RecordBatch:
        try:
            arrays = [self._row.array(rows, number) for number in range(len(self.schema))]
            return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise LineError(offset, f"these lines do not fit what was indexed: {error}") from error


class _Row:
    """A conversion of objects to rows, and of one key of many rows to an array."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self.fields = fields
        self.inner: list[_Row | None] = [
            _Row(list(field.type)) if pa.types.is_struct(field.type) else None for field in fields
        ]
        self._types: list[Any] = [
            inner.type | None if inner else _python_type(field.type)
            for field, inner in zip(fields, self.inner, strict=True)
        ]
        named = row_type([field.name for field in fields], self._types)
        self.is_named: bool = named is not None and all(inner.is_named for inner in self.inner if inner)
        kind = named or row_type([field_name(number) for number in range(len(fields))], self._types)
        assert kind is not None
        self.type: Any = kind
        self.decoder = msgspec.json.Decoder(kind) if self.is_named else None

    def read_lines(self, piece: bytes, offset: int) -> list[Any]:
        """The rows of lines that msgspec refuses together."""
        rows = []
        for line in piece.split(b"\n"):
            if line.strip(SPACE):
                rows.append(self._read(line, offset))
            offset += len(line) + 1
        return rows

    def _read(self, line: bytes, offset: int) -> Any:
        try:
            if self.decoder is not None:
                return self.decoder.decode(line)
        except NOT_READ:
            pass  # a second look
        with faults_of_line(offset):
            return self._of(items_of(line))

    def _of(self, items: Mapping[str, Text]) -> Any:
        values: list[Any] = []
        for field, inner, kind in zip(self.fields, self.inner, self._types, strict=True):
            text = items.get(field.name)
            if kind is msgspec.Raw:
                values.append(msgspec.Raw(bytes(text or b"")))
            elif text is None or bytes(text) == b"null":
                values.append(None)
            elif inner:
                values.append(inner._of(items_of(text)))
            else:
                value = json.loads(bytes(text))
                try:
                    values.append(msgspec.convert(value, kind))
                except msgspec.ValidationError as error:
                    what = f"column {field.name!r} of type {field.type} is {str(value)[:40]!r}"
                    raise _UnfitLineError(f"this line does not fit what was indexed: {what}") from error
        return self.type(*values)

    def array(self, rows: Sequence[Any], number: int) -> pa.Array:
        """The values of one key."""
        key, inner, values = self.fields[number], self.inner[number], values_of(rows, number)
        if key.type == JSON_TEXT:
            return pa.ExtensionArray.from_storage(key.type, RawTexts(values).array())
        if key.type == UNREADABLE:
            return pa.ExtensionArray.from_storage(key.type, pa.nulls(len(values)))
        if inner is None:
            return integer_lists(values, key.type) if _is_integers(key.type) else array_of(values, key.type)
        lacks = None
        if None in values:
            lacks, empty = bool_array(np.array([value is None for value in values])), inner.type()
            values = [empty if value is None else value for value in values]
        arrays = [inner.array(values, below) for below in range(len(inner.fields))]
        if not arrays:
            return pa.Array.from_buffers(key.type, len(values), [None])
        return pa.StructArray.from_arrays(arrays, fields=list(key.type), mask=lacks)


def _is_integers(kind: pa.DataType) -> bool:
    """Return whether a type is that of lists of integers, which stay text for longer."""
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def _python_type(kind: pa.DataType) -> Any:
    """Return the type msgspec makes of a value of an Arrow type, with `None` for null."""
    if kind in (JSON_TEXT, UNREADABLE) or _is_integers(kind):
        return msgspec.Raw
    if is_list(kind):
        return list[_python_type(kind.value_type)] | None  # type: ignore[misc]
    if pa.types.is_integer(kind) or is_text(kind):
        return (str if is_text(kind) else int) | None
    return {pa.bool_(): bool | None, pa.float64(): float | None, pa.null(): None}[kind]
